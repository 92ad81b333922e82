"""Draws the pictures of this chapter, both halves.

    python3 06_optimized/pictures/draw.py

Bars of time are drawn from the counts of the chapter (cycles for 64 rows by 128 keys, d = 128: 512 for each product,
512 for the exponentials), not from measurements; those of the backward from the order of its code, backward_step().
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BLUE, ORANGE, GREEN, DARK_ORANGE, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#8a8a8a"
MUTED = "#555555"
AS_TEXT = {DARK_ORANGE: "#A64500", GREEN: "#00704F", GREY: "#6b6b6b"}  # thin strokes need more contrast than boxes


class Picture:
    def __init__(self, name: str, title: str, desc: str, heading: str, height: int, width: int = 760) -> None:
        self.name, self.width = name, width
        self.parts = [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#222222" role="img">'
            ),
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(desc)}</desc>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="#fcfcfa" stroke="#d8d8d8"/>',
        ]
        self.text(24, 34, heading, 18, bold=True)

    def text(
        self, x: float, y: float, words: str, size: int = 13, anchor: str = "start", bold: bool = False, fill: str = ""
    ) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
            + (' font-weight="bold"' if bold else "")
            + (f' fill="{AS_TEXT.get(fill, fill)}"' if fill else "")
            + f">{escape(words)}</text>"
        )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        colour: str,
        opacity: float = 0.35,
        label: str = "",
        size: int = 12,
        below: str = "",
        dashed: bool = False,
    ) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        fill = "#ffffff" if dashed else colour
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}"'
            f' fill-opacity="{1 if dashed else opacity:g}" stroke="{colour}" stroke-width="1"{dash}/>'
        )
        if label:
            self.text(
                x + w / 2,
                y + h / 2 + (size * 0.36 if not below else -2),
                label,
                size,
                "middle",
                fill=MUTED if dashed else "",
            )
        if below:
            self.text(x + w / 2, y + h / 2 + size, below, size - 1, "middle")

    def line(self, path: str, colour: str = "#d8d8d8", width: float = 1, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dash}/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str = MUTED) -> None:
        """Horizontal or vertical."""
        dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
        self.line(f"M{x1:g} {y1:g} L{x2:g} {y2:g}", colour, 1.2)
        self.parts.append(
            f'<path d="M{x2:g} {y2:g} L{x2 - 7 * dx - 4 * dy:g} {y2 - 7 * dy - 4 * dx:g} '
            f'L{x2 - 7 * dx + 4 * dy:g} {y2 - 7 * dy + 4 * dx:g} Z" fill="{colour}" stroke="none"/>'
        )

    def write(self) -> None:
        (HERE / f"{self.name}.svg").write_text("\n".join([*self.parts, "</svg>"]) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- timelines

WORK = {
    "S": (BLUE, "S = Q Kᵀ"),
    "O": (GREEN, "O += P V"),
    "P": (ORANGE, "softmax"),
    "c": (PURPLE, "copy"),
    "e": (GREY, "start or end of a tile"),
    "m": (DARK_ORANGE, "row maximum"),
}
Bar = tuple[float, float, str, str]  # begin, end, kind, label


def lane(p: Picture, y: float, name: str, bars: list[Bar], left: float, scale: float, height: float = 24) -> None:
    p.text(left - 8, y + height / 2 + 5, name, 12, "end")
    for begin, end, kind, label in bars:
        if kind == "idle":
            p.box(left + begin * scale, y, (end - begin) * scale, height, "#bbbbbb", label=label, size=11, dashed=True)
        else:
            p.box(
                left + begin * scale,
                y,
                (end - begin) * scale,
                height,
                WORK[kind][0],
                0.62 if label.startswith("A") or not label.startswith("B") else 0.25,
                label,
                11,
            )


def idle(bars: list[Bar], begin: float, end: float) -> list[Bar]:
    """The bars with the gaps between them filled in."""
    full, at = [], begin
    for bar in sorted(bars):
        if bar[0] > at:
            full.append((at, bar[0], "idle", "idle" if bar[0] - at > 200 else ""))
        full.append(bar)
        at = bar[1]
    if at < end:
        full.append((at, end, "idle", "idle" if end - at > 200 else ""))
    return full


def legend(p: Picture, y: float, kinds: str, x: float = 130) -> None:
    for kind in kinds:
        p.box(x, y - 11, 16, 13, WORK[kind][0], 0.5)
        p.text(x + 22, y, WORK[kind][1], 12)
        x += 34 + 7 * len(WORK[kind][1]) + 14


# ---------------------------------------------------------------- the pictures


def tiny() -> None:
    p = Picture(
        "tiny",
        "The tiny problem in a fragment",
        "A block C of 16 by 8. Row 3 lies in lanes 12 to 15: lane 12 holds keys 0 and 1, lane 13 keys 2 and 3. Lanes"
        " 14 and 15 and all other rows hold nothing of the problem.",
        "S of the tiny problem in one 16 × 8 block C",
        420,
    )
    x0, y0, w, h = 136.0, 84.0, 62.0, 18.0
    S = ((1, 0, 1, 1), (0, 1, 1, -1), (1, 1, 2, 0), (2, -1, 1, 3))
    for c in range(8):
        p.text(x0 + w * (c + 0.5), y0 - 8, f"key {c}" if c < 4 else "–", 12, "middle", fill="" if c < 4 else MUTED)
    for r in range(16):
        p.text(
            x0 - 12,
            y0 + h * (r + 0.72),
            f"query {r}" if r < 4 else ("no query" if r in (4, 8) else ""),
            12,
            "end",
            fill="" if r < 4 else MUTED,
        )
        for t in range(4):
            lane_no, inside = 4 * (r % 8) + t, r < 4 and t < 2
            p.box(
                x0 + 2 * w * t,
                y0 + h * r,
                2 * w,
                h,
                BLUE if inside else "#bbbbbb",
                0.55 if r == 3 and t < 2 else 0.25 if inside else 0.08,
            )
            if inside:
                for e in range(2):
                    p.text(
                        x0 + w * (2 * t + e + 0.5),
                        y0 + h * (r + 0.75),
                        f"{S[r][2 * t + e]}".replace("-", "−"),
                        13,
                        "middle",
                        bold=r == 3,
                    )
            else:
                p.text(x0 + 2 * w * (t + 0.5), y0 + h * (r + 0.73), f"lane {lane_no}", 11, "middle", fill=GREY)
    xr = x0 + 8 * w + 14
    p.text(xr, y0 + h * 0.75, "lanes 0 – 3", 12)
    p.text(xr, y0 + h * 3.75, "lanes 12 – 15", 12, bold=True)
    p.text(xr, y0 + h * 7.75, "lanes 28 – 31", 12)
    p.text(xr, y0 + h * 8.75, "lanes 0 – 3 again", 12)
    p.line(f"M{x0 - 6} {y0 + 8 * h} h{8 * w + 12}", MUTED, 1.5)
    p.text(
        24,
        398,
        "Above the line: numbers C[0] and C[1] of a lane. Below: C[2] and C[3]. q · k, before the scale;"
        " columns 4 to 7 are set to −∞.",
        12,
        fill=MUTED,
    )
    p.write()


def roof() -> None:
    p = Picture(
        "roof",
        "Cycles of the units of an SM for a tile of 128 by 128",
        "Tensor cores 1024, 2048, 4096 cycles for d = 64, 128, 256; exponentials 1024 each time; shared memory 896,"
        " 1792, 3584; issue slots 640, 704, 832 at least.",
        "A tile of 128 queries × 128 keys: cycles of each unit of an SM",
        376,
    )
    rows = (
        ("tensor cores", BLUE, lambda d: 16 * d),
        ("exponentials", ORANGE, lambda d: 1024),
        ("shared memory", PURPLE, lambda d: 14 * d),
        ("issue slots, at least", GREY, lambda d: 576 + d),
    )
    left, scale, y = 176.0, 0.122, 62.0
    for d in (64, 128, 256):
        p.text(24, y + 14, f"d = {d}", 14, bold=True)
        y += 0
        for name, colour, cycles in rows:
            n = cycles(d)
            p.text(left - 8, y + 13, name, 12, "end")
            p.box(left, y, n * scale, 18, colour, 0.55)
            p.text(left + n * scale + 6, y + 13, f"{n:,}", 12)
            y += 22
        y += 10
    p.text(
        24,
        362,
        "The longest bar is the least time if everything else hides behind it; the sum of the first two if"
        " nothing overlaps.",
        12,
        fill=MUTED,
    )
    p.write()


def ways() -> None:
    p = Picture(
        "ways",
        "How K and V reach the multipliers",
        "In rung 1 through registers to shared memory, then by loads of 32 and 16 bits to registers. In rungs 2 to 5 by"
        " cp.async to shared memory and ldmatrix to registers. In rung 6 by TMA to shared memory and ldmatrix to"
        " registers. From rung 7 by TMA to shared memory, which the tensor cores read themselves.",
        "The way of K and V",
        364,
    )
    cols = (
        ("device memory", 24),
        ("registers", 170),
        ("shared memory", 316),
        ("registers", 488),
        ("tensor cores", 652),
    )
    for name, x in cols:
        p.text(x + 42, 64, name, 12, "middle", bold=True)
    rows = (
        ("1", "plain loads", [("load", 0, 1), ("store", 1, 2), ("32, 16 bits", 2, 3), ("mma.sync", 3, 4)]),
        ("2 – 5", "", [("cp.async", 0, 2), ("ldmatrix", 2, 3), ("mma.sync", 3, 4)]),
        ("6", "", [("TMA", 0, 2), ("ldmatrix", 2, 3), ("mma.sync", 3, 4)]),
        ("7 – 14", "", [("TMA", 0, 2), ("wgmma", 2, 4)]),
    )
    for k, (name, _, hops) in enumerate(rows):
        y = 84.0 + 64 * k
        used = {0, 4} | {h for _, a, b in hops for h in (a, b)}
        for i, (_, x) in enumerate(cols):
            if i in used:
                p.box(x, y, 84, 34, (GREY, BLUE, PURPLE, BLUE, GREEN)[i], 0.3)
        p.text(cols[0][1] + 42, y + 22, f"rungs {name}" if "–" in name else f"rung {name}", 12, "middle")
        for label, a, b in hops:
            x1, x2 = cols[a][1] + 84.0, float(cols[b][1])
            p.arrow(x1 + 2, y + 24, x2 - 2, y + 24)
            p.text((x1 + x2) / 2, y + 14, label, 11 if x2 - x1 > 60 else 10, "middle")
    p.text(
        24,
        348,
        "S, P and O are in registers in all of them. Rung 2 has no ldmatrix yet and loads like rung 1.",
        12,
        fill=MUTED,
    )
    p.write()


def fragment() -> None:
    p = Picture(
        "fragment",
        "The fragments of mma.sync m16n8k16",
        "Two blocks of S side by side, 16 by 8 each, and below them the operand A, 16 by 16: the same lane holds the"
        " same places in both.",
        "Two blocks of S are the operand P",
        550,
    )
    w, h = 40.0, 13.0
    shades = (BLUE, ORANGE, GREEN, DARK_ORANGE)
    for top, kind in ((72.0, "S"), (314.0, "P")):
        for block in range(2):
            x0 = 190.0 + block * (4 * w + (26 if kind == "S" else 0))
            if kind == "S":
                p.text(
                    x0 + 2 * w,
                    top - 8,
                    f"S[{'2 k' if block == 0 else '2 k + 1'}]: keys {8 * block} – {8 * block + 7}",
                    12,
                    "middle",
                    bold=True,
                )
            for r in range(16):
                for t in range(4):
                    mine = (r % 8, t) == (2, 1)
                    p.box(x0 + w * t, top + h * r, w, h, shades[t], 0.95 if mine else 0.16)
                    if r in (0, 8) and not mine:
                        p.text(x0 + w * (t + 0.5), top + h * (r + 0.82), f"{t}", 11, "middle")
        p.text(178, top + h * 0.9, "row 0, lanes 0 – 3", 12, "end")
        p.text(178, top + h * 2.9, "row 2, lane 9", 12, "end", bold=True)
        p.text(178, top + h * 8.9, "row 8, lanes 0 – 3", 12, "end")
        p.text(178, top + h * 10.9, "row 10, lane 9", 12, "end", bold=True)
    p.text(190 + 4 * w, 306, "P, 16 × 16: the operand A of P V", 12, "middle", bold=True)
    for y, words in (
        (96, "lane 9 = 4 · 2 + 1: g = 2, t = 1"),
        (116, "in each block of S:"),
        (134, "C[0], C[1]  row 2"),
        (152, "C[2], C[3]  row 10"),
        (338, "the same lane, rounded in pairs:"),
        (356, "A[0] = S[2k] C[0], C[1]"),
        (374, "A[1] = S[2k] C[2], C[3]"),
        (392, "A[2] = S[2k+1] C[0], C[1]"),
        (410, "A[3] = S[2k+1] C[2], C[3]"),
    ):
        p.text(556, y, words, 12, bold=y in (96, 338))
    p.text(
        24,
        538,
        "A cell is two neighbouring numbers of one row; the digit is t = lane mod 4. No number changes its lane.",
        12,
        fill=MUTED,
    )
    p.write()


def pipeline() -> None:
    p = Picture(
        "pipeline",
        "Rungs 1 and 2 in time",
        "In rung 1 loading and multiplying alternate. In rung 2 the loads of the next tile run while this one is"
        " multiplied.",
        "A block of rung 1, and one of rung 2",
        262,
    )
    left, scale = 130.0, 0.15
    load, work = 420.0, 780.0
    for y, name in ((56.0, "rung 1"), (150.0, "rung 2")):
        p.text(24, y + 14, name, 14, bold=True)
        copies: list[Bar] = []
        products: list[Bar] = []
        at = 0.0
        for j in range(3):
            if name == "rung 1":
                copies.append((at, at + load, "c", f"tile {j}"))
                products.append((at + load, at + load + work, "S", f"tile {j}"))
                at += load + work
            else:
                begin = 0.0 if j == 0 else load + (j - 1) * work
                copies.append((begin, begin + load, "c", f"buffer {j % 2}"))
                products.append((load + j * work, load + (j + 1) * work, "S", f"tile {j}"))
        lane(p, y, "loads", copies, left, scale)
        lane(p, y + 30, "products, softmax", idle(products, 0, products[-1][1]), left, scale)
        if name == "rung 2":
            for j in range(3):
                x = left + (load + j * work) * scale
                p.line(f"M{x:g} {y - 6} v66", DARK_ORANGE, 1.5, True)
            p.text(
                left + load * scale,
                y + 76,
                "the barrier: the tile is there, and nobody reads the other buffer",
                12,
                fill=DARK_ORANGE,
            )
    p.text(24, 248, "The lengths are made up; only the order is meant.", 12, fill=MUTED)
    p.write()


def swizzle() -> None:
    p = Picture(
        "swizzle",
        "The swizzle of rows of eight chunks",
        "Left: chunk 2 of eight rows lies in the same four banks. Right: with chunk c of row r at place c xor r, it "
        "lies in eight different groups of banks.",
        "Chunk 2 of eight rows: one group of banks, or eight",
        344,
    )
    for x0, name, swizzled in ((70.0, "chunk c at place c", False), (430.0, "chunk c at place c ^ (r mod 8)", True)):
        p.text(x0 + 132, 66, name, 14, "middle", bold=True)
        for place in range(8):
            p.text(x0 + 33 * place + 16, 88, f"{place}", 12, "middle", fill=MUTED)
        for r in range(8):
            p.text(x0 - 10, 112 + 24 * r, f"row {r}", 12, "end")
            for place in range(8):
                chunk = place ^ r if swizzled else place
                p.box(
                    x0 + 33 * place,
                    96 + 24 * r,
                    33,
                    24,
                    DARK_ORANGE if chunk == 2 else BLUE,
                    0.75 if chunk == 2 else 0.12,
                    f"{chunk}",
                )
    p.text(202, 312, "8 turns", 14, "middle", bold=True, fill=DARK_ORANGE)
    p.text(562, 312, "1 turn", 14, "middle", bold=True, fill=GREEN)
    p.text(24, 334, "A place is 16 bytes: 4 of the 32 banks. Eight places are all banks once.", 12, fill=MUTED)
    p.write()


def wide_warps() -> None:
    p = Picture(
        "wide_warps",
        "Rung 4: fragments multiplied twice, and two blocks on an SM",
        "Left: of a warp's 32 rows and 64 keys rung 3 reads 144 fragments, rung 4 reads 80, for 256 instructions of the "
        "tensor cores. Right: V of a tile arrives under S and the softmax, K of the next tile under P V; two blocks are "
        "out of step.",
        "Every fragment of K and V twice; one buffer each",
        282,
    )
    p.text(24, 68, "ldmatrix for 32 rows and 64 keys", 12, bold=True)
    for y, name, parts in ((82.0, "rung 3", (16, 64, 64)), (132.0, "rung 4", (16, 32, 32))):
        p.text(24, y + 20, name, 12)
        x = 70.0
        for count, what, colour in zip(parts, "QKV", (GREY, BLUE, GREEN)):
            p.box(x, y, 1.15 * count, 30, colour, 0.4, what if count > 20 else "")
            x += 1.15 * count
        p.text(x + 6, y + 20, f"{sum(parts)}", 12, bold=True)
    p.text(70, 182, "Q grey: read as often as before", 12, fill=MUTED)
    p.text(70, 200, "256 mma.sync in both", 12, fill=MUTED)
    left, scale = 356.0, 0.118
    for name, y, shift in (("A", 60.0, 0.0), ("B", 132.0, 620.0)):
        copies: list[Bar] = []
        work: list[Bar] = []
        for j in range(2):
            t = shift + 1500 * j
            if t + 1000 <= 3200:
                copies.append((t, t + 420, "c", "V"))
            copies.append((t + 1000, min(t + 1420, 3200), "c", "next K" if t + 1420 <= 3200 else ""))
            work += [
                (t, t + 500, "S", f"{name} S"),
                (t + 500, t + 1000, "P", f"{name} softmax"),
                (t + 1000, min(t + 1500, 3200), "O", f"{name} P V" if t + 1400 < 3200 else ""),
            ]
        p.text(left - 54, y + 26, f"block {name}", 12, bold=True)
        lane(p, y, "", [b for b in copies if b[1] > b[0]], left, scale, 20)
        lane(p, y + 24, "", [b for b in work if b[1] > b[0]], left, scale)
    legend(p, 208, "cSPO", left)
    p.text(left, 234, "While A is in the softmax, B multiplies. Nobody arranges it;", 12, fill=MUTED)
    p.text(left, 250, "two blocks on an SM drift apart by themselves.", 12, fill=MUTED)
    p.text(left, 268, "The lengths are made up; only the order is meant.", 12, fill=MUTED)
    p.write()


def two_loops() -> None:
    p = Picture(
        "two_loops",
        "Rung 5: masked tiles first, and the order of the blocks",
        "Left: each row of tiles is visited from its right end; only the first tile visited is on the diagonal, and has "
        "a mask. Right: blocks take the last row of tiles of every head of a section, then the one before.",
        "From the right end; the longest rows of tiles first",
        326,
    )
    x0, y0, s = 60.0, 84.0, 28.0
    p.text(x0 + 3.5 * s, 72, "tiles of keys, causal mask", 12, "middle", bold=True)
    for r in range(5):
        last = r + 2
        for c in range(7):
            seen, masked = c <= last, c == last
            p.box(
                x0 + s * c,
                y0 + s * r,
                s,
                s,
                DARK_ORANGE if masked else BLUE if seen else "#bbbbbb",
                0.6 if masked else 0.22 if seen else 0.04,
                f"{last - c + 1}" if seen else "",
            )
    p.text(x0, y0 + 5 * s + 22, "number: the order in a row of tiles", 12)
    p.text(x0, y0 + 5 * s + 40, "dark orange: the loop with the mask", 12, fill=DARK_ORANGE)
    p.text(x0, y0 + 5 * s + 58, "blue: the loop without one", 12, fill=BLUE)
    x1, wide = 420.0, 84.0
    p.text(x1 + 1.5 * wide, 72, "a section of three heads", 12, "middle", bold=True)
    for r in range(5):
        p.text(x1 - 10, y0 + s * r + 18, f"{r + 3} tiles", 12, "end")
        for head in range(3):
            n = 3 * (4 - r) + head
            p.box(x1 + wide * head, y0 + s * r, wide, s, BLUE, 0.08 + 0.08 * r, f"block {n}")
    for head in range(3):
        p.text(x1 + wide * (head + 0.5), y0 + 5 * s + 20, f"head {head}", 12, "middle", fill=MUTED)
    p.text(x1 - 64, y0 + 5 * s + 46, "Blocks begin in the order of their numbers: the longest first,", 12)
    p.text(x1 - 64, y0 + 5 * s + 64, "the short ones fill the gaps at the end. Then the next section.", 12)
    footnote = "Drawn with one tile on the diagonal of each row; tiles of 128 queries and 64 keys have two."
    p.text(24, 314, footnote, 12, fill=MUTED)
    p.write()


def box_of_a_tile(p: Picture, x: float, y: float, w: float, rows: int) -> None:
    """The first rows of a box of 64 columns: eight chunks each, swizzled; chunk 2 is marked."""
    for r in range(rows):
        for c in range(8):
            marked = c ^ r == 2
            p.box(x + w / 8 * c, y + 18 * r, w / 8, 18, BLUE if marked else ORANGE, 0.7 if marked else 0.16, f"{c ^ r}", 11)


def tma() -> None:
    p = Picture(
        "tma",
        "Rung 6: a tile as two boxes, and what a barrier counts",
        "A tile of K, 128 rows and 128 columns, is two boxes of 64 columns. A barrier counts one arrival and 65,536 bytes; "
        "when the last of four boxes has landed its phase ends, and who waits for phase 0 goes on.",
        "Rung 6: a tile is two boxes, a barrier counts their bytes",
        440,
    )
    for k, (x, name) in enumerate(((40.0, "box 0: columns 0 – 63"), (250.0, "box 1: columns 64 – 127"))):
        p.text(x + 90, 66, name, 12, "middle", bold=True)
        box_of_a_tile(p, x, 76, 180, 4)
        p.text(x + 90, 166, "… 128 rows of 128 bytes" + (", 16 KiB" if k == 0 else ""), 12, "middle", fill=MUTED)
    p.text(462, 88, "The engine writes chunk c of row r", 12)
    p.text(462, 108, "at place c ^ (r mod 8): it flips address bits", 12)
    p.text(462, 128, "4 – 6 (the chunk) by bits 7 – 9 (the row).", 12)
    p.text(462, 154, "ldmatrix finds it by the same function.", 12)
    p.text(24, 204, "KV_full from the request to the end of its phase:", 13, bold=True)
    box = 128 * 128
    rows = [
        ("init(…, 1)", 1, 0, 0, "wait(…, 0) waits"),
        (f"arrive_expecting(…, {4 * box:,})", 0, 4 * box, 0, ""),
        *((f"box {n} of 4 lands", 0, (4 - n) * box, 0, "") for n in (1, 2, 3)),
        ("box 4 lands: nothing is missing", 1, 0, 1, "wait(…, 0) goes on"),
    ]
    columns = ((24, "what happens", "start"), (330, "arrivals missing", "middle"), (460, "bytes missing", "middle"),
               (560, "phase", "middle"), (620, "who waits", "start"))
    for x, head, anchor in columns:
        p.text(x, 230, head, 12, anchor, bold=True)
    for n, row in enumerate(rows):
        y = 252 + 25 * n
        if n == len(rows) - 1:
            p.box(16, y - 16, 728, 24, GREEN, 0.16)
        for (x, _, anchor), value in zip(columns, row):
            p.text(x, y, f"{value:,}" if isinstance(value, int) else value, 12, anchor)
    p.text(24, 420, "The next request, K and V of tile 1, is counted in phase 1, and waited for by wait(…, 1).", 12, fill=MUTED)
    p.write()


def wgmma() -> None:
    p = Picture(
        "wgmma",
        "Rung 7: what the two descriptors of a tile say, and the order in time",
        "For Q and K the stride leads from 8 rows to the next 8, and 16 columns are 32 bytes. For V it leads from 8 keys "
        "to the next 8, and the leading distance from 64 columns to the next 64, the next box. In time copy, S, softmax "
        "and P V follow each other.",
        "Rung 7: where a product finds its operands; everything waits for everything",
        430,
    )
    p.text(40, 64, "Q and K: the sum runs along a row", 13, bold=True)
    x, y = 110.0, 96.0
    for r in range(2):
        for c in range(4):
            p.box(x + 40 * c, y + 48 * r, 40, 44, BLUE if c == 1 else ORANGE, 0.45 if c == 1 else 0.16, f"{32 * c}", 12)
        p.text(x - 8, y + 48 * r + 27, f"rows {8 * r} – {8 * r + 7}", 12, "end")
    p.text(x + 80, 88, "128 bytes, 64 columns, before the swizzle", 12, "middle", fill=MUTED)
    p.arrow(x + 176, y + 10, x + 176, y + 58)
    p.text(x + 184, y + 32, "stride: 1024", 12)
    p.text(x + 184, y + 50, "to the next 8 rows", 12)
    p.text(40, 214, "The second of 8 instructions begins 32 bytes further.", 12)
    x = 440.0
    p.text(x - 20, 64, "V: the sum runs along the keys", 13, bold=True)
    for k in range(2):
        left = x + 60 + 130 * k
        p.text(left + 50, 88, f"box {k}", 12, "middle", fill=MUTED)
        for r in range(4):
            p.box(left, y + 24 * r, 100, 22, BLUE if r > 1 else ORANGE, 0.45 if r > 1 else 0.16)
            if k == 0:
                p.text(left - 6, y + 24 * r + 16, f"keys {8 * r} – {8 * r + 7}", 12, "end")
    p.arrow(x + 110, y + 60, x + 238, y + 60)
    p.text(x + 240, y + 116, "leading: a box, 128 · rows; stride: 1024", 12, "end")
    p.text(x - 20, 232, "The second of 8 begins 16 keys, 2048 bytes, further.", 12)
    left, scale, y = 110.0, 0.147, 290.0
    copies: list[Bar] = []
    tensor: list[Bar] = []
    warps: list[Bar] = []
    for j in range(2):
        t = 2048.0 * j
        copies.append((t, t + 512, "c", f"K, V {j}"))
        tensor += [(t + 512, t + 1024, "S", f"S {j}"), (t + 1536, t + 2048, "O", f"P V {j}")]
        warps.append((t + 1024, t + 1536, "P", f"softmax {j}"))
    p.text(24, 274, "In time:", 13, bold=True)
    lane(p, y, "copy engine", copies, left, scale)
    lane(p, y + 28, "tensor cores", idle(tensor, 0, 4096), left, scale)
    lane(p, y + 56, "warps", warps, left, scale)
    p.text(
        24,
        408,
        "One of the two blocks that fit on an SM. 512 cycles a product and a softmax; the copy is not to scale.",
        12,
        fill=MUTED,
    )
    p.write()


def descriptor() -> None:
    p = Picture(
        "descriptor",
        "The bits of an address in a swizzled tile, and the bits of a descriptor",
        "Of an address bits 0 to 3 are a byte of a chunk, bits 4 to 6 the chunk, bits 7 to 9 the row modulo 8. Bits 7 to 9 "
        "are xored into bits 4 to 6. A descriptor has the beginning in bits 0 to 13, the leading distance in bits 16 to "
        "29, the stride distance in bits 32 to 45, the base offset in bits 49 to 51, and the swizzle in bits 62 and 63.",
        "Row 5, chunk 2: ten bits of its address; and a descriptor",
        320,
    )
    width, y = 44.0, 92.0
    for bit in range(10):
        x = 540.0 - width * bit
        colour = GREEN if bit >= 7 else DARK_ORANGE if bit >= 4 else GREY
        p.text(x + width / 2, y - 8, f"{bit}", 12, "middle", fill=MUTED)
        p.box(x, y, width, 28, colour, 0.25, f"{5 * 128 + 2 * 16 >> bit & 1}", 13)
        p.box(x, y + 78, width, 28, colour, 0.25, f"{5 * 128 + 7 * 16 >> bit & 1}", 13)
    p.text(130, y + 19, "counted in rows", 12, "end")
    p.text(130, y + 97, "swizzled", 12, "end")
    p.text(540 - 7.5 * width, y + 48, "row mod 8", 13, "middle", fill=GREEN, bold=True)
    p.text(540 - 4.5 * width, y + 48, "chunk", 13, "middle", fill=DARK_ORANGE, bold=True)
    p.text(540 - 1 * width, y + 48, "byte of the chunk", 13, "middle", fill=MUTED)
    p.text(540 - 4.5 * width, y + 66, "chunk ^ row mod 8", 12, "middle", fill=DARK_ORANGE)
    p.text(600, y + 19, "byte 672", 12)
    p.text(600, y + 97, "byte 752", 12)
    y, scale = 246.0, 11.0
    for first, last, name, colour in (
        (0, 13, "beginning", BLUE),
        (16, 29, "leading", ORANGE),
        (32, 45, "stride", PURPLE),
        (49, 51, "base", GREY),
        (62, 63, "1", GREEN),
    ):
        x = 728 - scale * (last + 1)
        p.box(x, y, scale * (last + 1 - first), 28, colour, 0.35, name, 12)
        p.text(x + scale * (last + 1 - first) / 2, y + 44, f"{first} – {last}", 12, "middle", fill=MUTED)
    p.text(24, y - 10, "The descriptor, 64 bits", 13, bold=True)
    p.text(24, y + 66, "Beginning and distances count units of 16 bytes. Bits 62 and 63 name the swizzle, 1: of 128 bytes.", 12,
           fill=MUTED)
    p.write()


def proxies() -> None:
    p = Picture(
        "proxies",
        "What each of the two ways sees of a place in shared memory, over time",
        "Three timelines. Threads write and meet at a barrier, and a product reads: without a fence the engines may still see "
        "what was there before; with a fence before the barrier they see the new tile. A copy writes and threads wait at "
        "its mbarrier: that word carries both ways, and no fence is needed.",
        "One place in shared memory, as each way sees it",
        496,
    )
    left, right = 150.0, 736.0
    OLD, NEW = GREY, GREEN

    def seen(y: float, name: str, until: float, from_: float, what: str = "") -> None:
        p.text(left - 8, y + 16, name, 12, "end")
        p.box(left, y, until - left, 22, OLD, 0.18, "old", 11)
        if from_ > until:
            p.box(until, y, from_ - until, 22, DARK_ORANGE, 0.0, what, 11, dashed=True)
        if from_ < right:
            p.box(from_, y, right - from_, 22, NEW, 0.3, "new", 11)

    def does(y: float, name: str, bars: list[tuple[float, float, str, str]]) -> None:
        p.text(left - 8, y + 16, name, 12, "end")
        for x, w, colour, label in bars:
            p.box(x, y, w, 22, colour, 0.45, label, 11)

    y = 62.0
    p.text(24, y, "1  Threads write, a product reads; no fence: the barrier orders one way alone", 13, bold=True)
    does(y + 12, "threads", [(160, 90, BLUE, "write"), (330, 70, GREY, "barrier")])
    seen(y + 38, "threads see", 250, 250)
    seen(y + 64, "engines see", 250, right, "old or new: nobody has told them")
    does(y + 90, "product", [(420, 120, DARK_ORANGE, "reads: old?")])

    y = 206.0
    p.text(24, y, "1  The same with fence_async(), said by each writer before the barrier", 13, bold=True)
    does(y + 12, "threads", [(160, 90, BLUE, "write"), (255, 70, PURPLE, "fence"), (330, 70, GREY, "barrier")])
    seen(y + 38, "threads see", 250, 250)
    seen(y + 64, "engines see", 250, 325, "old or new")
    does(y + 90, "product", [(420, 120, GREEN, "reads: new")])
    p.line(f"M325 {y + 34} L325 {y + 86}", PURPLE, 1.2, dashed=True)

    y = 350.0
    p.text(24, y, "5  A copy writes, threads read: the engine says itself that it is done, to both", 13, bold=True)
    does(y + 12, "copy", [(200, 125, BLUE, "writes"), (330, 70, GREY, "mbarrier")])
    seen(y + 38, "engines see", 200, 325, "on its way")
    seen(y + 64, "threads see", 200, 400, "on its way, until wait() returns")
    does(y + 90, "threads", [(330, 70, GREY, "wait()"), (420, 120, GREEN, "read: new")])
    p.line(f"M400 {y + 34} L400 {y + 86}", GREY, 1.2, dashed=True)
    p.arrow(left, 476, right, 476)
    p.text(left - 8, 480, "time", 12, "end", fill=MUTED)
    p.write()


def ring() -> None:
    p = Picture(
        "ring",
        "Rung 8: a ring of two buffers, its barriers, and the order in time",
        "The loader waits for free and announces bytes on full; the warpgroup waits for full and arrives on free. The"
        " phase flips after each pass of the ring.",
        "Rung 8: two buffers, four barriers, two phases",
        470,
    )
    for i, x in enumerate((250.0, 430.0)):
        p.box(x, 66, 130, 50, ORANGE, 0.3, f"K[{i}]", 13, "128 × 128, 32 KiB")
        p.text(x + 65, 134, f"K_full[{i}]   K_free[{i}]", 12, "middle")
    p.box(24, 66, 130, 50, PURPLE, 0.3, "loader", 13, "one thread")
    p.box(606, 66, 130, 50, BLUE, 0.3, "warpgroup", 13, "128 threads")
    p.arrow(156, 80, 248, 80)
    p.text(202, 74, "fills", 11, "middle")
    p.arrow(562, 80, 604, 80)
    p.text(583, 74, "reads", 11, "middle")
    p.text(24, 152, "waits: free, phase ^ 1", 12)
    p.text(24, 168, "arrives: full, and 32,768 bytes", 12)
    p.text(736, 152, "waits: full, phase", 12, "end")
    p.text(736, 168, "arrives: free, 128 times", 12, "end")
    x0, y0 = 150.0, 208.0
    heads = ("tile", "buffer", "phase", "loader waits for free", "warpgroup waits for full")
    widths = (50, 60, 60, 210, 190)
    x = x0
    for name, w in zip(heads, widths):
        p.text(x + w / 2, y0, name, 12, "middle", bold=True)
        x += w
    rows = (
        (0, 0, 0, "1: passes at once", "0"),
        (1, 1, 0, "1: passes at once", "0"),
        (2, 0, 1, "0: tile 0 was read", "1"),
        (3, 1, 1, "0: tile 1 was read", "1"),
        (4, 0, 0, "1: tile 2 was read", "0"),
    )
    for k, row in enumerate(rows):
        x = x0
        p.line(f"M{x0} {y0 + 8 + 20 * k} h570")
        for value, w in zip(row, widths):
            p.text(x + w / 2, y0 + 23 + 20 * k, f"{value}", 12, "middle")
            x += w
    left, scale, y = 110.0, 0.142, 346.0
    copies: list[Bar] = [(0, 512, "c", "K, V 0"), (512, 768, "c", "K 1")]
    tensor: list[Bar] = []
    warps: list[Bar] = []
    for j in range(2):
        t = 512 + 1536.0 * j
        tensor += [(t, t + 512, "S", f"S {j}"), (t + 1024, t + 1536, "O", f"P V {j}")]
        warps.append((t + 512, t + 1024, "P", f"softmax {j}"))
        copies += [(t + 1536, t + 1792, "c", f"V {j + 1}"), (t + 1792, t + 2048, "c", f"K {j + 2}")]
    tensor.append((3584, 4096, "S", "S 2"))
    lane(p, y, "copy engine", copies, left, scale)
    lane(p, y + 28, "tensor cores", idle(tensor, 0, 4096), left, scale)
    lane(p, y + 56, "warps", warps, left, scale)
    p.text(
        24, 456, "A block. The one buffer of V is free again after P V. The copies are not to scale.", 12, fill=MUTED
    )
    p.write()


def registers() -> None:
    p = Picture(
        "registers",
        "Rung 9: registers move to where they work",
        "65,536 registers of an SM: three warpgroups of 168 a thread each, or 24 for the loader and 240 for each of two"
        " that compute. Below: both groups in step share every unit.",
        "Rung 9: 65,536 registers, and who has them",
        444,
    )
    scale = 640 / 65536
    for y, title, shares in (
        (62.0, "at the launch: 168 a thread", (168, 168, 168)),
        (140.0, "after setmaxnreg: 24, 240, 240", (24, 240, 240)),
    ):
        p.text(60, y, title, 12, bold=True)
        x = 60.0
        for k, n in enumerate(shares):
            w = n * 128 * scale
            p.box(
                x,
                y + 8,
                w,
                40,
                (PURPLE, BLUE, GREEN)[k],
                0.4,
                ("loader", "group A", "group B")[k] if n > 30 else "",
                13,
                f"{n} × 128 threads" if n > 30 else "",
            )
            x += w
        p.box(x, y + 8, 700 - x, 40, "#bbbbbb", dashed=True)
    p.text(62, 202, "↑ the loader", 11)
    x, y = 60.0, 234.0
    p.text(60, y, "a thread that computes, from rung 11 on: 240 at d = 128", 12, bold=True)
    for n, name, colour in (
        (64, "S 64", BLUE),
        (32, "P 32", DARK_ORANGE),
        (64, "O 64", GREEN),
        (80, "m, l, addresses, the rest: 80", GREY),
    ):
        w = n * 640 / 240
        p.box(x, y + 8, w, 26, colour, 0.4, name, 12)
        x += w
    left, scale, y = 110.0, 0.147, 304.0
    tensor: list[Bar] = [
        (0, 1024, "S", "A S and B S"),
        (2048, 3072, "O", "A P V and B P V"),
        (3072, 4096, "S", "A S and B S"),
    ]
    lane(p, y, "tensor cores", idle(tensor, 0, 4096), left, scale)
    lane(p, y + 30, "exponentials", idle([(1024, 2048, "P", "A and B softmax")], 0, 4096), left, scale)
    legend(p, 386, "SPO", 110)
    p.text(
        24,
        412,
        "Both groups wait for the same tile. In step they share the tensor cores, then the exponential unit: each",
        12,
        fill=MUTED,
    )
    p.text(24, 428, "takes twice as long as alone, and the tensor cores idle for 1024 of 3072 cycles.", 12, fill=MUTED)
    p.write()


def room() -> None:
    p = Picture(
        "room",
        "What lies in a block's shared memory in hopper's forward",
        "Bars of 227 KiB. d = 64: two tiles of Q, two of K, two of V and O, 136 KiB. d = 128: the same, 224 KiB. d = 128 and"
        " long rows: one Q, and K and V of 192 keys, 224 KiB. In pairs: of 176 keys, 208 KiB. d = 256: one Q, and K and V of"
        " 80 keys, 224 KiB. The last three have no O: it leaves through V.",
        "227 KiB, and who has them",
        340,
    )
    left, scale = 150.0, 530 / 227
    end = left + 227 * scale
    # queries, keys, buffers of Q, has O a buffer?
    shapes = (("d = 64", 64, 192, 128, 2, True), ("d = 128", 128, 128, 128, 2, True),
              ("d = 128, long", 128, 128, 192, 1, False), ("d = 128, in pairs", 128, 128, 176, 1, False), ("d = 256", 256, 128, 80, 1, False))
    for n, (name, d, queries, keys, of_Q, of_O) in enumerate(shapes):
        x, y = left, 58.0 + 46 * n
        p.text(24, y + 22, name, 12, bold=True)
        for what, rows, colour in ([("Q", queries, BLUE)] * of_Q + [("K", keys, ORANGE)] * 2 + [("V", keys, GREEN)] * 2
                                   + [("O", queries, PURPLE)] * of_O):
            w = rows * d * 2 / 1024 * scale
            p.box(x, y, w, 34, colour, 0.4, what, 13, f"{rows * d * 2 // 1024}")
            x += w
        p.text(end + 10, y + 22, f"{(x - left) / scale:.0f} KiB", 12, fill=MUTED)
    p.line(f"M{end:g} 50V284", GREY, 1.5, dashed=True)
    p.text(end, 298, "227", 11, "middle", fill=MUTED)
    p.text(24, 322, "Numbers are KiB of 16-bit tiles: rows · 2 d bytes. Where O has no box, it leaves through V's.", 12, fill=MUTED)
    p.write()


def pingpong() -> None:
    p = Picture(
        "pingpong",
        "Rung 10: one group's softmax under the other's products",
        "With the lock the two groups alternate in the softmax; the tensor cores always have a product of the other"
        " group.",
        "Rung 10: one group's softmax under the other's products",
        250,
    )
    left, scale = 110.0, 0.147
    tensor: list[Bar] = [(0, 512, "S", "A S 0")]
    a: list[Bar] = []
    b: list[Bar] = []
    tensor.append((512, 1024, "S", "B S 0"))
    a.append((512, 1024, "P", "A softmax 0"))
    t = 1024.0
    for k in range(3):
        who = "A" if k % 2 == 0 else "B"
        other, theirs = ("B", b) if k % 2 == 0 else ("A", a)
        j = k // 2
        tensor += [(t, t + 512, "O", f"{who} P V {j}"), (t + 512, t + 1024, "S", f"{who} S {j + 1}")]
        n = j if other == "B" else j + 1
        theirs.append((t, t + 512, "P", f"{other} softmax {n}"))
        theirs.append((t + 512, t + 1024, "idle", "to spare"))
        t += 1024
    lane(p, 60, "tensor cores", [x for x in tensor if x[0] < 4096], left, scale)
    lane(p, 92, "group A", a, left, scale)
    lane(p, 124, "group B", b, left, scale)
    legend(p, 180, "SPO", 110)
    p.text(
        24,
        210,
        "While the other's two products run, a group has 1024 cycles for what takes at least 512. At d = 64 the",
        12,
        fill=MUTED,
    )
    p.text(24, 226, "products take 512, and so do the exponentials: nothing is to spare.", 12, fill=MUTED)
    p.write()


def overlap() -> None:
    p = Picture(
        "overlap",
        "Rung 11: as written, and as compiled",
        "As written a group's softmax may run from the end of its S on, also under its own P V. As compiled only the "
        "row maximum does; the exponentials wait for P V.",
        "Rung 11: as the source says, and as ptxas orders it",
        376,
    )
    left, scale = 110.0, 0.147
    tensor: list[Bar] = []
    for k in range(4):
        who, t = "AB"[k % 2], 1024.0 * k
        j = k // 2
        tensor += [(t, t + 512, "S", f"{who} S {j + 1}"), (t + 512, t + 1024, "O", f"{who} P V {j}")]
    for y, title, written in ((58.0, "as written", True), (192.0, "as compiled, d = 128", False)):
        p.text(24, y + 2, title, 13, bold=True)
        lane(p, y + 12, "tensor cores", tensor, left, scale)
        for k, who in enumerate("AB"):
            bars: list[Bar] = []
            for j in range(2):
                t = 2048.0 * j + 1024 * k + 512
                if written:
                    bars += [
                        (t, min(t + 640, 4096), "P", f"{who} softmax {j + 1}"),
                        (t + 640, min(t + 1536, 4096), "idle", "to spare"),
                    ]
                else:
                    bars += [
                        (t, t + 128, "m", ""),
                        (t + 128, min(t + 512, 4096), "idle", "waits"),
                        (t + 512, min(t + 1024, 4096), "P", f"{who} exp"),
                        (t + 1024, min(t + 1536, 4096), "idle", "to spare"),
                    ]
            bars = [x for x in bars if x[1] > x[0]]
            if k == 1:
                bars.insert(
                    0, (0, 512, "P" if not written else "idle", "B exp" if not written else "to spare")
                )
            lane(p, y + 42 + 30 * k, f"group {who}", bars, left, scale)
    legend(p, 330, "SPOm", 110)
    p.text(
        24,
        360,
        "S comes back first. As written the softmax has 1536 cycles before the group's next turn; as compiled 1024, as in"
        " rung 10.",
        12,
        fill=MUTED,
    )
    p.write()


def persistent() -> None:
    p = Picture(
        "persistent",
        "Rungs 12 and 13 between two tiles of queries",
        "In rung 12 the last O leaves, a new block starts, and Q and K come, while the tensor cores idle. In rung 13 the"
        " next Q and K are there, and O leaves meanwhile.",
        "From one tile of queries to the next",
        330,
    )
    left, scale = 118.0, 0.152
    y = 62.0
    p.text(24, y, "rung 12: a new block", 13, bold=True)
    lane(p, y + 10, "copy engine", [(900, 1250, "e", "O leaves"), (1900, 2500, "c", "Q, K, V")], left, scale)
    lane(
        p,
        y + 38,
        "tensor cores",
        idle([(0, 512, "O", "last P V"), (2500, 3012, "S", "first S"), (3700, 4096, "S", "S")], 0, 4096),
        left,
        scale,
    )
    lane(
        p,
        y + 66,
        "warps",
        [(512, 900, "e", "O / l"), (1250, 1900, "e", "new block starts"), (3012, 3700, "P", "softmax")],
        left,
        scale,
    )
    y = 184.0
    p.text(24, y, "rung 13: the same block goes on", 13, bold=True)
    lane(p, y + 10, "copy engine", [(0, 500, "c", "next Q, K"), (900, 1250, "e", "O leaves")], left, scale)
    lane(
        p,
        y + 38,
        "tensor cores",
        idle(
            [
                (0, 512, "O", "last P V"),
                (900, 1412, "S", "first S"),
                (2100, 2612, "S", "S"),
                (2612, 3124, "O", "P V"),
                (3400, 4096, "S", "…"),
            ],
            0,
            4096,
        ),
        left,
        scale,
    )
    lane(
        p,
        y + 66,
        "warps",
        [(512, 900, "e", "O / l"), (1412, 2100, "P", "softmax"), (2612, 3400, "P", "softmax")],
        left,
        scale,
    )
    p.text(24, 316, "One group of the two. The lengths are made up; only the order is meant.", 12, fill=MUTED)
    p.write()


def order() -> None:
    """Two heads of six tiles under a causal mask, on four SMs."""
    heads, tiles, sms = 2, 6, 4
    p = Picture(
        "order",
        "Rung 14: every fourth tile, or the longest first",
        "Twelve tiles of 1 to 6 blocks of keys on four SMs. Dealt out in turn they are done after 9 or 12 steps; taken"
        " longest first, after 10 or 11.",
        "12 tiles of a causal mask on 4 SMs: dealt out, or taken longest first",
        352,
    )
    static: list[list[tuple[int, int]]] = [[] for _ in range(sms)]
    for n in range(heads * tiles):
        static[n % sms].append((n // tiles, tiles - 1 - n % tiles))
    dynamic: list[list[tuple[int, int]]] = [[] for _ in range(sms)]
    queue = [(0, s) for s in range(sms)]
    for tile in range(tiles - 1, -1, -1):
        for head in range(heads):
            t, s = heapq.heappop(queue)
            dynamic[s].append((head, tile))
            heapq.heappush(queue, (t + tile + 1, s))
    ends = []
    for y0, name, plan in (
        (58.0, "rung 13: SM s takes tiles s, s + 4, s + 8", static),
        (196.0, "rung 14: who is done takes the longest that is left", dynamic),
    ):
        p.text(24, y0, name, 13, bold=True)
        ends.append([sum(t + 1 for _, t in one) for one in plan])
        for s, one in enumerate(plan):
            y = y0 + 10 + 26 * s
            p.text(88, y + 15, f"SM {s}", 12, "end")
            x = 96.0
            for head, t in one:
                w = 40.0 * (t + 1)
                p.box(x, y, w, 21, (BLUE, ORANGE)[head], 0.45, f"{t + 1}")
                x += w
            p.text(x + 8, y + 15, f"{ends[-1][s]}", 12, bold=True)
    p.box(96, 322, 16, 13, BLUE, 0.45)
    p.text(118, 333, "head 0", 12)
    p.box(176, 322, 16, 13, ORANGE, 0.45)
    p.text(198, 333, "head 1; the number: blocks of keys that the tile sees", 12)
    p.write()

# ---------------------------------------------------------------- the backward


def two_sums(p: Picture) -> None:
    """Four of the backward's five products, and where their sums lie."""
    p.text(150, 66, "two products …", 13, "middle", bold=True)
    p.text(345, 66, "… and their P, dS …", 13, "middle", bold=True)
    p.text(607, 66, "… into three sums", 13, "middle", bold=True)
    for y, first, second, score, weight, into, sum_ in (
        (82.0, "K_j", "Q_i", "Sᵀ", "Pᵀ", "dO_i", "dV_j"),
        (162.0, "V_j", "dO_i", "dPᵀ", "dSᵀ", "Q_i", "dK_j"),
    ):
        p.box(24, y, 56, 40, PURPLE, 0.3, first, 14)
        p.text(90, y + 25, "·", 16, "middle")
        p.box(100, y, 56, 40, PURPLE, 0.3, second, 14)
        p.arrow(160, y + 20, 192, y + 20)
        p.box(196, y, 56, 40, BLUE, 0.35, score, 14)
        p.arrow(256, y + 20, 312, y + 20)
        p.box(316, y, 56, 40, BLUE, 0.35, weight, 14)
        a_sum(p, y, into, sum_, BLUE, "registers", "all queries, one owner")
    p.text(284, 96, "exp", 11, "middle", fill=MUTED)
    p.text(284, 120, "LSE_i", 11, "middle", fill=MUTED)
    p.text(284, 176, "dP − D_i", 11, "middle", fill=MUTED)
    p.text(284, 200, "times P", 11, "middle", fill=MUTED)
    p.arrow(344, 126, 344, 158)


def a_sum(p: Picture, y: float, into: str, sum_: str, colour: str, where: str, whose: str) -> None:
    """What stands left of it times `into`."""
    p.text(386, y + 25, "·", 16, "middle")
    p.box(398, y, 56, 40, PURPLE, 0.3, into, 14)
    p.arrow(460, y + 20, 506, y + 20)
    p.box(510, y, 64, 40, colour, 0.6, "+ " + sum_, 14)
    p.text(584, y + 17, where, 12)
    p.text(584, y + 33, whose, 11, fill=MUTED)


def where(p: Picture, y: float, *kinds: tuple[float, str, str]) -> None:
    for x, colour, words in kinds:
        p.box(x, y, 16, 13, colour, 0.5)
        p.text(x + 22, y + 11, words, 12)


def backward_owners() -> None:
    p = Picture(
        "backward_owners",
        "Five products, and who owns their sums",
        "S and dP are products of the operands of a tile of queries and a tile of keys. P goes from registers into dV,"
        " dS from registers into dK; both sums stay in the registers of the block that owns the keys. Only dS goes"
        " through shared memory, into dQ, whose pieces from all blocks of keys are added up in the L2 cache.",
        "One step of rungs 4 to 9: five products, three sums",
        366,
    )
    two_sums(p)
    p.arrow(344, 206, 344, 238)
    p.text(352, 226, "transposed, for all of the block's keys", 11, fill=MUTED)
    p.box(316, 242, 56, 40, PURPLE, 0.3, "dS", 14)
    a_sum(p, 242, "K_j", "dQ_i", ORANGE, "memory, added up in L2", "a piece from each block")
    where(p, 308, (24, PURPLE, "shared memory"), (160, BLUE, "registers"), (264, ORANGE, "L2 cache"))
    p.text(
        24,
        350,
        "K_j and V_j stay for the whole walk over the queries; Q_i and dO_i come by. Two kernels would make"
        " S and dP twice.",
        12,
        fill=MUTED,
    )
    p.write()


def backward_kept() -> None:
    p = Picture(
        "backward_kept",
        "dS is kept, and dQ is a product of it",
        "The first kernel owns keys. S and dP are products of a tile of queries and a tile of keys; P goes from registers"
        " into dV, dS from registers into dK, and dS also into memory, as the registers hold it. The second kernel owns"
        " queries: it brings dS and K, transposes dS on its way into registers, and adds their product to dQ in registers.",
        "d > 128: two kernels, five products, two owners",
        446,
    )
    p.box(14, 48, 732, 180, GREY, dashed=True)
    two_sums(p)
    p.text(28, 220, "the owner of keys", 12, bold=True)
    p.arrow(344, 206, 344, 256)
    p.text(352, 246, "as the registers hold it", 11, fill=MUTED)
    p.box(296, 260, 96, 40, ORANGE, 0.5, "dSᵀ, kept", 13)
    p.text(402, 277, "in memory: a tile of 64 × 64 is 8 KiB,", 11, fill=MUTED)
    p.text(402, 293, "written once and read once", 11, fill=MUTED)
    p.box(14, 318, 732, 76, GREY, dashed=True)
    p.arrow(344, 304, 344, 332)
    p.text(352, 315, "transposed", 11, fill=MUTED)
    p.box(316, 336, 56, 40, BLUE, 0.35, "dS", 14)
    a_sum(p, 336, "K_j", "dQ_i", BLUE, "registers", "all keys, one owner")
    p.text(28, 361, "the owner of queries", 12, bold=True)
    where(p, 412, (24, PURPLE, "shared memory"), (160, BLUE, "registers"), (264, ORANGE, "memory"))
    p.write()


def backward_roof() -> None:
    p = Picture(
        "backward_roof",
        "Cycles of the units of an SM for a step of the backward",
        "For d = 64 and 128: tensor cores 2560 and 2560 cycles, shared memory 2816 and 3200, issue slots 1190 and 800,"
        " exponentials 1024 and 512.",
        "A step of the product, hopper: cycles of each unit of an SM",
        330,
    )
    left, scale, y = 216.0, 0.147, 62.0
    # operands of S and dP, of dV and dK, of dQ; Q and dO arrive; dS; dQ in and out; LSE2 and D
    shared = {64: (768, 512, 512, 256, 256, 0, 512), 128: (1024, 512, 512, 256, 128, 512, 256)}
    short = ("S, dP", "dV, dK", "dQ", "TMA", "dS", "dQ out", "L, D")
    for d, issue, exponentials in ((64, 1190, 1024), (128, 800, 512)):
        p.text(24, y + 14, f"d = {d}", 14, bold=True)
        for name, colour, cycles in (
            ("tensor cores", BLUE, 2560),
            ("shared memory", PURPLE, sum(shared[d])),
            ("issue slots, about", GREY, issue),
            ("exponentials", ORANGE, exponentials),
        ):
            p.text(left - 8, y + 13, name, 12, "end")
            if colour == PURPLE:
                x = left
                for part, label in zip(shared[d], short):
                    if not part:
                        continue
                    p.box(x, y, part * scale, 18, colour, 0.5, label if part > 200 else "", 11)
                    x += part * scale
            else:
                p.box(left, y, cycles * scale, 18, colour, 0.55)
            p.text(left + cycles * scale + 6, y + 13, f"{cycles:,}", 12)
            y += 22
        p.text(24, y - 54, "128 × 128" if d == 64 else "64 × 128", 11, fill=MUTED)
        y += 18
    p.text(
        24,
        292,
        "Of shared memory: operands of the products; Q and dO arrive (TMA); dS is written; with d = 128 dQ passes",
        12,
        fill=MUTED,
    )
    p.text(24, 308, "through its buffer; L and D are read. Tiles: queries × keys.", 12, fill=MUTED)
    p.write()


def backward_step(rung: int, steps: int) -> tuple[list[tuple[float, float, str, int]], list[list[Bar]]]:
    """What the tensor cores and the two groups do when, if products are taken up in the order in which they are
    issued and everything takes as long as DURATION says. Order and waits are those of the rungs' code."""

    def program(g: int) -> Iterator[tuple[str, Any, Any]]:
        if g == 1 and rung == 8:
            yield "work", 500, ""  # out of step by half a softmax, as they come to be
        if rung >= 6:
            yield "issue", "S", 0
        for n in range(steps):
            if rung < 6:
                yield "issue", "S", n
            elif n:
                yield "wait", "dK", n - 1
            yield from (("wait", "S", n), ("issue", "dP", n)) if rung >= 6 else (("issue", "dP", n), ("wait", "S", n))
            yield "work", DURATION["P"], "P"
            if rung >= 7:
                yield "issue", "dV", n
            if rung == 8 and n:
                yield "other", n - 1, ""
            yield "wait", "dP", n
            yield "work", DURATION["dS"], "dS"
            yield "tell", n, ""
            if rung < 7:
                yield "issue", "dV", n
            if rung < 8:
                yield "other", n, ""
            if rung < 8 or n:
                yield "issue", "dQ", n
            yield "issue", "dK", n
            yield "wait", "dV", n
            if rung < 8 or n:
                yield "wait", "dQ", n
                yield "work", DURATION["out"], "out"
            if rung < 6:
                yield "wait", "dK", n
            elif n + 1 < steps:
                yield "issue", "S", n + 1

    tensor: list[tuple[float, float, str, int]] = []
    groups: list[list[Bar]] = [[], []]
    ends: dict[tuple[int, str, int], float] = {}
    told: dict[tuple[int, int], float] = {}
    waiting: dict[int, int] = {}
    programs, free = [program(0), program(1)], 0.0
    queue = [(0.0, 0), (0.0, 1)]
    while queue:
        t, g = heapq.heappop(queue)
        op = next(programs[g], None)
        if op is None:
            continue
        kind, what, n = op
        if kind == "issue":
            begin = max(t, free)
            free = ends[g, what, n] = begin + DURATION["product"]
            tensor.append((begin, free, what, g))
            t += 1e-3
        elif kind == "wait":
            t = max(t, ends[g, what, n])
        elif kind == "work":
            if n:
                groups[g].append((t, t + what, "AB"[g], "dQ out" if n == "out" else n))
            t += what
        elif kind == "tell":
            told[g, what] = t
            if waiting.get(1 - g) == what:
                del waiting[1 - g]
                heapq.heappush(queue, (t, 1 - g))
        elif (1 - g, what) not in told:  # the other group has not come so far
            waiting[g] = what
            continue
        heapq.heappush(queue, (t, g))
    return tensor, groups


DURATION = {"product": 256, "P": 640, "dS": 512, "out": 384}


def backward_steps() -> None:
    p = Picture(
        "backward_steps",
        "A step of rungs 5 to 8",
        "Bars of the tensor cores and of two warpgroups. In rung 5 the tensor cores idle under P and under dS of both"
        " groups, 3200 cycles a step; with S issued early 2944; with P multiplied at once 2688; with dQ one step late"
        " the groups are out of step and the tensor cores never idle, 2560.",
        "Rungs 5 to 8: where the tensor cores idle",
        548,
    )
    left, scale, window = 112.0, 0.125, 5000.0
    colours = (BLUE, ORANGE)
    y = 62.0
    for rung, name in (
        (5, "rung 5: everything in turn"),
        (6, "rung 6: the next S behind dK"),
        (7, "rung 7: dV as soon as P is there"),
        (8, "rung 8: dQ one step late, no meeting"),
    ):
        tensor, groups = backward_step(rung, 12)
        begins = [bar[0] for bar in groups[0] if bar[3] == "P"]
        begin, step = begins[6] - 40, (begins[9] - begins[6]) / 3
        p.text(24, y, f"{name}: {step:,.0f} cycles a step", 13, bold=True)
        rows = [("tensor cores", [(b, e, "AB"[g], what) for b, e, what, g in tensor]),
                ("group A", groups[0]), ("group B", groups[1])]
        for k, (label, bars) in enumerate(rows):
            top = y + 9 + 25 * k
            p.text(left - 8, top + 15, label, 12, "end")
            at = begin
            for b, e, who, what in [*sorted(bars), (begin + window, begin + window, "", "")]:
                b, e = min(max(b, begin), begin + window), min(e, begin + window)
                if e <= begin and who:
                    continue
                if b - at > 1 and k == 0:
                    p.box(left + (at - begin) * scale, top, (b - at) * scale, 21, "#bbbbbb", dashed=True)
                if e > b:
                    width = (e - b) * scale
                    p.box(left + (b - begin) * scale, top, width, 21, colours["AB".index(who)], 0.45,
                          what if width > 5.5 * len(what) + 6 else "", 11)
                at = max(at, e)
        y += 113
    p.box(24, 499, 16, 13, BLUE, 0.45)
    p.text(46, 510, "group A", 12)
    p.box(110, 499, 16, 13, ORANGE, 0.45)
    p.text(132, 510, "group B", 12)
    p.box(196, 499, 16, 13, "#bbbbbb", dashed=True)
    p.text(218, 510, "tensor cores idle", 12)
    p.text(24, 528, "Order and waits are the code's. The lengths are assumed: 256 for a product, 640 for P, 512 for dS,"
           " 384 for dQ's way out.", 12, fill=MUTED)
    p.write()


def backward_block() -> None:
    p = Picture(
        "backward_block",
        "How a block of dQ's sums lies in memory",
        "Left: a block of 64 rows and 64 columns as a warpgroup holds it; thread 9 has two numbers of row 2 and two of"
        " row 10 in each eight columns. Right: the same block in memory, eight runs of 2 KiB, one for each eight"
        " columns; in each, thread t has the 16 bytes at 16 t.",
        "A block of dQ, 64 × 64 fp32: as threads hold it, as memory has it",
        356,
    )
    x0, y0, w, h = 84.0, 92.0, 32.0, 11.0
    shades = [BLUE, ORANGE] * 4
    p.text(x0 + 4 * w, 68, "rows and columns", 13, "middle", bold=True)
    for j in range(8):
        p.text(x0 + w * (j + 0.5), 86, f"{8 * j}", 11, "middle", fill=MUTED)
        for r in range(16):
            p.box(x0 + w * j, y0 + h * r, w, h, shades[j], 0.14)
        for r in (2, 10):
            p.box(x0 + w * j + w / 4, y0 + h * r, w / 4, h, DARK_ORANGE, 0.8)
    for r, words in ((0, "row 0"), (2, "row 2"), (10, "row 10"), (15, "row 15")):
        p.text(x0 - 8, y0 + h * (r + 0.9), words, 11, "end", bold=r in (2, 10))
    p.text(x0 + 4 * w, y0 + 16 * h + 18, "warp 0; warps 1, 2, 3 have rows 16 to 63", 12, "middle", fill=MUTED)
    p.text(x0 + 4 * w, y0 + 16 * h + 36, "dark orange: thread 9 = 4 · 2 + 1", 12, "middle", fill=DARK_ORANGE)
    x1, run = 436.0, 240.0
    p.text(x1 + run / 2, 68, "memory", 13, "middle", bold=True)
    for j in range(8):
        y = y0 + 24.0 * j
        p.box(x1, y, run, 20, shades[j], 0.22)
        p.box(x1 + run * 9 / 128, y, max(run / 128, 3), 20, DARK_ORANGE, 0.8)
        p.text(x1 - 8, y + 14, f"columns {8 * j} –", 11, "end")
        p.text(x1 + run + 8, y + 14, f"+ {2 * j} KiB", 11)
    p.text(x1 + run / 2, y0 + 8 * 24 + 14, "128 threads × 16 bytes", 12, "middle", fill=MUTED)
    p.text(24, 326, "Number i of thread t is at i / 4 · 512 + t · 4 + i mod 4. A warp adds 512 bytes in a row, the copy"
           " engine all 16 KiB in one", 12, fill=MUTED)
    p.text(24, 342, "piece; the pass after the kernel puts rows and columns back.", 12, fill=MUTED)
    p.write()


def decode() -> None:
    p = Picture(
        "decode",
        "The keys of one head, split in four parts",
        "The keys of a head are a row of tiles. Four blocks take a quarter each. Each leaves O_s and L_s. The merge weighs"
        " O_s by exp(L_s − L) and adds them up. Below, the same keys in pages: a table says which page holds which tile.",
        "One head, four parts",
        372,
    )
    left, width, parts, tiles = 40.0, 680.0, 4, 16
    colours = (BLUE, ORANGE, GREEN, PURPLE)
    w = width / tiles
    p.text(left, 62, "the keys of a sequence, in tiles", 12, fill=MUTED)
    for n in range(tiles):
        p.box(left + n * w, 70, w - 4, 26, colours[n * parts // tiles], 0.4, str(n), 11)
    for s in range(parts):
        x = left + (s + 0.5) * width / parts
        p.arrow(x, 100, x, 120)
        p.box(x - 66, 122, 132, 40, colours[s], 0.25, f"block {s}", 13, "over its keys")
        p.arrow(x, 164, x, 184)
        p.box(x - 40, 186, 80, 26, colours[s], 0.25, f"O{'₀₁₂₃'[s]}, L{'₀₁₂₃'[s]}", 13)
        p.line(f"M{x:g} 212 L{x:g} 226 L{left + width / 2:g} 226", MUTED, 1.2)
    p.arrow(left + width / 2, 226, left + width / 2, 240)
    p.box(left + 150, 242, width - 300, 32, GREY, 0.2, "merge: L = log Σ exp(Lₛ),  O = Σ exp(Lₛ − L) Oₛ", 14)
    order = (9, 2, 14, 5, 0, 11, 7, 12, 3, 15, 6, 1, 13, 8, 4, 10)
    p.text(left, 306, "in pages: the table says where a tile lies", 12, fill=MUTED)
    for place, n in enumerate(order):
        p.box(left + place * w, 314, w - 4, 26, colours[n * parts // tiles], 0.4, str(n), 11)
    p.text(left, 360, f"table: 0 → {order.index(0)}, 1 → {order.index(1)}, 2 → {order.index(2)}, …", 12, fill=MUTED)
    p.write()


def pair() -> None:
    p = Picture(
        "pair",
        "Two blocks, the same keys",
        "A tile of keys in the L2 cache is read in halves: the first by the loader of block 0, the second by that of block 1."
        " Each half arrives in the buffers of both blocks. The groups of both blocks read the whole tile, and each group"
        " then arrives at the barrier `free` of both blocks.",
        "Each half is read once and arrives twice",
        352,
    )
    for n, colour in enumerate((BLUE, ORANGE)):
        p.box(240 + 142 * n, 54, 138, 26, colour, 0.4, f"rows {88 * n} to {88 * n + 87}")
    p.text(228, 71, "Kⱼ, in the L2 cache", 12, "end", fill=MUTED)
    centre = {0: (126.5, 263.5), 1: (496.5, 633.5)}  # of a block: where the halves of its buffer lie
    loader = {0: centre[0][0], 1: centre[1][1]}
    for block, left in ((0, 40), (1, 410)):
        p.box(left, 104, 310, 232, GREY, dashed=True)
        at, anchor = (left + 296, "end") if block == 0 else (left + 14, "start")
        p.text(at, 126, f"block {block}", 13, anchor, bold=True)
        p.text(at, 143, f"queries {128 * block} to {128 * block + 127}", 12, anchor)
        p.box(loader[block] - 66, 116, 132, 28, PURPLE, 0.3, "loader")
        for half, colour in enumerate((BLUE, ORANGE)):
            p.box(centre[block][half] - 66, 196, 132, 28, colour, 0.4, "first half" if half == 0 else "second half")
            p.line(f"M{centre[block][half]:g} 224 L{centre[block][half]:g} 233", MUTED, 1.2)
            p.arrow(centre[block][half], 233, centre[block][half], 247)
            p.box(centre[block][half] - 66, 249, 132, 26, GREEN, 0.3, f"group {1 + half}")
            p.line(f"M{centre[block][half]:g} 275 L{centre[block][half]:g} 286", MUTED, 1.2)
        p.line(f"M{centre[block][0]:g} 233 L{centre[block][1]:g} 233", MUTED, 1.2)
    for half, (colour, y, from_x) in enumerate(((BLUE, 164, 309), (DARK_ORANGE, 176, 451))):
        x, far = loader[half], centre[1 - half][half]
        p.line(f"M{from_x} 80 L{from_x} 92 L{x:g} 92", colour, 1.6)
        p.arrow(x, 92, x, 114, colour)
        p.arrow(x, 144, x, 194, colour)
        p.line(f"M{x:g} {y} L{far:g} {y}", colour, 1.6)
        p.arrow(far, y, far, 194, colour)
    p.line(f"M{centre[0][0]:g} 286 L{centre[1][1]:g} 286", MUTED, 1.2)
    for block in (0, 1):
        x = sum(centre[block]) / 2
        p.arrow(x, 286, x, 300)
        p.box(x - 120, 302, 240, 26, GREY, 0.2, "free: four arrivals, two of each block")
    p.write()


def masks() -> None:
    """A causal window with first keys that stay, in tiles: classes are counted pair by pair."""
    tiles, size, left_keys, stays = 12, 64, 256, 16
    seen: dict[tuple[int, int], int] = {}
    for i in range(tiles * size):
        for j in range(i + 1):
            if j >= i - left_keys or j < stays:
                at = (i // size, j // size)
                seen[at] = seen.get(at, 0) + 1
    full = size * size
    whole = sum(n == full for n in seen.values())
    p = Picture(
        "masks",
        "A causal window in tiles, and who visits which",
        f"{tiles} by {tiles} tiles of {size} queries and keys. A query sees itself, {left_keys} keys before it and the first"
        f" {stays}. {whole} tiles are seen in full, {len(seen) - whole} in part, the others are skipped. A tile of queries"
        " visits a row of the picture, in two ranges. A tile of keys visits a column, in one.",
        "Two questions, asked from both sides",
        372,
    )
    x0, y0, w = 92.0, 74.0, 23.0
    p.text(x0 + tiles * w / 2, 64, "keys, in tiles of 64", 12, "middle", fill=MUTED)
    p.text(x0 - 10, y0 + 14, "queries", 12, "end", fill=MUTED)
    for i in range(tiles):
        for j in range(tiles):
            n = seen.get((i, j), 0)
            p.box(x0 + j * w, y0 + i * w, w - 2, w - 2, GREY if n == 0 else BLUE if n == full else ORANGE,
                  0.06 if n == 0 else 0.5)
    row, column = 9, 3
    p.line(f"M{x0 - 3:g} {y0 + row * w - 2:g} h{tiles * w + 4:g} v{w + 2:g} h{-tiles * w - 4:g} Z", GREEN, 2.5)
    p.line(f"M{x0 + column * w - 2:g} {y0 - 3:g} v{tiles * w + 4:g} h{w + 2:g} v{-tiles * w - 4:g} Z", PURPLE, 2.5)
    x = x0 + tiles * w + 36
    for n, (colour, opacity, words) in enumerate((
        (BLUE, 0.5, "all pairs are seen: fa2's own step, no test"),
        (ORANGE, 0.5, "some are: each pair is asked"),
        (GREY, 0.06, "none is: skipped"),
    )):
        p.box(x, y0 + 8 + 26 * n, 18, 18, colour, opacity)
        p.text(x + 28, y0 + 22 + 26 * n, words, 13)
    visited = [j for j in range(tiles) if (row, j) in seen]
    owners = [i for i in range(tiles) if (i, column) in seen]
    for y, colour, lines in (
        (y0 + 120, GREEN, (f"Tile {row} of queries visits keys in tiles", f"{', '.join(map(str, reversed(visited)))}:",
                           "two ranges, from the last one down")),
        (y0 + 200, PURPLE, (f"Tile {column} of keys, in the backward, visits", f"queries in tiles {owners[0]} to {owners[-1]}:",
                            "one range, without a gap")),
    ):
        p.box(x, y - 12, 18, 18, colour, 0, dashed=True)
        for n, words in enumerate(lines):
            p.text(x + 28, y + 2 + 19 * n, words, 13)
    p.write()


def main() -> None:
    for draw in (
        tiny,
        roof,
        ways,
        fragment,
        pipeline,
        swizzle,
        wide_warps,
        two_loops,
        tma,
        wgmma, descriptor, proxies,
        ring,
        registers,
        room,
        pingpong,
        overlap,
        persistent,
        order,
        backward_owners,
        backward_kept,
        backward_roof,
        backward_steps,
        backward_block,
        decode,
        pair,
        masks,
    ):
        draw()


if __name__ == "__main__":
    main()
