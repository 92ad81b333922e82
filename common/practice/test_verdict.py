"""What a test program of exercises prints becomes a verdict on one screen."""
from __future__ import annotations

import math
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path
from unittest import mock

import verdict
from marks import Lesson, Region  # puts common/judge on the path
from verdict import Copy, Program, Trials, Verdict, differs, grouped, number, of_trials, origin_of, program, table
from weave import Notes

WRONG = r"O: 3 of 35 elements are wrong; worst at (i 4, x 0): got 1, want 2\n  wrong: all of row 4\nright: LSE\n"
# Behaves as a program of exercises: FA_STEPS says which of two holes, bits 0 and 1, are the reader's.
PROGRAM = f'''\
    #!{sys.executable}
    import os, sys, time
    MODE = "{{mode}}"
    steps = int(os.environ.get("FA_STEPS", "ffff"), 16)
    name = [a for a in sys.argv if "filter" in a][0].partition("=")[2]
    if "--gtest_list_tests" in sys.argv:
        print("rows.\\n  Sizes\\nOwn.\\n  Test")
    elif name == "Practice.Trace":
        outside = "FA_OUTSIDE" in os.environ
        print("stage\\trows")
        if MODE != "dead" or steps == 0:
            print("launched\\tkernel " + ("other " if MODE != "idle" or steps == 0 else ""))
        for x in (1, 2, 3, 4, 5):
            print(f"see\\tP\\t{{{{x}}}}")
        for x in (1, 2, 3, 4, 5):
            print(f"see\\ts\\t{{{{x + (steps & 1 and MODE != 'right' and x == 5)}}}}" if not outside else f"see\\tsum\\t{{{{x}}}}")
    elif name == "Practice.Trials":
        print("begins\\ta few keys\\ntrial\\ta few keys\\t", end="", flush=True)
        print(r"{WRONG}" if MODE == "wrong" and steps & 1 or MODE == "outside" or MODE == "both" and steps & 3 == 3 else "")
        print("begins\\tcausal, top left", flush=True)
        if MODE == "crash" and steps & 1:
            print("\\nended by SIGSEGV (memory that is not there) at\\nPractice.Trials", flush=True)
            os.kill(os.getpid(), 11)
        if MODE == "hang" and steps & 1:
            time.sleep(30)
        print("trial\\tcausal, top left\\t", flush=True)
    elif name == "rows.Sizes" and MODE == "suite" and steps & 2 or name == "Own.Test" and MODE == "own" and steps & 1:
        print(f"a.cpp:3: Failure\\nExpected: right\\n  wrong\\n[  FAILED  ] {{{{name}}}} (1 ms)")
        sys.exit(1)
'''


def hole(name: str, first: int, *equations: int) -> Region:
    return Region("step", name, first, first + 2, f"what {name} does", 1, equations)


def copy(*filled: bool) -> Copy:
    """A reader's file with two holes."""
    lines = [line for is_ in filled for line in ("// [step", "code;" if is_ else "// TODO", "// [end]")]
    holes = [hole("02.1", 0, 1), hole("02.2", 3, 2, 3)][:len(filled)]
    return Copy(Lesson("02_toy/toy.cpp", []), Lesson("02_toy/mine/toy.cpp", lines, holes, 1), [])


NOTES = Notes({"toy.cpp": ["rows", "Own.*"]}, {"02.1": 'see("s", s);'}, {}, {"P": "(2)"}, {})


class OfAProgram(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def program(self, mode: str) -> Program:
        exe = self.folder / mode
        exe.write_text(textwrap.dedent(PROGRAM.format(mode=mode)))
        exe.chmod(0o755)
        return program(exe, [copy(True, True)], NOTES)

    def judged(self, mode: str, *filled: bool, notes: Notes = NOTES) -> Verdict:
        found = Verdict(self.program(mode), [copy(*(filled or (True, True)))], notes, True)
        found.judge()
        return found

    def test_right(self) -> None:
        found = self.judged("right")
        self.assertEqual(found.lines, ["tiny problem: as in the chapter (P, s)", "steps   02.1 right · 02.2 right", "tests   2 right"])
        self.assertTrue(found.passed)

    def test_wrong(self) -> None:
        found = self.judged("wrong")
        self.assertEqual(found.lines[:3], ["  tiny problem    equation      yours                            the chapter's",
                                           "  P               (2)           1 2 3 4                          the same",
                                           "  s               (1)           6                                5  <-   numbers 5 to 5 of 5"])
        self.assertEqual(found.lines[3:], ["steps   02.1 not yet · 02.2 right   (as far as the trials tell)", "02.1, equation (1): what 02.1 does",
                                           "  wrong: O, all of row 4; LSE right",
                                           "  wrong with a few keys; right with causal, top left"])
        self.assertEqual((found.right, found.passed), (["02.2"], False))

    def test_a_crash_names_the_trial(self) -> None:
        self.assertEqual(self.judged("crash").lines[5:],
                         ["  crashes at the trial: causal, top left; SIGSEGV (memory that is not there)"])

    def test_a_hang_does_not_last(self) -> None:
        with mock.patch.object(verdict, "LIMIT", 1.0):
            self.assertEqual(self.judged("hang").lines[5:], ["  does not end at the trial: causal, top left"])

    def test_what_the_trials_cannot_tell_the_tests_do(self) -> None:
        found = self.judged("suite")
        self.assertIn("steps   02.1 right · 02.2 not yet", found.lines)
        self.assertIn("  alone it fails rows.Sizes", found.lines)
        self.assertIn("tests   1 right, 1 wrong", found.lines)

    def test_a_hole_with_tests_of_its_own(self) -> None:
        found = self.judged("own", notes=Notes(NOTES.judges, {}, {"02.1": "Own.Test"}))
        self.assertIn("steps   02.1 not yet · 02.2 right", found.lines)
        self.assertIn("  fails Own.Test", found.lines)
        self.assertNotIn("every trial", "\n".join(found.lines))

    def test_what_costs_too_much_is_not_yet_right(self) -> None:
        """All numbers are right, a count is not: it keeps its verdict although the tests pass."""
        self.assertTrue(self.judged("dear").passed)
        found = self.judged("dear", notes=Notes(NOTES.judges, {"02.2": 'see("s", s);'}, {"02.1": "seen s"}))
        self.assertFalse(found.passed)
        self.assertIn("  s               (1)           6                                5  <-   numbers 5 to 5 of 5", found.lines)
        self.assertIn("steps   02.1 not yet · 02.2 right", found.lines)
        self.assertIn("  s: 1, 2, 3, 4 and 1 more; the chapter's: 1, 2, 3, 4 and 1 more", found.lines)

    def test_holes_that_do_not_fit_together_are_named(self) -> None:
        found = self.judged("both")
        self.assertEqual((found.wrong, found.passed), ({}, False))
        self.assertEqual(found.lines[-1], "  right with the lesson's code in place of 02.1 or 02.2")

    def test_no_hole_is_blamed_for_what_stands_outside(self) -> None:
        found = self.judged("outside")
        self.assertEqual((found.wrong, found.right, found.passed), ({}, [], False))
        self.assertIn("what stands outside of them has changed", "\n".join(found.lines))
        self.assertIn("  wrong: O, all of row 4; LSE right", found.lines)

    def test_a_kernel_that_is_never_launched(self) -> None:
        self.assertEqual(self.judged("idle").lines[0], "never launched: other (its FA_LAUNCH is missing, or is not reached)")
        for mode in ("right", "dead"):  # of a program that ends before it tells, nothing is known
            self.assertNotIn("never launched", "\n".join(self.judged(mode).lines))

    def test_not_written(self) -> None:
        found = self.judged("wrong", False, True)
        self.assertIn("steps   02.1 not written · 02.2 right   (as far as the trials tell)", found.lines)
        self.assertEqual(found.lines[-1], "02.1, equation (1): what 02.1 does")
        self.assertEqual((found.empty, found.right), (["02.1"], ["02.2"]))

    def test_where_nothing_is_written_the_first_step_is_told(self) -> None:
        self.assertEqual(self.judged("dead", False, False).lines[-3:-1],
                         ["steps   02.1 not written · 02.2 not written", "02.1, equation (1): what 02.1 does"])

    def test_what_cannot_be_woven_has_no_steps(self) -> None:
        found = Verdict(self.program("wrong"), [copy(True, True)], NOTES, False)
        found.judge()
        self.assertEqual(found.lines, ["all together", "  wrong: O, all of row 4; LSE right",
                                       "  wrong with a few keys; right with causal, top left"])


class WhatIsSeenFromOutside(unittest.TestCase):
    def test_the_equation_depends_on_what_else_is_wrong(self) -> None:
        of = {"a": "(1)", "a nan": "(2)", "a and b": "(3)", "a and b nan": "(4)", "nothing": "(5)", "b nothing": "(6)"}
        for name, got, wrong, want in (("a", [1.0], {"a"}, "(1)"), ("a", [math.nan], {"a"}, "(2)"), ("a", [-math.inf], {"a"}, "(2)"),
                                       ("a", [1.0], {"a", "b"}, "(3)"), ("b", [1.0], {"a", "b"}, "(3)"),
                                       ("a", [math.inf], {"a", "b"}, "(4)"), ("a", [], {"a", "b"}, "(5)"), ("b", [], {"b"}, "(6)"),
                                       ("b", [1.0], {"b"}, ""), ("c", [1.0], {"c"}, "")):
            with self.subTest(name, got=got, wrong=wrong):
                self.assertEqual(origin_of(name, got, wrong, of), want)

    def test_a_file_may_say_more_than_its_stage(self) -> None:
        told = Notes(outside={"P": "(1)", "toy.cpp P": "(2)", "other.cpp P": "(3)"})
        found = Verdict(Program(Path("x"), [], ""), [copy(True)], told, True)
        lines = found.chapter({"rows": {"P": [1.0]}}, {"rows": {"P": [2.0]}}, True)
        self.assertEqual(lines, ["  from outside    equation      yours                            the chapter's",
                                 "  P               (2)           1                                2  <-"])
        self.assertEqual(found.chapter({"rows": {"P": [2.0]}}, {"rows": {"P": [2.0]}}, True),
                         ["from outside: as the lesson, in 1 quantities on small problems"])


class WhichTests(unittest.TestCase):
    def test_methods_and_filters(self) -> None:
        other = Copy(Lesson("02_toy/other.cpp", []), Lesson("02_toy/mine/other.cpp", []), [])
        notes = Notes({"toy.cpp": ["rows", "Own.*", "-rows.Backward*"], "other.cpp": ["lanes"]})
        one, both = (program(Path("x"), mine, notes) for mine in ([copy()], [copy(), other]))
        self.assertEqual((one.stages, one.filter), (["rows"], "rows.*:Own.*-Practice.*:rows.Backward*"))
        self.assertEqual((both.stages, both.filter), (["rows", "lanes"], "rows.*:lanes.*:Own.*-Practice.*"))


class Saying(unittest.TestCase):
    def test_the_table_ends_at_the_first_difference(self) -> None:
        nan = float("nan")
        theirs = {"s": [1.0, 2.0], "m": [3.0], "l": [4.0, 5.0]}
        self.assertEqual(table(theirs, theirs, {}), [])
        lines = table({"s": [1.00001, 2.0], "m": [nan], "l": [0.0, 0.0]}, theirs, {"m": "(2)"})
        self.assertEqual([line.split() for line in lines[1:]],
                         [["s", "1", "2", "the", "same"], ["m", "(2)", "nan", "3", "<-"]])

    def test_the_table_has_few_lines(self) -> None:
        theirs = {f"x{i}": [float(i)] for i in range(20)}
        self.assertLessEqual(len(table({**theirs, "x19": []}, theirs, {})), 6)

    def test_what_is_not_there_is_said(self) -> None:
        self.assertIn("nothing", table({}, {"s": [1.0]}, {})[1])

    def test_where_lists_differ(self) -> None:
        nan, inf = float("nan"), float("inf")
        self.assertIsNone(differs([1, nan, inf, -inf, 1e-9], [1, nan, inf, -inf, 0]))
        self.assertEqual([differs([1], [1, 2]), differs([1, 2], [1]), differs([1, -inf], [1, inf])], [1, 1, 1])

    def test_numbers(self) -> None:
        self.assertEqual([number(x) for x in (float("nan"), 0.70710678, -float("inf"), 1234567.0)], ["nan", "0.7071", "-inf", "1.2e+06"])

    def test_many_trials(self) -> None:
        wrong = {f"t{i}": "threw: an index" for i in range(6)}
        self.assertEqual(of_trials(Trials(["a"], wrong))[-1], "wrong with t0, t1, t2 and 3 more; right with a")
        self.assertEqual(of_trials(Trials([], wrong))[-1], "wrong with every trial")
        self.assertEqual(of_trials(Trials(["a"])), [])

    def test_the_first_size_says_what_sizes_are(self) -> None:
        wrong = {"one key (3 x 1 x 4)": "O is bad", "several tiles (33 x 150 x 16)": "O is worse"}
        self.assertEqual(of_trials(Trials(["no keys (5 x 0 x 8)"], wrong)),
                         ["wrong: O is worse", "wrong with one key (Nq x Nk x d = 3 x 1 x 4), several tiles (33 x 150 x 16); "
                                               "right with no keys (5 x 0 x 8)"])

    def test_many_steps_in_a_line(self) -> None:
        some = [("02.1", "right"), ("02.2", "not yet"), ("02.3", "not written")]
        self.assertEqual(grouped(some), "02.1 right · 02.2 not yet · 02.3 not written")
        self.assertEqual(grouped(some * 4), "right: 02.1 02.1 02.1 02.1 · not yet: 02.2 02.2 02.2 02.2 · "
                                            "not written: 02.3 02.3 02.3 02.3")


if __name__ == "__main__":
    unittest.main()
