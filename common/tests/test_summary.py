"""The screen after the tests says what passed, what failed, what was skipped and why, and what comes next."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

TOOL = Path(__file__).resolve().parents[1] / "judge" / "summary.py"


def case(name: str, status: str = "run", inside: str = "") -> str:
    return f'<testcase name="{name}" classname="{name}" time="0.1" status="{status}">{inside}</testcase>'


def skipped(name: str, output: str) -> str:
    return case(name, "notrun", f"<skipped message=''/><system-out>{output}</system-out>")


class Summary(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def said(self, code: int, *cases: str, mutants: tuple[str, ...] = (), stage: str = "") -> str:
        for name, some in (("tests.xml", cases), ("mutants.xml", mutants)):
            if some:
                (self.folder / name).write_text(f"<testsuite>{''.join(some)}</testsuite>")
        command = [sys.executable, str(TOOL), str(self.folder / "tests.xml"), str(self.folder / "mutants.xml")]
        done = subprocess.run([*command, *(["--stage", stage] if stage else [])], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def test_all_pass(self) -> None:
        text = self.said(0, case("stage01.safe_softmax.Values"), case("stage01.safe_softmax.Fuzz"),
                         mutants=(case("stage01.mutant.no_guard"), case("stage01.skeleton.safe_softmax")),
                         stage="01_safe_softmax")
        self.assertIn("stage01  2 tests passed, 2 of 2 planted mistakes caught", text)
        self.assertIn("next: read 01_safe_softmax/README.md", text)
        self.assertLess(text.count("\n"), 10)

    def test_skipped_with_reason(self) -> None:
        text = self.said(0, case("common.Core.One"), skipped("stage04.on_gpu.A.B", "x.cpp:3: Skipped\nno usable GPU: none\n"),
                         skipped("stage04.on_gpu.A.C", "x.cpp:3: Skipped\nno usable GPU: none\n"),
                         skipped("stage06.on_gpu.not_built", "SKIPPED: nvcc was not found"))
        self.assertIn("stage04  0 tests passed, 2 skipped", text)
        self.assertIn("skipped  2: no usable GPU: none", text)
        self.assertIn("skipped  1: nvcc was not found", text)

    def test_failures_are_named(self) -> None:
        text = self.said(1, case("stage02.rows.Values"), case("stage02.rows.Scale", "fail", "<failure/>"),
                         case("stage02_tests_NOT_BUILT", "notrun", "<skipped/>"))
        self.assertIn("failed   stage02.rows.Scale", text)
        self.assertIn("failed   stage02_tests_NOT_BUILT", text)
        self.assertIn("./learn test 02", text)

    def test_what_was_not_caught(self) -> None:
        text = self.said(1, case("stage01.a.B"), mutants=(case("stage01.mutant.x", "fail"), case("stage01.mutant.y")))
        self.assertIn("1 of 2 planted mistakes caught", text)
        self.assertIn("failed   stage01.mutant.x", text)

    def test_bad_input(self) -> None:
        self.assertEqual(self.said(1, *()).count("\n"), 1)  # nothing has run
        (self.folder / "tests.xml").write_text("<testsuite><testcase")
        self.assertIn("not what ctest writes", self.said(1))


if __name__ == "__main__":
    unittest.main()
