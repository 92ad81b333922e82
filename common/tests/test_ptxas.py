"""common/cmake/ptxas.py on what ptxas says, by a compiler that only says it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

TOOL = Path(__file__).resolve().parents[1] / "cmake" / "ptxas.py"
sys.dont_write_bytecode = True
sys.path.insert(0, str(TOOL.parent))

from ptxas import parse, short_name  # noqa: E402

CLEAN = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4goodILi128EEvPf' for 'sm_90a'
ptxas info    : Function properties for _Z4goodILi128EEvPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 1024 bytes smem, 540 bytes cmem[0]
ptxas info    : Compile time = 12.3 ms
"""
SPILLED = CLEAN.replace("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
                        "48 bytes stack frame, 40 bytes spill stores, 36 bytes spill loads")
HELPER = """ptxas info    : Function properties for _Z6helperv
    8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
"""
SERIALISED = ("ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
              "insufficient register resources for the wgmma pipeline in the function '_Z4goodILi128EEvPf'\n")
IGNORED = "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored\n"


class Watching(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.object = self.root / "kernel.o"
        self.record = self.root / "kernel.o.ptxas.json"

    def compiled(self, says: str, spills: str = "error", code: int = 0, *more: str) -> subprocess.CompletedProcess[str]:
        """With a compiler that writes what it shall, says this, and ends so."""
        compiler = self.root / "nvcc"
        compiler.write_text(f"#!{sys.executable}\nimport sys\nassert sys.argv[-2:] == ['-Xptxas', '-v']\n"
                            "open(sys.argv[sys.argv.index('-o') + 1], 'w').write(' '.join(sys.argv[1:4]))\n"
                            f"sys.stderr.write({says!r})\nsys.exit({code})\n")
        compiler.chmod(0o755)
        return subprocess.run([sys.executable, str(TOOL), "compile", f"--spills={spills}", *more, "--", str(compiler), "-x",
                               "cu", "-c", "/some/where/forward/kernel.cu", "-o", str(self.object)],
                              capture_output=True, text=True, check=False)

    def ended(self, says: str, *words: str) -> None:
        self.object.with_name(self.record.name).unlink(missing_ok=True)
        done = self.compiled(says)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
        for word in ("forward/kernel.cu", *words):
            self.assertIn(word, done.stderr)
        self.assertFalse(self.object.exists(), "the next build would take it for finished")
        self.assertFalse(self.record.exists())

    def test_quiet_when_all_is_well(self) -> None:
        done = self.compiled(CLEAN)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))
        kernel = json.loads(self.record.read_text())["kernels"][0]
        name = kernel.pop("name")
        self.assertTrue(name.startswith(("good<128>", "_Z4good")), name)  # as it is where nothing demangles
        self.assertEqual(kernel, {"architecture": "sm_90a", "registers": 168, "shared_bytes": 1024, "stack_bytes": 0,
                                  "spill_store_bytes": 0, "spill_load_bytes": 0, "barriers": 9})

    def test_device_code_alone(self) -> None:
        """Nothing of it but what ptxas says: the object is one that links, and holds nothing."""
        done = self.compiled(CLEAN, "error", 0, "--device-code-alone")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))
        self.assertEqual(json.loads(self.record.read_text())["kernels"][0]["registers"], 168)
        self.assertEqual(json.loads(self.record.read_text())["source"], "forward/kernel.cu")
        self.assertNotIn(b"cu -c", self.object.read_bytes())
        main = self.root / "main.c"
        main.write_text("int main(void) { return 0; }\n")
        subprocess.run(["cc", "-o", self.root / "main", main, self.object], check=True)
        self.assertEqual(sorted(path.name for path in self.root.iterdir()),
                         ["kernel.o", "kernel.o.ptxas.json", "main", "main.c", "nvcc"])
        self.assertEqual(self.compiled(SPILLED, "error", 0, "--device-code-alone").returncode, 1)
        self.assertEqual(self.compiled("kernel.cu(3): error: no\n", "error", 2, "--device-code-alone").returncode, 2)
        self.assertFalse(self.object.exists())

    def test_spills_may_be_allowed(self) -> None:
        done = self.compiled(SPILLED, "allowed")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))
        self.assertEqual(json.loads(self.record.read_text())["kernels"][0]["spill_store_bytes"], 40)

    def test_other_words_pass_through(self) -> None:
        done = self.compiled("kernel.cu(3): warning #177-D: unused\n" + CLEAN)
        self.assertEqual((done.returncode, done.stderr), (0, "kernel.cu(3): warning #177-D: unused\n"))
        done = self.compiled("kernel.cu(3): error: no\n", code=2)
        self.assertEqual((done.returncode, done.stderr), (2, "kernel.cu(3): error: no\n"))
        self.assertFalse(self.object.exists())

    def test_what_ends_a_build(self) -> None:
        self.ended(CLEAN + SERIALISED, "wait for each other", "C7510")
        self.ended(CLEAN + SERIALISED.replace("(C7510) ", ""), "wait for each other")
        self.ended(CLEAN + IGNORED, "takes a kernel's speed", "setmaxnreg")
        self.ended(SPILLED, "for sm_90a", "40 bytes stored, 36 loaded")
        self.ended(CLEAN + HELPER, "helper", "8 bytes stored")

    def test_a_spill_may_be_only_a_warning(self) -> None:
        done = self.compiled(SPILLED, "warning")
        self.assertEqual(done.returncode, 0)
        self.assertIn("warning: forward/kernel.cu", done.stderr)
        self.assertEqual(json.loads(self.record.read_text())["kernels"][0]["spill_load_bytes"], 36)
        self.assertEqual(self.compiled(CLEAN + SERIALISED, "warning").returncode, 1)

    def test_collects_whole_or_not_at_all(self) -> None:
        self.compiled(CLEAN)
        table = self.root / "results" / "kernels.json"
        collect = [sys.executable, str(TOOL), "collect", str(table), str(self.object)]
        self.assertEqual(subprocess.run(collect, capture_output=True, check=False).returncode, 0)
        self.assertEqual(json.loads(table.read_text())["kernels"][0]["source"], "forward/kernel.cu")
        before = table.read_bytes()
        done = subprocess.run([*collect, str(self.root / "absent.o")], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1))
        self.assertIn("absent.o.ptxas.json", done.stderr)
        self.assertEqual(table.read_bytes(), before)
        self.assertEqual([path.name for path in table.parent.iterdir()], ["kernels.json"])

    def test_a_table_has_the_kernels_of_the_build(self) -> None:
        self.compiled(CLEAN)
        table = self.root / "kernels.json"
        tool = [sys.executable, str(TOOL)]
        subprocess.run([*tool, "collect", str(table), str(self.object)], check=True, capture_output=True)

        def checked() -> tuple[int, str]:
            done = subprocess.run([*tool, "check", str(table), str(self.object)], capture_output=True, text=True, check=False)
            return done.returncode, done.stderr

        self.assertEqual(checked(), (0, ""))
        recorded = table.read_text()
        table.write_text(recorded.replace('"registers": ', '"registers": 1'))  # another architecture's
        self.assertEqual(checked(), (0, ""))
        name = json.loads(recorded)["kernels"][0]["name"]
        table.write_text(recorded.replace(name, "gone"))
        code, said = checked()
        self.assertEqual(code, 1)
        self.assertIn(f"kernels.json lacks {name} of forward/kernel.cu", said)
        self.assertIn("this build lacks, gone of forward/kernel.cu", said)


class Reading(unittest.TestCase):
    def test_each_architecture_is_a_row(self) -> None:
        both = parse(CLEAN.replace("sm_90a", "sm_80") + CLEAN)
        self.assertEqual([kernel.architecture for kernel in both], ["sm_80", "sm_90a"])
        self.assertEqual(parse("nothing of ptxas"), [])

    def test_short_names(self) -> None:
        for name, short in {
                "void fa::optimized::(anonymous namespace)::kernel<(int)128, (bool)1>(float *, fa::Problem)":
                    "kernel<128, 1>",
                "void fa::kernel<fa::Tile<(int)64>, __half>(fa::Forward<T1>)": "kernel<Tile<64>, __half>",
                "other(float *)": "other", "plain": "plain", "_Z3oddv": "_Z3oddv"}.items():
            self.assertEqual(short_name(name), short)


if __name__ == "__main__":
    unittest.main()
