"""Draws layout.svg beside this file: where the numbers of two heads lie, and what a transposition and a copy do.

    python3 docs/pictures/layout.py

All offsets are computed from strides. The test common.docs fails if the picture is not what this program draws.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
N, H, D = 3, 2, 4
INK, FAINT = "#222222", "#555555"
HEADS = ("#0072B2", "#D55E00")
WIDTH, CELL = 640, 24


class Picture:
    def __init__(self, height: int, title: str) -> None:
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
                      f'height="{height}" font-family="Helvetica, Arial, sans-serif" fill="{INK}" role="img">',
                      f"<title>{escape(title)}</title>",
                      f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6" fill="#fcfcfa" '
                      'stroke="#d8d8d8"/>']

    def text(self, x: float, y: float, words: str, pixels: int = 15, fill: str = INK, bold: bool = False,
             anchor: str = "start") -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{pixels}" text-anchor="{anchor}" fill="{fill}"{weight}>'
                          f"{escape(words)}</text>")

    def cell(self, x: float, y: float, head: int, words: object) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}" fill="{HEADS[head]}" '
                          f'fill-opacity="0.16" stroke="{HEADS[head]}" stroke-opacity="0.5"/>')
        self.text(x + CELL / 2, y + 17, str(words), 13, anchor="middle")

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def memory(picture: Picture, y: float, heading: str, rows: list[tuple[int, int]]) -> None:
    """All numbers in a row, as memory has them: of each token and head in turn d numbers."""
    left = (WIDTH - CELL * N * H * D) / 2
    picture.text(left, y - 30, heading, 15, bold=True)
    for at, (n, head) in enumerate(rows):
        x = left + at * D * CELL
        picture.text(x + D * CELL / 2, y - 6, f"token {n}, head {head}", 12, FAINT, anchor="middle")
        for i in range(D):
            picture.cell(x + i * CELL, y, head, (n * H + head) * D + i)


def head_of(picture: Picture, x: float, y: float, head: int, strides: tuple[int, int]) -> None:
    """One head as a matrix [N, d], each number found by its offset."""
    picture.text(x, y - 6, f"head {head}", 13, FAINT, bold=True)
    for n in range(N):
        for i in range(D):
            picture.cell(x + i * CELL, y + n * CELL, head, head * strides[0] + n * strides[1] + i)


def drawn() -> str:
    picture = Picture(362, "24 numbers of two heads in memory, seen as one matrix for each head, and after a copy")
    memory(picture, 66, "Memory [N, H, d], as a projection writes it: token after token",
           [(n, head) for n in range(N) for head in range(H)])
    left = (WIDTH - CELL * N * H * D) / 2
    picture.text(left, 128, "Seen as [H, N, d] with strides (4, 8, 1): nothing moves", 15, bold=True)
    for head in range(H):
        head_of(picture, left + 130 * head, 158, head, (D, H * D))
    for line, words in enumerate(("Each number is called by its place above.", "A head's rows are 8 apart,",
                                  "since the other head lies between.")):
        picture.text(left + 270, 176 + 24 * line, words, 15)
    memory(picture, 310, "Copied into memory [H, N, d], strides (12, 4, 1): head after head",
           [(n, head) for head in range(H) for n in range(N)])
    picture.text(left, 352, "Blue: head 0. Orange: head 1. N = 3 tokens, H = 2 heads, d = 4.", 13, FAINT)
    return picture.svg()


def pictures() -> dict[str, str]:
    return {"layout.svg": drawn()}


if __name__ == "__main__":
    for name, svg in pictures().items():
        (HERE / name).write_text(svg, encoding="utf-8")
