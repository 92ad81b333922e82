"""The charts and tables of stage 05: the backward against one that stores P, against 04, and delta."""

from figure import Bound, Chart, Line, Lines, Point, Table, line, significant
from results import Results, Spread, group, median, ratio

KERNELS = {"stored": ("stores P", "previous"), "two_kernels": ("two_kernels", "this"), "fast": ("fast", "this"),
           "fast_atomic": ("fast_atomic", "this")}
PEERS = {"memory_efficient": "PyTorch, memory-efficient", "math": "PyTorch, math"}
HEADS = 32  # B Hq, as in bench.cpp
GIB = 1 / 2**30


def charts(r: Results) -> list[Chart | Table]:
    def rows(variant: str, d: int, causal: int, what: str = "backward", stage: str = "stage05") -> list:
        return r.select(stage=stage, what=what, variant=variant, d=d, causal=causal, dtype="f32")

    def panel(d: int) -> Lines:
        lines = [line(label, rows(variant, d, 0), "flops", scale=1e-12, role=role)
                 for variant, (label, role) in KERNELS.items()]
        lines += [line(label, rows(variant, d, 0, stage="peer"), "flops", scale=1e-12, role="peer")
                  for variant, label in PEERS.items() if rows(variant, d, 0, stage="peer")]
        roof = median(rows("two_kernels", d, 0)[:1], "roof") * 1e-12
        return Lines("TFLOP/s", lines, "N, sequence length (B = 4, H = 8)",
                     bounds=[Bound("FMA peak", roof), Bound("5/7 of it", roof * 5 / 7)], where=f"d = {d}, no mask")

    dims = [d for d in (64, 128) if rows("two_kernels", d, 0)]  # the default sizes measure one
    speed = Chart("speed", "The backward: five products counted, seven executed", [panel(d) for d in dims],
                  subtitle=f"{r.context['device']} · f32 · FLOPs: 10 d per visible (query, key) pair, for five "
                           "products",
                  see="Two kernels compute seven products where five count, so the lower dashes are their limit; what "
                      "stores P computes four, and pays in the next chart.")

    def gib(label: str, variant: str, role: str, d: int) -> Line:
        points = []
        for n, some in group(rows(variant, d, 0), "N").items():
            total = GIB * (8 * 4 * HEADS * n * d + 4 * HEADS * n + median(some, "extra_bytes"))
            points.append(Point(n, Spread(total, total, total)))
        return Line(label, points, role)

    memory = Chart("memory", "Device memory of a backward: tensors, LSE and scratch", [
        Lines("GiB", [gib("stores P and dP", "stored", "previous", d), gib("recomputes", "two_kernels", "this", d)],
              "N, sequence length (B = 4, H = 8)", where=f"d = {d}") for d in dims],
        subtitle=f"{r.context['device']} · f32 · tensors as counted, scratch as the benchmark asked for it",
        see="What stores P grows with N², what recomputes it with N: the gap between the lines is P and dP.")

    passes = []
    delta = []
    for d in dims:
        for masked in (0, 1):
            forward = group(rows("best", d, masked, "forward", "stage04"), "N")
            by = {v: group(rows(v, d, masked), "N") for v in (*KERNELS, "atomic", "with_dq", "in_loop") if rows(v, d, masked)}
            both = {v: group(rows(v, d, masked, "both"), "N") for v in ("stored", "fast")}
            peer = {v: group(rows(v, d, masked, stage="peer"), "N") for v in ("memory_efficient", "fast", "fast_atomic")}
            for n in (n for n in by["two_kernels"] if n in (1024, 4096, 16384)):
                ms = [significant(1e3 * median(x[n], "time"))
                      for x in (forward, by["two_kernels"], by["fast"], both["fast"])]
                beside = [significant(ratio(peer["memory_efficient"][n], peer[v][n], "time").mid) + "×"
                          if n in peer["memory_efficient"] and n in peer[v] else "–" for v in ("fast", "fast_atomic")]
                passes.append([f"{d}", "causal" if masked else "none", f"{n:g}", *ms,
                               significant(ratio(by["fast"][n], forward[n], "time").mid) + "×",
                               significant(ratio(both["stored"][n], both["fast"][n], "time").mid) + "×", *beside])
                if n >= 1024 and not masked:
                    base = by["two_kernels"][n]
                    delta.append([f"{d}", f"{n:g}", significant(1e3 * median(base, "time")),
                                  *(significant(ratio(by[v][n], base, "time").mid) + "×"
                                    for v in ("with_dq", "in_loop", "atomic", "fast", "fast_atomic"))])
    return [speed, memory,
            Table("speed", ["d", "mask", "N", "forward (04), ms", "two_kernels, ms", "fast, ms", "forward and fast, ms",
                            "fast / forward", "a step: as fast as storing P", "fast: as PyTorch memory-efficient",
                             "fast_atomic: as PyTorch memory-efficient"],
                  passes),
            Table("delta", ["d", "N", "own kernel (ms)", "time with_dq", "time in_loop", "time atomic", "time fast",
                            "time fast_atomic"], delta)]
