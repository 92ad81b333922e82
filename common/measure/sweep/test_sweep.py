"""python3 -m unittest, in this folder. No GPU is needed; without PyTorch or matplotlib some tests are skipped."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
CHECK = HERE.parents[2] / "06_optimized" / "check"
sys.path[:0] = [str(HERE), str(CHECK)]

import sweep  # noqa: E402
import table  # noqa: E402
from results import BadResults, load  # noqa: E402  # table.py has put its folder on the path
from sweep import PART, Step, Sweep, chosen, measuring, report  # noqa: E402
from table import Cell, File, empty_row, figure_row  # noqa: E402

WRITES = "import sys, pathlib; p = pathlib.Path(sys.argv[1]); "


def program(text: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", WRITES + text, PART, *arguments)


class InFolder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = Path(folder.name)
        quiet = contextlib.redirect_stdout(io.StringIO())
        quiet.__enter__()
        self.addCleanup(quiet.__exit__, None, None, None)


class Steps(InFolder):
    def run_step(self, step: Step, minutes: float | None = None, **lacking: str) -> sweep.Outcome:
        return Sweep(self.out, lambda need: lacking.get(need, ""), minutes).run(step)

    def test_a_step_is_done_once(self) -> None:
        step = Step("one", (program("print('hello'); p.write_text('{}')"),), "one.json")
        self.assertEqual(self.run_step(step).state, "done")
        self.assertEqual((self.out / "one.json").read_text(), "{}")
        self.assertIn("hello", (self.out / "logs" / "one.log").read_text())
        self.assertFalse((self.out / "part.one.json").exists())
        self.assertEqual(self.run_step(step).state, "kept")
        (self.out / "one.json").write_text('{"context": {"commit": "abc"}}')
        self.assertIn("commit abc", self.run_step(step).words)
        (self.out / "one.json").unlink()
        self.assertEqual(self.run_step(step).state, "done")

    def test_what_fails_leaves_nothing_that_counts(self) -> None:
        for text, words in (("p.write_text('{}'); sys.exit('no memory')", "exit code 1: no memory"),
                            ("p.write_text('{')", "is no JSON"), ("pass", "is no JSON"),
                            ("sys.exit(4)", "exit code 4: it said nothing")):
            step = Step("bad", (program(text),), "bad.json")
            outcome = self.run_step(step)
            self.assertEqual(outcome.state, "failed")
            self.assertIn(words, outcome.words)
            self.assertFalse((self.out / "bad.json").exists())
        self.assertEqual(self.run_step(Step("no", (("/no/such/program",),))).state, "failed")
        (self.out / "bad.json").write_text('{"half": ')  # a file that was cut short is not kept
        self.assertEqual(self.run_step(Step("bad", (program("p.write_text('1')"),), "bad.json")).state, "done")

    def test_a_second_command_is_not_run_after_a_failure(self) -> None:
        step = Step("two", (program("sys.exit(3)"), program("p.write_text('{}')")), "two.json")
        self.assertIn("exit code 3: ", self.run_step(step).words)
        self.assertFalse((self.out / "part.two.json").exists())

    def test_some_tools_continue(self) -> None:
        grows = "p.write_text(str(10 * int(p.read_text() if p.exists() else 1))); sys.exit(p.read_text() < '1000')"
        for resumes, states in ((True, ["failed", "failed", "done"]), (False, ["failed"] * 3)):
            step = Step("grows", (program(grows),), f"grows{resumes}.json", resumes=resumes)
            self.assertEqual([self.run_step(step).state for _ in range(3)], states)

    def test_skipped_with_all_reasons(self) -> None:
        absent = self.out / "bench"
        step = Step("s", (), "s.json", ("gpu", "torch", "nvcc"), {absent: "cmake --build"}, begins_as="first.json")
        outcome = self.run_step(step, gpu="no GPU", torch="no PyTorch")
        self.assertEqual(outcome.state, "skipped")
        for words in ("no GPU; no PyTorch; ", f"{absent} is missing: cmake --build", "not made first.json"):
            self.assertIn(words, outcome.words)
        self.assertNotIn("nvcc", outcome.words)
        (self.out / "s.json").write_text("{}")  # what is there needs nothing
        self.assertEqual(self.run_step(step, gpu="no GPU").state, "kept")

    def test_a_step_works_on_a_copy_of_another_ones_output(self) -> None:
        (self.out / "first.json").write_text("1")
        step = Step("s", (program("p.write_text(p.read_text() + '2')"),), "s.json", begins_as="first.json")
        self.assertEqual(self.run_step(step).state, "done")
        self.assertEqual([(self.out / name).read_text() for name in ("first.json", "s.json")], ["1", "12"])

    def test_a_tool_that_takes_no_file_name(self) -> None:
        there = self.out / "elsewhere.json"
        step = Step("s", ((sys.executable, "-c", f"open({str(there)!r}, 'w').write('7')"),), "s.json", written_to=there)
        self.assertEqual(self.run_step(step).state, "done")
        self.assertEqual((self.out / "s.json").read_text(), "7")

    def test_the_time_is_over(self) -> None:
        step = Step("slow", (program("import time; p.write_text('{}'); time.sleep(60); (p.parent / 'late').touch()"),),
                    "slow.json", resumes=True)
        outcome = self.run_step(step, minutes=1 / 60)
        self.assertEqual((outcome.state, outcome.words), ("stopped", "the time is over; the next call continues it"))
        self.assertLess(outcome.seconds, 30)
        self.assertFalse((self.out / "slow.json").exists())

    def test_a_failure_does_not_stop_the_others_but_the_clock_does(self) -> None:
        good, bad = Step("good", (program("p.write_text('{}')"),), "good.json"), Step("bad", (program("sys.exit(1)"),))
        lacks = Step("lacks", (), "l.json", ("gpu",))
        outcomes = Sweep(self.out, lambda need: f"no {need}").run_all(lambda: [bad, lacks, good])
        self.assertEqual([o.state for o in outcomes], ["failed", "skipped", "done"])
        text = report(outcomes)
        self.assertIn("1 done, 1 skipped, 1 failed", text)
        self.assertIn("no gpu", text)
        late = Sweep(self.out, lambda need: "", minutes=0).run_all(lambda: [bad, lacks])
        self.assertEqual([o.state for o in late], ["stopped"])

    def test_the_real_steps(self) -> None:
        steps = measuring(Path("/build"))
        self.assertEqual(len({step.name for step in steps}), len(steps))
        self.assertEqual(len({step.output for step in steps}), len(steps))
        for step in steps:
            for words in step.commands:
                scripts = [Path(word) for word in words if word.endswith(".py")]
                self.assertTrue(all(path.is_file() for path in scripts), words)
                self.assertTrue(step.written_to or PART in words, words)
        self.assertEqual([step.name for step in chosen(steps, ["04", "06-ab", "table"])],
                         ["04-bench", "04-peers", "06-ab-forward", "06-ab-backward", "table"])
        self.assertEqual(chosen(steps, ["0"]), [])

    def test_what_is_measured_is_recorded_and_then_drawn(self) -> None:
        def names() -> list[str]:
            return [step.name for step in sweep.drawing(self.out)]
        self.assertFalse([name for name in names() if "record" in name])
        (self.out / "04.bench.json").write_text('{"context": {"machine": "nvidia-x"}}')
        self.assertLess(names().index("charts-record-04"), names().index("charts-04"))
        steps = {step.name: step for step in sweep.drawing(self.out)}
        self.assertIn(str(self.out / "04.bench.json"), steps["charts-record-04"].commands[0])
        self.assertIn("nvidia-x.json", steps["charts-04"].commands[0])
        (self.out / "04.json").write_text('{"context": {"machine": "nvidia-x"}}')
        steps = {step.name: step for step in sweep.drawing(self.out)}
        self.assertIn(str(self.out / "04.json"), steps["charts-record-04"].commands[0])

    def test_all_settings_that_are_recorded_are_asked_for(self) -> None:
        step = next(step for step in measuring(Path("/build")) if step.name == "06-compare")
        usual = {"--dtype": "bf16", "--groups": "1", "--chip": "hot,cool"}
        asked = set()
        for words in step.commands:
            options = usual | {key: value for key, value in zip(words, words[1:]) if key.startswith("--")}
            keys = (options[key].split(",") for key in ("--pass", "--dtype", "--groups", "--chip"))
            asked |= set(itertools.product(*keys))
        for path in (sweep.ROOT / sweep.STAGES["06"] / "results").glob("nvidia-*.json"):
            for row in load(path).rows:
                if row.stage in ("stage06", "peer"):
                    self.assertIn((row.what, row.dtype, f"{row.keys['G']}", row.keys["chip"]), asked)

    def test_command_line(self) -> None:
        def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, str(HERE / "sweep.py"), str(self.out / "build"), str(self.out / "out")]
            return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        listed = tool("--list", "--only", "04,table")
        self.assertEqual(listed.returncode, 0, listed.stderr)
        self.assertIn("--target stage04_bench", listed.stdout)
        self.assertNotIn("05-bench", listed.stdout)
        wrong = tool("--only", "07")
        self.assertEqual((wrong.returncode, wrong.stderr.count("\n")), (2, 1), wrong.stderr)
        skipped = tool("--only", "04-bench")
        self.assertEqual(skipped.returncode, 3, skipped.stderr)
        self.assertIn("1 skipped", (self.out / "out" / "report.txt").read_text())


MACHINE = "nvidia-h200"  # whose figures the chapters show


def recorded(root: Path) -> set[str]:
    """What measurements have left in stages 04 to 06 and docs; files of other machines are made like MACHINE's."""
    results = [root / stage / "results" for stage in sweep.STAGES.values()]
    others = tuple(f"{path.stem}." for folder in results for path in folder.glob("nvidia-*.json")
                   if path.stem != MACHINE)
    found = [path for folder in results for path in folder.rglob("*") if path.suffix in (".json", ".svg", ".md")]
    return {str(path.relative_to(root)) for path in (*found, *root.glob("docs/*.svg"))
            if not path.name.startswith(others)}


@unittest.skipUnless(importlib.util.find_spec("matplotlib"), "no matplotlib")
class Recorded(InFolder):
    def setUp(self) -> None:
        """A copy of the checkout where charts are empty, since drawing them takes long."""
        super().setUp()
        self.copy, self.results = self.out / "copy", self.out / "results"
        self.results.mkdir()
        unused = shutil.ignore_patterns("mine", "hunt", "pictures", "exercise", "*.cu*", "*.?pp", "__pycache__")
        for path in (sweep.ROOT / "docs", sweep.ROOT / "common", *sweep.ROOT.glob("0?_*")):
            shutil.copytree(path, self.copy / path.relative_to(sweep.ROOT), ignore=unused)
        with (self.copy / "common" / "measure" / "charts" / "figure.py").open("a") as figure:
            figure.write('\n\ndef render(chart, context):\n    return b"<svg/>"\n')

    def test_a_step_makes_every_recorded_file(self) -> None:
        """Results are taken away, put where the measuring steps leave them, and must come back; so must the tables."""
        outputs = {step.output for step in measuring(Path("/build"))}
        pages = {path: path.read_text() for path in self.copy.glob("0?_*/**/README.md")}
        for number, stage in sweep.STAGES.items():
            results = self.copy / stage / "results"
            made = {f"{number}.json": f"{MACHINE}.json"} | (sweep.RECORDED if number == "06" else {})
            self.assertLessEqual(set(made), outputs)
            for name, place in made.items():
                if (results / place).is_file():  # the big table may not be measured yet
                    shutil.move(results / place, self.results / name)
            for path in results.rglob("*"):
                if path.is_file() and path.suffix != ".txt":  # a text is measured by hand
                    path.unlink()
        for path in self.copy.glob("docs/*.svg"):
            path.unlink()
        tool = [sys.executable, self.copy / "common" / "measure" / "sweep" / "sweep.py", "build", self.results]
        done = subprocess.run([*tool, "--only", "charts"], capture_output=True, text=True, check=False)
        self.assertNotIn("failed", done.stdout + done.stderr)
        self.assertEqual(recorded(sweep.ROOT) - recorded(self.copy), set(), "no step of sweep.py makes these")
        for path, text in pages.items():
            self.assertEqual(path.read_text(), text, f"{path}: its tables are not those of what is recorded")


class Said(unittest.TestCase):
    """What the first comment of a kernel of stage 06 says it measured, in TFLOP/s."""

    # From slow to fast. A product's file has no number.
    PRODUCTS = ("fa2", "hopper")
    RUNGS = {"forward": ["mma", "cp_async", "swizzle", "wide_warps", "two_loops", "fa2", "tma", "wgmma", "ring", "specialised",
                         "lock no_lock", "overlap", "rows", "persistent", "longest_first", "hopper"],
             "backward": ["mma", "swizzle", "two_kernels", "fused", "bulk", "early", "at_once", "late", "masks", "in_order",
                          "hopper"]}
    BESIDE = {("backward", "hopper"): ["masks"]}  # whose step it has; else the rung before

    def test_is_what_is_recorded(self) -> None:
        stage = sweep.ROOT / sweep.STAGES["06"]
        recorded = load(stage / "results" / "nvidia-h200.json")
        for what, rungs in self.RUNGS.items():
            before: list[str] = []      # the names of the last rung that is recorded
            number, known_files = 0, set()
            for rung in rungs:
                number += rung not in self.PRODUCTS
                files = list((stage / what).glob(f"{rung}.cu" if rung in self.PRODUCTS else f"{number}_*.cu"))
                self.assertTrue(files, f"no file for {rung} of the {what}")
                known_files.update(files)
                for file in files:
                    with self.subTest(file=f"{what}/{file.name}"):
                        text = file.read_text(encoding="utf-8")
                        d = re.search(r"d = (\d+)", self.comment(text))
                        of = functools.partial(self.medians, recorded, what, d=int(d[1]) if d else 128)
                        self.assertEqual(self.wrong(text, of(rung.split()), of(self.BESIDE.get((what, rung), before))), "")
                if self.medians(recorded, what, rung.split(), 128):
                    before = rung.split()
            self.assertEqual(set((stage / what).glob("[1-9]*.cu")) - known_files, set(), "not in RUNGS")

    def test_not_yet_is_right_as_long_as_nothing_is_recorded(self) -> None:
        for text, own, fault in (("// Measured: (not yet)\n", set(), ""),
                                 ("// Measured: (not yet)\n", {479}, "it is measured: say so"),
                                 ("// Measured: 479 TFLOP/s after\n// 248, cool.\n", {479}, ""),
                                 ("// Measured: 479 TFLOP/s after 248.\n", {480}, "479 is no median of this rung or the one before"),
                                 ("// Measured: 248 TFLOP/s.\n", set(), "nothing of it is recorded: (not yet)"),
                                 ("// Measured: a gain.\n", {479}, "no figure"),
                                 ("// The idea: 479\n", {479}, "no // Measured:")):
            with self.subTest(text=text, own=own):
                self.assertEqual(self.wrong(text, own, {248}), fault)

    def comment(self, text: str) -> str:
        said = re.search(r"^// Measured(?:.*\n//)*.*", text, re.M)
        return said[0] if said else ""

    def wrong(self, text: str, own: set[int], before: set[int]) -> str:
        """What is wrong about a file's `// Measured`, if the record has these medians of it and of the one before."""
        said = self.comment(text)
        if not said:
            return "no // Measured:"
        if "(not yet)" in said:
            return "it is measured: say so" if own else ""
        if not own:
            return "nothing of it is recorded: (not yet)"
        figures = [int(figure) for figure in re.findall(r"\b\d{2,}\b", re.sub(r"[Nd] = \d+|\d+\.\d+|\d+ %", "", said))]
        strange = [figure for figure in figures if figure not in own | before]
        return f"{strange[0]} is no median of this rung or the one before" if strange else "" if figures else "no figure"

    def medians(self, recorded: Any, what: str, names: list[str], d: int) -> set[int]:
        rates: dict[tuple[object, ...], list[float]] = {}
        for row in recorded.rows:
            if (row.stage, row.what, row.dtype) == ("stage06", what, "bf16") and row.variant in names \
                    and (row.keys["N"], row.keys["d"], row.keys["G"]) == (4096, d, 1):
                rates.setdefault((row.variant, row.keys["causal"], row.keys["chip"]), []).append(row.value("flops"))
        return {round(1e-12 * statistics.median(some)) for some in rates.values()}


@unittest.skipUnless(importlib.util.find_spec("torch"), "no PyTorch")
class Reference(unittest.TestCase):
    def test_is_what_autograd_finds(self) -> None:
        from measure_table import context_of_a_head, gradients_of_a_head, torch
        torch.manual_seed(1)
        for causal in (False, True):
            q, k, v, do = (torch.randn(37, 16, dtype=torch.float64, requires_grad=name != "dO")
                           for name in ("Q", "K", "V", "dO"))
            o = torch.nn.functional.scaled_dot_product_attention(*(x[None, None] for x in (q, k, v)),
                                                                 is_causal=causal)[0, 0]
            want = torch.autograd.grad(o, (q, k, v), do)
            with torch.no_grad(), mock.patch("precision.SCORES", 5 * 37):  # five queries at once
                rows = torch.tensor([0, 9, 36])
                torch.testing.assert_close(context_of_a_head(q, k, v, causal, rows)["O"][0], o[rows])
                for (found, spread), wanted in zip(gradients_of_a_head(q, k, v, do, causal).values(), want):
                    torch.testing.assert_close(found, wanted)
                    self.assertTrue(bool((spread >= found.abs() * (1 - 1e-12)).all()))


CONTEXT = {"machine": "nvidia-x", "device": "X", "isa": "sm_90", "cores": "1", "compiler": "c", "flags": "f",
           "commit": "abc", "date": "2026-01-01T00:00:00", "flop_formula": "4 d FLOP", "torch": "2", "method": "M"}


class Tables(InFolder):
    def numbers(self, **more: float) -> dict[str, Any]:
        return {"p99_ms": 2.5, "launches": 20, "host_ms": 0.1, "peak_bytes": 3 * 2**20, "error": 0.00123456789} | more

    def row(self, cell: Cell, side: str, ms: float = 2.0) -> table.Row:
        return figure_row(cell, side, ms, self.numbers(), "cudnn_attention" if side == "peer" else "")

    def file(self, **changes: str) -> File:
        return File(self.out / "table.json", CONTEXT | changes)

    def test_cells(self) -> None:
        every = list(table.cells())
        self.assertEqual(len(every), 10 * 4 * 2 * 3 * 3)
        self.assertEqual(len({cell.name(side) for cell in every for side in table.SIDES}), 2 * len(every))
        cell = Cell("f32", 64, 8, 256, "backward")
        self.assertEqual(cell.name("ours"), "stage05/backward/two_kernels/N:256/d:64/H:8/causal:1/f32")
        self.assertEqual(cell.flops, 2.5 * 4 * 64 * 8 * 256 * 257 / 2)

    def test_percentile_was_measured(self) -> None:
        self.assertEqual(table.percentile([3, 1, 2], 0.99), 3)
        self.assertEqual(table.percentile(list(range(100)), 0.99), 98)
        self.assertEqual(table.percentile(list(range(200)), 0.99), 197)

    def test_continues(self) -> None:
        cell = Cell("bf16", 64, 16, 1024, "forward")
        file = self.file()
        self.assertFalse(file.has(cell))
        file.add([self.row(cell, "ours"), empty_row(cell, "peer", "out_of_memory", "tried to\nallocate")])
        again = self.file()
        self.assertTrue(again.has(cell))
        self.assertEqual(again.rows, file.rows)
        self.assertEqual(again.rows[cell.name("ours")]["error"], 0.00123457)
        twice = Cell("bf16", 64, 16, 2048, "forward")
        self.assertEqual((again.expected_ms(twice, "ours"), again.expected_ms(twice, "peer")), (8, 0))
        again.add([empty_row(twice, "ours", "too_slow", "x", expected_ms=8), self.row(twice, "peer")])
        self.assertTrue(again.has(twice))
        self.assertTrue(again.has(twice, limit=7))
        self.assertFalse(again.has(twice, limit=8))  # no longer too slow
        self.assertEqual(again.expected_ms(Cell("bf16", 64, 16, 4096, "forward"), "ours"), 32)
        results = load(self.out / "table.json")  # the common format
        self.assertEqual((len(results.rows), len(results.errors)), (2, 2))
        self.assertEqual(results.select(N=1024)[0].value("peak_bytes"), 3 * 2**20)

    def test_ours_is_tried_again_after_a_failure(self) -> None:
        cell = Cell("bf16", 16, 8, 128, "step")
        file = self.file()
        file.add([empty_row(cell, "ours", "failed", "wrong"), self.row(cell, "peer")])
        self.assertEqual((file.has(cell), file.tried(cell)), (False, True))
        file.add([self.row(cell, "ours"), empty_row(cell, "peer", "failed", "no kernel")])
        self.assertTrue(file.has(cell))

    def test_the_limit_may_be_raised(self) -> None:
        cell = Cell("bf16", 64, 16, 1024, "forward")
        low, high = (f"20 launches{table.ABOVE}{limit} ms is too slow" for limit in (300, 6000))
        self.file(method=low).add([self.row(cell, "ours"), self.row(cell, "peer")])
        self.assertEqual(self.file(method=high).context["method"], high)
        with self.assertRaisesRegex(BadResults, "another method"):
            self.file(method=high.replace("20", "30"))

    def test_one_file_one_version(self) -> None:
        self.file().add([self.row(Cell("bf16", 16, 8, 128, "step"), "ours")])
        with self.assertRaisesRegex(BadResults, "another commit .abc."):
            self.file(commit="def")
        (self.out / "table.json").write_text("{}")
        with self.assertRaisesRegex(BadResults, "not a file of this program"):
            self.file()

    def filled(self) -> File:
        file = self.file()
        for n in (128, 256, 512):
            for what in table.PASSES:
                cell = Cell("bf16", 64, 16, n, what)
                file.add([self.row(cell, "ours", 2.0), self.row(cell, "peer", 3.0)])
        cell = Cell("f32", 128, 32, 65536, "backward")
        file.add([empty_row(cell, "ours", "too_slow", "x", expected_ms=3456.0),
                  empty_row(cell, "peer", "out_of_memory", "x")])
        return file

    def test_markdown(self) -> None:
        file = self.filled()
        text = table.markdown(file.context, file.rows, ["bf16_d64"])
        for words in ("| 64 | 16 | 128 | 2.00 | 2.50 |", "| 1.50× | 20 / 20 |", "cudnn_attention", "![bf16_d64",
                      "| 128 | 32 | 65536 | too slow, about 3.5 s | – | – | – | – | out of memory | – |",
                      "1 out of memory, 1 too slow", "| 3.00 | 1.2e-03 |", "## bf16, a training step"):
            self.assertIn(words, text)
        self.assertNotIn("fp32, the forward", text)  # nothing was measured there
        rows = [line for line in text.splitlines() if line.startswith("|")]
        self.assertEqual(len({line.count("|") for line in rows}), 1)

    def test_charts(self) -> None:
        file = self.filled()
        (chart,) = table.charts(file.context, file.rows)
        self.assertEqual((chart.name, len(chart.panels)), ("bf16_d64", 2))
        ours = chart.panels[0].lines[0]
        self.assertEqual([point.x for point in ours.points], [128, 256, 512])
        self.assertAlmostEqual(ours.points[0].y.low / ours.points[0].y.mid, 2.0 / 2.5)

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "no matplotlib")
    def test_draw(self) -> None:
        file = self.filled()
        self.assertEqual(table.main([str(file.path), str(self.out / "results")]), 0)
        names = sorted(str(p.relative_to(self.out / "results")) for p in (self.out / "results").rglob("*.*"))
        self.assertEqual(names, ["table.md", "table/bf16_d64.svg"])

    def test_bad_input_is_one_line(self) -> None:
        command = [sys.executable, str(CHECK / "table.py"), str(self.out / "no.json"), str(self.out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)


if __name__ == "__main__":
    unittest.main()
