"""Draws the pictures of the warm-up: the machine, what the accesses of the transpose touch, and how waiting is hidden.

    python3 04_cuda_forward/warmup/pictures/draw.py

Bandwidths are those that were recorded; sectors, banks and cycles are computed. The test common.docs fails if a picture
is not what this program draws.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
STAGE = HERE.parents[1]
BLUE, ORANGE, GREEN, INK, FAINT = "#0072B2", "#D55E00", "#009E73", "#222222", "#555555"
AS_TEXT = {BLUE: "#00639c", ORANGE: "#A64500", GREEN: "#00704F"}  # thin strokes need more contrast than boxes
WIDTH = 760


class Picture:
    def __init__(self, height: int, title: str, description: str) -> None:
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
                      f'height="{height}" font-family="Helvetica, Arial, sans-serif" fill="{INK}" role="img">',
                      f"<title>{escape(title)}</title>", f"<desc>{escape(description)}</desc>",
                      f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="#fcfcfa" '
                      'stroke="#d8d8d8"/>']
        self.text(24, 34, title, 18, bold=True)

    def text(self, x: float, y: float, words: str, pixels: int = 14, fill: str = INK, bold: bool = False,
             anchor: str = "start") -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{pixels}" text-anchor="{anchor}" '
                          f'fill="{AS_TEXT.get(fill, fill)}"{weight}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, colour: str = FAINT, opacity: float = 0.12,
            rounded: float = 0) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{rounded:g}" '
                          f'fill="{colour}" fill-opacity="{opacity:g}" stroke="{colour}" stroke-opacity="0.7"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{FAINT}" stroke-opacity="0.5"/>')

    def arrow(self, x1: float, x2: float, y: float) -> None:
        """To the right and back."""
        self.parts.append(f'<path d="M{x1:g} {y:g} H{x2:g} M{x1 + 7:g} {y - 5:g} L{x1:g} {y:g} L{x1 + 7:g} {y + 5:g} '
                          f'M{x2 - 7:g} {y - 5:g} L{x2:g} {y:g} L{x2 - 7:g} {y + 5:g}" fill="none" stroke="{FAINT}" '
                          'stroke-width="1.5"/>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


# ---------------------------------------------------------------- the machine

def recorded() -> tuple[str, list[str]]:
    """MiB of L2; of shared memory, L2 and device memory what they deliver, and how long one thread waits, if recorded."""
    results = STAGE / "results"
    noted = (results / "nvidia-h200.bandwidth.txt").read_text(encoding="utf-8")
    latency = results / "nvidia-h200.latency.txt"
    waits = latency.read_text(encoding="utf-8") if latency.exists() else ""

    def told(level: str) -> str:
        speed, = re.findall(rf"^{level} +(\S+)$", noted, re.M)
        wait = re.findall(rf"^{level.replace('16', '2')} +(\S+)$", waits, re.M)
        return f"{speed} TB/s" + "".join(f", {cycles} cycles" for cycles in wait)

    size, = re.findall(r", (\d+) MiB of L2;", noted)
    return size, [told(level) for level in ("shared memory", "L2, 16 MiB", "device memory")]


def machine() -> str:
    l2_size, (shared, l2, device) = recorded()
    p = Picture(486, "The machine: an H200 and its host",
                "A streaming multiprocessor has four schedulers with 32 lanes and 64 KiB of registers each, and shared "
                "memory. 132 of them share the L2 cache, behind which lies device memory. The host has a memory of its own.")
    left, width = 190, 546
    p.box(left - 12, 54, width + 24, 416, FAINT, 0.03, 8)
    p.text(left, 78, "the device: one GPU", 14, FAINT, bold=True)
    for depth in (3, 2, 1):
        p.box(left + 5 * depth, 90 + 5 * depth, width - 16, 216, BLUE, 0.04, 6)
    p.box(left, 90, width - 16, 216, "#ffffff", 1, 6)
    p.box(left, 90, width - 16, 216, BLUE, 0.07, 6)
    p.text(left + 12, 112, "one of 132 streaming multiprocessors (SM)", 15, BLUE, bold=True)
    p.text(left + 12, 131, "holds up to 32 blocks, 64 warps, 2048 threads", 13)
    quarter = (width - 16 - 24 - 3 * 8) / 4
    for i in range(4):
        x = left + 12 + i * (quarter + 8)
        p.box(x, 142, quarter, 104, BLUE, 0.12, 4)
        middle = x + quarter / 2
        for line, (words, pixels) in enumerate((("scheduler", 14), ("starts 1 warp", 12), ("instruction a cycle", 12),
                                                ("32 lanes", 14), ("64 KiB of registers", 12))):
            p.text(middle, 160 + 19 * line, words, pixels, bold=pixels == 14, anchor="middle")
    p.box(left + 12, 254, width - 40, 42, GREEN, 0.16, 4)
    p.text(left + 24, 280, "shared memory: up to 227 KiB for a block", 14, bold=True)
    p.text(left + width - 40, 280, shared, 13, anchor="end")
    for y, colour, name, speed in ((334, ORANGE, f"L2 cache: {l2_size} MiB, one for all SMs", l2),
                                   (392, ORANGE, "device memory (HBM): 141 GB", device)):
        p.box(left, y, width - 16, 44, colour, 0.10 if y < 390 else 0.2, 4)
        p.text(left + 12, y + 27, name, 15, bold=True)
        p.text(left + width - 28, y + 27, speed, 14, anchor="end")
    p.text(left, 459, "TB/s: all SMs reading. Near, small and fast above; far, large and slow below.", 13, FAINT)
    p.box(20, 334, 108, 102, FAINT, 0.12, 6)
    for line, words in enumerate(("the host:", "a CPU and", "its memory")):
        p.text(74, 360 + 22 * line, words, 14, bold=line == 0, anchor="middle")
    p.arrow(132, 186, 414)
    p.text(20, 459, "cudaMemcpy, launches", 13, FAINT)
    return p.svg()


# ---------------------------------------------------------------- the transpose

def transpose() -> str:
    p = Picture(432, "What one access of a warp touches", "A naive write touches one of the four sectors in each of 32 "
                "rows; a write along a row touches the four sectors of that row. A column of a tile with rows of 32 "
                "words lies in one bank; with rows of 33 words it lies in 32.")
    p.text(24, 66, "Device memory: rows of 128 bytes, four sectors each; six of 32 rows", 15, bold=True)
    sector, shown = 72, 6
    for left, naive, heading, cost in ((24, True, "naive: lane x writes row x", "32 sectors, an eighth of each is used"),
                                       (400, False, "through a tile: lane x writes column x",
                                        "4 sectors, all of each is used")):
        p.text(left, 90, heading, 14)
        for row in range(shown):
            for s in range(4):
                touched = s == 0 if naive else row == 0
                p.box(left + s * sector, 100 + 18 * row, sector - 2, 15, ORANGE if touched else FAINT,
                      0.25 if touched else 0.05)
            words = f"lane {row}" if naive else "all lanes" if row == 0 else ""
            p.text(left + 4 * sector + 4, 112 + 18 * row, words, 12, FAINT)
            if naive:
                p.box(left, 100 + 18 * row, sector / 8, 15, ORANGE, 0.9)
            elif row == 0:
                p.box(left, 100, 4 * sector - 2, 15, ORANGE, 0.9)
        p.text(left, 100 + 18 * shown + 18, cost, 14, ORANGE, bold=True)
    top = 256
    p.text(24, top + 10, "Shared memory: 32 banks, each a word wide; lane x gets number 0 of row x", 15, bold=True)
    for left, row_words, cost in ((24, 32, "bank 0 has 32 words: 32 turns"), (400, 33, "each bank has one word: 1 turn")):
        p.text(left, top + 36, f"rows of {row_words} words", 14)
        cell = 10.5
        for bank in (0, 8, 16, 24, 31):
            p.text(left + (bank + 0.5) * cell, top + 54, str(bank), 11, FAINT, anchor="middle")
        for line in range(6):
            for bank in range(32):
                p.box(left + bank * cell, top + 60 + 14 * line, cell - 1, 12, FAINT, 0.05)
        for row in range(6):
            line, bank = divmod(row * row_words, 32)
            if line < 6:
                p.box(left + bank * cell, top + 60 + 14 * line, cell - 1, 12, GREEN, 0.9)
        p.text(left, top + 164, cost, 14, GREEN, bold=True)
    return p.svg()


# ---------------------------------------------------------------- hiding latency

BUSY, WAIT = 20, 100  # instructions, one a cycle, then a wait


def turns(warps: int, until: int) -> list[tuple[int, int]]:
    """Who is served when: (warp, begin), in an order in which who is ready longest comes next."""
    ready, now, served = [0] * warps, 0, []
    while now < until:
        warp = min(range(warps), key=lambda w: (ready[w], w))
        now = max(now, ready[warp])
        served.append((warp, now))
        now += BUSY
        ready[warp] = now + WAIT
    return served


def hiding() -> str:
    until, left, scale = 240, 96, 2.6
    p = Picture(312, "One scheduler, and warps that wait", f"Each warp issues {BUSY} instructions and then waits "
                f"{WAIT} cycles for memory. Two warps leave the scheduler idle most of the time; six keep it busy.")
    y = 66
    for warps in (2, 6):
        busy = sum(max(0, min(until, begin + BUSY) - begin) for _, begin in turns(warps, until) if begin < until)
        p.text(24, y, f"{warps} warps", 15, bold=True)
        p.text(left, y, f"in the first {until} cycles the scheduler is busy in {busy}", 13, FAINT)
        for warp in range(warps):
            top = y + 10 + 16 * warp
            p.text(left - 8, top + 11, f"warp {warp}", 12, FAINT, anchor="end")
            mine = [begin for who, begin in turns(warps, until) if who == warp]
            for begin in mine:
                end = min(until, begin + BUSY + WAIT)
                if begin < until:
                    p.box(left + scale * begin, top + 4, scale * (end - begin), 5, FAINT, 0.15)
                    p.box(left + scale * begin, top, scale * (min(until, begin + BUSY) - begin), 13, BLUE, 0.75)
        y += 10 + 16 * warps + 32
    p.text(24, 278, f"Blue: {BUSY} instructions, one a cycle. Grey: a wait of {WAIT} cycles for memory.", 13, FAINT)
    p.text(24, 297, "Both numbers are chosen for the picture.", 13, FAINT)
    return p.svg()


def pictures() -> dict[str, str]:
    return {"machine.svg": machine(), "transpose.svg": transpose(), "hiding.svg": hiding()}


if __name__ == "__main__":
    for name, drawn in pictures().items():
        (HERE / name).write_text(drawn, encoding="utf-8")
