"""The ladder of stage 06, its speed against the peers, and what the compiler made of each kernel."""

import json
from pathlib import Path

from figure import Bar, Bars, Bound, Chart, Line, Lines, Table, line, significant
from results import BadResults, Results, Row, group, median, ratio, spread

RUNGS = {"mma": "1 tensor cores", "cp_async": "2 cp.async", "swizzle": "3 swizzle, ldmatrix",
         "fa2": "4 FlashAttention-2", "wgmma": "5 wgmma, TMA", "ring": "6 ring of barriers",
         "specialised": "7 specialised warps", "lock": "8 ping-pong", "no_lock": "8 without the lock",
         "overlap": "9 overlap", "rows": "10 row by row", "persistent": "11 persistent",
         "hopper": "12 longest first"}
FINAL = {"hopper": "hopper", "fa2": "fa2 (mma.sync)"}  # the kernels that take every problem
PEERS = {"cudnn": "cuDNN", "fa2": "FlashAttention-2, PyTorch"}
KERNELS = Path(__file__).resolve().parents[1] / "results" / "kernels.json"
LADDER: dict[str, object] = {"N": 4096, "d": 128, "causal": 0}


def charts(r: Results) -> list[Chart | Table]:
    def rows(variant: str, chip: str = "hot", stage: str = "stage06", **where: object) -> list[Row]:
        """Those of compare.py; else the benchmark's own, which knows no peers and no cool chip."""
        found = r.select(stage=stage, what="forward", variant=variant, dtype="bf16", G=1, chip=chip, **where)
        return found or r.select(stage=stage, what="forward", variant=variant, dtype="bf16", G=None, chip=None, **where)

    def ladder() -> Chart | None:
        """One bar a rung."""
        rungs = {label: some for variant, label in RUNGS.items() if (some := rows(variant, **LADDER))}
        if not rungs:
            return None
        below = r.select(stage="stage04", what="forward", variant="register_tiled", **LADDER)
        bars = [Bar("04, fp32", spread(below, "flops").scaled(1e-12), significant(1e-12 * median(below, "flops")),
                    "previous")] if below else []
        for label, some in rungs.items():
            value = spread(some, "flops").scaled(1e-12)
            step = f", ×{significant(ratio(below, some, 'time').mid)}" if below else ""
            bars.append(Bar(label, value, significant(value.mid) + step))
            below = some
        speeds = {label: 1e-12 * median(found, "flops") for variant, label in reversed(PEERS.items())
                  if (found := rows(variant, stage="peer", **LADDER))}
        speeds["matrix product"] = 1e-12 * median(below, "roof")
        return Chart("ladder", "One idea at a time", [
            Bars("TFLOP/s, and the step from the rung above", bars, "TFLOP/s", "",
                 [Bound(f"{label} {significant(speed)}", speed) for label, speed in speeds.items()])],
            f"{r.context['device']} · bf16 · N 4096, d 128, no mask, B N = 16384, H d = 2048"
            f" · FLOPs: {r.context['flop_formula']}")

    def panel(d: int, causal: int) -> Lines | None:
        """Speed against N."""
        ours = {label: rows(variant, d=d, causal=causal) for variant, label in FINAL.items()}
        peers = {label: rows(variant, stage="peer", d=d, causal=causal) for variant, label in PEERS.items()}
        lines: list[Line] = [line(label, some, "flops", scale=1e-12) for label, some in ours.items() if some]
        lines += [line(label.replace(", ", ",\n"), some, "flops", scale=1e-12, role="peer")
                  for label, some in peers.items() if some]
        best = next((some for some in ours.values() if some), None)
        if best is None:
            return None
        high = 1e-12 * median(list(group(best, "N").values())[-1], "roof")
        return Lines(f"TFLOP/s, {'causal' if causal else 'no mask'}", lines, "N, sequence length (B N = 16384)",
                     bounds=[Bound("matrix product", high)], y_scale="linear")

    items: list[Chart | Table] = [chart] if (chart := ladder()) else []
    for d in (64, 128, 256):
        panels = [one for causal in (0, 1) if (one := panel(d, causal))]
        if panels:
            items.append(Chart(f"speed_d{d}", f"The forward, head dimension {d}", panels))

    # ---- ratios, round by round
    lengths = sorted({row.keys["N"] for row in r.select(stage="peer", what="forward", variant="cudnn")})
    for chip in ("hot", "cool"):
        lines_of_table = []
        for d in (64, 128, 256):
            for causal in (0, 1):
                rival = group(rows("cudnn", chip, "peer", d=d, causal=causal), "N")
                who = [(label, rows(v, chip, d=d, causal=causal)) for v, label in FINAL.items()]
                who.append(("FlashAttention-2, PyTorch", rows("fa2", chip, "peer", d=d, causal=causal)))
                for label, some in who:
                    by = group(some, "N")
                    cells = [f"{ratio(rival[n], by[n], 'time').mid:.2f}" if n in rival and n in by else "–"
                             for n in lengths]
                    if any(cell != "–" for cell in cells):
                        lines_of_table.append([f"{d}", "causal" if causal else "none", label, *cells])
        if lines_of_table:
            header = ["d", "mask", "speed relative to cuDNN", *(f"N {n:g}" for n in lengths)]
            items.append(Table(f"ratios_{chip}", header, lines_of_table))

    # ---- error beside speed
    lines_of_table = []
    for d in (64, 128, 256):
        for label, stage, variant in (("hopper", "stage06", "hopper"), ("fa2", "stage06", "fa2"),
                                      ("cuDNN", "peer", "cudnn"), ("FlashAttention-2, PyTorch", "peer", "fa2")):
            cells = []
            for dtype in ("bf16", "f16"):
                some = r.select(stage=stage, what="forward", variant=variant, dtype=dtype, G=1, chip="hot",
                                **{**LADDER, "d": d})
                cells += [f"{1e3 * median(some, 'error'):.2f}", significant(1e-12 * median(some, "flops"))] if some \
                    else ["–", "–"]
            if cells[0] != "–":
                lines_of_table.append([f"{d}", label, *cells])
    if lines_of_table:
        items.append(Table("errors", ["d", "N 4096, no mask", "bf16: error / 10⁻³", "TFLOP/s", "fp16: error / 10⁻³", "TFLOP/s"],
                           lines_of_table))

    # ---- groups of query heads that share a key head
    lines_of_table = []
    for d in (64, 128):
        for causal in (0, 1):
            where = {"what": "forward", "d": d, "causal": causal, "G": 8, "chip": "hot", "dtype": "bf16"}
            rival = group(r.select(stage="peer", variant="cudnn", **where), "N")
            by = group(r.select(stage="stage06", variant="hopper", **where), "N")
            cells = [f"{significant(1e-12 * median(by[n], 'flops'))} ({ratio(rival[n], by[n], 'time').mid:.2f})"
                     if n in rival and n in by else "–" for n in lengths]
            if any(cell != "–" for cell in cells):
                lines_of_table.append([f"{d}", "causal" if causal else "none", *cells])
    if lines_of_table:
        header = ["d", "mask", *(f"N {n:g}" for n in lengths)]
        items.append(Table("groups", header, lines_of_table))

    if not items:
        raise BadResults("no row of stage06 in bf16; measure it too")

    # ---- what ptxas said
    if KERNELS.is_file():
        kernels = json.loads(KERNELS.read_text(encoding="utf-8"))["kernels"]
        header = ["kernel", "file", "for", "registers", "shared, fixed (B)", "spilled (B)", "barriers"]
        table = [[f"`{k['name'].replace('__nv_bfloat16', 'bf16').replace('__half', 'fp16')}`", k["source"],
                  k["architecture"], f"{k['registers']}", f"{k['shared_bytes']}",
                  f"{k['spill_store_bytes'] + k['spill_load_bytes']}", f"{k['barriers']}"] for k in kernels]
        items.append(Table("kernels", header, table,
                           caption="What ptxas said when they were compiled (`results/kernels.json`); shared memory "
                                   "whose size a launch chooses comes on top."))
    return items
