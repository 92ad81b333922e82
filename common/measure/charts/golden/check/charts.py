"""A small stage: one chart of every kind of panel element, and one table."""

from figure import Bound, Chart, Lines, Table, line, ratio_line, significant, slope
from results import Results, group, median


def charts(r: Results) -> list[Chart | Table]:
    naive = r.select(what="forward", variant="naive", d=64, causal=0)
    safe = r.select(what="forward", variant="safe", d=64, causal=0)
    time = line("00 naive", naive, "time", scale=1e3, role="previous")
    return [
        Chart("cost", "Time and its ratio", [
            Lines("Time (ms)", [time, line("01 safe", safe, "time", scale=1e3), slope("∝ N²", time, 2)]),
            Lines("Time relative to 00", [ratio_line("01 safe", safe, naive, "time")],
                  bounds=[Bound("00 naive", 1.0)], y_scale="linear")],
            see="How much the maximum costs."),
        Chart("accuracy", "Where the naive form fails", [
            Lines("Largest relative error",
                  [line("00 naive", r.select(what="error"), "max_error", x="scores", role="previous")],
                  x_label="Size of the scores", x_scale="log10")],
            see="Where the line ends."),
        Table("cost", ["N", "Time (ms)", "% of FMA peak"], [
            [f"{n:g}", significant(1e3 * median(rows, "time")), significant(100 * median(rows, "of_roof"))]
            for n, rows in group(safe, "N").items()]),
    ]
