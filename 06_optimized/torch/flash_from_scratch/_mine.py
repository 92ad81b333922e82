"""The reader's own kernel: NN_*/mine of the course, compiled when it is first asked for."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from ._library import NAMES, Cannot, Library

# Which kernel a file is, where its name does not say so. Of all others a number in front goes.
KERNELS = {
    "naive": ("forward", "00.naive"), "naive_backward": ("backward", "00.naive"),
    "online_softmax": ("forward", "02.rows"),
    "tiled_cpu": ("forward", "03.tiled"), "tiled_backward": ("backward", "05.on_cpu"), "dq": ("backward", "05.lesson"),
    "dkv": ("backward", "05.lesson"), "10_pingpong": ("forward", "06.lock"),
}
NOT_YET = "there is nothing in {}; it begins with ./learn practice {}"


def _stage_of(course: Path, wanted: str) -> tuple[Path, Path]:
    """The folder mine/ of a stage, and its file that was saved last; without a stage, the same of all of them."""
    files = [(file.stat().st_mtime, file) for mine in sorted(course.glob(f"{wanted[:2] or '0?'}_*/mine"))
             for file in mine.rglob("*") if file.suffix in (".cpp", ".cu")
             and file.relative_to(mine).parts[0] not in ("beyond", "ring")]  # walks, and several GPUs
    if not files:
        raise Cannot(NOT_YET.format(f"{wanted[:2] or 'NN'}_*/mine of {course}", wanted[:2] or "NN"))
    last = max(files)[1]
    return next(folder for folder in last.parents if folder.name == "mine"), last


def kernel_of(file: Path, mine: Path) -> tuple[str, str]:
    """The way and the name of the kernel in a file of mine/."""
    if file.stem in KERNELS:
        return KERNELS[file.stem]
    stage, rung = mine.parent.name[:2], re.sub(r"^\d+_", "", file.stem)
    backward = file.parent.name == "backward"
    return ("backward" if backward else "forward"), f"{stage}.{'backward_' if backward else ''}{rung}"


@functools.lru_cache(maxsize=None)
def library_of_mine(course: Path, wanted: str, device: str) -> tuple[Library, tuple[str, str]]:
    """A library of that stage alone, with the reader's files in their places, and which kernel the last one is.

    For tensors on the CPU a kernel of CUDA is built for the emulator."""
    if not (course / "learn").is_file():
        raise Cannot(f"mine is built from the course, which is no longer in {course}")
    mine, file = _stage_of(course, wanted)
    stage = mine.parent.name[:2]
    folder = course / "build" / f"torch_mine_{stage}_{device}"
    print(f"flash_from_scratch: building {file.relative_to(course)}", flush=True)
    configure = ["cmake", "-S", str(course), "-B", str(folder), f"-DFA_TORCH_MINE={stage}",
                 f"-DFA_CUDA={'ON' if device == 'cuda' else 'OFF'}", "-DCMAKE_BUILD_TYPE=Release",
                 "-DBUILD_TESTING=OFF", "-DFA_BENCHMARKS=OFF", "-DFA_MUTANTS=OFF"]
    if shutil.which("ninja") and not (folder / "CMakeCache.txt").exists():
        configure += ["-G", "Ninja"]
    make = ["cmake", "--build", str(folder), "--target", "stage06_torch", "-j", str(os.cpu_count() or 2)]
    for command in (configure, make):
        try:
            made = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise Cannot("mine is built with cmake, which was not found") from None
        if made.returncode:
            words = [line for line in (made.stdout + made.stderr).splitlines() if "error" in line.lower()]
            why = words[0].strip() if words else made.stderr.strip()[-300:]
            raise Cannot(f"{file.relative_to(course)} does not compile: {why}")
    built = next(folder / "06_optimized" / "torch" / name for name in NAMES
                 if (folder / "06_optimized" / "torch" / name).exists())
    # Loaded under a name of its own: a process keeps what it has loaded, and must not be changed under its feet.
    own = built.with_name(f"{hashlib.sha256(built.read_bytes()).hexdigest()[:16]}{built.suffix}")
    if not own.exists():
        shutil.copy2(built, own)
    return Library(own), kernel_of(file, mine)
