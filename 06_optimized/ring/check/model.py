"""What a ring of P GPUs would take: steps as one GPU was measured to compute them, and what travels between GPUs.

    python3 06_optimized/ring/check/model.py             measured and predicted, row by row, from results/ring.json
    python3 06_optimized/ring/check/model.py N HKV       one length on 2 to 1,024 GPUs, causal

A step computes and sends at once. What it computes was measured without messages (ring_bench.py, "alone"): with n tokens
a rank the first step takes first(n), every other step(n). A message of m bytes takes m / bandwidth. It wants some time of
its own to be begun, in which nothing else happens; and NCCL moves it with some of the GPU's multiprocessors, so that
products are slower as long as it travels:

    step's time = begun + max(compute + slowed * m / bandwidth, m / bandwidth)                                     (1)

The bandwidth comes from the recorded timelines: the last move of dK and dV has the GPU to itself, but for the rounding of
dQ. The other two numbers are fitted to the causal rows with 16 key heads and 4,096 tokens or more, so that errors count in
percent. With fewer, the host is a part of what was measured.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).resolve().parents[1] / "results/ring.json"
ON_FOUR = RECORDED.with_name("ring_4.json")  # nothing is fitted to it
FORWARD, BOTH = "forward", "forward+backward"
Row = dict[str, Any]
Kind = tuple[bool, int]  # causal, key heads
D, WIDTH, SUM = 128, 2, 4  # bytes of a number, and of a sum
FITTED: Kind = (True, 16)
FITTED_FROM = 4096  # tokens
STEP = 1e-4


@dataclass(frozen=True)
class Link:
    """Between two neighbours of the ring, in each direction at once."""

    name: str
    bandwidth: float  # bytes a ms
    begun: float = 0.0  # ms
    slowed: float = 0.0  # share of a message's time that products lose

    def words(self) -> str:
        return f"{self.bandwidth / 1e6:.0f} GB/s"


# Given, not measured: a network card of 400 Gbit/s for each GPU. One of a host's eight GPUs sends to another host, and all
# ranks wait for the slowest. To begin a message takes ten microseconds more than within a host.
NETWORK, NETWORK_BEGUN = 50e6, 0.010


@dataclass(frozen=True)
class Model:
    computed: dict[tuple[Kind, str], list[tuple[int, float, float, float, float]]]
    link: Link  # as measured, of one host

    def across_hosts(self) -> Link:
        # As many multiprocessors copy, for longer; what they do not do for lack of bytes does not slow products.
        return Link("hosts of eight", NETWORK, self.link.begun + NETWORK_BEGUN,
                    self.link.slowed * NETWORK / self.link.bandwidth)

    def ms(self, N: int, P: int, kind: Kind, way: str, link: Link | None = None) -> float:
        """Of one call on all P ranks."""
        link = link or self.link
        n = N / P
        keys = 2 * kind[1] * n * D  # numbers in a rank's K and V
        first, step = self.at(n, kind, FORWARD)
        total = self.steps([first] + [step] * (P - 1), [WIDTH * keys] * (P - 1) + [0.0], link)
        if way == FORWARD:
            return total
        first, step = (both - one for both, one in zip(self.at(n, kind, BOTH), (first, step)))
        sent = [WIDTH * keys * (s + 1 < P) + SUM * keys * (s > 0) for s in range(P)]
        total += self.steps([first] + [step] * (P - 1), sent, link)
        return total + self.steps([0.0], [WIDTH * keys * (P > 1)], link)  # home, with hardly anything to compute

    def steps(self, computed: Sequence[float], sent: Sequence[float], link: Link) -> float:
        total = 0.0
        for ms, size in zip(computed, sent, strict=True):
            message = size / link.bandwidth
            total += link.begun * (size > 0) + max(ms + link.slowed * message, message)  # (1)
        return total

    def at(self, n: float, kind: Kind, way: str) -> tuple[float, float]:
        """The first step, and every other, in ms: a straight line between two measured n, both on a logarithmic scale."""
        return self.between(n, kind, way, (1, 2))

    def share(self, N: int, P: int, kind: Kind, way: str) -> float:
        """The plain kernel on a rank's pairs, without merges and messages."""
        first, step = self.between(N / P, kind, way, (3, 4))
        return first + (P - 1) * step

    def parts(self, N: int, P: int, kind: Kind) -> dict[str, float]:
        """Of forward and backward, in ms: the plain kernels, and what is added by each of the other causes."""
        whole, none = self.ms(N, P, kind, BOTH), Link("", math.inf)
        products, at_home = self.share(N, P, kind, BOTH), self.ms(N, P, kind, BOTH, none)
        return {"products": products, "merges and sums": at_home - products,
                "slowed": whole - self.ms(N, P, kind, BOTH, replace(self.link, slowed=0.0)),
                "begun": whole - self.ms(N, P, kind, BOTH, replace(self.link, begun=0.0))}

    def worth(self, N: int, P: int, kind: Kind, way: str, link: Link | None = None) -> float:
        """How much faster than one GPU alone P of them are, in percent of P times."""
        # One GPU's time at the rate of the longest sequence that was measured: its pairs are as N squared.
        n = self.computed[kind, way][-1][0]
        alone = self.share(2 * n, 2, kind, way) * 2 * (N / (2 * n)) ** 2
        return 100 * alone / P / self.ms(N, P, kind, way, link)

    def ranks(self, N: int, kind: Kind) -> list[int]:
        """Numbers of ranks, powers of two, for which N / P was measured."""
        known = self.computed[kind, FORWARD]
        return [P for P in (2 ** k for k in range(1, 21)) if known[0][0] <= N / P <= known[-1][0]]

    def between(self, n: float, kind: Kind, way: str, columns: tuple[int, int]) -> tuple[float, float]:
        known = self.computed[kind, way]
        if not known[0][0] <= n <= known[-1][0]:
            raise ValueError(f"{n:g} tokens a rank were not measured; {known[0][0]:,} to {known[-1][0]:,} were")
        low = next(row for row in reversed(known) if row[0] <= n)
        high = next(row for row in known if row[0] >= n)
        part = 0.0 if low is high else math.log(n / low[0]) / math.log(high[0] / low[0])
        a, b = (low[c] ** (1 - part) * high[c] ** part for c in columns)
        return a, b


def read(path: Path = RECORDED) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def on_four() -> dict[str, Any]:
    """What four GPUs took; of problems that were measured twice, the row that has both passes."""
    found = read(ON_FOUR)
    rows: dict[tuple[Any, ...], Row] = {}
    for row in found["rows"]:
        if FORWARD in row:
            key = row["method"], row["N"], row["Hkv"], row["causal"], row["type"], row["Hq"]
            rows[key] = row if BOTH in row else rows.get(key, row)
    return {**found, "rows": list(rows.values())}


def rings(found: dict[str, Any], alone: bool) -> list[Row]:
    return [row for row in found["rows"] if row["method"] == "ring" and FORWARD in row and bool(row.get("alone")) == alone]


def kind_of(row: Row) -> Kind:
    return row["causal"], row["Hkv"]


def model(found: dict[str, Any]) -> Model:
    computed = {}
    alone = rings(found, True)
    for kind in sorted({kind_of(row) for row in alone}):
        for way in (FORWARD, BOTH):
            mine = {(row["ranks"], row["N"] // row["ranks"]): row[way] for row in alone if kind_of(row) == kind and way in row}
            lines = []
            for n in sorted({n for _, n in mine}):
                two, four = mine.get((2, n)), mine.get((4, n))
                if two is None:
                    continue
                ms, share = alone_ms(two), two["share_ms"]
                # With four ranks there are two steps more than with two. Where four were not measured, steps are as long
                # as the first one: their pairs are as many, and there is little else in so long ones.
                step = (alone_ms(four) - ms) / 2 if four else ms / 2
                of_share = (four["share_ms"] - share) / 2 if four else share / 2
                lines.append((n, ms - step, step, share - of_share, of_share))
            computed[kind, way] = lines
    rows = [(row, way) for row in rings(found, False) for way in (FORWARD, BOTH)
            if kind_of(row) == FITTED and row["N"] >= FITTED_FROM and way in row]
    link = Link("NVLink", bandwidth(found))
    # What a row takes is made of straight pieces in the two numbers: so the nearest line at the last two gives the next.
    for _ in range(20):
        points = []
        for row, way in rows:
            here, begun, slowed = (Model(computed, replace(link, begun=link.begun + a, slowed=link.slowed + b)).ms(
                row["N"], row["ranks"], FITTED, way) for a, b in ((0, 0), (STEP, 0), (0, STEP)))
            ms = row[way]["ms"]
            points.append(((begun - here) / STEP / ms, (slowed - here) / STEP / ms, (ms - here) / ms))
        a, b = fitted(points)
        link = replace(link, begun=max(link.begun + a, 0.0), slowed=max(link.slowed + b, 0.0))
    return Model(computed, link)


def fitted(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(a, b) with which a x + b y is nearest to z, by least squares over all (x, y, z)."""
    xx, xy, yy, xz, yz = (sum(point[c] * point[e] for point in points) for c, e in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2)))
    determinant = xx * yy - xy * xy
    return (yy * xz - xy * yz) / determinant, (xx * yz - xy * xz) / determinant


def alone_ms(measured: dict[str, Any]) -> float:
    """Without others the method and the method without messages are the same, so all their rounds count."""
    return statistics.median(measured["rounds"] + measured["silent_rounds"])


def bandwidth(found: dict[str, Any]) -> float:
    """Bytes a ms of the last move, of the rank that came to it last: the median of the timelines of long sequences."""
    all_of_them = []
    for one in found["timelines"]:
        if one["method"] == "ring" and one["N"] >= 16384:
            size = WIDTH * 2 * one["Hkv"] * one["N"] / len(one["ranks"]) * D
            moves = [step["copy"] for rank in one["ranks"] for step in rank["steps"] if "the last move" in step["at"]]
            all_of_them.append(size / min(end - start for start, end in moves))
    return statistics.median(all_of_them)


def predictions(found: dict[str, Any], made: Model | None = None) -> list[tuple[Row, str, float, float]]:
    """(row, way, measured, predicted) of all rows of the ring on more than one GPU whose tokens a rank were measured."""
    made = made or model(found)
    lines = []
    for row in rings(found, False):
        for way in (FORWARD, BOTH):
            if way in row:
                try:
                    lines.append((row, way, row[way]["ms"], made.ms(row["N"], row["ranks"], kind_of(row), way)))
                except (ValueError, KeyError):
                    continue
    return sorted(lines, key=lambda line: (not line[0]["causal"], -line[0]["Hkv"], line[0]["N"]))


def main(words: Sequence[str]) -> int:
    found = read()
    made = model(found)
    print(f"{made.link.words()}, begun in {1000 * made.link.begun:.0f} us, slowed {made.link.slowed:.2f}")
    if words:
        N, kind = int(words[0]), (True, int(words[1]))
        for P in (2 ** k for k in range(1, 11)):
            try:
                for link in (made.link, made.across_hosts()):
                    print(f"{P:5} {link.name:14}", *(f"{way} {made.ms(N, P, kind, way, link):.1f} ms, "
                                                      f"{made.worth(N, P, kind, way, link):.0f} %;" for way in (FORWARD, BOTH)))
                print(f"{'':20} of both:", ", ".join(f"{name} {ms:.0f} ms" for name, ms in made.parts(N, P, kind).items()))
            except ValueError as error:
                print(P, error)
        return 0
    for row, way, measured, computed in [*predictions(found, made), *predictions(on_four(), made)]:
        print(f"{'causal' if row['causal'] else 'none':6} N {row['N']:7,} Hkv {row['Hkv']:2} P {row['ranks']} {way:16} "
              f"{measured:9.2f} ms, predicted {computed:9.2f}: {100 * (computed / measured - 1):+.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
