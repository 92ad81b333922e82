"""What the x-ray counts beside what Nsight Compute counts on a GPU, as a table; status 1 if they differ by more than 10 %.

Three commands per kernel, from the root; 04 and tiled stand for any stage and kernel of `./learn xray`, which also names
the kernel's file:

    ./learn xray 04 tiled --csv > build/xray.csv
    nvcc -std=c++20 -O3 -arch=native -I. -x cu -DFA_XRAY_FILE='"04_cuda_forward/tiled.cu"' \\
        -DFA_XRAY_LAUNCH=launch_tiled 04_cuda_forward/check/xray.cpp common/core/check.cpp -o build/xray_on_gpu
    ncu --csv --page raw --metrics $(python3 04_cuda_forward/check/xray_ncu.py metrics) build/xray_on_gpu > build/ncu.csv
    python3 04_cuda_forward/check/xray_ncu.py compare build/xray.csv build/ncu.csv

The kernels of both files are paired in the order of their launches. ncu counts what cp.async fetches among the loads from
global memory, and where it puts it not among the stores to shared memory. Instructions are shown and not judged: where the
source reads four numbers, nvcc may read them at once.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from pathlib import Path

# Memory, operation, and column of the x-ray, by the metric that counts the same.
METRICS = {
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": ("global", "read", "times"),
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": ("global", "read", "took"),
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum": ("global", "write", "times"),
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": ("global", "write", "took"),
    "l1tex__t_requests_pipe_lsu_mem_global_op_red.sum": ("global", "add", "times"),
    "l1tex__t_sectors_pipe_lsu_mem_global_op_red.sum": ("global", "add", "took"),
    "smsp__inst_executed_op_shared_ld.sum": ("shared", "read", "times"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": ("shared", "read", "took"),
    "smsp__inst_executed_op_shared_st.sum": ("shared", "write", "times"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum": ("shared", "write", "took"),
}
COPIES = {("global", "read"): "copy"}
NAMES = {("global", "times"): "instructions", ("global", "took"): "sectors",
         ("shared", "times"): "instructions", ("shared", "took"): "turns (wavefronts)"}
JUDGED, MOST = "took", 0.10


class Bad(Exception):
    """A file that is not what it should be: why, in a line."""


def xray(lines: Iterable[str]) -> list[tuple[str, dict[str, int]]]:
    """Of each kernel, in the order of the launches: its name and its sums, by metric."""
    kernels: dict[str, dict[str, int]] = {}
    try:
        for row in csv.DictReader(lines):
            sums = kernels.setdefault(row["kernel"], dict.fromkeys(METRICS, 0))
            for metric, (memory, op, column) in METRICS.items():
                if row["memory"] == memory and row["op"] in (op, COPIES.get((memory, op))):
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
            table.append(f"| {kernel} | {memory} {op} | {NAMES[memory, column]} | {x:,} | {n:,} | {difference:+.1%} |")
    return table, near


def main(words: list[str]) -> int:
    if words == ["metrics"]:
        print(",".join(METRICS))
        return 0
    if len(words) != 3 or words[0] != "compare":
        print("usage: xray_ncu.py metrics | xray_ncu.py compare XRAY.csv NCU.csv", file=sys.stderr)
        return 2
    try:
        ours, theirs = (Path(name).read_text(encoding="utf-8").splitlines() for name in words[1:])
        table, near = compare(xray(ours), ncu(theirs))
    except (OSError, Bad) as error:
        print(f"xray_ncu.py: {error}", file=sys.stderr)
        return 3 if isinstance(error, OSError) else 1
    print("\n".join(table))
    return 0 if near else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
