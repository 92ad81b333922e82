"""The chart and the tables of stage 00: what the definition costs as it stands, and which of its lines the time goes to."""

from figure import Chart, Lines, Table, line, significant, slope
from results import Results, group, median, ratio

MIB = 1 / 2**20
X_LABEL = "N, sequence length (4 heads, d = 64)"


def charts(r: Results) -> list[Chart | Table]:
    naive = r.select(stage="stage00", what="forward", variant="naive", d=64, causal=0, dtype="f32")
    time = line("00 naive", naive, "time", scale=1e3)
    memory = line("00 naive", naive, "extra_bytes", scale=MIB)
    cost = Chart("cost", "Twice the length: about four times the memory, at least four times the time", [
        Lines("Time (ms)", [time, slope("∝ N²", time, 2)], X_LABEL),
        Lines("Extra memory (MiB)", [memory, slope("∝ N²", memory, 2)], X_LABEL),
    ], see="A line that follows the dashes grows with N²: memory does, and time rises above them where S and P no "
           "longer fit into the cache.")
    table = Table("cost", ["N", "Time (ms)", "Extra memory (MiB)", "GFLOP/s", "% of FMA peak"], [
        [f"{n:g}", significant(1e3 * median(rows, "time")), significant(MIB * median(rows, "extra_bytes")),
         significant(1e-9 * median(rows, "flops")), significant(100 * median(rows, "of_roof"), 2)]
        for n, rows in group(naive, "N").items()])

    names = ("scores", "exponentials", "division", "values", "copy")
    timed = r.select(stage="stage00", what="line", dtype="f32")
    lines, account = [], []
    for d, sizes in group(timed, "d").items():
        for n, here in group(sizes, "N").items():
            part = {name: [row for row in here if row.variant == name] for name in names}
            ms = {name: 1e3 * median(rows, "time") for name, rows in part.items()}
            peaks = {name: median(part[name], "of_roof") for name in ("scores", "values")}
            lines.append([f"{n:g}" if d == 64 else f"{n:g}, d = {d:g}",
                          *(significant(ms[name]) for name in names[:4]),
                          *(f"{significant(100 * peak, 2)} %" for peak in peaks.values()), significant(ms["copy"]),
                          f"{ratio(part['copy'], part['exponentials'], 'time').mid:.2f}"])
            if d != 64:
                continue
            useful = sum(ms[name] * peak for name, peak in peaks.items())
            lost = (ms[name] * (1 - peak) for name, peak in peaks.items())
            softmax = ms["exponentials"] + ms["division"]
            together = ms["scores"] + softmax + ms["values"]
            account.append([f"{n:g}", significant(together),
                            *(f"{100 * each / together:.1f} %" for each in (useful, *lost, softmax)),
                            f"{100 * useful / (useful + softmax):.0f} %"])
    header = ["N", "(1) scores, ms", "(2) exp, ms", "(2) sum and divide, ms", "(3) output, ms", "(1) of peak",
              "(3) of peak", "copy, ms", "copy / exp"]
    shares = ["N", "Sum of the lines (ms)", "Both products at the peak", "Lost in (1)", "Lost in (3)", "Softmax",
              "Reached if nothing is lost in (1) and (3)"]
    return [cost, table, Table("lines", header, lines), Table("account", shares, account)]
