"""What several GPUs lose: the chart and the table of the ring, from what ring_bench.py has recorded."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figure import Chart, Line, Lines, Point, Role, Table
from results import Spread

RECORDED = Path(__file__).resolve().parents[1] / "results/ring.json"
PAGE = "ring/README.md"
PASSES = ("forward", "forward+backward")
SHOWN: dict[str, tuple[str, Role]] = {"ring": ("ring", "this"), "gather": ("all keys first", "previous"),
                                      "heads": ("heads for rows", "peer")}
Row = dict[str, Any]


def charts() -> list[Chart | Table]:
    if not RECORDED.is_file():
        return []
    rows = [row for row in json.loads(RECORDED.read_text(encoding="utf-8"))["rows"] if "forward" in row]
    one = rows[0]
    machine = f"{one['ranks']} {one['machines'][0].split(',')[0]}"
    said = (f"{machine} · bf16 · {one['Hq']} heads and as many key heads, d = {one['d']} · causal, zigzag · share: the plain "
            "kernel on a rank's own pairs, alone")
    return [by_length(rows, said), table(rows, f"{machine}, bf16, {one['Hq']} heads, d = {one['d']}")]


def of(rows: Sequence[Row], **where: object) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def share(row: Row, way: str) -> list[float]:
    """Of each round, the share's time by the method's own."""
    return [alone / ms for alone, ms in zip(row[way]["share_rounds"], row[way]["rounds"], strict=True)]


def lost(row: Row, way: str) -> Spread:
    """Of the time, in percent: median and quartiles of the rounds."""
    low, mid, high = statistics.quantiles((100 - 100 * x for x in share(row, way)), method="inclusive")
    return Spread(mid, low, high)


def by_length(rows: Sequence[Row], said: str) -> Chart:
    panels = []
    for way in PASSES:
        lines = []
        for method, (label, role) in SHOWN.items():
            here = sorted(of(rows, method=method, causal=True, Hkv=rows[0]["Hkv"]), key=lambda row: row["N"])
            if len(here) > 1:
                lines.append(Line(label, [Point(row["N"] / 1024, lost(row, way)) for row in here], role))
        panels.append(Lines("% of the time lost", lines, "Ki tokens, all ranks together", y_scale="linear",
                            where=way.replace("+", " and ")))
    return Chart("ring_lost", "What two GPUs lose" if rows[0]["ranks"] == 2 else "What several GPUs lose", panels, said,
                 "Products grow with the square of N, messages and merges with N: the longer the sequence, the less is lost.")


def table(rows: Sequence[Row], machine: str) -> Table:
    lines = []
    for row in sorted(of(rows, method="ring"), key=lambda row: (not row["causal"], -row["Hkv"], row["N"])):
        here = of(rows, N=row["N"], Hkv=row["Hkv"], causal=row["causal"])
        theirs = [other for other in here if other["method"].startswith("PyTorch")]

        def beside(way: str, row: Row = row, theirs: Sequence[Row] = theirs) -> str:
            if not theirs:
                return "–"
            best = min(theirs, key=lambda other: other[way]["ms"])
            return f"{statistics.median(b / a for a, b in zip(row[way]['rounds'], best[way]['rounds'])):.2f}"

        lines.append(["causal" if row["causal"] else "none", f"{row['N']:,}", str(row["Hkv"]),
                      *(f"{row[way]['ms']:.1f}" for way in PASSES),
                      *(f"{100 * statistics.median(share(row, way)):.0f} %" for way in PASSES), *map(beside, PASSES)])
    return Table("ring", ["mask", "N", "key heads", "forward, ms", "both, ms", "share", "of both", "/ PyTorch", "both"],
                 lines, PAGE, f"Medians on {machine}; *both*: forward and backward; */ PyTorch*: its context "
                 "parallelism's time by ours.")
