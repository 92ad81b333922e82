"""Both ladders of stage 06, their speed against the peers, and what the compiler made of each kernel."""

import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from figure import Bar, Bars, Bound, Chart, Line, Lines, Point, Table, line, significant, subtitle
from results import BadResults, Results, Row, Spread, group, load, median, ratio, recorded, spread

sys.path.append(str(Path(__file__).resolve().parent))
import ab  # noqa: E402
import timeline  # noqa: E402


@dataclass(frozen=True)
class Pass:
    """Of attention, with what is said about its ladder."""

    what: str
    prefix: str  # of its charts and tables
    title: str
    rungs: dict[str, str]
    final: dict[str, str]  # the kernels that take every problem
    against: tuple[tuple[str, str, str], ...]  # what is said of whom: text, variant of ours, of a peer
    below: tuple[str, str, str]  # stage, kernel and label of the fp32 kernel that the ladder begins with
    page: str  # of its tables
    see: dict[int, str]  # in the chart of each d


FORWARD = Pass(
    "forward", "", "The forward",
    {"mma": "1 tensor cores", "cp_async": "2 cp.async", "swizzle": "3 swizzle, ldmatrix", "wide_warps": "4 wide warps",
     "two_loops": "5 two loops", "fa2": "fa2, the whole contract", "tma": "6 TMA", "wgmma": "7 wgmma",
     "ring": "8 ring of barriers", "specialised": "9 specialised warps",
     "lock": "10 lock", "no_lock": "10 without the lock", "overlap": "11 overlap", "rows": "12 row by row",
     "persistent": "13 persistent", "longest_first": "14 longest first", "hopper": "hopper, the whole contract"},
    {"hopper": "hopper", "fa2": "fa2 (mma.sync)"},
    (("hopper / cuDNN", "hopper", "cudnn"), ("hopper / FlashAttention-3", "hopper", "fa3"),
     ("fa2 / FlashAttention-2", "fa2", "fa2")),
    ("stage04", "register_tiled", "04, fp32"),
    "after_the_ladder.md",
    {64: "The exponentials take as long as the products here, so all stay far below the dashes, hopper the least.",
     128: "Twice the products for the same exponentials: hopper comes nearer to the dashes than at d = 64.",
     256: "With the most products for each exponential the way to the dashes is the shortest; short causal sequences "
          "are the slowest."})
BACKWARD = Pass(
    "backward", "backward_", "The backward",
    {"mma": "1 tensor cores", "swizzle": "2 cp.async, swizzle", "two_kernels": "3 wgmma, two kernels",
     "fused": "4 one kernel, five products", "bulk": "5 dQ by the copy engine", "early": "6 early scores",
     "at_once": "7 P at once",
     "late": "8 dQ a step late", "masks": "9 masks apart", "in_order": "10 in turns", "hopper": "hopper"},
    {"best": "hopper", "best_deterministic": "the same bits", "swizzle": "swizzle (mma.sync)"},
    (("hopper / cuDNN", "best", "cudnn"), ("hopper / FlashAttention-3", "best", "fa3"),
     ("same bits / FlashAttention-3's", "best_deterministic", "fa3_deterministic"),
     ("swizzle / FlashAttention-2", "swizzle", "fa2")),
    ("stage05", "two_kernels", "05, fp32"), "backward/after_the_ladder.md",
    {64: "Between hopper and the same bits lies the wait for one's turn; with a mask it is longer.",
     128: "As at d = 64, but shared memory is the limit now; swizzle shows what it is without Hopper's instructions.",
     256: "No one kernel has room for three sums here: dQ is a product of its own, bits are always the same, and two "
          "lines are one."})
FA3 = "FlashAttention-3"
PEERS = {"cudnn": "cuDNN", "fa2": "FlashAttention-2, PyTorch", "fa3": FA3}
PEERS_DETERMINISTIC = {"fa3_deterministic": f"{FA3}, the same bits"}  # in tables only
RESULTS = Path(__file__).resolve().parents[1] / "results"
KERNELS = RESULTS / "kernels.json"
BEST = RESULTS / "best.txt"  # of best.py
TIMELINE, TIMELINE_BACKWARD = RESULTS / "timeline.json", RESULTS / "timeline_backward.json"
# Keys from which on the forward's hopper has another kernel, by d and mask (forward/hopper.cu).
OTHERS_FROM = {(128, 0): 6144, (128, 1): 6144, (256, 0): 8192}
# What ab.py measured, and which of its tables is on which page; of two files that have a table the first counts.
VARIANTS = {"ab.json": FORWARD, "ab_backward.json": BACKWARD}
TABLES = {"forward": {"on and off": FORWARD.page, "tiles": FORWARD.page, "ideas of others": FORWARD.page,
                      "fa2": "forward/fa2.md", "rung 3": "forward/3_swizzle.md", "rung 10": "forward/10_pingpong.md",
                      "rung 11": "forward/11_overlap.md", "rung 12": "forward/12_rows.md"},
          "backward": {"on and off": BACKWARD.page, "two kernels": "backward/3_two_kernels.md"}}
LADDER: dict[str, object] = {"N": 4096, "d": 128, "causal": 0}
SIZES = [(d, causal) for d in (64, 128, 256) for causal in (0, 1)]
MASK = ("none", "causal")
CHIPS = ("hot", "cool", "sustained")  # the ways of compare.py; the last one is not in every record


@dataclass(frozen=True)
class Aim:
    """What we wanted of FlashAttention-3's speed in every cell of a pass, on a hot chip, a cool one and sustained."""

    what: str
    d: int
    causal: int
    wanted: float
    short: float | None = None  # up to N = 1024
    busy: float | None = None  # on a cool chip and sustained
    same_bits: bool = False

    def of(self, n: float, chip: str) -> float:
        return self.busy if self.busy and chip != "hot" else self.short if self.short and n <= 1024 else self.wanted


AIMS = (Aim("forward", 64, 0, 1.02, 1.24), Aim("forward", 64, 1, 1.03, 1.17), Aim("forward", 128, 0, 1.00, busy=0.99),
        Aim("forward", 128, 1, 1.00, busy=0.98), *(Aim("forward", 256, causal, 0.99, 1.02) for causal in (0, 1)),
        *(Aim("backward", 64, causal, 1.00) for causal in (0, 1)), *(Aim("backward", 128, causal, 1.02, 1.00) for causal in (0, 1)),
        *(Aim("backward", 256, causal, 1.05) for causal in (0, 1)), Aim("backward", 64, 0, 1.00, same_bits=True),
        Aim("backward", 64, 1, 0.95, same_bits=True), Aim("backward", 128, 0, 1.00, same_bits=True),
        Aim("backward", 128, 1, 1.02, same_bits=True), Aim("step", 64, 1, 1.06), Aim("step", 64, 1, 1.00, same_bits=True))


def charts(r: Results) -> list[Chart | Table]:
    items = [item for p in (FORWARD, BACKWARD) for item in (
        ladder(r, p), *(speed(r, p, d) for d in (64, 128, 256)), *(ratios(r, p, chip) for chip in CHIPS),
        errors(r, p), groups(r, p), line_through(r, p)) if item]
    items += [chart for causal in (0, 1) if (chart := passes(r, causal))]
    items += [item for item in (steps(r), missed(r)) if item]
    if not items:
        raise BadResults("no row of stage06 in bf16; measure it too")
    if TIMELINE.is_file() and json.loads(TIMELINE.read_text(encoding="utf-8"))["device"] != r.context["device"]:
        return items  # all that follows is of the machine that the chapter shows
    items += [item for p in (FORWARD, BACKWARD) if (item := machines(r, p))]
    items += [cycles(r, p, s) for p, s in ((FORWARD, FORWARD_STEPS), (BACKWARD, BACKWARD_STEPS)) if s.file.is_file()]
    if KERNELS.is_file():
        items.append(ptxas())
    for name in VARIANTS:
        if (RESULTS / name).is_file():
            items += [item for item in variants(name) if item.name not in (other.name for other in items)]
    return items + [item for walk in walks() for item in walk.charts()]


def walks() -> list[ModuleType]:
    """check/charts.py of beyond/*, the ring and torch, each with charts() of what was recorded there."""
    found = []
    for file in sorted(file for walk in ("beyond/*", "ring", "torch") for file in RESULTS.parent.glob(f"{walk}/check/charts.py")):
        spec = importlib.util.spec_from_file_location(f"charts_of_{file.parts[-3]}", file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.append(module)
    return found


def rows(r: Results, what: str, variant: str, chip: str = "hot", stage: str = "stage06", **where: object) -> list[Row]:
    """Those of compare.py; else the benchmark's own, which knows no peers and no cool chip."""
    found = r.select(stage=stage, what=what, variant=variant, dtype="bf16", G=1, chip=chip, **where)
    return found or r.select(stage=stage, what=what, variant=variant, dtype="bf16", G=None, chip=None, **where)


def fa3(r: Results, *before: str, by: Sequence[str] = ()) -> str:
    """What is said before, and which FlashAttention-3 stands among `by`, if it does."""
    commit, changed, what = r.context.get("fa3_commit", "").partition("-")
    which = [f"{FA3}: commit {commit[:7]}{changed}{what}"] if any(FA3 in label for label in by) else []
    return " · ".join([*filter(None, before), *which])


def lengths(r: Results, p: Pass, chip: str = "hot", group: int = 1) -> list[float | str]:
    return sorted({row.keys["N"] for row in r.select(stage="peer", what=p.what, variant="cudnn", chip=chip, G=group)})


def table(r: Results, p: Pass, name: str, header: Sequence[str], lines: Sequence[Sequence[str]],
          page: str = "") -> Table | None:
    if not lines:
        return None
    which = fa3(r, by=[cell for cells in lines for cell in cells])
    caption = f"Medians on {r.context['device']} (`results/{r.path.name}`). {which}." if which else ""
    return Table(name, header, lines, page or p.page, caption)


# ---------------------------------------------------------------- charts

def ladder(r: Results, p: Pass) -> Chart | None:
    """One bar a rung."""
    rungs = {label: some for variant, label in p.rungs.items() if (some := rows(r, p.what, variant, **LADDER))}
    if not rungs:
        return None
    stage, variant, fp32 = p.below
    below = r.select(stage=stage, what=p.what, variant=variant, **LADDER)
    bars = [Bar(fp32, spread(below, "flops").scaled(1e-12), significant(1e-12 * median(below, "flops")),
                "previous")] if below else []
    for label, some in rungs.items():
        value = spread(some, "flops").scaled(1e-12)
        step = f", ×{significant(ratio(below, some, 'time').mid)}" if below else ""
        bars.append(Bar(label, value, significant(value.mid) + step))
        below = some
    speeds = {label.split(",")[0]: 1e-12 * median(found, "flops") for variant, label in reversed(PEERS.items())
              if (found := rows(r, p.what, variant, stage="peer", **LADDER))}
    speeds["matrix product"] = 1e-12 * median(below, "roof")
    return Chart(f"{p.prefix}ladder", "One idea at a time" + (", backward" if p is BACKWARD else ""), [
        Bars("TFLOP/s, and × the rung above", bars, "TFLOP/s", "",
             [Bound(f"{label} {significant(value)}", value) for label, value in speeds.items()])],
        fa3(r, f"{r.context['device']} · bf16 · N 4096, d 128, no mask, B N = 16384, H d = 2048"
            f" · FLOPs: {r.context['flop_formula']}" + (", times 2.5" if p is BACKWARD else "") +
            " · medians; × is the median of the ratios within each round, as the clock changes from one round to the "
            "next, and not the ratio of two medians", by=list(speeds)),
        see="Each bar adds one idea to the one above it; look for the steps that gain most, and for those that lose.")


def speed(r: Results, p: Pass, d: int) -> Chart | None:
    panels = [panel for causal in (0, 1) if (panel := against_n(r, p, d, causal))]
    if not panels:
        return None
    said = f"{r.context['device']} · bf16 · FLOPs: {r.context['flop_formula']}, times 2.5" if p is BACKWARD else ""
    chart = Chart(f"{p.prefix}speed_d{d}", f"{p.title}, head dimension {d}", panels, said, p.see[d])
    labels = [each.label for panel in panels for each in panel.lines]
    return replace(chart, subtitle=fa3(r, subtitle(chart, r.context), by=labels))


def against_n(r: Results, p: Pass, d: int, causal: int) -> Lines | None:
    ours = {label: some for v, label in p.final.items() if (some := rows(r, p.what, v, d=d, causal=causal))}
    peers = {label: some for v, label in PEERS.items()
             if (some := rows(r, p.what, v, stage="peer", d=d, causal=causal))}
    if not ours:
        return None
    lines: list[Line] = [line(label, some, "flops", scale=1e-12) for label, some in ours.items()]
    lines += [line(label, some, "flops", scale=1e-12, role="peer") for label, some in peers.items()]
    longest = list(group(next(iter(ours.values())), "N").values())[-1]
    return Lines("TFLOP/s", lines, "N, sequence length (B N = 16384)",
                 bounds=[Bound("matrix product", 1e-12 * median(longest, "roof"))], y_scale="linear",
                 where='causal' if causal else 'no mask')


def passes(r: Results, causal: int) -> Chart | None:
    """The forward, the backward and both, by head dimension."""
    panels = []
    for d in (64, 128, 256):
        by = {p.what: group(rows(r, p.what, next(iter(p.final)), d=d, causal=causal), "N") for p in (FORWARD, BACKWARD)}
        both = [n for n in by["forward"] if n in by["backward"]]
        if not both:
            continue
        lines = [line(what, [row for n in both for row in found[n]], "flops", scale=1e-12) for what, found in by.items()]
        # 4 d FLOP a pair and 10 d, in the sum of their times.
        points = []
        for n in both:
            time = sum(median(found[n], "time") for found in by.values())
            flops = sum(median(found[n], "flops") * median(found[n], "time") for found in by.values())
            points.append(Point(n, Spread(*[1e-12 * flops / time] * 3)))
        panels.append(Lines("TFLOP/s", [*lines, Line("both", points)], "N, sequence length (B N = 16384)",
                            y_scale="linear", where=f"d = {d}"))
    if not panels:
        return None
    return Chart(f"passes{'_causal' if causal else ''}", "Forward, backward and both" + (", causal" if causal else ""),
                 panels, f"{r.context['device']} · bf16 · FLOPs: {r.context['flop_formula']}, times 2.5 for the backward · "
                 "both: the FLOPs of both in the sum of their times",
                 "A step of training lies near the backward, which has five of its seven products.")


# ---------------------------------------------------------------- tables

def ratios(r: Results, p: Pass, chip: str) -> Table | None:
    """Round by round."""
    lines = []
    for d, causal in SIZES:
        for label, ours, theirs in p.against:
            by = group(rows(r, p.what, ours, chip, d=d, causal=causal), "N")
            rival = group(rows(r, p.what, theirs, chip, "peer", d=d, causal=causal), "N")
            cells = [f"{ratio(rival[n], by[n], 'time').mid:.2f}" if n in rival and n in by else "–"
                     for n in lengths(r, p, chip)]
            if any(cell != "–" for cell in cells):
                lines.append([f"{d}", MASK[causal], label, *cells])
    return table(r, p, f"{p.prefix}ratios_{chip}",
                 ["d", "mask", "speed", *(f"N {n:g}" for n in lengths(r, p, chip))], lines,
                 "README.md" if (p, chip) == (FORWARD, "hot") else p.page)


def machines(r: Results, p: Pass) -> Table | None:
    """This machine beside the others that are recorded: ours relative to the fastest peers of each."""
    recorded_here = [load(path) for path in recorded(RESULTS.parent)]
    others = [each for each in recorded_here if each.context["device"] != r.context["device"]]
    ours, chip = next(iter(p.final)), "hot"
    if not rows(r, p.what, "fa3", chip, "peer"):
        return None
    lines, seen = [], []
    for d, causal in SIZES:
        for each in (r, *others):
            by = group(rows(each, p.what, ours, chip, d=d, causal=causal), "N")
            rivals = [group(rows(each, p.what, peer, chip, "peer", d=d, causal=causal), "N") for peer in ("fa3", "cudnn")]
            cells = [" · ".join(f"{ratio(rival[n], by[n], 'time').mid:.2f}" if n in rival else "–" for rival in rivals)
                     + f" · {significant(1e-12 * median(by[n], 'flops'))}" if n in by else "–" for n in lengths(r, p)]
            if any(cell != "–" for cell in cells):
                lines.append([f"{d}", MASK[causal], each.context["device"], *cells])
                seen += [each] * (each not in seen)
    if len(seen) < 2:
        return None
    files = ", ".join(f"`results/{each.path.name}`" for each in seen)
    return Table(f"{p.prefix}machines", ["d", "mask", "GPU", *(f"N {n:g}" for n in lengths(r, p))], lines, p.page,
                 f"{p.title} by {p.final[ours]}, hot: speed relative to {FA3} · to cuDNN · TFLOP/s. Medians ({files}).")


def errors(r: Results, p: Pass) -> Table | None:
    """Beside speed."""
    who = [(label, "stage06", variant) for variant, label in p.final.items()]
    who += [(label, "peer", variant) for variant, label in (PEERS | PEERS_DETERMINISTIC).items()]
    lines = []
    for d in (64, 128, 256):
        for label, stage, variant in who:
            cells = []
            for dtype in ("bf16", "f16"):
                some = r.select(stage=stage, what=p.what, variant=variant, dtype=dtype, G=1, chip="hot",
                                **{**LADDER, "d": d})
                cells += [f"{1e3 * median(some, 'error'):.2f}", significant(1e-12 * median(some, "flops"))] if some \
                    else ["–", "–"]
            if cells[0] != "–":
                lines.append([f"{d}", label, *cells])
    return table(r, p, f"{p.prefix}errors", ["d", "N 4096, no mask", "bf16: error / 10⁻³", "TFLOP/s",
                                          "fp16: error / 10⁻³", "TFLOP/s"], lines)


def groups(r: Results, p: Pass) -> Table | None:
    """Of query heads that share a key head."""
    lines, ns = [], lengths(r, p, group=8)
    for d, causal in SIZES:
        where = {"what": p.what, "d": d, "causal": causal, "G": 8, "chip": "hot", "dtype": "bf16"}
        rival = group(r.select(stage="peer", variant="cudnn", **where), "N")
        other = group(r.select(stage="peer", variant="fa3", **where), "N")
        by = group(r.select(stage="stage06", variant=next(iter(p.final)), **where), "N")
        cells = [f"{significant(1e-12 * median(by[n], 'flops'))} ({ratio(rival[n], by[n], 'time').mid:.2f}"
                 + (f" / {ratio(other[n], by[n], 'time').mid:.2f})" if n in other else ")")
                 if n in rival and n in by else "–" for n in ns]
        if any(cell != "–" for cell in cells):
            lines.append([f"{d}", MASK[causal], *cells])
    return table(r, p, f"{p.prefix}groups", ["d", "mask", *(f"N {n:g}" for n in ns)], lines)


def steps(r: Results) -> Table | None:
    """A forward and a backward; who is named is the backward."""
    lines = []
    for chip in CHIPS:
        rival = rows(r, "step", "cudnn", chip, "peer")
        who = [(label, rows(r, "step", v, chip)) for v, label in BACKWARD.final.items()]
        who += [(label, rows(r, "step", v, chip, "peer")) for v, label in (PEERS | PEERS_DETERMINISTIC).items()]
        for label, some in who:
            if some:
                lines.append([label, chip, f"{1e3 * median(some, 'time'):.3f}",
                              significant(1e-12 * median(some, "flops")),
                              f"{ratio(rival, some, 'time').mid:.2f}" if rival else "–"])
    return table(r, BACKWARD, "steps", ["a step by", "chip", "ms", "TFLOP/s", "speed relative to cuDNN"], lines)


def missed(r: Results) -> Table | None:
    """The cells that fall short of AIMS, round by round."""
    lines, cells = [], 0
    best = dict(line.split(" ", 1) for line in BEST.read_text(encoding="utf-8").splitlines()) if BEST.is_file() else {}
    for aim in AIMS:
        ours, theirs = ("best_deterministic", "fa3_deterministic") if aim.same_bits else (
            next(iter(FORWARD.final)) if aim.what == "forward" else "best", "fa3")
        for chip in CHIPS:
            by = group(rows(r, aim.what, ours, chip, d=aim.d, causal=aim.causal), "N")
            rival = group(rows(r, aim.what, theirs, chip, "peer", d=aim.d, causal=aim.causal), "N")
            for n in sorted(set(by) & set(rival)):
                found, wanted = ratio(rival[n], by[n], "time").mid, aim.of(n, chip)
                cells += 1
                if found < wanted:
                    cell = f"{aim.what}/{ours}/N:{n:g}/d:{aim.d}/causal:{aim.causal}/G:1/chip:{chip}/bf16"
                    had, commit = best.get(cell, f"{found} -").split()
                    lines.append([aim.what + (", the same bits" if aim.same_bits else ""), f"{aim.d}", MASK[aim.causal], chip,
                                  f"{n:g}", f"{wanted:.2f}", f"{found:.4f}",
                                  f"{float(had):.4f} ({commit})" if float(had) > found + 5e-5 else "this"])
    if not cells:
        return None
    header = ["pass", "d", "mask", "chip", "N", f"wanted of {FA3}'s speed", "measured", "the best ever"]
    return Table("missed", header, lines, FORWARD.page,
                 f"{len(lines)} of {cells} cells, on {r.context['device']} (`results/{r.path.name}`).")


def line_through(r: Results, p: Pass) -> Table | None:
    """Times are nearly a line over the number of steps: its slope is what a step takes, the rest is there at any N."""
    sms, best = int(r.context["cores"]), next(iter(p.final))
    lines = []
    for d, causal in SIZES:
        tiles = 128 * 2048 / d / sms  # on each SM; B N = 16,384 tokens and H d = 2048 are as many at any N
        flop = (4 if p is FORWARD else 10) * 128 * 128 * d  # of a step
        for stage, variant, label in (("stage06", best, p.final[best]), ("peer", "fa3", FA3), ("peer", "cudnn", PEERS["cudnn"])):
            by = {n: some for n, some in group(rows(r, p.what, variant, "cool", stage, d=d, causal=causal), "N").items()
                  if n >= 1024  # at 512 there is no steady state
                  # Behind a mask those rows are of another run, so the others' are left out, too.
                  and not (p is FORWARD and (label == "hopper" or causal) and n >= OTHERS_FROM.get((d, causal), math.inf))}
            if len(by) < 3:
                continue
            steps = [tiles * (n / 128 + 1) / 2 if causal else tiles * n / 128 for n in by]
            times = [1e6 * median(some, "time") for some in by.values()]
            step, rest = line_of(steps, times)
            off = max(abs((step * x + rest) / y - 1) for x, y in zip(steps, times))
            roof = median_of([row.counters["roof"] for n, some in group(rows(r, p.what, best, "cool", d=d, causal=causal), "N").items()
                              if n in by for row in some])
            lines.append([f"{d}", MASK[causal], label, f"{step:.3f}", f"{100 * 1e6 * flop * sms / roof / step:.0f} %",
                          f"{rest / tiles:.2f}", f"{100 * off:.1f} %"])
    return table(r, p, f"{p.prefix}step_and_rest",
                 ["d", "mask", "who", "a step, µs", "of the matrix product", "the rest, µs a tile", "off by, at most"], lines)


def line_of(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope and height at 0 of the line whose relative errors are least, in the sum of their squares."""
    a, b = [u / v for u, v in zip(x, y)], [1 / v for v in y]  # 1 = slope a + height b
    aa, ab, bb = (sum(u * v for u, v in zip(*pair)) for pair in ((a, a), (a, b), (b, b)))
    by = aa * bb - ab * ab
    return (bb * sum(a) - ab * sum(b)) / by, (aa * sum(b) - ab * sum(a)) / by


@dataclass(frozen=True)
class Steps:
    """What a ladder's table of cycles says besides what was stamped."""

    file: Path
    ladder: timeline.Ladder
    page: str
    parts: dict[str, str]  # bars of the first group, and what their columns are called
    counted: list[str]  # of each part, and of the step
    predicted: dict[str, str]  # of the step, as the rungs' pages count it
    last: str  # of all others
    flop: int  # for a query, a key and a number of d
    why: str  # there is a dash


# An SM's cycles for 128 queries and 128 keys, d = 128. If all overlaps 2048, if nothing does 3072; before rung 7 what shared
# memory needs is more, or, in rung 4, what the schedulers issue.
FORWARD_STEPS = Steps(
    TIMELINE, timeline.FORWARD, "README.md", {"S": "Q Kᵀ", "PV": "P V", "softmax": "softmax"},
    ["512", "512", "512 or more", "2048 or more"],
    {"mma": "37888", "cp_async": "37888", "swizzle": "5632", "wide_warps": "3096", "two_loops": "3072", "fa2": "3072",
     "tma": "5376", **dict.fromkeys(("wgmma", "ring", "specialised"), "2048 – 3072")}, "2048", 4,
    "Parts are dashes where products are `mma.sync`, which nobody requests or waits for.")
# For 64 queries and 128 keys. Of each group 64 keys: 256 cycles of the tensor cores a product. Both groups: 5 products; 3200
# of shared memory.
BACKWARD_STEPS = Steps(
    TIMELINE_BACKWARD, timeline.BACKWARD, BACKWARD.page,
    {"S": "S", "dP": "dP", "P": "P", "dV": "dV", "dS": "dS", "dQ": "dQ", "dK": "dK", "hand": "dQ into its buffer"},
    ["256", "256", "256 or more", "256", "–", "256", "256", "–", "3200 or more"],
    {"mma": "65536", "swizzle": "7168", "two_kernels": "3584", "fused": "2688"}, "3200", 10,
    "Rungs 1 to 3 are two kernels, each with steps of its own: the prediction is for both. Rung 4 adds to dQ without a buffer.")


def cycles(r: Results, p: Pass, s: Steps) -> Table:
    """Of a step and its parts, as stamped in the first group of a block; of a rung without stamps its speed alone."""
    data = json.loads(s.file.read_text(encoding="utf-8"))
    bars = {bar.name: bar for bar in s.ladder.bars}
    queries, keys = s.ladder.at_once
    on_each = 64 * (4096 // queries) * (4096 // keys) / int(r.context["cores"])  # 64 heads; of an SM
    lines, missing = [["counted", *s.counted, "–", "–", "–"]], False
    for name, label in p.rungs.items():
        predicted = s.predicted.get(name, s.last)
        if rung := data["rungs"].get(name):
            stamps = timeline.stamps_of(rung)
            parts = [[end - begin for begin, end in timeline.spans(stamps, 0, bars[part])] for part in s.parts]
            step = median_of(timeline.steps(s.ladder, name, stamps))
            clock = step * on_each / rung["ms_with_stamps"] / 1e6
            if not 0.9 < clock < 2.1:
                raise BadResults(f"{s.file.name}: {name} has a clock of {clock:.2f} GHz; how many blocks has an SM of it?")
            lines.append([s.ladder.rungs[name].title, *(f"{median_of(part):.0f}" if part else "–" for part in parts), predicted,
                          f"{step:.0f}", f"{clock:.2f}", f"{s.flop * 64 * 4096 * 4096 * 128 / rung['ms'] / 1e9:.0f}"])
        elif found := rows(r, p.what, name, **LADDER):
            missing = True
            title = s.ladder.rungs[name].title if name in s.ladder.rungs else label
            lines.append([title, *("–" for _ in s.parts), predicted, "–", "–", f"{1e-12 * median(found, 'flops'):.0f}"])
    said = (f"Cycles of an SM on {data['device']}, {data['setting']} (`results/{s.file.name}`); a step has {queries} queries and "
            f"{keys} keys. Parts are from the request, or from what they wait for, until somebody has waited; the clock is what "
            f"step and time with stamps imply, if all SMs are busy; TFLOP/s is without stamps. A run of its own: for the order "
            f"of the rungs look at the ladder's chart. {s.why}")
    if missing:
        said += f" Where the step is a dash, too, it was not stamped, and the speed is that of `results/{r.path.name}`."
    return Table("cycles" if p is FORWARD else "cycles_backward",
                 ["rung", *s.parts.values(), "step: predicted", "measured", "clock, GHz", "TFLOP/s"], lines, s.page, said)


def median_of(some: Sequence[float]) -> float:
    return sorted(some)[len(some) // 2]


def ptxas() -> Table:
    kernels = json.loads(KERNELS.read_text(encoding="utf-8"))["kernels"]
    header = ["kernel", "file", "for", "registers", "shared, fixed (B)", "spilled (B)", "barriers"]
    lines = [[f"`{k['name'].replace('__nv_bfloat16', 'bf16').replace('__half', 'fp16')}`", k["source"],
              k["architecture"], f"{k['registers']}", f"{k['shared_bytes']}",
              f"{k['spill_store_bytes'] + k['spill_load_bytes']}", f"{k['barriers']}"] for k in kernels]
    return Table("kernels", header, lines, FORWARD.page,
                 caption="What ptxas said when they were compiled (`results/kernels.json`); shared memory "
                         "whose size a launch chooses comes on top.")


def variants(name: str) -> list[Table]:
    """Of one change each, measured by ab.py."""
    data = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    found, p = ab.tables(data), VARIANTS[name]
    return [Table(f"{p.prefix}{title.replace(' ', '_')}", found[title][0], found[title][1:], page,
                  f"Medians on {data['device']} (`results/{name}`).")
            for title, page in TABLES[p.what].items() if title in found]
