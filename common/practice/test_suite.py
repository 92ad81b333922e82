"""What fails is told as a pattern; a test that crashes or hangs hides no other and leaves nothing running."""
from __future__ import annotations

import os
import sys
import tempfile
import textwrap
import time
import unittest
from pathlib import Path

from suite import Suite, Test, broken_rules, pattern, run_suite  # puts common/judge on the path
from source import Bad

# Behaves as a GoogleTest program: lists its tests, runs the one that the filter names.
PROGRAM = '''\
    #!{python}
    import os, signal, subprocess, sys, time
    NAMES = ["rows.Sizes", "rows.Scale", "rows.Empty", "rows.Fuzz", "Own.Test"]
    name = [a for a in sys.argv if "filter" in a][0].partition("=")[2]
    if "--gtest_list_tests" in sys.argv:
        print("testing YOUR code: mine/a.cpp\\nrows.  # TypeParam\\n  Sizes\\n  Scale\\n  Empty\\n  Fuzz  # GetParam()\\nOwn.\\n  Test")
    elif name == "rows.Sizes":
        print("case  B1 Nq1\\nO: 3 of 3 elements are wrong; worst\\n  wrong: every element\\n[  FAILED  ] rows.Sizes (1 ms)")
        sys.exit(1)
    elif name == "rows.Scale":
        print("\\nended by SIGSEGV (memory that is not there) at\\nrows.Scale: about\\ncase  B1 Nq7 scale0.1\\nthis case", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    elif name == "rows.Empty":
        child = subprocess.Popen(["sleep", "60"])
        open("{folder}/child", "w").write(str(child.pid))
        signal.signal(signal.SIGTERM, lambda *_: (print("\\ninterrupted at\\nrows.Empty: about\\ncase  B0", flush=True), os._exit(143)))
        time.sleep(60)
    elif name == "rows.Fuzz":
        print("a.cpp:3: Skipped\\nno GPU\\n[  SKIPPED ] rows.Fuzz (0 ms)")
    else:
        print("x" * 700000 + os.environ.get("MORE", ""))
'''


def comparison(what: str, wrong: int, count: int, where: str) -> str:
    return f"{what}: {wrong} of {count} elements are wrong; worst at (b 0, h 0): got 1, want 2\n  wrong: {where}\n"


def suite(**bad: str) -> Suite:
    """Of two methods, and a test of the stage's own; an argument names a test that fails, and what it prints."""
    names = [f"{method}.{family}" for method in ("rows", "lanes")
             for family in ("Sizes", "Scale", "Heads", "CausalTopLeft", "MaskedRows", "CausalBottomRight", "KeyLengths", "Values")]
    output = {name.replace("_", "."): text for name, text in bad.items()}
    return Suite(Path("exercise02_tests"), [Test(n, "failed" if n in output else "passed", output.get(n, ""))
                                            for n in [*names, "Merge.Any"]])


class Pattern(unittest.TestCase):
    def test_nothing_to_say(self) -> None:
        self.assertEqual(pattern(suite()), [])
        self.assertTrue(suite().ok)

    def test_where_and_what_is_right_beside_it(self) -> None:
        text = "case  B1 f32\n" + comparison("O", 3, 3, "every element") + comparison("O", 8, 64, "all of rows >= 56")
        lines = pattern(suite(rows_Sizes=text + "right: LSE\n", rows_Heads="any", lanes_Sizes=text))
        self.assertEqual(lines, ["wrong: O, all of rows >= 56; LSE right"])

    def test_next_to_everything(self) -> None:
        lines = pattern(suite(rows_Sizes=comparison("dK", 127, 128, "all of columns 0 to 59 and 61 to 127") + "right: dQ and dV\n"))
        self.assertEqual(lines[0], "wrong: dK, nearly every element; dQ and dV right")

    def test_the_first_family_names_the_idea(self) -> None:
        wrong = comparison("LSE", 2, 4, "all of row 1") + comparison("O", 2, 4, "all of row 1")
        for bad, only in (({"lanes_CausalTopLeft": wrong, "lanes_CausalBottomRight": wrong, "lanes_KeyLengths": wrong},
                           "with a causal mask"),
                          ({"lanes_CausalTopLeft": wrong}, "with the mask top_left"),
                          ({"lanes_MaskedRows": wrong, "lanes_CausalBottomRight": wrong}, "with the mask bottom_right"),
                          ({"lanes_MaskedRows": wrong}, "rows that see no key"),
                          ({"lanes_KeyLengths": wrong, "lanes_Values": wrong}, "with key lengths"),
                          ({"lanes_Heads": wrong + "  passes: all 2 cases with a key head for each query head; fails: all 3 "
                            "with groups of query heads"}, "with groups of heads"),
                          ({"lanes_Values": "case  B1 Nk9 level-500 seed1 f32\n" + wrong}, "with large scores"),
                          ({"lanes_MaskedRows": wrong, "lanes_CausalBottomRight": wrong + "  passes: all 3 cases with Nq <= Nk; "
                            "fails: all 2 with Nq > Nk"}, "rows that see no key"),
                          ({"lanes_Scale": "case  B1 scale-1 normal15 seed1 f32\n" + wrong}, "with a negative scale and large scores"),
                          ({"lanes_Scale": "case  B1 scale-1 normal15 seed1 f32\n" + wrong, "lanes_Values": ""}, "with large scores"),
                          ({"lanes_Scale": "case  B1 scale-1 normal seed1 f32\n" + wrong}, "with a negative scale"),
                          ({"lanes_Values": "case  B1 Nk9 equal seed1 f32\n" + wrong}, "with unusual scores")):
            with self.subTest(only):
                lines = pattern(suite(**bad))
                self.assertEqual(lines[:2], ["wrong: O and LSE, all of row 1", f"only {only}, in lanes, not in rows"])

    def test_contrast_and_own_tests(self) -> None:
        lines = pattern(suite(rows_Sizes=comparison("O", 1, 2, "row 1") + "  passes: all 6 cases with Nk <= 1; fails: all 9 with Nk > 1",
                              Merge_Any="no words"))
        self.assertIn("rows.Sizes passes all 6 cases with Nk <= 1; fails all 9 with Nk > 1", lines)
        self.assertEqual(lines[-1], "fails as well: Merge.Any")
        self.assertEqual(pattern(suite(Merge_Any="no words")), ["fails, and nothing else does: Merge.Any"])

    def test_of_a_stages_own_test(self) -> None:
        text = "/a/b.cpp:3: Failure\nExpected equality of these values:\n  c.verdict()\nWith diff:\n-" + comparison(
            "dQ", 2, 4, "all of batch entry 1\\n").replace("  wrong", "-  wrong")
        self.assertEqual(pattern(suite(Merge_Any=text)), ["wrong: dQ, all of batch entry 1", "fails, and nothing else does: Merge.Any"])
        text = "/a/b.cpp:3: Failure\nExpected: (share(1)) <= (0.05), actual: 0.4 vs 0.05\nfast: false\n/a/b.cpp:3: Failure\nmore"
        self.assertEqual(pattern(suite(Merge_Any=text))[0], "wrong: Expected: (share(1)) <= (0.05), actual: 0.4 vs 0.05 fast: false")

        text = "/a/b.cpp:3: Failure\nFailed\ntiled: block 0 takes the wrong rows\n[  FAILED  ] Merge.Any (4 ms)\n"
        self.assertEqual(pattern(suite(Merge_Any=text))[0], "wrong: tiled: block 0 takes the wrong rows")

    def test_lists_stay_short(self) -> None:
        text = comparison("dV", 2, 4, "") + comparison("dQ", 2, 4, "") + comparison("dK", 2, 4, "all of key 1")
        tests = [Test(f"{method}.BackwardSizes", "failed" if method == "a" else "passed", text) for method in "abcd"]
        self.assertEqual(pattern(Suite(Path("x"), tests)), ["wrong: dQ, dK and dV, all of key 1", "only in a"])

    def test_in_the_tests_own_words(self) -> None:
        lines = pattern(suite(rows_MaskedRows="case  B1 f32\nLSE of row 64, which sees no key, must be -infinity, got 0.5\n"))
        self.assertEqual(lines[0], "wrong: LSE of row 64, which sees no key, must be -infinity, got 0.5")
        lines = pattern(suite(rows_Sizes="case  B1 f32\nthrew: launch failed at /home/me/fa/04/tiled.cu:218: " + "because " * 40))
        self.assertTrue(lines[0].startswith("wrong: threw: launch failed at tiled.cu:218: because"), lines)
        self.assertLess(len(lines[0]), 241)
        hang = ("threw: register_tiled: block 0 hangs: threads 0-15, 32-47, 64-79 and 16 more wait for their warp (__syncwarp or a shuffle), "
                "but not all lanes of the mask come; threads 16-31, 48-63, 80-95 and 16 more wait in __syncthreads")
        self.assertEqual(pattern(suite(rows_Sizes=f"case  B1 f32\n{hang}\n"))[0], f"wrong: {hang}")


class Rules(unittest.TestCase):
    def test_the_emulators_sentences(self) -> None:
        one = "thread 0 reads at /a/b/softmax.cuh:41 what mine/forward/8_ring.cu:95 has asked for (PTX, wgmma.wait_group)"
        two = "block 3 hangs: threads 0-127 wait for a barrier at mine/forward/8_ring.cu:66"
        bad = suite(rows_Sizes=f"case  B1 f32\nthrew: ring_kernel: block 0: {one}\nmore\n",
                    rows_Scale=f'C++ exception with description "ring_kernel: block 7: {one}" thrown in the test body.\n',
                    rows_Heads=f"threw: ring_kernel: {two}\n", lanes_Sizes="threw: a bad argument\n")
        self.assertEqual(broken_rules(bad), [one.replace("/a/b/", ""), two])
        self.assertEqual(broken_rules(suite(rows_Sizes="case  B1 f32\n" + comparison("O", 3, 3, "every element"))), [])

    def test_no_more_than_a_screen(self) -> None:
        bad = suite(rows_Sizes="threw: a_kernel: block 0: " + "because " * 99 + "\n",
                    rows_Scale="threw: a_kernel: block 0: b\n", rows_Heads="threw: a_kernel: block 0: c\n")
        said = broken_rules(bad)
        self.assertEqual((len(said), len(said[0]) <= 300), (2, True))


class Running(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.program = self.folder / "program"
        self.program.write_text(textwrap.dedent(PROGRAM).format(python=sys.executable, folder=folder.name))
        self.program.chmod(0o755)

    def test_each_test_by_itself(self) -> None:
        begun = time.monotonic()
        suite = run_suite(self.program, jobs=5, limit=1.5, env={"MORE": "the end"})
        self.assertLess(time.monotonic() - begun, 20)
        self.assertEqual([(t.name, t.state) for t in suite.tests],
                         [("rows.Sizes", "failed"), ("rows.Scale", "crashed"), ("rows.Empty", "hung"),
                          ("rows.Fuzz", "skipped"), ("Own.Test", "passed")])
        self.assertEqual([t.case for t in suite.tests[1:3]], ["B1 Nq7 scale0.1", "B0"])
        self.assertFalse(suite.ok)
        self.assertLess(len(suite.tests[4].output), 600000)
        self.assertIn("the end", suite.tests[4].output)
        self.assertEqual(pattern(suite, "./learn practice 02 --asan"),
                         ["crashes: rows.Scale: SIGSEGV (memory that is not there); at case B1 Nq7 scale0.1",
                          "does not end: rows.Empty; at case B0",
                          "to try: ./learn practice 02 --asan",
                          "wrong: O, every element"])
        with self.assertRaises(ProcessLookupError):     # what a hanging test has started does not outlive it
            for _ in range(50):
                os.kill(int((self.folder / "child").read_text()), 0)
                time.sleep(0.1)

    def test_where_everything_hangs_nobody_waits_for_all(self) -> None:
        self.program.write_text(self.program.read_text().replace("elif name", "elif time.sleep(60) or name"))
        suite = run_suite(self.program, jobs=2, limit=0.5)
        states = [t.state for t in suite.tests]
        self.assertEqual((states[0], states[-1]), ("hung", "left out"))
        self.assertRegex(pattern(suite)[-1], "left out, since nothing came to an end: [23] more tests")

    def test_no_program(self) -> None:
        self.program.write_text(f"#!{sys.executable}\nimport sys; sys.exit(9)")
        with self.assertRaisesRegex(Bad, "does not even list its tests"):
            run_suite(self.program)


if __name__ == "__main__":
    unittest.main()
