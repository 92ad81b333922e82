"""The charts and the tables of stage 01: what subtracting the maximum buys, and what it costs."""

from figure import Bound, Chart, Lines, Table, line, ratio_line, significant
from results import Results, group, median, ratio


def charts(r: Results) -> list[Chart | Table]:
    def rows(what: str, stage: str, **where: float) -> list:
        return r.select(stage=stage, what=what, dtype="f32", **where)

    accuracy = Chart("accuracy", "Large scores: exp overflows, unless the maximum is subtracted first", [
        Lines("Largest error, relative to the largest output", [
            line("00 naive", rows("error", "stage00"), "max_error", x="scores", role="previous"),
            line("01 safe", rows("error", "stage01"), "max_error", x="scores"),
        ], x_label="size of the scores", x_scale="log10")],
        subtitle=f"{r.context['device']} ({r.context['isa']}) · f32 · N = 128, d = 64 · against double precision",
        see="00 follows 01 until the scores pass 88, where exp overflows and nothing is left to draw; 01 goes on.")

    naive = rows("forward", "stage00", d=64, causal=0)
    full, causal = (rows("forward", "stage01", d=64, causal=c) for c in (0, 1))
    cost = Chart("cost", "The price of the maximum: time of 01 relative to 00", [
        Lines("Time relative to 00 without a mask", [
            ratio_line("01", full, naive, "time"),
            ratio_line("01, causal", causal, naive, "time", role="peer"),
        ], x_label="N, sequence length (4 heads, d = 64)", bounds=[Bound("00", 1.0)], y_scale="linear")],
        see="How far the lines stay from the dashes is what the pass for the maximum costs, and what a mask changes.")

    def milliseconds(rows: list) -> str:
        return significant(1e3 * median(rows, "time"))

    def rounds(a: list, b: list) -> str:
        """The median of a / b within a round, and the rounds from the smallest to the largest: charts show less."""
        below = {row.repetition: row.value("time") for row in b}
        every = [row.value("time") / below[row.repetition] for row in a if row.repetition in below]
        return f"{ratio(a, b, 'time').mid:.2f} ({min(every):.2f} to {max(every):.2f})"

    before, after, masked = (group(x, "N") for x in (naive, full, causal))
    table = Table("cost", ["N", "00 (ms)", "01 (ms)", "01, causal (ms)", "01 / 00", "01, causal / 00"], [
        [f"{n:g}", *(milliseconds(each[n]) for each in (before, after, masked)),
         *(rounds(each[n], before[n]) for each in (after, masked))]
        for n in after])

    two, by_rows, three = (group(rows("line", stage, variant=name), "N") for stage, name in (
        ("stage00", "two_passes"), ("stage00", "two_passes_by_rows"), ("stage01", "three_passes")))
    header = ["N", "00 (ms)", "00 by rows (ms)", "01 (ms)", "01 / 00", "order", "maximum"]
    softmax = Table("softmax", header, [
        [f"{n:g}", *(milliseconds(each[n]) for each in (two, by_rows, three)),
         *(rounds(*pair) for pair in ((three[n], two[n]), (by_rows[n], two[n]), (three[n], by_rows[n])))]
        for n in three])
    return [accuracy, cost, table, softmax]
