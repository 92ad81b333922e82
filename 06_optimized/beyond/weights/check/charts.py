"""What it costs to ask for weights: the chart and the table of the walk, from what weights_bench.py has recorded."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figure import Chart, Line, Lines, Point, Role, Table, significant
from results import Spread

RECORDED = Path(__file__).resolve().parents[1] / "results/weights.json"
PAGE = "beyond/weights/README.md"
WHO: dict[str, tuple[str, Role]] = {
    "forward": ("a forward, fa2", "previous"), "sums": ("column sums", "this"), "largest": ("16 largest of each row", "this"),
    "tile": ("a tile of 128 x 128", "this"), "whole_sums": ("P whole, then sums", "peer"),
    "whole_largest": ("P whole, then topk", "peer")}
Row = dict[str, Any]


def charts() -> list[Chart | Table]:
    if not RECORDED.is_file():
        return []
    data = json.loads(RECORDED.read_text(encoding="utf-8"))
    rows = [row for row in data["rows"] if "ms" in row]
    device = data["context"]["device"]
    said = f"{device} · bf16 · no mask, d 128, 16 heads, B N = 16384 · P whole: PyTorch, a head at a time"
    lines = [Line(label, [Point(row["N"], milliseconds(row)) for row in of(rows, who)], role)
             for who, (label, role) in WHO.items() if of(rows, who)]
    return [Chart("weights_time", "What it costs to ask where the weights are",
                  [Lines("ms", lines, "N, sequence length")], said,
                  "Sums cost less than a forward, the largest of every row several forwards, a tile next to nothing; with P "
                  "whole the same answers cost more, and memory besides."),
            table(rows, device)]


def of(rows: Sequence[Row], who: str) -> list[Row]:
    return sorted((row for row in rows if row["who"] == who), key=lambda row: row["N"])


def milliseconds(row: Row) -> Spread:
    low, mid, high = statistics.quantiles(row["ms"], method="inclusive")
    return Spread(mid, low, high)


def table(rows: Sequence[Row], device: str) -> Table:
    lengths = sorted({row["N"] for row in rows})
    lines = []
    for who, (label, _) in WHO.items():
        by = {row["N"]: row for row in of(rows, who)}
        cells = [f"{significant(milliseconds(by[n]).mid)}" if n in by else "–" for n in lengths]
        extra = max((row["extra_bytes"] for row in by.values()), default=0)
        lines.append([label, *cells, f"{extra / 2**20:,.0f}"])
    return Table("weights", ["ms", *(f"N {n:,}" for n in lengths), "MiB beside, at most"], lines, PAGE,
                 f"Medians on {device} (`results/weights.json`); B N = 16,384, so all lengths have as many rows.")
