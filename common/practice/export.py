#!/usr/bin/env python3
"""`./learn export`: a kernel of 04, 05 or 06 as one file that nvcc compiles alone, with a check of its results.

The file is what the preprocessor would read, of the course's own files, each once, in the order of their includes; the
standard library's and CUDA's are named at its top. Comments stay, and so do all other conditions: only what the emulator
has for the CPU is left out. What a launch needs of a file beside the kernel's own is in a stage's `check/exported_*.hpp`.
"""
from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "common/judge"))
from source import Parser, run, write_whole  # noqa: E402

DONE_BY = "// Exported by ./learn export"
# Launches of other files, and what brings them; the same file brings launch_after.
BROUGHT = {
    "launch_fast_atomic": "05_cuda_backward/check/exported_fast.hpp",
    "launch_before": "06_optimized/check/exported_around.hpp",
    "launch_wide_dkv": "06_optimized/backward/3_two_kernels_wide.cu",
    "launch_wgmma_dq": "06_optimized/backward/3_two_kernels_queries.cu",
    "launch_swizzle_dkv": "06_optimized/backward/2_swizzle_keys.cu",
}
SILENT = """// A conversion of a view of constants to itself, which nobody calls; constants that only other kernels use.
#pragma nv_diag_suppress 554, 177"""
DIRECTIVE = re.compile(r"\s*#\s*(ifdef|ifndef|if|elif|else|endif|include|pragma once)\b\s*(.*?)\s*(?://.*)?$")


@dataclass
class Open:
    """A condition whose #endif has not come."""
    kept: bool      # what follows, down to the next #elif, #else or #endif
    decided: bool   # a part was kept for certain: no other is
    stays: bool     # the compiler decides, so the directives stay


def known(word: str, condition: str, emulated: bool) -> bool | str:
    """Is this so, by what is known of FA_EMULATED? If that does not decide it: what is left to be asked."""
    if condition == "FA_EMULATED":
        return emulated == (word == "ifdef")
    mark, decisive = (" && ", False) if " && " in condition else (" || ", True)
    facts, rest = [], []
    for part in condition.split(mark):
        if part.endswith("defined(FA_EMULATED)"):
            facts.append(emulated != part.startswith("!"))
        else:
            rest.append(part)
    if decisive in facts or not rest:
        return decisive if decisive in facts else not decisive
    return mark.join(rest)


class Pieces:
    """The course's files one after the other, each once; `system` are the other headers that they name."""

    def __init__(self, emulated: bool) -> None:
        self.emulated = emulated
        self.system: set[str] = set()
        self.files: list[str] = []

    def add(self, name: str) -> str:
        """The file's text; the files that it includes come before it, but what it includes into a namespace."""
        if name in self.files:
            return ""
        self.files.append(name)
        before: list[str] = []
        own: list[str] = []
        opened: list[Open] = []
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
            match = DIRECTIVE.match(line)
            word, rest = match.groups() if match else ("", "")
            if word in ("if", "ifdef", "ifndef"):
                opened.append(Open(False, False, False))
            outside = all(one.kept for one in opened[:-1])
            if word in ("if", "ifdef", "ifndef", "elif", "else"):
                here = opened[-1]
                if here.decided:
                    here.kept = False
                    continue
                says = known(word, rest, self.emulated) if rest else True
                here.kept, here.decided = says is not False, says is True
                if outside and isinstance(says, str):
                    own.append(f"#{word if here.stays or word != 'elif' else 'if'} {says}")
                elif outside and here.stays and here.kept:
                    own.append("#else")
                here.stays |= isinstance(says, str)
            elif word == "endif":
                if opened.pop().stays and outside:
                    own.append(line)
            elif word == "pragma once" or not all(one.kept for one in opened):
                continue
            elif word == "include" and rest.startswith("<") and not any(one.stays for one in opened):
                self.system.add(rest)
            elif word == "include" and rest.startswith('"'):
                text = self.add(rest.strip('"'))
                (own if any(part.startswith("namespace") for part in own) else before).append(text)
            else:
                own.append(line)
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(own)).strip("\n")
        return "".join(part + "\n" for part in before if part) + f"// ======== {name} ========\n\n{text}\n"


# Of wgmma and TMA, which later GPUs do not have either; with -arch=sm_90a nvcc 13.0 also asks for PTX of compute_90.
TARGETS = {80: "-arch=sm_80", 90: "-gencode=arch=compute_90a,code=sm_90a"}


@dataclass
class Export:
    text: str
    capability: int   # 80: and later; 90: alone

    def command(self, name: str) -> str:
        return f"nvcc -std=c++20 -O3 {TARGETS[self.capability]} -o {name} {name}.cu"


def name_of(file: str) -> str:
    """06_optimized/forward/fa2.cu is 06_forward_fa2."""
    stage, _, kernel = file.partition("/")
    return f"{stage[:2]}_{kernel.removesuffix('.cu').replace('/', '_')}"


def export(file: str, launches: list[str], emulated: bool = False) -> Export:
    """Of a kernel's file and its launches; for the emulator instead of CUDA, which tests want."""
    stage, _, kernel = file.partition("/")
    source = (ROOT / file).read_text(encoding="utf-8")
    pass_ = f"_{kernel.split('/')[0]}" if stage[:2] == "06" else ""
    pieces = Pieces(emulated)
    others = [other for launch, other in BROUGHT.items()
              if re.search(rf"\b{launch}\b", source) and launch.removeprefix("launch_") not in launches]
    text = "\n".join(filter(None, map(pieces.add, [*others, file, f"{stage}/check/exported{pass_}.hpp"])))
    made = Export("", 90 if "06_optimized/ptx/tma.cuh" in pieces.files else 80)
    typed = "<Element>" if pass_ else ""
    calls = "\n".join(f'    right &= check("{launch}", p, launch_{launch}{typed});' for launch in launches)
    includes = "\n".join(f"#include {header}" for header in sorted(pieces.system))
    made.text = f"""{DONE_BY} {stage[:2]} {kernel.removesuffix(".cu")}: {file} and what it needs of the course.
//
//   {made.command(name_of(file))}
//   ./{name_of(file)} [N]
//
// Computes attention of random numbers, four heads of queries on two of keys, N = 512 unless another is given, without
// a mask and with a causal one, and compares with fp64 on the CPU. Prints the time of a launch, the median of eleven,
// and of each result how far it is off, beside what is allowed. Exit code: 0 if all is right, 1 if
// something is not, 3 if this needs another GPU.
//
// SPDX-License-Identifier: MIT. Copyright (c) 2026 The authors of FlashAttention from scratch
{includes}

{SILENT}

{text}
int main(int argc, char** argv) {{
  using namespace {re.findall(r"namespace (fa::[a-z_]+)", source)[0]};
  return fa::exported::run(argc, argv, {made.capability}, exported_d, [](const fa::Problem& p) {{
    bool right = true;
{calls}
    return right;
  }});
}}
"""
    return made


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("file", help="of the kernel, as 06_optimized/forward/fa2.cu")
    parser.add_argument("launches", nargs="+", help="that it has, without `launch_`")
    parser.add_argument("-o", dest="to", type=Path, metavar="FILE", help="where to write")
    args = parser.parse_args()
    to = args.to or Path("build/export") / f"{name_of(args.file)}.cu"
    if to.exists() and not to.read_text(encoding="utf-8", errors="replace").startswith(DONE_BY):
        print(f"export: {to} stays as it is, since no export wrote it; choose another file with -o", file=sys.stderr)
        return 2
    made = export(args.file, args.launches)
    write_whole(to, made.text)
    print(f"wrote {to}; it compiles alone:")
    print(made.command(str(to.with_suffix(""))) if to.suffix == ".cu" else made.command("kernel"))
    return 0


if __name__ == "__main__":
    run(main)
