#!/usr/bin/env python3
"""Tests of marks.py and mutants.py through their command lines."""
from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = {"mutants.py": HERE.parent / "judge"}   # of a tool that is not here
LESSON = '''\
// [quote row]
template <typename T>
T row(const T* x, int n) {
  T m = x[0], l = 0;
  for (int j = 0; j < n; ++j) {
    const T seen = m;
    // [step 02.1: rescale the old sum (2 lines)]
    m = std::max(m, x[j]);

    // return and __syncthreads() in a comment are harmless
    l = l * std::exp(seen - m);
    // [end]
    l += std::exp(x[j] - m);
  }
  return m + std::log(l);
}
// [end quote]
'''
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

    def test_skeleton(self) -> None:
        out = self.stage / "out.cpp"
        self.call(0, "marks.py", "skeleton", self.stage / "online.cpp", "-o", out)
        lines = LESSON.split("\n")
        self.assertEqual(out.read_text().split("\n"), [
            "// Generated from ../online.cpp. To fill in the TODOs: ./learn practice 02",
            *lines[1:6], "    // TODO 02.1: rescale the old sum (2 lines)", *lines[12:16], ""])
        empty = self.put("a.cpp", "")
        self.assertIn("no step", self.call(1, "marks.py", "skeleton", empty, "-o", out))
        self.call(2, "marks.py", "skeleton", self.stage / "absent.cpp", "-o", out)
        self.call(2, "marks.py", "check", self.stage.parent)
        self.call(2, "marks.py", "polish", self.stage)

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
                (f"{one}\n#if X\n{line}#endif", "#if", 8),
                (f"{one}\n    {STEP}\n{line}", "promises 1 but holds 2", 7),
                (f"{one}\n    if (m) {{\n{line}    }}", "unbalanced", 7),
                (f"{one}\n    }} l = f(m); {{\n{line}", "unbalanced", 7),
                (f"{one.replace('02.1', '02.2')}\n    m = 0;\n{line}", "should be 02.1", 7),
                (f"{one.replace('02.1', '01.1')}\n    m = 0;\n{line}", "should be 02.1", 7),
                (f"{one.replace('02.1', '2')}\n    m = 0;\n{line}", "broken mark", 7),
                (f"m = 0; {one}\n{line}", "broken mark", 7),
                (f"{one}\n    m = 0;\n", "end quote] while 02.1", 13),
                (f"{one}\n    {one}\n    m = 0;\n{line}{line}", "nested", 8),
                (line, "[end] while row is open", 7)):
            head, tail = LESSON.split("    " + mark)
            self.put("online.cpp", head + "    " + new + tail.partition("// [end]\n")[2])
            with self.subTest(new):
                self.assertRegex(self.marks(1, "check"), rf"^02_online/online.cpp:{at}: ")
                self.assertIn(reason, self.marks(1, "check"))
        self.put("online.cpp", f"{one}\nm = 0;\n")
        self.assertIn("online.cpp:1: 02.1 is unclosed", self.marks(1, "check"))

    def test_harmless_steps(self) -> None:
        for body, count in (("#pragma unroll\nfor (int i = 0; i < 2; ++i) { T t = i; m += t; }", 2),
                            ('m = f("return {", \'{\', 1\'000);', 1),
                            ("T t = 1;\nm = t;\n// [end]\n}\nvoid g() { T t; ", 2)):
            self.put("online.cpp", f"void f() {{\n// [step 02.1: x ({count} lines)]\n{body}\n"
                                   + ("// [end]\n" if "[end]" not in body else "") + "i = 1; }\n")
            with self.subTest(body):
                self.marks(0, "write")

    def test_exercise_and_numbering_over_files(self) -> None:
        self.assertIn("exercise/online.cpp not in step", self.marks(1, "check"))
        second = self.put("fast/a.cpp", LESSON.replace("02.1", "02.2"))
        self.marks(0, "write")
        self.assertIn("from ../../fast/a.cpp", self.get("exercise/fast/a.cpp"))
        self.assertIn("in step", self.marks(0, "check"))
        self.marks(0, "check", "online.cpp", "fast/a.cpp")
        self.assertIn("should be 02.1", self.marks(1, "check", "fast/a.cpp", "online.cpp"))
        self.put("exercise/online.cpp", self.get("exercise/online.cpp") + "\n")
        self.assertIn("exercise/online.cpp not in step", self.marks(1, "check"))
        second.unlink()
        self.assertIn("delete it", self.marks(1, "check"))
        (self.stage / "exercise/fast/a.cpp").unlink()
        self.put("ptx/a.hpp", "constexpr int f(int x) {\n  int y = 0;\n  // [step 02.2: y (1 line)]\n"
                              "  y = x ^ 1;\n  // [end]\n  return y;\n}\n")
        self.marks(0, "write")
        self.assertIn("0;\n  // TODO 02.2: y (1 line)\n  return", self.get("exercise/ptx/a.hpp"))

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
                         "online.Values\nno_sum\tonline.cpp\tonline.Sum/0\n")
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


if __name__ == "__main__":
    unittest.main()
