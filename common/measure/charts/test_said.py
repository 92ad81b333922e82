"""python3 -m unittest, in this folder. Needs nothing but Python and diff."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import said
from said import NotCounted, Said, main, marks, pages, written

CONTEXT = {"machine": "m-1", "device": "M", "isa": "avx", "cores": "1", "compiler": "c", "flags": "f", "commit": "abc",
           "date": "2026-01-01T00:00:00", "flop_formula": "4 d"}


def row(name: str, repetition: int, ms: float, **counters: float) -> dict[str, object]:
    return {"name": name, "run_name": name, "run_type": "iteration", "repetition_index": repetition, "real_time": ms,
            "time_unit": "ms", **counters}


def recording() -> str:
    rows = []
    for n in (1, 2):
        for repetition, noise in enumerate((1.0, 2.0, 4.0)):  # slows both sides of a pair
            rows += [row(f"stage00/forward/old/N:{n}/causal:0/f32", repetition, 30 * n * noise, flops=1e9, roof=4e9),
                     row(f"stage01/forward/new/N:{n}/causal:0/f32", repetition, 10 * noise, flops=2e9, roof=4e9,
                         extra_bytes=8192.0)]
        rows.append(row(f"stage01/forward/new/N:{n}/causal:1/f32", 0, 5, flops=2e9, roof=4e9))
    return json.dumps({"context": CONTEXT, "benchmarks": rows})


class InFolder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()
        said.results.cache_clear()
        said.tests_of.cache_clear()

    def tool(self, *words: str) -> tuple[int, str]:
        """Exit code, and all that it says."""
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            try:
                code = main([*words, "--root", str(self.root)])
            except SystemExit as stop:
                code = int(str(stop.code))
        return code, text.getvalue()


class Small(InFolder):
    """A course of one stage and one page."""

    def setUp(self) -> None:
        super().setUp()
        self.page = self.root / "01_new" / "README.md"
        (self.page.parent / "results").mkdir(parents=True)
        (self.page.parent / "results" / "m-1.json").write_text(recording())
        (self.page.parent / "check").mkdir()
        (self.page.parent / "check" / "mutants.txt").write_text(
            "a: x.cpp\nsymptom: s\n- x\nkills: S.T\n\nb: x.cpp\nsymptom: s\n- y\nkills: S.T\n")
        for name, text in (("x.cpp", "a\nb\nc\n"), ("y.cpp", "a\nB\n  c\nd\n"),
                           ("w.cu", "a  // one\n\n// two\n  b\nc\nd\n"), ("note.txt", "N 1   7.0  1.25x | 8\n")):
            (self.page.parent / name).write_text(text)

    def check(self, text: str, *words: str, place: str = "01_new/README.md") -> tuple[int, str]:
        (self.root / place).parent.mkdir(exist_ok=True)
        (self.root / place).write_text(text)
        return self.tool("check", *words)

    RIGHT = {"ms(new, N=1)": "20", "ms(new, N=1, causal=1)": "5.0", "ms(old, N=1) / ms(new, N=1)": "3.00",
             "percent(new, N=2)": "50", "gflops(new, stage01, forward, f32, N=2)": "2.0", "kib(new, N=1)": "8",
             "most(ms(old) / ms(new))": "6", "least(ms(old) / ms(new))": "3", "middle(ms(old, N=1))": "60",
             "100 * (ms(old, N=1) / ms(new, N=1) - 1)": "200", "6 - ms(new, N=1) / 20": "5", "-(1 - 3)": "2",
             "counter(roof, old, N=1) / 1e9": "4", "mutants()": "two", 'lines("x.cpp")': "3",
             'files("01_new/*.cpp")': "two", 'line("x.cpp", "b") - 1': "1",
             'removed("x.cpp", "y.cpp")': "2", 'added("x.cpp", "y.cpp")': "3",
             'added("x.cpp", "y.cpp", space=0)': "2", 'added("x.cpp", "w.cu", code=1)': "1",
             'noted("01_new/note.txt", "N 1", 2)': "1.25",
             "4 * 65536 / 2": "131,072", "(1 + 2) * 0.5": "1.5"}

    def test_all_words(self) -> None:
        for rule, figure in self.RIGHT.items():
            with self.subTest(rule):
                self.assertEqual(self.check(f"It is {figure}<!-- = {rule} --> so.\n")[0], 0)
                code, words = self.check(f"First.\nIt is 77.77<!-- = {rule} --> so.\n")
                self.assertEqual(code, 1)
                self.assertIn("01_new/README.md:2: says 77.77, found ", words)
                self.assertEqual(self.tool("write")[0], 0)
                self.assertNotIn("77.77", self.page.read_text())
                self.assertEqual(self.tool("check")[0], 0)

    def test_a_digit_more_or_less(self) -> None:
        self.assertEqual(self.check("3.0<!-- = ms(old, N=1) / ms(new, N=1) --> times")[0], 0)
        for figure in ("3.1", "2.9", "3.01", "4", "30", "three hundred and 4"):
            self.assertEqual(self.check(f"{figure}<!-- = ms(old, N=1) / ms(new, N=1) --> times")[0], 1, figure)

    def test_ratios_are_of_one_round(self) -> None:
        text = recording().replace('"real_time": 30.0', '"real_time": 300.0')  # N = 1: ratios 30, 3, 3; medians 120, 20
        (self.page.parent / "results" / "m-1.json").write_text(text)
        self.assertEqual(self.check("3<!-- = ms(old, N=1) / ms(new, N=1) --> times")[0], 0)

    def test_marks_that_say_nothing(self) -> None:
        for rule, words in {"ms(new)": "fits 2 rows", "ms(none, N=1)": "no row fits", "ms(N=1)": "fit; name more",
                            "ms(new, N=3)": "no row fits", "speed(new)": "no 'speed'", "1 / 0": "divides by zero",
                            "__import__('os')": "no '__import__'", "(1).real": "none of its", "2 **": "arithmetic",
                            'lines("z.cpp")': "no file z.cpp", 'line("x.cpp", "d")': "0 lines of",
                            'line("y.cpp", "")': "4 lines of", "least(3)": "of measured rows", "new": "none of its",
                            "least(ms(new)) / ms(new)": "fits 2 rows", 'noted("note.txt", "N 2", 1)': "0 lines",
                            'noted("note.txt", "N 1", 9)': "no column", 'noted("note.txt", "N 1", 3)': "is '|', not a number",
                             "mib(old, N=1)": "no counter 'extra_bytes'",
                            "ms(new, N=1) - ms(new)": "no round in common", "1e999": "is inf",
                            "True": "none of its"}.items():
            code, said_words = self.check(f"Say\n7<!-- = {rule} -->")
            self.assertEqual((code, said_words.count("\n")), (1, 2), rule)
            self.assertIn("01_new/README.md:2: 7 = ", said_words)
            self.assertIn(words, said_words, rule)
        self.assertIn("on one line", self.check("2<!-- = mutants()\n* 1 -->")[1])
        for text in ("<!-- = mutants() --> 2", "many<!-- = mutants() -->", "2 <!-- = mutants() -->"):
            self.assertIn("right behind its figure", self.check(text)[1])

    def test_which_record(self) -> None:
        self.assertEqual(self.check("3<!-- =01 least(ms(old) / ms(new)) -->", place="docs/a.md")[0], 0)
        self.assertIn("names no stage", self.check("3<!-- = ms(new, N=1) -->", place="docs/a.md")[1])
        (self.root / "docs" / "a.md").unlink()
        shutil.copy(self.page.parent / "results" / "m-1.json", self.page.parent / "results" / "m-2.json")
        self.assertEqual(self.check("20<!-- =01/m-2 ms(new, N=1) -->"), (0, "1 figures, 0 problems\n"))
        self.assertIn("no recorded file in", self.check("20<!-- =01/m-3 ms(new, N=1) -->")[1])
        # Unnamed it is the one that has measured most.
        (self.page.parent / "results" / "m-0.json").write_text("{}")
        self.assertEqual(self.check("20<!-- = ms(new, N=1) -->")[0], 0)

    def test_code_is_code(self) -> None:
        self.assertEqual(self.check("`7<!-- = 8 -->`\n\n```text\n7<!-- = 8 -->\n7 tests\n```\n")[0], 0)
        self.assertEqual(self.check("<!-- = below: sum {3 + 4} -->\n```text\nsum 7\n7 ms\n```\n")[0], 0)
        self.assertIn(":3: says 8, found 7", self.check("<!-- = below: sum {3 + 4} -->\n```text\nsum 8\n```\n")[1])
        self.assertIn("0 times instead", self.check("<!-- = below: sum {3 + 4} -->\n```text\n7\n```\nsum 7\n")[1])
        self.assertIn("on the next line", self.check("<!-- = below: sum {3 + 4} -->\n\nsum 7\n")[1])
        two = "<!-- = below: sum {3 + 4} -->\n<!-- = below: of {2} -->\n```text\nsum 7 of 2\n```\n"
        self.assertEqual(self.check(two + "<!-- = below: a {1} -->\n```text\na 1\n```\n")[0], 0)

    def test_figures_without_a_mark(self) -> None:
        for text in ("7 ms", "at 7 %", "7%", "1.5× as fast", "7 to 9 times", "7<!-- given: x --> to 9 times",
                     "7 to 9<!-- given: x --> times", "7 TFLOP/s", "about 12 tests", "7\nlines", "7<!-- given: --> ms"):
            self.assertIn("has no mark", self.check(f"It is {text}.\n")[1], text)
        for text in ("7<!-- given: x --> ms", "7<!-- = 7 --> to 9<!-- = 9 --> times", "d = 64, and 9<!-- = 9 --> %",
                     "4 × 4 vectors", "64 keys", "one line", "`7 ms`", '<img width="7%">', "0 times x", "100 % of"):
            self.assertEqual(self.check(f"It is {text}.\n")[0], 0, text)
        self.assertEqual(self.check("| 7 ms | 8 % |\n\n[7 lines](x)\n\n```text\n7 lines\n```\n")[0], 0)
        self.assertIn("has no mark", self.check("```text\n0 tests failed out of 9\n```\n")[1])

    def test_in_06_counts_alone(self) -> None:
        for text, code in (("7 TFLOP/s", 0), ("7 lines out", 1), ("7 tests", 1)):
            self.assertEqual(self.check(f"It is {text}.\n", place="06_x/README.md")[0], code, text)

    def test_tests_of_a_build(self) -> None:
        text = "5<!-- = tests() --> tests\n"
        code, words = self.check(text)
        self.assertEqual(code, 0)
        self.assertIn("1 counts of tests not checked", words)
        def build(*names: str) -> tuple[int, str]:
            with mock.patch("said.tests_of", return_value=list(names)):
                return self.check(text, "--build", "b")
        self.assertEqual(build(*(f"stage01.{x}" for x in "abcde"), "stage02.x", "common.x")[0], 0)
        self.assertIn("README.md:1: says 5, found 4 = tests()", build(*(f"stage01.{x}" for x in "abcd"))[1])
        with_nvcc = [f"stage01.on_{where}.{x}" for where in ("cpu", "gpu") for x in "abcd"]
        self.assertEqual(build(*with_nvcc, "stage01.bench_smoke")[0], 0)  # four, and one that says what lacks
        self.assertIn("not checked", build("stage01.a", "stage01_tests_NOT_BUILT")[1])
        self.assertIn("not checked", build()[1])
        self.assertIn("no build folder", self.check(text, "--build", str(self.root / "none"))[1])
        (self.root / "b").mkdir()
        (self.root / "b" / "CMakeCache.txt").write_text("FA_MUTANTS:BOOL=OFF\n")
        self.assertIn("not checked", self.check(text, "--build", str(self.root / "b"))[1])

    def test_command_line(self) -> None:
        self.page.write_text("7<!-- = 8 -->")
        self.assertEqual(self.tool("check", "no.md")[0], 2)
        self.assertEqual(self.tool("look")[0], 2)
        self.assertEqual(self.tool("check", str(self.page))[0], 1)

    def test_form(self) -> None:
        for value, form, text in ((4.86, "5.0", "4.9"), (1234567.2, "1,000", "1,234,567"), (3, "Two", "Three"),
                                  (13, "two", "13"), (-0.2, "3", "0"), (0.125, "0.000", "0.125"), (2, "1.0", "2.0")):
            self.assertEqual(written(value, form), text)


class Course(InFolder):
    """The pages of this course, each kind of figure spoilt in a copy."""

    def setUp(self) -> None:
        super().setUp()
        wanted = shutil.ignore_patterns("build", ".*", "mine", "hunt", "*.svg", "table", "__pycache__", "learn")
        for path in (*said.ROOT.glob("*.md"), *said.ROOT.glob("docs"), *said.ROOT.glob("0?_*")):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, self.root / path.name, **({"ignore": wanted} if path.is_dir() else {}))  # type: ignore[operator]

    def test_each_kind_of_figure_can_be_wrong(self) -> None:
        kinds = {"arithmetic", "tests", "files", "line", "removed", "added", "ms", "percent", "gflops", "kib", "gib",
                 "counter", "middle", "least", "most", "noted"}
        for page in pages(self.root):
            text = page.read_text(encoding="utf-8")
            for mark in marks(text):
                assert isinstance(mark, Said)
                kind = re.findall(r"\b[a-z]+(?=\()", mark.rule) or ["arithmetic"]
                if not kinds & set(kind):
                    continue
                kinds -= set(kind)
                figure = text[mark.start:mark.end]
                spoilt = {"twelve": "eleven", "nine": "ten"}.get(figure, figure[:-1] + str((int(figure[-1:]) + 1) % 10)
                                                                 if figure[-1].isdigit() else "")
                page.write_text(text[:mark.start] + spoilt + text[mark.end:], encoding="utf-8")
                with mock.patch("said.tests", return_value=int(figure) if "tests" in kind else 0):
                    code, words = self.tool("check", str(page))
                place = f"{page.relative_to(self.root)}:{said.line_of(text, mark.start)}"
                self.assertEqual(code, 1)
                self.assertIn(f"{place}: says {spoilt}, found {figure} = ", words)
                page.write_text(text, encoding="utf-8")
        self.assertEqual(kinds, set(), "no page has such a figure")

    def test_a_record_that_changes_is_found(self) -> None:
        record = self.root / "00_naive" / "results" / "amd-epyc-avx512-2c.json"
        data = json.loads(record.read_text())
        for one in data["benchmarks"]:
            one["flops"] *= 0.5
        record.write_text(json.dumps(data))
        with mock.patch("said.tests", side_effect=NotCounted):
            self.assertRegex(self.tool("check")[1], r"00_naive/README.md:\d+: says \d+, found \d+ = percent")

    def test_a_source_that_changes_is_found(self) -> None:
        with (self.root / "06_optimized" / "forward" / "2_cp_async.cu").open("a") as source:
            source.write("// one more\n")
        with mock.patch("said.tests", side_effect=NotCounted):
            words = self.tool("check")[1]
        self.assertRegex(words, r"forward/2_cp_async.md:\d+: says (\d+), found (\d+) = added")
        self.assertRegex(words, r"forward/3_swizzle.md:\d+: says (\d+), found (\d+) = removed")


if __name__ == "__main__":
    unittest.main()
