"""Draws two pictures of this chapter: what d does to the scores, and how gradients flow.

    python3 00_naive/pictures/draw.py

The scores are drawn at random from a fixed seed: 1000 queries with 1024 keys each.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
BLUE, AMBER, ORANGE, GREEN, SKY = "#0072B2", "#E69F00", "#D55E00", "#009E73", "#56B4E9"
INK, FAINT, CARD = "#1a1a1a", "#555555", "#fbfbf8"
AS_TEXT = {BLUE: "#00639c", ORANGE: "#A64500"}
QUERIES, KEYS = 1000, 1024


@dataclass
class Picture:
    width: int
    height: int
    title: str
    description: str
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, size: int = 15, anchor: str = "middle", colour: str = INK,
             bold: bool = False) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight} '
                          f'fill="{AS_TEXT.get(colour, colour)}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, colour: str, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="5 3"' if dashed else ""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" '
                          f'fill-opacity="{0.12 if dashed else 0.35}" stroke="{colour}" stroke-width="1.5"{dash}/>')

    def path(self, steps: str, colour: str, width: float, fill: str = "none", opacity: float = 1) -> None:
        self.parts.append(f'<path d="{steps}" fill="{fill}" fill-opacity="{opacity:g}" stroke="{colour}" '
                          f'stroke-width="{width:g}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str) -> None:
        length = math.hypot(x2 - x1, y2 - y1)
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        x, y = x2 - 9 * dx, y2 - 9 * dy
        self.path(f"M{x1:.1f} {y1:.1f} L{x:.1f} {y:.1f}", colour, 2)
        self.path(f"M{x2:.1f} {y2:.1f} L{x - 5 * dy:.1f} {y + 5 * dx:.1f} L{x + 5 * dy:.1f} {y - 5 * dx:.1f} Z", colour,
                  1, colour)

    def svg(self) -> str:
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="sans-serif" role="img">',
            f"<title>{escape(self.title)}</title>", f"<desc>{escape(self.description)}</desc>",
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="10" fill="{CARD}" '
            'stroke="#d0d0c8"/>', *self.parts, "</svg>"]) + "\n"


# ---------------------------------------------------------------- what d does to the scores

@lru_cache(maxsize=None)
def scores(d: int, scaled: bool) -> list[list[float]]:
    """Of each query with every key; all components normal. Given q, a sum of q_x k_x is |q| times a normal number."""
    draw = random.Random(1)
    rows = []
    for _ in range(QUERIES):
        norm = math.sqrt(sum(draw.gauss(0, 1) ** 2 for _ in range(d)))
        factor = norm / math.sqrt(d) if scaled else norm
        rows.append([factor * draw.gauss(0, 1) for _ in range(KEYS)])
    return rows


def largest_weight(d: int, scaled: bool) -> float:
    """The median over the queries."""
    def of(row: list[float]) -> float:
        most = max(row)
        return 1 / sum(math.exp(score - most) for score in row)
    return median(map(of, scores(d, scaled)))


def scores_picture() -> str:
    dims = ((4, BLUE), (64, ORANGE))
    share = {(d, scaled): largest_weight(d, scaled) for d, _ in dims for scaled in (False, True)}
    told = "; ".join(f"{100 * share[d, scaled]:.1f} % for d = {d} {'scaled' if scaled else 'as they are'}"
                     for scaled in (False, True) for d, _ in dims)
    p = Picture(640, 420, "Scores with and without the factor 1/√d",
                "Two histograms of random scores. Without the factor those of d = 64 reach from about -24 to 24, those of "
                "d = 4 from about -6 to 6; with it both lie between -4 and 4. Below, bars: the largest of 1024 weights "
                f"has {told}.")
    low, step, bins, width, height = -24, 1, 48, 280, 130
    for column, scaled in enumerate((False, True)):
        left, bottom = 24 + 312 * column, 208
        p.text(left + width / 2, 34, "scores times 1/√d" if scaled else "scores as they are", 17, bold=True)
        most = max(sum(0 <= s < step for row in scores(d, scaled) for s in row) for d, _ in dims)
        for d, colour in dims:
            counts = [0] * bins
            for row in scores(d, scaled):
                for score in row:
                    counts[min(max(math.floor((score - low) / step), 0), bins - 1)] += 1
            steps = f"M{left} {bottom}"
            for i, count in enumerate(counts):
                y = bottom - height * count / most
                steps += f" L{left + width * i / bins:.1f} {y:.1f} L{left + width * (i + 1) / bins:.1f} {y:.1f}"
            p.path(steps + f" L{left + width} {bottom} Z", colour, 1.5, colour, 0.25)
        for tick in (-24, -16, -8, 0, 8, 16, 24):
            x = left + width * (tick - low) / (bins * step)
            p.path(f"M{x:.1f} {bottom} V{bottom + 5}", FAINT, 1)
            p.text(x, bottom + 21, f"{tick}".replace("-", "−"), 14, colour=FAINT)
        if scaled:
            p.text(left + width / 2 + 26, 84, "d = 4, d = 64", 15, "start")
        else:
            p.text(left + width / 2 + 32, 84, "d = 4", 15, "start", BLUE, bold=True)
            p.text(left + width / 2 + 76, 178, "d = 64", 15, "start", ORANGE, bold=True)
    p.text(24, 268, "The largest of 1024 weights of a query (median)", 17, "start", bold=True)
    bars = [(f"d = {d}, {'times 1/√d' if scaled else 'as they are'}", share[d, scaled], colour)
            for scaled in (False, True) for d, colour in dims]
    for i, (label, value, colour) in enumerate(bars):
        y = 284 + 32 * i
        p.text(24, y + 17, label, 15, "start")
        p.box(180, y, 360 * value, 22, colour)
        p.text(188 + 360 * value, y + 17, f"{100 * value:.{0 if value > 0.1 else 1}f} %", 15, "start")
    return p.svg()


# ---------------------------------------------------------------- how gradients flow

def flow_picture() -> str:
    p = Picture(640, 400, "Forward and backward of attention",
                "Above, the forward from left to right: Q and K give S by (1), S gives P by (2), P and V give O by (3). "
                "Below, each gradient under its tensor and the arrows turned around: dO gives dP with the help of V, and "
                "dV with the help of P, by (4); dP gives dS with the help of P, by (5); dS gives dQ with the help of K, "
                "and dK with the help of Q, by (6).")
    width, height = 58, 38
    forward = {"Q": (34, 70, BLUE), "K": (34, 134, AMBER), "S": (174, 102, ORANGE), "P": (330, 102, ORANGE),
               "V": (440, 154, GREEN), "O": (550, 102, SKY)}
    backward = {"d" + name: (x, y + 188, colour) for name, (x, y, colour) in forward.items()}
    for name, (x, y, colour) in (forward | backward).items():
        p.box(x, y, width, height, colour, dashed=name in backward)
        p.text(x + width / 2, y + 25, name, 18, bold=True)
    p.text(24, 38, "Forward", 17, "start", bold=True)
    p.text(24, 234, "Backward", 17, "start", bold=True)
    p.path("M24 208 H616", "#d0d0c8", 1)

    def join(a: str, b: str, words: str = "", dx: float = 0, dy: float = -8) -> None:
        boxes, colour = (backward, ORANGE) if a in backward else (forward, FAINT)
        (xa, ya, _), (xb, yb, _) = boxes[a], boxes[b]
        right = xb > xa
        x1, x2 = (xa + width + 4, xb - 4) if right else (xa - 4, xb + width + 4)
        y1, y2 = ya + height / 2, yb + height / 2
        p.arrow(x1, y1, x2, y2, colour)
        p.text((x1 + x2) / 2 + dx, (y1 + y2) / 2 + dy, words, 15, colour=ORANGE if colour == ORANGE else INK)

    join("Q", "S", "(1)", 2, -12)
    join("K", "S")
    join("S", "P", "(2)")
    join("P", "O", "(3)", 0)
    join("V", "O")
    join("dO", "dP", "(4) with V", 0)
    join("dO", "dV", "(4) with P", 62, 18)
    join("dP", "dS", "(5) with P", 0)
    join("dS", "dQ", "(6) with K", 30, -14)
    join("dS", "dK", "(6) with Q", 30, 28)
    return p.svg()


def pictures() -> dict[str, str]:
    return {"scores.svg": scores_picture(), "flow.svg": flow_picture()}


if __name__ == "__main__":
    for name, drawn in pictures().items():
        (HERE / name).write_text(drawn, encoding="utf-8")
