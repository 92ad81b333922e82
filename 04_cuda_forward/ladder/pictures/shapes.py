"""Draws how the work inside a block is split: among its warps (split.svg), and in tiles of tiles (tiles.svg).

    python3 04_cuda_forward/ladder/pictures/shapes.py

The test common.docs fails if a picture is not what this program draws.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "warmup" / "pictures"))

from draw import BLUE, FAINT, GREEN, ORANGE, Picture  # noqa: E402

WARPS = 4
LIGHT, DARK = 0.12, 0.75


def split() -> str:
    p = Picture(416, "Four warps, one tile: who owns keys, who owns queries",
                "On the left each of four warps has all rows of Q_i and a quarter of the keys, so each has a part of "
                "all rows of O_i, and the four parts are added through shared memory. On the right each warp has a "
                "quarter of the rows and all keys, so each has a quarter of the rows of O_i, complete.")
    side, top, height = 148, 146, 148
    for left, keys, heading, owned in (
            (24, True, "FlashAttention-1: a warp owns keys", "all rows, a quarter of the keys"),
            (396, False, "FlashAttention-2: a warp owns rows", "a quarter of the rows, all keys")):
        p.text(left, 70, heading, 15, bold=True)
        p.text(left, 90, f"warp 1, dark: {owned}", 13, FAINT)
        s, o = left + 54, left + 54 + side + 20
        p.text(left + 19, top + height + 20, "Q_i", 14, bold=True, anchor="middle")
        p.text(s - 10, top - 25, "K_j", 14, bold=True, anchor="end")
        for warp in range(WARPS):
            shade = DARK if warp == 1 else LIGHT
            q = side / WARPS * warp
            if keys:
                p.box(s + q, top - 42, side / WARPS, 24, ORANGE, shade)
                p.box(s + q, top, side / WARPS, height, ORANGE, shade)
                p.text(s + q + side / WARPS / 2, top + height / 2 + 5, f"{warp}", 14, bold=warp == 1, anchor="middle")
            else:
                p.box(left, top + q, 38, side / WARPS, BLUE, shade)
                p.box(s, top + q, side, side / WARPS, BLUE, shade)
                p.text(s + side / 2, top + q + 23, f"warp {warp}", 14, bold=warp == 1, anchor="middle")
                p.box(o, top + q, 92, side / WARPS, GREEN, shade)
        if keys:
            p.box(left, top, 38, height, BLUE, DARK)
            for warp in reversed(range(WARPS)):
                p.box(o + 9 * warp, top + 9 * warp - 14, 92, height - 14, "#fcfcfa", 1)
                p.box(o + 9 * warp, top + 9 * warp - 14, 92, height - 14, GREEN, DARK if warp == 1 else LIGHT)
        else:
            p.box(s, top - 42, side, 24, ORANGE, DARK)
        p.text(s + side / 2, top + height + 20, "S_ij", 14, bold=True, anchor="middle")
        p.text(o + 46 + 14 * keys, top + height + 20, "O_i, four parts" if keys else "O_i", 14, bold=True,
               anchor="middle")
        notes = (("Each part has all rows. The parts, and each row's", "maximum and sum, meet in shared memory: the",
                  "warps write, wait for each other, and add.") if keys else
                 ("A row is complete in its warp. No warp waits for", "another's results, only for K_j and V_j, which",
                  "all of them read. All kernels of this stage do so."))
        for line, words in enumerate(notes):
            p.text(left, top + height + 52 + 21 * line, words, 14)
    return p.svg()


def tiles() -> str:
    p = Picture(440, "Tiles of tiles: register_tiled, from a head's scores to a thread's",
                "A head has N by N scores. A block takes 64 rows and goes along the keys, 64 at a time. Each of its "
                "four warps has 16 of the rows. A thread has 4 rows times 8 keys of these, and adds to all 32 scores "
                "with 4 numbers of Q and 8 of K.")
    top = 100
    levels = ((24, "1  a head", "N × N scores", ("device memory", "a block takes 64 rows", "and walks to the right")),
              (208, "2  a block's tile", "64 × 64", ("shared memory", "a number of K_j serves", "64 rows, 16 a warp")),
              (392, "3  a warp's tile", "16 × 64", ("32 lanes", "dark: the 32 scores", "of one of them")),
              (576, "4  a thread's tile", "4 × 8", ("registers", "a number of K serves 4,", "a number of Q serves 8")))
    size = 160
    for left, name, shape, notes in levels:
        p.text(left, 66, name, 15, bold=True)
        p.text(left, 86, shape, 13, FAINT)
        for line, words in enumerate(notes):
            p.text(left, top + size + 34 + 20 * line, words, 13, bold=line == 0)
    # the head: 8 x 8 tiles, a row of them is a block's
    cell = size / 8
    for i in range(8):
        for j in range(8):
            shade = DARK if (i, j) == (4, 3) else 0.3 if i == 4 else 0.06
            p.box(24 + cell * j, top + cell * i, cell, cell, ORANGE, shade)
    # the block: four warps
    for warp in range(WARPS):
        p.box(208, top + size / WARPS * warp, size, size / WARPS, ORANGE, DARK if warp == 1 else LIGHT)
        p.text(288, top + size / WARPS * warp + 25, f"warp {warp}", 14, bold=warp == 1, anchor="middle")
    # the warp: 16 rows of 64 keys, lane (ty, tx) = (1, 2)
    wide, high = size / 64, size / 16
    p.box(392, top, size, size, ORANGE, LIGHT)
    for i in range(4):
        for j in range(8):
            p.box(392 + wide * (2 + 8 * j), top + high * (1 + 4 * i), wide, high, ORANGE, 1)
    for i in range(1, 4):
        p.line(392, top + size / 4 * i, 392 + size, top + size / 4 * i)
    for j in range(1, 8):
        p.line(392 + size / 8 * j, top, 392 + size / 8 * j, top + size)
    # the thread
    for j in range(8):
        p.box(596 + 17.5 * j, top, 17.5, 16, ORANGE, 0.3)
        for i in range(4):
            p.box(596 + 17.5 * j, top + 22 + 34.5 * i, 17.5, 34.5, ORANGE, DARK)
    for i in range(4):
        p.box(576, top + 22 + 34.5 * i, 14, 34.5, BLUE, 0.3)
    p.text(736, top - 8, "8 of K", 12, FAINT, anchor="end")
    p.text(576, top + size + 14, "4 of Q", 12, FAINT)
    for at in (184, 368, 552):
        p.text(at + 11, top + size / 2 + 6, "→", 18, FAINT, anchor="middle")
    p.line(24, 364, 736, 364)
    p.text(24, 392, "r rows and c keys need r + c vectors for r · c scores:", 14, bold=True)
    p.text(24, 416, "128 for 4096 in a block's tile, 80 for 1024 in a warp's, 12 for 32 in a thread's.", 14)
    return p.svg()


def pictures() -> dict[str, str]:
    return {"split.svg": split(), "tiles.svg": tiles()}


if __name__ == "__main__":
    for name, drawn in pictures().items():
        (HERE / name).write_text(drawn, encoding="utf-8")
