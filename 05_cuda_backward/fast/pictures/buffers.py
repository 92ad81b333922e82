"""Draws what the two buffers of the fast kernels hold while a tile is computed: pictures/buffers.svg.

    python3 05_cuda_backward/fast/pictures/buffers.py

Lengths are multiply-adds: a product is 1, copies are as long as what they hide behind. The test common.docs fails if
the picture is not what this program draws.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent
BLUE, ORANGE, INK, FAINT = "#00639c", "#A64500", "#222222", "#555555"
WIDTH, HEIGHT, LEFT, UNIT, ROW = 760, 396, 150, 82, 34


def text(at: float, up: float, words: str, colour: str = INK, size: int = 14, anchor: str = "middle") -> str:
    return f'<text x="{at:g}" y="{up:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(row: float, begin: float, end: float, words: str, kind: str) -> str:
    """kind: work, holds (there, and read) or comes (on its way)."""
    fill, edge, ink = {"work": ("#e9e9e6", "#8a8a8a", INK), "holds": ("#dcebf5", BLUE, BLUE),
                       "comes": ("#fcfcfa", ORANGE, ORANGE)}[kind]
    dash = ' stroke-dasharray="6 4"' if kind == "comes" else ""
    x, width = LEFT + UNIT * begin, UNIT * (end - begin)
    return (f'<rect x="{x + 1.5:g}" y="{row:g}" width="{width - 3:g}" height="{ROW - 6}" rx="3" fill="{fill}" '
            f'stroke="{edge}"{dash}/>' + text(x + width / 2, row + 19, words, ink))


def barrier(at: float, top: float, bottom: float) -> str:
    return f'<path d="M{LEFT + UNIT * at:g} {top:g} V{bottom:g}" stroke="{INK}" stroke-width="1.5"/>'


def panel(top: float, title: str, names: tuple[str, str], work: list[str], first: list[tuple[float, float, str, str]],
          second: list[tuple[float, float, str, str]], barriers: list[float]) -> list[str]:
    rows = [top + 14 + ROW * i for i in range(3)]
    parts = [text(24, top, title, anchor="start", size=15)]
    parts += [text(LEFT - 12, row + 19, name, FAINT, 13, "end") for row, name in zip(rows, ("products", *names))]
    parts += [box(rows[0], i, i + 1, words, "work") for i, words in enumerate(work)]
    parts += [box(rows[1], *each) for each in first] + [box(rows[2], *each) for each in second]
    return parts + [barrier(at, rows[0] - 6, rows[2] + ROW) for at in barriers]


def buffers() -> str:
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" role="img">',
        "<title>What the two buffers hold</title>",
        "<desc>In fast_dq K comes while V is read, and the next V while K is. In fast_dkv dO comes during the first "
        "product, the next Q during the last one, and the buffers change places after each tile.</desc>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="#fcfcfa" stroke="#d8d8d8"/>',
        *panel(34, "fast_dq: two tiles of keys", ("buffer A", "buffer B"),
               ["dP", "S", "dQ", "dP", "S", "dQ"],
               [(0, 1, "V", "holds"), (1, 3, "the next V comes", "comes"), (3, 4, "V", "holds"),
                (4, 6, "the next V comes", "comes")],
               [(0, 1, "K comes", "comes"), (1, 3, "K", "holds"), (3, 4, "K comes", "comes"), (4, 6, "K", "holds")],
               [0, 1, 3, 4]),
        *panel(192, "fast_dkv: a tile of queries, and half of the next", ("buffer A", "buffer B"),
               ["S", "dV", "dP", "dK", "S", "dV", "dP"],
               [(0, 4, "Q", "holds"), (4, 5, "dO comes", "comes"), (5, 7, "dO", "holds")],
               [(0, 1, "dO comes", "comes"), (1, 3, "dO", "holds"), (3, 4, "Q comes", "comes"), (4, 7, "Q", "holds")],
               [0, 1, 3, 4, 5]),
        box(340, 0, 1, "read", "holds"), box(340, 1.2, 2.4, "on its way", "comes"),
        f'<path d="M{LEFT + UNIT * 2.75:g} 340 V{340 + ROW - 6}" stroke="{INK}" stroke-width="1.5"/>',
        text(LEFT + UNIT * 2.85, 359, "a barrier", anchor="start"),
        text(LEFT + UNIT * 5.3, 359, "time: a product each", FAINT, 13),
        "</svg>", ""])


def pictures() -> dict[str, str]:
    return {"buffers.svg": buffers()}


if __name__ == "__main__":
    for name, drawn in pictures().items():
        (HERE / name).write_text(drawn, encoding="utf-8")
