"""06's model of the L2 cache: what it counts, and that its record is what it says today."""
from __future__ import annotations

import sys
import unittest
from pathlib import Path

STAGE = Path(__file__).resolve().parents[2] / "06_optimized"
sys.path.insert(0, str(STAGE / "check"))
import l2  # noqa: E402


class Model(unittest.TestCase):
    def test_the_record_is_todays(self) -> None:
        self.assertEqual((STAGE / "results" / "l2.txt").read_text(encoding="utf-8"), l2.table())

    def test_all_walks_meet_the_same(self) -> None:
        for tile in (0, 3):
            walks = [l2.walk_of(walk, 5, tile, 2, 4, 1024) for walk in l2.WALKS]
            self.assertEqual(len(walks[0]), 4 * (1024 - tile * l2.KEYS) // l2.QUERIES)
            for walk in walks:
                self.assertEqual(sorted(walk), sorted(walks[0]))

    def test_to_and_fro(self) -> None:
        sections = [l2.walk_of("to and fro", head, 1, 2, 2, 256) for head in (0, 2)]
        self.assertEqual([(member, i) for _, member, i in sections[0]], [(0, 3), (1, 3), (0, 2), (1, 2)])
        self.assertEqual([(member, i) for _, member, i in sections[1]], [(0, 2), (1, 2), (0, 3), (1, 3)])
        self.assertEqual(l2.walk_of("heads", 0, 1, 2, 2, 256), [(0, 0, 2), (0, 0, 3), (0, 1, 2), (0, 1, 3)])

    def test_a_cache_for_everything_misses_each_piece_once(self) -> None:
        n = 1024
        tiles, pieces = n // l2.KEYS, n // l2.QUERIES
        met = sum(pieces - tile * l2.KEYS // l2.QUERIES for tile in range(tiles))
        for walk in l2.WALKS:
            self.assertAlmostEqual(l2.missed(walk, 8, n, cache=float("inf")), pieces / met)
            self.assertEqual(l2.missed(walk, 8, n, cache=0), 1)

    def test_the_order_takes_each_tile_once_and_the_first_keys_first(self) -> None:
        order = list(l2.order_of(5, 3, 2))
        self.assertEqual(sorted(order), [(head, tile) for head in range(5) for tile in range(3)])
        self.assertEqual(order[:6], [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)])


if __name__ == "__main__":
    unittest.main()
