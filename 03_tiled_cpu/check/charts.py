"""The charts and the table of stage 03: bytes that must move, counted, and how near the peak it comes."""

import statistics

from figure import Bound, Chart, Line, Lines, Point, Table, line, significant
from results import Results, Row, Spread, group, median, ratio

METHODS = {"safe_softmax": "01", "lanes": "02 lanes", "tiled": "03 tiled", "fast": "03 fast",
           "fast_2_threads": "03 fast, 2 threads"}
ROLES = {"safe_softmax": "previous", "lanes": "peer"}
MIB = 1 / 2**20
SIZES = (1, 4, 16, 64, 256, 1024)


def counted(label: str, role: str, bytes_at, lengths: list[int]) -> Line:
    """A line that is arithmetic, not a measurement: MiB moved for one head of N queries and keys."""
    return Line(label, [Point(n, Spread(*3 * [MIB * bytes_at(n)])) for n in lengths], role)


def traffic(d: int, lengths: list[int]) -> Lines:
    tensors = lambda n: 4 * 4 * n * d  # Q, K, V in, O out, 4 bytes each
    return Lines("MiB moved", [
        counted("01: scores to memory and back", "previous", lambda n: tensors(n) + 4 * 4 * n * n, lengths),
        counted("03, Br = 64", "this", lambda n: 4 * (2 * n * d + 2 * n * d * n / 64), lengths),
        counted("03, Br = 256", "this", lambda n: 4 * (2 * n * d + 2 * n * d * max(n / 256, 1)), lengths),
        counted("least", "bound", tensors, lengths),
    ], where=f"d = {d}")


def ns_a_score(rows: list[Row]) -> float:
    """Of one head, no mask, in the fastest round: where `new` puts the scratch costs up to a third, and is luck."""
    return 1e9 * min(row.time for row in rows) / float(rows[0].keys["N"]) ** 2


def fastest(r: Results) -> str:
    return f"The fastest of the rounds on {r.context['device']} (`results/{r.path.name}`)."


PARTS = {"as_written": "`tiled` as written", "no_exp": "one multiply-add in place of `exp`",
         "no_PV": "without PV, equation (6)", "no_QK": "without QKᵀ, equation (3)",
         "no_products": "without both products", "vector_exp": "`exp2` of whole vectors, and a vector of sums",
         "register_sums": "both products with their sums in registers", "both": "the last two together"}


def parts(r: Results) -> list[Table]:
    """What the lesson costs with a part left out, or done better."""
    rows = {name: r.select(what="ablation", variant=name) for name in PARTS}
    if not all(rows.values()):
        return []
    ns = {name: ns_a_score(found) for name, found in rows.items()}

    def of_peak(found: list[Row]) -> str:
        if "unverified" in found[0].counters:
            return "–"
        return significant(100 * min(found, key=lambda row: row.time).value("of_roof"), 2) + " %"

    return [Table("parts", ["", "ns a score", "saved", "result", "share of the peak"], [
        [PARTS[name], significant(ns[name], 3),
         f"{ns['as_written'] - ns[name]:.1f}" if name != "as_written" else "–",
         "wrong" if "unverified" in found[0].counters else "verified", of_peak(found)]
        for name, found in rows.items()], caption=fastest(r))]


def sizes(r: Results) -> list[Table]:
    """What the lesson costs with tiles of other sizes."""
    at: dict[tuple[object, ...], list[Row]] = {}
    for row in r.select(what="tiles"):
        at.setdefault((row.keys["N"], row.keys["Br"], row.keys["Bc"]), []).append(row)
    lines = [(f"Br, with Bc = 64, N = {n}", [(n, size, 64) for size in SIZES]) for n in (512, 4096)]
    lines += [(f"Bc, with Br = 64, N = {n}", [(n, 64, size) for size in SIZES]) for n in (512, 4096)]
    if not at:
        return []
    return [Table("sizes", ["ns a score for", *map(str, SIZES)], [
        [name, *(significant(ns_a_score(at[place]), 3) if place in at else "–" for place in places)]
        for name, places in lines], caption=fastest(r))]


def gain(above: list[Row], step: list[Row]) -> str:
    """Points of the peak that a step brings: the median of the differences within a round."""
    before = {row.repetition: row.value("of_roof") for row in above}
    points = statistics.median(100 * (row.value("of_roof") - before[row.repetition]) for row in step)
    return f"{points:+.0f}".replace("-", "−").replace("−0", "+0")


def charts(r: Results) -> list[Chart | Table]:
    def rows(variant: str, d: int, causal: int) -> list:
        return r.select(what="forward", variant=variant, d=d, causal=causal, dtype="f32")

    panels = [Lines("Share of the FMA peak (%)",
                    [line(METHODS[v], rows(v, 64, causal), "of_roof", scale=100, role=ROLES.get(v, "this"))
                     for v in METHODS],
                    "N, sequence length (4 heads, d = 64)", y_scale="linear", bounds=[Bound("peak", 100)], where=mask)
              for causal, mask in ((0, "no mask"), (1, "causal"))]
    speed = Chart("speed", "The same algorithm, near the limit of the processor", panels,
                  see="Tiles alone gain nothing over 02's lanes; with the arithmetic in vectors and registers the same "
                      "tiles come close to the peak.")
    lengths = [1024, 2048, 4096, 8192]
    moved = Chart("traffic", "Bytes into the cache that holds the tiles, for one head, counted",
                  [traffic(64, lengths), traffic(128, lengths)],
                  subtitle="f32 · arithmetic, not a measurement: what must move if nothing but a tile stays in the "
                           "cache",
                  see="Each line is twice as steep as the least, and four times the rows in a tile bring it down "
                      "by about four.", counted=True)

    percent = lambda found: significant(100 * median(found, "of_roof"), 2) + " %"

    def of_01(v: str, n: float, causal: int = 0) -> str:
        """The time, as a multiple of 01's."""
        mine, other = (group(rows(name, 64, causal), "N")[n] for name in (v, "safe_softmax"))
        return significant(ratio(mine, other, "time").mid, 2) + " × 01"

    by_n = {v: group(rows(v, 64, 0), "N") for v in ("safe_softmax", "lanes", "tiled", "fast")}
    of_lesson = []
    for n in by_n["tiled"]:
        rounds = sorted(100 * row.value("of_roof") for row in by_n["tiled"][n])
        of_lesson.append([f"{n:g}", *(percent(by_n[v][n]) for v in ("safe_softmax", "lanes", "tiled")),
                          f"{rounds[0]:.0f} to {rounds[-1]:.0f} %", percent(by_n["fast"][n]),
                          of_01("tiled", n), of_01("fast", n)])
    of_fast = []
    for d in (64, 128):
        columns = [group(rows(v, d, c), "N") for v, c in (("fast", 0), ("fast_2_threads", 0), ("fast", 1),
                                                          ("fast_2_threads", 1))]
        for n in columns[0]:
            of_fast.append([f"{d}", f"{n:g}", *(percent(column[n]) for column in columns),
                            *(of_01("fast", n, c) if d == 64 else "–" for c in (0, 1))])
    tables = [Table("speed", ["N", "01", "02 `lanes`", "`tiled`", "its rounds", "`fast`", "`tiled`: time",
                              "`fast`: time"], of_lesson),
              Table("fast", ["d", "N", "`fast`", "2 threads", "causal", "causal, 2 threads", "time",
                             "causal: time"], of_fast, page="fast/README.md")]

    ideas = ["micro-kernel alone", "+ 256 queries share each tile", "+ one head after the other",
             "+ transposes in registers"]
    steps = [{d: group(rows(f"step{k}", d, 0), "N") for d in (64, 128)} for k in range(1, 5)]
    steps_table = Table("steps", ["d", "N", "K and V of 4 heads", *ideas, "all of them"], [
        [f"{d}", f"{n:g}", f"{4 * 2 * n * d * 4 * MIB:g} MiB", percent(steps[0][d][n]),
         *(gain(above[d][n], step[d][n]) for above, step in zip(steps, steps[1:])), percent(steps[-1][d][n])]
        for d in (64, 128) for n in steps[0][d]], page="fast/README.md")
    return [speed, moved, *tables, steps_table, *parts(r), *sizes(r)]
