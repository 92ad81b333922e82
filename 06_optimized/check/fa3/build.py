"""Builds FlashAttention-3 from a checkout of it into a library that compare.py times; without PyTorch.

    git clone --recurse-submodules https://github.com/Dao-AILab/flash-attention
    python3 06_optimized/check/fa3/build.py flash-attention            # build/fa3/libfa3.so
    python3 06_optimized/check/fa3/build.py flash-attention --decode   # and decoding, for decode_bench.py
    python3 06_optimized/check/fa3/build.py flash-attention --walks    # windows, soft caps, packed sequences
    python3 06_optimized/check/fa3/build.py flash-attention --more     # fp16, groups of query heads on a key head

Wants CUDA 12.3 or later, about a minute and 2.5 GB of memory for each of the 16 kernels, 18 of decoding, 12 of walks, 18
more; no GPU. Called again it goes on: a kernel is compiled again only if the checkout, the compiler or this folder has changed since.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
OLDEST = (12, 3)  # the first CUDA that FlashAttention-3 compiles with
# Those of hopper/setup.py that change the code, and those that PyTorch's builder adds to them.
FLAGS = ["-O3", "-std=c++17", "--use_fast_math", "--expt-relaxed-constexpr", "-DNDEBUG",
         "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED", "-DCUTLASS_ENABLE_GDC_FOR_SM90", "-DCUTLASS_DEBUG_TRACE_LEVEL=0",
         "-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__", "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
         "-D__CUDA_NO_HALF2_OPERATORS__", "-gencode", "arch=compute_90a,code=sm_90a", "-Xcompiler", "-fPIC"]
LEFT_OUT = [f"-DFLASHATTENTION_DISABLE_{what}" for what in ("APPENDKV", "SM8x")]  # what is not asked for


class Refused(Exception):
    """What is missing, in one line."""


@dataclass(frozen=True)
class Kernel:
    what: str  # of KINDS
    d: int
    causal: bool

    def __str__(self) -> str:
        return f"{self.what}:{self.d}:{'causal' if self.causal else 'none'}"

    @property
    def entry(self) -> str:
        """As in built.hpp."""
        return f"{self.what}, {self.d}, {int(self.causal)}"

    @property
    def file(self) -> str:
        return f"{self.what}_{self.d}_{int(self.causal)}"

    @property
    def definitions(self) -> list[str]:
        return [f"-DFA3_NAME=fa3_{self.file}", f"-DFA3_D={self.d}", f"-DFA3_CAUSAL={int(self.causal)}",
                *(f"-DFA3_{word}={int(word in KINDS[self.what].split())}" for word in WORDS)]


KINDS = {"forward": "", "backward": "BACKWARD", "deterministic": "BACKWARD DETERMINISTIC",
         "decode": "DECODE", "decode_packed": "DECODE PACKED", "decode_split": "DECODE PACKED SPLIT",
         "decode_paged": "DECODE PACKED PAGED", "decode_paged_split": "DECODE PACKED PAGED SPLIT",
         "decode_merge": "DECODE MERGE", "forward_window": "LOCAL", "backward_window": "BACKWARD LOCAL",
         "forward_softcap": "SOFTCAP", "backward_softcap": "BACKWARD SOFTCAP",
         "forward_varlen": "VARLEN", "backward_varlen": "BACKWARD VARLEN",
         "forward_packed": "PACKED", "backward_groups": "BACKWARD GROUPS",
         "deterministic_groups": "BACKWARD DETERMINISTIC GROUPS",
         "forward_f16": "F16", "backward_f16": "BACKWARD F16", "deterministic_f16": "BACKWARD DETERMINISTIC F16"}
WORDS = ("BACKWARD", "DETERMINISTIC", "DECODE", "PACKED", "SPLIT", "PAGED", "MERGE", "LOCAL", "SOFTCAP", "VARLEN", "GROUPS",
         "F16")
WIDE = ("forward", "backward", "forward_f16", "backward_f16")  # there is no deterministic backward for d = 256
KERNELS = {str(kernel): kernel for what in KINDS for d in ((64, 128, 256) if what in WIDE else (64, 128))
           for causal in (False, True) if not (causal and (what == "decode_merge" or "window" in what))
           if causal or not what.endswith(("softcap", "varlen"))
           if d == 64 or what != "forward_packed"  # what its heuristics choose for our lengths
           for kernel in [Kernel(what, d, causal)]}
# One query sees all keys; causal kernels are for several, which the benchmark asks for without pages.
DECODING = [kernel for kernel in KERNELS.values() if kernel.what.startswith("decode")
            and not (kernel.causal and "paged" in kernel.what)]
WALKS = [kernel for kernel in KERNELS.values() if kernel.what.endswith(("window", "softcap", "varlen"))]
MORE = [kernel for kernel in KERNELS.values() if kernel.what.endswith(("_packed", "groups")) and kernel not in DECODING
        or kernel.what.endswith("f16") and not kernel.causal]
COMPARED = [kernel for kernel in KERNELS.values() if kernel.what in ("forward", "backward", "deterministic")]


# ---------------------------------------------------------------- what is there

def output_of(command: Sequence[str | Path]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit_of(folder: Path, given: str | None, option: str) -> str:
    """What git says of a clone, with -dirty and a digest of the changes; else what was given."""
    if given:
        return given
    top = output_of(["git", "-C", folder, "rev-parse", "--show-toplevel"])
    head = output_of(["git", "-C", folder, "rev-parse", "HEAD"])
    if head is None or top is None or Path(top).resolve() != folder.resolve():  # an archive within another clone
        raise Refused(f"{folder} is no git clone; say which commit it is with {option}")
    changes = output_of(["git", "-C", folder, "diff", "--ignore-submodules", "HEAD"])
    return head + (f"-dirty-{digest(changes)[:8]}" if changes else "")


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def nvcc() -> tuple[str, str]:
    """Its path and version."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    said = output_of([path, "--version"]) if path else None
    if not said:
        raise Refused("no nvcc in PATH or CUDA_HOME/bin")
    found = re.search(r"release (\d+)\.(\d+), V([\d.]+)", said)
    if not found or (int(found[1]), int(found[2])) < OLDEST:
        raise Refused(f"{path} is CUDA {found[3] if found else 'of an unknown version'}; FlashAttention-3 wants "
                      f"{OLDEST[0]}.{OLDEST[1]} or later")
    return path, found[3]


class Checkout:
    def __init__(self, options: argparse.Namespace) -> None:
        root = options.checkout
        self.hopper, cutlass = root / "hopper", root / "csrc" / "cutlass"
        if not (self.hopper / "flash_bwd_launch_template.h").is_file():
            raise Refused(f"{root}: no checkout of FlashAttention with its hopper/")
        self.include = cutlass / "include"
        if not (self.include / "cute" / "tensor.hpp").is_file():
            raise Refused(f"{cutlass} is empty; git -C {root} submodule update --init csrc/cutlass")
        self.commit = commit_of(root, options.commit, "--commit")
        self.cutlass = commit_of(cutlass, options.cutlass_commit, "--cutlass-commit")


# ---------------------------------------------------------------- the build

class Build:
    def __init__(self, checkout: Checkout, out: Path) -> None:
        self.checkout, self.out = checkout, out
        self.nvcc, self.version = nvcc()
        self.includes = ["-I", str(checkout.hopper), "-I", str(checkout.include)]
        self.objects = out / "objects"
        self.objects.mkdir(parents=True, exist_ok=True)
        self.stamp = digest(checkout.commit, checkout.cutlass, self.version, *FLAGS, *LEFT_OUT,
                            (HERE / "kernel.cu").read_text(encoding="utf-8"))

    def object(self, kernel: Kernel) -> Path:
        return self.objects / f"{kernel.file}.o"

    def has(self, kernel: Kernel) -> bool:
        stamp = self.object(kernel).with_suffix(".stamp")
        return self.object(kernel).is_file() and stamp.is_file() and stamp.read_text(encoding="utf-8") == self.stamp

    def run(self, what: str, command: Sequence[str | Path], target: Path) -> None:
        """Writes target whole or not at all; what the compiler says lies beside it."""
        part, log = target.with_name(target.name + ".part"), self.objects / f"{target.stem}.txt"
        with log.open("w", encoding="utf-8") as f:
            done = subprocess.run([*command, "-o", part], stdout=f, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            raise Refused(f"{what}: nvcc failed, see {log}")
        part.replace(target)

    def compile(self, kernel: Kernel) -> str:
        """What to say of it."""
        if self.has(kernel):
            return f"{kernel}: built before, kept"
        begin = time.monotonic()
        stamp = self.object(kernel).with_suffix(".stamp")
        stamp.unlink(missing_ok=True)
        self.run(str(kernel), [self.nvcc, *FLAGS, *LEFT_OUT, *self.includes, *kernel.definitions, "-c",
                               HERE / "kernel.cu"], self.object(kernel))
        stamp.write_text(self.stamp, encoding="utf-8")
        return f"{kernel}: {time.monotonic() - begin:.0f} s"

    def link(self) -> Path:
        """All kernels that are there, whoever asked for them."""
        kernels = [kernel for kernel in KERNELS.values() if self.has(kernel)]
        text = lambda name, value: f'#define {name} "{value}"\n'  # noqa: E731
        built = (text("FA3_COMMIT", self.checkout.commit) + text("FA3_CUTLASS", self.checkout.cutlass)
                 + text("FA3_COMPILER", f"nvcc {self.version}") + text("FA3_FLAGS", shlex.join(FLAGS))
                 + "#define FA3_KERNELS(X) " + " ".join(f"X({kernel.entry})" for kernel in kernels) + "\n")
        (self.objects / "built.hpp").write_text(built, encoding="utf-8")
        interfaces = [self.objects / f"{name}.o" for name in ("fa3", "decode", "packed")]
        flags = ["-std=c++20" if flag == "-std=c++17" else flag for flag in FLAGS]  # as the project's headers
        for interface in interfaces:
            self.run("the interface", [self.nvcc, *flags, "-I", str(ROOT), "-I", str(self.objects), *self.includes,
                                       "-c", HERE / f"{interface.stem}.cu"], interface)
        library = self.out / "libfa3.so"
        self.run("the library", [self.nvcc, "-shared", *interfaces, *map(self.object, kernels)], library)
        return library


def make(options: argparse.Namespace) -> int:
    build = Build(Checkout(options), options.out)
    wanted = options.only or (DECODING if options.decode else WALKS if options.walks else MORE if options.more else COMPARED)
    failed = []

    def attempt(kernel: Kernel) -> None:
        try:
            print(build.compile(kernel), flush=True)
        except Refused as error:
            failed.append(kernel)
            print(f"build.py: {error}", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(attempt, kernel) for kernel in wanted]
        try:
            for future in futures:
                future.result()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    if not any(map(build.has, KERNELS.values())):
        return 1
    print(build.link())
    return 1 if failed else 0


def a_kernel(text: str) -> Kernel:
    if text not in KERNELS:
        raise argparse.ArgumentTypeError(f"'{text}': one of {', '.join(KERNELS)}")
    return KERNELS[text]


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}': a number from 1 on")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="build.py", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a clone of Dao-AILab/flash-attention with csrc/cutlass")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fa3", help="default: build/fa3")
    parser.add_argument("--jobs", type=at_least_one, default=1, help="kernels at a time, 2.5 GB of memory each")
    parser.add_argument("--decode", action="store_true", help="the kernels of decoding, beside those built before")
    parser.add_argument("--walks", action="store_true", help="those of beyond/, beside those built before")
    parser.add_argument("--more", action="store_true", help="fp16 without a mask, and groups of query heads on a key head, "
                        "beside those built before")
    parser.add_argument("--only", type=a_kernel, nargs="+", metavar="forward:128:causal",
                        help="these, beside those built before (causal or none)")
    parser.add_argument("--commit", help="of the checkout, if it is no git clone")
    parser.add_argument("--cutlass-commit", help="of its csrc/cutlass, if that is no git clone")
    options = parser.parse_args(argv)
    try:
        return make(options)
    except Refused as error:
        print(f"build.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"build.py: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("build.py: stopped; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
