"""Measures the big table, or what the file lacks of it; see table.py. Needs PyTorch and a GPU."""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

import table
from table import (ABOVE, FA3, LENGTHS, PASSES, SAME_FA3, SIDES, Cell, File, Row, cells, empty_row, figure_row,
                   percentile, reported)

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "common" / "measure" / "peers"))
from contenders import fa3_library  # noqa: E402
from peers import DTYPES, BadResults, Call, SDPBackend, torch  # noqa: E402
from precision import context_of_a_head, gradients_of_a_head, sampled  # noqa: E402

DTYPE = {"bf16": torch.bfloat16, "f32": torch.float32}
MOST = {"bf16": 3e-2, "f32": 1e-4}  # relative L2; more is an error, not a figure
BLOCK = 20  # launches that the host queues at once
LAUNCHES = 200  # at most
OutOfMemory = torch.cuda.OutOfMemoryError

Tensor = torch.Tensor


class Failed(Exception):
    """No figure for this cell and side."""


# ---------------------------------------------------------------- what is given, and what is right

class Tensors:
    """The inputs of three cells: the passes of one problem."""

    def __init__(self, cell: Cell, seed: int) -> None:
        random.seed(f"{seed} {cell.dtype} {cell.d} {cell.heads} {cell.n}")  # the same however a run is cut
        torch.manual_seed(random.getrandbits(32))
        make = lambda: torch.randn(1, cell.heads, cell.n, cell.d, device="cuda", dtype=DTYPE[cell.dtype])  # noqa: E731
        self.Q, self.K, self.V, self.dO = (make() for _ in range(4))
        self.rows, self.keys = (torch.tensor(sampled(cell.n), device="cuda") for _ in range(2))

    def bytes(self, what: str) -> int:
        given = (self.Q, self.K, self.V) if what == "forward" else (self.Q, self.K, self.V, self.dO)
        return sum(x.numel() * x.element_size() for x in given)

    @cached_property
    def want(self) -> dict[str, Tensor]:
        """Rows of O and dQ, keys of dK and dV, of the last head in double precision."""
        Q, K, V, dO = (x[0, -1].double() for x in (self.Q, self.K, self.V, self.dO))
        O, _ = context_of_a_head(Q, K, V, True, self.rows)["O"]  # noqa: E741
        gradients = gradients_of_a_head(Q, K, V, dO, True)
        return {"O": O} | {name: value[self.at(name)] for name, (value, _) in gradients.items()}

    def at(self, name: str) -> Tensor:
        return self.rows if name in ("O", "dQ") else self.keys

    def errors(self, results: dict[str, Tensor]) -> dict[str, float]:
        """Relative L2 of each result, on the last head."""
        found = {}
        for name, got in results.items():
            want = self.want[name]
            found[f"error_{name}"] = ((got.detach()[0, -1, self.at(name)].double() - want).norm() / want.norm()).item()
        return found


# ---------------------------------------------------------------- who is measured

@dataclass
class Runner:
    launch: Callable[[], None]
    results: Callable[[], dict[str, Tensor]]  # of the last launch
    backend: str = ""


class Library:
    """A stage's peer library; peer.hpp says what it offers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.c = ctypes.CDLL(str(path))
            for name in ("fa_peer_forward", "fa_peer_backward"):
                function = getattr(self.c, name)
                function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_char_p, ctypes.POINTER(Call)]
        except (OSError, AttributeError) as error:
            raise BadResults(f"{path}: {error}") from None

    def scratch_bytes(self, kernel: bytes, call: Call) -> int:
        """Of a backward; stage 05 has no function for it and wants D."""
        if not hasattr(self.c, "fa_peer_backward_scratch_bytes"):
            return 4 * call.B * call.H * call.N
        function = self.c.fa_peer_backward_scratch_bytes
        function.restype = ctypes.c_char_p
        found = ctypes.c_int64()
        error = function(kernel, ctypes.byref(call), ctypes.byref(found))
        if error:
            raise Failed(error.decode())
        return found.value

    def says(self, what: str) -> str:
        """Its compiler, its flags."""
        try:
            function = getattr(self.c, f"fa_peer_{what}")
        except AttributeError as error:
            raise BadResults(f"{self.path}: {error}") from None
        function.restype = ctypes.c_char_p
        return function().decode()

    def takes(self, cell: Cell) -> bool:
        """Of FlashAttention-3: whether it is built for this cell."""
        call = Call(B=1, H=cell.heads, Hkv=cell.heads, N=cell.n, d=cell.d, causal=1, dtype=DTYPES[DTYPE[cell.dtype]])
        asked = {"forward": ["unsupported"], "backward": ["unsupported", "backward_unsupported"]}
        for what in asked.get(cell.what, asked["backward"]):  # a backward is given its own forward's O and LSE
            function = getattr(self.c, f"fa_peer_{what}")
            function.restype = ctypes.c_char_p
            if function(b"best", ctypes.byref(call)):
                return False
        return True


def ours(library: Library, cell: Cell, t: Tensors) -> Runner:
    """The best of a library: a stage's, or FlashAttention-3."""
    kernel = b"best"
    empty = lambda: torch.full_like(t.Q, math.nan)  # noqa: E731  # so that no old number passes for a result
    results = {"O": empty()}
    LSE = torch.full(t.Q.shape[:3], math.nan, device="cuda", dtype=torch.float32)
    given = {"Q": t.Q, "K": t.K, "V": t.V, "LSE": LSE}
    if cell.what != "forward":
        results |= {name: empty() for name in ("dQ", "dK", "dV")}
        given["dO"] = t.dO
    call = Call(B=1, H=cell.heads, Hkv=cell.heads, N=cell.n, d=cell.d, causal=1, dtype=DTYPES[t.Q.dtype],
                stream=torch.cuda.current_stream().cuda_stream,
                **{name: x.data_ptr() for name, x in (given | results).items()})
    need = 256 if cell.what == "forward" else max(256, library.scratch_bytes(kernel, call))
    scratch = torch.full((need,), 77, device="cuda", dtype=torch.uint8)  # what it holds does not matter
    call.scratch = scratch.data_ptr()

    def run(function: Callable[..., bytes | None], _alive: object = (scratch, LSE)) -> None:
        if error := function(kernel, ctypes.byref(call)):
            raise Failed(error.decode())

    def forward() -> None:
        run(library.c.fa_peer_forward)

    def backward() -> None:
        run(library.c.fa_peer_backward)

    def step() -> None:
        forward()
        backward()
    if cell.what == "backward":
        forward()
        O = results.pop("O")  # noqa: E741  # made by the forward; judged in the forward's own cell
        return Runner(backward, lambda _alive=O: results)
    return Runner({"forward": forward, "step": step}[cell.what], lambda: results)


def pytorch(cell: Cell, t: Tensors) -> Runner:
    """Its default: whatever scaled_dot_product_attention chooses."""
    attention = torch.nn.functional.scaled_dot_product_attention
    inputs = [x.detach().requires_grad_(cell.what != "forward") for x in (t.Q, t.K, t.V)]
    last: dict[str, Tensor] = {}

    def forward() -> Tensor:
        return attention(*inputs, is_causal=True)

    def gradients(O: Tensor, keep: bool) -> None:  # noqa: E741
        last.update(zip(("dQ", "dK", "dV"), torch.autograd.grad(O, inputs, t.dO, retain_graph=keep)))

    def only_forward() -> None:
        with torch.no_grad():
            last["O"] = forward()

    def step() -> None:
        last["O"] = O = forward()  # noqa: E741
        gradients(O, False)
    launch = {"forward": only_forward, "step": step}.get(cell.what)
    if launch is None:
        O = forward()  # noqa: E741

        def launch() -> None:
            gradients(O, True)
    return Runner(launch, lambda: last, backend(inputs))


def backend(inputs: list[Tensor]) -> str:
    """Which kernel the default is here."""
    try:
        return SDPBackend(torch._fused_sdp_choice(*inputs, is_causal=True)).name.lower()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return "unknown"


# ---------------------------------------------------------------- how long, and how much memory

def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def block(launch: Callable[[], None], count: int, host_ms: float, warm: bool) -> tuple[list[float], float]:
    """Milliseconds of each launch, and of the host for asking; it has asked for all before the GPU begins."""
    events = [(event(), event()) for _ in range(count)]
    torch.cuda._sleep(int(2e6 * min(100.0, 1.5 * (count + 1) * host_ms)))  # 2 million cycles a millisecond
    if warm:
        launch()
    begin = time.perf_counter()
    for before, after in events:
        before.record()
        launch()
        after.record()
    host = 1e3 * (time.perf_counter() - begin) / count
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in events], host


def launches(ms: float, budget_ms: float) -> int:
    """200 of a short one; at least 20 of one below 20 ms, at least 3 of any."""
    return max(20 if ms < 20 else 3, min(LAUNCHES, int(budget_ms / max(ms, 1e-3))))


def prepared(make: Callable[[], Runner], t: Tensors, what: str) -> tuple[Runner, int]:
    """And the most device memory that its first launch had in use, inputs and results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    runner = make()  # its outputs; for a backward the forward too
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    runner.launch()
    torch.cuda.synchronize()
    return runner, torch.cuda.max_memory_allocated() - before + t.bytes(what)


def broken(error: Exception) -> bool:
    """No further call can work in this process."""
    text = str(error)
    return "CUDA error" in text and "out of memory" not in text


def status_of(error: Exception) -> tuple[str, str]:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ("out_of_memory" if isinstance(error, OutOfMemory) or "out of memory" in text else "failed"), text


def measure_cell(cell: Cell, t: Tensors, sides: dict[str, Callable[[], Runner]], budget_ms: float) -> dict[str, Row]:
    """Blocks of both sides in turn, in an order drawn anew: heat meets both alike."""
    rows: dict[str, Row] = {}
    runners: dict[str, Runner] = {}
    peak: dict[str, int] = {}
    host: dict[str, list[float]] = {side: [] for side in sides}
    times: dict[str, list[float]] = {side: [] for side in sides}
    left: dict[str, int] = {}
    guess: dict[str, tuple[float, float]] = {}

    def fail(side: str, error: Exception) -> None:
        rows[side] = empty_row(cell, side, *status_of(error))
        runners.pop(side, None)
        left.pop(side, None)
        if broken(error):
            raise error

    def attempt(side: str, f: Callable[[], None]) -> None:
        try:
            f()
        except (Failed, RuntimeError) as error:
            fail(side, error)

    def begin(side: str) -> None:
        runners[side], peak[side] = prepared(sides[side], t, cell.what)
        (ms,), host_ms = block(runners[side].launch, 1, 0, warm=False)
        guess[side] = ms, min(host_ms, 0.5)
        left[side] = launches(ms, budget_ms)

    def go_on(side: str) -> None:
        ms, host_ms = guess[side]
        count = min(BLOCK, left[side])
        taken, asked = block(runners[side].launch, count, host_ms, warm=ms < 20)
        times[side] += taken
        host[side].append(asked)
        left[side] -= count

    try:
        for side in sides:
            attempt(side, lambda: begin(side))
        while any(left.values()):
            for side in random.sample(sorted(left), len(left)):
                if left[side]:
                    attempt(side, lambda: go_on(side))
        for side, runner in list(runners.items()):
            def judge() -> None:
                errors = t.errors(runner.results())
                worst = max(errors.values(), key=lambda x: math.inf if math.isnan(x) else x)
                if not worst <= MOST[cell.dtype]:  # NaN is not
                    raise Failed(f"wrong: {', '.join(f'{name} {x:.2g}' for name, x in errors.items())} after timing")
                rows[side] = figure_row(cell, side, statistics.median(times[side]), {
                    "p99_ms": percentile(times[side], 0.99), "launches": len(times[side]),
                    "host_ms": statistics.median(host[side]), "peak_bytes": peak[side], "error": worst, **errors},
                    runner.backend)
            attempt(side, judge)
    except RuntimeError as error:  # broken: the side is recorded, the other one has no fault
        raise Broken(rows, error) from error
    return rows


class Broken(Exception):
    def __init__(self, rows: dict[str, Row], error: Exception) -> None:
        super().__init__(str(error).splitlines()[0])
        self.rows = rows


# ---------------------------------------------------------------- all cells

def commit() -> str:
    if given := os.environ.get("FA_COMMIT"):
        return given
    done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True,
                          check=False)
    return done.stdout.strip() or "unknown"


def describe(library: Library, fa3: Library | None, options: argparse.Namespace) -> dict[str, str]:
    others = dict(zip(SAME_FA3, (fa3.says("commit"), fa3.says("cutlass")))) if fa3 else {}
    device = torch.cuda.get_device_properties(0)
    machine = "".join(c.lower() if c.isalnum() else "-" for c in device.name)
    return others | {
        "machine": machine if machine.startswith("nvidia-") else f"nvidia-{machine}", "device": device.name,
        "isa": f"sm_{device.major}{device.minor}", "cores": str(device.multi_processor_count),
        "memory_bytes": str(device.total_memory), "compiler": library.says("compiler"),
        "flags": library.says("flags"), "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "flop_formula": "4 d FLOP per visible (query, key) pair", "torch": torch.__version__,
        "cudnn": str(torch.backends.cudnn.version()), "cuda_runtime": str(torch.version.cuda),
        "seed": str(options.seed),
        "method": f"Up to {LAUNCHES} launches in {options.budget:g} ms, at least 20 of those below 20 ms and 3 of any, "
                  f"in blocks of {BLOCK}, of one side and of the other in turn{ABOVE}{options.limit:g} ms is too slow"}


def measure(options: argparse.Namespace) -> bool:
    """True if all of ours gave a figure, or a reason that is none of their fault."""
    if not torch.cuda.is_available():
        raise BadResults("PyTorch finds no GPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    build = options.build.resolve()
    libraries = {"f32": Library(build / "05_cuda_backward" / "libstage05_peer.so"),
                 "bf16": Library(build / "06_optimized" / "libstage06_peer.so")}
    fa3 = found_fa3(build / "fa3" / "libfa3.so", options.fa3)
    file = File(options.json, describe(libraries["bf16"], fa3, options))
    sides_of = {cell: (*SIDES, FA3) if fa3 and fa3.takes(cell) else SIDES for cell in cells(options.dtype)
                if cell.n <= options.longest}
    todo = [cell for cell, sides in sides_of.items() if not file.has(cell, options.limit, sides)]
    todo.sort(key=file.tried)  # a kernel that breaks the process does not keep the others from their turn
    begin = time.monotonic()
    last: tuple[Cell, Tensors] | None = None
    for number, cell in enumerate(todo, 1):
        rows = {}
        for side in sides_of[cell]:
            if (expected := file.expected_ms(cell, side)) > options.limit:
                rows[side] = empty_row(cell, side, "too_slow", f"a launch would take about {expected:.0f} ms, the "
                                       f"limit is {options.limit:g}; not tried", expected_ms=expected)
        try:
            if len(rows) < len(sides_of[cell]):
                forward = Cell(cell.dtype, cell.d, cell.heads, cell.n, "forward")
                if last is None or last[0] != forward:
                    last = None
                    last = forward, Tensors(forward, options.seed)
                t = last[1]
                _ = t.want  # before anything is measured: its memory is none of theirs
                make = {"ours": lambda: ours(libraries[cell.dtype], cell, t), "peer": lambda: pytorch(cell, t),
                        FA3: lambda: ours(fa3, cell, t)}
                sides = {side: make[side] for side in sides_of[cell] if side not in rows}
                rows |= measure_cell(cell, t, sides, options.budget)
        except OutOfMemory as error:  # not even the inputs have room
            last = None
            rows |= {side: empty_row(cell, side, *status_of(error)) for side in sides_of[cell] if side not in rows}
        except Broken as why:
            file.add(list((rows | why.rows).values()))
            raise BadResults(f"{cell.name('ours')}: {why}; nothing can run after this in this process. The file is "
                             "kept, and the next call measures the rest first") from None
        file.add([rows[side] for side in sides_of[cell]])
        if cell.what == tuple(PASSES)[-1]:
            left = (time.monotonic() - begin) * (len(todo) - number) / number
            print(f"{number:3}/{len(todo)}  {cell.dtype} d {cell.d} H {cell.heads} N {cell.n}, {cell.what}: "
                  f"{summary(rows)}; about {left:.0f} s left", flush=True)
    failed = [row for row in file.rows.values() if row.get("status") == "failed"]
    for row in failed:
        print(f"no figure: {row['name']}: {row['error_message']}")
    return not any(not row["name"].startswith("peer/") for row in failed)


def found_fa3(usual: Path, given: Path | None) -> Library | None:
    path = fa3_library(given, usual)
    return Library(path) if path else None


def summary(rows: dict[str, Row]) -> str:
    return ", ".join(f"{side} {row['real_time']:.4g} ms" if "real_time" in row else f"{side} {row['status']}"
                     for side, row in rows.items())


def words(allowed: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        if not set(text.split(",")) <= set(allowed):
            raise argparse.ArgumentTypeError(f"'{text}': any of {', '.join(allowed)}")
        return text.split(",")
    return parse


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="measure_table.py", description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("json", type=Path)
    parser.add_argument("--dtype", type=words(list(table.DTYPES)), default=list(table.DTYPES), metavar="bf16,f32")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], metavar="N")
    parser.add_argument("--budget", type=float, default=80, help="milliseconds of timed launches for a cell and side")
    parser.add_argument("--limit", type=float, default=6000, help="milliseconds: a longer launch is too slow")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fa3", type=Path, help="FlashAttention-3, by fa3/build.py (default: BUILD/fa3/libfa3.so if it "
                        "is there)")
    options = parser.parse_args(argv)
    if options.fa3 and not options.fa3.is_file():
        parser.error(f"--fa3 {options.fa3}: no such file; 06_optimized/check/fa3/build.py builds it")
    return reported("measure_table.py", lambda: 0 if measure(options) else 1)


if __name__ == "__main__":
    sys.exit(main())
