"""Draws flow.svg beside this file: what a backward makes of what the forward kept, and where its five products are.

    python3 05_cuda_backward/pictures/draw.py

The test common.docs fails if the picture is not what this program draws.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
INK, FAINT = "#222222", "#555555"
KEPT, STATISTIC = ("#cfe3ec", "#0072B2"), ("#fbe7bd", "#E69F00")  # fill and edge
SQUARE, GRADIENT = ("#f3d6bd", "#D55E00"), ("#c9e9dd", "#009E73")
WIDTH, HEIGHT = 760, 372
ROWS = (112, 226)  # of boxes: their upper edges


def box(x: float, y: float, width: float, colours: tuple[str, str], words: str, below: str = "") -> list[str]:
    fill, edge = colours
    drawn = [f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="48" rx="4" fill="{fill}" stroke="{edge}" '
             'stroke-width="1.5"/>']
    drawn.append(text(x + width / 2, y + (22 if below else 29), words, 15, anchor="middle"))
    return drawn + ([text(x + width / 2, y + 40, below, 13, anchor="middle")] if below else [])


def text(x: float, y: float, words: str, pixels: int, anchor: str = "start", fill: str = INK,
         bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (f'<text x="{x:g}" y="{y:g}" font-size="{pixels}" text-anchor="{anchor}" fill="{fill}"{weight}>'
            f"{escape(words)}</text>")


def arrow(*points: tuple[float, float]) -> str:
    path = " L".join(f"{x:g},{y:g}" for x, y in points)
    return f'<path d="M{path}" fill="none" stroke="{INK}" stroke-width="1.5" marker-end="url(#tip)"/>'


def product(x: float, y: float, number: int) -> list[str]:
    return [f'<rect x="{x - 10:g}" y="{y - 10:g}" width="20" height="20" rx="10" fill="{INK}"/>',
            text(x, y + 5, str(number), 13, anchor="middle", fill="#ffffff", bold=True)]


def flow() -> str:
    title = "From what was kept to three gradients, by five products"
    top, bottom = ROWS
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
             f'height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" fill="{INK}" role="img">',
             f"<title>{escape(title)}</title>",
             '<defs><marker id="tip" markerWidth="9" markerHeight="9" refX="8" refY="4.5" orient="auto">'
             f'<path d="M1,1 L8,4.5 L1,8" fill="none" stroke="{INK}" stroke-width="1.5"/></marker></defs>',
             f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="#fcfcfa" '
             'stroke="#d8d8d8"/>',
             text(24, 34, title, 18, bold=True)]
    parts += box(24, top, 84, KEPT, "Q, K") + box(24, bottom, 84, KEPT, "dO, V")
    parts += box(170, top, 124, SQUARE, "S", "scale · Q Kᵀ") + box(170, bottom, 124, SQUARE, "dP", "dO Vᵀ")
    parts += box(366, top, 124, SQUARE, "P", "exp(S − L)") + box(366, bottom, 124, SQUARE, "dS", "P ∘ (dP − D)")
    parts += box(612, top - 28, 124, GRADIENT, "dV", "Pᵀ dO")
    parts += box(612, bottom - 44, 124, GRADIENT, "dK", "scale · dSᵀ Q")
    parts += box(612, bottom + 44, 124, GRADIENT, "dQ", "scale · dS K")
    parts += box(258, 54, 58, STATISTIC, "L") + box(258, 308, 58, STATISTIC, "D")
    parts.append(arrow((316, 78), (428, 78), (428, top)))
    parts.append(arrow((316, 332), (428, 332), (428, bottom + 48)))
    for y in ROWS:
        parts += [arrow((108, y + 24), (170, y + 24)), arrow((294, y + 24), (366, y + 24))]
    parts.append(arrow((428, top + 48), (428, bottom)))
    parts.append(arrow((490, top + 24), (548, top + 24), (548, top - 4), (612, top - 4)))
    for middle in (bottom - 20, bottom + 68):
        parts.append(arrow((490, bottom + 24), (548, bottom + 24), (548, middle), (612, middle)))
    products = (137, top + 24), (137, bottom + 24), (580, top - 4), (580, bottom - 20), (580, bottom + 68)
    for number, (x, y) in enumerate(products, 1):
        parts += product(x, y, number)
    parts.append(text(24, 88, "kept, or handed in", 13, fill=FAINT))
    parts.append(text(24, 300, "a number for each row:", 13, fill=FAINT))
    parts.append(text(24, 318, "L from the forward,", 13, fill=FAINT))
    parts.append(text(24, 336, "D = rowsum(dO ∘ O)", 13, fill=FAINT))
    parts.append(text(500, 352, "orange: N × N, never in memory as a whole", 12, fill=FAINT))
    return "\n".join([*parts, "</svg>", ""])


def pictures() -> dict[str, str]:
    return {"flow.svg": flow()}


if __name__ == "__main__":
    for name, drawn in pictures().items():
        (HERE / name).write_text(drawn, encoding="utf-8")
