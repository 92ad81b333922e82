"""What the two warpgroups of a block do when: clock stamps in copies of rungs 7 to 12, drawn as bars.

    python3 06_optimized/check/timeline.py measure 06_optimized/results/timeline.json     needs nvcc and a GPU of compute capability 9.0
    python3 06_optimized/check/timeline.py draw 06_optimized/results/timeline.json 06_optimized/results/timeline.svg
    python3 06_optimized/check/timeline.py check                     do the rules below still fit the rungs?

The lessons stay as they are: stamps are put into a copy, before it is compiled. They disturb: the time with and without
them is measured in the same call, and drawn beside each rung.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORWARD = ROOT / "06_optimized" / "forward"
RUNGS = {"specialised": "7_specialised", "lock": "8_pingpong", "no_lock": "8_pingpong", "overlap": "9_overlap",
         "rows": "10_rows", "persistent": "11_persistent", "hopper": "12_hopper"}
TITLES = {"specialised": "7 specialised", "lock": "8 lock", "no_lock": "8 no lock", "overlap": "9 overlap",
          "rows": "10 rows", "persistent": "11 persistent", "hopper": "12 hopper"}
S_ISSUED, S_THERE, PV_ISSUED, O_THERE, SCALED = range(1, 6)
STAMPS = 1200
# Where a stamp goes: before or after a line of compute().
RULES = ((S_ISSUED, "before", r"\bmultiply_transposed<"), (S_THERE, "after", r"\bwgmma_wait<\d>\(S\);"),
         (PV_ISSUED, "before", r"\bmultiply_add<"), (O_THERE, "after", r"\bwgmma_wait<0>\(O\);"),
         (SCALED, "after", r"\bscale_rows\(O, alpha\);"))
PRELUDE = f"""#include <cuda_runtime.h>
#define FA_STAMPS {STAMPS}
__device__ uint2 fa_stamps[2][FA_STAMPS];
"""
STAMP = "fa_stamp(fa_to, fa_left, {kind});"
# By a predicate, not by a branch: ptxas moves nothing over a branch, so that one would change what is measured.
FUNCTIONS = """
__device__ inline void fa_stamp(uint2*& to, int& left, unsigned kind) {
  asm volatile(
      "{ .reg .pred p;\\n.reg .u32 t;\\n"
      "setp.gt.s32 p, %2, 0;\\n"
      "mov.u32 t, %%clock;\\n"
      "@p st.global.v2.u32 [%0], {%1, t}; }"
      :
      : "l"(to), "r"(kind), "r"(left)
      : "memory");
  ++to;
  --left;
}
"""


class Bad(Exception):
    pass


def instrumented(text: str, name: str) -> str:
    """The source with stamps in compute(); every rule must fit."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if re.search(r"\bvoid compute\(", line)), None)
    if first is None:
        raise Bad(f"{name}: no function compute()")
    last = next(i for i in range(first, len(lines)) if lines[i] == "}")
    fits = {kind: 0 for kind, _, _ in RULES}
    out = [PRELUDE + FUNCTIONS, *lines[:first]]
    leader = False
    for line in lines[first:last]:
        after = ""
        for kind, where, pattern in RULES:
            if re.search(pattern, line):
                fits[kind] += 1
                stamp = STAMP.format(kind=kind)
                if where == "before":  # and before the fence, which must be the last thing before a product
                    out.insert(len(out) - ("wgmma_fence();" in out[-1]), stamp)
                else:
                    after = stamp
        out += [line] + ([after] if after else [])
        if not leader and re.search(r"const bool leader = ", line):
            leader = True
            out.append("uint2* fa_to = fa_stamps[group]; int fa_left = leader && blockIdx.x == 66 ? FA_STAMPS : 0;")
    missing = [pattern for kind, _, pattern in RULES if not fits[kind]]
    if missing or not leader:
        raise Bad(f"{name}: no line of compute() fits '{missing[0] if missing else 'const bool leader'}'")
    return "\n".join([*out, *lines[last:]]) + "\n"


def built(folder: Path, kernel: str, stamps: bool) -> Path:
    source = FORWARD / f"{RUNGS[kernel]}.cu"
    if stamps:
        copy = folder / f"{kernel}.cu"
        copy.write_text(instrumented(source.read_text(encoding="utf-8"), source.name), encoding="utf-8")
        source = copy
    program = folder / f"{kernel}_{'stamps' if stamps else 'plain'}"
    command = ["nvcc", "-std=c++20", "-O3", "-diag-suppress=554", "-gencode", "arch=compute_90a,code=sm_90a",
               f"-I{ROOT}", f'-DFA_RUNG="{source}"', f"-DFA_LAUNCH_RUNG=launch_{kernel}"]
    if kernel == "hopper":
        command.append("-DFA_WITH_COUNTER")
    command += [str(ROOT / "06_optimized/check/timeline.cu"), str(FORWARD / "3_swizzle.cu"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Bad(f"{kernel}: {done.stderr.strip()[:2000]}")
    return program


def output(program: Path) -> tuple[float, list[list[int]]]:
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Bad(f"{program.name}: {done.stderr.strip()}")
    head, *rest = done.stdout.splitlines()
    return float(head.split()[1]), [[int(x) for x in line.split()] for line in rest]


def measure(path: Path) -> None:
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ThreadPoolExecutor() as pool:
            jobs = {(k, s): pool.submit(built, folder, k, s) for k in RUNGS for s in (False, True)}
            programs = {key: job.result() for key, job in jobs.items()}
        device = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True,
                                text=True, check=True).stdout.split("\n")[0]
        for kernel in RUNGS:
            plain, _ = output(programs[kernel, False])
            ms, stamps = output(programs[kernel, True])
            result[kernel] = {"ms": plain, "ms_with_stamps": ms, "stamps": stamps}
            print(f"{kernel}: {plain:.4f} ms, with stamps {ms:.4f} ({ms / plain - 1:+.1%}), {len(stamps)} stamps")
    path.write_text(json.dumps({"device": device, "setting": "N 4096, d 128, no mask, bf16", "rungs": result}) + "\n",
                    encoding="utf-8")


# ---------------------------------------------------------------- the picture

Span = tuple[int, int]
WIDTH, LEFT, LANE, CYCLES = 1000, 176, 11, 9000
LANES = ("S", "PV", "softmax")
COLOURS = {"S": "#0072b2", "PV": "#56b4e9", "softmax": "#e69f00"}


def spans(stamps: Sequence[Sequence[int]], group: int) -> dict[str, list[Span]]:
    """From the issue of a product to the wait that it ended, and from S to the end of the softmax."""
    found: dict[str, list[Span]] = {"S": [], "PV": [], "softmax": []}
    at: dict[int, int] = {}
    for who, kind, clock in stamps:
        if who != group:
            continue
        if kind == S_THERE and S_ISSUED in at:
            found["S"].append((at.pop(S_ISSUED), clock))
        if kind == O_THERE and PV_ISSUED in at:
            found["PV"].append((at.pop(PV_ISSUED), clock))
        if kind == SCALED and S_THERE in at:
            found["softmax"].append((at.pop(S_THERE), clock))
        at[kind] = clock
    return found


def draw(source: Path, target: Path) -> None:
    data = json.loads(source.read_text(encoding="utf-8"))
    rows, y = [], 78
    for kernel, title in TITLES.items():
        rung = data["rungs"][kernel]
        both = [spans(rung["stamps"], group) for group in (0, 1)]
        starts = [a for a, _ in both[0]["S"]]
        begin = starts[min(12, len(starts) // 2)]
        steps = [b - a for a, b in zip(starts, starts[1:])]
        step = sorted(steps)[len(steps) // 2]
        more = rung["ms_with_stamps"] / rung["ms"] - 1
        rows.append(f'<text x="16" y="{y + 26}" class="t">{title}</text>')
        rows.append(f'<text x="16" y="{y + 44}" class="s">step {step}, stamps {more:+.1%}</text>')
        for group, found in enumerate(both):
            base = y + group * (3 * LANE + 6)
            rows.append(f'<rect x="{LEFT}" y="{base}" width="{WIDTH - LEFT - 16}" height="{3 * LANE}" class="b"/>')
            for what, some in found.items():
                top = base + LANE * LANES.index(what)
                for a, b in some:
                    a, b = max(a - begin, 0), min(b - begin, CYCLES)
                    if a < b:
                        x = LEFT + (WIDTH - LEFT - 16) * a / CYCLES
                        w = (WIDTH - LEFT - 16) * (b - a) / CYCLES
                        rows.append(f'<rect x="{x:.1f}" y="{top + 1}" width="{w:.1f}" height="{LANE - 2}" '
                                    f'fill="{COLOURS[what]}"/>')
        y += 6 * LANE + 26
    key, x = [], LEFT
    for what, text in (("S", "Q K^T: issue until S is there"), ("PV", "P V: issue until O is waited for"),
                       ("softmax", "softmax: from S to the scaled O")):
        key.append(f'<rect x="{x}" y="52" width="12" height="12" fill="{COLOURS[what]}"/>'
                   f'<text x="{x + 17}" y="63" class="s">{text}</text>')
        x += 275
    svg = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 26}" width="{WIDTH}" font-family="DejaVu Sans, sans-serif">
<style>.t {{ font-size: 14px; fill: #222 }} .s {{ font-size: 12px; fill: #555 }} .b {{ fill: #eee }}</style>
<rect width="{WIDTH}" height="{y + 26}" fill="#fdfdfb"/>
<text x="16" y="26" font-size="17" font-weight="bold" fill="#222">Who runs when: two warpgroups of one block</text>
<text x="16" y="44" class="s">{data["device"]} · {data["setting"]} · {CYCLES} cycles; group 1 above group 2</text>
{chr(10).join(key)}
{chr(10).join(rows)}
<text x="{LEFT}" y="{y + 8}" class="s">0</text><text x="{WIDTH - 16}" y="{y + 8}" class="s" text-anchor="end">{CYCLES} cycles</text>
</svg>
"""
    target.write_text(svg, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    modes.add_parser("measure").add_argument("json", type=Path)
    one = modes.add_parser("draw")
    one.add_argument("json", type=Path)
    one.add_argument("svg", type=Path)
    modes.add_parser("check")
    options = parser.parse_args()
    try:
        if options.mode == "measure":
            measure(options.json)
        elif options.mode == "draw":
            draw(options.json, options.svg)
        else:
            for stem in dict.fromkeys(RUNGS.values()):
                instrumented((FORWARD / f"{stem}.cu").read_text(encoding="utf-8"), stem)
    except (Bad, OSError, subprocess.CalledProcessError) as error:
        print(f"timeline.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
