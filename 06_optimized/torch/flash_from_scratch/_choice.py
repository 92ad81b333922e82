"""Which kernel a name means: a stage, a rung, "best", or the reader's own."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple, Optional

import torch

from ._library import Cannot, Kernel, Library, library
from ._mine import library_of_mine

TYPES = {torch.float32: "float", torch.float64: "double", torch.float16: "half", torch.bfloat16: "bfloat16"}
# What a stage's number alone stands for, and names from the files of rungs.
FORWARD = {"00": "00.naive", "01": "01.safe_softmax", "02": "02.rows", "03": "03.tiled", "04": "04.best",
           "06": "06.best"}
BACKWARD = {"00": ["00.naive"], "05": ["05.on_cpu", "05.two_kernels"], "06": ["06.backward_best"]}
THERE_ARE = "there are best, mine, 00 to 06, and those that flash_from_scratch.kernels() lists"
# Which walk of 06_optimized/beyond has what its kernels have not; it goes both ways.
WALKS = {"window": "beyond.masks", "dropout": "beyond.dropout"}
ALSO = {"06.pingpong": "06.lock", "02.online_softmax": "02.rows", "03.tiled_cpu": "03.tiled"}


class Choice(NamedTuple):
    """A kernel for each way, and the library that holds it."""

    forward: Kernel
    forward_library: Library
    backward: Kernel
    backward_library: Library

    def largest_d(self, dtype: torch.dtype) -> int:
        in_cuda = 256 if dtype in (torch.float16, torch.bfloat16) else 128
        return min(512 if one.stage <= 3 or one.name == "05.on_cpu" else in_cuda
                   for one in (self.forward, self.backward))


def kernels() -> list[str]:
    """The names that `kernel=` takes, beside "best", a stage's number and "mine"."""
    return list(dict.fromkeys(one.name for one in library().kernels if one.way != "decode"))


@functools.lru_cache(maxsize=None)
def choose(wanted: str, dtype: torch.dtype, device: str, walks: tuple[str, ...] = ()) -> Choice:
    """The kernels that a name means for tensors of this type and place. Raises Cannot, in one sentence."""
    if dtype not in TYPES:
        raise Cannot(f"flash_from_scratch takes float16, bfloat16, float32 and float64, got {str(dtype)[6:]}")
    if device not in ("cpu", "cuda") or (device == "cuda" and torch.version.hip):
        raise Cannot(f"flash_from_scratch runs on the CPU and on NVIDIA's GPUs, got tensors on '{device}'")
    main, forward, backward = library(), None, None
    names = [name.strip() for name in wanted.split(",")]
    walks = walks or tuple(walk for walk, full in WALKS.items() if full in names)
    if walks:
        return _of_walk(walks, names, TYPES[dtype], device, main)
    for name in names:
        way, kernel, where = _named(name, TYPES[dtype], device)
        if way != "backward":
            if forward:
                raise ValueError(f"kernel names two forwards, {forward[0].name} and {name}")
            forward = kernel, where
        elif backward:
            raise ValueError(f"kernel names two backwards, {backward[0].name} and {name}")
        else:
            backward = kernel, where
    if not forward:
        forward = _partner("forward", backward, TYPES[dtype], device, main)
    if not backward:
        backward = _partner("backward", forward, TYPES[dtype], device, main)
    elif backward[0].stage != 0 and forward[0].stage == 0:
        raise Cannot(f"00.naive gives no log-sum-exp, and {backward[0].name} needs one; "
                     "00.naive has a backward of its own")
    return Choice(*forward, *backward)


def why_not(wanted: str, dtype: torch.dtype, device: str, walks: tuple[str, ...], scale_sign: int) -> tuple[str, int]:
    """A sentence or "", and the largest d. What depends on sizes alone is left to the caller.

    A refusal is not kept: a file of the reader's may compile the next time."""
    try:
        choice = choose(wanted, dtype, device, walks)
    except Cannot as error:
        return str(error), 0
    if choice.forward.stage == 6 and dtype != torch.float32 and scale_sign <= 0:
        return f"{choice.forward.name} takes the maximum before scaling and wants scale > 0", 0
    return "", choice.largest_d(dtype)


def decoder(dtype: torch.dtype, device: str) -> Kernel:
    """The walk that writes a token at a time. Raises Cannot, in one sentence."""
    if dtype not in TYPES:
        raise Cannot(f"beyond.decode takes float16, bfloat16 and float32, got {str(dtype)[6:]}")
    return _fits("decode", "beyond.decode", TYPES[dtype], device, library())


def _of_walk(walks: tuple[str, ...], names: list[str], dtype: str, device: str, main: Library) -> Choice:
    if len(walks) > 1:
        raise Cannot(f"no kernel has both {walks[0]}= and {walks[1]}=")
    full = WALKS[walks[0]]
    for name in names:
        if name in (full, "06", "06_optimized"):
            continue
        if "mine" not in name and name not in WALKS.values():  # mine would be built
            _named(name, dtype, device)  # what is wrong with the name itself is said first
        if name != "best":
            raise Cannot(f"{name} has no {walks[0]}=; best and 06 have, by {full}")
        if device == "cpu":
            raise Cannot(f"no kernel for the CPU has {walks[0]}=" + (
                "; kernel='06' has, on the emulator" if _find("forward", full, dtype, device, main.kernels) else ""))
    return Choice(*(both for way in ("forward", "backward") for both in (_fits(way, full, dtype, device, main), main)))


def _named(name: str, dtype: str, device: str) -> tuple[str, Kernel, Library]:
    main = library()
    if name == "best":
        return "forward", _best("forward", dtype, device, main), main
    if name == "mine" or name.endswith(".mine"):
        where, (way, own) = library_of_mine(main.source, name[:-4].rstrip("."), device)
        return way, _fits(way, own, dtype, device, where), where
    parts = re.fullmatch(r"(0\d)(?:_\w+)?(?:\.(?:\d+_)?(\w+))?", name)
    if not parts or parts[1] not in {**FORWARD, **BACKWARD}:
        raise ValueError(f"no kernel is called '{name}'; {THERE_ARE}")
    stage, rung = parts.groups()
    if rung:
        full = ALSO.get(f"{stage}.{rung}", f"{stage}.{rung}")
        backwards = any(one.name == full and one.way == "backward" for one in main.kernels)
        way = "backward" if backwards and stage != "00" else "forward"
        return way, _fits(way, full, dtype, device, main), main
    if stage in FORWARD:
        return "forward", _fits("forward", FORWARD[stage], dtype, device, main), main
    for full in BACKWARD.get(stage, ()):
        if found := _find("backward", full, dtype, device, main.kernels):
            return "backward", found, main
    return "backward", _fits("backward", BACKWARD["05"][device == "cuda"], dtype, device, main), main


def _partner(way: str, given: tuple[Kernel, Library], dtype: str, device: str, main: Library) -> tuple[Kernel, Library]:
    """The other way's kernel that goes with a given one: of the same kind, and of the same library if it has one."""
    kernel = given[0]
    if way == "backward":
        name = {0: "00.naive", 4: "05.two_kernels", 6: "06.backward_best"}.get(kernel.stage, "05.on_cpu")
    elif kernel.name == "05.on_cpu":
        name = "03.fast" if dtype == "float" else "03.tiled"
    else:
        name = {0: "00.naive", 5: "04.best", 6: "06.best"}[kernel.stage]
    for where in (given[1], main):
        if found := _find(way, name, dtype, device, where.kernels):
            return found, where
    return _fits(way, name, dtype, device, main), main


def _find(way: str, name: str, dtype: str, device: str, among: list[Kernel]) -> Optional[Kernel]:
    return next((one for one in among
                 if (one.way, one.name, one.device) == (way, name, device) and dtype in one.types), None)


def _fits(way: str, name: str, dtype: str, device: str, where: Library) -> Kernel:
    if found := _find(way, name, dtype, device, where.kernels):
        return found
    named = [one for one in where.kernels if (one.way, one.name) == (way, name)]
    if not named:
        if name[:2] in ("04", "05", "06") and not any(one.device == "cuda" for one in where.kernels):
            raise Cannot(f"{name} is a kernel for GPUs, and this library was built without nvcc")
        raise ValueError(f"no kernel is called '{name}'; {THERE_ARE}")
    if not any(one.device == device for one in named):
        places = {"cpu": "the CPU", "cuda": "a GPU"}
        raise Cannot(f"{name} runs on {places[named[0].device]}, and the tensors are on {places[device]}")
    raise Cannot(f"{name} takes {' and '.join(sorted(named[0].types))}, got {dtype}")


def _best(way: str, dtype: str, device: str, where: Library) -> Kernel:
    if device == "cpu":
        order = ["03.fast", "03.tiled"] if way == "forward" else ["05.on_cpu"]
    else:
        order = ["04.best", "06.best"] if way == "forward" else ["05.two_kernels", "06.backward_best"]
    for name in order:
        if found := _find(way, name, dtype, device, where.kernels):
            return found
    if device == "cuda" and not any(one.device == "cuda" for one in where.kernels):
        raise Cannot("this library was built without nvcc, so it has no kernels for tensors on a GPU")
    if device == "cuda":
        raise Cannot(f"no kernel takes {dtype} on a GPU; float16, bfloat16 and float32 run there")
    emulated = any(one.stage == 6 for one in where.kernels if one.device == "cpu")
    raise Cannot(f"no kernel takes {dtype} on the CPU; float32 and float64 run there" +
                 (", and kernel='06' on the emulator" if emulated else ""))
