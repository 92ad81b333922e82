"""Draws pictures/head.svg: the weights of a head, from what record.cpp has written to results/head.json.

    /usr/bin/python3 06_optimized/beyond/weights/check/draw.py     # any Python that has matplotlib

All numbers come from the record, and all three questions are in the picture: P as squares, each row's largest weight as
a ring, the columns' sums as bars. The same record gives the same file, byte for byte.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
RECORD = HERE.parent / "results" / "head.json"
PICTURE = HERE.parent / "pictures" / "head.svg"
sys.path[:0] = [str(ROOT / "common" / "measure" / "charts")]

from figure import CARD, COLOURS, FAINT, GRID, INK, STYLE, TITLE  # noqa: E402

BLUE, ORANGE = COLOURS["this"][:2]
HEADING = "Who looks at whom: P of a head that continues what it has read"
SAID = ("A row is a word's query, a column a key; the darker, the larger the weight. A query looks for the key whose\n"
        "word came after its own. A ring is the row's largest weight; a bar adds up a column.")


def drawn() -> bytes:
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.patches import Circle, Rectangle

    record = json.loads(RECORD.read_text(encoding="utf-8"))
    words, n = record["text"], len(record["text"])
    P = [record["P"][i * n:(i + 1) * n] for i in range(n)]
    best = record["keys"][::len(record["keys"]) // n]
    sums = record["sums"]
    room = 3.4  # rows, for the bars
    with matplotlib.rc_context(STYLE):
        figure = pyplot.figure(figsize=(640 / 72, 640 / 72), facecolor=CARD)
        axes = figure.add_axes((0.09, 0.02, 0.89, 0.84))
        axes.set_xlim(-1.4, n + 0.2)
        axes.set_ylim(n + room + 0.1, -1.1)
        axes.set_aspect("equal")
        axes.axis("off")
        for i in range(n):
            axes.text(-0.2, i + 0.5, words[i], ha="right", va="center")
            axes.text(i + 0.5, -0.2, words[i], ha="center", va="bottom")
            for j in range(n):
                if j > i:
                    continue  # not seen
                axes.add_patch(Rectangle((j, i), 1, 1, facecolor="white", edgecolor=GRID, linewidth=0.8))
                axes.add_patch(Rectangle((j, i), 1, 1, facecolor=BLUE, alpha=P[i][j], linewidth=0))
            if best[i] >= 0:
                axes.add_patch(Circle((best[i] + 0.5, i + 0.5), 0.3, fill=False, edgecolor=ORANGE, linewidth=2))
        axes.text(n, 3.5, "not seen: a key\nthat comes later", ha="right", va="center", color=FAINT)
        largest = max(sums)
        for j, c in enumerate(sums):
            height = (room - 1) * c / largest
            axes.add_patch(Rectangle((j + 0.15, n + 0.4), 0.7, height, facecolor=BLUE, linewidth=0))
            axes.text(j + 0.5, n + 0.5 + height, f"{c:.2f}", ha="center", va="top", color=INK, fontsize=9)
        axes.text(-0.2, n + 0.4, "sum", ha="right", va="top", color=FAINT)
        figure.text(0.025, 0.975, HEADING, fontsize=TITLE, weight="bold", va="top")
        figure.text(0.025, 0.943, SAID, color=FAINT, va="top", linespacing=1.3)
        file = io.BytesIO()
        figure.savefig(file, format="svg", facecolor=CARD,
                       metadata={"Date": None, "Creator": None, "Title": HEADING})
        pyplot.close(figure)
        return file.getvalue()


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_bytes(drawn())
