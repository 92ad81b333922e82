#!/usr/bin/env python3
"""Tests of marks.py and mutants.py through their command lines."""
from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

from marks import LEVELS, Lesson, load, load_copy, marked_lessons
from source import bare, unmarked

HERE = Path(__file__).resolve().parent
STAGES = sorted(HERE.parents[1].glob("0?_*"))
FOLDER = {"mutants.py": HERE.parent / "judge"}   # of a tool that is not here
LESSON = '''\
// [quote row]
template <typename T>
T row(const T* x, int n) {
  T m = x[0], l = 0;
  // [blank]
  for (int j = 0; j < n; ++j) {
    const T seen = m;
    // [step 02.1: rescale the old sum (2 lines)]
    m = std::max(m, x[j]);

    // return and __syncthreads() in a comment are harmless
    l = l * std::exp(seen - m);
    // [end]
    l += std::exp(x[j] - m);
  }
  // [end blank]
  return m + std::log(l);
}
// [end quote]
'''
# All kinds of holes, and comments that state equations in all their forms.
KINDS = """\
#include <cmath>
// [blank]
float helper(float x) { return x; }
// [end blank]
void f(int n, float* x) {
  int keep = 0;
  // [quote body]
  // [blank]
  // (1) m = max x_j;  (2) l = sum_j exp(x_j),
  //     over all j
  // why: (7) is for later
  // [step 02.1: the largest (1 line)]
  keep = 1;
  // [end]
  // [more 02.a (4): wait until all have written (2 lines)]
  __syncthreads();  // x is complete
  FA_LAUNCH(kernel, n);
  // [end]
  // [more 02.b: how many there are; until then 0 (1 line)]
  const int end = std::min(n, 7);
  // [end]
  for (int i = 0; i < end; ++i) x[i] = "// (8) no comment"[i];  // (3) to (5), and why
  // [step 02.2 (3, 5): the rest (1 line)]
  x[0] = helper(x[0]);
  // [end]
  // [end blank]
  // [end quote]
  // [more 02.c: 0 threads would be an error; until then 1 (1 line)]
  constexpr int threads = 32;
  // [end]
  launch(threads);
}
"""
STEP = "m = std::max(m, x[j]);\n    l = l * std::exp(seen - m);"
MUTANTS = '''\
# deliberate defects
no_rescale: online.cpp
symptom: sums come out too large
- const T seen = m;
- m = std::max(m, x[j]);
+ const T seen = std::max(m, x[j]);
+ if (true)
+   m = seen;
kills: online.Values

no_sum: online.cpp
symptom: the sum is empty
-   l += std::exp(x[j] - m);
kills: online.Sum/0
'''
FAILED = 'echo "[  FAILED  ] A.b, where GetParam() = 1 (0 ms)"; exit 1'


class Practice(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.stage = Path(folder.name) / "02_online"
        (self.stage / "check").mkdir(parents=True)
        self.put("online.cpp", LESSON)
        self.put("check/mutants.txt", MUTANTS)

    def put(self, name: str, text: str) -> Path:
        path = self.stage / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def get(self, name: str) -> str:
        return (self.stage / name).read_text()

    def call(self, code: int, tool: str, *args: object) -> str:
        """Runs a tool; an error must be one line on stderr, and only then."""
        done = subprocess.run([sys.executable, FOLDER.get(tool, HERE) / tool, *map(str, args)], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        lines = 0 if code in (0, 77) or "verdict" in args else 1
        self.assertEqual(done.stderr.count("\n"), lines, done.stderr)
        return done.stdout + done.stderr

    def marks(self, code: int, command: str, *args: str) -> str:
        return self.call(code, "marks.py", command, self.stage, *args)

    def skeleton(self, name: str, level: int = 1) -> list[str]:
        return self.call(0, "marks.py", "skeleton", self.stage / name, "--level", level).split("\n")

    def test_skeleton(self) -> None:
        out = self.stage / "out.cpp"
        self.call(0, "marks.py", "skeleton", self.stage / "online.cpp", "-o", out)
        lines = LESSON.split("\n")
        self.assertEqual(out.read_text().split("\n"), [
            "// Practice 02, level 1, of online.cpp. Keep the marks; ./learn practice 02",
            *lines[1:4], *lines[5:8], "    // TODO", *lines[12:15], *lines[16:18], ""])
        empty = self.put("a.cpp", "")
        self.assertIn("nothing to take out", self.call(1, "marks.py", "skeleton", empty, "-o", out))
        self.call(2, "marks.py", "skeleton", self.stage / "online.cpp", "--level", 4)
        eigen = self.put("online.cpp", LESSON + "template T row(MatrixMap<const double>, int);\n")
        for words, there in ((), True), (["--for-one-type"], False):
            self.assertEqual("double" in self.call(0, "marks.py", "skeleton", eigen, *words), there)
        instantiation = "template void launch_one(const Problem&, const Forward<{}>&,\n                         float);\n"
        one, other = (instantiation.format(half) for half in ("__half", "__nv_bfloat16"))
        for text, left in ((one + other, other), (other, other), (one, one)):
            kernel = self.put("online.cpp", LESSON + text)
            self.assertTrue(self.call(0, "marks.py", "skeleton", kernel, "--for-one-type").endswith("\n" + left))
        self.call(2, "marks.py", "skeleton", self.stage / "absent.cpp", "-o", out)
        self.call(2, "marks.py", "check", self.stage.parent)
        self.call(2, "marks.py", "polish", self.stage)

    def test_labels(self) -> None:
        """A short label in the lesson, its words in check/practice.txt: the same skeletons as with the whole mark."""
        whole = """void f(int n) {
  // [blank]
  int i = 0;
  // [step 02.1: count (1 line)]
  ++i;
  // [end]
  // [more 02.a (3): how many; until then 0 (1 line)]
  const int k = n;  // all
  // [end]
  // [more 02.b: to the end (2 lines)]
  while (i < k)
    ++i;
  // [end]
  // [end blank]
}
"""
        short = whole.replace("  // [more 02.a (3): how many; until then 0 (1 line)]\n  const int k = n;  // all\n  // [end]\n",
                              "  const int k = n;  // [02.a] all\n").replace("[more 02.b: to the end (2 lines)]", "[02.b]")
        self.put("whole.cpp", whole)
        self.put("short.cpp", short)
        said = self.put("check/practice.txt", "hole 02.a (3): how many; until then 0\nhole 02.b: to the end\n")
        for level in (1, 2, 3):
            self.assertEqual(self.skeleton("short.cpp", level)[1:], self.skeleton("whole.cpp", level)[1:])
        self.put("online.cpp", short)
        (self.stage / "whole.cpp").unlink()
        (self.stage / "short.cpp").unlink()
        self.put("check/mutants.txt", "fewer: online.cpp\nsymptom: x\n- const int k = n;  // all\n"
                 "+ const int k = 1;  // all\nkills: A.b\n")
        self.call(0, "mutants.py", "check", self.stage / "check/mutants.txt", self.stage)
        self.marks(0, "write")
        for old, new, words in (("++i;\n  // [end]\n  // [end blank]", "++i;\n  // [end blank]", "02.b is unclosed"),
                                ("[02.a] all", "[02.c] all", "does not say what to do in 02.c"),
                                ("// [02.b]", "// [02.b] alone", "a label alone")):
            self.put("online.cpp", short.replace(old, new))
            self.assertIn(words, self.marks(1, "check"), old)
        self.put("online.cpp", short)
        said.unlink()
        self.assertIn("online.cpp:7: check/practice.txt does not say", self.marks(1, "check"))

    def test_levels(self) -> None:
        self.put("kinds.cu", KINDS)
        lines = KINDS.split("\n")
        step = ["  // [step 02.1: the largest (1 line)]", "  // TODO", "  // [end]"]
        rest = ["  // [step 02.2: the rest (1 line)]", "  // TODO", "  // [end]"]
        self.assertEqual(self.skeleton("kinds.cu")[1:], [
            lines[0], lines[2], *lines[4:6], *lines[8:11], *step, *lines[15:17], lines[19], lines[21], *rest,
            lines[28], *lines[30:]])
        self.assertEqual(self.skeleton("kinds.cu", 2), [
            "// Practice 02, level 2, of kinds.cu. Keep the marks; ./learn practice 02",
            lines[0], lines[2], *lines[4:6], "  // (1), (2)",
            "  // [step 02.1: equations (1), (2) (1 line)]", *step[1:],
            "  // [more 02.a: wait until all have written (2 lines)]", *step[1:],
            lines[18], "  const int end = 0;  // TODO", "  // [end]",
            lines[21].replace(", and why", ""),
            "  // [step 02.2: equations (3), (5) (1 line)]", *step[1:],
            lines[27], "  constexpr int threads = 1;  // TODO", "  // [end]", *lines[30:]])
        self.assertEqual(self.skeleton("kinds.cu", 3)[1:], [
            lines[0], *lines[4:6], "  // [blank 02.1-02.2: f]", "  // TODO", "  // [end blank]",
            lines[28], *lines[30:]])

    def lesson(self) -> Lesson:
        return load(self.stage, self.put("kinds.cu", KINDS))

    def test_holes(self) -> None:
        lesson = self.lesson()
        told = [(h.name, h.kind, h.lines, h.equations, h.until) for h in lesson.holes(2)]
        self.assertEqual(told, [("02.1", "step", 1, (1, 2), ""), ("02.a", "more", 2, (4,), ""),
                                ("02.b", "value", 1, (1, 2), "0"), ("02.2", "step", 1, (3, 5), ""),
                                ("02.c", "value", 1, (3, 4, 5), "1")])
        self.assertEqual([h.name for h in lesson.holes(1)], ["02.1", "02.2"])
        self.assertEqual([(h.name, h.text, h.equations) for h in lesson.holes(3)],
                         [("02.1-02.2", "f", (1, 2, 3, 4, 5))])
        value = lesson.holes(2)[2]
        self.assertEqual((value.head, lesson.value(value)), ("const int end", "std::min(n, 7)"))
        self.assertTrue(lesson.written(value))
        self.assertEqual(lesson.code(lesson.holes(1)[0]), ["  keep = 1;"])
        self.assertEqual(lesson.level, 0)

    def copy(self, lesson: Lesson, text: str) -> tuple[Lesson, list[str]]:
        return load_copy(lesson, self.stage, self.put("mine/kinds.cu", text))

    def test_a_copy(self) -> None:
        lesson = self.lesson()
        for level in (1, 2, 3):
            text = lesson.skeleton(level)
            mine, told = self.copy(lesson, text)
            self.assertEqual((mine.level, told), (level, []))
            self.assertEqual([h.name for h in mine.regions], [h.name for h in lesson.holes(level)])
            self.assertEqual([h.equations for h in mine.regions], [h.equations for h in lesson.holes(level)])
            self.assertFalse(any(map(mine.written, mine.regions)))
            mine, _ = self.copy(lesson, "\n" + text.split("\n", 1)[1].replace("]\n  // TODO\n", "]\n  x(); // done\n"))
            self.assertEqual(mine.level, level)
            self.assertEqual([h.name for h in mine.regions if mine.written(h)],
                             [h.name for h in mine.regions if h.kind != "value"])
        text = lesson.skeleton(2)
        for code, value in (("auto end = n - 1;", "n - 1"), ("const int end = min(n,\n 3);", "min(n,\n 3)"),
                            ("end = 3;", None), ("int end = 3, x = 2;", None), ("int ende = 3;", None),
                            ("if (n == 3) n = 2;", None), ("int end =", None)):
            mine, _ = self.copy(lesson, text.replace("const int end = 0;  // TODO", code))
            hole = next(h for h in mine.regions if h.name == "02.b")
            self.assertEqual((mine.value(hole), mine.written(hole)), (value, True))

    def test_a_copy_that_lost_marks(self) -> None:
        lesson = self.lesson()
        text = lesson.skeleton(1)
        first = "  // [step 02.1: the largest (1 line)]\n"
        lost = "mine/kinds.cu: the marks of 02.1 are gone; get them back from exercise/kinds.cu"
        one = first + "  // TODO\n  // [end]\n"
        for changed, names, line in (
                (text.replace(first, ""), ["02.2"], lost),
                (text.replace(one, first), ["02.2"], lost),
                (text.replace(one, ""), ["02.2"], lost),
                (text.replace("[end]", "[ENDE]", 1), ["02.2"], lost),
                (text.replace("[end]", "[ENDE]"), [], lost.replace("02.1", "02.1, 02.2")),
                (text.replace(first, "//[ step 02.1 ]\n"), ["02.1", "02.2"], None),
                (text.replace(one, one * 2), ["02.2"], "mine/kinds.cu: 02.1 is marked twice; keep one pair of marks"),
                (text + "// [step 02.9: x (1 line)]\n// [end]\n", ["02.1", "02.2"],
                 "mine/kinds.cu: 02.9 is no hole of kinds.cu at level 1; its marks are ignored"),
                ("", [], lost.replace("02.1", "02.1, 02.2"))):
            mine, told = self.copy(lesson, changed)
            with self.subTest(changed):
                self.assertEqual([h.name for h in mine.regions], names)
                self.assertEqual(told, [line] if line else [])
        _, told = self.copy(lesson, lesson.skeleton(3).replace("end blank", "end"))
        self.assertEqual(told, [])
        _, told = self.copy(lesson, lesson.skeleton(3).replace("[end blank]", ""))
        self.assertEqual(told, ["mine/kinds.cu: the marks of 02.1-02.2 are gone; get them back from python3 "
                                "common/practice/marks.py skeleton 02_online/kinds.cu --level 3"])
        (self.stage / "mine/kinds.cu").write_bytes(b"\xff\r\n" + text.encode())
        self.assertEqual(load_copy(lesson, self.stage, self.stage / "mine/kinds.cu")[1], [])

    def test_a_mark_that_would_break_a_skeleton(self) -> None:
        line = "    // [end]\n"
        mark = "// [step 02.1: rescale the old sum (2 lines)]"
        one = mark.replace("2 lines", "1 line")
        for new, reason, at in (
                (f"{mark}\n T t = 1, big = m;\n l *= big;\n{line} l += big;", "big is decl", 8),
                (f"{mark}\n l = 1;\n auto [a, b] = f(m);\n{line} l += b;", "b is decl", 9),
                (f"{one}\n std::vector<std::pair<T, T>> v(n);\n{line} v[0] = m;", "v is decl", 8),
                (f"{mark}\n    if (m)\n      return 0;\n{line}", "return", 9),
                (f"{mark}\n    l = 0;\n    __syncthreads();\n{line}", "__syncthreads", 9),
                (f"{one}\n    barrier_wait(full);\n{line}", "barrier_wait", 8),
                (f"{one}\n    if (m) continue;\n{line}", "continue", 8),
                (f"{mark}\n    l = 0;\n    if (m) break;\n{line}", "break", 9),
                (f"{mark.replace('step 02.1', 'more 02.a')}\n    if (m)\n      return 0;\n{line}", "return", 9),
                (f"{one.replace('step 02.1', 'more 02.b')}\n    m = 0;\n{line}", "should be 02.a", 7),
                (f"{one.replace('step', 'more')}\n    m = 0;\n{line}", "broken mark", 7),
                (f"{one.replace('02.1', '02.a')}\n    m = 0;\n{line}", "broken mark", 7),
                (f"{one.replace('02.1:', '02.1 (x):')}\n    m = 0;\n{line}", "broken mark", 7),
                (f"{one.replace(' (1', '; until then 0 (1')}\n    m = 0;\n{line}", "not one declaration", 7),
                (f"{one.replace(' (1', '; until then 0 (1')}\n    T a = 0, b = 1;\n{line}", "not one decl", 7),
                (f"{one}\n// [blank]\n    m = 0;\n// [end blank]\n{line}", "nested", 8),
                (f"{one}\n#if X\n{line}#endif", "#if", 8),
                (f"{one}\n    {STEP}\n{line}", "promises 1 but holds 2", 7),
                (f"{one}\n    if (m) {{\n{line}    }}", "unbalanced", 7),
                (f"{one}\n    }} l = f(m); {{\n{line}", "unbalanced", 7),
                (f"{one.replace('02.1', '02.2')}\n    m = 0;\n{line}", "should be 02.1", 7),
                (f"{one.replace('02.1', '01.1')}\n    m = 0;\n{line}", "should be 02.1", 7),
                (f"{one.replace('02.1', '2')}\n    m = 0;\n{line}", "broken mark", 7),
                (f"m = 0; {one}\n{line}", "broken mark", 7),
                (f"{one}\n    m = 0;\n", "end blank] while 02.1", 11),
                (f"{one}\n    {one}\n    m = 0;\n{line}{line}", "nested", 8),
                (f"// [blank]\n{line}", "a blank is nested in a blank", 7),
                (line, "[end] while a blank is open", 7)):
            head, tail = LESSON.split("    " + mark)
            self.put("online.cpp", head + "    " + new + tail.partition("// [end]\n")[2])
            with self.subTest(new):
                self.assertRegex(self.marks(1, "check"), rf"^02_online/online.cpp:{at + 1}: ")
                self.assertIn(reason, self.marks(1, "check"))
        self.put("online.cpp", f"{one}\nm = 0;\n")
        self.assertIn("online.cpp:1: 02.1 is unclosed", self.marks(1, "check"))
        blank, end = "// [blank]\n", "// [end blank]\n"
        for text, reason, at in ((f"{one}\nm = 0;\n{line}", "02.1 lies in no blank", 1),
                                 (f"{blank}m = 0;\n", "a blank is unclosed", 1),
                                 (f"{blank}T t = 1;\n{end}l += t;\n", "t is declared in a blank", 2),
                                 (f"{blank}T t = 1;\n{end}{blank}l += t;\n{end}{end}", "end blank] while nothing", 7),
                                 (f"{blank}#if X\n{end}#endif\n", "#if", 2),
                                 (f"{blank}if (m) {{\n{end}}}\n", "unbalanced", 1)):
            self.put("online.cpp", text)
            with self.subTest(text):
                self.assertIn(f"online.cpp:{at}: ", self.marks(1, "check"))
                self.assertIn(reason, self.marks(1, "check"))

    def test_harmless_steps(self) -> None:
        for body, count in (("#pragma unroll\nfor (int i = 0; i < 2; ++i) { T t = i; m += t; }", 2),
                            ('m = f("return {", \'{\', 1\'000);', 1),
                            ("T t = 1;\nm = t;\n// [end]\n// [end blank]\n}\nvoid g() { T t; ", 2),
                            ("for (;;) {\nif (m) break;\n}", 3),
                            ("m = 0;\n// [end]\nT t = 1;\n// [end blank]\n// [blank]\nt = 2;\n// [end blank]\n", 1)):
            if "[end]" not in body:
                body += "\n// [end]\n// [end blank]"
            self.put("online.cpp", f"void f() {{\n// [blank]\n// [step 02.1: x ({count} lines)]\n{body}\ni = 1; }}\n")
            with self.subTest(body):
                self.marks(0, "write")

    def test_exercise_and_numbering_over_files(self) -> None:
        self.assertIn("exercise/online.cpp not in step", self.marks(1, "check"))
        second = self.put("fast/a.cpp", LESSON.replace("02.1", "02.2"))
        self.marks(0, "write")
        self.assertIn("level 1, of fast/a.cpp.", self.get("exercise/fast/a.cpp"))
        self.assertIn("in step", self.marks(0, "check"))
        self.marks(0, "check", "online.cpp", "fast/a.cpp")
        self.assertIn("should be 02.1", self.marks(1, "check", "fast/a.cpp", "online.cpp"))
        self.put("exercise/online.cpp", self.get("exercise/online.cpp") + "\n")
        self.assertIn("exercise/online.cpp not in step", self.marks(1, "check"))
        second.unlink()
        self.assertIn("delete it", self.marks(1, "check"))
        (self.stage / "exercise/fast/a.cpp").unlink()
        self.put("ptx/a.hpp", "constexpr int f(int x) {\n  int y = 0;\n  // [blank]\n  // [step 02.2: y (1 line)]\n"
                              "  y = x ^ 1;\n  // [end]\n  // [end blank]\n  return y;\n}\n")
        self.marks(0, "write")
        self.assertIn("y (1 line)]\n  // TODO\n  // [end]\n  return", self.get("exercise/ptx/a.hpp"))

    def test_quotations(self) -> None:
        chapter = ("a\n<!-- quote 02.1 -->\n```cpp\nold\n```\n<!-- end -->\nb\n"
                   "<!-- quote online.cpp:row -->\n<!-- end -->\n<!-- end -->\n")
        self.put("README.md", chapter)
        self.marks(0, "write")
        text = self.get("README.md")
        self.assertIn("-->\n```cpp\nm = std::max(m, x[j]);\n\n// return", text)
        self.assertIn("```cpp\ntemplate <typename T>\n", text)
        self.assertNotIn("// [", text)
        self.marks(0, "check")
        self.put("README.md", text.replace("exp(seen", "exp(sean"))
        self.assertIn("README.md not in step", self.marks(1, "check"))
        for name in ("02.7", "online.cpp:col", "absent.cpp:row", "row"):
            self.put("README.md", chapter.replace("02.1", name))
            self.assertIn(f"README.md:2: no regions {name}", self.marks(1, "write"))
        self.put("README.md", chapter.replace("```\n<", "text\n<"))
        self.assertIn("README.md:2: a broken quotation", self.marks(1, "check"))

    def apply(self, code: int, name: str) -> str:
        return self.call(code, "mutants.py", "apply", self.stage / "check/mutants.txt", name,
                         self.stage, "-o", self.stage / "out.cpp")

    def test_mutants(self) -> None:
        file = self.stage / "check/mutants.txt"
        self.assertEqual(self.call(0, "mutants.py", "list", file), "no_rescale\tonline.cpp\t"
                         "online.Values\twoven\tany\nno_sum\tonline.cpp\tonline.Sum/0\twoven\tany\n")
        for how, order in (("late", "late"), ("early", "early"), ("random 3", "random 3"), ("gpu", "gpu"), ("race", "any")):
            self.put("check/mutants.txt", MUTANTS.replace("kills: online.Values", f"{how}: online.Values"))
            listed = self.call(0, "mutants.py", "list", file)
            self.assertEqual(f"no_rescale\tonline.cpp\tonline.Values\twoven\t{order}\n" in listed, how != "race", how)
        self.put("check/mutants.txt", MUTANTS)
        self.apply(0, "no_rescale")
        self.assertIn("    const T seen = std::max(m, x[j]);\n    if (true)\n      m = seen;\n"
                      "    // [step", self.get("out.cpp"))
        check = ("mutants.py", "check", file, self.stage)
        self.call(0, *check)
        self.apply(0, "no_sum")
        self.assertNotIn("l +=", self.get("out.cpp"))
        self.assertIn("no mutant x", self.apply(1, "x"))
        old = "- const T seen = m;\n- m = std::max(m, x[j]);\n"
        new = "+ const T seen = std::max(m, x[j]);\n+ if (true)\n+   m = seen;\n"
        same = old.replace("-", "+").replace(";", ";  // as before")
        for was, now, reason in ((old, "- m = 0;\n", "match 0 times"),
                                 (old, "- }\n", "match 2 times"),
                                 (new, same, "changes nothing"),
                                 ("kills: online.Values\n", "", "after it come"),
                                 ("symptom: sums", "hint: sums", "after it come"),
                                 ("online.Values", "online.*", "one exact name"),
                                 ("no_sum:", "no_rescale:", "second mutant"),
                                 ("no_sum: online", "no_sum: ../online", "begins with"),
                                 ("no_rescale: online", "no_rescale: offline", "no such file")):
            self.put("check/mutants.txt", MUTANTS.replace(was, now))
            with self.subTest(reason):
                self.assertIn(reason, self.apply(1, "no_rescale"))
                self.assertIn(reason, self.call(1, *check))

    def weave(self, code: int, *mutants: tuple[str, str, str], how: str = "", kills: str = "A.b") -> str:
        """What comes of online.cpp with mutants (name, - lines, + lines), all of them woven but those alone."""
        self.put("check/mutants.txt", "\n".join(
            f"{name}: online.cpp{how if name == 'other' else ''}\nsymptom: s\n"
            + "".join(f"{sign} {line}\n" for sign, text in (("-", old), ("+", new)) for line in text.split("\n") if line)
            + f"kills: {kills}\n" for name, old, new in mutants))
        said = self.call(code, "mutants.py", "weave", self.stage / "check/mutants.txt", "online.cpp", self.stage,
                         "-o", self.stage / "out.cpp")
        return said if code else self.get("out.cpp")

    def test_weave(self) -> None:
        exp = "l += std::exp(x[j] - m);"
        woven = self.weave(0, ("late", "const T seen = m;", "const T seen = x[j];"),
                           ("later", "const T seen = m;", "const T seen = n;"),
                           ("no_sum", exp, ""), ("other", exp, "if (j)\n  l += 1;"))
        head = [f'static const bool fa_mutant_{name} = fa_mutant("{name}");' for name in ("late", "later", "no_sum", "other")]
        lesson = LESSON.split("\n")
        self.assertEqual(woven.split("\n"), [
            "bool fa_mutant(const char* name);", *head, f'#line 1 "{(self.stage / "online.cpp").resolve()}"', *lesson[:6],
            "const T seen = fa_mutant_late ? static_cast<const T>(x[j]) : fa_mutant_later ? static_cast<const T>(n) : "
            "static_cast<const T>(m);", "#line 8", *lesson[7:13],
            "if (fa_mutant_no_sum) {", "#line 14", "} else if (fa_mutant_other) {", "#line 14", "    if (j)", "      l += 1;",
            "} else {", "#line 14", lesson[13], "}", "#line 15", *lesson[14:]])

        # Under ThreadSanitizer, only those without a barrier.
        self.put("online.cpp", LESSON.replace("  return", "  __syncthreads();\n  return"))
        self.weave(0, ("no_sum", exp, ""), ("other", "__syncthreads();", ""))
        self.call(0, "mutants.py", "weave", "race", self.stage / "check/mutants.txt", "online.cpp", self.stage,
                  "-o", self.stage / "out.cpp")
        self.assertIn("fa_mutant_other", self.get("out.cpp"))
        self.assertNotIn("no_sum", self.get("out.cpp"))
        self.put("online.cpp", LESSON)

        # One that is alone is not there, whatever its lines are.
        woven = self.weave(0, ("no_sum", exp, ""), ("other", "T m = x[0], l = 0;", "T m = x[0], l;"), how=" (alone)")
        self.assertNotIn("other", woven)
        self.assertIn("no mutant of online.cpp to weave", self.weave(1, ("other", exp, ""), how=" (alone)"))
        self.assertIn("other\tonline.cpp\tA.b\talone\tany\n", self.call(
            0, "mutants.py", "list", self.stage / "check/mutants.txt"))

        # The lesson's instantiations for double go, unless a test looks at double alone.
        self.put("online.cpp", LESSON + "template T row(MatrixMap<const double>, int);\n")
        self.assertNotIn("double", self.weave(0, ("no_sum", exp, "")))
        self.assertIn("double", self.weave(0, ("no_sum", exp, ""), kills="A.b (double)"))

    def test_what_cannot_be_woven(self) -> None:
        self.put("online.cpp", LESSON.replace("  return", "  if (n)\n    m = 1;\n  l = 2;\n  static int k = n;\n  return"))
        for old, new, why in (("const T seen = m;", "T seen = n;", "declares seen, which is used after it"),
                              ("m = std::max(m, x[j]);", "T l = x[j];", "declares l, which is used after it"),
                              ("static int k = n;", "static int k = 0;", "declares something static"),
                              ("l += std::exp(x[j] - m);", "#pragma unroll\nl += 1;", "a line of the preprocessor"),
                              ("for (int j = 0; j < n; ++j) {", "for (int j = 1; j < n; ++j) {", "whole statements"),
                              ("if (n)", "if (m)", "whole statements"),
                              ("m = 1;\nl = 2;", "m = 1;", "whole statements")):
            with self.subTest(old):
                said = self.weave(1, ("other", old, new))
                self.assertIn("cannot be woven: it", said)
                self.assertIn(why, said)
                self.assertIn("write other: online.cpp (alone)", said)
                self.weave(0, ("some", "return m + std::log(l);", "return m;"), ("other", old, new), how=" (alone)")
        
    def test_lines_of_two_mutants_that_overlap_are_woven_as_one_spot(self) -> None:
        self.put("online.cpp", LESSON.replace("  return", "  l = 2;\n  return"))
        woven = self.weave(0, ("some", "l = 2;\nreturn m + std::log(l);", "return m;"),
                           ("other", "return m + std::log(l);", "return l;"))
        spot = woven[woven.index("if (fa_mutant_some)"):woven.index("#line 19")]
        self.assertEqual([line.strip() for line in spot.split("\n") if line and not line.startswith("#")], [
            "if (fa_mutant_some) {", "return m;", "} else if (fa_mutant_other) {", "l = 2;", "return l;", "} else {",
            "l = 2;", "return m + std::log(l);", "}"])

    def test_verdict(self) -> None:
        for script, code, line in (
                (FAILED, 0, "killed by A.b\n"),
                ("exit 0", 1, "survived"),
                (FAILED.replace("A.b", "A.bc"), 1, "not killed: exit code 1"),
                (FAILED.replace("exit 1", "exit 3"), 1, "not killed: exit code 3"),
                ("kill -SEGV $$", 1, "crashed"),
                ("exec sleep 5", 1, "timeout"),
                ('echo "[==========] 0 tests from 0 test suites ran."', 1, "no test"),
                ('echo "t.cpp:1: Skipped"; echo "no GPU"; echo "[  SKIPPED ] 1 test."', 77,
                 "[  SKIPPED ] no GPU\n"),
                (f'test "$*" = "--gtest_filter=A.b --gtest_brief=1" && {FAILED}', 0, "killed")):
            exe = self.put("fake", "#!/bin/sh\n" + script + "\n")
            exe.chmod(0o755)
            limit = "0.2" if "sleep" in script else "60"
            with self.subTest(script):
                said = self.call(code, "mutants.py", "verdict", exe, "A.b", "--timeout", limit)
                self.assertEqual(said.count("\n"), 1)
                self.assertTrue(said.startswith(line), said)
        done = subprocess.run([sys.executable, FOLDER["mutants.py"] / "mutants.py", "verdict", "absent", "A.b"],
                              stderr=subprocess.DEVNULL)
        self.assertEqual(done.returncode, 2)

    def test_one_of_several_seeds_must_kill_a_mutant_of_random_times(self) -> None:
        exe = self.put("fake", f'#!/bin/sh\n[ "$FA_TIMING" != 3 ] || {{ {FAILED}; }}\n')
        exe.chmod(0o755)
        for timing, code, line in (("random 2", 1, "survived"), ("random 3", 0, "killed"), ("random 8", 0, "killed"),
                                   ("2", 1, "survived"), ("3", 0, "killed")):
            with self.subTest(timing), unittest.mock.patch.dict(os.environ, FA_TIMING=timing):
                self.assertTrue(self.call(code, "mutants.py", "verdict", exe, "A.b").startswith(line))

    def test_a_skeleton_must_fail(self) -> None:
        ran = 'echo "[  PASSED  ] 3 tests."'
        for script, code, line in ((FAILED, 0, "does not pass"),
                                   (f"case $* in *Sizes*) {ran};; *) {FAILED};; esac", 0, "does not pass"),
                                   (f"case $* in *Sizes*) {FAILED};; *) {ran};; esac", 0, "does not pass"),
                                   ("kill -SEGV $$", 0, "does not pass"),
                                   ("exec sleep 5", 0, "no verdict within 0.2 s"),
                                   (ran, 1, "passes all tests as it is"),
                                   ('echo "[  SKIPPED ] 1"; echo "[  PASSED  ] 0 tests."', 77, "was skipped"),
                                   ("exit 3", 1, "the program did not run")):
            exe = self.put("fake", "#!/bin/sh\n" + script + "\n")
            exe.chmod(0o755)
            limit = "0.2" if "sleep" in script else "60"
            with self.subTest(script):
                done = subprocess.run([sys.executable, FOLDER["mutants.py"] / "mutants.py", "skeleton", exe, "--timeout",
                                       limit], text=True, stdout=subprocess.PIPE)
                self.assertEqual((done.returncode, line in done.stdout), (code, True), done.stdout)


class Lessons(unittest.TestCase):
    """What must hold for the course's own lessons."""

    def test_later_levels_lack_what_the_first_lacks(self) -> None:
        """So a skeleton of theirs fails if that of the first does, and has no program of its own."""
        for stage in STAGES:
            for lesson in marked_lessons(stage):
                for level in LEVELS[1:]:
                    for hole in lesson.holes(1):
                        self.assertTrue(any(there.first <= hole.first and hole.last <= there.last for there in lesson.holes(level)),
                                        f"{lesson.label}: level {level} has {hole.name}")

    def test_a_skeleton_filled_in_is_the_lesson(self) -> None:
        for stage in STAGES:
            for lesson in marked_lessons(stage):
                for level in LEVELS:
                    with self.subTest(lesson.label, level=level), tempfile.TemporaryDirectory() as folder:
                        mine = Path(folder) / "mine.cpp"
                        mine.write_text(lesson.skeleton(level))
                        copy, told = load_copy(lesson, Path(folder), mine)
                        names = [h.name for h in lesson.holes(level)]
                        self.assertEqual(([h.name for h in copy.regions], told), (names, []))
                        self.assertFalse([h.name for h in copy.regions if copy.written(h)])
                        lines = list(copy.lines)
                        for empty, whole in reversed(list(zip(copy.regions, lesson.holes(level)))):
                            lines[empty.first:empty.last + 1] = lesson.code(whole)
                        helpers = [r for r in lesson.regions if r.kind == "blank" and not r.name and level == 3]
                        whole = [line for i, line in enumerate(lesson.lines)
                                 if not any(h.first <= i <= h.last for h in helpers)]
                        self.assertEqual(*(bare("\n".join(unmarked(x))).split() for x in (lines, whole)))

    def test_every_hole_has_hints(self) -> None:
        for stage in STAGES:
            places = (stage / "README.md", stage / "exercises.md", *stage.glob("beyond/*/README.md"), stage / "ring" / "README.md")
            pages = [p.read_text(encoding="utf-8") for p in places if p.exists()]
            named = set()
            for names in re.findall(r"<summary><b>(\d\d\.\w+(?:(?:, | to )\d\d\.\w+)*)</b>", "\n".join(pages)):
                for part in names.split(", "):
                    first, _, last = part.partition(" to ")
                    number = first[3:].isdigit()
                    low, high = (int(n[3:]) if number else ord(n[3:]) for n in (first, last or first))
                    named |= {f"{stage.name[:2]}.{n if number else chr(n)}" for n in range(low, high + 1)}
            self.assertEqual(named, {h.name for lesson in marked_lessons(stage) for h in lesson.holes(2)}, stage.name)


if __name__ == "__main__":
    unittest.main()
