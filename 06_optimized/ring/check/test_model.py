"""The model predicts what was measured, finds numbers that are known, and says what it cannot know.

    test_model.py
"""

import copy
import sys
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "common" / "measure" / "charts")]
import model  # noqa: E402
from model import BOTH, FORWARD, Link, Model  # noqa: E402

KIND = (True, 16)
KEYS = 2 * 16 * 128  # numbers in a token's K and V


def made_up(link: Link) -> Model:
    """Steps that take n squared, and a first one of twice that; three times as long with the backward."""
    lines = [(n, 2e-9 * n * n, 1e-9 * n * n, 2e-9 * n * n, 1e-9 * n * n) for n in (1024 << k for k in range(9))]
    return Model({(KIND, FORWARD): lines, (KIND, BOTH): [(n, *(3 * x for x in rest)) for n, *rest in lines]}, link)


class Steps(unittest.TestCase):
    def test_hidden_and_not_hidden(self) -> None:
        n, P = 4096, 4
        first, step, size = 2e-9 * n * n, 1e-9 * n * n, 2 * KEYS * n
        hidden = made_up(Link("", 1e12)).ms(P * n, P, KIND, FORWARD)
        self.assertAlmostEqual(hidden, first + 3 * step)
        # A network so slow that only messages count: P - 1 of them, and the last step.
        slow = made_up(Link("", 1e3)).ms(P * n, P, KIND, FORWARD)
        self.assertAlmostEqual(slow, 3 * size / 1e3 + step)
        begun = made_up(Link("", 1e12, begun=1.0)).ms(P * n, P, KIND, FORWARD)
        self.assertAlmostEqual(begun, hidden + 3)

    def test_bytes_of_the_backward_are_those_of_the_page(self) -> None:
        n = 4096
        for P in (1, 2, 3, 8):
            # The slower, the more only bytes count.
            ms = made_up(Link("", 1e3)).ms(P * n, P, KIND, BOTH) - made_up(Link("", 1e3)).ms(P * n, P, KIND, FORWARD)
            k, w = KEYS * n / 2, 2
            page = P * 2 * k * w + (P - 1) * 8 * k if P > 1 else 0
            self.assertAlmostEqual(ms * 1e3 / (page or 1), 1 if P > 1 else ms * 1e3, delta=1e-3)

    def test_between_what_was_measured(self) -> None:
        made = made_up(Link("", 1e12))
        self.assertAlmostEqual(made.at(3000, KIND, FORWARD)[1], 1e-9 * 3000 ** 2)
        self.assertEqual(made.at(1024, KIND, FORWARD)[0], 2e-9 * 1024 ** 2)
        for n in (1023, 262145):
            with self.assertRaisesRegex(ValueError, "were not measured; 1,024 to 262,144 were"):
                made.at(n, KIND, FORWARD)
        self.assertEqual(made.ranks(1048576, KIND), [4 << k for k in range(9)])

    def test_parts_are_the_whole(self) -> None:
        # Where every message is hidden, nothing but these four takes time; here steps merge nothing.
        made = made_up(Link("", 1e9, begun=0.5, slowed=0.2))
        parts = made.parts(8 << 16, 8, KIND)
        home = 2 * KEYS * (1 << 16) / 1e9  # the last move is not hidden
        self.assertAlmostEqual(sum(parts.values()) + home, made.ms(8 << 16, 8, KIND, BOTH), places=6)
        self.assertAlmostEqual(parts["begun"], 0.5 * (7 + 8 + 1))
        self.assertAlmostEqual(parts["merges and sums"], 0)

    def test_worth(self) -> None:
        # One GPU takes N^2 / 2 at the same rate, and messages nothing: all P are worth P, but for the longer first step.
        made = made_up(Link("", 1e12))
        self.assertAlmostEqual(made.worth(1 << 20, 64, KIND, FORWARD), 100 * 64 / 65 * 3 / 2, delta=0.1)
        self.assertLess(made.worth(1 << 20, 1024, KIND, FORWARD, Link("", 1e3)), 1)


class Fitted(unittest.TestCase):
    def test_known_numbers_are_found(self) -> None:
        points = [(x, y, 0.05 * x + 0.2 * y) for x, y in ((1, 1), (2, 5), (1, 9), (3, 2))]
        for got, want in zip(model.fitted(points), (0.05, 0.2)):
            self.assertAlmostEqual(got, want)

    def test_a_model_of_its_own_predictions(self) -> None:
        """What is measured is replaced by what a model with other numbers says; then that model must be found."""
        found = copy.deepcopy(model.read())
        link = model.model(found).link
        other = Model(model.model(found).computed, Link("", link.bandwidth, 0.11, 0.4))
        for row in model.rings(found, False):
            for way in (FORWARD, BOTH):
                if way in row and (model.kind_of(row), way) in other.computed:
                    row[way]["ms"] = other.ms(row["N"], row["ranks"], model.kind_of(row), way)
        again = model.model(found).link
        self.assertAlmostEqual(again.begun, 0.11, places=6)
        self.assertAlmostEqual(again.slowed, 0.4, places=6)
        for _, _, measured, computed in model.predictions(found):
            self.assertAlmostEqual(measured, computed, places=6)


class Recorded(unittest.TestCase):
    def test_within_five_percent(self) -> None:
        lines = model.predictions(model.read())
        self.assertGreater(len(lines), 15)
        self.assertGreater(sum(model.kind_of(row) != model.FITTED for row, *_ in lines), 5)
        for row, way, measured, computed in lines:
            if row["N"] >= 8192:
                self.assertLess(abs(computed / measured - 1), 0.05, (row["N"], way))

    def test_four_gpus_which_it_has_not_seen(self) -> None:
        lines = model.predictions(model.on_four(), model.model(model.read()))
        long = [line for line in lines if line[0]["N"] >= 65536]
        self.assertGreater(len(long), 15)
        for row, way, measured, computed in long:
            self.assertEqual(row["ranks"], 4)
            self.assertLess(abs(computed / measured - 1), 0.05, (row["N"], way))

    def test_memory_is_that_of_n_over_p(self) -> None:
        held: dict[int, list[float]] = {}
        for row in model.read()["rows"]:
            if row.get("alone") and row["causal"] and row["Hkv"] == 16:
                held.setdefault(row["N"] // row["ranks"], []).append(row["bytes_of_tensors"] + row["bytes_of_method"])
        self.assertTrue(any(len(found) > 3 for found in held.values()))
        for n, found in held.items():
            self.assertLess(max(found) / min(found), 1.001, n)
            if 2 * n in held:
                self.assertAlmostEqual(min(held[2 * n]) / min(found), 2, delta=0.01)

    def test_charts_and_tables(self) -> None:
        try:
            import charts
        except ImportError as error:  # matplotlib draws them, and may be missing
            self.skipTest(str(error))
        items = {item.name: item for item in charts.charts()}
        self.assertEqual(set(items), {"ring_lost", "ring", "ring_rivals", "ring_memory", "ring_model", "ring_many"})
        self.assertIn("not measured", items["ring_many"].title)
        rows = {tuple(row[:4]): row for row in items["ring"].rows}
        self.assertEqual(len(rows), len(items["ring"].rows), "rows alone are not the ring's")
        self.assertEqual(rows["2", "none", "524,288", "16"][5], "–")
        self.assertEqual(len({line.label for line in items["ring_memory"].panels[0].lines}), 3)


if __name__ == "__main__":
    unittest.main()
