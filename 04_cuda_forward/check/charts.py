"""The charts and the table of stage 04: speed against the baseline and PyTorch, and memory."""

from figure import Bound, Chart, Line, Lines, Point, Table, line, significant
from results import Results, Spread, group, median, ratio

KERNELS = {"baseline": ("04 baseline", "previous"), "tiled": ("04 tiled", "this"),
           "register_tiled": ("04 register_tiled", "this"), "longest_first": ("04 longest_first", "this")}
LADDER = ("tiled", "thread_tile", "fixed_width", "one_buffer", "register_tiled", "neighbours", "eight_rows",
          "weights_by_key", "eight_by_eight", "copies_ahead", "fragments_ahead", "lazy_maximum", "longest_first")
LADDER_CASES = ((64, 4096, 0), (64, 4096, 1), (128, 4096, 0), (128, 4096, 1), (64, 1024, 1), (128, 1024, 1))
PEERS = {"memory_efficient": "PyTorch, memory-efficient", "math": "PyTorch, math"}
HEADS = 32  # B Hq, as in bench.cpp
GIB = 1 / 2**30


def charts(r: Results) -> list[Chart | Table]:
    def rows(variant: str, d: int, causal: int, stage: str = "stage04") -> list:
        return r.select(stage=stage, what="forward", variant=variant, d=d, causal=causal, dtype="f32")

    def panel(d: int, causal: int) -> Lines:
        lines = [line(label, rows(variant, d, causal), "flops", scale=1e-12, role=role)
                 for variant, (label, role) in KERNELS.items() if rows(variant, d, causal)]
        lines += [line(label, rows(variant, d, causal, "peer"), "flops", scale=1e-12, role="peer")
                  for variant, label in PEERS.items() if rows(variant, d, causal, "peer")]
        cpu = rows("fast", d, causal, "stage03")
        if cpu:
            lines.append(line("03 fast, all CPU cores", cpu, "flops", scale=1e-12, role="previous"))
        roof = median(rows("register_tiled", d, causal)[:1], "roof") * 1e-12
        return Lines("TFLOP/s", lines, "N, sequence length (B = 4, H = 8)", bounds=[Bound("FMA peak", roof)],
                     where=f"d = {d}, {'causal' if causal else 'no mask'}")

    dims = [d for d in (64, 128) if rows("register_tiled", d, 0)]  # the default sizes measure one
    speed = Chart("speed", "The same loop on a GPU", [panel(d, 0) for d in dims],
                  see="The way from tiled to register_tiled is the step from shared memory to registers, the way to "
                      "longest_first the rest of the ladder; the dashes at the top are all that fp32 has.")
    causal = Chart("causal", "The same loop on a GPU, with a causal mask", [panel(d, 1) for d in dims],
                   see="Only visible pairs count as work: the kernels skip the rest and stay near their speed without a "
                       "mask, longest_first from the smallest N on; the baseline computes it and falls.")

    def gib(label: str, variant: str, role: str, d: int) -> Line:
        points = []
        for n, some in group(rows(variant, d, 0), "N").items():
            total = GIB * (4 * 4 * HEADS * n * d + median(some, "extra_bytes"))
            points.append(Point(n, Spread(total, total, total)))
        return Line(label, points, role)

    memory = Chart("memory", "Device memory: tensors and scratch", [
        Lines("GiB", [gib("baseline", "baseline", "previous", d), gib("the kernels", "tiled", "this", d)],
              "N, sequence length (B = 4, H = 8)", where=f"d = {d}") for d in dims],
        subtitle=f"{r.context['device']} · f32 · tensors as counted, scratch as the benchmark asked for it",
        see="The baseline is twice as steep: it keeps S, which grows with N², the kernels nothing but the tensors.")

    table_rows = []
    for d in dims:
        for masked in (0, 1):
            by = {v: group(rows(v, d, masked), "N") for v in KERNELS}
            peer = {v: group(rows(v, d, masked, "peer"), "N") for v in (*PEERS, "longest_first")}
            for n in (n for n in by["register_tiled"] if n in (1024, 4096, 16384)):
                speeds = [significant(1e-12 * median(by[v][n], "flops")) if n in by[v] else "–" for v in KERNELS]
                against = (significant(ratio(by["baseline"][n], by["longest_first"][n], "time").mid) + "×"
                           if n in by["longest_first"] else "–")
                beside = [significant(ratio(peer[v][n], peer["longest_first"][n], "time").mid) + "×"
                          if n in peer[v] and n in peer["longest_first"] else "–" for v in PEERS]
                table_rows.append([f"{d}", "causal" if masked else "none", f"{n:g}", *speeds, against, *beside])
    table = Table("speed", ["d", "mask", "N", "baseline", "tiled", "register_tiled", "longest_first (TFLOP/s)",
                            "than baseline", "than PyTorch memory-efficient", "than PyTorch math"], table_rows)

    rungs = []
    for step, rung in enumerate(LADDER, 1):
        found = [group(rows(rung, d, masked), "N").get(n) for d, n, masked in LADDER_CASES]
        name = rung if rung == "tiled" else f"[{rung}](ladder/{step}_{rung}.md)"
        rungs.append([name, *(significant(1e-12 * median(some, "flops")) if some else "–" for some in found)])
    ladder = Table("ladder", ["TFLOP/s", *(f"d {d}, N {n}{', causal' * masked}" for d, n, masked in LADDER_CASES)],
                   rungs)
    return [speed, causal, memory, table, ladder]
