"""Draws the pictures of these pages; what ranks have to do is counted, pair by pair, or as ring_bench.py recorded it.

    python3 06_optimized/ring/pictures/draw.py
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
SPEC = importlib.util.spec_from_file_location("chapter_pictures", HERE.parents[1] / "pictures" / "draw.py")
assert SPEC and SPEC.loader
chapter = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(chapter)

P = 4
COLOURS = (chapter.BLUE, chapter.ORANGE, chapter.GREEN, chapter.PURPLE)
MUTED, GREY, DARK = chapter.MUTED, chapter.GREY, chapter.DARK_ORANGE
SMALL = "₀₁₂₃"


def owner(rank: int, step: int) -> int:
    return (rank - step) % P


def whole(p: chapter.Picture) -> str:
    return "\n".join([*p.parts, "</svg>"]) + "\n"


def travel() -> str:
    p = chapter.Picture(
        "travel",
        "Four ranks, four steps: queries stay, keys go round",
        "Each rank keeps its queries. In step 0 it has its own keys. In each step all keys move on by one rank, so that"
        " after four steps every rank has met the keys of every other. While a step computes, the keys are sent on.",
        "Queries stay, keys move on by one rank",
        332,
    )
    x0, y0, dx, dy = 168.0, 92.0, 146.0, 54.0
    p.text(40, 76, "stays", 12, fill=MUTED)
    for s in range(P):
        p.text(x0 + s * dx + 45, 76, f"step {s}", 12, "middle", fill=MUTED)
    for r in range(P):
        y = y0 + r * dy
        p.text(40, y + 23, f"rank {r}", 13)
        p.box(92, y, 50, 36, GREY, 0.15, f"Q{SMALL[r]}", 14)
        for s in range(P):
            o = owner(r, s)
            p.box(x0 + s * dx, y, 90, 36, COLOURS[o], 0.45, f"K{SMALL[o]}, V{SMALL[o]}", 14)
            if s + 1 < P and r + 1 < P:
                p.line(f"M{x0 + s * dx + 92:g} {y + 22:g} L{x0 + (s + 1) * dx - 10:g} {y + dy + 12:g}", COLOURS[o], 2)
                x, at = x0 + (s + 1) * dx - 4, y + dy + 16
                p.parts.append(f'<path d="M{x:g} {at:g} l-10 -1 l5 -8 Z" fill="{COLOURS[o]}"/>')
    p.text(40, 318, "Rank 3 sends to rank 0, which is not drawn. Each rank sends and receives at the same time.", 12, fill=MUTED)
    return whole(p)


def pairs(zigzag: bool, rank: int, step: int, block: int = 16) -> float:
    """Of a causal mask, in squares of a rank's queries by a rank's keys; the diagonal counts half."""
    def rows(r: int) -> list[int]:
        parts = (r, 2 * P - 1 - r) if zigzag else (2 * r, 2 * r + 1)
        return [part * block + i for part in parts for i in range(block)]
    seen = sum(1.0 if j < i else 0.5 if j == i else 0.0 for i in rows(rank) for j in rows(owner(rank, step)))
    return seen / (2 * block) ** 2


def balance() -> str:
    p = chapter.Picture(
        "balance",
        "Pairs for each rank and step, with contiguous blocks and with zigzag",
        "A causal mask, four ranks. Contiguous: each rank has half a square with its own keys; then rank 3 has three"
        " whole squares and rank 0 none. Zigzag: half a square for every rank in every step.",
        "Who has how much to do, in squares of N/P by N/P pairs",
        356,
    )
    for n, (zigzag, name) in enumerate(((False, "contiguous"), (True, "zigzag"))):
        x, y = 40.0 + 370 * n, 62.0
        p.text(x, y, f"{name}: who holds which eighth of the sequence", 12, fill=MUTED)
        for part in range(2 * P):
            r = (part if part < P else 2 * P - 1 - part) if zigzag else part // 2
            p.box(x + part * 39, y + 10, 36, 26, COLOURS[r], 0.45, str(r), 13)
        left, top, w, h = x + 64, y + 76, 60.0, 34.0
        total = slowest = 0.0
        for s in range(P):
            p.text(left + s * w + 27, top - 8, f"step {s}", 12, "middle", fill=MUTED)
            work = [pairs(zigzag, r, s) for r in range(P)]
            for r, size in enumerate(work):
                words = {0.0: "0", 0.5: "½", 1.0: "1"}[round(size, 9)]
                p.box(left + s * w, top + r * h, w - 6, h - 6, DARK, 0.05 + 0.55 * size, words, 14)
            total, slowest = total + sum(work), slowest + max(work)
        for r in range(P):
            p.text(left - 10, top + r * h + 19, f"rank {r}", 12, "end")
        p.text(x, top + P * h + 26, f"Sum of the slowest, step by step: {slowest:g} squares.", 13)
        p.text(x, top + P * h + 46, f"Of what all ranks could do then, {100 * total / P / slowest:.0f} % is done.", 13)
    return whole(p)


def sums() -> str:
    p = chapter.Picture(
        "sums",
        "The backward: sums of dK and dV follow their keys, one step behind",
        "Each rank computes what its queries give to the keys that are here, adds what the ranks before gave, and sends"
        " the sum on in the next step. After the last step the sums are one rank short of home. The way of rank 0's keys"
        " and their sums is in strong colour.",
        "The way of K₀ and V₀, and of the sums dK₀ and dV₀",
        376,
    )
    x0, y0, dx, dy = 120.0, 92.0, 126.0, 62.0
    for s in range(P + 1):
        p.text(x0 + s * dx + 46, 76, f"step {s}" if s < P else "the last move", 12, "middle", fill=MUTED)
    for r in range(P):
        y = y0 + r * dy
        p.text(40, y + 28, f"rank {r}", 13)
        for s in range(P):
            o = owner(r, s)
            mine = o == 0
            p.box(x0 + s * dx, y, 92, 22, COLOURS[o], 0.6 if mine else 0.1, f"P, dS with K{SMALL[o]}", 12)
            given = f"dK{SMALL[o]}: rank {r}" if s == 0 else f"dK{SMALL[o]} += rank {r}"
            p.box(x0 + s * dx, y + 24, 92, 22, COLOURS[o], 0.35 if mine else 0.05, given, 12)
        o = owner(r, P)
        p.box(x0 + P * dx, y + 24, 92, 22, COLOURS[o], 0.35 if o == 0 else 0.05, f"dK{SMALL[o]} is home", 12)
    for s in range(P - 1):
        y = y0 + s * dy
        p.line(f"M{x0 + s * dx + 93:g} {y + 11:g} L{x0 + (s + 1) * dx - 2:g} {y + dy + 8:g}", COLOURS[0], 2)
        p.line(f"M{x0 + s * dx + 93:g} {y + 35:g} L{x0 + (s + 1) * dx - 2:g} {y + dy + 34:g}", DARK, 2, True)
    p.line(f"M{x0 + 3 * dx + 93:g} {y0 + 3 * dy + 35:g} L{x0 + P * dx - 2:g} {y0 + 35:g}", DARK, 2, True)
    p.text(40, 362, "Solid: keys and values. Dashed: sums, which leave when their keys have been computed with.", 12, fill=MUTED)
    return whole(p)


def timeline(N: int = 32768) -> str:
    """One call of forward and backward on two GPUs: what each of their two streams did when."""
    found = json.loads((HERE.parent / "results" / "ring.json").read_text(encoding="utf-8"))
    one = next(one for one in found["timelines"] if one["method"] == "ring" and one["N"] == N and one["Hkv"] == 16)
    row = next(row for row in found["rows"] if row["method"] == "ring" and row["causal"] and not row.get("alone")
               and (row["N"], row["Hkv"]) == (N, 16))["forward+backward"]
    p = chapter.Picture(
        "timeline",
        f"Two GPUs, {N:,} tokens: when each computes, and when messages are under way",
        "For each of two ranks two rows: what it computes, step by step, and the messages of these steps. Messages are short"
        " and lie under the products, except for the last move of dK and dV, during which only dQ is rounded. Rank 1"
        " is the faster one and waits there for rank 0.",
        f"Two H200, {N:,} tokens, causal: one forward and backward",
        344,
    )
    end = max(rank["steps"][-1]["compute"][1] for rank in one["ranks"])
    x0, width = 128.0, 600.0

    def at(ms: float) -> float:
        return x0 + width * ms / end

    for r, rank in enumerate(one["ranks"]):
        top = 70.0 + 98 * r
        p.text(24, top + 38, f"rank {r}", 13)
        p.text(x0 - 8, top + 20, "computes", 12, "end", fill=MUTED)
        p.text(x0 - 8, top + 58, "messages", 12, "end", fill=MUTED)
        forward, first, second, last = rank["steps"][:4]
        # The forward's second step sends nothing; it ends, with O's rounding, where the backward begins.
        computed = [("forward 1", forward["compute"], chapter.BLUE),
                    ("2", [forward["compute"][1], first["compute"][0]], chapter.BLUE),
                    ("backward 1", first["compute"], chapter.ORANGE), ("backward 2", second["compute"], chapter.ORANGE)]
        for words, (start, stop), colour in computed:
            p.box(at(start), top, at(stop) - at(start) - 1, 32, colour, 0.4, words, 12)
        for step in (forward, first, second):
            start, stop = step["copy"]
            p.box(at(start), top + 42, at(stop) - at(start), 24, chapter.GREEN, 0.5)
        start, stop = last["copy"]
        p.box(at(start), top + 42, at(stop) - at(start), 24, chapter.GREEN, 0.5, dashed=stop - start > 1)
    bottom = 70.0 + 2 * 98
    p.line(f"M{x0:g} {bottom - 8:g} H{x0 + width:g}", MUTED)
    for ms in range(0, int(end) + 1, 3):
        p.line(f"M{at(ms):g} {bottom - 8:g} v5", MUTED)
        p.text(at(ms), bottom + 10, f"{ms} ms" if ms else "0", 12, "middle", fill=MUTED)
    merged, sent = row["silent_ms"] - row["share_ms"], row["ms"] - row["silent_ms"]
    p.text(24, bottom + 40, f"Of {row['ms']:.1f} ms, the slower rank's products alone take {row['share_ms']:.1f}; merges, sums and "
           f"rounding take {merged:.1f}, messages {sent:.1f}.", 12, fill=MUTED)
    p.text(24, bottom + 58, "The numbers are the steps. Dashed: rank 1, the faster one in this call, also waits for rank 0.", 12, fill=MUTED)
    return whole(p)


def pictures() -> dict[str, str]:
    return {"travel.svg": travel(), "balance.svg": balance(), "sums.svg": sums(), "timeline.svg": timeline()}


if __name__ == "__main__":
    for file, drawn in pictures().items():
        (HERE / file).write_text(drawn, encoding="utf-8")
