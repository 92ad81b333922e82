"""06's table of faults: what a run of a planted fault is called, and what the table shows of it."""
from __future__ import annotations

import stat
import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "06_optimized/check"))
from faults import sentence, table, verdict  # noqa: E402
from mutants import Mutant  # noqa: E402


def mutant(name: str) -> Mutant:
    return Mutant(name, "forward/8_ring.cu", f"what {name} does", [], [], "ring.Sizes", order="late")


class Faults(unittest.TestCase):
    def run_of(self, script: str, limit: float = 20) -> tuple[str, str]:
        with tempfile.TemporaryDirectory() as folder:
            exe = Path(folder) / "program"
            exe.write_text("#!/bin/sh\n" + script)
            exe.chmod(exe.stat().st_mode | stat.S_IXUSR)
            return verdict(exe, mutant("a"), "early", limit)

    def test_what_became_of_a_run(self) -> None:
        said = "threw: ring_kernel: block 3: the copy asked for at /a/8_ring.cu:42 overwrites"
        for script, what in (("exit 0", ("passes", "")), ("echo wrong; exit 1", ("wrong", "")), ("kill -9 $$", ("ends", "")),
                             (f"echo '{said}'; exit 1", ("said", "the copy asked for at 8_ring.cu:42 overwrites")),
                             ('[ "$FA_TIMING$FA_MUTANT" = earlya ]', ("passes", ""))):
            with self.subTest(script):
                self.assertEqual(self.run_of(script), what)
        self.assertEqual(self.run_of("exec sleep 20", 0.2), ("hangs", ""))

    def test_the_sentence(self) -> None:
        self.assertEqual(sentence('with description "a_kernel: block 0 hangs: threads 0-31 wait" thrown in the test body.'),
                         "block 0 hangs: threads 0-31 wait")
        self.assertEqual(sentence("O: 3 of 3 elements are wrong"), "")

    def test_the_table(self) -> None:
        text = table([mutant("a"), mutant("b")], {"a": {"late": "said", "early": "passes", "random": 8, "said": "so", "NVIDIA H200": "0 of 3"}})
        self.assertIn("| `a`: what a does | forward/8_ring.cu | named | – | 8 | 0 of 3 |", text)
        self.assertIn("| `b`: what b does | forward/8_ring.cu |  |  |  |  |", text)
        self.assertTrue(text.endswith("- `a`: so\n"))

    def test_the_summary_counts_by_who_saw_it_what_was_tried_everywhere(self) -> None:
        order = {"a": "late", "b": "early", "c": "", "d": "gpu", "e": "late", "f": "late"}
        mutants = [replace(mutant(name), order=when) for name, when in order.items()]
        seen = {"late": "said", "early": "passes", "random": 0, "said": "so", "G": "–"}
        known = {"a": seen, "b": {**seen, "late": "passes", "early": "hangs", "random": 1, "said": "", "G": "hangs"},
                 "c": {**seen, "G": "0 of 3; all tests: numbers"}, "d": {"G": "3 of 3"},
                 "f": {key: what for key, what in seen.items() if key != "G"}}
        text = table(mutants, known)
        for line in ("planted | 1 | 2", "all tests of the kernel, on an G | 1 | 1", "– by not coming to an end, on an G | 0 | 1",
                     "one test, on the CPU, late | 1 | 1", "– early | 0 | 1", "– at random, one of 8 seeds | 0 | 1",
                     "– by a sentence that says where and why | 1 | 1"):
            self.assertIn(f"\n| {line} |\n", text)


if __name__ == "__main__":
    unittest.main()
