"""The big table: forward, backward and a training step, for many lengths, beside PyTorch's attention.

    python3 06_optimized/check/measure_table.py build table.json      continues what the file holds; PyTorch and a GPU
    python3 06_optimized/check/table.py table.json 06_optimized/results           draws it

Batch 1, causal mask; ours in bf16: stage 06, in fp32: 04's forward and 05's backward. FlashAttention-3 is a third side
if fa3/build.py has built it, in cells that it takes. The file is like those of the
benchmarks, with one row for each cell and side, and is written whole after each cell:

    real_time    median of `launches`, in milliseconds, each between two CUDA events; the host asks for a block of at
                 most 20 behind a delay, so that its own time (`host_ms`, for one) is not in it
    p99_ms       the slowest but one of 100: with fewer than 100 launches the slowest
    peak_bytes   device memory in use at the worst moment of a pass, inputs and outputs included (as PyTorch's allocator
                 counts it, which holds our tensors and scratch too). A backward: Q K V O LSE dO dQ dK dV and scratch
    error        relative L2 against double precision: 16 rows of O; 16 rows of dQ, 16 keys of dK and dV, the worst of
                 the three; one head. error_O, error_dQ, error_dK, error_dV: each by itself
    backend      which of its kernels PyTorch's default took

A cell without a figure is an error row whose `status` says why: out_of_memory, too_slow (`expected_ms`: four times half
the length; not tried), failed (ours are tried again in the next call).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "common" / "measure" / "charts"))
from figure import Chart, Line, Lines, Point, Table, render, significant  # noqa: E402
from results import BadResults, Spread, load, write_whole  # noqa: E402

LENGTHS = tuple(2**k for k in range(7, 17))
DIMENSIONS = (16, 32, 64, 128)
HEADS = (8, 16, 32)
DTYPES = {"bf16": "bf16", "f32": "fp32"}  # as in rows, as in words
PASSES = {"forward": 1.0, "backward": 2.5, "step": 3.5}  # in units of the forward's FLOP
OURS = {"bf16": {what: f"stage06/{what}/best" for what in PASSES},
        "f32": {"forward": "stage04/forward/best", "backward": "stage05/backward/two_kernels",
                "step": "stage05/step/two_kernels"}}
SIDES = ("ours", "peer")
FA3 = "fa3"  # a third side, where it is built and takes the cell
ABOVE = "; a launch above "  # in the method, before the limit: it may be raised later
SAME_RUN = ("device", "commit", "compiler", "torch")  # what a continued file must share
SAME_FA3 = ("fa3_commit", "cutlass_commit")  # this too; neither has them if FlashAttention-3 is absent
CHART_HEADS = 16
MIB = 2.0**20

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    dtype: str
    d: int
    heads: int
    n: int
    what: str

    def name(self, side: str) -> str:
        peers = {"peer": "default", FA3: "fa3"}
        who = OURS[self.dtype][self.what] if side == "ours" else f"peer/{self.what}/{peers[side]}"
        return f"{who}/N:{self.n}/d:{self.d}/H:{self.heads}/causal:1/{self.dtype}"

    @property
    def flops(self) -> float:
        return PASSES[self.what] * 4.0 * self.heads * self.d * self.n * (self.n + 1) / 2

    @property
    def half(self) -> Cell:
        return replace(self, n=self.n // 2)


def cells(dtypes: Sequence[str] = tuple(DTYPES)) -> Iterator[Cell]:
    """Lengths ascending: half a length says how long the whole one will take."""
    return (Cell(dtype, d, heads, n, what) for dtype in dtypes for d in DIMENSIONS for heads in HEADS for n in LENGTHS
            for what in PASSES)


# ---------------------------------------------------------------- rows, and the file of them

def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank: a value that was measured."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def figure_row(cell: Cell, side: str, median_ms: float, numbers: dict[str, float], backend: str = "") -> Row:
    row = {"name": cell.name(side), "run_type": "iteration", "repetition_index": 0, "real_time": median_ms,
           "time_unit": "ms", "flops": 1e3 * cell.flops / median_ms, **numbers}
    return row | ({"backend": backend} if backend else {})


def empty_row(cell: Cell, side: str, status: str, message: str, **numbers: float) -> Row:
    return {"name": cell.name(side), "run_type": "iteration", "repetition_index": 0, "error_occurred": True,
            "error_message": " ".join(message.split())[:300], "status": status, **numbers}


class File:
    """The rows so far, by name."""

    def __init__(self, path: Path, context: dict[str, str]) -> None:
        self.path, self.context = path, context
        self.rows: dict[str, Row] = {}
        if not path.exists():
            return
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
            self.rows = {row["name"]: row for row in old["benchmarks"]}
            differ = [key for key in SAME_RUN if old["context"][key] != context[key]]
            differ += [key for key in SAME_FA3 if old["context"].get(key) != context.get(key)]
            how, how_now = (some["method"].split(ABOVE)[0] for some in (old["context"], context))
            differ += ["method"] if how != how_now else []
        except (ValueError, KeyError, TypeError):
            raise BadResults(f"{path}: not a file of this program; choose another name") from None
        if differ:
            raise BadResults(f"{path}: measured with another {differ[0]} ({old['context'].get(differ[0], 'none')}); one file holds "
                             "one machine and one version: remove it, or choose another name")
        self.context = old["context"] | {"method": context["method"]}

    def tried(self, cell: Cell) -> bool:
        return any(cell.name(side) in self.rows for side in SIDES)

    def has(self, cell: Cell, limit: float = 0, sides: Sequence[str] = SIDES) -> bool:
        """Neither a failure of ours is kept nor what was too slow and is, with a higher limit, no longer."""
        rows = [self.rows.get(cell.name(side), {}) for side in sides]
        return (all(rows) and rows[sides.index("ours")].get("status") != "failed"
                and not any(row.get("status") == "too_slow" and row["expected_ms"] <= limit for row in rows))

    def expected_ms(self, cell: Cell, side: str) -> float:
        """Four times half the length; 0 where that is not known."""
        row = self.rows.get(cell.half.name(side), {})
        return 4 * float(row.get("real_time", row.get("expected_ms", 0)))

    def add(self, rows: Sequence[Row]) -> None:
        """A row a line: it is read by people too, and a diff shows what moved."""
        for row in rows:
            self.rows[row["name"]] = {key: float(f"{value:.6g}") if isinstance(value, float) else value
                                      for key, value in row.items()}
        lines = ",\n".join(json.dumps(row, allow_nan=False) for row in self.rows.values())
        context = json.dumps(self.context, indent=1)
        write_whole(self.path, f'{{"context": {context},\n"benchmarks": [\n{lines}\n]}}\n'.encode())


# ---------------------------------------------------------------- for readers

def shown(row: Row | None) -> list[str]:
    """Median, p99, TFLOP/s, MiB, error; or why there is none."""
    if row is None:
        return ["–"] * 5
    if "status" in row:
        text = row["status"].replace("_", " ")
        if "expected_ms" in row:
            text += f", about {significant(1e-3 * row['expected_ms'], 2)} s"
        return [text, "–", "–", "–", "–"]
    return [significant(row["real_time"]), significant(row["p99_ms"]), significant(1e-12 * row["flops"]),
            significant(row["peak_bytes"] / MIB), f"{row['error']:.1e}"]


def backends(rows: dict[str, Row], dtype: str, what: str) -> str:
    """Which kernels PyTorch took."""
    found = {row["backend"] for cell in cells([dtype]) if cell.what == what
             and "backend" in (row := rows.get(cell.name("peer"), {}))}
    return ", ".join(sorted(found)) or "unknown"


def speed_to(ours: Row | None, other: Row | None) -> str:
    both = ours and other and "real_time" in ours and "real_time" in other
    return f"{other['real_time'] / ours['real_time']:.2f}×" if both else "–"


def table_of(rows: dict[str, Row], dtype: str, what: str) -> Table | None:
    names = {"ours": "ours", "peer": "PyTorch"}
    if any(cell.what == what and cell.name(FA3) in rows for cell in cells([dtype])):
        names[FA3] = "FlashAttention-3"
    lines = []
    for cell in cells([dtype]):
        ours, *others = every = [rows.get(cell.name(side)) for side in names]
        if cell.what != what or not any(every):
            continue
        launches = [str(row["launches"]) if row and "launches" in row else "–" for row in every]
        lines.append([f"{cell.d}", f"{cell.heads}", f"{cell.n}", *(text for row in every for text in shown(row)),
                      *(speed_to(ours, other) for other in others), " / ".join(launches)])
    columns = ["median (ms)", "p99 (ms)", "TFLOP/s", "MiB", "error"]
    header = ["d", "heads", "N", *(f"{name}: {column}" for name in names.values() for column in columns),
              *(f"speed to {name}'s" for side, name in names.items() if side != "ours"), "launches"]
    return Table(f"{dtype}_{what}", header, lines) if lines else None


WORDS = {"forward": "the forward", "backward": "the backward", "step": "a training step (both)"}


def markdown(context: dict[str, str], rows: dict[str, Row], pictures: Sequence[str]) -> str:
    empty = [row for row in rows.values() if "status" in row]
    count = Counter(row["status"].replace("_", " ") for row in empty)
    if left := sum(cell.name(side) not in rows for cell in cells() for side in SIDES):
        count["not measured yet"] = left
    without = ", ".join(f"{n} {status}" for status, n in sorted(count.items())) or "none"
    fa3 = (f"\nFlashAttention-3 where it is built for the cell: commit {context['fa3_commit']}, CUTLASS "
           f"{context['cutlass_commit']}.") if any(cell.name(FA3) in rows for cell in cells()) else ""
    parts = [f"""# The big table

Measured on {context['device']}, PyTorch {context['torch']}, {context['compiler']}, commit {context['commit']}, \
{context['date'][:10]}. Written by `06_optimized/check/table.py` from `table/table.json`; nothing is typed by hand.

Batch 1, causal mask. Ours: in bf16 stage 06, in fp32 stage 04's forward and 05's backward. PyTorch:
`scaled_dot_product_attention` as it chooses by itself. {context['method']}.{fa3}

- **median, p99**: of single launches, in milliseconds of the GPU; what the host needs to ask for them is not in it
  (`host_ms` in the file). With fewer than 100 launches p99 is the slowest of them.
- **TFLOP/s**: {context['flop_formula']}; the backward counts 2.5 times as much, both 3.5 times.
- **MiB**: device memory in use at the worst moment, inputs, outputs and scratch together.
- **error**: relative L2 against double precision, 16 rows of one head; of a backward the worst of dQ, dK and dV.
- **Cells without a figure**: {without}. *Too slow*: four times half the length would be above the limit; not tried.
"""]
    parts += [f"![{name}: TFLOP/s against N, forward and backward, {CHART_HEADS} heads](table/{name}.svg)\n"
              for name in pictures]
    for dtype, word in DTYPES.items():
        for what, pass_ in WORDS.items():
            if table := table_of(rows, dtype, what):
                took = backends(rows, dtype, what)
                parts.append(f"## {word}, {pass_}\n\nPyTorch took: {took}.\n\n{table.markdown()}\n")
    return "\n".join(parts)


def charts(context: dict[str, str], rows: dict[str, Row]) -> list[Chart]:
    """For each type and d: all sides against N."""
    def line_of(dtype: str, d: int, what: str, side: str) -> Line | None:
        points = []
        for n in LENGTHS:
            row = rows.get(Cell(dtype, d, CHART_HEADS, n, what).name(side), {})
            if "real_time" in row:
                speed = 1e-12 * row["flops"]
                points.append(Point(n, Spread(speed, speed * row["real_time"] / row["p99_ms"], speed)))
        if not points:
            return None
        return {"ours": Line("ours", points), "peer": Line("PyTorch", points, "peer"),
                FA3: Line("FlashAttention-3", points, "peer")}[side]

    found = []
    for dtype, word in DTYPES.items():
        for d in DIMENSIONS:
            panels = [Lines("TFLOP/s", lines, where=what) for what in ("forward", "backward")
                      if (lines := [one for side in (*SIDES, FA3) if (one := line_of(dtype, d, what, side))])]
            if panels:
                found.append(Chart(f"{dtype}_d{d}", f"{word}, d = {d}, by sequence length", panels,
                                   f"{context['device']} · batch 1, {CHART_HEADS} heads, causal · median, and a band "
                                   f"down to the 99th percentile of the time · FLOPs: {context['flop_formula']}, "
                                   "times 2.5 for the backward"))
    return found


def draw(source: Path, folder: Path) -> None:
    load(source)  # it says what is wrong with a file
    data = json.loads(source.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in data["benchmarks"]}
    pictures = {chart.name: render(chart, data["context"]) for chart in charts(data["context"], rows)}
    (folder / "table").mkdir(parents=True, exist_ok=True)
    outputs = {folder / "table.md": markdown(data["context"], rows, list(pictures)).encode()}
    outputs |= {folder / "table" / f"{name}.svg": svg for name, svg in pictures.items()}
    for path, content in outputs.items():
        write_whole(path, content)
        print(path)


def reported(tool: str, work: Callable[[], int]) -> int:
    """The exit code of `work`; what it cannot do is one line."""
    try:
        return work()
    except BadResults as error:
        print(f"{tool}: {error}", file=sys.stderr)
    except OSError as error:
        print(f"{tool}: {error.filename}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{tool}: stopped; the same command goes on", file=sys.stderr)
        return 130
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="table.py", description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("folder", type=Path, metavar="RESULTS_DIR")
    options = parser.parse_args(argv)

    def work() -> int:
        draw(options.json, options.folder)
        return 0
    return reported("table.py", work)


if __name__ == "__main__":
    sys.exit(main())
