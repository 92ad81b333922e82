"""Without a GPU: which shapes are tried and what they cost, and which files FA_TUNED refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

import tune
from space import KNOWN, ROOT, files_of, sources

H200, CXX = KNOWN["h200"], os.environ.get("CXX", "c++")


def space_of(kernel: str) -> tune.Space:
    return next(s for s in tune.spaces() if s.kernel == kernel)


def said(*words: str) -> tuple[int, str]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            code = tune.main(list(words))
        except SystemExit as end:
            code = int(end.code or 0)
    return code, text.getvalue()


class Candidates(unittest.TestCase):
    def test_the_shape_in_the_code_is_there_and_alive(self) -> None:
        for space in tune.spaces():
            every = space.candidates(H200)
            self.assertEqual(len({(c.d, c.name) for c in every}), len(every))
            for d in space.d:
                for mask in tune.MASKS:
                    for n in space.lengths:
                        hand = [c for c in every if (c.d, c.name) == (d, space.hand_made(d, mask, n))]
                        self.assertEqual(
                            [(c.hand_made, c.dead) for c in hand], [(True, "")], (space.kernel, d, mask, n)
                        )

    def test_each_fits_its_kernel_s_file(self) -> None:
        for space in tune.spaces():
            for c in space.candidates(H200):
                if not c.dead:
                    self.assertEqual(space.source(c, space.types).count("int fa_tuned_launch("), 1)

    def test_bytes_of_shared_memory(self) -> None:
        # Counted by hand: hopper's for d = 128 is Q twice, K and V in two buffers each, and the barriers.
        by_name = {(s.kernel, c.d, c.name): c for s in tune.spaces() for c in s.candidates(H200)}
        self.assertEqual(by_name["hopper", 128, "128x128_stages2_Q2_O_by_own"].shared, 1024 + 7 * 128 * 128 * 2)
        self.assertEqual(by_name["fa2", 128, "128x64_warps4"].shared, (128 + 2 * 64) * 128 * 2)
        self.assertEqual(
            by_name["longest_first", 64, "128x64_chunk4096_blocks2"].shared,
            4 * (128 * 64 + 128 + 2 * (64 * 64 + 32) + 4 * (64 * 32 + 64)),
        )

    def test_a_smaller_gpu_has_fewer(self) -> None:
        fa2 = space_of("fa2")
        alive = {gpu: {(c.d, c.name) for c in fa2.candidates(KNOWN[gpu]) if not c.dead} for gpu in ("h200", "rtx4090")}
        self.assertLess(alive["rtx4090"], alive["h200"])
        self.assertIn("9.0 alone", space_of("hopper").unfit(KNOWN["a100"]))
        self.assertEqual(fa2.unfit(KNOWN["a100"]), "")

    def test_sources_have_another_name_when_they_change(self) -> None:
        names = [sources(s.file) for s in tune.spaces()]
        self.assertEqual(len(set(names)), len(names))
        self.assertIn("06_optimized/forward/shapes.cuh", files_of("06_optimized/forward/hopper.cu"))


class Words(unittest.TestCase):
    def test_list(self) -> None:
        code, text = said("--list", "--gpu", "h200", "--only", "hopper")
        self.assertEqual(code, 0)
        for words in ("* 128  128x128_stages2_Q2_O_by_own", "worth compiling", "ptx/ has no product of n columns"):
            self.assertIn(words, text)
        self.assertIn("nothing to try: hopper is for compute capability 9.0 alone", said("--list", "--gpu", "a100")[1])

    def test_wrong_use(self) -> None:
        for words, wanted in (
            (("--only", "fa3"), "no kernel 'fa3'; there are longest_first, fa2, hopper"),
            (("--list", "--gpu", "tpu"), "--gpu knows a100, rtx3090, rtx4090, h100, h200, got 'tpu'"),
            (("--gpu", "h200"), "--gpu is for --list"),
            (("--compile",), "--gpu knows a100, rtx3090, rtx4090, h100, h200, got ''"),
            (("--rounds", "0"), "must be at least 1"),
            (("--fast",), "unrecognized arguments: --fast"),
        ):
            code, text = said(*words)
            self.assertEqual((code, len(text.splitlines())), (2, 1), text)
            self.assertIn(wanted, text)

    def test_without_nvcc(self) -> None:
        with tempfile.TemporaryDirectory() as empty, unittest.mock.patch.dict(os.environ, PATH=empty):
            code, text = said("--out", empty + "/out")
        self.assertEqual((code, len(text.splitlines())), (3, 1))
        self.assertIn("nvcc, which was not found", text)

    def test_what_is_compiled_is_kept(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            fake = folder / "nvcc"  # writes what comes after -o, and notes that it was called
            fake.write_text(f"#!/bin/sh\necho call >> {folder}/calls\nfor last; do :; done\necho library > $last\n"
                            "echo spoke >&2\n")
            fake.chmod(0o755)
            library = folder / "a.so"
            with unittest.mock.patch.dict(os.environ, PATH=f"{name}:{os.environ['PATH']}"):
                calls = []
                for text, version in (("int a;", "13.0"), ("int a;", "13.0"), ("int b;", "13.0"), ("int b;", "13.1")):
                    self.assertEqual(tune.nvcc(text, library, "90a", version), "spoke\n")
                    calls.append(len((folder / "calls").read_text().splitlines()))
                self.assertEqual(calls, [1, 1, 2, 3])
                library.unlink()
                tune.nvcc("int b;", library, "90a", "13.1")
                self.assertTrue(library.exists())
                fake.write_text("#!/bin/sh\necho 'a.cu(1): error : no' >&2\nexit 1\n")
                for _ in range(2):
                    with self.assertRaisesRegex(tune.Bad, "does not compile: no"):
                        tune.nvcc("int c;", library, "90a", "13.1")


def cell(n: int, best: str, hand_of_best: float) -> dict[str, object]:
    return {
        "kernel": "hopper",
        "d": 128,
        "mask": "none",
        "N": n,
        "hand_made": "a",
        "best": best,
        "hand_of_best": hand_of_best,
        "tflops": {"a": 700.4, best: 700.4 / hand_of_best},
    }


MEASURED = {
    "gpu": "the emulator",
    "compiler": "13.0.88",
    "method": "by hand",
    "kernels": {"hopper": {"sources": sources("06_optimized/forward/hopper.cu"), "all": 9, "timed": 2}},
    "cells": [cell(1024, "a", 1), cell(4096, "b", 0.985), cell(16384, "b", 0.9)],
}


class Tables(unittest.TestCase):
    def test_what_a_process_says_until_it_says_nothing_more(self) -> None:
        def lines(program: str, patience: float = 30.0) -> list[str | None]:
            return list(tune.lines_of([sys.executable, "-c", program], patience))

        self.assertEqual(lines("print(1); print(2)"), ["1\n", "2\n"])
        self.assertEqual(lines("import time; print(1, flush=True); time.sleep(60)", 1.0), ["1\n", None])
        with self.assertRaisesRegex(tune.Bad, "no such device"):
            lines("import sys; print(1); sys.exit('no such device')")

    def test_a_shape_that_never_ends_or_is_wrong_is_out(self) -> None:
        space = space_of("fa2")
        hand = space.hand_made(64, "none", 1024)
        asked: list[tuple[str, list[str]]] = []

        def faked(command: list[str], patience: float) -> Iterator[str | None]:
            settings, shapes = command[6], [Path(word).name for word in command[8:]]
            asked.append((settings, shapes))
            for setting in settings.split(","):
                for shape in shapes:
                    yield json.dumps({"at": shape})
                    if shape == "hangs" and setting == "none:4096":
                        yield None
                        return
                    if shape == "wrong" and setting.startswith("causal"):
                        yield json.dumps({"wrong": "is wrong"})
                        return
                yield json.dumps({"cell": {"setting": setting}})

        out: list[tuple[str, str]] = []
        with unittest.mock.patch.object(tune, "lines_of", faked):
            shapes = {name: Path(name) for name in (hand, "hangs", "wrong")}
            cells = list(tune.cells_of(space, 64, shapes, Path("judge"), 1, lambda *words: out.append(words)))
            every = [f"{mask}:{n}" for mask in tune.MASKS for n in space.lengths]
            self.assertEqual([c["setting"] for c in cells], every)
            self.assertEqual(out, [("hangs", "never ends, none, N = 4096"), ("wrong", "is wrong, causal, N = 1024")])
            self.assertEqual(asked, [(",".join(every), [hand, "hangs", "wrong"]),
                                     (",".join(every[1:]), [hand, "wrong"]), (",".join(every[3:]), [hand])])
            with self.assertRaisesRegex(tune.Bad, "the shape in the code, hangs: never ends, none, N = 4096"):
                with unittest.mock.patch.object(space, "hand_made", return_value="hangs"):
                    list(tune.cells_of(space, 64, {"hangs": Path("hangs")}, Path("judge"), 1, lambda *_: None))

    def test_the_shape_in_the_code_stays_unless_another_is_clearly_faster(self) -> None:
        self.assertEqual([tune.chosen_of(c) for c in MEASURED["cells"]], ["-", "-", "b"])
        text = tune.table(MEASURED)
        self.assertIn("| 1024 | `a` | 700 | the same | 700 | 1.000 |", text)
        self.assertIn("| 16384 | `a` | 700 | `b` | 778 | 0.900 **!** |", text)
        self.assertIn("in 2 of 3 cells", tune.verdict(MEASURED))

    def test_the_page_has_a_place(self) -> None:
        page = tune.in_page("before\n<!-- tuning -->\nold\n<!-- end -->\nafter", "new")
        self.assertEqual(page, "before\n<!-- tuning -->\nnew\n<!-- end -->\nafter")
        tune.in_page((ROOT / "docs/tuning.md").read_text(encoding="utf-8"), "")

    def test_the_page_says_what_was_recorded(self) -> None:
        recorded = ROOT / "06_optimized/results/tuning.json"
        if recorded.exists():
            page = (ROOT / "docs/tuning.md").read_text(encoding="utf-8")
            self.assertEqual(
                tune.in_page(page, tune.of_page(tune.json.loads(recorded.read_text(encoding="utf-8")))), page
            )


@unittest.skipUnless(shutil.which(CXX), "no C++ compiler")
class Files(unittest.TestCase):
    """common/core/tuned.cpp, with a library that launches nothing."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        tune.source_names(cls.folder / "sources.cpp")
        here = [str(ROOT / "common" / name) for name in ("measure/tune/asks_tuned.cpp", "core/tuned.cpp")]
        cls.compile([*here, str(cls.folder / "sources.cpp"), "-ldl", "-o", str(cls.folder / "asks")])
        cls.library("shape.so", MEASURED["kernels"]["hopper"]["sources"], "return 1;")
        cls.library("other.so", MEASURED["kernels"]["hopper"]["sources"], "return 0;")
        cls.library("fails.so", MEASURED["kernels"]["hopper"]["sources"], '*error = "no room"; return -1;')
        cls.library("old.so", "0123456789abcdef", "return 1;")

    @classmethod
    def compile(cls, words: list[str]) -> None:
        subprocess.run([CXX, "-std=c++20", f"-I{ROOT}", *words], check=True)

    @classmethod
    def library(cls, name: str, of: str, body: str) -> None:
        source = cls.folder / (name + ".cpp")
        source.write_text(
            '#include "common/core/tuned.hpp"\n'
            f'extern "C" const char* fa_tuned_sources() {{ return "{of}"; }}\n'
            'extern "C" int fa_tuned_launch(const fa::TunedCall*, [[maybe_unused]] const char** error) '
            f"{{ {body} }}\n",
            encoding="utf-8",
        )
        cls.compile(["-shared", "-fPIC", str(source), "-o", str(cls.folder / name)])

    def asked(self, text: str | None, n: int = 16384) -> str:
        file = self.folder / "tuned.txt"
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text, encoding="utf-8")
        done = subprocess.run(
            [str(self.folder / "asks"), str(n)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "FA_TUNED": str(file)},
        )
        first, second = done.stdout.splitlines()
        self.assertEqual(first, second)
        return first

    def text(self, library: str = "shape.so") -> str:
        return tune.tuned_file(MEASURED, {("hopper", 128, "b"): library})

    def test_without_a_file(self) -> None:
        done = subprocess.run(
            [str(self.folder / "asks"), "4096"],
            capture_output=True,
            text=True,
            check=True,
            env={key: value for key, value in os.environ.items() if key != "FA_TUNED"},
        )
        self.assertEqual(done.stdout, "as in the code\n" * 2)

    def test_the_cell_of_a_problem(self) -> None:
        for n, wanted in ((1, "as in the code"), (16383, "as in the code"), (16384, "launched"), (99999, "launched")):
            self.assertEqual(self.asked(self.text(), n), wanted, n)

    def test_a_library_may_leave_a_problem_to_the_code_or_fail(self) -> None:
        self.assertEqual(self.asked(self.text("other.so")), "as in the code")
        self.assertEqual(self.asked(self.text("fails.so")), "fails.so: no room")

    def test_refused(self) -> None:
        good = self.text()
        for text, words in (
            (None, "cannot be read"),
            ("", "ends too early"),
            ("{}\n", "is not a file of ./learn tune"),
            (good.replace("the emulator", "NVIDIA A100"), "was measured on NVIDIA A100, this GPU is the emulator"),
            (good.replace("kernel hopper ", "kernel hopper 0"), "was measured with other sources of hopper, 0"),
            (good.replace("kernel hopper", "kernel wgmma"), "does not know, 'wgmma'"),
            (good.replace("end\n", ""), "ends too early"),
            (good + "cell\n", "line 9 cannot be read: 'cell'"),
            (good.replace("none 1024", "some 1024"), "line 5 cannot be read"),
            (self.text("none.so"), "its library cannot be loaded"),
            (self.text("old.so"), "its library old.so was made from other sources"),
        ):
            answer = self.asked(text)
            self.assertTrue(answer.startswith(f"FA_TUNED: {self.folder / 'tuned.txt'}: "), answer)
            self.assertIn(words, answer)
            self.assertTrue(answer.endswith("; run ./learn tune again, or unset FA_TUNED"), answer)


if __name__ == "__main__":
    unittest.main()
