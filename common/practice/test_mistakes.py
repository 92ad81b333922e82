"""Tests of mistakes.py: the mistakes of the stages can be made, and a screen is read as it must be."""
from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from unittest import mock

import mistakes
from marks import load_copy, marked_lessons
from mistakes import Mistake, judge_here, mistaken, named, parse, reader, stages, told_equations
from source import Bad

TABLE = "  l               (3)           1 1.5 2.1                        1 1.2 1.6  <-   numbers 1 to 3 of 12"


def of(name: str) -> tuple[Path, Mistake]:
    return next((stage, m) for stage in stages([]) for m in parse(stage / "check/mistakes.txt") if m.name == name)


class Mistakes(unittest.TestCase):
    def test_every_step_has_three_and_all_can_be_made(self) -> None:
        for stage in stages([]):
            found = parse(stage / "check/mistakes.txt")
            steps = [h.name for lesson in marked_lessons(stage) for h in lesson.holes(1)]
            self.assertEqual({n: sum(m.hole == n for m in found) for n in steps}, dict.fromkeys(steps, 3))
            for mistake in found:
                lesson, hole, at = mistaken(stage, mistake)
                for level in range(hole.level, 4):
                    with self.subTest(mistake.name, level=level), tempfile.TemporaryDirectory() as folder:
                        text, place = reader(lesson, level, at)
                        (mine := Path(folder) / "mine.cpp").write_text(text)
                        copy, told = load_copy(lesson, Path(folder), mine)
                        self.assertEqual([h.name for h in copy.regions], [h.name for h in lesson.holes(level)])
                        self.assertEqual(told, [])
                        self.assertEqual(copy.level, level)
                        if mistake.new:
                            self.assertEqual(copy.lines[place].strip(), mistake.new[0].strip())

    def test_a_broken_paragraph(self) -> None:
        for text, reason in (("x: 02.1\n+ a\n", "a mistake is"), ("x 02.1\n- a\n", "a mistake is"),
                             ("x: 02.1\n- a\n\nx: 02.2\n- a\n", "a second mistake")):
            with tempfile.TemporaryDirectory() as folder, self.assertRaisesRegex(Bad, reason):
                (file := Path(folder) / "mistakes.txt").write_text(text)
                parse(file)
        stage, mistake = of("sum_not_rescaled")
        for wrong, reason in ((Mistake("x", "02.2", ["a = 1;"], []), "match 0 times"),
                              (Mistake("x", "02.2", ["m = m_new;"], [], 7), r"no equation \(7\)"),
                              (Mistake("x", "02.99", ["m = m_new;"], []), "no hole 02.99")):
            with self.assertRaisesRegex(Bad, reason):
                mistaken(stage, wrong)

    def test_nobodys_work_is_touched(self) -> None:
        _, mistake = of("no_rescale")
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(mistakes, "ROOT", Path(folder)):
            (work := Path(folder) / "02_toy/mine/work.cpp").parent.mkdir(parents=True)
            work.write_text("mine")
            with self.assertRaisesRegex(Bad, "02_toy/mine holds somebody's work"):
                judge_here([(Path(folder) / "02_toy", mistake, 1)])
            self.assertEqual(work.read_text(), "mine")

    def test_what_a_screen_names(self) -> None:
        stage, mistake = of("no_rescale")
        _, hole, _ = mistaken(stage, mistake)
        self.assertEqual(told_equations([TABLE]), [{3}])
        for level, screen, right in (
                (1, "steps   02.1 right · 02.2 not yet · 02.3 right", True),
                (1, "steps   02.1 right · 02.2 not yet   (as far as one test tells)", True),
                (1, "steps   02.1 not yet · 02.2 not yet", False),
                (1, "steps   02.1 right · 02.2 right", False),
                (2, "steps   right: 02.1 02.a · not yet: 02.2", True),
                (3, "steps   02.1-02.2 not yet", False),
                (3, TABLE, True),
                (3, TABLE.replace("(3)", "(4)"), False),
                (3, "02.1-02.2, equations (1), (2), (3): add", True),
                (3, "02.1-02.2, equations (1), (2), (3), (4): add", False)):
            with self.subTest(screen, level=level):
                self.assertEqual(named([screen], mistake, hole, level)[0], right)
        for screen, right in (("steps   02.1-02.2 not yet · 02.3 right", True), ("steps   02.1-02.2 right · 02.3 not yet", False)):
            self.assertEqual(named([screen], mistake, hole, 3, holder="02.1-02.2")[0], right)     # of a ladder


if __name__ == "__main__":
    unittest.main()
