"""./learn ring: a rank that fails is what its user reads of, and nobody is left behind.

    test_launch.py FOLDER    the folder with the programs
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

LAUNCH = Path(__file__).resolve().parents[1] / "launch.py"
FOLDER = Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else Path("build/06_optimized").resolve()
HOST = FOLDER / "stage06_ring_on_host"
EMULATED = FOLDER / "stage06_ring_emulated"
SMALL = ["--heads", "4", "--key-heads", "2", "--head-dim", "16", "--rounds", "1"]
LONG = ["--length", "3000", "--heads", "8", "--rounds", "1000"]


def launched(ranks: int, *options: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(LAUNCH), "--build", str(FOLDER.parent), "--cpu", "--gpus", str(ranks),
                             *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fields(pid: int) -> list[str]:
    """State, parent and what follows, of /proc/PID/stat; nothing if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    except OSError:
        return ["Z", "0"]


def children(of: int) -> list[int]:
    pids = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())
    return sorted(pid for pid in pids if fields(pid)[1] == str(of))


def wait_for_children(of: int, number: int) -> list[int]:
    for _ in range(300):
        there = children(of)
        if len(there) == number:
            time.sleep(0.4)
            return there
        time.sleep(0.01)
    raise AssertionError(f"{number} ranks did not start")


def alive(pid: int) -> bool:
    return fields(pid)[0] != "Z"


class Launch(unittest.TestCase):
    def gone(self, pids: list[int]) -> None:
        end = time.monotonic() + 3
        while any(alive(pid) for pid in pids) and time.monotonic() < end:
            time.sleep(0.02)
        left = [pid for pid in pids if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self.assertEqual(left, [], "a rank was left behind")

    def test_results_are_right(self):
        with tempfile.TemporaryDirectory() as folder:
            out, steps = Path(folder) / "out.json", Path(folder) / "steps.json"
            run = launched(3, "--length", "200", *SMALL, "--masks", "none,causal", "--kind", "ring,gather,heads",
                           "--backward", "--check", "--no-whole", "--json", str(out), "--timeline", str(steps))
            said, errors = run.communicate(timeout=20)
            self.assertEqual((run.returncode, errors), (0, ""), said)
            rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
            self.assertEqual(len(rows), 6)
            # Heads are exchanged among as many ranks as there are key heads, and no more.
            self.assertEqual([row["method"] for row in rows if "refused" in row], ["heads", "heads"])
            for row in rows:
                if "refused" not in row:
                    self.assertTrue(row["check"]["right"])
                    self.assertGreater(row["forward+backward"]["ms"], row["forward"]["ms"])
            timelines = json.loads(steps.read_text(encoding="utf-8"))
            self.assertEqual([len(line["ranks"]) for line in timelines], [3] * 4)
            for step in timelines[0]["ranks"][1]["steps"]:
                self.assertLessEqual(step["compute"][0], step["compute"][1])
                self.assertLessEqual(step["copy"][0], step["copy"][1])

    def test_one_process_as_a_rank_of_many(self):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            for P in (2, 4):
                run = launched(1, "--length", str(64 * P), *SMALL, "--causal", "--backward", "--no-whole", "--alone", str(P),
                               "--json", str(out))
                said, errors = run.communicate(timeout=20)
                self.assertEqual((run.returncode, errors), (0, ""), said)
                row, = json.loads(out.read_text(encoding="utf-8"))["rows"]
                self.assertEqual((row["ranks"], row["alone"]), (P, True))
                # Keys go to nobody, but they are counted: 2 key heads, 64 rows, d 16, in fp32; the sums are, too.
                keys = 2 * 64 * 16 * 4
                self.assertEqual(row["forward"]["bytes_sent_a_rank"], (P - 1) * 2 * keys)
                self.assertEqual(row["forward+backward"]["bytes_sent_a_rank"], (P - 1) * 2 * keys + (2 * P - 1) * 2 * keys)
                if P == 2:
                    two = row
                self.assertEqual(row["bytes_of_tensors"], two["bytes_of_tensors"])  # N / P is the same
        for options in (["--alone", "2", "--check"], ["--alone", "0"]):
            run = launched(1, *SMALL, "--length", "64", *options)
            _, errors = run.communicate(timeout=10)
            self.assertEqual(run.returncode, 2)
            self.assertIn("--alone", errors)

    @unittest.skipUnless(EMULATED.exists(), "the kernels are not built for the CPU")
    def test_the_program_for_gpus_on_the_emulator(self):
        sys.path.insert(0, str(LAUNCH.parent))
        import launch
        for options in (["--length", "41", "--causal", "--kind", "ring"],
                        ["--length", "34", "--contiguous", "--kind", "heads", "--type", "fp16"]):
            with tempfile.TemporaryFile("w+") as output:
                code, sentence = launch.run([str(EMULATED), *options, *SMALL, "--backward", "--check", "--no-whole"], 2,
                                            output=output, limit=20)
                output.seek(0)
                self.assertEqual((code, sentence), (0, ""), output.read())

    def test_a_rank_that_is_killed(self):
        run = launched(3, *LONG)
        os.kill(wait_for_children(run.pid, 3)[1], signal.SIGKILL)
        began = time.monotonic()
        _, errors = run.communicate(timeout=10)
        self.assertLess(time.monotonic() - began, 5)
        self.assertEqual(run.returncode, 128 + signal.SIGKILL)
        self.assertEqual(len(errors.splitlines()), 1, errors)
        self.assertIn("ring: rank 1 was killed by SIGKILL", errors)
        self.assertIn("it was last seen at '", errors)

    def test_nobody_is_left_behind(self):
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)):
            run = launched(2, *LONG)
            ranks = wait_for_children(run.pid, 2)
            os.kill(run.pid, number)
            run.communicate(timeout=10)
            self.assertEqual(run.returncode, code)
            self.gone(ranks)

    def test_wrong_words(self):
        for options, sentence in ((["--length", "0"], "--length must be a number from 1 to 1073741824, got '0'"),
                                  (["--kind", "star"], "--kind must be ring, gather or heads, got 'star'"),
                                  (["--type", "bf16"], "--type must be one of float, double, got 'bf16'"),
                                  (["--heads", "6", "--key-heads", "4"],
                                   "--heads must be a multiple of --key-heads, got 6 and 4")):
            run = launched(2, *options)
            _, errors = run.communicate(timeout=10)
            self.assertEqual((run.returncode, errors.strip()), (2, f"ring: {sentence}"))

    def test_ranks_that_were_asked_for_something_else(self):
        sys.path.insert(0, str(LAUNCH.parent))
        import launch
        port, ranks = launch.free_port(), []
        for rank in range(2):
            ranks.append(subprocess.Popen([HOST, *SMALL, "--length", str(100 + rank)], stdout=subprocess.DEVNULL,
                                          stderr=subprocess.PIPE, text=True,
                                          env=launch.environment(rank, 2, port, None)))
        for rank in ranks:
            _, errors = rank.communicate(timeout=10)
            self.assertEqual(rank.returncode, 2)
            self.assertIn("rank 0 has '--length 100', rank 1 has '--length 101'", errors)


if __name__ == "__main__":
    unittest.main()
