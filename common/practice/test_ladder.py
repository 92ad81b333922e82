"""Of a ladder's kernels the screen names the hole that fails alone, and says the emulator's sentence."""
from __future__ import annotations

import sys
import tempfile
import textwrap
import unittest
from pathlib import Path

from ladder import Ladder, family, tiles  # puts common/judge on the path
from marks import Lesson, Region
from verdict import Copy
from weave import Notes

# Behaves as a GoogleTest program: FAIL has a line for each test that fails, with what it then prints. Holes 06.1 and
# 06.2 are the reader's as FA_STEPS says; `of` is the hole without which the test passes, 0 if it always fails.
PROGRAM = """\
    #!{python}
    import os, sys
    NAMES = ["mma.Sizes", "mma.Scale", "Tiles.SeveralOfEach/mma", "Tiles.AndAMask/mma"]
    name = [a for a in sys.argv if "filter" in a][0].partition("=")[2]
    if "--gtest_list_tests" in sys.argv:
        wanted = [n for n in NAMES if n in name or n.partition(".")[0] + ".*" in name]
        for n in wanted:
            print(n.partition(".")[0] + ".\\n  " + n.partition(".")[2])
    else:
        steps, time = int(os.environ.get("FA_STEPS", "3"), 16), os.environ.get("FA_TIMING", "late")
        for test, of, when, words in {fails}:
            if test == name and when in ("", time) and (not of or steps & of):
                print(words + "\\n[  FAILED  ] " + name + " (1 ms)")
                sys.exit(1)
"""
SENTENCE = 'threw: mma_kernel: block 0: thread 0 reads at softmax.cuh:41 what mine/forward/1_mma.cu:95 has asked for'


class LadderTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.exe = Path(folder.name) / "program"

    def ladder(self, *fails: tuple[str, int, str, str], empty: bool = False, name: str = "forward/1_mma.cu") -> Ladder:
        self.exe.write_text(textwrap.dedent(PROGRAM).format(python=sys.executable, fails=repr(list(fails))))
        self.exe.chmod(0o755)
        lines = ["// [step 06.1: the sum (1 line)]", "x;", "// [end]", "// [step 06.2: the wait (1 line)]", "y;" * (not empty), "// [end]"]
        holes = [Region("step", "06.1", 0, 2, "the sum", 1), Region("step", "06.2", 3, 5, "the wait", 1)]
        text = Lesson(f"06_fast/mine/{name}", lines, holes, 1)
        return Ladder([Copy(Lesson(f"06_fast/{name}", lines, holes), text, [])])

    def judged(self, *fails: tuple[str, int, str, str], empty: bool = False, woven: bool = True) -> Ladder:
        ladder = self.ladder(*fails, empty=empty)
        ladder.judge_kernels(self.exe, woven)
        return ladder

    def test_family(self) -> None:
        self.assertEqual([family(x) for x in ("forward/hopper.cu", "backward/1_mma.cu")], ["hopper", "backward_mma"])
        self.assertEqual([family("beyond/decode/tiled.cu"), tiles("beyond/decode/tiled.cu")], ["decode", "decode.Tiles*"])

    def test_all_is_right(self) -> None:
        ladder = self.judged()
        self.assertTrue(ladder.ok)
        self.assertEqual(ladder.lines(), ["steps   all written", "tests   10 right"])     # four, and two at three other times

    def test_the_hole_that_breaks_a_rule(self) -> None:
        ladder = self.judged(("Tiles.SeveralOfEach/mma", 2, "", SENTENCE))
        self.assertEqual(ladder.lines(), [
            "steps   06.1 right · 06.2 not yet   (as far as one test tells)", "06.2: the wait",
            "  thread 0 reads at softmax.cuh:41 what mine/forward/1_mma.cu:95 has asked for",
            "tests   1 right, 1 wrong; the others wait until these pass"])
        self.assertEqual((ladder.ok, ladder.right), (False, ["06.1"]))

    def test_wrong_numbers_are_seen_by_all_tests(self) -> None:
        words = "case  B1\nO: 3 of 3 elements are wrong; worst\n  wrong: every element"
        ladder = self.judged(("mma.Sizes", 1, "", words))
        self.assertEqual(ladder.lines()[:2], ["steps   06.1 not yet · 06.2 right   (as far as one test tells)", "06.1: the sum"])
        self.assertIn("tests   3 right, 1 wrong", ladder.lines())

    def test_at_another_time(self) -> None:
        ladder = self.judged(("Tiles.AndAMask/mma", 1, "1", SENTENCE))
        self.assertRegex(ladder.lines()[0], "^steps   06.1 not yet · 06.2 right  ")
        self.assertIn("tests   7 right, 1 wrong", ladder.lines())

    def test_what_is_not_written(self) -> None:
        ladder = self.judged(("Tiles.AndAMask/mma", 2, "", SENTENCE), empty=True)
        self.assertEqual(ladder.lines()[:2], ["steps   06.1 right · 06.2 not written", "06.2: the wait"])
        self.assertFalse(self.judged(empty=True).ok)
        self.assertEqual(self.judged(empty=True).lines()[0], "steps   not written: 06.2")

    def test_outside_of_the_holes(self) -> None:
        ladder = self.judged(("mma.Scale", 0, "", "case  B1\nthrew: something"))
        self.assertIn("not judged: with the lesson's code in every hole it fails, too", ladder.lines()[0])

    def test_two_that_disagree(self) -> None:
        ladder = self.judged(("mma.Scale", 0, "", SENTENCE), woven=False)
        self.assertEqual(ladder.lines()[0], "tests   3 right, 1 wrong")

    def test_a_header(self) -> None:
        ladder = self.ladder(("mma.Sizes", 0, "", "no"), ("mma.Scale", 0, "", "no"), name="ptx/fragments.hpp")
        # Of a header all tests run.
        self.exe.write_text(self.exe.read_text().replace("if n in name", "if True"))
        ladder.judge_on_host(self.exe, ladder.headers(), Notes(tests={"06.1": "mma.Si*", "06.2": "mma.Scale"}))
        self.assertEqual(ladder.lines()[:3], ["steps   06.1 not yet · 06.2 not judged", "06.1: the sum", "  fails mma.Sizes"])


if __name__ == "__main__":
    unittest.main()
