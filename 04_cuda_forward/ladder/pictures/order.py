"""Hands the blocks of a causal problem to 264 workers, in rung 12's order and in rung 13's; draws who is busy, and
prints the table of 13_longest_first.md.

    python3 04_cuda_forward/ladder/pictures/order.py

A block's time is the number of tiles of keys that its rows see. The test common.docs fails if the picture is not what
this program draws.
"""

from __future__ import annotations

import heapq
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORKERS, HEADS = 2 * 132, 32                # two blocks on each SM; B = 4, H = 8
TILE = {64: (128, 64), 128: (64, 128)}      # rows and keys of a tile, from d
BLUE, ORANGE, INK, FAINT = "#00639c", "#A64500", "#222222", "#555555"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 330, 70, 730, 66, 270


def jobs(rung: int, d: int, N: int) -> list[int]:
    """The times of the blocks, in the order of their numbers."""
    Br, Bc = TILE[d]
    longest_first = [-(-(t + 1) * Br // Bc) for t in reversed(range(N // Br))]
    return longest_first * HEADS if rung == 12 else [time for time in longest_first for _ in range(HEADS)]


def ends(times: list[int]) -> list[int]:
    """When each worker goes home, if the next job goes to the one that is free first."""
    free = [0] * WORKERS
    for time in times:
        heapq.heappush(free, heapq.heappop(free) + time)
    return sorted(free)


def order() -> str:
    done = {rung: ends(jobs(rung, 64, 4096)) for rung in (12, 13)}
    last = max(done[12])

    def x(time: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * time / 180, 1)

    def y(busy: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * busy / WORKERS, 1)

    def curve(rung: int, colour: str, dash: str) -> str:
        path = f"M{x(0):g} {y(WORKERS):g}"
        for gone, time in enumerate(done[rung]):
            path += f" H{x(time):g} V{y(WORKERS - gone - 1):g}"
        return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.5"{dash}/>'

    def text(at: float, up: float, words: str, colour: str = INK, size: int = 14, anchor: str = "start") -> str:
        return f'<text x="{at:g}" y="{up:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{words}</text>'

    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" role="img">',
        "<title>Who is still at work</title>",
        f"<desc>Rung 13 keeps all workers busy until nearly the end, at {max(done[13])}; in rung 12 they leave one "
        f"after the other, the last at {last}.</desc>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="#fcfcfa" stroke="#d8d8d8"/>',
        text(24, 34, "Workers still busy, of 264: d = 64, N = 4096, causal, 32 heads", size=17),
        f'<path d="M{LEFT} {TOP} V{BOTTOM} H{RIGHT}" fill="none" stroke="{FAINT}"/>',
        *(text(LEFT - 8, y(busy) + 5, str(busy), FAINT, 13, "end") for busy in (0, 132, 264)),
        *(text(x(time), BOTTOM + 20, str(time), FAINT, 13, "middle") for time in (0, 30, 60, 90, 120, 150, 180)),
        text((LEFT + RIGHT) / 2, HEIGHT - 14, "time, in tiles of keys", FAINT, 13, "middle"),
        curve(12, ORANGE, ' stroke-dasharray="7 4"'), curve(13, BLUE, ""),
        text(x(max(done[13])) - 14, y(50), f"rung 13: done at {max(done[13])}", BLUE, anchor="end"),
        text(x(140), y(90), f"rung 12: done at {last}", ORANGE),
        "</svg>", ""])


def pictures() -> dict[str, str]:
    return {"order.svg": order()}


if __name__ == "__main__":
    for name, drawn in pictures().items():
        (HERE / name).write_text(drawn, encoding="utf-8")
    for d, N in ((64, 1024), (64, 4096), (128, 1024), (128, 4096)):
        before, after = (max(ends(jobs(rung, d, N))) for rung in (12, 13))
        times = jobs(13, d, N)
        print(f"d {d}, N {N}: {len(times)} jobs, rung 12 {before}, rung 13 {after}, never idle "
              f"{sum(times) / WORKERS:.1f}, gain {100 * (before / after - 1):.0f} %")
