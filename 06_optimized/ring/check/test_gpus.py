"""The ring's program on this host's GPUs: results, and ranks that are lost while NCCL carries their messages.

    test_gpus.py FOLDER    the folder with the program

With one GPU two ranks share it, and messages go through host memory. Without: exit code 77, which stands for skipped.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import launch  # noqa: E402

FOLDER = Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else Path("build/06_optimized").resolve()
PROGRAM = str(FOLDER / "stage06_ring")
GPUS = launch.gpus_here()
RANKS = min(max(GPUS, 2), 4)
BY = [] if GPUS > 1 else ["--sockets"]


def run(*options: str, ranks: int = RANKS) -> tuple:
    with tempfile.TemporaryFile("w+") as output:
        code, sentence = launch.run([PROGRAM, *options, *BY], ranks, output=output, limit=120)
        output.seek(0)
        return code, sentence, output.read()


class Results(unittest.TestCase):
    def right(self, *options: str) -> None:
        code, sentence, output = run(*options, "--backward", "--check", "--rounds", "0")
        self.assertEqual((code, sentence), (0, ""), output)
        self.assertNotIn("WRONG", output)
        self.assertIn("check of dV   right", output)

    def test_causal(self):
        self.right("--length", "1024,1031", "--heads", "8", "--key-heads", "8,4", "--causal",
                   "--kind", "ring,gather,heads")

    def test_no_mask(self):
        self.right("--length", "1024,517", "--heads", "4", "--contiguous", "--kind", "ring,gather,heads")

    def test_fp16_and_another_head_dimension(self):
        self.right("--length", "600", "--heads", "4", "--head-dim", "64", "--type", "fp16", "--masks", "none,causal")

    def test_times(self):
        code, sentence, output = run("--length", "4096", "--causal", "--rounds", "2", "--backward")
        self.assertEqual((code, sentence), (0, ""), output)
        self.assertIn("forward+backward", output)


class Lost(unittest.TestCase):
    def test_killed_while_keys_travel(self):
        # It says on which problem it is, and some seconds later it is in the middle of its rounds.
        with tempfile.TemporaryFile("w+") as output:
            ranks = launch.Ranks([PROGRAM, "--length", "32768", "--causal", "--rounds", "1000", *BY], RANKS, output)
            try:
                end = time.monotonic() + 60
                while "ring, N" not in text_of(output) and time.monotonic() < end:
                    time.sleep(0.1)
                time.sleep(3)
                ranks.processes[1].send_signal(signal.SIGKILL)
                began = time.monotonic()
                code = ranks.wait(patience=40)
            finally:
                ranks.kill()
        self.assertEqual(code, -signal.SIGKILL)
        self.assertLess(time.monotonic() - began, 30)
        ends = dict(ranks.ends)
        self.assertEqual(len(ends), RANKS, "all ranks have ended by themselves")
        self.assertEqual({ends[rank] for rank in ends if rank != 1}, {3}, [ranks.words(rank) for rank in ends])
        sentence = ranks.sentence()
        ranks.close()
        self.assertIn("ring: rank 1 was killed by SIGKILL", sentence)
        self.assertIn("it was last seen at '", sentence)

    def test_out_of_memory(self):
        began = time.monotonic()
        code, sentence, _ = run("--length", str(1 << 26), "--heads", "64")
        self.assertNotEqual(code, 0)
        self.assertLess(time.monotonic() - began, 30)
        self.assertIn("rank ", sentence)
        self.assertIn("out of memory", sentence)

    def test_never_comes(self):
        began = time.monotonic()
        alone = subprocess.run([PROGRAM, "--timeout", "2"], capture_output=True, text=True, check=False, timeout=60,
                               env=launch.environment(0, 2, launch.free_port(), launch.find_nccl()))
        self.assertLess(time.monotonic() - began, 30)
        self.assertIn("rank 1 did not come within 2000 ms; it was never seen", alone.stderr)


def text_of(output) -> str:
    """What has been written so far; the position of who writes stays where it is."""
    return os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")


if __name__ == "__main__":
    if GPUS == 0:
        print("no GPU answers")
        sys.exit(1 if os.environ.get("FA_REQUIRE_GPU") == "1" else 77)
    unittest.main()
