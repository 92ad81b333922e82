"""Watches what ptxas says about kernels while they are compiled.

    ptxas.py compile --spills=error -- nvcc ... -c kernel.cu -o kernel.o    a CUDA_COMPILER_LAUNCHER
    ptxas.py compile --device-code-alone ...                                and the object is empty: in a third of the time
    ptxas.py collect TABLE.json OBJECT...                                   one table of a whole build
    ptxas.py check TABLE.json OBJECT...                                     has the table the kernels of this build?

Beside each object it writes OBJECT.ptxas.json: registers, shared memory, stack and spills of each kernel. Two things
are silent otherwise and cost a kernel much of its speed, so they end the build: registers spilled to memory (for
kernels that are meant to be without; for others a warning), and what ptxas reports by messages C7500 to C7599: wgmma
instructions that it makes wait for each other, a setmaxnreg that it ignores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LOSS = re.compile(r"\bC75\d\d\b|wgmma\.mma_async instructions are serialized")
ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
FUNCTION = re.compile(r"Function properties for (\S+)")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
NOTE = re.compile(r"ptxas info\b|\s+\d+ bytes stack frame")  # what -v adds to the output


@dataclass
class Kernel:
    name: str
    architecture: str
    registers: int = 0  # 0: a function that kernels call, not a kernel
    shared_bytes: int = 0  # known when compiled; what a launch asks for comes on top
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    barriers: int = 0

    @property
    def spills(self) -> bool:
        return self.spill_store_bytes + self.spill_load_bytes > 0


def parse(text: str) -> list[Kernel]:
    """Kernels, and functions that were not inlined, by their mangled names."""
    found: dict[tuple[str, str], Kernel] = {}
    architecture = ""
    entry = here = Kernel("", "")
    for line in text.splitlines():
        if match := ENTRY.search(line):
            architecture = match[2]
            entry = here = found.setdefault((match[1], architecture), Kernel(match[1], architecture))
        elif match := FUNCTION.search(line):
            here = found.setdefault((match[1], architecture), Kernel(match[1], architecture))
        elif match := STACK.search(line):
            here.stack_bytes, here.spill_store_bytes, here.spill_load_bytes = map(int, match.groups())
        elif match := re.search(r"Used (\d+) registers", line):
            entry.registers = int(match[1])
            for field, pattern in (("barriers", r"used (\d+) barriers"), ("shared_bytes", r"(\d+) bytes smem")):
                if number := re.search(pattern, line):
                    setattr(entry, field, int(number[1]))
    return list(found.values())


def demangled(names: Sequence[str], compiler: str) -> list[str]:
    for tool in (shutil.which("cu++filt", path=str(Path(shutil.which(compiler) or compiler).parent)),
                 shutil.which("cu++filt"), shutil.which("c++filt")):
        if tool and names:
            done = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=False)
            lines = done.stdout.splitlines()
            if done.returncode == 0 and len(lines) == len(names):
                return lines
    return list(names)


def short_name(name: str) -> str:
    """'void fa::(anonymous namespace)::kernel<(int)128, fa::Tile>(float*)' without all but 'kernel<128, Tile>'."""
    name = re.sub(r"\((int|bool|unsigned int|long)\)(?=[\d-])", "", name)
    name = re.sub(r"\(anonymous namespace\)::|<unnamed>::|_INTERNAL_\w+::", "", name)
    name = re.sub(r"\b(?:\w+::)+", "", name)
    depth = 0
    begin = 0
    for i, c in enumerate(name):
        depth += (c == "<") - (c == ">")
        if depth == 0 and c == " ":
            begin = i + 1  # after the type of the result
        elif depth == 0 and c == "(":
            return name[begin:i]
    return name[begin:]


def write_whole(path: Path, data: object) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        sys.exit(f"ptxas.py: {path}: cannot be written: {error.strerror}")


def after(command: Sequence[str], flag: str) -> str:
    return command[command.index(flag) + 1] if flag in command[:-1] else ""


def compile_watched(command: Sequence[str], spills: str, device_code_alone: bool) -> int:
    source, output = after(command, "-c"), after(command, "-o")
    if device_code_alone:
        command = ["-cubin" if word == "-c" else f"{output}.cubin" if word == output else word for word in command]
    # One stream, so that what ptxas and the compiler say stays in order.
    done = subprocess.run([*command, "-Xptxas", "-v"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", check=False)
    kernels = parse(done.stdout)
    for kernel, name in zip(kernels, demangled([k.name for k in kernels], command[0])):
        kernel.name = short_name(name)
    source = "/".join(Path(source).parts[-2:])
    faults: list[str] = []
    for line in (line.strip() for line in done.stdout.splitlines() if LOSS.search(line)):
        what = "makes wgmma instructions wait for each other" if "serialized" in line else "takes a kernel's speed"
        faults.append(f"{source}: ptxas {what}; in its words: {line}")
    warnings: list[str] = []
    for kernel in (k for k in kernels if k.spills and spills != "allowed"):
        (faults if spills == "error" else warnings).append(
            f"{source}: {kernel.name} for {kernel.architecture} spills registers to memory: "
            f"{kernel.spill_store_bytes} bytes stored, {kernel.spill_load_bytes} loaded")
    for line in done.stdout.splitlines(keepends=True):
        if done.returncode or not NOTE.match(line):
            sys.stderr.write(line)
    for words, lines in (("warning", warnings), ("error", faults)):
        for line in dict.fromkeys(lines):
            print(f"ptxas.py: {words}: {line}", file=sys.stderr)

    if faults or done.returncode:
        if output:
            Path(output).unlink(missing_ok=True)  # else the next build would take it for finished
        return done.returncode or 1
    if output and device_code_alone:
        Path(f"{output}.cubin").unlink(missing_ok=True)
        subprocess.run(["cc", "-x", "c", "-c", os.devnull, "-o", output], check=True)
    if output:
        table = [asdict(kernel) for kernel in kernels if kernel.registers]
        write_whole(Path(f"{output}.ptxas.json"), {"source": source, "kernels": table})
    return 0


def said_of(objects: Sequence[Path]) -> list[dict[str, object]] | None:
    kernels = []
    for path in objects:
        try:
            data = json.loads(Path(f"{path}.ptxas.json").read_text(encoding="utf-8"))
            kernels += [{"source": data["source"], **kernel} for kernel in data["kernels"]]
        except (OSError, ValueError, KeyError, TypeError):
            print(f"ptxas.py: {path}: no usable {path.name}.ptxas.json beside it; delete the object and build again",
                  file=sys.stderr)
            return None
    return kernels


def collect(table: Path, objects: Sequence[Path]) -> int:
    if (kernels := said_of(objects)) is None:
        return 1
    table.parent.mkdir(parents=True, exist_ok=True)
    write_whole(table, {"kernels": kernels})
    print(table)
    return 0


def check(table: Path, objects: Sequence[Path]) -> int:
    """Of the names alone: registers differ from one architecture to the next."""
    if (kernels := said_of(objects)) is None:
        return 1
    here, there = ({(k["source"], k["name"]) for k in some}
                   for some in (kernels, json.loads(table.read_text(encoding="utf-8"))["kernels"]))
    for words, names in (("lacks", here - there), ("has, and this build lacks,", there - here)):
        for source, name in sorted(names):
            print(f"ptxas.py: {table.name} {words} {name} of {source}; record it anew: docs/machines.md", file=sys.stderr)
    return int(here != there)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ptxas.py", description=__doc__.splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    one = modes.add_parser("compile", help="run a compiler and watch it")
    one.add_argument("--spills", choices=("error", "warning", "allowed"), required=True)
    one.add_argument("--device-code-alone", action="store_true", help="no program will be run; for one architecture")
    one.add_argument("command", nargs="+")
    for name, what in (("collect", "write the table of these objects' kernels"), ("check", "compare their names with it")):
        one = modes.add_parser(name, help=what)
        one.add_argument("table", type=Path)
        one.add_argument("objects", type=Path, nargs="*")
    options = parser.parse_args(argv)
    if options.mode == "compile":
        return compile_watched(options.command, options.spills, options.device_code_alone)
    return (collect if options.mode == "collect" else check)(options.table, options.objects)


if __name__ == "__main__":
    sys.exit(main())
