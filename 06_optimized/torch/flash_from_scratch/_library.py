"""The compiled kernels, libfa_torch: where it is, what it holds, how a call is laid out (library.hpp)."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Optional

ENVIRONMENT = "FLASH_FROM_SCRATCH_LIBRARY"
NAMES = ("libfa_torch.so", "libfa_torch.dylib")

# fa_torch_call. The first part depends on shapes, strides and choices alone, and is kept; the second is this call's.
PREFIX = struct.Struct("=7qd7qdq24q")
POINTERS = struct.Struct("=q13Q")
DECODE = struct.Struct("=9q3Q")  # what fa_torch_decode_call has behind both


class Cannot(ValueError):
    """What these kernels do not take, in one sentence. PyTorch's own attention may."""


class Kernel(NamedTuple):
    way: str  # forward, backward or decode
    name: str  # 06.fa2
    stage: int
    number: int
    device: str  # cpu or cuda
    types: frozenset[str]  # float, double, half, bfloat16


class Library:
    """One libfa_torch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._c = ctypes.CDLL(str(path))
        except OSError as error:
            raise OSError(f"{path} cannot be loaded: {error}") from None
        if not hasattr(self._c, "fa_torch_call_bytes"):
            raise OSError(f"{path} is not a libfa_torch of this course")
        sizes = [getattr(self._c, f"fa_torch_{name}_bytes", None) for name in ("call", "decode_call")]
        call = PREFIX.size + POINTERS.size
        if not all(sizes) or [size() for size in sizes] != [call, call + DECODE.size]:
            raise OSError(f"{path} is of another version than this package; build both from one checkout")
        for name in ("kernels", "source", "mine", "error"):
            getattr(self._c, f"fa_torch_{name}").restype = ctypes.c_char_p
        self.source = Path(self._text("source"))
        self.mine = self._text("mine")
        self.kernels = [_kernel(line) for line in self._text("kernels").splitlines()]
        self.forward, self.forward_needs = self._run("forward"), self._needs("forward")
        self.backward, self.backward_needs = self._run("backward"), self._needs("backward")
        self.decode, self.decode_needs = self._run("decode"), self._needs("decode")

    def raise_error(self, code: int) -> None:
        words = self._text("error")
        raise Cannot(words) if code == 1 else RuntimeError(words)

    def _text(self, name: str) -> str:
        return getattr(self._c, f"fa_torch_{name}")().decode()

    def _run(self, name: str) -> Callable[[bytes], int]:
        run = getattr(self._c, f"fa_torch_{name}")
        run.argtypes, run.restype = [ctypes.c_char_p], ctypes.c_int
        return run

    def _needs(self, name: str) -> Callable[[bytes], int]:
        needs = getattr(self._c, f"fa_torch_{name}_needs")
        needs.argtypes, needs.restype = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64)], ctypes.c_int

        def scratch(call: bytes) -> int:
            size = ctypes.c_int64()
            if code := needs(call, ctypes.byref(size)):
                self.raise_error(code)
            return size.value

        return scratch


def _kernel(line: str) -> Kernel:
    way, name, stage, number, device, types = line.split()
    return Kernel(way, name, int(stage), int(number), device, frozenset(types.split(",")))


def _found() -> Optional[Path]:
    here = Path(__file__).resolve().parent
    places = [here]
    if len(here.parents) > 3:  # a checkout that CMake has built
        build = here.parents[2] / "build"
        places += [build / folder / "06_optimized" / "torch" for folder in (".", "torch/lib")]  # the latter by install.py
    return next((place / name for place in places for name in NAMES if (place / name).is_file()), None)


@functools.lru_cache(maxsize=None)
def library() -> Library:
    """That of $FLASH_FROM_SCRATCH_LIBRARY, else the one that was installed, else that of the checkout's build."""
    given = os.environ.get(ENVIRONMENT)
    path = Path(given) if given else _found()
    if path is None or not path.is_file():
        raise OSError(f"{path or NAMES[0]} is not there: pip install ./06_optimized/torch brings it, "
                      f"or cmake --build build --target stage06_torch; {ENVIRONMENT} names another place")
    return Library(path)
