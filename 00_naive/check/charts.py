"""The chart and the tables of stage 00: what the definition costs as it stands, and which of its lines the time goes to."""

from figure import Chart, Lines, Table, line, significant, slope
from results import Results, group, median

MIB = 1 / 2**20
X_LABEL = "N, sequence length (4 heads, d = 64)"


def charts(r: Results) -> list[Chart | Table]:
    naive = r.select(stage="stage00", what="forward", variant="naive", d=64, causal=0, dtype="f32")
    time = line("00 naive", naive, "time", scale=1e3)
    memory = line("00 naive", naive, "extra_bytes", scale=MIB)
    cost = Chart("cost", "Twice the sequence: four times the memory, and at least four times the time", [
        Lines("Time (ms)", [time, slope("∝ N²", time, 2)], X_LABEL),
        Lines("Extra memory (MiB)", [memory, slope("∝ N²", memory, 2)], X_LABEL),
    ], see="A line that follows the dashes grows with N²: memory does, and time rises above them where S and P no "
           "longer fit into the cache.")
    table = Table("cost", ["N", "Time (ms)", "Extra memory (MiB)", "GFLOP/s", "% of FMA peak"], [
        [f"{n:g}", significant(1e3 * median(rows, "time")), significant(MIB * median(rows, "extra_bytes")),
         significant(1e-9 * median(rows, "flops")), significant(100 * median(rows, "of_roof"), 2)]
        for n, rows in group(naive, "N").items()])
    parts = {name: group(r.select(stage="stage00", what="line", variant=name, d=64, dtype="f32"), "N")
             for name in ("scores", "exponentials", "division", "values")}
    lines = []
    for n in parts["scores"]:
        ms = {name: 1e3 * median(rows[n], "time") for name, rows in parts.items()}
        softmax = (ms["exponentials"] + ms["division"]) / sum(ms.values())
        peaks = [f"{significant(100 * median(parts[name][n], 'of_roof'), 2)} %" for name in ("scores", "values")]
        lines.append([f"{n:g}", *(significant(each) for each in ms.values()), f"{significant(100 * softmax, 2)} %",
                      *peaks])
    header = ["N", "(1) scores, ms", "(2) exp, ms", "(2) sum and divide, ms", "(3) output, ms", "softmax's share",
              "(1) of peak", "(3) of peak"]
    return [cost, table, Table("lines", header, lines)]
