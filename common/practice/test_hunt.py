"""A hunt gives nothing away but what fails; it ends when the test that knows the mistake passes."""
from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path

from hunt import tests_for, times  # puts common/judge on the path
from mutants import parse

TOOL = Path(__file__).resolve().parent / "hunt.py"
LESSON = '''\
// Softmax of a row.
// Two passes.
#include "a.hpp"

// The largest first.
// [quote row]
template <typename T>
T row(const T* x, int n) {
  const char* url = "http://a";  // no comment inside of this

  // (1) m = max x_j
  // [step 02.1: the maximum (1 line)]
  const T m = *std::max_element(x, x + n);  // of all
  // [end]

  // (2) l = sum of exp(x_j - m)
  T l = 0;
  for (int j = 0; j < n; ++j) l += std::exp(x[j] - m);
  return m + std::log(l);
}
// [end quote]
'''
MUTANTS = '''\
no_maximum: online.cpp
symptom: large scores give NaN
- const T m = *std::max_element(x, x + n);  // of all
+ const T m = 0;  // of none
kills: online.Values

no_sum: online.cpp
symptom: the sum is empty
- for (int j = 0; j < n; ++j) l += std::exp(x[j] - m);
kills: online.Sizes

no_wait: online.cpp
symptom: right by luck
- T l = 0;
race: online.Sizes
'''
# A test program that passes where the copy has the lesson's two lines.
PROGRAM = '''\
#!{python}
import sys
text = open("{stage}/hunt/online.cpp").read()
name = [a for a in sys.argv if "filter" in a][0].partition("=")[2]
bad = {{"online.Sizes": "l +=" not in text, "online.Values": "max_element" not in text}}
if "--gtest_list_tests" in sys.argv:
    print("online.\\n  Sizes\\n  Values")
elif "{skipped}" == name:
    print("a.cpp:1: Skipped\\nno usable GPU\\n[  SKIPPED ] " + name)
elif bad[name]:
    print("case  B1\\nO: 1 of 2 elements are wrong\\n  wrong: all of row 1\\nMUCH\\n[  FAILED  ] " + name + " (0 ms)")
    sys.exit(1)
'''


class Hunt(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.stage = self.root / "02_online"
        self.put("online.cpp", LESSON)
        self.put("check/mutants.txt", MUTANTS)
        self.put("CMakeLists.txt", "fa_add_stage(02 online LESSON online.cpp)\n")

    def put(self, name: str, text: str) -> Path:
        path = self.stage / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        return path

    def program(self, name: str = "hunt02_tests", skipped: str = "") -> None:
        path = self.put(f"../build/02_online/{name}",
                        PROGRAM.format(python=sys.executable, stage=self.stage, skipped=skipped))
        path.chmod(0o755)

    def hunt(self, code: int, command: str, *args: str) -> str:
        done = subprocess.run([sys.executable, TOOL, command, self.stage, *args], cwd=self.root, capture_output=True,
                              text=True, check=False)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        if done.stderr:
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        return done.stdout + done.stderr

    def copy(self) -> str:
        return (self.stage / "hunt/online.cpp").read_text()

    def begin(self, symptom: str) -> str:
        for seed in range(20):
            text = self.hunt(0, "start", "--seed", str(seed))
            if symptom in self.hunt(0, "symptom"):
                return text
            self.hunt(0, "reset")
        self.fail(f"no seed gives {symptom}")

    def test_the_copy_gives_nothing_away(self) -> None:
        text = self.begin("NaN")
        self.assertIn("02_online/hunt/online.cpp", text)
        self.assertEqual(text.count("\n"), 1)
        self.assertNotIn("NaN", text)
        self.assertEqual(self.copy(), '''\
// Softmax of a row.
// Two passes.
#include "a.hpp"

template <typename T>
T row(const T* x, int n) {
  const char* url = "http://a";

  const T m = 0;

  T l = 0;
  for (int j = 0; j < n; ++j) l += std::exp(x[j] - m);
  return m + std::log(l);
}
''')
        self.assertNotIn("no_", (self.stage / "hunt/.mutant").read_text())
        self.assertEqual(self.hunt(0, "start"), "")     # it goes on
        self.assertEqual(self.hunt(0, "symptom"), "Symptom: large scores give NaN\n")
        shown = self.hunt(0, "reveal")
        self.assertIn("02_online/online.cpp:13, in the hunt's copy near line 9\n- const T m = *std", shown)
        self.assertIn("Killed by the test stage02.online.Values", shown)
        self.assertIn("02 hunt result=revealed name=no_maximum\n", (self.root / ".progress").read_text())

    def test_judged_by_what_fails(self) -> None:
        self.program()
        self.begin("NaN")
        text = self.hunt(1, "judge")
        self.assertIn("1 of 2 tests fail:\n  wrong: O, all of row 1\n  only with unusual scores\n", text)
        self.assertLess(text.count("\n"), 15)
        for spoiler in ("NaN", "no_maximum", "MUCH"):
            self.assertNotIn(spoiler, text)
        self.assertIn("MUCH", self.hunt(1, "judge", "-v"))
        self.put("hunt/online.cpp", LESSON)
        self.assertIn("caught: all 2 tests pass. Another one: ./learn hunt 02 --reset", self.hunt(0, "judge"))
        self.assertIn("02 hunt result=caught name=no_maximum\n", (self.root / ".progress").read_text())

    def test_what_nothing_has_tested_is_not_caught(self) -> None:
        self.program(skipped="online.Values")
        self.begin("NaN")
        self.put("hunt/online.cpp", LESSON)
        self.assertEqual(self.hunt(3, "judge"), "not tested: 02_online/hunt/online.cpp, since no usable GPU\n")
        (self.root / "build/02_online/hunt02_tests").unlink()
        self.assertIn("since nvcc was not found", self.hunt(3, "judge", "--no-kernels", "nvcc was not found"))

    def test_both_programs_count(self) -> None:
        self.program(skipped="online.Values")
        self.program("hunt02_on_gpu_tests")
        self.begin("NaN")
        self.assertIn("1 of 4 tests fail", self.hunt(1, "judge"))

    def test_of_a_ladders_kernels_only_the_one_that_was_changed(self) -> None:
        self.put("CMakeLists.txt", "fa_add_ladder(02 online)\n")
        self.put("backward/1_mma.cu", LESSON)
        self.put("check/mutants.txt", MUTANTS.partition("\n\n")[0].replace("online.cpp", "backward/1_mma.cu"))
        self.program("hunt02_on_gpu_tests")
        seen = self.root / "seen"
        path = self.root / "build/02_online/hunt02_on_gpu_tests"
        path.write_text(path.read_text().replace("import sys", f"import sys; open('{seen}', 'a').write(sys.argv[2] + ' ')", 1)
                        .replace("hunt/online.cpp", "hunt/backward/1_mma.cu"))
        listed = self.stage / "check/mutants.txt"
        here = listed.read_text()
        listed.write_text(here.replace("kills:", "gpu:"))
        self.assertIn("mutants.txt: lists no mutant", self.hunt(1, "start", "--no-kernels", "no GPU"))
        listed.write_text(here)
        self.hunt(0, "start", "--no-kernels", "no GPU")
        self.hunt(1, "judge")
        self.assertTrue(seen.read_text().startswith("--gtest_filter=backward_mma.*:Tiles.*/backward_mma:online.Values "), seen.read_text())

    def test_what_kills_is_never_spared(self) -> None:
        self.put("CMakeLists.txt", "fa_add_ladder(02 online)\n")
        self.put("check/mutants.txt", MUTANTS.partition("\n\n")[0].replace("online.cpp", "forward/1_mma.cu"))
        mutant = parse(self.stage / "check/mutants.txt")[0]
        self.assertEqual([times(replace(mutant, order=order)) for order in ("", "gpu", "early", "random 3")],
                         [[""], [""], ["early"], ["1", "2", "3"]])
        said = [tests_for(self.stage, Path("hunt02_on_cpu_tests"), replace(mutant, kills=kills)) for kills in ("mma.Values", "mma.Sizes")]
        self.assertEqual([("mma.*:Tiles.*/mma:" in text, ":*Values" in text, ":*Layouts" in text) for text in said],
                         [(True, False, True), (True, True, True)])

    def test_bad_input(self) -> None:
        for command in ("reveal", "symptom", "judge"):
            self.assertIn("no hunt is on; begin one: ./learn hunt 02", self.hunt(1, command))
        self.put("hunt/.mutant", "broken")
        for command in ("start", "reveal", "symptom", "judge"):
            self.assertIn("holds no hunt; clear it: ./learn hunt 02 --reset", self.hunt(1, command))
        self.hunt(0, "reset")
        self.assertFalse((self.stage / "hunt").exists())
        (self.stage / "hunt").symlink_to(self.stage / "check")
        self.hunt(1, "reset")
        self.assertTrue((self.stage / "check/mutants.txt").exists())


if __name__ == "__main__":
    unittest.main()
