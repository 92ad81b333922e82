"""The charts and tables of the ring, from what ring_bench.py has recorded; and what model.py computes from it."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import model as many  # noqa: E402
from figure import Bound, Chart, Line, Lines, Point, Role, Table  # noqa: E402
from results import Spread  # noqa: E402

PAGE, FURTHER = "ring/README.md", "ring/more_gpus.md"
PASSES = (many.FORWARD, many.BOTH)
SHOWN: dict[str, tuple[str, Role]] = {"ring": ("ring", "this"), "gather": ("all keys first", "previous"),
                                      "heads": ("heads for rows", "peer")}
GIB = 1024 ** 3
SHORTEST, SHORTEST_IN_MEMORY = 16384, 131072  # sequences of the two charts
Row = dict[str, Any]


def charts() -> list[Chart | Table]:
    if not many.RECORDED.is_file():
        return []
    found = many.read()
    rows = [row for row in found["rows"] if "forward" in row and not row.get("alone")]
    one = rows[0]
    machine = f"{one['ranks']} {one['machines'][0].split(',')[0]}"
    said = (f"{machine} · bf16 · {one['Hq']} heads and as many key heads, d = {one['d']} · causal, zigzag · share: the plain "
            "kernel on a rank's own pairs, alone")
    four = many.on_four()
    in_words = f"2 and 4 {one['machines'][0].split(',')[0]}, bf16, {one['Hq']} heads, d = {one['d']}"
    return [by_length(rows, said), table([*rows, *four["rows"]], in_words), rivals([*rows, *four["rows"]], in_words),
            memory(found), predicted(found, four, in_words),
            with_many(found)]


def of(rows: Sequence[Row], **where: object) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def share(row: Row, way: str) -> list[float]:
    """Of each round, the share's time by the method's own."""
    return [alone / ms for alone, ms in zip(row[way]["share_rounds"], row[way]["rounds"], strict=True)]


def lost(row: Row, way: str) -> Spread:
    """Of the time, in percent: median and quartiles of the rounds."""
    rounds = [100 - 100 * x for x in share(row, way)]
    low, mid, high = statistics.quantiles(rounds, method="inclusive") if len(rounds) > 1 else rounds * 3
    return Spread(mid, low, high)


def by_length(rows: Sequence[Row], said: str) -> Chart:
    panels = []
    for way in PASSES:
        lines = []
        for method, (label, role) in SHOWN.items():
            here = sorted((row for row in of(rows, method=method, causal=True, Hkv=rows[0]["Hkv"]) if row["N"] >= SHORTEST),
                          key=lambda row: row["N"])
            if len(here) > 1:
                lines.append(Line(label, [Point(row["N"] / 1024, lost(row, way)) for row in here], role))
        panels.append(Lines("% of the time lost", lines, "Ki tokens, all ranks together", y_scale="linear",
                            where=way.replace("+", " and ")))
    return Chart("ring_lost", "What two GPUs lose" if rows[0]["ranks"] == 2 else "What several GPUs lose", panels, said,
                 "Products grow with the square of N, messages and merges with N: the longer the sequence, the less is lost.")


def table(rows: Sequence[Row], machine: str) -> Table:
    lines = []
    for row in sorted(of(rows, method="ring"), key=lambda row: (row["ranks"], not row["causal"], -row["Hkv"], row["N"])):
        here = of(rows, N=row["N"], Hkv=row["Hkv"], causal=row["causal"], ranks=row["ranks"])
        theirs = [other for other in here if other["method"].startswith("PyTorch")]

        def beside(way: str, row: Row = row, theirs: Sequence[Row] = theirs) -> str:
            if not theirs or way not in row:
                return "–"
            best = min(theirs, key=lambda other: other[way]["ms"])
            return f"{statistics.median(b / a for a, b in zip(row[way]['rounds'], best[way]['rounds'])):.2f}"

        lines.append([str(row["ranks"]), "causal" if row["causal"] else "none", f"{row['N']:,}", str(row["Hkv"]),
                      *(f"{row[way]['ms']:.1f}" if way in row else "–" for way in PASSES),
                      *(f"{100 * statistics.median(share(row, way)):.0f} %" if way in row else "–" for way in PASSES),
                      *map(beside, PASSES)])
    return Table("ring", ["GPUs", "mask", "N", "key heads", "forward, ms", "both, ms", "share", "of both", "/ PyTorch", "both"],
                 lines, PAGE, f"Medians on {machine}; *both*: forward and backward; */ PyTorch*: its context "
                 "parallelism's time by ours.")


def rivals(rows: Sequence[Row], machine: str) -> Table:
    """Where all keys were gathered, too."""
    lines = []
    for row in sorted(of(rows, method="gather"), key=lambda row: (row["ranks"], not row["causal"], -row["Hkv"], row["N"])):
        if row["N"] < SHORTEST:
            continue
        same = of(rows, N=row["N"], Hkv=row["Hkv"], causal=row["causal"], ranks=row["ranks"])
        cells = []
        for way in PASSES:
            ms = [min((one[way]["ms"] for one in of(same, method=name) if way in one), default=None) for name in SHOWN]
            cells += ["–" if one is None else f"**{one:.1f}**" if one == min(x for x in ms if x) else f"{one:.1f}" for one in ms]
        lines.append(["causal" if row["causal"] else "none", str(row["ranks"]), f"{row['N']:,}", str(row["Hkv"]), *cells])
    return Table("ring_rivals", ["mask", "GPUs", "N", "key heads", "forward: ring", "all keys", "heads", "both: ring", "all keys",
                                 "heads"], lines, PAGE, f"Milliseconds, medians on {machine}; the least in bold.")


def tokens(N: int) -> str:
    return f"{N >> 20} Mi" if N >> 20 else f"{N >> 10} Ki"


def exact(value: float) -> Spread:
    return Spread(value, value, value)


def memory(found: dict[str, Any]) -> Chart:
    rows = [row for row in found["rows"] if row.get("alone") and row["title"].startswith("alone, memory")]
    lines = []
    for N in sorted({row["N"] for row in rows if row["N"] >= SHORTEST_IN_MEMORY}, reverse=True):
        here = sorted((row for row in rows if row["N"] == N), key=lambda row: row["ranks"])
        lines.append(Line(f"{tokens(N)} tokens", [Point(row["ranks"], exact(row["bytes_used_on_gpu"] / GIB)) for row in here]))
    machine = rows[0]["machines"][0].split(",")[0]
    return Chart("ring_memory", "A rank's memory", [Lines("GiB", lines, "ranks", where="forward and backward")],
                 f"{machine} · one process as a rank of P, without messages · bf16 · {rows[0]['Hq']} heads and as many key "
                 f"heads, d = {rows[0]['d']} · in use on the GPU, as the driver says",
                 "Equal N / P, equal memory. The lines flatten where CUDA's own half a GiB is most of it.")


def predicted(found: dict[str, Any], four: dict[str, Any], machine: str) -> Table:
    """What the model, which is made of two GPUs, says of the rows that were measured on two and on four."""
    made = many.model(found)
    lines: dict[tuple[int, bool, int, int], list[str]] = {}
    for row, way, ms, computed in [*many.predictions(found, made), *many.predictions(four, made)]:
        cells = lines.setdefault((row["ranks"], row["causal"], row["Hkv"], row["N"]),
                                 [str(row["ranks"]), "causal" if row["causal"] else "none", f"{row['N']:,}", str(row["Hkv"]),
                                  *["–"] * 6])
        at = 4 + 3 * PASSES.index(way)
        cells[at:at + 3] = [f"{ms:.2f}", f"{computed:.2f}", f"{100 * (computed / ms - 1):+.1f} %"]
    return Table("ring_model", ["GPUs", "mask", "N", "key heads", "forward, ms", "model", "off by", "both, ms", "model", "off by"],
                 list(lines.values()), FURTHER, f"Medians on {machine}; *both*: forward and backward.")


def with_many(found: dict[str, Any]) -> Chart:
    made = many.model(found)
    panels = []
    across = made.across_hosts()
    for link, where in ((made.link, "all GPUs on one NVLink"), (across, "hosts of eight GPUs")):
        lines = []
        for N, Hkv, role in ((1048576, 16, "this"), (1048576, 2, "peer"), (131072, 16, "previous")):
            points = [Point(P, exact(made.worth(N, P, (True, Hkv), many.BOTH, link if P > 8 else made.link)))
                      for P in made.ranks(N, (True, Hkv)) if P <= 1024]
            lines.append(Line(f"{tokens(N)}, {Hkv} key heads", points, role))
        panels.append(Lines("% of P GPUs' worth", lines, "GPUs, P", bounds=[Bound("half", 50.0)], y_scale="linear", where=where))
    return Chart("ring_many", "Computed, not measured: what more GPUs would be worth", panels,
                 "100 %: P times one GPU's rate on the longest sequence measured · forward and backward, causal, zigzag, bf16, 16 heads, d = 128 · steps as "
                 f"one {found['rows'][0]['machines'][0].split(',')[0]} computes them; messages {made.link.words()}, between "
                 f"hosts {across.words()}",
                 "Each further GPU has fewer tokens: its products shrink with their square, its messages only with their number.")
