"""When splitting pays: the charts and the table of the walk, from what decode_bench.py has recorded."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figure import Bound, Chart, Line, Lines, Point, Role, Table
from results import Spread

RECORDED = Path(__file__).resolve().parents[1] / "results/decode.json"
PAGE = "beyond/decode/README.md"
HEADS = ((32, 8, 128), (32, 32, 64))  # query heads, key heads, d
BATCHES = (1, 8, 64)
OTHERS = {"fa3": "FlashAttention-3, split keys", "cudnn": "cuDNN", "flash": "FlashAttention-2, PyTorch"}
Row = dict[str, Any]


def charts() -> list[Chart | Table]:
    if not RECORDED.is_file():
        return []
    data = json.loads(RECORDED.read_text(encoding="utf-8"))
    rows = [row for row in data["rows"] if "ms" in row]
    device, roof = data["context"]["device"], data["roof"]["GB_per_s"]
    said = f"{device} · bf16 · bytes: those of K and V, each read once"
    return [context(rows, said, roof), parts(rows, said, roof), table(rows, device, roof), queries(rows, device)]


def of(rows: Sequence[Row], **where: object) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def setting(heads: tuple[int, int, int]) -> Row:
    return dict(zip(("Hq", "Hkv", "d"), heads))


def bandwidth(row: Row) -> Spread:
    """GB/s: the median and the quartiles of the rounds."""
    low, mid, high = statistics.quantiles((1e-6 * row["bytes"] / ms for ms in row["ms"]), method="inclusive")
    return Spread(mid, low, high)


def against(rows: Sequence[Row], x: str, label: str, role: Role = "this", unit: int = 1) -> Line:
    return Line(label, [Point(row[x] / unit, bandwidth(row)) for row in sorted(rows, key=lambda row: row[x])], role)


def ratio(ours: Row, theirs: Row) -> float:
    """Speed of ours relative to theirs, round by round."""
    return statistics.median(b / a for a, b in zip(ours["ms"], theirs["ms"]))


def context(rows: Sequence[Row], said: str, roof: float) -> Chart:
    panels = []
    for B in BATCHES:
        here = of(rows, kind="main", B=B, **setting(HEADS[0]))
        lines = [against(of(here, who="ours"), "N", "decode", unit=1024),
                 against(of(here, who="ours_1"), "N", "one part", "previous", 1024)]
        lines += [against(found, "N", label, "peer", 1024) for who, label in OTHERS.items() if (found := of(here, who=who))]
        panels.append(Lines("GB/s", lines, "Ki tokens in the cache", bounds=[Bound("read bandwidth", roof)], y_scale="linear",
                            where=f"{B} sequence{'s' if B > 1 else ''}"))
    return Chart("decode_context", "Decoding: 32 query heads on 8 key heads, d = 128", panels, said,
                 "One part a head needs many sequences to fill the GPU; split keys need only a long cache.")


def parts(rows: Sequence[Row], said: str, roof: float) -> Chart:
    lines = []
    for B, N in ((1, 16384), (8, 16384), (1, 131072)):
        here = [row for row in of(rows, kind="parts", B=B, N=N) if row["who"] != "ours"]
        lines.append(against(here, "splits", f"{B} × {N // 1024} Ki tokens"))
    return Chart("decode_parts", "Decoding: what it costs to miss the number of parts",
                 [Lines("GB/s", lines, "parts of a head's keys", bounds=[Bound("read bandwidth", roof)], y_scale="linear")],
                 said, "The shorter the cache and the fewer the sequences, the more a wrong number costs.")


def table(rows: Sequence[Row], device: str, roof: float) -> Table:
    others = {who: label for who, label in OTHERS.items() if of(rows, kind="main", who=who)}
    lines = []
    for heads in HEADS:
        for B in BATCHES:
            for row in sorted(of(rows, kind="main", who="ours", B=B, **setting(heads)), key=lambda row: row["N"]):
                here = of(rows, kind="main", B=B, N=row["N"], **setting(heads))

                def beside(who: str, row: Row = row, here: Sequence[Row] = here) -> str:
                    found = of(here, who=who)
                    return f"{ratio(row, found[0]):.2f}" if found else "–"

                paged = of(here, who="ours_paged")
                speed = bandwidth(row).mid
                lines.append([f"{heads[0]} / {heads[1]}, {heads[2]}", str(B), f"{row['N']:,}", f"{row['bytes'] / 2**20:,.0f}",
                              str(row["splits"]), f"{speed:,.0f}", f"{100 * speed / roof:.0f} %", beside("read"),
                              f"{ratio(paged[0], row):.2f}" if paged else "–", *(beside(who) for who in ("ours_1", *others))])
    return Table("decode", ["heads, d", "sequences", "tokens", "MiB", "parts", "GB/s", "of reading", "/ as many bytes", "in pages", "/ one part",
                            *(f"/ {label.split(',')[0]}" for label in others.values())], lines, PAGE,
                 f"Medians on {device}, which reads {roof:,.0f} GB/s. From */ as many bytes* on: multiples of speed; "
                 "*as many bytes* is a kernel that reads them, and nothing else.")


def queries(rows: Sequence[Row], device: str) -> Table:
    """What more queries take, and the keys that come with them: in percent of the time, round by round."""
    lines = []
    for row in of(rows, kind="queries", who="ours"):
        here = of(rows, kind="queries", **{name: row[name] for name in ("B", "Hq", "Hkv", "Nq", "d", "N")})

        def percent(who: str, than: str, here: Sequence[Row] = here) -> str:
            one, other = of(here, who=who), of(here, who=than)
            return f"{100 * ratio(other[0], one[0]):.0f} %" if one and other else "–"

        lines.append([f"{row['Hq']} / {row['Hkv']}, {row['d']}", str(row["B"]), f"{row['N']:,}", str(row["Nq"]),
                      str(row["splits"]), f"{bandwidth(row).mid:,.0f}", percent("ours", "ours_last"),
                      percent("ours_appends", "ours"), percent("ours_paged", "ours"), percent("ours_paged_appends", "ours_paged"),
                      percent("ours", "fa3")])
    return Table("decode_queries", ["heads, d", "sequences", "tokens", "queries", "parts", "GB/s", "of one query's time",
                                    "appending", "in pages", "appending in pages", "of FlashAttention-3's time"], lines, PAGE,
                 f"Medians on {device}; time in percent, round by round: of the same call for the last query alone, of the call "
                 "that appends nothing, of that without pages, of that in pages which appends nothing.")
