"""What dropout costs: the chart and the table of the walk, from what dropout_bench.py has recorded."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figure import Chart, Line, Lines, Point, Role, Table
from results import Spread

RECORDED = Path(__file__).resolve().parents[1] / "results/dropout.json"
PAGE = "beyond/dropout/README.md"
OTHERS = {"efficient": "PyTorch, memory-efficient", "cudnn": "cuDNN"}
Row = dict[str, Any]


def charts() -> list[Chart | Table]:
    if not RECORDED.is_file():
        return []
    data = json.loads(RECORDED.read_text(encoding="utf-8"))
    rows = [row for row in data["rows"] if "ms" in row]
    device = data["context"]["device"]
    return [cost(rows, f"{device} · bf16 · p = 0.1, 16 heads, 16,384 tokens in all, no mask · time, round by round"),
            table(rows, device)]


def of(rows: Sequence[Row], **where: object) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def times(slower: Row, faster: Row) -> list[float]:
    """How many times as long, round by round."""
    return [a / b for a, b in zip(slower["ms"], faster["ms"])]


def spread(ratios: Sequence[float]) -> Spread:
    if len(ratios) < 2:
        return Spread(ratios[0], ratios[0], ratios[0])
    low, mid, high = statistics.quantiles(ratios, method="inclusive")
    return Spread(mid, low, high)


def line(rows: Sequence[Row], label: str, who: str, beside: str, role: Role) -> list[Line]:
    """Nothing, if nobody has been measured."""
    points = []
    for row in sorted(of(rows, who=who), key=lambda row: row["N"]):
        if without := of(rows, who=beside, N=row["N"]):
            points.append(Point(row["N"], spread(times(row, without[0]))))
    return [Line(label, points, role)] if points else []


def cost(rows: Sequence[Row], said: str) -> Chart:
    panels = []
    for kind in ("forward", "backward"):
        here = of(rows, kind=kind, d=128, causal=False)
        lines = (line(here, "hopper", "ours_hopper", "best", "this")
                 + line(here, "fa2" if kind == "forward" else "swizzle", "ours", "plain", "previous")
                 + line(here, "FlashAttention-2", "fa2", "fa2_0", "peer"))
        if lines:
            panels.append(Lines("time with / without", lines, "N", y_scale="linear", where=kind))
    return Chart("dropout_cost", "Dropout: how many times as long a pass takes, d = 128", panels, said,
                 "Each beside its own kernel without dropout.")


def table(rows: Sequence[Row], device: str) -> Table:
    others = {who: label for who, label in OTHERS.items() if of(rows, who=who)}
    best = ["with / hopper without"] if of(rows, who="best") else []
    hopper = ["hopper, ms", "with / without", "FlashAttention-2's time / hopper's"] if of(rows, who="ours_hopper") else []
    lines = []
    for ours in sorted(of(rows, who="ours"), key=lambda row: (row["kind"] == "backward", row["d"], row["causal"], row["N"])):
        here = of(rows, **{name: ours[name] for name in ("kind", "N", "d", "causal")})

        def ratio(who: str, beside: str, here: Sequence[Row] = here) -> str:
            one, other = of(here, who=who), of(here, who=beside)
            return f"{statistics.median(times(one[0], other[0])):.2f}" if one and other else "–"

        def ms(who: str, here: Sequence[Row] = here) -> str:
            return next((f"{statistics.median(row['ms']):.3f}" for row in of(here, who=who)), "–")
        lines.append([ours["kind"], str(ours["d"]), "causal" if ours["causal"] else "none", f"{ours['N']:,}",
                      f"{statistics.median(ours['ms']):.3f}", f"{ours['TFLOP_per_s']:.0f}", ratio("ours", "plain"),
                      ratio("ours_0", "plain"), *(ratio("ours", "best") for _ in best), ratio("fa2", "fa2_0"), ratio("fa2", "ours"),
                      *((ms("ours_hopper"), ratio("ours_hopper", "best"), ratio("fa2", "ours_hopper")) if hopper else ()),
                      *(ratio(who, "ours") for who in others)])
    return Table("dropout", ["pass", "d", "mask", "N", "ms", "TFLOP/s", "with / without", "p = 0 / without", *best,
                             "FlashAttention-2: with / without", "its time / ours", *hopper,
                             *(f"{label}: time / ours" for label in others.values())], lines, PAGE,
                 f"Medians on {device}, p = 0.1. FLOP as without dropout.")
