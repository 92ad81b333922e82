"""The charts and the table of stage 01: what subtracting the maximum buys, and what it costs."""

from figure import Bound, Chart, Lines, Table, line, ratio_line, significant
from results import Results, group, median, ratio


def charts(r: Results) -> list[Chart | Table]:
    error = {variant: r.select(what="error", variant=variant, dtype="f32") for variant in ("naive", "safe_softmax")}
    accuracy = Chart("accuracy", "Large scores: exp overflows, unless the maximum is subtracted first", [
        Lines("Largest relative error", [
            line("00 naive", error["naive"], "max_error", x="scores", role="previous"),
            line("01 safe", error["safe_softmax"], "max_error", x="scores"),
        ], x_label="Size of the scores", x_scale="log10")])

    before, after = ([r.select(stage=stage, what="forward", variant=variant, d=64, causal=causal, dtype="f32")
                      for causal in (0, 1)] for stage, variant in (("stage00", "naive"), ("stage01", "safe_softmax")))
    lines = [ratio_line(label, a, b, "time")
             for label, a, b in zip(("01 full", "01 causal"), after, before) if a and b]
    cost = Chart("cost", "The price of the maximum: time of 01 relative to 00", [
        Lines("Time relative to 00", lines, bounds=[Bound("00 naive", 1.0)], y_scale="linear")])

    safe, naive = group(after[0], "N"), group(before[0], "N")
    table = Table("cost", ["N", "00 (ms)", "01 (ms)", "01 / 00"], [
        [f"{n:g}", significant(1e3 * median(naive[n], "time")), significant(1e3 * median(safe[n], "time")),
         significant(ratio(safe[n], naive[n], "time").mid)]
        for n in safe if n in naive])
    return [accuracy, cost, table]
