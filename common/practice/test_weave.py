"""A reader's copy and the lesson in one source: each hole comes from the one or the other, at every level."""
from __future__ import annotations

import os
import subprocess
import tempfile
import textwrap
import unittest
from pathlib import Path

from marks import Lesson, load, load_copy, marked_lessons  # puts common/judge on the path
from source import Bad
from weave import bit, notes, of_type, woven

ROOT = Path(__file__).resolve().parents[2]
LESSON = """\
#include "common/practice/steps.hpp"
namespace toy {
// [blank]
int twice(int x) { return 2 * x; }
// [end blank]

int sum(const int* x, int n) {
  int all = 0;
  // [blank]
  // (1) how many are taken
  const int end = n < 3 ? n : 3;  // [02.a]
  for (int i = 0; i < end; ++i) {
    // (2) sum of 2 x_i
    // [step 02.1: add twice the number (1 line)]
    all += twice(x[i]);
    // [end]
  }
  // [02.b]
  all += 1;
  // [end]
  // [end blank]
  return all;
}
}  // namespace toy
"""
NOTES = """\
toy.cpp: toy
hole 02.a: how many are taken; until then 0
hole 02.b (2): and one
"""
MAIN = """\
#include <cstdio>
#include <cstdlib>
#include "common/practice/steps.hpp"
namespace fa::practice {
const unsigned long long readers = std::strtoull(std::getenv("FA_STEPS"), nullptr, 16);
bool recording = true;
void record(const char* name, double x) { std::printf("%s=%g ", name, x); }
}
namespace toy { int sum(const int* x, int n); }
int main() {
  const int x[] = {1, 10, 100, 1000};
  std::printf("%d", toy::sum(x, 4));
}
"""


class Weaving(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.stage = Path(folder.name) / "02_toy"
        (self.stage / "mine").mkdir(parents=True)
        (self.stage / "check").mkdir()
        (self.stage / "check" / "practice.txt").write_text(NOTES)
        (self.stage / "toy.cpp").write_text(LESSON)
        self.lesson = load(self.stage, self.stage / "toy.cpp")

    def copy(self, level: int, *changes: tuple[str, str]) -> Lesson:
        """The skeleton with a change for each of its TODOs, or others."""
        text = self.lesson.skeleton(level)
        for old, new in changes:
            self.assertIn(old, text)
            text = text.replace(old, new, 1)
        mine = self.stage / "mine" / "toy.cpp"
        mine.write_text(text)
        return load_copy(self.lesson, self.stage, mine)[0]

    def program(self, text: str) -> Path:
        (self.stage / "woven.cpp").write_text(text)
        (self.stage / "main.cpp").write_text(MAIN)
        exe = self.stage / "woven"
        subprocess.run([os.environ.get("CXX", "c++"), "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}", "-o", str(exe),
                        str(self.stage / "woven.cpp"), str(self.stage / "main.cpp")], check=True)
        return exe

    def says(self, exe: Path, *holes: str) -> str:
        steps = sum(1 << bit(hole) for hole in holes)
        return subprocess.run([str(exe)], env={**os.environ, "FA_STEPS": f"{steps:x}"}, capture_output=True, text=True, check=True).stdout

    def test_each_hole_alone(self) -> None:
        copy = self.copy(2, ("const int end = 0;  // TODO", "const int end = n;"), ("// TODO", "all -= twice(x[i]);"), ("// TODO", "all += 5;"))
        exe = self.program(woven(copy, self.lesson, {"02.a": 'see("end", end);', "02.1": 'see("all", all);'}))
        self.assertEqual(self.says(exe), "end=3 all=2 all=22 all=222 223")
        self.assertEqual(self.says(exe, "02.1"), "end=3 all=-2 all=-22 all=-222 -221")
        self.assertEqual(self.says(exe, "02.b"), "end=3 all=2 all=22 all=222 227")
        self.assertEqual(self.says(exe, "02.a"), "end=4 all=2 all=22 all=222 all=2222 2223")
        self.assertEqual(self.says(exe, "02.a", "02.1", "02.b"), "end=4 all=-2 all=-22 all=-222 all=-2222 -2217")

    def test_level_1_has_no_holes_with_letters(self) -> None:
        exe = self.program(woven(self.copy(1), self.lesson, {"02.b": 'see("never", 0);'}))
        self.assertEqual(self.says(exe), "223")
        self.assertEqual(self.says(exe, "02.1"), "1")

    def test_a_blank_page(self) -> None:
        own = "auto one = [&](int i) { return x[i]; };\nfor (int i = 0; i < n; ++i) all += one(i);"
        exe = self.program(woven(self.copy(3, ("// TODO", own)), self.lesson, {}))
        self.assertEqual(self.says(exe), "223")     # with the helper that is gone from the copy, too
        self.assertEqual(self.says(exe, "02.1"), "1111")

    def test_a_helper_of_the_readers_own_at_level_3(self) -> None:
        copy = self.copy(3, ("int sum(", "static int twice(int x) { return x + x + 1; }\nint sum("), ("// TODO", "all = twice(x[0]);"))
        exe = self.program(woven(copy, self.lesson, {}))
        self.assertEqual((self.says(exe), self.says(exe, "02.1")), ("223", "3"))

    def test_places_are_those_of_both_files(self) -> None:
        copy = self.copy(1, ("// TODO", "all += oops;"))
        (self.stage / "woven.cpp").write_text(woven(copy, self.lesson, {}))
        done = subprocess.run([os.environ.get("CXX", "c++"), "-std=c++20", "-fsyntax-only", f"-I{ROOT}", str(self.stage / "woven.cpp")],
                              capture_output=True, text=True, check=False)
        line = copy.lines.index("    all += oops;") + 1
        self.assertIn(f"02_toy/mine/toy.cpp:{line}:", done.stderr)
        lines = woven(copy, self.lesson, {}).split("\n")
        after = lines.index("    all += twice(x[i]);")
        self.assertEqual(lines[after - 1], f'#line {LESSON.split(chr(10)).index("    all += twice(x[i]);") + 1} "02_toy/toy.cpp"')

    def test_a_value_for_the_compiler_stays_the_readers(self) -> None:
        (self.stage / "toy.cpp").write_text(LESSON.replace("const int end = n < 3 ? n : 3;", "constexpr int end = 3;"))
        self.lesson = load(self.stage, self.stage / "toy.cpp")
        text = woven(self.copy(2, ("constexpr int end = 0;  // TODO", "constexpr int end = 2;  // mine")), self.lesson, {})
        self.assertIn("  constexpr int end = 2;\n  static constexpr int end_of[2] = {3, 2};\n", text)

    def test_what_is_no_single_value_stays_as_it_is(self) -> None:
        text = woven(self.copy(2, ("const int end = 0;  // TODO", "int end = n;\n  end -= 1;")), self.lesson, {})
        self.assertIn("  int end = n;\n  end -= 1;\n", text)

    def test_without_marks_it_stands_alone(self) -> None:
        mine = self.stage / "mine" / "toy.cpp"
        for text in ("", "int main() {}\n", LESSON.replace("// [", "// (")):
            mine.write_text(text)
            copy, told = load_copy(self.lesson, self.stage, mine)
            self.assertEqual(woven(copy, self.lesson, {}).split("\n", 2)[2], text)
            self.assertTrue(told)

    def test_every_lesson_can_be_woven(self) -> None:
        for stage in sorted(ROOT.glob("0[0-5]_*")):
            known = notes(stage)
            for lesson in marked_lessons(stage):
                name = lesson.label.partition("/")[2]
                for level in (1, 2, 3):
                    with tempfile.TemporaryDirectory() as folder:
                        mine = Path(folder) / stage.name / "mine" / name
                        mine.parent.mkdir(parents=True)
                        mine.write_text(lesson.skeleton(level))
                        copy, told = load_copy(lesson, mine.parents[1], mine)
                    self.assertEqual(told, [])
                    text = woven(copy, lesson, known.after)
                    self.assertEqual(text.count("if (::fa::practice::step("), sum(h.kind != "value" for h in copy.regions))


class Types(unittest.TestCase):
    def test_each_has_its_part_and_its_lines(self) -> None:
        text = "a\ntemplate void f(const MatrixMap<const float>&,\n    int);\ntemplate void f(const MatrixMap<const double>&,\n    int);\nb\n"
        self.assertEqual(of_type(text, "float"), "a\ntemplate void f(const MatrixMap<const float>&,\n    int);\n\n\nb\n")
        self.assertEqual(of_type(text, "double"), "a\n\n\ntemplate void f(const MatrixMap<const double>&,\n    int);\nb\n")
        text = "template void f(const Forward<__half>&);\ntemplate void f(const Forward<__nv_bfloat16>&);\ntemplate <class T>\n"
        self.assertEqual(of_type(text, "__half"), text.replace("template void f(const Forward<__nv_bfloat16>&);", ""))


class NotesFile(unittest.TestCase):
    def read(self, text: str):     # type: ignore[no-untyped-def]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "check").mkdir()
            (Path(folder) / "check" / "practice.txt").write_text(textwrap.dedent(text))
            return notes(Path(folder))

    def test_all_that_it_says(self) -> None:
        found = self.read("""\
            # why
            fast/a.cpp: rows Own.*

            after 02.2: see("l", l);
            tests 02.5: Merge.*
            means L: (6)
            outside dK and dQ: (3), (4)
            """)
        self.assertEqual(found.judges, {"fast/a.cpp": ["rows", "Own.*"]})
        self.assertEqual((found.after, found.tests), ({"02.2": 'see("l", l);'}, {"02.5": "Merge.*"}))
        self.assertEqual((found.means, found.outside), ({"L": "(6)"}, {"dK and dQ": "(3), (4)"}))

    def test_a_line_that_says_nothing(self) -> None:
        for line in ("after 02.2", "judges a.cpp: x", "a.cpp: "):
            with self.assertRaisesRegex(Bad, "check/practice.txt:1: write `FILE: tests`"):
                self.read(line)

    def test_every_note_names_what_is_there(self) -> None:
        for stage in sorted(ROOT.glob("0[0-5]_*")):
            found, lessons = notes(stage), marked_lessons(stage)
            holes = {h.name for lesson in lessons for level in (1, 2, 3) for h in lesson.holes(level)}
            self.assertLessEqual(set(found.after) | set(found.tests), holes)
            self.assertEqual(set(found.judges), {lesson.label.partition("/")[2] for lesson in lessons if lesson.holes(1)})


if __name__ == "__main__":
    unittest.main()
