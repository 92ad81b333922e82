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
    names = {"safe_softmax": "01", "safe_rows": "rows, safe", "rows": "rows", "lanes": "lanes"}
    times = [("safe_rows", "safe_softmax"), ("rows", "safe_softmax"), ("lanes", "safe_softmax"), ("rows", "safe_rows")]
    table = Table("cost", ["N", *(f"{name}: memory, KiB" for name in names.values()),
                           *(f"{names[a]}: time, × {names[b]}" for a, b in times)], [
        [f"{n:g}"] + [significant(KIB * median(by_n[v][n], "extra_bytes")) for v in names]
        + [significant(ratio(by_n[a][n], by_n[b][n], "time").mid) for a, b in times]
        for n in by_n["rows"]])
    return [cost, table, ladder(r)]


def ladder(r: Results) -> Table:
    """From rows to lanes. Factors are quotients of medians, so that those of the steps multiply to the whole one."""
    new = {"rows": ("the lesson", ""), "vector_dot": ("dot products with components on the lanes", "rows"),
           "one_exp": ("aside: one exponential for each key", "vector_dot"),
           "o_in_registers": ("aside: o stays in registers between two keys", "vector_dot"),
           "row_block": ("W rows take a key before the next key", "vector_dot"),
           "vector_exp": ("W exponentials in one vector", "row_block"),
           "lanes": ("dot products and outputs with rows on the lanes", "vector_exp")}
    lengths = (256, 512, 1024)

    def rows(variant: str, n: int) -> list[Row]:
        return r.select(what="forward", variant=variant, N=n, causal=0, dtype="f32")

    def factor(variant: str, base: str, n: int) -> float:
        return median(rows(base, n), "time") / median(rows(variant, n), "time")

    steps = [(variant, base) for variant, (what, base) in new.items() if base and not what.startswith("aside")]
    product = " · ".join(significant(factor(*step, 1024)) for step in steps)
    head = ["step", "what is new", "N = 1024: time, ms", "share of the peak", "how many times as fast as"]
    return Table("ladder", head + [f"N = {n}" for n in lengths], [
        [f"`{variant}`", what, significant(1e3 * median(rows(variant, 1024), "time")),
         significant(100 * median(rows(variant, 1024), "of_roof")) + " %", f"`{base}`" if base else "-"]
        + [significant(factor(variant, base, n)) if base else "-" for n in lengths]
        for variant, (what, base) in new.items()]
        + [["all four", f"N = 1024: {product}", "", "", "`rows`"]
           + [significant(factor("lanes", "rows", n), 2) for n in lengths]])
