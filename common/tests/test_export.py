"""`./learn export`: every kernel leaves as one file that needs nothing of the course and says itself whether it is right.

It is run here on the emulator, one kernel of each stage and pass; where nvcc is, some are compiled as a reader would.
By hand, for the file: ./learn export 06 forward/fa2
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "common/practice"))

import export  # noqa: E402

CXX = os.environ.get("CXX", "c++")
KERNELS = sorted(str(path.relative_to(ROOT)) for folder in ("04*", "04*/ladder", "05*", "05*/fast", "06*/forward", "06*/backward")
                 for path in ROOT.glob(f"{folder}/*.cu"))
# No kernels, or none without cuBLAS; and what comes with those that need it.
LEFT_OUT = {"04_cuda_forward/baseline.cu", "04_cuda_forward/entry.cu", "05_cuda_backward/entry.cu", "05_cuda_backward/stored.cu",
            "06_optimized/forward/entry.cu", "06_optimized/backward/entry.cu", "06_optimized/backward/0_around.cu", "06_optimized/backward/3_two_kernels_wide.cu",
            "06_optimized/backward/3_two_kernels_queries.cu", "06_optimized/backward/2_swizzle_keys.cu"}


def learn(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ROOT / "learn", "export", *words], cwd=folder, capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL)


class Conditions(unittest.TestCase):
    def test_what_is_known_of_the_emulator_decides(self) -> None:
        for word, condition, cpu, gpu in (
                ("ifdef", "FA_EMULATED", True, False), ("ifndef", "FA_EMULATED", False, True),
                ("if", "defined(FA_EMULATED)", True, False), ("if", "!defined(FA_EMULATED) && X >= 900", False, "X >= 900"),
                ("if", "defined(__CUDACC__) || defined(FA_EMULATED)", True, "defined(__CUDACC__)"),
                ("ifdef", "__CUDACC__", "__CUDACC__", "__CUDACC__")):
            self.assertEqual(export.known(word, condition, True), cpu, condition)
            self.assertEqual(export.known(word, condition, False), gpu, condition)

    def pieces(self, text: str, emulated: bool) -> list[str]:
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(export, "ROOT", Path(folder)):
            Path(folder, "a.hpp").write_text("#pragma once\n#include <set>\na\n")
            Path(folder, "b.hpp").write_text(text)
            pieces = export.Pieces(emulated)
            lines = [line for line in pieces.add("b.hpp").splitlines() if line and not line.startswith("//")]
            return [f"<{name.strip('<>')}>" for name in sorted(pieces.system)] + lines

    def test_branches(self) -> None:
        text = "#ifdef FA_EMULATED\n1\n#elif X\n2\n#ifdef Y\n3\n#else\n4\n#endif\n#else\n5\n#endif\n6\n"
        self.assertEqual(self.pieces(text, True), ["1", "6"])
        self.assertEqual(self.pieces(text, False), ["#if X", "2", "#ifdef Y", "3", "#else", "4", "#endif", "#else", "5", "#endif", "6"])
        text = "#if X\n1\n#elif defined(FA_EMULATED)\n2\n#else\n3\n#endif\n"
        self.assertEqual(self.pieces(text, True), ["#if X", "1", "#else", "2", "#endif"])
        self.assertEqual(self.pieces(text, False), ["#if X", "1", "#else", "3", "#endif"])
        text = "#ifndef FA_EMULATED\n#include <map>\n#ifdef Y\n#include <vector>\n#endif\n#else\n#include <list>\n#endif\n"
        self.assertEqual(self.pieces(text, True), ["<list>"])
        self.assertEqual(self.pieces(text, False), ["<map>", "#ifdef Y", "#include <vector>", "#endif"])

    def test_a_file_comes_once_and_before_who_includes_it(self) -> None:
        self.assertEqual(self.pieces('1\n#include "a.hpp"\n2\n#include "a.hpp"\n', False), ["<set>", "a", "1", "2"])
        self.assertEqual(self.pieces('namespace n {\n#include "a.hpp"\n}\n', False), ["<set>", "namespace n {", "a", "}"])


class Files(unittest.TestCase):
    folder: Path

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)

    def test_every_kernel_leaves_whole_and_alone(self) -> None:
        hopper = re.findall(r"\S+\.cu", re.split("HOPPER|SOURCES", (ROOT / "06_optimized/CMakeLists.txt").read_text())[1])
        left = {stage: learn(stage).stderr.split("there are ")[1].split() for stage in ("04", "05", "06")}
        for file in sorted(set(KERNELS) - LEFT_OUT):
            with self.subTest(file):
                stage, kernel = file[:2], file.split("/", 1)[1]
                source = (ROOT / file).read_text(encoding="utf-8")
                template = "template " if stage == "06" else ""
                launches = list(dict.fromkeys(re.findall(rf"^{template}void launch_(\w+)\(", source, re.M)))
                for launch in launches:
                    left[stage].remove(launch)
                made = export.export(file, launches)
                self.assertTrue(made.text.startswith(f"{export.DONE_BY} {stage} {kernel[:-3]}:"))
                self.assertEqual(made.capability, 90 if kernel in hopper else 80)
                self.assertIn(made.command(export.name_of(file)), made.text)
                self.assertEqual(re.findall(r'^\s*#\s*(?:include ".*|pragma once|.*FA_EMULATED.*)$', made.text, re.M), [])
                self.assertEqual(len(re.findall(r"^\s*#\s*if", made.text, re.M)), len(re.findall(r"^\s*#\s*endif", made.text, re.M)))
                self.assertIn(source[source.index("\nnamespace fa"):].strip(), made.text)
                self.assertEqual(re.findall(r'check\("(\w+)", p, launch_\1(?:<Element>)?\)', made.text), launches)
        self.assertEqual(left, {"04": [], "05": [], "06": []})  # what `learn` knows is all of that

    def test_learn_finds_a_kernel_by_its_name_and_by_its_file(self) -> None:
        for words, file in ((("04", "tiled"), "04_tiled"), (("5", "fast_atomic"), "05_fast_fast_dkv"),
                            (("06", "no_lock"), "06_forward_10_pingpong"), (("06", "backward/hopper.cu"), "06_backward_hopper")):
            done = learn(*words, "-o", "found.cu", folder=self.folder)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn(f" -o {file} {file}.cu\n", (self.folder / "found.cu").read_text())

    def test_where_it_goes_unless_told(self) -> None:
        done = subprocess.run([sys.executable, ROOT / "common/practice/export.py", "04_cuda_forward/ladder/4_one_buffer.cu", "one_buffer"],
                              cwd=self.folder, check=True, capture_output=True, text=True)
        name = "build/export/04_ladder_4_one_buffer"
        self.assertEqual(done.stdout, f"wrote {name}.cu; it compiles alone:\nnvcc -std=c++20 -O3 -arch=sm_80 -o {name} {name}.cu\n")
        self.assertTrue((self.folder / f"{name}.cu").is_file())

    def test_a_file_of_somebody_else_stays(self) -> None:
        mine, ours = self.folder / "mine.cu", self.folder / "ours.cu"
        mine.write_text("// all my work\n")
        ours.write_text(f"{export.DONE_BY} in former times\n")
        done = learn("04", "tiled", "-o", "mine.cu", folder=self.folder)
        self.assertEqual((done.returncode, done.stdout, len(done.stderr.splitlines())), (2, "", 1))
        self.assertIn("stays as it is", done.stderr)
        self.assertEqual(mine.read_text(), "// all my work\n")
        done = learn("04", "tiled", "-o", "ours.cu", folder=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"-o {self.folder}/ours {self.folder}/ours.cu", done.stdout)
        self.assertIn("tiled_kernel", ours.read_text())

    @unittest.skipUnless(shutil.which("nvcc"), "nvcc was not found")
    def test_nvcc_takes_it_alone(self) -> None:
        for stage, kernel in (("04", "tiled"), ("05", "dq"), ("06", "forward/6_tma")):
            done = learn(stage, kernel, "-o", "alone.cu", folder=self.folder)
            command = done.stdout.splitlines()[1].split()
            said = subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True)
            self.assertEqual(said.stdout + said.stderr, "", kernel)
            ran = subprocess.run([self.folder / "alone"], capture_output=True, text=True, check=False)
            if ran.returncode == 3:
                self.assertRegex(ran.stderr, r"^\S+: (no usable GPU: |this program is for compute capability ).*\n$")
            else:
                self.assertEqual((ran.returncode, ran.stdout.splitlines()[-1]), (0, "right"), ran.stdout + ran.stderr)


class OnTheEmulator(unittest.TestCase):
    folder: Path

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        names = [f"common/emulator/{name}.cpp" for name in ("cores", "cuda_on_cpu", "overlap", "places", "proxies", "races")]
        names += ["common/core/check.cpp", *(str(path.relative_to(ROOT)) for path in ROOT.glob("06*/ptx/on_cpu/*.cpp"))]
        *others, last = (str(ROOT / name) for name in names)  # as one file, which reads the headers once
        cls.compile("-c", "-o", "emulator.o", *(word for name in others for word in ("-include", name)), last)

    @classmethod
    def compile(cls, *words: str) -> None:
        subprocess.run([CXX, "-std=c++20", "-Og", "-DFA_EMULATED", "-Wno-unknown-pragmas", f"-I{ROOT}", *words], cwd=cls.folder,
                       check=True)

    def result(self, file: str, *launches: str, defect: tuple[str, str] = ("", "")) -> tuple[int, str]:
        text = export.export(file, list(launches), emulated=True).text
        self.assertEqual(text.count(defect[0]) if defect[0] else 1, 1)
        (self.folder / "one.cpp").write_text(text.replace(*defect))
        self.compile("-o", "one", "one.cpp", "emulator.o", "-ldl", "-pthread")
        ran = subprocess.run([self.folder / "one", "70"], capture_output=True, text=True, check=False)
        return ran.returncode, ran.stdout + ran.stderr

    def test_each_is_right(self) -> None:
        for file, launches, compared in (
                ("04_cuda_forward/tiled.cu", ["tiled"], "O LSE"),
                ("05_cuda_backward/dkv.cu", ["dkv", "atomic"], "dK dV dQ dK dV"),
                ("06_optimized/forward/10_pingpong.cu", ["lock", "no_lock"], "O LSE O LSE"),
                ("06_optimized/backward/hopper.cu", ["backward_hopper"], "dQ dK dV")):
            with self.subTest(file):
                code, said = self.result(file, *launches)
                self.assertEqual((code, said.splitlines()[-1]), (0, "right"), said)
                self.assertEqual(re.findall(r"^  (\w+) ", said, re.M), 2 * compared.split())

    def test_a_wrong_one_is_told(self) -> None:
        code, said = self.result("04_cuda_forward/tiled.cu", "tiled", defect=("launch(p, t, float(", "launch(p, t, 1.01f * float("))
        self.assertEqual((code, said.splitlines()[-1], said.count("<- WRONG")), (1, "WRONG", 4), said)
        code, said = self.result("04_cuda_forward/tiled.cu", "tiled", defect=("launch(p, t, float(", "if (false) launch(p, t, float("))
        self.assertEqual((code, said.count("off by nan")), (1, 4), said)


if __name__ == "__main__":
    unittest.main()
