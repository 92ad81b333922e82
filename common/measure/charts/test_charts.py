"""python3 -m unittest, in this folder."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden"
sys.path.insert(0, str(HERE))

import charts  # noqa: E402
import memory  # noqa: E402
from figure import (CARD, COLOURS, FAINT, LOG, MARGIN, NARROW, SIZE, Bar, Bars, Bound,  # noqa: E402
                    Canvas, Chart, Line, Lines, Point, Scale, Table, contrast, labelled, legible, push_apart, render,
                    significant, summary, text_width)
from results import (BadResults, Results, Row, Spread, complete, load, median, ratio, record,  # noqa: E402
                     write_all)


class Drawn:
    """What a drawing holds: its texts with their styles, and its axes."""

    def __init__(self, chart: Chart, context: dict[str, str], **how: Any) -> None:
        self.canvases: list[Canvas] = []
        self.texts: list[tuple[float, str, dict[str, Any]]] = []  # x, words, style
        self.axes: list[Any] = []
        drawn, write, frame, start = self, Canvas.text, Canvas.axes, Canvas.__init__

        def text(canvas: Canvas, x: float, y: float, words: str, **style: object) -> None:
            drawn.texts.append((x, words, style))
            write(canvas, x, y, words, **style)

        def axes(*place: Any) -> Any:
            drawn.axes.append(frame(*place))
            return drawn.axes[-1]

        def init(canvas: Canvas, width: float, height: float) -> None:
            start(canvas, width, height)
            drawn.canvases.append(canvas)
        with mock.patch.object(Canvas, "text", text), mock.patch.object(Canvas, "axes", axes), \
                mock.patch.object(Canvas, "__init__", init), mock.patch("matplotlib.figure.Figure.savefig"):
            render(chart, context, **how)

    def words(self) -> str:
        return " ".join(words.replace("\n", " ") for _, words, _ in self.texts)

    def ticks(self) -> list[str]:
        return [label.get_text() for axes in self.axes for axis in (axes.xaxis, axes.yaxis)
                for label in axis.get_ticklabels()]


def recorded_charts() -> Iterator[tuple[str, Chart, dict[str, str]]]:
    """All that the chapters show, and the ladder."""
    found = []
    for stage in sorted(HERE.parents[2].glob("0?_*")):
        for path in charts.recorded(stage):
            results = complete(path)
            found.append((stage, results))
            for item in charts.figures(stage, results):
                if isinstance(item, Chart):
                    yield f"{stage.name} {item.name}", item, results.context
    yield "ladder", charts.ladder_chart(found), {}


def tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    """charts.py with these arguments, without the time that a new Python takes."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = charts.main([str(argument) for argument in arguments])
        except SystemExit as end:  # wrong usage
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


class WithStage(unittest.TestCase):
    """A temporary course with one stage, made of the golden files."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.stage = self.root / "01_example"
        shutil.copytree(GOLDEN / "check", self.stage / "check")
        (self.stage / "results").mkdir()
        (self.stage / "README.md").write_text("Before\n<!-- table:cost -->\nold\n<!-- end -->\nAfter\n")
        self.raw: dict[str, Any] = json.loads((GOLDEN / "results.json").read_text())
        self.src = self.root / "raw.json"

    def write(self, data: object) -> Path:
        self.src.write_text(data if isinstance(data, str) else json.dumps(data))
        return self.src

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())

    def contents(self) -> dict[str, bytes]:
        return {name: (self.root / name).read_bytes() for name in self.files()}

    def refused(self, *arguments: object, says: str) -> None:
        before = self.contents()
        done = tool(*arguments)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertIn(says, done.stderr)
        self.assertEqual(self.contents(), before, "something was left behind, or replaced")


class Loading(WithStage):
    def bad(self, says: str, **changes: object) -> None:
        """The first row with these changes makes the file unusable."""
        data = copy.deepcopy(self.raw)
        data["benchmarks"][0] |= changes
        self.bad_file(says, data)

    def bad_file(self, says: str, data: object) -> None:
        with self.assertRaisesRegex(BadResults, says) as caught:
            load(self.write(data))
        self.assertNotIn("\n", str(caught.exception))

    def test_broken_files(self) -> None:
        with self.assertRaisesRegex(BadResults, "no such file"):
            load(self.root / "absent.json")
        self.bad_file("not JSON", '{"context": {')
        self.bad_file("not JSON", "")
        self.bad_file("no list 'benchmarks'", [])
        self.bad_file("no rows", self.raw | {"benchmarks": []})
        self.bad_file("no rows", self.raw | {"benchmarks": [self.raw["benchmarks"][0] | {"run_type": "aggregate"}]})

    def test_bad_rows(self) -> None:
        self.bad("flops = nan", flops=float("nan"))
        self.bad("real_time = inf", real_time=float("inf"))
        self.bad("real_time = -1.0, which cannot be", real_time=-1.0)
        self.bad("no real_time", time_unit="hours")
        self.bad("is not stage/what", run_name="stage00/forward")
        self.bad("is not stage/what", run_name="stage00/forward/naive/N1024/f32")
        twice = self.raw | {"benchmarks": [self.raw["benchmarks"][0]] * 2}
        self.bad_file("repetition 0 twice", twice)

    def test_bad_context(self) -> None:
        self.bad_file("no 'machine'", {"benchmarks": self.raw["benchmarks"]})
        for key in ("machine", "device", "commit", "flop_formula"):
            context = {name: value for name, value in self.raw["context"].items() if name != key}
            self.bad_file(f"no '{key}'", self.raw | {"context": context})
        self.bad_file("cannot name a file", self.raw | {"context": self.raw["context"] | {"machine": "../../x"}})

    def test_errored_rows_give_no_figure(self) -> None:
        error = {"run_name": "stage01/forward/x/N:1/f32", "run_type": "iteration", "error_occurred": True,
                 "error_message": "two\nlines", "real_time": float("nan"), "time_unit": "ns"}
        results = load(self.write(self.raw | {"benchmarks": [*self.raw["benchmarks"], error]}))
        self.assertEqual(results.errors, [("stage01/forward/x/N:1/f32", "two\nlines")])
        self.assertEqual(len(results.rows), len(self.raw["benchmarks"]))
        self.bad_file("every row is an error, the first: two lines", self.raw | {"benchmarks": [error]})

    def test_names_lose_the_suffixes_of_google_benchmark(self) -> None:
        raw = self.raw["benchmarks"][0] | {
            "run_name": "stage03/forward/fast/N:256/scores:1e3/f32"
                        "/min_time:0.100/iterations:1/repeats:5/manual_time/threads:1"}
        row = load(self.write(self.raw | {"benchmarks": [raw]})).rows[0]
        self.assertEqual(row.name, "stage03/forward/fast/N:256/scores:1e3/f32")
        self.assertEqual((row.keys, row.dtype, row.time), ({"N": 256, "scores": 1000}, "f32", 4e-3))


class Numbers(unittest.TestCase):
    def rows(self, name: str, *times: float) -> list[Row]:
        return [Row(name, "s", "w", "v", {}, "f32", i, time, {}) for i, time in enumerate(times)]

    def test_rows_are_selected_by_words_and_by_the_lack_of_a_key(self) -> None:
        hot = Row("hot", "s", "w", "v", {"N": 1, "chip": "hot"}, "f32", 0, 1.0, {})
        plain = Row("plain", "s", "w", "v", {"N": 1}, "f32", 0, 1.0, {})
        results = Results(Path(), {}, [hot, plain], [])
        self.assertEqual(results.select(chip="hot"), [hot])
        self.assertEqual(results.select(chip=None), [plain])

    def test_ratio_pairs_repetitions(self) -> None:
        a, b = self.rows("a", 2, 20, 6), self.rows("b", 1, 10, 2)
        self.assertEqual(ratio(a, b, "time"), Spread(2, 2, 3))  # the ratio of the medians would be 3
        self.assertEqual(ratio(list(reversed(a)), b, "time"), Spread(2, 2, 3))
        for other in (b[:0], self.rows("b", 0), [*b, *a]):
            with self.assertRaises(BadResults):
                ratio(a, other, "time")

    def test_a_median_never_mixes_benchmarks(self) -> None:
        with self.assertRaisesRegex(BadResults, "would mix"):
            median(self.rows("a", 1) + self.rows("b", 2), "time")
        with self.assertRaisesRegex(BadResults, "no counter 'flops'"):
            median(self.rows("a", 1), "flops")

    def test_significant(self) -> None:
        self.assertEqual([significant(x) for x in (0, 0.01234, 1.2, 99.96, 1234, 1e-9)],
                         ["0", "0.0123", "1.20", "100", "1230", "1.00e-09"])


class Recording(WithStage):
    def test_cleans_and_sorts(self) -> None:
        self.raw["benchmarks"].reverse()
        self.raw["benchmarks"][0]["flops"] = 123456789.123
        self.raw["benchmarks"].append(self.raw["benchmarks"][0] | {"run_type": "aggregate"})
        target = self.root / "out.json"
        record(self.write(self.raw), target)
        text = target.read_text()
        for private in ("host_name", "a-private-host", "executable", "/a/private/path", "aggregate"):
            self.assertNotIn(private, text)
        self.assertIn("123457000.0", text)
        order = [(row.name, row.repetition) for row in load(target).rows]
        self.assertEqual(order, sorted(order))
        again = self.root / "again.json"
        record(target, again)
        self.assertEqual(again.read_bytes(), target.read_bytes())

    def test_whole_or_not_at_all(self) -> None:
        before = self.files()
        with self.assertRaisesRegex(BadResults, "cannot be written"):
            record(GOLDEN / "results.json", self.root / "absent" / "out.json")
        with mock.patch("os.replace", side_effect=PermissionError(13, "no")), self.assertRaises(BadResults):
            record(GOLDEN / "results.json", self.root / "out.json")
        with mock.patch("results.MAX_BYTES", 100), self.assertRaisesRegex(BadResults, "the limit is 100"):
            record(GOLDEN / "results.json", self.root / "out.json")
        self.assertEqual(self.files(), before)

    def test_refuses_errored_rows(self) -> None:
        self.raw["benchmarks"][3] |= {"error_occurred": True, "error_message": "wrong result"}
        self.write(self.raw)
        self.refused("record", self.src, self.stage, says="reported an error: wrong result")


class Refusing(WithStage):
    """A measurement that is not complete and plausible: one line, and what was recorded before is still there."""

    def setUp(self) -> None:
        super().setUp()
        self.recorded = self.stage / "results" / "example-cpu.json"
        record(GOLDEN / "results.json", self.recorded)
        self.raw["context"] |= {"size": "full", "rows": "10"}
        for family, name in enumerate(dict.fromkeys(row["name"] for row in self.raw["benchmarks"])):
            for row in self.named(name):
                row |= {"family_index": family, "repetitions": len(self.named(name))}

    def named(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.raw["benchmarks"] if row["name"] == name]

    def nowhere(self, says: str) -> None:
        """Neither recorded, nor checked, nor drawn."""
        self.write(self.raw)
        self.refused("record", self.src, self.stage, says=says)
        self.refused("check", self.src, says=says)
        good = self.recorded.read_bytes()
        shutil.copy(self.src, self.recorded)
        self.refused("draw", self.stage, says=says)
        self.refused("ladder", "--out", self.root / "ladder.svg", self.stage, says=says)
        self.recorded.write_bytes(good)

    def test_what_is_complete_is_taken(self) -> None:
        self.write(self.raw)
        for arguments in (("check", self.src), ("check", self.src, "--size", "quick"),
                          ("check", self.src, "--size", "full"), ("record", self.src, self.stage)):
            done = tool(*arguments)
            self.assertEqual((done.returncode, done.stderr), (0, ""), arguments)

    def test_figures_that_cannot_be(self) -> None:
        first = copy.deepcopy(self.raw["benchmarks"][0])
        for says, changes in {"real_time = 0,": {"real_time": 0}, "flops = -5.0,": {"flops": -5.0},
                              "flops = 'NaN' as a text": {"flops": "NaN"}, "roof = 0,": {"roof": 0},
                              "roof = inf": {"roof": 10**400}, "no 'flops'": {"flops": None},
                              "no 'roof'": {"roof": None}}.items():
            self.raw["benchmarks"][0] = first | changes
            self.nowhere(says)

    def test_far_above_the_roof(self) -> None:
        rows = self.raw["benchmarks"][:3]
        rows[0]["flops"] = 50 * rows[0]["roof"]  # one disturbed round of three is what three are for
        self.assertEqual(tool("check", self.write(self.raw)).returncode, 0)
        for share, code in ((1.19, 0), (1.21, 1)):
            for row in rows:
                row["flops"] = share * row["roof"]
            self.assertEqual(tool("check", self.write(self.raw)).returncode, code, share)
        self.nowhere("is at 121 % of the roof")

    def test_missing_rows(self) -> None:
        everything = self.raw["benchmarks"]
        self.raw["benchmarks"] = everything[::2]
        self.nowhere("has 8 of 10 benchmarks")
        self.raw["benchmarks"] = [row for row in everything if row["repetition_index"] < 2]
        self.nowhere("has 2 of 3 repetitions")  # the last one of every row: each says that there are three
        for row in self.raw["benchmarks"]:
            row["repetitions"] = 1
        self.raw["benchmarks"] = everything[:5] + everything[6:]  # peers do not say it, but are as many as the others
        self.nowhere("has 2 of 3 repetitions")
        self.raw["benchmarks"] = everything[:3] + everything[6:]  # a point, in all its repetitions
        self.nowhere("has 9 of 10 benchmarks")
        del self.raw["context"]["rows"]
        self.nowhere("has 9 of 10 benchmarks")
        for row in self.raw["benchmarks"]:
            del row["family_index"]  # nothing says how many there are, but what was recorded has one more
        self.write(self.raw)
        self.refused("record", self.src, self.stage, says="lacks 1 of the benchmarks in")
        self.recorded.write_text("{")  # has nothing to lose
        self.assertEqual(tool("record", self.src, self.stage).returncode, 0)

    def test_an_error_in_every_repetition(self) -> None:
        for row in self.raw["benchmarks"][:3]:
            row |= {"error_occurred": True, "error_message": "wrong result"}
        self.nowhere("reported an error: wrong result")

    def test_the_size_that_was_asked_for(self) -> None:
        self.raw["context"]["size"] = "quick"
        self.write(self.raw)
        self.assertEqual(tool("check", self.src, "--size", "quick").returncode, 0)
        self.refused("check", self.src, "--size", "full", says="not measured with --full")
        self.raw["context"]["size"] = "smoke"
        self.nowhere("measured with --smoke")

    def test_broken_and_foreign_files(self) -> None:
        good = json.dumps(self.raw)
        foreign = "no list 'benchmarks'"
        for text in (good[:len(good) // 2], "", "\0\xff", "[" * 10000, '{"kernels": []}', "[]", "{}"):
            says = foreign if text.endswith(("]", "}")) else "not JSON"
            self.write(text)
            for arguments in (("check", self.src), ("record", self.src, self.stage),
                              ("summary", self.src, "--stage", self.stage)):
                self.refused(*arguments, says=says)
        self.refused("check", self.root / "absent.json", says="no such file")
        self.refused("check", self.root, says="cannot be read")

    def test_every_recorded_file_is_complete(self) -> None:
        for path in sorted(HERE.parents[2].glob("0?_*/results/*-*.json")):
            with self.subTest(path=path):
                complete(path)

    def test_the_page_warns(self) -> None:
        self.raw["context"]["busy"] = "this machine was busy (load 3.2 on 2 cores)"
        self.raw["benchmarks"] = self.raw["benchmarks"][:-1]
        measured = self.root / "measured"
        measured.mkdir()
        shutil.copy(self.write(self.raw), measured / "01_example.json")
        self.assertEqual(tool("page", self.root / "page.html", self.stage, "--measured", measured).returncode, 0)
        page = (self.root / "page.html").read_text()
        heading, warned = (page.index(words) for words in ('<h2 id="01_example">', '"warning">this machine was busy'))
        self.assertLess(heading, warned)
        self.assertLess(warned, page.index('<div class="pair">', heading))
        self.assertIn("it has 9 of 10 benchmarks", page)
        self.assertEqual(page.count('class="warning"'), 2)

    def test_a_full_disk(self) -> None:
        """As little as a file may grow, so little room is there: the large file is refused, no small one replaced."""
        good = self.recorded.read_bytes()
        self.write(self.raw)
        arguments = [sys.executable, str(HERE / "charts.py"), "record", str(self.src), str(self.stage)]
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # noqa: E731
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, preexec_fn=limit)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
        self.assertIn("cannot be written", done.stderr)
        self.assertEqual(self.recorded.read_bytes(), good)
        self.assertEqual([name for name in self.files() if name.endswith(".tmp")], [])
        small, large = self.stage / "small", self.stage / "large"
        small.write_text("old")
        with mock.patch("pathlib.Path.write_bytes", side_effect=[3, OSError(28, "No space left on device")]), \
                self.assertRaisesRegex(BadResults, "large: cannot be written: No space left"):
            write_all({small: b"new", large: b"large"})
        self.assertEqual(small.read_text(), "old")


class Drawing(WithStage):
    def test_golden_summary(self) -> None:
        done = tool("summary", GOLDEN / "results.json", "--stage", GOLDEN)
        self.assertEqual(done.stdout, (GOLDEN / "summary.txt").read_text())

    def test_record_draw_ladder_page(self) -> None:
        self.assertEqual(tool("record", GOLDEN / "results.json", self.stage).returncode, 0)
        first = tool("draw", self.stage, "--tables")
        self.assertEqual((first.returncode, first.stderr), (0, ""))
        drawing = self.stage / "results" / "example-cpu.cost.svg"
        content = drawing.read_bytes()
        readme = (self.stage / "README.md").read_text()
        self.assertTrue(readme.startswith("Before\n<!-- table:cost -->\n| N | Time (ms) |"), readme)
        self.assertTrue(readme.endswith("\n<!-- end -->\nAfter\n"), readme)
        drawing.unlink()
        tool("draw", self.stage, "--tables")
        self.assertEqual(drawing.read_bytes(), content, "same input, other bytes")
        self.assertEqual((self.stage / "README.md").read_text(), readme)

        self.assertEqual(tool("ladder", "--out", self.root / "ladder.svg", self.stage).returncode, 0)
        self.assertTrue((self.root / "ladder.svg").exists())

        measured = self.root / "measured"
        measured.mkdir()
        shutil.copy(GOLDEN / "results.json", measured / "01_example.json")
        empty = self.root / "02_empty"
        empty.mkdir()
        done = tool("page", self.root / "page.html", self.stage, empty, "--measured", measured)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        page = (self.root / "page.html").read_text()
        self.assertEqual(page.count("<img"), 6)  # two charts and the ladder, here and recorded
        for words in ("Not measured on this machine", "Nothing recorded", "2 cores"):
            self.assertIn(words, page)
        for private in ("a-private-host", "/a/private/path", "http://", "https://"):
            self.assertNotIn(private, page)
        self.assertTrue((measured / "01_example.example-cpu.cost.svg").exists())

    def pages(self, *stages: Path) -> str:
        """The page of these stages, measured here and recorded, where `learn` writes it."""
        shutil.copy(GOLDEN / "results.json", self.stage / "results" / "example-cpu.json")
        out = self.root / "build" / "charts" / "index.html"
        measured = out.parent / "measured"
        measured.mkdir(parents=True)
        shutil.copy(GOLDEN / "results.json", measured / "01_example.json")
        done = tool("page", out, *(stages or [self.stage]), "--measured", measured)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return out.read_text()

    def test_the_page_has_contents_and_links(self) -> None:
        later = self.root / "02_later"
        shutil.copytree(self.stage, later)
        page = self.pages(self.stage, later)
        contents = page[page.index("<nav>"):page.index("</nav>")]
        anchors = re.findall('href="#([^"]+)"', contents)
        self.assertEqual(anchors, ["ladder", "01_example", "01_example.cost", "01_example.accuracy", "02_later"])
        for anchor in anchors:
            self.assertEqual(page.count(f'id="{anchor}"'), 1, anchor)
        for words in ("measured here", "nothing yet", "Where the naive form fails"):
            self.assertIn(words, contents)
        links = re.findall('href="([^#"]+)"', page)
        self.assertEqual(links, ["../../01_example/README.md", "../../02_later/README.md"])
        for link in links:
            self.assertTrue((self.root / "build" / "charts" / link).is_file(), link)

    def test_the_page_says_what_to_see(self) -> None:
        page = self.pages()
        self.assertEqual(page.count('<p class="see">'), 3)  # two charts and the ladder
        for words in ("How much the maximum costs.", "Where the line ends.", "a share of its own machine&#x27;s peak"):
            self.assertEqual(page.count(words), 1, words)

    def test_the_page_shows_nothing_twice(self) -> None:
        (self.stage / "check" / "charts.py").write_text(
            "from figure import Chart, Line, Lines, Point\nfrom results import Spread\ndef charts(r):\n"
            "    line = Line('a', [Point(256, Spread(1, 1, 1)), Point(512, Spread(2, 2, 2))])\n"
            "    return [Chart('bytes', 'Bytes', [Lines('MiB', [line])], 's', 'Bytes.', counted=True)]\n")
        page = self.pages()
        self.assertEqual(page.count("<img"), 3)  # here and recorded: the ladder alone
        self.assertEqual(page.count("counted, not measured"), 1)
        self.assertEqual(page.count("Bytes."), 1)

    def test_a_chart_that_cannot_be_drawn_leaves_the_recorded_one(self) -> None:
        for row in self.raw["benchmarks"]:
            if "max_error" in row:
                row["max_error"] = 0.0
        self.write(self.raw)
        measured = self.root / "measured"
        measured.mkdir()
        shutil.copy(self.src, measured / "01_example.json")
        shutil.copy(GOLDEN / "results.json", self.stage / "results" / "example-cpu.json")
        self.assertEqual(tool("page", self.root / "page.html", self.stage, "--measured", measured).returncode, 0)
        page = (self.root / "page.html").read_text()
        self.assertIn("this machine: chart &#x27;accuracy&#x27;, panel &#x27;Largest relative error&#x27;: zero", page)
        self.assertEqual(page.count("<img"), 5)

    def test_the_page_has_contrast(self) -> None:
        page = self.pages()
        for colours in charts.PAGE_COLOURS.values():
            for name, colour in colours.items():
                self.assertIn(f"--{name}: {colour};", page)
                if name != "page":
                    self.assertGreaterEqual(contrast(colour, colours["page"]), 4.5, name)
        style = page[page.index("<style>"):page.index("</style>")]
        self.assertEqual(set(re.findall(r"[ {]color: ([^;]+);", style)), {"var(--ink)", "var(--link)", "var(--faint)"})
        self.assertNotIn("opacity", style)

    def test_one_line_for_bad_input(self) -> None:
        self.refused("draw", self.stage, says="nothing recorded")
        self.refused("ladder", "--out", self.root / "l.svg", self.stage, says="no stage has a recorded forward row")
        self.refused("page", self.root / "p.html", self.stage, "--measured", self.root / "no", says="no such folder")
        self.refused("draw", self.stage, "--results-name", "absent.json", says="no such file")
        shutil.copy(GOLDEN / "results.json", self.stage / "results" / "example-cpu.json")
        self.refused("draw", self.stage, "--results-name", GOLDEN / "results.json", "--tables", says="record it first")
        (self.stage / "README.md").write_text("no marks")
        self.refused("draw", self.stage, "--tables", says="<!-- table:cost -->")
        (self.stage / "check" / "charts.py").write_text("def charts(r):\n    return 1 / 0\n")
        self.refused("draw", self.stage, says="ZeroDivisionError: division by zero (line 2)")

    def test_missing_matplotlib(self) -> None:
        shutil.copy(GOLDEN / "results.json", self.stage / "results" / "example-cpu.json")
        program = ("import sys; sys.modules['matplotlib'] = None; "
                   f"sys.argv[0] = ''; sys.path.insert(0, {str(HERE)!r}); import charts; sys.exit(charts.main())")
        done = subprocess.run([sys.executable, "-c", program, "draw", str(self.stage)],
                              capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
        self.assertIn("python3-matplotlib", done.stderr)

    def test_wrong_usage(self) -> None:
        for arguments in ((), ("paint",), ("draw",), ("draw", self.root / "absent"), ("ladder", self.stage)):
            self.assertEqual(tool(*arguments).returncode, 2, arguments)

    def test_a_logarithmic_axis_refuses_zero(self) -> None:
        zero = Line("zero", [Point(256, Spread(0, 0, 0))])
        with self.assertRaisesRegex(BadResults, "logarithmic"):
            render(Chart("c", "t", [Lines("y", [zero])], "s"), {})
        with self.assertRaisesRegex(BadResults, "nothing to show"):
            render(Chart("c", "t", [Lines("y", [])], "s"), {})

    def test_bars_with_bounds(self) -> None:
        bars = [Bar("before", Spread(30, 29, 31), "30", "previous"), Bar("this", Spread(600, 590, 610), "600, ×20")]
        named = Bars("TFLOP/s", bars, "N 4096", "", [Bound("peer 623", 623.0), Bound("roof 780", 780.0)])
        text = summary(Chart("ladder", "t", [named], "s"), {})
        for words in ("before: 30 [29, 31] (30)", "bound 'peer 623': 623", "bound 'roof 780': 780"):
            self.assertIn(words, text)
        drawn = render(Chart("ladder", "t", [named], "s"), {})
        self.assertEqual(drawn, render(Chart("ladder", "t", [named], "s"), {}))
        self.assertIn(b"#8a8a8a", drawn)  # the previous stage is grey
        self.assertEqual(Drawn(Chart("ladder", "t", [named], "s"), {}).axes[0].get_xticks()[-1], 800)  # past the roof
        plain = Bars("share", bars, "x")  # a bound without a name takes no room
        self.assertNotIn("bound", summary(Chart("ladder", "t", [plain], "s"), {}))
        height = [float(re.search(rb'height="([0-9.]+)pt"', svg)[1]) for svg in
                  (drawn, render(Chart("ladder", "t", [plain], "s"), {}))]
        self.assertGreater(*height)

    def test_a_table_may_say_where_it_comes_from(self) -> None:
        shutil.copy(GOLDEN / "results.json", self.stage / "results" / "example-cpu.json")
        for name in ("kernels", "timeline", "timeline_backward", "ab", "ab_backward"):  # no machine's file
            (self.stage / "results" / f"{name}.json").write_text('{"kernels": []}')
        source = self.stage / "check" / "charts.py"
        source.write_text("from figure import Table\ndef charts(r):\n"
                          "    return [Table('cost', ['N'], [['1']], caption='What the compiler said.')]\n")
        self.assertEqual(tool("draw", self.stage, "--tables").returncode, 0)
        self.assertIn("\n\nWhat the compiler said.\n<!-- end -->", (self.stage / "README.md").read_text())
        self.assertEqual(Table("t", ["a"], []).caption, "")

    def test_what_chapters_show_can_be_read(self) -> None:
        """Wide in a chapter and narrow on the page: contrast, size, inside the card, a label at each tick."""
        for name, chart, context in recorded_charts():
            self.assertRegex(chart.see, r"^[a-zA-Z0-9].{30,}\.$", f"{name}: a sentence says what to look for")
            for narrow in (False, True):
                drawn = Drawn(chart, context, narrow=narrow)
                with self.subTest(chart=name, narrow=narrow):
                    self.assertNotIn("", drawn.ticks())
                    width = drawn.canvases[0].width
                    for x, words, style in drawn.texts:
                        size, bold = style.get("fontsize", SIZE), style.get("weight", "normal")
                        self.assertGreaterEqual(contrast(style.get("color", "#222222"), CARD), 4.5, words)
                        self.assertGreaterEqual(size, SIZE)
                        wide = text_width(words, size, bold)
                        left = x - wide * {"left": 0, "center": 0.5, "right": 1}[style.get("ha", "left")]
                        self.assertGreaterEqual(left, MARGIN - 6, words)
                        self.assertLessEqual(left + wide, width - MARGIN + 6, words)
        self.assertGreaterEqual(contrast(FAINT, CARD), 4.5)  # ticks
        self.assertGreaterEqual(SIZE * 388 / NARROW, 11)  # pixels, on a telephone 420 wide

    def test_contrast(self) -> None:
        self.assertAlmostEqual(contrast("#ffffff", "#000000"), 21)
        self.assertAlmostEqual(contrast("#767676", "#ffffff"), 4.54, places=2)
        for colour in (colour for colours in COLOURS.values() for colour in colours):
            self.assertGreaterEqual(contrast(legible(colour), CARD), 4.5)

    def test_panels_of_one_quantity_share_its_range(self) -> None:
        def panel(values: list[float], **how: Any) -> Lines:
            return Lines(how.pop("y_label", "TFLOP/s"),
                         [Line("a", [Point(2.0 ** (8 + k), Spread(v, v, v)) for k, v in enumerate(values)])], **how)

        def ranges(*panels: Lines, **how: Any) -> list[tuple[float, float]]:
            return [axes.get_ylim() for axes in Drawn(Chart("c", "t", panels, "s"), {}, **how).axes]
        one, other = panel([1, 2], where="d = 64"), panel([30, 40, 50], where="d = 128")
        memory, linear = panel([1, 2], y_label="GiB"), panel([1, 2], y_scale="linear")
        self.assertEqual(*ranges(one, other))
        self.assertEqual(*ranges(one, other, narrow=True))
        self.assertNotEqual(*ranges(other, memory))
        self.assertNotEqual(*ranges(other, linear))
        beside = Chart("c", "t", [other], "s")  # recorded, next to this machine's
        self.assertEqual(ranges(one, beside=[beside]), ranges(other, beside=[Chart("c", "t", [one], "s")]))
        self.assertEqual(len({axes.get_xlim() for axes in Drawn(Chart("c", "t", [one, other], "s"), {}).axes}), 1)
        bars = [Bars("t", [Bar("a", Spread(v, v, v), "")], "share") for v in (40, 244)]  # a busy machine, and another
        pair = [Chart("c", "t", [panel], "s") for panel in bars]
        ends = [Drawn(chart, {}, beside=pair).axes[0].get_xlim() for chart in pair]
        self.assertEqual(*ends)

    def test_logarithmic_axes_say_so(self) -> None:
        def marks(y: Scale, x: Scale) -> int:
            line = Line("a", [Point(x, Spread(x, x, x)) for x in (256, 512)])
            return Drawn(Chart("c", "t", [Lines("y", [line], y_scale=y, x_scale=x)], "s"), {}).words().count(LOG)
        self.assertEqual([marks("log10", "log2"), marks("linear", "log2"), marks("linear", "linear")], [2, 1, 0])

    def test_ticks_without_room_are_left_out_whole(self) -> None:
        self.assertEqual(labelled([0, 30, 60], [20, 20, 20]), [0, 1, 2])
        self.assertEqual(labelled([0, 20, 40], [20, 20, 20]), [0, 2])
        self.assertEqual(labelled([0, 20, 40, 60], [20, 20, 20, 20]), [1, 3])  # the last one stays
        self.assertEqual(labelled([0, 5], [20, 20]), [1])
        self.assertEqual(labelled([0], [20]), [0])

    def test_labels_are_pushed_apart(self) -> None:
        self.assertEqual(push_apart([50, 10], [10, 10], 0, 100), [50, 10])  # room enough: nothing moves
        self.assertEqual(push_apart([30, 30, 30], [10, 10, 10], 0, 100), [20, 30, 40])
        self.assertEqual(push_apart([0, 99], [10, 10], 0, 100), [5, 95])
        wanted, sizes = [5.0, 6.0, 7.0, 60.0, 61.0, 98.0, 99.0], [12.0] * 7
        centres = push_apart(wanted, sizes, 0, 100)
        self.assertEqual(centres, sorted(centres))
        self.assertGreaterEqual(min(b - a for a, b in zip(centres, centres[1:])), 12 - 1e-9)
        self.assertGreaterEqual(centres[0], 6 - 1e-9)
        self.assertLessEqual(centres[-1], 94 + 1e-9)


SVG = "{http://www.w3.org/2000/svg}"
COLOUR_NAMES = r"\b(?:red|orange|amber|yellow|green|teal|blue|purple|pink)\b"
NAMED = {"orange": "#d55e00", "blue": "#0072b2", "green": "#009e73"}  # what texts may call these colours


@dataclass(frozen=True)
class Words:
    text: str
    size: float
    colour: str
    behind: str


def written(path: Path) -> Iterator[Words]:
    """The texts of a picture, each with its size, its colour and that of what lies under its anchor."""
    root = ElementTree.parse(path).getroot()
    styles = {name: dict(re.findall(r"([a-z-]+): ([^;]+?) *(?:;|$)", body)) for style in root.iter(f"{SVG}style")
              for name, body in re.findall(r"\.(\w+) \{([^}]*)\}", style.text or "")}
    boxes: list[tuple[float, float, float, float, list[float], float]] = []

    def parts(colour: str) -> list[float]:
        colour = "#" + "".join(2 * digit for digit in colour[1:]) if len(colour) == 4 else colour
        return [int(colour[i:i + 2], 16) for i in (1, 3, 5)]

    def under(x: float, y: float) -> str:
        colour = [255.0] * 3
        for left, top, right, bottom, fill, alpha in boxes:
            if left <= x <= right and top <= y <= bottom:
                colour = [alpha * over + (1 - alpha) * old for over, old in zip(fill, colour)]
        return "#" + "".join(f"{round(part):02x}" for part in colour)

    def walk(node: ElementTree.Element, style: dict[str, str]) -> Iterator[Words]:
        style = style | dict(node.attrib) | styles.get(node.get("class", ""), {})
        fill, x, y = style.get("fill", "#000000"), float(node.get("x", 0)), float(node.get("y", 0))
        if node.tag == f"{SVG}rect" and fill != "none":
            boxes.append((x, y, x + float(node.get("width", 0)), y + float(node.get("height", 0)), parts(fill),
                          float(style.get("fill-opacity", 1))))
        if node.tag == f"{SVG}text":
            size = float(style.get("font-size", "16").removesuffix("px"))
            colour = "#" + "".join(f"{part:02x}" for part in parts(fill))
            yield Words("".join(node.itertext()), size, colour, under(x, y - 0.35 * size))
        for child in node:
            yield from walk(child, style)
    return walk(root, {})


class Recorded(unittest.TestCase):
    def test_the_chapters_machine_has_measured_most_rows(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            results = Path(name) / "results"
            results.mkdir()
            for machine, rows, text in (("few", 2, "of many words " * 99), ("many", 3, "short"), ("ab", 9, "no machine")):
                row = {"name": text, "run_type": "iteration"}
                (results / f"{machine}.json").write_text(json.dumps({"benchmarks": [row] * rows}))
            self.assertEqual([path.stem for path in charts.recorded(Path(name))], ["many", "few"])


class Pictures(unittest.TestCase):
    """Those that are drawn by hand or by a stage's own program, with letters as letters."""

    def test_drawn_ones_are_what_their_program_draws(self) -> None:
        folder = HERE.parents[2] / "00_naive" / "pictures"
        spec = importlib.util.spec_from_file_location("draw_00", folder / "draw.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        for name, drawn in module.pictures().items():
            with self.subTest(picture=name):
                self.assertEqual((folder / name).read_text(encoding="utf-8"), drawn)

    def test_texts_can_be_read(self) -> None:
        course = HERE.parents[2]
        pictures = [*course.glob("0?_*/pictures/*.svg"), *course.glob("0?_*/results/timeline*.svg"),
                    course / "docs" / "memory.svg"]
        self.assertGreater(len(pictures), 30)
        for path in pictures:
            content = path.read_text(encoding="utf-8").lower()
            with self.subTest(picture=str(path.relative_to(course))):
                for words in written(path):
                    self.assertGreaterEqual(words.size, 11, words)
                    self.assertGreaterEqual(contrast(words.colour, words.behind), 4.5, words)
                    for name in re.findall(COLOUR_NAMES, words.text.lower()):
                        self.assertIn(NAMED.get(name, "no such colour"), content, words)

    def test_levels_of_memory_are_those_recorded(self) -> None:
        picture = HERE.parents[2] / "docs" / "memory.svg"
        self.assertEqual(picture.read_text(encoding="utf-8"), memory.drawn(), "stale; run memory.py")


if __name__ == "__main__":
    unittest.main()
