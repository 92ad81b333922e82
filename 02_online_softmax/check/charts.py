"""The chart and the table of stage 02: memory that does not grow, and what it costs in time on a CPU."""

from figure import Chart, Lines, Table, line, significant
from results import Results, Row, group, median, ratio

KIB = 1 / 2**10
X_LABEL = "N, sequence length (d = 64; 4 heads, 1 from 4096 on)"
METHODS = {"safe_softmax": "01", "safe_rows": "rows, safe softmax", "rows": "02 rows", "lanes": "02 lanes"}
ROLES = {"safe_softmax": "previous", "safe_rows": "peer"}


def charts(r: Results) -> list[Chart | Table]:
    rows = {variant: r.select(what="forward", variant=variant, d=64, causal=0, dtype="f32") for variant in METHODS}

    def lines(field: str, scale: float, variants: list[str]) -> list:
        return [line(METHODS[v], rows[v], field, scale=scale, role=ROLES.get(v, "this")) for v in variants]

    cost = Chart("cost", "Memory stays flat; time, on a CPU, depends on lanes", [
        Lines("Extra memory (KiB)", lines("extra_bytes", KIB, ["safe_softmax", "safe_rows", "rows", "lanes"]), X_LABEL),
        Lines("Share of the FMA peak (%)", lines("of_roof", 100, list(METHODS)), X_LABEL),
    ], see="Both lines of 02 need the same memory whatever N is, but for the step to one head, where 01 grows with N²; "
           "in time the same loop is slow row by row, and fast with a row in each lane.")
    by_n = {variant: group(rows[variant], "N") for variant in METHODS}
    table = Table("cost", ["N", "01: memory (KiB)", "rows", "lanes", "rows, safe: time", "rows: time", "lanes: time"], [
        [f"{n:g}"] + [significant(KIB * median(by_n[v][n], "extra_bytes")) for v in ("safe_softmax", "rows", "lanes")]
        + [significant(ratio(by_n[v][n], by_n["safe_softmax"][n], "time").mid) + " × 01"
           for v in ("safe_rows", "rows", "lanes")]
        for n in by_n["rows"]])
    ladder = Table("ladder", ["step", "what is new", "time (ms)", "of the step above", "share of the peak"], [
        [name, new] + [significant(1e3 * median(row, "time"))]
        + ([significant(100 * ratio(row, above, "time").mid) + " %"] if above else ["-"])
        + [significant(100 * median(row, "of_roof")) + " %"]
        for name, new, row, above in steps(r)])
    return [cost, table, ladder]


def steps(r: Results) -> list[tuple[str, str, list[Row], list[Row] | None]]:
    """From rows to lanes: name, what is new, its rows at N = 1024, and those of the step before it."""
    new = {"rows": "the lesson", "vector_dot": "dot products with components on the lanes",
           "row_block": "W rows take a key before the next key", "vector_exp": "W exponentials in one vector",
           "lanes": "dot products and outputs with rows on the lanes"}
    rows = {variant: r.select(what="forward", variant=variant, N=1024, dtype="f32") for variant in new}
    above = [None, *rows.values()]
    return [(f"`{variant}`", new[variant], rows[variant], before) for variant, before in zip(new, above)]
