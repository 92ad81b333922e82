"""Draws docs/memory.svg: the levels of memory of the recorded machines, and where attention's numbers lie.

    python3 common/measure/charts/memory.py

Sizes of a processor's caches, bandwidths and the number of multiprocessors are those of recorded files; registers and
shared memory are counted from what the architecture has; what only the data sheet says has a star. The test common.charts fails if the picture is not what this program draws.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from results import Results, load, median, recorded

ROOT = Path(__file__).resolve().parents[3]
N, D, TILE = 8192, 64, 64
WIDTH, COLUMN, MIDDLE = 640, 286, (167, 473)  # of the picture and of a machine; the middles of the two
BLUE, ORANGE, INK, FAINT = "#0072B2", "#D55E00", "#222222", "#555555"
Level = tuple[str, str]  # its name and size, its bandwidth


def size(count: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.0f} {unit}"
    return f"{count:.0f} bytes"


def speed(bytes_per_second: float) -> str:
    if bytes_per_second >= 1e12:
        return f"{bytes_per_second / 1e12:.3g} TB/s"
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def of_cpu(results: Results) -> list[Level]:
    """From the fastest to the slowest, as one core sees them."""
    caches = {f"L{cache['level']}": cache for cache in results.context["caches"] if cache["type"] != "Instruction"}

    def measured(level: str) -> str:
        rows = results.select(what="bandwidth", variant=level, threads=1)
        return speed(median(rows, "bytes_per_second")) if rows else "not measured"

    assert results.context["isa"] == "avx512"
    levels = [(f"registers: {size(32 * 64)}", "beside the arithmetic")]
    for name, cache in caches.items():
        levels.append((f"{name} cache: {size(cache['size'])}", measured(name)))
    return levels + [("main memory (DRAM)", measured("triad"))]


def of_gpu(results: Results) -> list[Level]:
    """From the fastest to the slowest, of all multiprocessors together."""
    sms, machine = int(results.context["cores"]), results.context["machine"]
    noted = (ROOT / "04_cuda_forward" / "results" / f"{machine}.bandwidth.txt").read_text(encoding="utf-8")

    l2, = re.findall(r", (\d+) MiB of L2;", noted)

    def measured(level: str) -> str:
        found, = re.findall(rf"^{level} +(\S+)$", noted, re.M)
        return speed(1e12 * float(found))

    return [(f"registers: {size(sms * 65536 * 4)}", "beside the arithmetic"),
            (f"shared memory, L1: {size(sms * 256 * 1024)}", measured("shared memory")),
            (f"L2 cache: {l2} MiB", measured("L2, 16 MiB")),
            ("device memory (HBM): 141 GB *", f"{measured('device memory')} of 4.8 *")]


class Picture:
    def __init__(self, height: int, title: str) -> None:
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
                      f'height="{height}" font-family="Helvetica, Arial, sans-serif" fill="{INK}" role="img">',
                      f"<title>{escape(title)}</title>"]
        self.box(0.5, 0.5, WIDTH - 1, height - 1, "#fcfcfa", "#d8d8d8")

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str, opacity: float = 1) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" '
                          f'fill-opacity="{opacity:g}" stroke="{stroke}"/>')

    def text(self, x: float, y: float, words: str, pixels: int = 15, fill: str = INK, bold: bool = False,
             anchor: str = "middle") -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{pixels}" text-anchor="{anchor}" fill="{fill}"'
                          f"{weight}>{escape(words)}</text>")

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def drawn() -> str:
    cpu, gpu = (load(recorded(ROOT / stage)[0]) for stage in ("03_tiled_cpu", "06_optimized"))
    levels = of_cpu(cpu), of_gpu(gpu)
    head, row, band = 84, 56, 44
    where = [0, 1, 2, 3, 4], [0, 1, 2, 4]  # the rows of a machine's levels; a GPU has no third cache
    bands = {  # below this row: what lies there, of what size
        1: (BLUE, f"FlashAttention: a tile of scores waits here, {TILE} × {TILE}, {size(4 * TILE * TILE)}"),
        4: (ORANGE, f"by the definition: all scores and weights wait here, {size(8 * N * N)} a head"),
    }
    height = head + 5 * row + len(bands) * band + 48
    picture = Picture(height, "Levels of memory of a CPU core and of a GPU, from small and fast to large and slow")
    picture.text(24, 32, "Where numbers wait: small and fast above, large and slow below", bold=True, anchor="start")
    for middle, name in zip(MIDDLE, (f"one core of an {cpu.context['device']}", gpu.context["device"])):
        picture.text(middle, 68, name, 16, FAINT, bold=True)
    top = head
    for at in range(5):
        for middle, rows, machine in zip(MIDDLE, where, levels):
            if at in rows:
                name, bandwidth = machine[rows.index(at)]
                width = COLUMN - 26 * (4 - at)
                picture.box(middle - width / 2, top, width, row - 10, BLUE if at < 2 else "#888888",
                            "#999999", 0.10 if at < 4 else 0.22)
                picture.text(middle, top + 20, name, 15, bold=True)
                picture.text(middle, top + 39, bandwidth, 15)
        top += row
        if at in bands:
            colour, words = bands[at]
            picture.box(24, top, WIDTH - 48, band - 14, colour, colour, 0.14)
            picture.text(WIDTH / 2, top + 21, words, 15, bold=True)
            top += band
    notes = (f"N = {N}, d = {D}, 4 bytes a number. The GPU's first two rows are all of its {gpu.context['cores']} "
             "multiprocessors.",
             "* by the data sheet. Bandwidths are measured, on the CPU by one core.")
    for line, words in enumerate(notes):
        picture.text(24, top + 14 + 19 * line, words, 13, FAINT, anchor="start")
    return picture.svg()


if __name__ == "__main__":
    (ROOT / "docs" / "memory.svg").write_text(drawn(), encoding="utf-8")
