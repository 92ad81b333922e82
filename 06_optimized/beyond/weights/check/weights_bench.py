"""What it costs to ask for weights, beside a forward and beside P kept whole: one JSON file, drawn by charts.py.

    python3 06_optimized/beyond/weights/check/weights_bench.py build/06_optimized/libstage06_peer.so weights.json

Needs PyTorch and a GPU. bf16, no mask, d = 128, 16 heads, B N = 16,384. Each contender is given the same Q, K, V and the
L of one forward: `forward` is 06's fa2 itself; `largest` the 16 largest weights of every row; `sums` the sums of all
columns; `tile` 128 rows and keys of every head. `whole_largest` and `whole_sums` are what one writes without them: P by
PyTorch, one head at a time, and its topk or sum. The contenders of a length are timed once a round, in an order drawn
anew. All are compared with P in fp64 on some rows or columns, before and after.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(ROOT / "06_optimized/check"), str(ROOT / "06_optimized/beyond/decode/check"),
                str(ROOT / "common/measure/peers")]
try:
    import torch
    from contenders import Library, Setting, Tensors, call_of, complain
    from decode_bench import commit, first_line, gpu, write
except ImportError as error:
    sys.exit(f"weights_bench.py: {error}; it needs PyTorch 2.5 or later and 06's own tools")

K = 16
TILE = 128
LENGTHS = (1024, 2048, 4096, 8192, 16384)
Row = dict[str, Any]


@dataclass
class Contender:
    name: str
    launch: Callable[[], None]
    error: Callable[[], float]  # of what the last launch has left
    forget: Callable[[], None]
    limit: float = 2e-3  # of the error, relative to the largest value
    ms: list[float] = field(default_factory=list)
    notes: Row = field(default_factory=dict)


def contenders(library: Library, t: Tensors) -> list[Contender]:
    s = t.setting
    n, heads = s.n, s.heads
    context = library.context(t)
    call = call_of(t, context)
    pointer = ctypes.byref(call)
    lse = context["LSE"]
    scale = 1 / math.sqrt(s.d)
    some = sorted({0, n // 3, n - 1})

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, device="cuda", dtype=dtype)

    def exact(b: int, h: int) -> torch.Tensor:
        """P of one head in fp64."""
        return torch.softmax(t.q[b, h].double() @ t.k[b, h].double().T * scale, -1)

    def relative(got: torch.Tensor, want: torch.Tensor) -> float:
        return ((got.double() - want).abs().max() / want.abs().max()).item()

    last = (s.batch - 1, heads - 1)
    P_last = exact(*last)
    want_largest, want_sums = torch.topk(P_last[some], K).values, P_last.sum(0)
    want_tile = P_last[:TILE, :TILE].clone()
    del P_last
    largest, keys = new(s.batch, heads, n, K), new(s.batch, heads, n, K, dtype=torch.int32)
    sums, tile = new(s.batch, heads, n), new(s.batch, heads, TILE, TILE)
    c = library.c
    for function in (c.fa_weights_largest, c.fa_weights_column_sums, c.fa_weights_tile):
        function.restype = ctypes.c_char_p
    at = lambda x: ctypes.c_void_p(x.data_ptr())  # noqa: E731
    runner = library.runner("fa2", t, {})
    if isinstance(runner, str):
        raise RuntimeError(runner)

    def whole(use: Callable[[torch.Tensor, int, int], None]) -> Callable[[], None]:
        def launch() -> None:
            for b in range(s.batch):
                for h in range(heads):
                    S = (t.q[b, h] @ t.k[b, h].T).float() * scale
                    use(S.sub_(lse[b, h][:, None]).exp_(), b, h)
        return launch

    def keep_largest(P: torch.Tensor, b: int, h: int) -> None:
        torch.topk(P, K, out=(largest[b, h], places[b, h]))

    def keep_sums(P: torch.Tensor, b: int, h: int) -> None:
        torch.sum(P, 0, out=sums[b, h])

    places = new(s.batch, heads, n, K, dtype=torch.int64)
    of_largest = lambda: relative(largest[last][some], want_largest)  # noqa: E731
    of_sums = lambda: relative(sums[last], want_sums)  # noqa: E731
    poison_largest, poison_sums = (lambda: largest.fill_(math.nan)), (lambda: sums.fill_(math.nan))
    rounded = 3e-2  # where S is bf16 on its way
    return [
        Contender("forward", lambda: runner.launch(1), lambda: 0.0, lambda: None),
        Contender("largest", lambda: complain(c.fa_weights_largest(pointer, ctypes.c_int64(K), at(largest), at(keys))),
                  of_largest, poison_largest),
        Contender("sums", lambda: complain(c.fa_weights_column_sums(pointer, at(sums))), of_sums, poison_sums),
        Contender("tile", lambda: complain(c.fa_weights_tile(pointer, ctypes.c_int64(TILE), ctypes.c_int64(TILE), at(tile))),
                  lambda: relative(tile[last], want_tile), lambda: tile.fill_(math.nan)),
        Contender("whole_largest", whole(keep_largest), of_largest, poison_largest, rounded),
        Contender("whole_sums", whole(keep_sums), of_sums, poison_sums, rounded)]


def milliseconds(launch: Callable[[], None], block: float) -> float:
    """Of one launch, of as many as fill the block."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count = 1
    while True:
        begin.record()
        for _ in range(count):
            launch()
        end.record()
        end.synchronize()
        took = begin.elapsed_time(end)
        if took >= block / 2 or count >= 512:
            return took / count
        count = min(512, max(2 * count, math.ceil(count * block / max(took, 1e-3))))


def checked(c: Contender, when: str) -> None:
    c.forget()
    c.launch()
    torch.cuda.synchronize()
    error = c.error()
    if not error < c.limit:  # NaN is not
        raise RuntimeError(f"wrong {when} timing: relative error {error:.3g}")
    c.notes["error"] = float(f"{error:.3g}")


def measured(library: Library, n: int, options: argparse.Namespace) -> list[Row]:
    s = Setting.of("forward", n, 128, False, 1, "bf16")
    base = {"N": n, "B": s.batch, "H": s.heads, "d": s.d}
    rows: list[Row] = []
    good: list[Contender] = []
    t = Tensors(s)
    for c in contenders(library, t):
        try:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            checked(c, "before")
            c.notes["extra_bytes"] = torch.cuda.max_memory_allocated() - before
            good.append(c)
        except (RuntimeError, AttributeError) as error:
            rows.append(base | {"who": c.name, "failed": first_line(error)})
    for _ in range(options.rounds):
        for c in random.sample(good, len(good)):
            c.ms.append(milliseconds(c.launch, options.block))
    for c in good:
        try:
            checked(c, "after")
            rows.append(base | {"who": c.name} | c.notes | {"ms": [float(f"{x:.5g}") for x in c.ms]})
        except RuntimeError as error:
            rows.append(base | {"who": c.name, "failed": first_line(error)})
    return rows


def run(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        sys.exit("weights_bench.py: PyTorch finds no GPU")
    library = Library(options.library.resolve())
    device = torch.cuda.get_device_properties(0)
    began = time.monotonic()
    data: Row = {"context": {
        "device": device.name, "compiler": library.c.fa_peer_compiler().decode(), "flags": library.c.fa_peer_flags().decode(),
        "commit": commit(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "torch": torch.__version__,
        "driver": gpu("driver_version"), "seed": options.seed,
        "method": f"{options.rounds} rounds, order drawn anew; launches that fill {options.block:g} ms; bf16, no mask"},
        "rows": []}
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    for n in LENGTHS:
        if n > options.longest:
            continue
        with torch.no_grad():
            rows = measured(library, n, options)
        data["rows"] += rows
        torch.cuda.empty_cache()
        print(f"N {n}: " + "  ".join(f"{row['who']} {statistics.median(row['ms']):.3f} ms" if "ms" in row else
                                     f"[{row['who']}: {row['failed'][:60]}]" for row in rows), flush=True)
        write(options.json, data)
    print(f"{options.json}, {time.monotonic() - began:.1f} s")
    return 0 if data["rows"] and all("ms" in row for row in data["rows"]) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path, help="build/06_optimized/libstage06_peer.so")
    parser.add_argument("json", type=Path, help="where the results go")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block", type=float, default=10, help="milliseconds of launches per timing")
    parser.add_argument("--longest", type=int, default=16384, help="rows")
    parser.add_argument("--seed", type=int, default=1)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
