"""FlashAttention-3 beside 06: what its builder says and keeps, and what the tools do with it and without it."""
from __future__ import annotations

import contextlib
import copy
import ctypes
import io
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
STAGE = ROOT / "06_optimized"
for folder in (STAGE / "check" / "fa3", STAGE / "check", STAGE / "beyond" / "decode" / "check", STAGE / "beyond" / "packed" / "check",
               ROOT / "common" / "measure" / "charts"):
    sys.path.insert(0, str(folder))
import build  # noqa: E402
import charts  # noqa: E402
import table  # noqa: E402
from figure import Chart, Table  # noqa: E402
from results import BadResults, load  # noqa: E402

NVCC = """#!/bin/sh
[ "$1" = --version ] && { echo "Cuda compilation tools, release VERSION, VVERSION.88"; exit 0; }
echo "$@" >>LOG
case "$*" in *BREAKS*) echo error; exit 1;; esac
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo built >"$2"; shift; done
"""
WALKS = tuple(path.name for path in (STAGE / "beyond").iterdir() if path.is_dir())  # they have records of their own
COMMITS = {"fa3_commit": "0123456789abcdef", "cutlass_commit": "fedcba9876543210"}


class InFolder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)


class Builder(InFolder):
    def setUp(self) -> None:
        super().setUp()
        self.checkout, self.log = self.folder / "flash-attention", self.folder / "log"
        for name in ("hopper/flash_bwd_launch_template.h", "csrc/cutlass/include/cute/tensor.hpp"):
            (self.checkout / name).parent.mkdir(parents=True)
            (self.checkout / name).touch()
        self.nvcc("13.0")

    def nvcc(self, version: str, breaks: str = "nothing") -> None:
        path = self.folder / "bin" / "nvcc"
        path.parent.mkdir(exist_ok=True)
        path.write_text(NVCC.replace("VERSION", version).replace("LOG", str(self.log)).replace("BREAKS", breaks))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def build(self, *more: str, commit: str = "abc", path: str | None = None) -> tuple[int, str, str]:
        given = ["--commit", commit, "--cutlass-commit", "def"] if commit else []
        out, err = io.StringIO(), io.StringIO()
        environment = {"PATH": path or f"{self.folder}/bin:{os.environ['PATH']}", "CUDA_HOME": str(self.folder / "no")}
        with mock.patch.dict(os.environ, environment), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = build.main([str(self.checkout), "--out", str(self.folder / "out"), *given, *more])
            except SystemExit as left:
                code = int(str(left.code))
        return code, out.getvalue(), err.getvalue()

    def refused(self, words: str, *more: str, **how: str) -> None:
        code, _, said = self.build(*more, **how)
        self.assertEqual(code, 2, said)
        self.assertIn(words, said.splitlines()[-1])
        self.assertFalse(self.log.exists())

    def test_refuses_in_one_line(self) -> None:
        self.refused("is no git clone; say which commit it is with --commit", commit="")
        self.refused("one of forward:64:none", "--only", "forward:96:none")
        self.refused("one of", "--only", "deterministic:256:none")
        self.refused("one of", "--only", "decode_split:256:none")
        self.refused("one of", "--only", "decode_merge:64:causal")
        self.refused("a number from 1 on", "--jobs", "0")
        self.refused("no nvcc in PATH", path=str(self.folder))
        self.nvcc("12.2")
        self.refused("is CUDA 12.2.88; FlashAttention-3 wants 12.3 or later")
        (self.folder / "out").touch()
        self.nvcc("13.0")
        self.refused("out")
        (self.checkout / "csrc/cutlass/include/cute/tensor.hpp").unlink()
        self.refused("submodule update --init csrc/cutlass")
        (self.checkout / "hopper/flash_bwd_launch_template.h").unlink()
        self.refused("no checkout of FlashAttention")

    def test_the_commit_is_gits(self) -> None:
        git = lambda *words: subprocess.run(["git", "-C", self.checkout, "-c", "user.name=a", "-c", "user.email=b",  # noqa: E731
                                             *words], check=True, capture_output=True, text=True).stdout.strip()
        git("init", "-q")
        git("add", ".")
        git("commit", "-qm", "a")
        head = git("rev-parse", "HEAD")
        self.assertEqual(build.commit_of(self.checkout, None, "--commit"), head)
        with self.assertRaisesRegex(build.Refused, "--cutlass-commit"):  # a folder of that clone
            build.commit_of(self.checkout / "csrc" / "cutlass", None, "--cutlass-commit")
        (self.checkout / "hopper/flash_bwd_launch_template.h").write_text("changed")
        self.assertRegex(build.commit_of(self.checkout, None, "--commit"), f"{head}-dirty-[0-9a-f]{{8}}$")

    def test_goes_on(self) -> None:
        only = ("--only", "forward:128:causal", "backward:64:none")
        self.nvcc("13.0", breaks="FA3_BACKWARD=1")
        code, said, complaint = self.build(*only)
        self.assertEqual(code, 1)
        self.assertRegex(said, r"^forward:128:causal: \d+ s\n/")
        self.assertIn("backward:64:none: nvcc failed, see ", complaint)
        built = (self.folder / "out/objects/built.hpp").read_text()
        self.assertIn('FA3_COMMIT "abc"', built)
        self.assertTrue(built.endswith("FA3_KERNELS(X) X(forward, 128, 1)\n"))
        self.nvcc("13.0")
        code, said, _ = self.build(*only, "--jobs", "2")
        self.assertEqual(code, 0)
        self.assertIn("forward:128:causal: built before, kept", said)
        self.assertIn("X(forward, 128, 1) X(backward, 64, 0)", (self.folder / "out/objects/built.hpp").read_text())
        self.assertTrue((self.folder / "out/libfa3.so").is_file())
        self.assertNotIn("kept", self.build(*only, commit="abd")[1])
        self.nvcc("13.1")
        self.assertNotIn("kept", self.build(*only, commit="abd")[1])

    def test_decoding_is_added(self) -> None:
        self.assertEqual(self.build("--only", "forward:128:causal")[0], 0)
        code, said, _ = self.build("--decode", "--jobs", "2")
        self.assertEqual(code, 0)
        self.assertEqual(said.count("decode"), len(build.DECODING))
        built = (self.folder / "out/objects/built.hpp").read_text()
        self.assertEqual(built.count(" X("), 1 + len(build.DECODING))
        self.assertIn("X(forward, 128, 1) X(decode, 64, 0)", built)
        commands = self.log.read_text().splitlines()
        told = {name: set(re.findall(r"-DFA3_([A-Z]+)=1 ", line)) for line in commands
                for name in re.findall(r"-DFA3_NAME=fa3_(\w+_128_[01])", line)}
        several = {"decode": {"DECODE"}, "decode_packed": {"DECODE", "PACKED"},
                   "decode_split": {"DECODE", "PACKED", "SPLIT"}}
        one = several | {"decode_paged": {"DECODE", "PACKED", "PAGED"}, "decode_merge": {"DECODE", "MERGE"},
                         "decode_paged_split": {"DECODE", "PACKED", "PAGED", "SPLIT"}}
        self.assertEqual(told, {"forward_128_1": {"CAUSAL"}} | {f"{name}_128_0": words for name, words in one.items()}
                         | {f"{name}_128_1": words | {"CAUSAL"} for name, words in several.items()})
        self.assertRegex(commands[-1], r"-shared .*/fa3\.o .*/decode\.o ")

    def test_kernels_of_walks_are_added(self) -> None:
        self.refused("one of", "--only", "forward_window:64:causal")
        self.refused("one of", "--only", "backward_softcap:64:none")
        code, said, _ = self.build("--walks", "--jobs", "2")
        self.assertEqual((code, said.count(" s\n")), (0, 12))
        told = {name: set(re.findall(r"-DFA3_([A-Z]+)=1 ", line)) for line in self.log.read_text().splitlines()
                for name in re.findall(r"-DFA3_NAME=fa3_(\w+)_128_", line)}
        self.assertEqual(told, {
            "forward_window": {"LOCAL"}, "backward_window": {"BACKWARD", "LOCAL"},
            "forward_softcap": {"CAUSAL", "SOFTCAP"}, "backward_softcap": {"BACKWARD", "CAUSAL", "SOFTCAP"},
            "forward_varlen": {"CAUSAL", "VARLEN"}, "backward_varlen": {"BACKWARD", "CAUSAL", "VARLEN"}})

    def test_more_is_fp16_and_groups(self) -> None:
        self.refused("one of", "--only", "deterministic_f16:256:none")
        self.refused("one of", "--only", "forward_packed:128:none")  # its heuristics pack heads at d = 64 alone
        code, said, _ = self.build("--more", "--jobs", "2")
        self.assertEqual((code, said.count(" s\n")), (0, 18))
        told = {name: set(re.findall(r"-DFA3_([A-Z]+|F16)=1 ", line + " ")) for line in self.log.read_text().splitlines()
                for name in re.findall(r"-DFA3_NAME=fa3_(\w+)_64_0", line)}
        self.assertEqual(told, {
            "forward_packed": {"PACKED"}, "backward_groups": {"BACKWARD", "GROUPS"},
            "deterministic_groups": {"BACKWARD", "DETERMINISTIC", "GROUPS"}, "forward_f16": {"F16"},
            "backward_f16": {"BACKWARD", "F16"}, "deterministic_f16": {"BACKWARD", "DETERMINISTIC", "F16"}})


class Compared(InFolder):
    """compare.py's file, without a GPU and PyTorch."""

    def setUp(self) -> None:
        super().setUp()
        torches = {name: mock.MagicMock() for name in ("torch", "torch.nn", "torch.nn.attention")}
        with mock.patch.dict(sys.modules, torches):
            for name in ("peers", "contenders", "precision", "compare"):
                sys.modules.pop(name, None)
            import compare
            self.compare = compare
        context = {key: "same" for key in compare.SAME_RUN}
        self.contexts = {"with": context | COMMITS, "without": context,
                         "another": context | COMMITS | {"fa3_commit": "ffff"}}
        for name in ("peers", "contenders", "precision", "compare"):  # others want the real ones
            sys.modules.pop(name, None)

    def test_a_continued_file_shares_the_commit(self) -> None:
        for old in self.contexts:
            path = self.folder / f"{old}.json"
            path.write_text(json.dumps({"context": self.contexts[old], "benchmarks": []}))
            for new in self.contexts:
                with self.subTest(old=old, new=new):
                    if old == new:
                        self.assertEqual(self.compare.File(path, self.contexts[new], True).context, self.contexts[old])
                    else:
                        with self.assertRaisesRegex(self.compare.BadResults, "another fa3_commit"):
                            self.compare.File(path, self.contexts[new], True)

    def test_what_is_measured_again_names_its_commit(self) -> None:
        case, path = mock.MagicMock(what="forward"), self.folder / "again.json"
        case.row_name = lambda who, chip: f"{who}/N:{case.n}/chip:{chip}"
        names = ["stage06/forward/ours/N:1/chip:hot", "stage06/forward/ours/N:2/chip:hot"]
        rows = lambda ms: [{"name": case.row_name("stage06/forward/ours", "hot"), "real_time": ms, "flops": 1}]  # noqa: E731
        old, new = {**self.contexts["with"], "commit": "old"}, {**self.contexts["with"], "commit": "new"}
        with mock.patch.object(self.compare, "gpu_state", return_value=""), \
                mock.patch.object(self.compare, "write_whole", lambda path, content: path.write_bytes(content)):
            first = self.compare.File(path, dict(old), False)
            for case.n in (1, 2):
                first.add(case, "hot", rows(1), 0)
            with self.assertRaisesRegex(self.compare.BadResults, "another commit"):
                self.compare.File(path, dict(new), True)
            second = self.compare.File(path, dict(new), False, True)
            self.assertFalse(second.has(names[:1]))
            second.add(case, "hot", rows(2), 0)
        third = self.compare.File(path, dict(new), False, True)  # a call that was stopped goes on
        self.assertEqual([third.has([name]) for name in names], [False, True])
        self.assertEqual(third.context["commit"], "old")
        self.assertEqual([(row["real_time"], row.get("commit")) for row in third.rows], [(1, None), (2, "new")])
        self.assertTrue(self.compare.File(path, dict(old), True).has(names))

    def test_absent(self) -> None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), mock.patch.object(self.compare, "FA3", self.folder / "libfa3.so"):
            self.assertIsNone(self.compare.found_fa3(None))
        self.assertRegex(out.getvalue(), r"^without FlashAttention-3: absent; .*build.py CHECKOUT builds it\n$")
        with contextlib.redirect_stderr(io.StringIO()) as err, self.assertRaises(SystemExit) as left:
            self.compare.arguments(["library", "json", "--fa3", "missing"])
        self.assertEqual(left.exception.code, 2)
        self.assertIn("--fa3 missing: no such file", err.getvalue())

    def test_a_kernel_that_is_not_built(self) -> None:
        ours, fa3 = mock.MagicMock(), mock.MagicMock()
        fa3.kernels.return_value = ["fa3", "fa3_deterministic"]
        fa3.runner.return_value = "FlashAttention-3: not built (backward, d = 64, no mask)"
        out = io.StringIO()
        with contextlib.redirect_stdout(out), mock.patch.object(self.compare, "PEERS", ()):
            self.assertEqual(len(self.compare.runners_of(ours, fa3, ["hopper"], mock.MagicMock(), False)), 1)
            with self.assertRaisesRegex(self.compare.BadResults, "--fa3: .*not built .backward, d = 64"):
                self.compare.runners_of(ours, fa3, ["hopper"], mock.MagicMock(), True)
            fa3.kernels.return_value = ["fa3_deterministic"]  # d = 256 has none
            self.assertEqual(len(self.compare.runners_of(ours, fa3, ["hopper"], mock.MagicMock(), True)), 1)
        self.assertIn("without fa3: FlashAttention-3: not built", out.getvalue())

    def test_a_foreign_library(self) -> None:
        (self.folder / "libfa3.so").write_text("no library")
        with self.assertRaisesRegex(self.compare.BadResults, "no library of fa3/build.py"):
            self.compare.found_fa3(self.folder / "libfa3.so")


class Decoded(InFolder):
    """decode_bench.py's side of the library, without a GPU and PyTorch."""

    def setUp(self) -> None:
        super().setUp()
        torches = {name: mock.MagicMock() for name in ("torch", "torch.nn", "torch.nn.attention")}
        with mock.patch.dict(sys.modules, torches):
            sys.modules.pop("decode_bench", None)
            import decode_bench
            self.bench = decode_bench

    def test_the_call_is_the_headers(self) -> None:
        text = (STAGE / "beyond/decode/check/peer.hpp").read_text(encoding="utf-8")
        body = re.sub(r"//.*", "", re.search(r"struct fa_decode_call \{(.*?)\n\}", text, re.S)[1])
        fields = []
        for line in filter(str.strip, body.split(";")):
            kind = ctypes.c_int64 if "int64_t" in line else ctypes.c_void_p
            fields += [(name, kind) for name in re.findall(r"(\w+)\s*(?:,|$)", line)]
        self.assertEqual(self.bench.Call._fields_, fields)

    def test_a_foreign_library(self) -> None:
        (self.folder / "libfa3.so").write_text("no library")
        for name in ("missing", "libfa3.so"):
            with self.assertRaises(SystemExit) as left:
                self.bench.main(["library", "json", "--fa3", str(self.folder / name)])
            self.assertRegex(str(left.exception.code), f"^decode_bench.py: {self.folder / name}: ")

    def test_who_is_measured(self) -> None:
        library, fa3 = mock.MagicMock(), mock.MagicMock()

        tensors = mock.MagicMock()
        tensors.setting.Nq = 2

        def names(fa3: object, kind: str) -> list[str]:
            return [name for name, _ in self.bench.contenders(library, fa3, tensors, kind)]
        self.assertEqual(set(names(fa3, "main")) - set(names(None, "main")), {"fa3", "fa3_paged"})
        self.assertEqual(names(fa3, "parts"), names(None, "parts"))
        self.assertEqual(set(names(fa3, "queries")) - set(names(None, "queries")), {"fa3"})
        self.assertIn("ours_last", names(None, "queries"))
        for name, make in self.bench.contenders(library, fa3, tensors, "main"):
            if name.startswith("fa3") and "kvcache" not in name:
                make()
                fa3.contender.assert_called_with(tensors, name, 0, name == "fa3_paged", lengths=False)


class Packed(InFolder):
    """packed_bench.py's side of the library, likewise; test_walks has its struct."""

    def setUp(self) -> None:
        super().setUp()
        with mock.patch.dict(sys.modules, {"torch": mock.MagicMock()}):
            sys.modules.pop("packed_bench", None)
            import packed_bench
            self.bench = packed_bench

    def test_a_foreign_library(self) -> None:
        (self.folder / "libfa3.so").write_text("no library")
        for name in ("missing", "libfa3.so"):
            with self.assertRaises(SystemExit) as left:
                self.bench.main(["library", "json", "--fa3", str(self.folder / name)])
            self.assertRegex(str(left.exception.code), f"^packed_bench.py: {self.folder / name}: ")

    def test_who_is_measured(self) -> None:
        setting, library, fa3 = mock.MagicMock(), mock.MagicMock(), mock.MagicMock()

        def made(fa3: object) -> dict[str, object]:
            return dict(self.bench.contenders(library, fa3, setting, False))
        self.assertEqual(set(made(fa3)) - set(made(None)), {"fa3"})
        made(fa3)["fa3"]()
        fa3.contender.assert_called_once_with(setting, "fa3", 0)
        library.contender.assert_not_called()


class Drawn(InFolder):
    def results(self, fa3: bool) -> list[Chart | Table]:
        """Of what is recorded, with cuDNN's rows for FlashAttention-3's, and two_kernels' for our best."""
        data = json.loads((STAGE / "results/nvidia-h200.json").read_text(encoding="utf-8"))
        data["benchmarks"] = [row for row in data["benchmarks"] if "/fa3" not in row["name"] and "/best" not in row["name"]
                              and ("N:4096/" in row["name"] or "step/" in row["name"])]
        names = {"/two_kernels/": ["best", "best_deterministic"]}
        if fa3:
            data["context"] |= COMMITS
            names["/cudnn/"] = ["fa3", "fa3_deterministic"]
        else:
            data["context"].pop("fa3_commit", None)
        for row in copy.deepcopy(data["benchmarks"]):
            for old, new in names.items():
                who, found, rest = row["name"].partition(old)
                for name in new if found else []:
                    if name != "fa3_deterministic" or who != "peer/forward":
                        data["benchmarks"].append(row | {"name": f"{who}/{name}/{rest}"})
        path = self.folder / "nvidia-h200.json"
        path.write_text(json.dumps(data))
        return charts.figures(STAGE, load(path))

    def test_without_rows_nothing_speaks_of_it(self) -> None:
        for item in self.results(fa3=False):
            if not getattr(item, "page", "").startswith("beyond/") and not item.name.startswith(WALKS):
                self.assertNotRegex(str(item), "FlashAttention-3|deterministic")

    def test_a_step_and_the_rest_are_found_again(self) -> None:
        data = json.loads((STAGE / "results/nvidia-h200.json").read_text(encoding="utf-8"))
        data["benchmarks"] = [row for row in data["benchmarks"] if "forward/hopper/" in row["name"] and "/d:128/" in row["name"]]
        for row in data["benchmarks"]:
            n, causal = (int(re.search(rf"/{key}:(\d+)", row["name"])[1]) for key in ("N", "causal"))
            steps = (n / 128 + 1) / 2 if causal else n / 128
            row["real_time"] = 2048 / 132 * (2 * steps + 3 + causal) / 1000  # 2 us a step, 3 or 4 a tile
        path = self.folder / "nvidia-h200.json"
        path.write_text(json.dumps(data))
        [table] = [item for item in charts.figures(STAGE, load(path)) if item.name == "step_and_rest"]
        self.assertEqual([[*row[:4], *row[5:]] for row in table.rows],
                         [["128", "none", "hopper", "2.000", "3.00", "0.0 %"], ["128", "causal", "hopper", "2.000", "4.00", "0.0 %"]])

    def test_with_rows(self) -> None:
        items = {item.name: item for item in self.results(fa3=True)}
        which = "FlashAttention-3: commit 0123456"
        for name in ("speed_d64", "backward_speed_d128"):
            self.assertRegex(items[name].subtitle, f"^NVIDIA H200.* · bf16 · FLOPs: .* · {which}$")
            labels = [line.label for line in items[name].panels[0].lines if line.role == "peer"]
            self.assertEqual(labels, ["cuDNN", "FlashAttention-2, PyTorch", "FlashAttention-3"])
        self.assertIn("FlashAttention-3", str(items["ladder"].panels))
        for name, lines in (("ratios_hot", 1), ("backward_ratios_hot", 2), ("steps", 2), ("errors", 1)):
            found = {cell for cells in items[name].rows for cell in cells if "FlashAttention-3" in cell}
            self.assertEqual(len(found), lines, name)
            self.assertIn(f"`results/nvidia-h200.json`). {which}.", items[name].caption)
        self.assertEqual(items["kernels"].caption.count("commit"), 0)


class BigTable(InFolder):
    CONTEXT = {"machine": "nvidia-x", "device": "X", "isa": "sm_90", "cores": "1", "compiler": "c", "flags": "f",
               "commit": "abc", "date": "2026-01-01T00:00:00", "flop_formula": "4 d FLOP", "torch": "2", "method": "M"}
    CELL = table.Cell("bf16", 64, 16, 1024, "forward")

    def file(self, **more: str) -> table.File:
        return table.File(self.folder / "table.json", self.CONTEXT | more)

    def row(self, side: str, ms: float) -> table.Row:
        return table.figure_row(self.CELL, side, ms, {"p99_ms": ms, "launches": 20, "peak_bytes": 2**20, "error": 1e-3})

    def test_a_third_side(self) -> None:
        file = self.file()
        file.add([self.row("ours", 2.0), self.row("peer", 3.0)])
        self.assertTrue(file.has(self.CELL))
        self.assertFalse(file.has(self.CELL, sides=(*table.SIDES, table.FA3)))
        before = table.markdown(file.context, file.rows, [])
        self.assertNotIn("FlashAttention-3", before)
        self.assertEqual([line.label for line in table.charts(file.context, file.rows)[0].panels[0].lines],
                         ["ours", "PyTorch"])
        file.add([self.row("fa3", 1.0)])
        text = table.markdown(file.context | COMMITS, file.rows, [])
        self.assertIn("commit 0123456789abcdef, CUTLASS fedcba9876543210.", text)
        self.assertIn("| 1.50× | 0.50× | 20 / 20 / 20 |", text)
        self.assertEqual(len({line.count("|") for line in text.splitlines() if line.startswith("|")}), 1)
        self.assertEqual([line.label for line in table.charts(file.context, file.rows)[0].panels[0].lines],
                         ["ours", "PyTorch", "FlashAttention-3"])

    def test_a_continued_file_shares_the_commit(self) -> None:
        self.file(**COMMITS).add([self.row("ours", 2.0)])
        self.file(**COMMITS)
        for other in ({}, COMMITS | {"fa3_commit": "ffff"}):
            with self.assertRaisesRegex(BadResults, "another fa3_commit .0123456789abcdef."):
                self.file(**other)


if __name__ == "__main__":
    unittest.main()
