"""Times a stage's kernels beside PyTorch's, in one process and on the same tensors.

Needs PyTorch with CUDA, and the stage's library (target stageNN_peer). Every row is measured once a round, in an
order drawn anew; before that, each result is compared with double precision. The rows are added to the benchmark's
JSON, so that charts can show them; a run that finds a wrong result adds nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    sys.exit("peers.py: PyTorch 2.3 or later is not installed for this Python; there is nothing to compare with")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "charts"))
from results import BadResults, load, write_whole  # noqa: E402

TENSORS = ("Q", "K", "V", "O", "LSE", "dO", "dQ", "dK", "dV", "scratch", "stream")
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Call(ctypes.Structure):
    """struct fa_peer_call of peer.hpp."""

    _fields_ = ([(name, ctypes.c_int64) for name in ("B", "H", "Hkv", "N", "d", "causal", "dtype")]
                + [(name, ctypes.c_void_p) for name in TENSORS])


@dataclass(frozen=True)
class Case:
    n: int
    d: int
    causal: bool
    batch: int = 4
    heads: int = 8

    def flops(self, what: str) -> float:
        pairs = self.n * (self.n + 1) / 2 if self.causal else self.n * self.n
        forward = 4.0 * self.batch * self.heads * self.d * pairs
        return {"forward": 1.0, "backward": 2.5, "both": 3.5}[what] * forward

    def name(self, what: str, variant: str, dtype: str) -> str:
        return f"peer/{what}/{variant}/N:{self.n}/d:{self.d}/causal:{int(self.causal)}/{dtype}"


class Tensors:
    """Inputs of one case and places for the results."""

    def __init__(self, case: Case, dtype: torch.dtype, backward: bool) -> None:
        shape = (case.batch, case.heads, case.n, case.d)
        make = lambda: torch.randn(shape, device="cuda", dtype=dtype)  # noqa: E731
        self.case = case
        self.q, self.k, self.v = (make().requires_grad_(backward) for _ in range(3))
        self.o = torch.full_like(self.q, math.nan, requires_grad=False)
        self.lse = torch.full(shape[:3], math.nan, device="cuda", dtype=torch.float32)
        self.do = make() if backward else None
        self.grads = [torch.full_like(self.o, math.nan) for _ in range(3)] if backward else []
        self.scratch = torch.empty(shape[:3], device="cuda", dtype=torch.float32)  # one number for each query

    def call(self) -> Call:
        pointer = lambda t: None if t is None else t.data_ptr()  # noqa: E731
        c = self.case
        dq, dk, dv = self.grads or (None, None, None)
        return Call(c.batch, c.heads, c.heads, c.n, c.d, int(c.causal), DTYPES[self.q.dtype], *map(pointer, (
            self.q, self.k, self.v, self.o, self.lse, self.do, dq, dk, dv, self.scratch)),
            torch.cuda.current_stream().cuda_stream)


class Library:
    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))

    def run(self, what: str, kernel: str, tensors: Tensors) -> Callable[[], None]:
        function = getattr(self.library, f"fa_peer_{what}")
        function.restype = ctypes.c_char_p
        function.argtypes = [ctypes.c_char_p, ctypes.POINTER(Call)]
        call = tensors.call()

        def once() -> None:
            error = function(kernel.encode(), ctypes.byref(call))
            if error:
                sys.exit(f"peers.py: {kernel}: {error.decode()}")
        return once


def expected_rows(t: Tensors) -> list[tuple[int, int, list[int], torch.Tensor]]:
    """Some rows of O in double precision: (b, h, rows, values)."""
    found = []
    for b, h in {(0, 0), (t.case.batch - 1, t.case.heads - 1)}:
        rows = sorted({0, t.case.n // 3, t.case.n - 1})
        q, k, v = (x[b, h].detach().double() for x in (t.q, t.k, t.v))
        s = q[rows] @ k.T / math.sqrt(t.case.d)
        if t.case.causal:
            s = s.masked_fill(torch.arange(t.case.n, device="cuda")[None] > torch.tensor(rows, device="cuda")[:, None],
                              -math.inf)
        found.append((b, h, rows, torch.softmax(s, -1) @ v))
    return found


def verified(name: str, o: torch.Tensor, want: list[tuple[int, int, list[int], torch.Tensor]], limit: float) -> None:
    for b, h, rows, values in want:
        error = (o[b, h, rows].detach().double() - values).abs().max().item()
        if not error <= limit:  # NaN is not
            sys.exit(f"peers.py: {name} is wrong by {error:.2g} in batch {b}, head {h}; nothing written")


def milliseconds(once: Callable[[], None]) -> float:
    """The median of enough runs to fill 30 ms, by CUDA events."""
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 30 and len(times) < 200):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        once()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def torch_forward(t: Tensors, backend: SDPBackend) -> Callable[[], torch.Tensor]:
    def once() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(t.q, t.k, t.v, is_causal=t.case.causal)
    return once


def cases_of(path: Path, what: str) -> list[Case]:
    """The problems that the benchmark has measured."""
    found = {(int(row.keys["N"]), int(row.keys["d"]), bool(row.keys["causal"]))
             for row in load(path).rows if row.what == what}
    return [Case(*key) for key in sorted(found)]


def add_rows(path: Path, rows: list[dict[str, object]]) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    data["benchmarks"] = [raw for raw in data["benchmarks"] if not str(raw.get("name", "")).startswith("peer/")] + rows
    data["context"]["torch"] = torch.__version__
    write_whole(path, (json.dumps(data, indent=1) + "\n").encode())


def row(name: str, ms: float, flops: float, index: int) -> dict[str, object]:
    return {"name": name, "run_name": name, "run_type": "iteration", "repetitions": 1, "repetition_index": index,
            "threads": 1, "iterations": 1, "real_time": ms, "cpu_time": ms, "time_unit": "ms", "flops": 1e3 * flops / ms}


def run(description: str, what: str, prepare: Callable[[Library, Case], dict[str, Callable[[], object]]],
        dtype: str) -> int:
    """prepare(library, case) -> what to time, by variant; it verifies each result first."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("library", type=Path, help="build/NN_*/libstageNN_peer.so")
    parser.add_argument("json", type=Path, help="what the stage's benchmark wrote with --out")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", type=int, metavar="N", help="only this sequence length")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(1)
    library = Library(options.library.resolve())
    rows: list[dict[str, object]] = []
    try:
        cases = [c for c in cases_of(options.json, what) if options.only in (None, c.n)]
        for done, case in enumerate(cases, 1):
            timed = prepare(library, case)
            times: dict[str, list[float]] = {variant: [] for variant in timed}
            for index in range(options.rounds):
                for variant in random.sample(sorted(timed), len(timed)):
                    times[variant].append(milliseconds(timed[variant]))
                    name = case.name(what, variant, dtype)
                    rows.append(row(name, times[variant][-1], case.flops(what), index))
            text = ", ".join(f"{v} {case.flops(what) / statistics.median(ms) / 1e9:.1f}" for v, ms in times.items())
            print(f"{done}/{len(cases)}  N {case.n} d {case.d} causal {int(case.causal)}, TFLOP/s: {text}", flush=True)
            del timed
            torch.cuda.empty_cache()
        add_rows(options.json, rows)
    except BadResults as error:
        print(f"peers.py: {error}", file=sys.stderr)
        return 1
    return 0
