"""06's best of every cell: a median of ratios by round, and the record that had the largest."""
from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "06_optimized/check"))
import best  # noqa: E402

CELL = "N:512/d:64/causal:0/G:1/chip:hot/bf16"


def record(commit: str, *rows: tuple[str, list[float]]) -> str:
    """A results file: milliseconds by round of each named row."""
    return json.dumps({"context": {"commit": commit}, "benchmarks": [
        {"name": name, "repetition_index": i, "real_time": ms} for name, times in rows for i, ms in enumerate(times)]})


class Cells(unittest.TestCase):
    def test_the_median_of_ratios_by_round_not_the_ratio_of_medians(self) -> None:
        text = record("abc", (f"stage06/forward/best/{CELL}", [1, 2, 4]), (f"peer/forward/fa3/{CELL}", [1, 6, 8]))
        self.assertEqual(best.cells(text), {f"forward/best/{CELL}": (2.0, "abc")})  # 1, 3, 2; of medians: 3

    def test_a_round_that_one_lacks_does_not_count(self) -> None:
        text = record("abc", (f"stage06/forward/best/{CELL}", [1, 1, 1]), (f"peer/forward/fa3/{CELL}", [2]))
        self.assertEqual(best.cells(text), {f"forward/best/{CELL}": (2.0, "abc")})

    def test_each_has_its_own_peer_and_heads_that_share_keys_do_not_count(self) -> None:
        of_8 = CELL.replace("G:1", "G:8")
        rows = [(f"stage06/backward/{ours}/{cell}", [1.0]) for ours in ("best_deterministic", "hopper", "fa2")
                for cell in (CELL, of_8)]
        rows += [(f"peer/backward/{theirs}/{cell}", [ms]) for theirs, ms in (("fa3", 2.0), ("fa3_deterministic", 3.0))
                 for cell in (CELL, of_8)]
        self.assertEqual(best.cells(record("abc", *rows)), {f"backward/best_deterministic/{CELL}": (3.0, "abc"),
                                                            f"backward/hopper/{CELL}": (2.0, "abc")})

    def test_a_row_measured_later_names_its_own_commit(self) -> None:
        data = json.loads(record("abc", (f"stage06/forward/best/{CELL}", [1]), (f"peer/forward/fa3/{CELL}", [2])))
        data["benchmarks"][0]["commit"] = "def"
        self.assertEqual(best.cells(json.dumps(data)), {f"forward/best/{CELL}": (2.0, "def")})


class History(unittest.TestCase):
    def test_the_largest_of_all_records_stays(self) -> None:
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(best, "ROOT", Path(folder)):
            def git(*words: str) -> None:
                subprocess.run(["git", "-C", folder, "-c", "user.name=reader", "-c", "user.email=reader@localhost", *words],
                               check=True, capture_output=True)

            git("init", "-q")
            path = Path(folder) / "gpu.json"
            for commit, theirs in (("one", 2.0), ("two", 3.0), ("three", 1.0)):
                path.write_text(record(commit, (f"stage06/forward/best/{CELL}", [1.0]),
                                       (f"peer/forward/fa3/{CELL}", [theirs])), encoding="utf-8")
                git("add", "gpu.json")
                git("commit", "-q", "-m", commit)
            path.write_text("not a record", encoding="utf-8")
            git("commit", "-q", "-a", "-m", "an unreadable one")
            self.assertEqual(best.history(path), {f"forward/best/{CELL}": (3.0, "two")})


if __name__ == "__main__":
    unittest.main()
