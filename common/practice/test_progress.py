"""What a reader has done is never lost, whatever the file holds; the view fits a screen and says what comes next."""
from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import progress

TOOL = Path(__file__).resolve().parent / "progress.py"


class Progress(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for name, cmake in (("00_naive", "fa_add_stage"), ("01_safe", "fa_add_stage"), ("06_fast", "fa_add_ladder")):
            (self.root / name).mkdir()
            (self.root / name / "CMakeLists.txt").write_text(cmake)
            (self.root / name / "a.cpp").write_text(
                "void f() {\n  // [blank]\n" + "".join(f"  // [step {name[:2]}.{k}: x (1 line)]\n  ;\n  // [end]\n" for k in (1, 2, 10))
                + f"  // [more {name[:2]}.a: y (1 line)]\n  ;\n  // [end]\n  // [end blank]\n}}\n")
            (self.root / name / "exercise").mkdir()
            (self.root / name / "exercise/a.cpp").write_text(f"// [step {name[:2]}.7: x (1 line)]\n")
        self.file = self.root / ".progress"

    def tool(self, code: int, *args: object) -> str:
        done = subprocess.run([sys.executable, TOOL, "--root", self.root, *map(str, args)], capture_output=True, text=True,
                              check=False)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        if code:
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        return done.stdout + done.stderr

    def all_of(self, stage: str, *but: str) -> None:
        for k in (1, 2, 10):
            progress.note(self.root, stage, "practice", step=f"{stage}.{k}", level=1)
        for what, details in (("test", {"result": "passed"}), ("hunt", {"result": "caught", "name": "x"}), ("bench", {})):
            if what not in but:
                progress.note(self.root, stage, what, **details)

    def test_nothing_yet(self) -> None:
        self.assertEqual(self.tool(0), "nothing is noted yet. To begin: ./learn see, then 00_naive/README.md with "
                                       "./learn practice 00 beside it\n")
        self.assertFalse(self.file.exists())

    def test_what_was_done(self) -> None:
        self.tool(0, "note", "00", "test", "--result", "passed")
        self.tool(0, "note", "00", "practice", "--step", "00.1", "--level", 1)
        self.tool(0, "note", "00", "practice", "--step", "00.1", "--level", 1)
        self.tool(0, "note", "00", "practice", "--step", "00.a", "--level", 2)
        for result, name in (("revealed", "a"), ("caught", "a"), ("caught", "b"), ("caught", "b")):
            self.tool(0, "note", "00", "hunt", "--result", result, "--name", name)
        self.tool(0, "note", "00", "charts")
        text = self.tool(0)
        self.assertRegex(text, r"00_naive +passed +level 1: 1 of 3, level 2: 1 of 4 +1 caught, 1 revealed +\d{4}-\d\d-\d\d\n")
        self.assertRegex(text, r"01_safe +- +- +- +-\n")
        self.assertIn("next: 00_naive/README.md, and its exercise, step 00.2: ./learn practice 00", text)
        self.assertLess(text.count("\n"), 20)
        self.assertLess(max(map(len, text.split("\n"))), 121)

    def test_what_comes_next(self) -> None:
        for but, words in ((("test",), "its tests: ./learn test 00"), (("hunt",), "a hunt: ./learn hunt 00"),
                           (("bench",), "./learn bench 00"), ((), "01_safe/README.md, and its tests")):
            self.file.unlink(missing_ok=True)
            self.all_of("00", *but)
            with self.subTest(words):
                self.assertIn(words, progress.show(self.root)[-1])
        self.all_of("06", "bench")      # where there may be no GPU, nobody is told to measure on one
        self.assertIn("next: 01_safe/README.md, and its tests", progress.show(self.root)[-1])
        self.all_of("01")
        self.assertIn("once more, with less help: ./learn practice 00 --level 2", progress.show(self.root)[-1])

    def test_the_tests_come_first_until_something_is_practised(self) -> None:
        progress.note(self.root, "00", "bench")
        self.assertIn("00_naive/README.md, and its tests", progress.show(self.root)[-1])
        progress.note(self.root, "00", "practice", step="00.1", level=1)
        self.assertIn("its exercise, step 00.2", progress.show(self.root)[-1])
        progress.note(self.root, "00", "test", result="failed")
        self.assertIn("its tests", progress.show(self.root)[-1])

    def test_of_several_files_the_one_that_holds_the_step(self) -> None:
        (self.root / "00_naive/b.cpp").write_text("// [blank]\n// [step 00.11: x (1 line)]\n;\n// [end]\n// [end blank]\n")
        progress.note(self.root, "00", "test", result="passed")
        for level, command in ((None, ""), (1, " a.cpp"), (2, " a.cpp --level 2")):
            if level:
                progress.note(self.root, "00", "practice", step="00.1", level=level)
            self.assertTrue(progress.show(self.root)[-1].endswith(f": ./learn practice 00{command}"), progress.show(self.root)[-1])
        (self.root / "00_naive/mine").mkdir()
        (self.root / "00_naive/mine/a.cpp").touch()     # which is at another level, perhaps
        self.assertTrue(progress.show(self.root)[-1].endswith(": ./learn practice 00 a.cpp"))
        for k in (2, 10):
            progress.note(self.root, "00", "practice", step=f"00.{k}", level=2)
        self.assertTrue(progress.show(self.root)[-1].endswith("step 00.11: ./learn practice 00 b.cpp --level 2"))

    def test_a_reader_who_begins_in_the_middle_goes_on_there(self) -> None:
        progress.note(self.root, "01", "practice", step="01.1", level=2)
        self.assertIn("01_safe", progress.show(self.root)[-1])
        self.all_of("01")
        self.assertIn("06_fast", progress.show(self.root)[-1])

    def test_at_level_3_a_blank_is_one(self) -> None:
        self.tool(0, "note", "00", "practice", "--step", "00.1-00.10", "--level", 3)
        self.assertIn("level 3: 1 of 1", self.tool(0))

    def test_broken_lines_are_skipped_and_kept(self) -> None:
        progress.note(self.root, "00", "hunt", result="caught", name="x")
        good = self.file.read_bytes()
        foreign = b"\x00\xff foreign\n\n2026-01-01 10:00 00 flown\n2026-01-01 10:00 00 practice step=\n2026-01-01 10:00 00 te"
        self.file.write_bytes(foreign + b"\n" + good + b"unfinished")
        progress.note(self.root, "00", "bench")
        self.assertTrue(self.file.read_bytes().startswith(foreign + b"\n" + good + b"unfinished\n20"))
        text = self.tool(0)
        self.assertIn(".progress: lines 1, 3, 4, 5, 7 cannot be read, skipped and kept\n", text)
        self.assertIn("1 caught", text)
        self.assertEqual(text.count("cannot be read"), 1)

    def test_details_stay_on_the_line(self) -> None:
        progress.note(self.root, "00", "hunt", result="caught", name="a b\nc", other=None)
        self.assertEqual(self.file.read_text().count("\n"), 1)
        self.assertEqual(progress.read(self.root)[0][0].details, {"result": "caught", "name": "a_b_c"})

    def test_what_cannot_be_kept_stops_nobody(self) -> None:
        self.file.mkdir()
        with contextlib.redirect_stderr(io.StringIO()) as said:
            progress.note(self.root, "00", "bench")
        self.assertEqual(said.getvalue(), f"not noted: {self.file}: Is a directory\n")
        self.tool(2)

    def test_after_the_tests(self) -> None:
        cases = (("stage00.rows.Sizes", "run"), ("stage00.mutant.x", "run"), ("stage01.rows.Sizes", "fail"),
                 ("stage01.rows.Heads", "run"), ("common.docs", "fail"))
        (self.root / "tests.xml").write_text("<testsuite>" + "".join(
            f'<testcase name="{name}" status="{status}"/>' for name, status in cases) +
            '<testcase name="stage06.on_gpu.not_built" status="notrun"><skipped/></testcase></testsuite>')
        (self.root / "broken.xml").write_text("<testsuite>")
        self.tool(0, "tests", self.root / "tests.xml", self.root / "broken.xml", self.root / "absent.xml")
        self.assertEqual([(n.stage, n.details["result"]) for n in progress.read(self.root)[0]],
                         [("00", "passed"), ("01", "failed")])

    def test_bad_use(self) -> None:
        for args in (("fly",), ("note", "00"), ("note", "00", "fly"), ("note", "00", "practice", "--level", "4")):
            self.tool(2, *args)
        self.tool(1, "note", "7", "test")
        self.assertFalse(os.path.exists(self.file))


if __name__ == "__main__":
    unittest.main()
