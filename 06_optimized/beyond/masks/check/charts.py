"""What a mask costs: the chart and the table of the walk, from what masks_bench.py has recorded."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figure import Chart, Line, Lines, Point, Role, Table, significant
from results import Spread

RECORDED = Path(__file__).resolve().parents[1] / "results/masks.json"
PAGE = "beyond/masks/README.md"
OTHERS = {"fa2": "FlashAttention-2, PyTorch", "fa3": "FlashAttention-3", "flex": "FlexAttention"}
PASSES = ("forward", "backward")
Row = dict[str, Any]


def charts() -> list[Chart | Table]:
    if not RECORDED.is_file():
        return []
    data = json.loads(RECORDED.read_text(encoding="utf-8"))
    rows = [row for row in data["rows"] if "ms" in row]
    if not of(rows, who="plain"):
        return []
    return [windows(rows, data["context"]["device"]), table(rows, data["context"]["device"])]


def of(rows: Sequence[Row], **where: object) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def milliseconds(row: Row, factor: float = 1) -> Spread:
    low, mid, high = statistics.quantiles((factor * ms for ms in row["ms"]), method="inclusive")
    return Spread(mid, low, high)


def plain_of(row: Row, rows: Sequence[Row]) -> Row:
    """The same kernel without a pattern: causal, unless keys behind the query are seen, too."""
    right = 0 if row["right"] == 0 else -1
    return of(rows, who="plain", kernel=row["kernel"].split(",")[0], d=row["d"], right=right, **{"pass": row["pass"]})[0]


def speed(row: Row, rows: Sequence[Row]) -> float:
    """Visible pairs a second, as a multiple of the plain kernel's, round by round."""
    plain = plain_of(row, rows)
    return statistics.median(b * row["pairs"] / (a * plain["pairs"]) for a, b in zip(row["ms"], plain["ms"]))


def windows(rows: Sequence[Row], device: str) -> Chart:
    d = max(row["d"] for row in rows)
    panels = []
    for way in PASSES:
        here = sorted(of(rows, d=d, kind="window", right=0, **{"pass": way}), key=lambda row: row["left"])
        ours = [row for row in of(here, who="ours") if row["kernel"] == "hopper"]

        def against(label: str, some: Sequence[Row], role: Role) -> Line:
            return Line(label, [Point(row["left"], milliseconds(row)) for row in some], role)
        slower = "fa2" if way == "forward" else "swizzle"
        lines = [against("hopper", ours, "this"),
                 against(slower, [row for row in of(here, who="ours") if row["kernel"] == "fa2"], "this")]
        lines += [against(label, found, "peer") for who, label in OTHERS.items() if len(found := of(here, who=who)) > 1]
        scaled = [Point(row["left"], milliseconds(plain_of(row, rows), row["pairs"] / plain_of(row, rows)["pairs"]))
                  for row in ours]
        lines.append(Line("as many pairs at the plain hopper's speed", scaled, "previous"))
        panels.append(Lines(f"ms, {way}", lines, "keys that a query sees to its left"))
    return Chart("masks_windows", f"A window costs what it shows: N = 16,384, d = {d}", panels,
                 f"{device} · bf16 · 16 heads · a query sees itself and so many keys before it",
                 "Twice the window takes twice the time; the distance to the lowest line is what tiles at both ends cost, "
                 "of which some pairs are hidden.")


def table(rows: Sequence[Row], device: str) -> Table:
    names = {"window": "window", "list": "of the blocks", "sinks": "with sinks", "documents": "16 documents", "plain": ""}
    lines = []
    for d in sorted({row["d"] for row in rows}, reverse=True):
        for row in of(rows, who="ours", d=d):
            same = {name: row[name] for name in ("d", "kind", "left", "right", "share", "pass")}
            said = (f"{row['share']} % {names['list']}" if row["kind"] == "list" else names["documents"]
                    if row["kind"] == "documents" else "all" if row["left"] < 0 and row["right"] < 0 else "causal"
                    if row["left"] < 0 else f"{row['left']:,} and {row['right']:,}"
                    + (", sinks" if row["kind"] == "sinks" else ""))

            def beside(who: str, row: Row = row, same: Row = same) -> str:
                found = of(rows, who=who, **same)
                return f"{statistics.median(b / a for a, b in zip(row['ms'], found[0]['ms'])):.2f}" if found else "–"
            kernel = "swizzle" if (row["kernel"], row["pass"]) == ("fa2", "backward") else row["kernel"]
            lines.append([f"{d}", row["pass"], kernel, said, f"{100 * row['pairs'] / row['N'] ** 2:.0f} %",
                          significant(milliseconds(row).mid), f"{row['TFLOP_per_s']:.0f}", f"{speed(row, rows):.2f}",
                          *(beside(who) for who in OTHERS)])
    return Table("masks", ["d", "pass", "kernel", "visible: left and right", "of all pairs", "ms", "TFLOP/s",
                           "speed a pair / without a pattern", *(f"its time / ours: {label}" for label in OTHERS.values())], lines, PAGE,
                 f"Medians on {device}, N = 16,384 (`results/masks.json`). Without a pattern: the plain kernel, causal where "
                 "no key behind the query is seen.")
