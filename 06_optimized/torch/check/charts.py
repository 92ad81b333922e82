"""The charts of the model in PyTorch, from what losses.py and ./learn train --speed have recorded."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path

from figure import Chart, Line, Lines, Point, Role, Table
from results import Spread

RESULTS = Path(__file__).resolve().parents[1] / "results"
LOSSES, SPEED = RESULTS / "losses.csv", RESULTS / "speed.json"
OURS = "this course"
PAGE = "torch/README.md"
EVERY = 25  # steps whose batches' losses are one point
RIGHT = {"00": "00", "03": "03", "06": "06, in bf16", "03/": "mine, with 03's text"}
MUTANTS: dict[str, tuple[str, Role]] = {
    "03/no_rescale_of_o": ("O not rescaled", "previous"), "03/full_tiles_only": ("last keys ignored", "peer"),
    "03/scale_forgotten": ("scores not scaled", "peer"), "05/no_delta": ("dS without D", "this"),
    "05/row_of_next": ("one key too many in the backward", "peer")}


def charts() -> list[Chart | Table]:
    return [*([losses()] if LOSSES.is_file() else []), *(speeds() if SPEED.is_file() else [])]


def exact(value: float) -> Spread:
    return Spread(value, value, value)


def losses() -> Chart:
    """Means over some steps: one batch's loss depends more on the batch than on the kernel."""
    runs: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for row in csv.DictReader(LOSSES.read_text(encoding="utf-8").splitlines()):
        runs.setdefault((row["name"], row["device"], row["seed"]), []).append((int(row["step"]), float(row["loss"])))

    def means(run: list[tuple[int, float]]) -> dict[int, float]:
        bins: dict[int, list[float]] = {}
        for step, loss in run:
            if loss == loss:
                bins.setdefault(-(-step // EVERY) * EVERY, []).append(loss)
        return {step: statistics.fmean(found) for step, found in bins.items()}

    def line(label: str, run: list[tuple[int, float]], role: Role) -> Line:
        ended = next((f", NaN at step {step}" for step, loss in run if loss != loss), "")
        return Line(label + ended, [Point(step, exact(loss)) for step, loss in means(run).items()], role)

    of_seeds = [means(run) for (name, device, _), run in runs.items() if (name, device) == ("sdpa", "cpu")]
    seeds = Line("other seeds", [Point(step, Spread(statistics.median(found), min(found), max(found)))
                                 for step in of_seeds[0] for found in [[one[step] for one in of_seeds]]], "previous")
    right = [seeds, line("PyTorch's", runs["sdpa", "cpu", "1"], "peer")]
    right += [line(label, runs[name, "cpu", "1"], "this") for name, label in RIGHT.items()]
    wrong = [line("03", runs["03", "cpu", "1"], "this")]
    wrong += [line(label, runs[name, "cpu", "1"], role) for name, (label, role) in MUTANTS.items()]
    large = [line(label + ("" if seed == "1" else ", another seed"), runs[name, "cuda", seed], role)
             for seed in ("1", "2") for name, label, role in (("sdpa", "PyTorch's", "peer"), ("06", "06", "this"))
             if (name, "cuda", seed) in runs]
    panels = [Lines("loss", lines, "step", x_scale="linear", y_scale="linear", where=where)
              for lines, where in ((right, "kernels that are right"), (wrong, "with a defect"),
                                   (large, "larger, bf16, on a GPU")) if lines]
    return Chart("torch_losses", "A model shows whether its kernel is right", panels,
                 "the same GPT with the same first weights and the same batches · context 96, 3 layers, width 96 · "
                 f"means of {EVERY} steps' losses",
                 "Right kernels lie on each other, closer than seeds do. A defect moves the curve, or ends it.")


def speeds() -> list[Chart | Table]:
    found = json.loads(SPEED.read_text(encoding="utf-8"))
    by: dict[tuple[str, int], list[float]] = {(row["attention"], row["N"]): row["tokens_per_second"]
                                              for row in found["rows"]}
    lengths = sorted({N for _, N in by})
    names = list(dict.fromkeys(name for name, _ in by))

    def line(name: str, role: Role) -> Line:
        points = []
        for N in lengths:
            if (name, N) in by:
                low, mid, high = (x / 1000 for x in statistics.quantiles(by[name, N], method="inclusive"))
                points.append(Point(N, Spread(mid, low, high)))
        return Line(name, points, role)

    where = f"{found['gpu']}, PyTorch {found['torch'].partition('+')[0]}, cuDNN {cudnn(found['cudnn'])}"
    chart = Chart("torch_speed", "Tokens that a model learns from in a second",
                  [Lines("thousands of tokens a second", [line(name, "this" if name == OURS else "peer") for name in names],
                         "N, length of the context", y_scale="linear")],
                  f"{where} · {found['model']}, d = 128, causal · the whole step: forward, backward and optimizer",
                  "The longer the context, the more of a step is attention, and the farther the lines part.")
    rows = []
    for N in lengths:
        theirs = max((name for name in names if name != OURS and (name, N) in by),
                     key=lambda name: statistics.median(by[name, N]))
        ratio = statistics.median(a / b for a, b in zip(by[OURS, N], by[theirs, N], strict=True))
        rows.append([f"{N:,}", *(f"{statistics.median(by[name, N]):,.0f}" if (name, N) in by else "–" for name in names),
                     f"{ratio:.2f}"])
    return [chart, Table("torch_speed", ["N", *names, "/ the faster"], rows, PAGE,
                         f"Tokens a second, medians of 7 rounds, ratios round by round. {where}.")]


def cudnn(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
