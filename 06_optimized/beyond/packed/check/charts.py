"""What different lengths cost: the charts and the table of the walk, from what packed_bench.py has recorded."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figure import Bar, Bars, Bound, Chart, Role, Table
from results import Spread

RECORDED = Path(__file__).resolve().parents[1] / "results/packed.json"
PAGE = "beyond/packed/README.md"
LENGTHS = {"equal": "equal", "uniform": "uniform", "tail": "long tail", "one_long": "one long, many short"}
SHOWN: dict[str, tuple[str, Role]] = {"ours_hopper": ("packed", "this"), "padded_hopper": ("padded", "previous"),
                                      "fa2_varlen": ("FlashAttention-2", "peer"), "fa3": ("FlashAttention-3", "peer")}
KERNELS = {"forward": {"fa2": "", "hopper": "_hopper"}, "backward": {"swizzle": "", "hopper": "_hopper"}}
OTHERS = {"ours_sequences": "/ by sequence", "ours_tiles": "/ by tile", "ours_given": "/ as given", "padded": "/ padded",
          "fa2_varlen": "/ FlashAttention-2", "fa3": "/ FlashAttention-3", "flex": "/ FlexAttention"}
TOKENS, D = 131072, 128  # of the chart
Row = dict[str, Any]


def charts() -> list[Chart | Table]:
    if not RECORDED.is_file():
        return []
    data = json.loads(RECORDED.read_text(encoding="utf-8"))
    rows = [row for row in data["rows"] if "ms" in row]
    device = data["context"]["device"]
    chart = by_lengths(rows, f"{device} · bf16, causal, {TOKENS:,} tokens, 16 heads, d = {D} · FLOPs: 4 H d pairs that the "
                             "mask leaves, times 2.5 in the backward · to pack and to pad is not counted")
    return ([chart] if chart else []) + [table(rows, device)]


def of(rows: Sequence[Row], **where: object) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def flop(row: Row) -> float:
    return 4.0 * row["H"] * row["d"] * row["pairs"] * (1 if row["kind"] == "forward" else 2.5)


def speed(row: Row) -> Spread:
    """TFLOP/s: the median and the quartiles of the rounds."""
    low, mid, high = statistics.quantiles((1e-9 * flop(row) / ms for ms in row["ms"]), method="inclusive")
    return Spread(mid, low, high)


def ratio(ours: Row, theirs: Row) -> float:
    """Speed of ours relative to theirs, round by round."""
    return statistics.median(b / a for a, b in zip(ours["ms"], theirs["ms"]))


def by_lengths(rows: Sequence[Row], said: str) -> Chart | None:
    panels = []
    for kind in ("forward", "backward"):
        here = of(rows, kind=kind, tokens=TOKENS, d=D)
        bars = []
        for lengths, name in LENGTHS.items():
            for who, (label, role) in SHOWN.items():
                for row in of(here, lengths=lengths, who=who):
                    bars.append(Bar(f"{name}: {label}", speed(row), f"{speed(row).mid:.0f}", role))
        even = of(here, lengths="equal", who="padded_hopper")
        if bars:
            panels.append(Bars(f"TFLOP/s, {kind}, hopper", bars, "TFLOP/s", "",
                               [Bound("equal lengths, not packed", speed(even[0]).mid)] if even else []))
    if not panels:
        return None
    return Chart("packed", "Sequences of different lengths", panels, said,
                 "Packed, a batch should cost what its visible pairs cost, however they are spread; padded, it costs its "
                 "longest sequence.")


def table(rows: Sequence[Row], device: str) -> Table:
    others = {who: label for who, label in OTHERS.items() if of(rows, who=who)}
    lines = []
    for kind, kernel, suffix in ((kind, *one) for kind, kernels in KERNELS.items() for one in kernels.items()):
        for row in sorted(of(rows, kind=kind, who=f"ours{suffix}"), key=lambda row: (row["d"], row["tokens"])):
            here = of(rows, kind=kind, d=row["d"], tokens=row["tokens"], lengths=row["lengths"])
            even = of(here, who=f"even{suffix}") or of(here, lengths="equal", who=f"padded{suffix}")

            def beside(who: str, row: Row = row, here: Sequence[Row] = here, suffix: str = suffix) -> str:
                if suffix and who.startswith("ours"):
                    return "–"  # another kernel's
                found = of(here, who=who + (suffix if who == "padded" else ""))
                return f"{ratio(row, found[0]):.2f}" if found else "–"

            share = f"{100 * ratio(row, even[0]) * row['pairs'] / even[0]['pairs']:.0f} %" if even else "–"
            lines.append([f"{kind}, {kernel}, {row['d']}", f"{row['tokens']:,}", LENGTHS[row["lengths"]],
                          str(row["sequences"]), f"{row['longest']:,}", f"{speed(row).mid:.0f}", share,
                          *map(beside, others)])
    return Table("packed", ["pass, kernel, d", "tokens", "lengths", "sequences", "longest", "TFLOP/s", "of equal ones",
                            *others.values()], lines, PAGE,
                 f"Medians on {device}. *Of equal ones*: of the speed of the kernels that the walk comes from, with equal "
                 "lengths that have as many tokens and pairs. From there on: multiples of speed.")
