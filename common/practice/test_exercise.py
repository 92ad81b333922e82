"""practice.py's own part: a reader's files, what is refused, what compilers and sanitizers say, saves as editors make them."""
from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections import Counter
from pathlib import Path
from unittest import mock

import practice
from marks import Lesson, Region, load_copy, marked_lessons  # puts common/judge on the path
from practice import Wish, advise, begin, copies, finding, first_errors, fitted, following, keep, settled, state, strangers, wasteful
from progress import read, show
from verdict import Copy, Verdict

LESSON = """\
int {name}() {{
  int x = 0;
  // [blank]
  // [step 02.{k}: one (1 line)]
  x += 1;
  // [end]
  // [end blank]
  return x;
}}
"""


class Files(unittest.TestCase):
    """A stage 02_toy with two lessons in a project of its own."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        root = Path(folder.name).resolve()
        self.stage, self.mine = root / "02_toy", root / "02_toy" / "mine"
        (self.stage / "fast").mkdir(parents=True)
        (self.stage / "CMakeLists.txt").write_text("fa_add_stage(02 toy)\n")
        (self.stage / "a.cpp").write_text(LESSON.format(name="a", k=1))
        (self.stage / "fast" / "b.cpp").write_text(LESSON.format(name="b", k=2))
        patch = mock.patch.object(practice, "ROOT", root)
        patch.start()
        self.addCleanup(patch.stop)
        self.wish = Wish(self.stage, False, "no GPU")

    def put(self, name: str, text: str = "x") -> Path:
        file = self.mine / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def begin(self, *names: str, level: int | None = None, reset: bool = False, sanitizer: str | None = None) -> tuple[int, str]:
        out, code = io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                begin(self.wish, list(names), level, reset, sanitizer)
            except SystemExit as ended:
                code = int(ended.code or 0)
        return code, out.getvalue()


class Begin(Files):
    def test_the_first_file_or_those_named(self) -> None:
        self.assertEqual(self.begin(), (0, "your copy, level 1: 02_toy/mine/a.cpp\n"))
        self.assertEqual(self.begin("b.cpp", level=3), (0, "your copy, level 3: 02_toy/mine/fast/b.cpp\n"))
        self.assertEqual(self.begin(), (0, ""))
        self.assertEqual([c.text.level for c in copies(self.stage)], [1, 3])

    def test_a_copy_is_never_written_again(self) -> None:
        file = self.put("a.cpp", "mine")
        for names, level in ((["a.cpp"], None), ([], 1), (["a.cpp"], 1)):
            self.assertEqual(self.begin(*names, level=level), (0, ""))
            self.assertEqual(file.read_text(), "mine")

    def test_another_level_is_refused_and_nothing_lost(self) -> None:
        self.begin(level=2)
        text = (self.mine / "a.cpp").read_text()
        said = "02_toy/mine/a.cpp is at level 2 and stays as it is; to throw it away: ./learn practice 02 a.cpp --level 1 --reset\n"
        self.assertEqual(self.begin(level=1), (2, said))
        self.assertEqual(self.begin("b.cpp", "a.cpp", level=1), (2, said))
        self.assertEqual((self.mine / "a.cpp").read_text(), text)
        self.assertFalse((self.mine / "fast").exists())

    def test_reset(self) -> None:
        self.begin("a.cpp", "b.cpp", level=2)
        self.put("predictions.txt"), self.put("notes.txt")
        (self.mine / "a.cpp").write_text("mine")
        self.assertEqual(self.begin("b.cpp", level=3, reset=True), (0, "your copy, level 3: 02_toy/mine/fast/b.cpp\n"))
        self.assertEqual((self.mine / "a.cpp").read_text(), "mine")
        self.assertEqual(self.begin(reset=True), (0, "your copy, level 1: 02_toy/mine/a.cpp\n"))
        files = sorted(f.name for f in self.mine.rglob("*") if f.is_file())
        self.assertEqual(files, ["a.cpp", "notes.txt", "predictions.txt"])

    def test_what_cannot_work_throws_nothing_away(self) -> None:
        self.put("a.cpp", "mine")
        self.assertEqual(self.begin("c.cpp", reset=True), (2, "no skeleton 02_toy/exercise/c.cpp; there are: a.cpp fast/b.cpp\n"))
        self.assertEqual(self.begin(reset=True, sanitizer="race"), (2, "stage 02 has one thread: nothing can race there\n"))
        (self.mine / "fast" / "b.cpp").mkdir(parents=True)
        self.assertEqual(self.begin(reset=True), (2, "02_toy/mine/fast/b.cpp is no file, but the place for one; move it away\n"))
        (self.stage / "CMakeLists.txt").write_text("fa_add_ladder(02 toy)\n")
        code, said = self.begin(reset=True, sanitizer="asan")
        self.assertEqual((code, said.count("\n")), (2, 1))
        self.assertEqual((self.mine / "a.cpp").read_text(), "mine")

    def test_what_does_not_belong_there(self) -> None:
        for name in ("a.cpp", "predictions.txt", ".a.cpp.swp", "a.cpp~", "#a.cpp#", "4913", ".a.cpp.12.part", "fast/b.cpp"):
            self.put(name)
        self.assertEqual(strangers(self.stage), [])
        for name in ("main.cpp", "a.txt", "b.cpp", "z", "y"):
            self.put(name)
        self.assertEqual(strangers(self.stage), ["in 02_toy/mine, but no skeleton of this stage, left alone: a.txt, b.cpp, main.cpp and 2 more"])

    def test_what_comes_next(self) -> None:
        def mine(*names: str) -> list[Copy]:
            for name in names:
                self.put(name, f"// Practice 02, level 2, of {name}. Keep the marks\n// [step 02.1: one (1 line)]\nx;\n// [end]\n")
            return copies(self.stage)
        def said(*names: str) -> str:
            keep(self.wish, copies := mine(*names), None)
            told, shown = following(self.wish, copies), show(practice.ROOT)[-1]
            self.assertEqual(told.partition("; or ")[0], shown.removeprefix("next: "))
            return told
        self.assertEqual(said("a.cpp"), "02_toy/README.md, and its exercise, step 02.2: ./learn practice 02 fast/b.cpp --level 2")
        self.assertEqual(said("fast/b.cpp"),
                         "02_toy/README.md, and a hunt: ./learn hunt 02; or again with less help: ./learn practice 02 --level 3 --reset")

    def test_all_that_passes_is_noted_once_marks_or_not(self) -> None:
        self.put("a.cpp", "int a() { return 1; }")
        for right in ([], None, None):
            keep(self.wish, copies(self.stage), right)
        self.assertEqual([(n.stage, n.details) for n in read(practice.ROOT)[0]], [("02", {"step": "02.1", "level": "1"})])


class Watching(Files):
    def setUp(self) -> None:
        super().setUp()
        self.file = self.put("a.cpp", "one")
        self.seen = settled(self.stage, {})

    def after(self, *acts: object) -> float:
        """How long it takes from the first act to another check; 0.3 s lie between the acts."""
        def work() -> None:
            for act in acts:
                act()   # type: ignore[operator]
                time.sleep(0.3)
        thread = threading.Thread(target=work)
        began = time.monotonic()
        thread.start()
        self.seen = settled(self.stage, self.seen)
        took = time.monotonic() - began
        thread.join()
        return took

    def test_in_place(self) -> None:
        self.assertLess(self.after(lambda: self.file.write_text("two")), 1)

    def test_cut_to_nothing_and_then_written(self) -> None:
        self.assertGreater(self.after(lambda: self.file.write_text(""), lambda: self.file.write_text("two")), 0.3)
        self.assertEqual(self.seen[self.file][2], 3)

    def test_another_file_in_its_place(self) -> None:
        other = self.stage / "other"
        other.write_text("two")
        os.utime(other, ns=(self.file.stat().st_mtime_ns,) * 2)    # as old, and as long
        self.assertLess(self.after(lambda: other.replace(self.file)), 1)

    def test_moved_away_and_written_anew(self) -> None:
        self.after(lambda: self.file.rename(self.mine / "a.cpp~"), lambda: self.file.write_text("three"))
        self.assertEqual(self.seen[self.file][2], 5)

    def test_deleted_for_good(self) -> None:
        self.assertGreater(self.after(self.file.unlink), 2)
        self.assertEqual(self.seen, {})

    def test_what_editors_leave_is_no_save(self) -> None:
        for name in (".a.cpp.swp", "a.cpp~", "#a.cpp#", "4913"):
            self.put(name)
        self.assertEqual(state(self.stage), self.seen)

    def test_a_second_file(self) -> None:
        self.assertLess(self.after(lambda: self.put("fast/b.cpp")), 1)

    def test_a_save_during_a_check_leads_to_another(self) -> None:
        checks = []

        def judge() -> int:
            checks.append(self.file.read_text())
            if len(checks) == 1:
                self.file.write_text("two, while the first is judged")
            elif len(checks) == 2:
                self.file.unlink()
                self.file.write_text("three")
                raise FileNotFoundError(2, "gone for a moment", "a.cpp")
            else:
                raise KeyboardInterrupt
            return 1
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(practice.watch(self.wish, judge), 0)
        self.assertEqual(checks, ["one", "two, while the first is judged", "three"])
        self.assertIn("gone for a moment", out.getvalue())


class Reports(unittest.TestCase):
    def mine(self) -> list[Copy]:
        lesson = Lesson("04_toy/a.cu", [])
        return [Copy(lesson, Lesson("04_toy/mine/a.cu", [f"  line {i};" for i in range(1, 100)]), [])]

    def test_two_lines_that_race(self) -> None:
        report = """\
stage\ttiled
begins\tone key
trial\tone key\t
begins\ta few keys
==================
WARNING: ThreadSanitizer: data race (pid=7)
  Read of size 4 at 0x1 by thread T3:
    #0 sum /c/04_toy/../common/core/a.hpp:3 (x+0x1)
    #1 kernel /c/04_toy/mine/a.cu:55 (x+0x1)
    #2 launch 04_toy/mine/a.cu:90 (x+0x1)

  Previous write of size 4 at 0x1 by thread T1:
    #0 kernel 04_toy/mine/a.cu:48 (x+0x1)

  Thread T3 created by main thread at:
    #0 launch 04_toy/mine/a.cu:91 (x+0x1)

SUMMARY: ThreadSanitizer: data race 04_toy/mine/a.cu:55 in kernel
"""
        self.assertEqual(finding("ThreadSanitizer", report, self.mine()),
                         ["ThreadSanitizer: data race", "  04_toy/mine/a.cu:55: line 55;", "  04_toy/mine/a.cu:48: line 48;",
                          "  at the trial: a few keys"])

    def test_the_hole_of_the_barrier_that_is_missing(self) -> None:
        """Between the lines; else next to them, as where a loop leads from its end to its beginning; else where they stand."""
        holes = [Region("more", "04.a", 0, 2, "before the load", 1), Region("step", "04.1", 3, 5, "load", 1),
                 Region("more", "04.b", 6, 8, "before the use", 1), Region("step", "04.2", 9, 11, "use", 1),
                 Region("more", "04.c", 12, 14, "at the end", 1)]
        lines = [line for code in ("__syncthreads();", "x", "__syncthreads();", "x", "// no __syncthreads()") for line in ("// [", code, "// [end]")]
        lesson = Lesson("04_toy/a.cu", lines, holes)

        def said(*lacking: int) -> str:
            mine = Lesson("04_toy/mine/a.cu", ["" if i in lacking else line for i, line in enumerate(lines)], holes, 2)
            report = ("WARNING: ThreadSanitizer: data race (pid=7)\n  Read of size 4\n    #0 k 04_toy/mine/a.cu:11\n\n"
                      "  Previous write of size 4\n    #0 k 04_toy/mine/a.cu:5\n")
            return finding("T", report, [Copy(lesson, mine, [])])[3]
        self.assertEqual(said(1, 7), "  between them no barrier: 04.b, before the use")
        self.assertEqual(said(1), "  around them no barrier: 04.a, before the load")
        self.assertEqual(said(), "  in 04.1 and 04.2")

    def test_a_race_in_what_a_kernel_calls_is_the_kernels(self) -> None:
        report = ("WARNING: ThreadSanitizer: data race (pid=7)\n  Write of size 4 at 0x1 by thread T3:\n"
                  "    #0 load<32> 04_toy/mine/a.cu:5 (x+0x1)\n    #1 my_kernel<32> 04_toy/mine/a.cu:55 (x+0x1)\n"
                  "    #2 operator() 04_toy/mine/a.cu:90 (x+0x1)\n")
        self.assertEqual(finding("ThreadSanitizer", report, self.mine())[1], "  04_toy/mine/a.cu:55: line 55;")

    def test_an_access_outside(self) -> None:
        report = "begins\tx\n==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x1\n    #0 f 04_toy/mine/a.cu:7\n\nSUMMARY: 04_toy/mine/a.cu:8"
        self.assertEqual(finding("A", report, self.mine()),
                         ["A: heap-buffer-overflow", "  04_toy/mine/a.cu:7: line 7;", "  at the trial: x"])

    def test_undefined_behaviour_names_its_place_first(self) -> None:
        report = "begins\tx\n04_toy/mine/a.cu:9:5: runtime error: division by zero\n    #0 f 04_toy/mine/a.cu:9\n"
        self.assertEqual(finding("U", report, self.mine()), ["U: division by zero", "  04_toy/mine/a.cu:9: line 9;", "  at the trial: x"])

    def test_nothing(self) -> None:
        self.assertEqual(finding("T", "begins\tx\ntrial\tx\t\n", self.mine()), [])

    def test_no_line_of_the_readers(self) -> None:
        self.assertIn("no line of yours", finding("T", "WARNING: ThreadSanitizer: data race (pid=7)\n  Read\n", self.mine())[1])


class Advice(unittest.TestCase):
    def test_asan_is_promised_for_a_crash_and_asked_for_NaN(self) -> None:
        wish = Wish(practice.ROOT / "02_online_softmax", False, "")
        for line, words in (("  crashes at the trial: a few keys", "./learn practice 02 --asan names the line"),
                            ("  wrong: O, every element (NaN among them)", "is memory read that is not yours? ./learn practice 02 --asan"),
                            ("  wrong: O, every element", "")):
            out, found = io.StringIO(), mock.Mock(spec=Verdict, lines=[line], written=[], suite=None)
            with contextlib.redirect_stdout(out):
                advise(wish, [], found)
            self.assertEqual("; ".join(part for part in out.getvalue().split("; ") if "asan" in part), words)


class Waste(unittest.TestCase):
    def test_a_kernel_that_takes_more_than_the_lesson_is_named(self) -> None:
        stage = practice.ROOT / "04_cuda_forward"
        copies = [mock.Mock(lesson=mock.Mock(lines=["void launch_tiled(const Problem& p) {"]))]
        for yours, lines in ((110, []), (111, ["right, but tiled takes 111 turns of shared memory where the lesson takes 100: "
                                               "./learn xray 04 mine tiled"]), (0, [])):
            counts = {"mine": Counter({"shared": yours, "global": 7})}
            with self.subTest(yours), mock.patch.object(
                    practice, "taken", lambda _, *words: counts.get(words[0], Counter({"shared": 100, "global": 7}))):
                self.assertEqual(list(wasteful(Wish(stage, False, ""), copies)), lines)
        for other in ("02_online_softmax", "06_optimized"):
            self.assertEqual(list(wasteful(Wish(practice.ROOT / other, False, ""), copies)), [])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Building(unittest.TestCase):
    PROGRAM = "import sys; print('[0/2] a\\n[1/2] b\\na.cpp:1: error: x\\n[12/20] c'); sys.exit(1)"

    def said(self, out: io.StringIO, loud: bool = False) -> str:
        wish = Wish(practice.ROOT / "02_online_softmax", loud, "")
        with contextlib.redirect_stdout(out):
            self.assertEqual(practice.call(wish, "building", sys.executable, "-c", self.PROGRAM),
                             (False, "[0/2] a\n[1/2] b\na.cpp:1: error: x\n[12/20] c\n"))
        return out.getvalue()

    def test_on_a_terminal_one_line_that_leaves_nothing(self) -> None:
        said = self.said(Terminal())
        self.assertTrue(said.startswith("\rbuilding ...\rbuilding: [0/2]\rbuilding: [1/2]\rbuilding: [12/20]\r"), repr(said))
        self.assertEqual(said.split("\r")[-2:], [" " * len("building: [12/20]"), ""])
        self.assertNotIn("\n", said)

    def test_elsewhere_a_few_lines_if_it_lasts(self) -> None:
        self.assertEqual(self.said(io.StringIO()), "")
        with mock.patch.object(practice, "PATIENCE", 0.0):
            self.assertEqual(self.said(io.StringIO()), "building: [0/2]\nbuilding: [1/2]\nbuilding: [12/20]\n")
        times = iter([0.0, 9, 10, 19, 20, 39, 40])
        out = io.StringIO()
        with mock.patch.object(practice.time, "monotonic", lambda: next(times)), contextlib.redirect_stdout(out):
            progress = practice.Progress("building")
            for n in range(1, 7):
                progress.step(f"[{n}/9] x")
            progress.over()
        self.assertEqual(out.getvalue(), "building: [2/9]\nbuilding: [4/9]\nbuilding: [6/9]\n")

    def test_loud(self) -> None:
        self.assertIn("[1/2] b\na.cpp:1: error: x\n", self.said(Terminal(), loud=True))


class Compilers(unittest.TestCase):
    def test_gcc_and_clang(self) -> None:
        root = str(practice.ROOT)
        output = f"""\
FAILED: x.o
{root}/02_toy/mine/a.cpp: In function 'f':
{root}/02_toy/mine/a.cpp:21:5: error: 'mm' was not declared
   21 |     mm = 1;
      |     ^~
      |     m
{root}/02_toy/mine/a.cpp:30:5: note: here
a.cpp:22:5: fatal error: two
    mm = 1;
a.cpp:23:5: error: three
ninja: build stopped
"""
        self.assertEqual(first_errors(output), ["02_toy/mine/a.cpp:21:5: error: 'mm' was not declared", "   21 |     mm = 1;", "      |     ^~",
                                                "a.cpp:22:5: fatal error: two"])

    def test_nvcc_and_linkers(self) -> None:
        for line in ('a.cu(21): error: identifier "mm" is undefined', "ld: a.o: undefined reference to `f'", "Undefined symbols for architecture arm64:"):
            self.assertEqual(first_errors(f"[1/2] x\n{line}\n"), [line])

    def test_words_that_nobody_foresaw(self) -> None:
        self.assertEqual(first_errors("a\n\nb\nc\nd\ne\n"), ["b", "c", "d", "e"])

    def test_errors_are_few_and_short(self) -> None:
        lines = first_errors("\n".join(f"a.cpp:{i}: error: {'x' * 999}\n  {i} | {'y' * 999}\n    | ^" for i in range(99)))
        self.assertLessEqual(len(lines), 6)
        self.assertLessEqual(max(map(len, lines)), 240)


class Screen(unittest.TestCase):
    def test_all_of_it_if_it_fits(self) -> None:
        lines = ["  a  the same", "b", "  c"]
        self.assertEqual(fitted(lines, 3), lines)

    def test_what_agrees_goes_first_then_details(self) -> None:
        lines = ["  head", "  a  the same", "  b  the same", "  c  <-", "steps", "02.1", "  wrong: x", "  wrong with y"]
        self.assertEqual(fitted(lines, 6), ["  head", "  c  <-", "steps", "02.1", "  wrong: x", "  wrong with y"])
        self.assertEqual(fitted(lines, 5), ["  head", "  c  <-", "steps", "02.1", "  wrong: x"])
        self.assertEqual(fitted(lines, 2), ["steps", "02.1"])

    def test_equal_lines(self) -> None:
        self.assertEqual(len(fitted(["  a"] * 5, 3)), 3)


class Ends(unittest.TestCase):
    """However it ends, nobody sees Python's own words."""

    def start(self, body: str) -> subprocess.Popen[str]:
        code = f"from source import run\ndef main():\n    {body}\n    return 0\nrun(main)"
        return subprocess.Popen([sys.executable, "-c", code], cwd=practice.ROOT / "common" / "judge", text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def test_stopped_by_hand(self) -> None:
        process = self.start("raise KeyboardInterrupt")
        self.assertEqual((*process.communicate(), process.returncode), ("", "stopped\n", 130))

    def test_nobody_reads_on(self) -> None:
        process = self.start("[print('x' * 99, flush=True) for _ in range(99999)]")
        assert process.stdout and process.stderr
        process.stdout.close()
        self.assertEqual((process.stderr.read(), process.wait()), ("", 1))
        process.stderr.close()


class RealCopies(unittest.TestCase):
    def test_any_bytes(self) -> None:
        stage = practice.ROOT / "02_online_softmax"
        lesson = marked_lessons(stage)[0]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "mine" / "x.cpp"
            file.parent.mkdir()
            for content in (b"", b"\xff\xfe\x00// [step 02.1\n", lesson.skeleton(1).encode().replace(b"\n", b"\r\n")):
                file.write_bytes(content)
                copy, told = load_copy(lesson, Path(folder), file)
            self.assertEqual((told, len(copy.regions)), ([], len(lesson.holes(1))))


if __name__ == "__main__":
    unittest.main()
