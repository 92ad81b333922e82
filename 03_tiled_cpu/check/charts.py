"""The charts and the table of stage 03: bytes that must move, counted, and how near the peak it comes."""

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
    return [Table("parts", ["", "ns a score", "result"], [
        [PARTS[name], significant(ns_a_score(found), 3), "wrong" if "unverified" in found[0].counters else "verified"]
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
    moved = Chart("traffic", "Bytes between memory and cache for one head, counted",
                  [traffic(64, lengths), traffic(128, lengths)],
                  subtitle="f32 · arithmetic, not a measurement: what must move if nothing but a tile stays in the "
                           "cache",
                  see="Each line is twice as steep as the least, and four times the rows in a tile bring it down "
                      "by about four.", counted=True)

    of_peak, against = [], []
    for d in (64, 128):
        fast = group(rows("fast", d, 0), "N")
        columns = [group(rows(v, d, c), "N") for v, c in (("tiled", 0), ("fast", 0), ("fast_2_threads", 0), ("fast", 1),
                                                          ("fast_2_threads", 1))]
        for n in fast:
            of_peak.append([f"{d}", f"{n:g}", *(significant(100 * median(x[n], "of_roof"), 2) + " %" if n in x else "–"
                                                for x in columns)])
    by_n = {(v, c): group(rows(v, 64, c), "N") for v in ("safe_softmax", "lanes", "tiled", "fast") for c in (0, 1)}
    pairs = [("tiled", "safe_softmax", 0), ("tiled", "lanes", 0), ("fast", "safe_softmax", 0), ("fast", "lanes", 0),
             ("fast", "safe_softmax", 1)]
    for n in by_n["fast", 0]:
        against.append([f"{n:g}", *(significant(ratio(by_n[other, c][n], by_n[mine, c][n], "time").mid) + "×"
                                    for mine, other, c in pairs)])
    tables = [Table("speed", ["d", "N", "`tiled`", "`fast`", "`fast`, 2 threads", "`fast`, causal",
                              "`fast`, causal, 2 threads"], of_peak),
              Table("against", ["N", "`tiled` / 01", "`tiled` / 02 `lanes`", "`fast` / 01", "`fast` / 02 `lanes`",
                                "`fast` / 01, causal"], against)]

    ideas = ["micro-kernel, 64 queries a tile, the heads' tasks interleaved", "256 queries share each tile of K and V",
             "one head after the other", "transposes in registers"]
    steps = [(idea, {d: group(rows(f"step{k}", d, 0), "N") for d in (64, 128)}) for k, idea in enumerate(ideas, 1)]
    places = [(d, n) for d in (64, 128) for n in (512, 2048, 4096, 8192) if n in steps[0][1][d]]
    steps_table = Table("steps", ["each line adds", *(f"d = {d}, N = {n:g}" for d, n in places)], [
        [idea, *(significant(100 * median(by_d[d][n], "of_roof"), 2) + " %" for d, n in places)]
        for idea, by_d in steps], page="fast/README.md")
    return [speed, moved, *tables, steps_table, *parts(r), *sizes(r)]
