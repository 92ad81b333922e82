"""How much of what hopper's backward reads and adds to is still in the L2 cache? A model, for heads that share keys.

    l2.py            the table of results/l2.txt, in some seconds
    l2.py --write    into that file

d = 128, a causal mask, 16 heads. A block of threads has 128 keys. In a step it meets 64 queries of a head:
a *piece* of Q and dO in 16 bits and of dQ in fp32. 132 blocks run, each as fast as the others but for chance; whenever one
is done, the next of the order begins. The cache keeps the pieces that were met last. A step whose piece is not there takes
no longer than others, though really its block falls back, and those behind it catch up: so the model counts more misses
than there are where blocks are far apart.

The walks: `heads`, head by head; `back`, all heads of a tile of queries, from the last tile to the first;
`to and fro`, as WalkTogether in backward/shapes.cuh.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

D, KEYS, QUERIES = 128, 128, 64  # of a head, a block, a step
HEADS = 16
BLOCKS = 132  # at a time
CACHE = 40e6  # bytes: an H100's L2 cache has 50 MB, an H200's 60 MiB; the rest is for K, V, dK and dV
PIECE = QUERIES * D * (2 + 2 + 4)
WALKS = ("heads", "back", "to and fro")

Piece = tuple[int, int, int]  # key head, head of its group, tile of queries


def order_of(heads: int, tiles: int, section: int) -> Iterator[tuple[int, int]]:
    """(head, tile of keys) in the order of order.cuh: in sections of heads, those with the most queries first."""
    for first in range(0, heads, section):
        for tile in range(tiles):
            for head in range(first, min(first + section, heads)):
                yield head, tile


def walk_of(walk: str, head: int, tile: int, section: int, group: int, n: int) -> list[Piece]:
    """What the block of that tile meets, step by step: behind a causal mask no query before its keys."""
    queries = list(range(tile * KEYS // QUERIES, n // QUERIES))
    if walk == "heads":
        return [(head, member, i) for member in range(group) for i in queries]
    if walk == "back" or head // section % 2 == 0:
        queries.reverse()
    return [(head, member, i) for i in queries for member in range(group)]


def missed(walk: str, group: int, n: int, tokens: int = 16384, blocks: int = BLOCKS, cache: float = CACHE) -> float:
    """The share of steps whose piece is not in the cache."""
    heads, tiles = tokens // n * HEADS // group, n // KEYS
    section = max(1, min(16384 // n, blocks // tiles))  # 20 MiB, of which 1,024 queries take one; see key_tiles_of
    waiting = order_of(heads, tiles, section)
    chance = random.Random(1)
    kept: OrderedDict[Piece, None] = OrderedDict()
    steps = misses = 0
    running: list[tuple[float, int, Iterator[Piece]]] = []  # when its next step is, the block, what it meets

    def begin(time: float, block: int) -> None:
        if (tile := next(waiting, None)) is not None:
            heapq.heappush(running, (time, block, iter(walk_of(walk, *tile, section, group, n))))

    for block in range(blocks):
        begin(0, block)
    while running:
        time, block, walked = heapq.heappop(running)
        piece = next(walked, None)
        if piece is None:
            begin(time, block)
            continue
        steps += 1
        misses += piece not in kept
        kept[piece] = None
        kept.move_to_end(piece)
        if len(kept) * PIECE > cache:
            kept.popitem(last=False)
        heapq.heappush(running, (time + 1 + chance.random() / 10, block, walked))
    return misses / steps


def table() -> str:
    cases = [(group, n, 16384) for group in (8, 4) for n in (1024, 4096, 16384)] + [(8, 1024, 131072)]
    lines = [f"G:{group} N:{n} tokens:{tokens} {' '.join(f'{missed(walk, group, n, tokens):.2f}' for walk in WALKS)}\n"
             for group, n, tokens in cases]
    return f"# heads a key head, length, tokens in all: misses by walk: {', '.join(WALKS)}\n" + "".join(lines)


def main() -> int:
    text = table()
    if "--write" in sys.argv[1:]:
        (Path(__file__).resolve().parents[1] / "results" / "l2.txt").write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
