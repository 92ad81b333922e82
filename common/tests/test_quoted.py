"""A page that quotes what a program does not print is found, and so is a program that fails."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

TOOL = Path(__file__).with_name("quoted.py")
PAGE = "# Title\n\n<!-- output tell -->\n```text\n$ build/tell_on_cpu\none\ntwo\n```\n<!-- end -->\n"


class Quoted(unittest.TestCase):
    def run_with(self, script: str, page: str = PAGE, name: str = "tell_on_cpu") -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as folder:
            program, text = Path(folder, name), Path(folder, "README.md")
            program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
            os.chmod(program, 0o755)
            text.write_text(page, encoding="utf-8")
            return subprocess.run([sys.executable, TOOL, program, text], capture_output=True, text=True, check=False)

    def test_what_is_quoted_must_be_printed(self) -> None:
        self.assertEqual(self.run_with("echo one; echo two").returncode, 0)
        self.assertEqual(self.run_with("echo one; echo two", name="tell_on_gpu").returncode, 0)
        changed = self.run_with("echo one; echo three")
        self.assertEqual(changed.returncode, 1)
        self.assertIn("one\nthree\n", changed.stdout)
        self.assertIn("README.md quotes instead:\none\ntwo\n", changed.stderr)

    def test_what_is_rounding_need_only_be_near(self) -> None:
        page = PAGE.replace("one\n", "one   ~0.04  ~3e-07\n")
        for printed, code in (("~0.04  ~3e-07", 0), ("~0.025 ~5e-07", 0), ("~0.1   ~3e-07", 1), ("~0.04  ~1e-07", 1),
                              ("~0.04  ~0", 1), ("0.04   ~3e-07", 1)):
            self.assertEqual(self.run_with(f"echo 'one   {printed}'; echo two", page).returncode, code, printed)

    def test_a_mark_needs_its_block(self) -> None:
        broken = self.run_with("echo one; echo two", PAGE.replace("<!-- end -->", ""))
        self.assertEqual((broken.returncode, "behind each mark" in broken.stderr), (1, True))

    def test_a_program_that_is_not_quoted_need_only_succeed(self) -> None:
        self.assertEqual(self.run_with("date", name="clock_on_cpu").returncode, 0)
        self.assertEqual(self.run_with("exit 77", name="clock_on_gpu").returncode, 77)
        self.assertEqual(self.run_with("kill -9 $$").returncode, 1)
        self.assertEqual(self.run_with("echo one; echo two; exit 1").returncode, 1)

    def test_bad_input_is_one_line(self) -> None:
        for words, code in ((["a"], 2), (["no_program", str(TOOL)], 3)):
            done = subprocess.run([sys.executable, TOOL, *words], capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (code, 1))


if __name__ == "__main__":
    unittest.main()
