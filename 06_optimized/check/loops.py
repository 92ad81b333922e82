"""Counts the instructions of each loop over tiles, as compiled: what the pages call "the loop", or "the unmasked loop".

    loops.py BUILD            writes results/loops.txt from the kernels of a build folder; needs cuobjdump, of the CUDA toolkit
    loops.py BUILD --print    to the screen

Such a loop multiplies and takes exponentials. A wait that is tried again elsewhere and jumps back into it makes a longer
one of it, so of those that overlap the shortest counts. The shortest comes first: of a kernel with a loop for masked tiles
and one without a mask, the latter. Of both 16-bit types bf16 is counted.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "common" / "cmake"))
from ptxas import demangled, short_name  # noqa: E402  # the path above comes first

INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?\S+\s+)?(.*?)\s*;")
JUMP = re.compile(r"BRA\b.*?\b0x([0-9a-f]+)$")
COUNTED = {"products": ("HGMMA", "HMMA"), "exponentials": ("MUFU.EX2",), "maxima": ("FMNMX",), "barriers": ("BAR",)}
FEWEST = 16  # exponentials; a loop over tiles of queries, around those over keys, has some, too


@dataclass
class Loop:
    instructions: int
    counts: dict[str, int]


def loops(code: Sequence[tuple[int, str]]) -> list[Loop]:
    """Of one kernel: (address, instruction) in their order."""
    index = {address: i for i, (address, _) in enumerate(code)}
    found: list[tuple[int, int]] = []
    for i, (address, text) in enumerate(code):
        if (jump := JUMP.match(text)) and int(jump[1], 16) < address and int(jump[1], 16) in index:
            begin = index[int(jump[1], 16)]
            body = [text for _, text in code[begin:i]]
            if any(text.startswith(COUNTED["products"]) for text in body) and sum(
                    text.startswith(COUNTED["exponentials"]) for text in body) >= FEWEST:
                found.append((begin, i))
    kept: list[tuple[int, int]] = []
    for a, b in sorted(found, key=lambda one: one[1] - one[0]):
        if all(b < c or d < a for c, d in kept):
            kept.append((a, b))
    return [Loop(b + 1 - a, {what: sum(text.startswith(names) for _, text in code[a:b + 1])
                             for what, names in COUNTED.items()}) for a, b in kept]


def kernels(sass: str) -> Iterator[tuple[str, str, list[tuple[int, str]]]]:
    """From what `cuobjdump -sass` prints: mangled name, architecture, code."""
    name, architecture, following, code = "", "", "", []
    for line in sass.splitlines():
        if match := re.match(r"\s*arch = (\S+)", line):
            following = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            if name:
                yield name, architecture, code
            name, architecture, code = match[1], following, []
        elif match := INSTRUCTION.match(line):
            code.append((int(match[1], 16), match[2]))
    if name:
        yield name, architecture, code


def table(objects: Sequence[Path], dump: str) -> list[str]:
    lines = []
    for path in objects:
        said = subprocess.run([dump, "-sass", str(path)], capture_output=True, text=True, check=True).stdout
        found = [(n, a, loops(code)) for n, a, code in kernels(said) if "__half" not in n]
        names = demangled([n for n, _, _ in found], "nvcc")
        for (_, architecture, all_loops), name in sorted(zip(found, names), key=lambda one: one[1]):
            for loop in all_loops:
                lines.append(f"{'/'.join(path.parts[-2:]).removesuffix('.o')} {short_name(name).replace(' ', '')} "
                             f"{architecture} {loop.instructions} " + " ".join(str(n) for n in loop.counts.values()))
    return numbered(lines)


def numbered(lines: Sequence[str]) -> list[str]:
    """FILE KERNEL becomes FILE KERNEL 1, FILE KERNEL 2 of its loops."""
    seen: dict[str, int] = {}
    done = []
    for line in lines:
        file, kernel, rest = line.split(" ", 2)
        seen[f"{file} {kernel}"] = number = seen.get(f"{file} {kernel}", 0) + 1
        done.append(f"{file} {kernel} {number} {rest}")
    return done


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loops.py", description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, help="the build folder")
    parser.add_argument("--print", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    dump = shutil.which("cuobjdump") or "/usr/local/cuda/bin/cuobjdump"
    if not Path(dump).is_file():
        print("loops.py: cuobjdump, of the CUDA toolkit, is not there", file=sys.stderr)
        return 1
    kernels_of = options.build / "06_optimized" / "CMakeFiles"
    objects = sorted([*kernels_of.glob("stage06_*.dir/*ward/*.cu.o"), *kernels_of.glob("stage06_*.dir/beyond/*/*.cu.o")],
                     key=lambda path: [(len(part), part) for part in re.split(r"(\d+)", "/".join(path.parts[-2:]))])
    if not objects:
        print(f"loops.py: {options.build} has no kernel of 06 that nvcc has compiled", file=sys.stderr)
        return 1
    head = "file kernel loop architecture instructions " + " ".join(COUNTED)
    text = "\n".join([head, *table(objects, dump)]) + "\n"
    if options.print:
        print(text, end="")
    else:
        (HERE.parent / "results" / "loops.txt").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
