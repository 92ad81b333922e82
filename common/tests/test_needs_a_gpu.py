"""Of a program whose tests need a GPU: skipped means that nothing has failed, and that there was no GPU."""

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

TOOL = Path(__file__).parents[1] / "cmake" / "needs_a_gpu.sh"


class NeedsAGpu(unittest.TestCase):
    def run_with(self, script: str) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "tests")
            program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
            os.chmod(program, 0o755)
            return subprocess.run(["sh", TOOL, program], capture_output=True, text=True, check=False)

    def test_skipped_passed_and_failed(self) -> None:
        none = "echo 'test.cpp:3: Skipped'; echo 'no usable GPU: no driver'; "
        skipped = self.run_with(none)
        self.assertEqual(skipped.returncode, 77)
        self.assertIn(": Skipped\nno usable GPU: no driver\n", skipped.stdout)  # what summary.py reads
        self.assertEqual(self.run_with("echo PASSED").returncode, 0)
        self.assertEqual(self.run_with(none + "exit 1").returncode, 1)  # a test that needs none has failed
        self.assertEqual(self.run_with(none + "kill -9 $$").returncode, 137)
        self.assertEqual(self.run_with("exit 127").returncode, 127)


if __name__ == "__main__":
    unittest.main()
