"""What the x-ray counts beside what Nsight Compute counts on a GPU, as a table; status 1 if they differ by more than 10 %.

Of stages 04, 05 and 06, in two commands, from the root; the kernels are those of `./learn xray`. The first needs nvcc and
no GPU, the second a GPU and ncu, and neither nvcc nor a compiler:

    python3 04_cuda_forward/check/xray_ncu.py build build/xray_ncu 06 fa2 swizzle hopper backward_hopper
    python3 04_cuda_forward/check/xray_ncu.py measure build/xray_ncu

The kernels of both are paired in the order of their launches. ncu counts what cp.async fetches among the loads from global
memory, and where it puts it not among the stores to shared memory; what the copy engine moves it does not count.
Instructions are shown and not judged: where the source reads four numbers, or the same number twice, nvcc may read once.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# Memory, operation, and column of the x-ray, by the metric that counts the same. Turns are taken from the metrics that
# ncu counts by instruction (sass): the others tell loads and stores from each other wrongly beside wgmma.
TURNS = "sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op"
METRICS = {
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": ("global", "read", "times"),
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": ("global", "read", "took"),
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum": ("global", "write", "times"),
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": ("global", "write", "took"),
    "l1tex__t_requests_pipe_lsu_mem_global_op_red.sum": ("global", "add", "times"),
    "l1tex__t_sectors_pipe_lsu_mem_global_op_red.sum": ("global", "add", "took"),
    "smsp__inst_executed_op_shared_ld.sum": ("shared", "read", "times"),
    f"sm__{TURNS}_ld.sum": ("shared", "read", "took"),
    "smsp__inst_executed_op_ldsm.sum": ("shared", "ldmatrix", "times"),
    f"sm__{TURNS}_ldsm.sum": ("shared", "ldmatrix", "took"),
    "smsp__inst_executed_op_shared_st.sum": ("shared", "write", "times"),
    f"sm__{TURNS}_st.sum": ("shared", "write", "took"),
    "smsp__inst_executed_op_shared_stsm.sum": ("shared", "stmatrix", "times"),
    f"smsp__{TURNS}_stsm.sum": ("shared", "stmatrix", "took"),
    f"sm__{TURNS}_gmma.sum": ("shared", "operands", "took"),
}
ALSO = {("global", "read"): "copy"}
SAID = {"operands": "wgmma reads"}
NAMES = {("global", "times"): "instructions", ("global", "took"): "sectors",
         ("shared", "times"): "instructions", ("shared", "took"): "turns (wavefronts)"}
JUDGED, MOST = "took", 0.10
ROOT = Path(__file__).resolve().parents[2]


class Bad(Exception):
    """A file that is not what it should be: why, in a line."""


def xray(lines: Iterable[str]) -> list[tuple[str, dict[str, int]]]:
    """Of each kernel, in the order of the launches: its name and its sums, by metric."""
    kernels: dict[str, dict[str, int]] = {}
    try:
        for row in csv.DictReader(lines):
            sums = kernels.setdefault(row["kernel"], dict.fromkeys(METRICS, 0))
            for metric, (memory, op, column) in METRICS.items():
                if row["memory"] == memory and row["op"] in (op, ALSO.get((memory, op))):
                    sums[metric] += int(row[column])
    except (KeyError, TypeError, ValueError) as error:
        raise Bad(f"not a table of ./learn xray --csv: {error}") from error
    return list(kernels.items())


def ncu(lines: Iterable[str]) -> list[dict[str, int]]:
    """The same from Nsight Compute: its own remarks come first, then a head, a line of units, and a line per launch."""
    rows = list(csv.DictReader(line for line in lines if line.startswith('"')))
    try:
        return [{metric: int(float(row[metric].replace(",", ""))) for metric in METRICS}
                for row in rows if row["ID"].strip()]
    except (KeyError, AttributeError, ValueError) as error:
        raise Bad(f"not a table of ncu --csv --page raw with the metrics of this tool: {error}") from error


def compare(ours: list[tuple[str, dict[str, int]]], theirs: list[dict[str, int]]) -> tuple[list[str], bool]:
    """A Markdown table, and whether all that is judged is near."""
    if not ours or len(ours) != len(theirs):
        raise Bad(f"the x-ray has {len(ours)} kernels, ncu has {len(theirs)}; they must be of the same program")
    table = ["| kernel | | | x-ray | ncu | difference |", "| --- | --- | --- | ---: | ---: | ---: |"]
    near = True
    for (kernel, counted), measured in zip(ours, theirs):
        for metric, (memory, op, column) in METRICS.items():
            x, n = counted[metric], measured[metric]
            if not x and not n:
                continue
            difference = (x - n) / n if n else float("inf")
            near &= column != JUDGED or abs(difference) <= MOST
            table.append(f"| {kernel} | {memory} {SAID.get(op, op)} | {NAMES[memory, column]} | {x:,} | {n:,} | {difference:+.1%} |")
    return table, near


def file_of(stage: Path, kernel: str) -> Path:
    for file in sorted(stage.rglob("*.cu")):
        text = file.read_text(encoding="utf-8")
        if not {"beyond", "mine", "hunt", "exercise", "check"} & set(file.relative_to(stage).parts) and any(
                f"\n{before}void launch_{kernel}(" in text for before in ("", "template ")):
            return file.relative_to(ROOT)
    raise Bad(f"no kernel '{kernel}' in {stage.name}")


def build(folder: Path, number: str, kernels: list[str], arch: str) -> None:
    """Of each kernel what the x-ray counts, and a program for the GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    [stage] = ROOT.glob(f"{number}_*")
    for kernel in kernels:
        name = folder / f"{number}_{kernel}"
        sources = [stage / "check/xray.cpp", *stage.glob("check/xray_others.cpp"), ROOT / "common/core/check.cpp"]
        flags = [f'-DFA_XRAY_FILE="{file_of(stage, kernel)}"', f"-DFA_XRAY_LAUNCH=launch_{kernel}"]
        counted = subprocess.run([ROOT / "learn", "xray", number, kernel, "--csv"], check=False, text=True, stdout=subprocess.PIPE)
        if counted.returncode:
            raise Bad(f"./learn xray {number} {kernel} ended with status {counted.returncode}")
        name.with_suffix(".csv").write_text(counted.stdout, encoding="utf-8")
        command = ["nvcc", "-std=c++20", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-w", "-I.", "-x", "cu", *flags, *map(str, sources), "-o",
                   str(name.resolve())]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise Bad(f"nvcc does not compile {name.name}")


def measure(folder: Path) -> bool:
    """Runs what build() made, and prints a table for each kernel."""
    all_near = True
    for counted in sorted(folder.glob("*.csv")):
        profiled = subprocess.run(["ncu", "--csv", "--page", "raw", "--metrics", ",".join(METRICS),
                                   str(counted.with_suffix("").resolve())], check=False, capture_output=True, text=True)
        if profiled.returncode:
            raise Bad(f"ncu: {(profiled.stdout + profiled.stderr).strip().splitlines()[-1]}")
        table, near = compare(xray(counted.read_text(encoding="utf-8").splitlines()), ncu(profiled.stdout.splitlines()))
        print("\n".join([counted.stem.replace("_", " ", 1), "", *table, ""]), flush=True)
        all_near &= near
    return all_near


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="the x-ray beside Nsight Compute")
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("build", help="what the x-ray counts, and programs for the GPU")
    maker.add_argument("folder", type=Path)
    maker.add_argument("stage", choices=("04", "05", "06"))
    maker.add_argument("kernels", nargs="+")
    maker.add_argument("--arch", default="90a", help="compute capability, 90a unless given")
    commands.add_parser("measure", help="ncu on each of them").add_argument("folder", type=Path)
    asked = parser.parse_args(words)
    try:
        if asked.command == "build":
            build(asked.folder, asked.stage, asked.kernels, asked.arch)
            return 0
        return 0 if measure(asked.folder) else 1
    except (OSError, Bad) as error:
        print(f"xray_ncu.py: {error}", file=sys.stderr)
        return 3 if isinstance(error, OSError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
