"""What a changed score costs: the chart and the table of the walk, from what scores_bench.py has recorded."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figure import Bar, Bars, Bound, Chart, Table
from results import Spread

RECORDED = Path(__file__).resolve().parents[1] / "results/scores.json"
PAGE = "beyond/scores/README.md"
WORDS = {"alibi": "ALiBi", "softcap": "soft cap", "bias": "bias", "rotary": "rotary positions"}
NAMED = ("alibi", "softcap")  # what hopper takes, too: `ours` is what forward() takes, `fa2` by name
OTHERS = {"torch_flash": "PyTorch's FlashAttention-2", "torch_mask": "PyTorch, attn_mask", "before": "turned before",
          "flex": "FlexAttention", "fa3": "FlashAttention-3"}
PASSES = ("forward", "backward")
KINDS = {"main": "", "no mask": ", no mask"}
Row = dict[str, Any]


def charts() -> list[Chart | Table]:
    if not RECORDED.is_file():
        return []
    data = json.loads(RECORDED.read_text(encoding="utf-8"))
    rows = [row for row in data["rows"] if "ms" in row]
    if not of(rows, who="plain_hopper"):  # of a time when fa2 was all there was
        rows = [row | {"who": "fa2"} if row["who"] == "ours" and row["change"] in NAMED else row for row in rows]
    if not of(rows, who="plain"):
        return []
    device = data["context"]["device"]
    return [costs(rows, device), table(rows, device)]


def of(rows: Sequence[Row], **where: object) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def cost(row: Row, rows: Sequence[Row], base: str = "plain") -> Spread | None:
    """Time in percent of a plain kernel's, round by round: the median and the quartiles."""
    same = {name: row[name] for name in ("B", "H", "N", "d", "kind", "pass")}
    plain = of(rows, who=base, **same)
    if not plain:
        return None
    low, mid, high = statistics.quantiles((100 * a / b for a, b in zip(row["ms"], plain[0]["ms"])), method="inclusive")
    return Spread(mid, low, high)


def largest(rows: Sequence[Row], **where: object) -> dict[str, int]:
    """The longest sequences of the widest heads that were measured."""
    here = of(rows, who="plain", **where)
    d = max(row["d"] for row in here)
    return {"d": d, "N": max(row["N"] for row in here if row["d"] == d)}


def costs(rows: Sequence[Row], device: str) -> Chart:
    at = largest(rows, kind="main")
    panels = []
    for way in PASSES:
        bars = []
        for change, word in WORDS.items():
            here = of(rows, change=change, kind="main", **at, **{"pass": way})
            ours = {"ours": f"{word}, hopper" if change in NAMED else word, "fa2": word,
                    "ours_without_dbias": f"{word}, no dbias"}
            for row in sorted(here, key=lambda row: row["who"] in OTHERS):  # ours first
                value = cost(row, rows)
                if value is None or row["who"] not in (*ours, *OTHERS):
                    continue
                other = OTHERS.get(row["who"])
                label = f"{word}: {other}" if other else ours[row["who"]]
                bars.append(Bar(label, value, f"{value.mid:.0f} %", "peer" if other else "this"))
        bounds = [Bound("plain", 100.0)]
        for row in of(rows, who="plain_hopper", kind="main", **at, **{"pass": way}):
            if value := cost(row, rows):
                bounds.append(Bound("hopper's plain", value.mid))
        panels.append(Bars(way, bars, "time, in % of the plain kernel's", bounds=bounds))
    return Chart("scores_costs", f"What a changed score costs: N = {at['N']:,}, d = {at['d']}", panels,
                 f"{device} · bf16 · causal · 16 heads, B N = 16,384 · the course's fa2 and swizzle are 100 %",
                 "Where nothing but two instructions come, the bar ends near the line; where memory is read, it does not.")


def table(rows: Sequence[Row], device: str) -> Table:
    with_hopper = bool(of(rows, who="plain_hopper"))
    lines = []
    for d in sorted({row["d"] for row in rows}, reverse=True):
        for N in sorted({row["N"] for row in rows}):
            for kind, way in ((kind, way) for kind in KINDS for way in PASSES):
                here = [row for row in of(rows, d=d, N=N, **{"pass": way})
                        if row["kind"] == kind or (kind == "main" and row["kind"] == "flex")]
                plain = of(here, who="plain", kind=kind)
                if not plain:
                    continue

                def cell(change: str, who: str, base: str = "plain", here: Sequence[Row] = here) -> str:
                    found = [value for row in of(here, change=change, who=who) if (value := cost(row, rows, base))]
                    return f"{found[0].mid:.0f} %" if found else "–"
                hopper = [cell("plain", "plain_hopper"), *(cell(change, "ours", "plain_hopper") for change in NAMED)]
                lines.append([f"{d}", f"{N:,}", way + KINDS[kind], f"{statistics.median(plain[0]['ms']):.2f}",
                              *(cell(change, "fa2" if change in NAMED else "ours") for change in WORDS),
                              cell("bias", "ours_without_dbias"),
                              cell("plain", "torch_flash"), cell("bias", "torch_mask"), cell("rotary", "before"),
                              cell("softcap", "fa3"),
                              *(cell(change, "flex") for change in ("alibi", "softcap", "bias")),
                              *(hopper if with_hopper else [])])
    of_hopper = ["plain hopper", "ALiBi, in % of it", "soft cap, in % of it"] if with_hopper else []
    rest = "all but the first and the last two" if with_hopper else "all but the first"
    return Table("scores", ["d", "N", "pass", "plain, ms", *WORDS.values(), "bias, no dbias", "PyTorch plain",
                            "PyTorch attn_mask", "turned before", "FlashAttention-3 soft cap", "Flex ALiBi",
                            "Flex soft cap", "Flex bias", *of_hopper], lines, PAGE,
                 f"Medians on {device}, {rest} in % of the plain kernel's time, round by round.")
