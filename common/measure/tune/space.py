"""What a stage's `check/tune.py` says of a kernel: which shapes it could have, and what each of them costs."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
REGISTERS_OF_A_THREAD = 255  # more an instruction cannot name
REGISTERS_OF_AN_SM = 65536


class Bad(Exception):
    """One sentence for people."""


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: int  # 90 for 9.0
    shared_block: int  # bytes that a block may ask for
    shared_sm: int  # bytes that all blocks of an SM share

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.capability // 10}.{self.capability % 10}"


# For --list without a GPU: https://docs.nvidia.com/cuda/cuda-c-programming-guide/, "Technical Specifications".
KNOWN = {
    "a100": Gpu("NVIDIA A100", 80, 163 << 10, 164 << 10),
    "rtx3090": Gpu("NVIDIA RTX 3090", 86, 99 << 10, 100 << 10),
    "rtx4090": Gpu("NVIDIA RTX 4090", 89, 99 << 10, 100 << 10),
    "h100": Gpu("NVIDIA H100", 90, 227 << 10, 228 << 10),
    "h200": Gpu("NVIDIA H200", 90, 227 << 10, 228 << 10),
}


@dataclass
class Candidate:
    name: str
    d: int
    threads: int
    shared: int  # bytes of a block
    registers: int  # of a thread that computes: those of tiles alone, and `Space.besides`
    code: str  # struct Tuned and what else goes before the end of the kernel's namespace
    edits: tuple[tuple[str, str], ...] = ()  # of the kernel's file
    dead: str = ""  # why it need not be compiled
    hand_made: bool = False


@dataclass
class Space:
    kernel: str
    file: str  # relative to the repository
    dtype: str  # that is timed
    types: tuple[str, ...]  # that the product takes
    capability: int
    alone: bool  # runs on that capability only
    d: tuple[int, ...]
    lengths: tuple[int, ...]
    heads_times_d: int  # of a timed problem
    tokens: int  # B N of a timed problem
    launch: str  # C++: template <class T> bool launch_tuned(p, t, call)
    besides: int  # registers beside those of tiles; an estimate, ptxas has the last word
    spills: int = 0  # bytes that may spill

    def unfit(self, gpu: Gpu) -> str:
        if gpu.capability == self.capability or gpu.capability > self.capability and not self.alone:
            return ""
        here, wanted = (f"{c // 10}.{c % 10}" for c in (gpu.capability, self.capability))
        scope = "alone" if self.alone else "and later"
        return f"{self.kernel} is for compute capability {wanted} {scope}, this is {here}"

    def candidates(self, gpu: Gpu) -> list[Candidate]:
        raise NotImplementedError

    def hand_made(self, d: int, mask: str, n: int) -> str:
        """The name of the shape that the code takes."""
        raise NotImplementedError

    def source(self, c: Candidate, types: tuple[str, ...]) -> str:
        """The kernel's file down to the end of its own namespace, with the shape and a C function behind it."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        for old, new in c.edits:
            text = replaced(text, old, new, self.file)
        end = "\n}  // namespace\n"
        if end not in text:
            raise Bad(f"{self.file} has no '{end.strip()}'")
        outer = re.search(r"^namespace (fa::\w+) \{$", text, re.M)
        if not outer:
            raise Bad(f"{self.file} has no namespace of a stage")
        cases = "".join(
            f"      case TunedCall::{t}:\n"
            f"        return launch_tuned(*c->problem, *static_cast<const Forward<{CPP[t]}>*>(c->tensors), *c);\n"
            for t in types
        )
        return f"""{text[:text.rindex(end)]}
{c.code}
{self.launch}
{end}
}}  // namespace {outer[1]}

extern "C" __attribute__((visibility("default"))) const char* fa_tuned_sources() {{ return "{sources(self.file)}"; }}
extern "C" __attribute__((visibility("default"))) int fa_tuned_launch(const fa::TunedCall* c, const char** error) {{
  using namespace {outer[1]};
  using fa::Forward, fa::TunedCall;
  static thread_local std::string text;
  try {{
    switch (c->type) {{
{cases}      default:
        return 0;
    }}
  }} catch (const std::exception& e) {{
    text = e.what();
    *error = text.c_str();
    return -1;
  }}
}}
"""


CPP = {"fp32": "float", "fp16": "__half", "bf16": "__nv_bfloat16"}


def replaced(text: str, old: str, new: str, where: str) -> str:
    if text.count(old) != 1:
        raise Bad(f"'{old}' is {text.count(old)} times in {where} instead of once")
    return text.replace(old, new)


def files_of(file: str) -> list[str]:
    """The file and what it includes of the course, for a GPU: what an emulator has for the CPU is left out."""
    found: list[str] = []

    def add(name: str) -> None:
        if name in found or not (ROOT / name).is_file():
            return
        found.append(name)
        for other in re.findall(r'^\s*#\s*include "([^"]+)"', (ROOT / name).read_text(encoding="utf-8"), re.M):
            if "/on_cpu/" not in other and not other.startswith("common/emulator/"):
                add(other)

    add(file)
    return found


def sources(file: str) -> str:
    """A name for the kernel's sources as they are: another one whenever a byte of them changes."""
    hashed = hashlib.sha256()
    for name in sorted({*files_of(file), "common/core/tuned.hpp"}):
        hashed.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return hashed.hexdigest()[:16]


@dataclass
class Count:
    """Adds up why candidates are dead, for the last lines of a list."""

    by: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str) -> None:
        kind = re.sub(r"\d[\d.]*", "n", reason)
        self.by[kind] = self.by.get(kind, 0) + 1
