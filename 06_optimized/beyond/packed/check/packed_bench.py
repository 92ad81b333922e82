"""Packed sequences beside the padded batch and beside PyTorch's kernels: one JSON file, which a chart is drawn from.

    python3 06_optimized/beyond/packed/check/packed_bench.py build/06_optimized/libstage06_peer.so packed.json
    python3 ... --fa3 build/fa3/libfa3.so   # with FlashAttention-3, which 06_optimized/check/fa3/build.py --walks builds
    python3 ... --quick        # a first try: few tokens, two rounds, no FlexAttention

Needs PyTorch and a GPU. bf16, causal, 16 heads of d = 128 and 64; 16,384 and 131,072 tokens, forward and backward. Four
distributions of lengths share the same number of tokens: all equal; uniform from 1 to twice the mean; a long tail
(log-normal); one sequence of half the tokens and many of 128. Ours runs with the order of tiles that it chooses, by
`hopper`, and by `fa2` and `swizzle`; in the forward `fa2` also with each of the three orders. Beside it: the same kernels
of the ladders with a batch of equal lengths that has as many tokens and, to a few percent, as many pairs; the batch padded
to its longest sequence by the same kernels of the ladders with key lengths, where it fits into memory and time (to pack
and to pad is not counted); FlashAttention-2 for variable lengths, as PyTorch has it, and FlashAttention-3 with --fa3,
both of which are told the longest length, as ours is told the offsets; and at one setting FlexAttention with a mask of documents (--flex 0: without).

All contenders of a setting get the same numbers, and are timed once a round, in an order drawn anew, so that ratios can
be taken round by round. Some tokens of what each of them writes are compared with fp64, before and after. FLOP are those
of the pairs that a mask leaves: 4 H d pairs in the forward, 2.5 times that in the backward.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError:
    sys.exit("packed_bench.py: PyTorch is not installed for this Python; there is nothing to compare with")

ROOT = Path(__file__).resolve().parents[4]
H = 16
DISTRIBUTIONS = ("equal", "uniform", "tail", "one_long")
ORDERS = {"ours": 0, "ours_sequences": 1, "ours_tiles": 2, "ours_given": 3}
FA2, HOPPER = 1, 2  # packed::Kernel
SHORT = 128     # tokens of those beside the one long sequence
SAMPLES = 4     # tokens that are compared
MOST_MS = 400   # a contender that must take longer is left out
ALLOWED = {"forward": 1e-2, "backward": 3e-2}  # relative error of a row
Row = dict[str, Any]


class Call(ctypes.Structure):
    """struct fa_packed_call of peer.hpp."""

    _fields_ = ([(name, ctypes.c_int64) for name in ("B", "Hq", "Hkv", "Nq", "Nk", "d", "causal", "order", "dtype",
                                                      "kernel", "scratch_bytes")]
                + [(name, ctypes.c_void_p) for name in ("Q", "K", "V", "O", "LSE", "dO", "dQ", "dK", "dV", "queries",
                                                         "keys", "lengths", "queries_on_host", "scratch", "stream")])


class Failed(Exception):
    """No figure for this contender here."""


@dataclass(frozen=True)
class Setting:
    kind: str           # forward or backward
    tokens: int
    d: int
    distribution: str

    def __str__(self) -> str:
        return f"{self.kind:8} {self.tokens:6} tokens, d {self.d:3}, {self.distribution}"


def lengths_of(distribution: str, tokens: int, generator: random.Random) -> list[int]:
    """That many tokens in sequences, in a random order."""
    count = max(1, tokens // (1024 if tokens <= 16384 else 2048))
    mean = tokens // count
    if distribution == "equal":
        return [mean] * count
    if distribution == "one_long":
        found = [tokens // 2] + [SHORT] * (tokens // 2 // SHORT)
    else:
        draw = ((lambda: generator.uniform(1, 2 * mean)) if distribution == "uniform"
                else (lambda: generator.lognormvariate(0, 1.25)))
        weights = [draw() for _ in range(count)]
        found = [max(1, int(tokens * w / sum(weights))) for w in weights]
    found[found.index(max(found))] += tokens - sum(found)
    generator.shuffle(found)
    return found


def pairs_of(lengths: Sequence[int]) -> int:
    return sum(n * (n + 1) // 2 for n in lengths)


def even_lengths(lengths: Sequence[int]) -> list[int]:
    """Equal lengths with as many tokens, but for a few, and as many pairs: in n tokens of a sequence n + 1 pairs share 2."""
    tokens = sum(lengths)
    count = max(1, round(tokens / (2 * pairs_of(lengths) / tokens - 1)))
    return [tokens // count] * count


class Tensors:
    """Inputs, places for the results, and what they should be at some tokens."""

    def __init__(self, s: Setting, lengths: Sequence[int], seed: str) -> None:
        self.setting, self.lengths = s, list(lengths)
        self.starts = [sum(self.lengths[:b]) for b in range(len(self.lengths) + 1)]
        shape = (s.tokens, H, s.d)
        self.Q, self.K, self.V, self.dO = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        self.O, self.dQ, self.dK, self.dV = (torch.full(shape, math.nan, device="cuda", dtype=torch.bfloat16)
                                             for _ in range(4))
        self.LSE = torch.full((H, s.tokens), math.nan, device="cuda", dtype=torch.float32)
        self.on_host = torch.tensor(self.starts, dtype=torch.int32)
        self.offsets = self.on_host.cuda()
        # Neither first tokens, whose gradients are nearly nothing, nor more than one of a sequence.
        generator = random.Random(seed)
        long_enough = [b for b, n in enumerate(self.lengths) if n >= 64]
        chosen = generator.sample(long_enough, min(SAMPLES - 1, len(long_enough)))
        chosen.append(self.lengths.index(max(self.lengths)))
        self.samples = [(b, generator.randrange(16, self.lengths[b]), generator.randrange(H)) for b in chosen]
        self._want: dict[tuple[int, int, int], list[torch.Tensor]] = {}

    def expected(self, sample: tuple[int, int, int]) -> list[torch.Tensor]:
        """O, or dQ, dK and dV, of a token in fp64. The backward takes O and LSE as they are, as every contender does."""
        if sample in self._want:
            return self._want[sample]
        s, (b, i, h) = self.setting, sample
        here = slice(self.starts[b], self.starts[b + 1])
        scale = 1 / math.sqrt(s.d)
        Q, K, V, dO = (X[here, h].double() for X in (self.Q, self.K, self.V, self.dO))
        P = torch.softmax(K[:i + 1] @ Q[i] * scale, 0)
        if s.kind == "forward":
            found = [P @ V[:i + 1]]
        else:
            D = (self.O[here, h].double() * dO).sum(1)
            dS = P * (V[:i + 1] @ dO[i] - D[i])
            P_i = torch.exp(Q[i:] @ K[i] * scale - self.LSE[h, here].double()[i:])  # of the rows that see key i
            dS_i = P_i * (dO[i:] @ V[i] - D[i:])
            found = [scale * (dS @ K[:i + 1]), scale * (dS_i @ Q[i:]), P_i @ dO[i:]]
        self._want[sample] = found
        return found

    def error(self, got: Callable[[int, int, int], Sequence[torch.Tensor]]) -> float:
        """Relative, in the L2 norm, of the worst row; NaN stays NaN. got(sequence, token of it, head)."""
        errors = [((x.double() - want).norm() / (want.norm() + 1e-3)).item()
                  for sample in self.samples for x, want in zip(got(*sample), self.expected(sample))]
        return math.nan if any(map(math.isnan, errors)) else max(errors)

    def packed_results(self, *tensors: torch.Tensor) -> Callable[[int, int, int], list[torch.Tensor]]:
        return lambda b, i, h: [X[self.starts[b] + i, h] for X in tensors]


@dataclass
class Contender:
    name: str
    launch: Callable[[], None]  # on the current stream
    result: Callable[[int, int, int], Sequence[torch.Tensor]]
    clear: Callable[[], None] = lambda: None  # NaN where the results go
    tensors: Tensors | None = None  # its own, if it does not share those of the setting
    notes: Row = field(default_factory=dict)
    ms: list[float] = field(default_factory=list)


def complain(error: bytes | None) -> None:
    if error:
        raise Failed(error.decode())


def fill_nan(*tensors: torch.Tensor) -> Callable[[], None]:
    def clear() -> None:
        for X in tensors:
            X.fill_(math.nan)
    return clear


# ---------------------------------------------------------------- ours

class Library:
    """Of stage 06; or FlashAttention-3's, which has the packed functions alone."""

    PACKED = ("fa_packed_plan", "fa_packed_forward", "fa_packed_backward", "fa_peer_compiler", "fa_peer_flags")
    OURS = (*PACKED, "fa_padded_plan", "fa_padded_forward", "fa_padded_backward")
    FA3 = (*PACKED, "fa_peer_commit", "fa_peer_cutlass")

    def __init__(self, path: Path, functions: Sequence[str] = OURS) -> None:
        try:
            self.c = ctypes.CDLL(str(path.resolve()))
            for name in functions:
                getattr(self.c, name).restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            sys.exit(f"packed_bench.py: {path}: {error}")

    def call(self, t: Tensors, order: int, kernel: int = FA2) -> tuple[Call, torch.Tensor]:
        """Of both passes, and the scratch, which must live as long."""
        s = t.setting
        call = Call(B=len(t.lengths), Hq=H, Hkv=H, Nq=s.tokens, Nk=s.tokens, d=s.d, causal=2, order=order, dtype=2,
                    kernel=kernel, Q=t.Q.data_ptr(), K=t.K.data_ptr(), V=t.V.data_ptr(), O=t.O.data_ptr(),
                    LSE=t.LSE.data_ptr(), dO=t.dO.data_ptr(), dQ=t.dQ.data_ptr(), dK=t.dK.data_ptr(), dV=t.dV.data_ptr(),
                    queries=t.offsets.data_ptr(), keys=t.offsets.data_ptr(), queries_on_host=t.on_host.data_ptr())
        sizes = ctypes.c_int64(), ctypes.c_int64()
        complain(self.c.fa_packed_plan(ctypes.byref(call), ctypes.byref(sizes[0]), ctypes.byref(sizes[1])))
        scratch = torch.empty(max(sizes[0].value, sizes[1].value) + 256, device="cuda", dtype=torch.uint8)
        call.scratch, call.scratch_bytes = scratch.data_ptr(), scratch.numel()
        return call, scratch

    def forward(self, t: Tensors) -> None:
        """O and LSE, which a backward needs."""
        call, _alive = self.call(t, 0)
        call.stream = torch.cuda.current_stream().cuda_stream
        complain(self.c.fa_packed_forward(ctypes.byref(call)))
        torch.cuda.synchronize()

    def contender(self, t: Tensors, name: str, order: int, kernel: int = FA2) -> Contender:
        call, scratch = self.call(t, order, kernel)
        forward = t.setting.kind == "forward"
        function = self.c.fa_packed_forward if forward else self.c.fa_packed_backward
        results = (t.O,) if forward else (t.dQ, t.dK, t.dV)

        def launch(_alive: object = scratch) -> None:
            call.stream = torch.cuda.current_stream().cuda_stream
            complain(function(ctypes.byref(call)))
        return Contender(name, launch, t.packed_results(*results), fill_nan(*results))

    def padded(self, t: Tensors, name: str = "padded", kernel: int = FA2) -> Contender:
        s, B, N = t.setting, len(t.lengths), max(t.lengths)
        forward = s.kind == "forward"
        free, _ = torch.cuda.mem_get_info()
        needed = (4 if forward else 8) * B * N * H * s.d * 2
        if needed > 0.8 * free:
            raise Failed(f"padded tensors take {needed >> 30} GiB, {free >> 30} are free")
        work = sum(n * (n + 1) // 2 + (N - n) * n for n in t.lengths)
        expected_ms = flop(s, work) / 250e9
        if expected_ms > MOST_MS:
            raise Failed(f"computes {work / pairs_of(t.lengths):.0f} times as many pairs: more than {MOST_MS} ms")
        index = torch.cat([torch.arange(n, device="cuda") + b * N for b, n in enumerate(t.lengths)])

        def pad(X: torch.Tensor) -> torch.Tensor:
            padded = torch.zeros(B * N, H, s.d, device="cuda", dtype=X.dtype)
            padded[index] = X
            return padded
        Q, K, V = map(pad, (t.Q, t.K, t.V))
        O = torch.full_like(Q, math.nan)
        LSE = torch.full((B, H, N), math.nan, device="cuda", dtype=torch.float32)
        lengths = torch.tensor(t.lengths, device="cuda", dtype=torch.int64)
        call = Call(B=B, Hq=H, Hkv=H, Nq=N, Nk=N, d=s.d, causal=1, dtype=2, kernel=kernel, Q=Q.data_ptr(), K=K.data_ptr(),
                    V=V.data_ptr(), O=O.data_ptr(), LSE=LSE.data_ptr(), lengths=lengths.data_ptr())
        kept: list[torch.Tensor] = [Q, K, V, O, LSE, lengths]
        counter = torch.empty(256, device="cuda", dtype=torch.uint8)  # hopper counts tiles
        call.scratch, call.scratch_bytes = counter.data_ptr(), counter.numel()
        kept.append(counter)
        if forward:
            results: tuple[torch.Tensor, ...] = (O,)
            function = self.c.fa_padded_forward
        else:
            call.stream = torch.cuda.current_stream().cuda_stream
            complain(self.c.fa_padded_forward(ctypes.byref(call)))
            dO = pad(t.dO)
            results = tuple(torch.full_like(Q, math.nan) for _ in range(3))
            size = ctypes.c_int64()
            complain(self.c.fa_padded_plan(ctypes.byref(call), ctypes.byref(size)))
            scratch = torch.empty(size.value + 256, device="cuda", dtype=torch.uint8)
            call.dO, call.dQ, call.dK, call.dV = (X.data_ptr() for X in (dO, *results))
            call.scratch, call.scratch_bytes = scratch.data_ptr(), scratch.numel()
            kept += [dO, scratch]
            function = self.c.fa_padded_backward

        def launch(_alive: object = kept) -> None:
            call.stream = torch.cuda.current_stream().cuda_stream
            complain(function(ctypes.byref(call)))
        return Contender(name, launch, lambda b, i, h: [X[b * N + i, h] for X in results], fill_nan(*results),
                         notes={"padded_to": N})

    def even(self, t: Tensors, name: str, kernel: int = FA2) -> Contender:
        """Equal lengths with as many tokens and, nearly, pairs, by the kernels that know no offsets."""
        s = t.setting
        lengths = even_lengths(t.lengths)
        own = Tensors(replace(s, tokens=sum(lengths)), lengths, f"even {s}")
        if s.kind == "backward":
            self.forward(own)
        c = self.padded(own, name, kernel)
        c.tensors = own
        c.notes = {"sequences": len(lengths), "longest": lengths[0], "pairs": pairs_of(lengths)}
        return c


# ---------------------------------------------------------------- the others

def varlen(t: Tensors) -> Contender:
    """FlashAttention-2 for variable lengths, as PyTorch has it."""
    longest, last = max(t.lengths), {}

    def forward() -> Sequence[torch.Tensor]:
        return torch.ops.aten._flash_attention_forward(t.Q, t.K, t.V, t.offsets, t.offsets, longest, longest, 0.0, True,
                                                       False)
    if t.setting.kind == "forward":
        def launch() -> None:
            last["results"] = forward()[:1]
    else:
        O, LSE, state, unused = forward()[:4]

        def launch() -> None:
            last["results"] = torch.ops.aten._flash_attention_backward(
                t.dO, t.Q, t.K, t.V, O, LSE, t.offsets, t.offsets, longest, longest, 0.0, True, state, unused)[:3]
    return Contender("fa2_varlen", launch, lambda b, i, h: t.packed_results(*last["results"])(b, i, h), last.clear)


def flex(t: Tensors) -> Contender:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    N = t.setting.tokens
    document = torch.repeat_interleave(torch.arange(len(t.lengths), device="cuda"),
                                       torch.tensor(t.lengths, device="cuda"))

    def mask(_b: torch.Tensor, _h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (document[i] == document[j]) & (j <= i)
    blocks = create_block_mask(mask, None, None, N, N, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    last: dict[str, Sequence[torch.Tensor]] = {}
    Q, K, V = (X.transpose(0, 1).unsqueeze(0).detach() for X in (t.Q, t.K, t.V))
    if t.setting.kind == "forward":
        def launch() -> None:
            last["results"] = (compiled(Q, K, V, block_mask=blocks),)
    else:
        for X in (Q, K, V):
            X.requires_grad_(True)
        dO = t.dO.transpose(0, 1).unsqueeze(0)
        with torch.enable_grad():
            O = compiled(Q, K, V, block_mask=blocks)

        def launch() -> None:
            last["results"] = torch.autograd.grad(O, (Q, K, V), dO, retain_graph=True)
    return Contender("flex", launch, lambda b, i, h: [X[0, h, t.starts[b] + i] for X in last["results"]], last.clear)


# ---------------------------------------------------------------- how long does it take?

def flop(s: Setting, pairs: int) -> float:
    return 4.0 * H * s.d * pairs * (1 if s.kind == "forward" else 2.5)


def milliseconds(c: Contender, least: float) -> float:
    """Of one launch; repeated for at least so many milliseconds, so that the host is ahead of the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def of(times: int) -> float:
        torch.cuda._sleep(200_000)  # cycles: while the GPU waits, the host has launched
        begin.record()
        for _ in range(times):
            c.launch()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / times
    if "times" not in c.notes:
        c.launch()
        c.notes["times"] = max(1, min(50, math.ceil(least / max(of(1), 1e-3))))
    return of(c.notes["times"])


def once(c: Contender, t: Tensors) -> float:
    """The error of one launch, over results of NaN."""
    c.clear()
    c.launch()
    torch.cuda.synchronize()
    return t.error(c.result)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def contenders(library: Library, fa3: Library | None, t: Tensors, with_flex: bool) -> Iterator[tuple[str, Callable[[], Contender]]]:
    for name, order in ORDERS.items():
        if order and t.setting.kind == "backward":
            continue  # each order once more would take too long
        yield name, lambda name=name, order=order: library.contender(t, name, order)  # type: ignore[misc]
    yield "ours_hopper", lambda: library.contender(t, "ours_hopper", 0, HOPPER)
    yield "padded_hopper", lambda: library.padded(t, "padded_hopper", HOPPER)
    yield "padded", lambda: library.padded(t)
    if len(set(t.lengths)) > 1:  # else that is `padded`
        yield "even_hopper", lambda: library.even(t, "even_hopper", HOPPER)
        yield "even", lambda: library.even(t, "even")
    yield "fa2_varlen", lambda: varlen(t)
    if fa3:
        yield "fa3", lambda: fa3.contender(t, "fa3", 0)
    if with_flex:
        yield "flex", lambda: flex(t)


def measured(library: Library, s: Setting, options: argparse.Namespace, with_flex: bool) -> list[Row]:
    """A row for each contender: its times round by round, or why it has none."""
    # The lengths are those of the distribution, whatever the pass and d.
    lengths = lengths_of(s.distribution, s.tokens, random.Random(f"{options.seed} {s.tokens} {s.distribution}"))
    t = Tensors(s, lengths, f"{options.seed} {s}")
    pairs = pairs_of(lengths)
    base = {"kind": s.kind, "tokens": s.tokens, "d": s.d, "H": H, "lengths": s.distribution, "sequences": len(lengths),
            "longest": max(lengths), "pairs": pairs}
    if s.kind == "backward":
        library.forward(t)
    rows: list[Row] = []
    good: list[Contender] = []
    for name, make in contenders(library, options.fa3, t, with_flex):
        try:
            c = make()
            error = once(c, c.tensors or t)
            if not error < ALLOWED[s.kind]:
                raise Failed(f"wrong before timing: relative error {error:.3g}")
            milliseconds(c, options.block)
            c.notes["error"] = float(f"{error:.3g}")
            good.append(c)
        except Exception as error:  # noqa: BLE001  # whoever cannot run here is told of, and the others go on
            rows.append(base | {"who": name, "failed": first_line(error)})
            torch.cuda.synchronize()
    for _ in range(options.rounds):
        for c in random.sample(good, len(good)):
            c.ms.append(milliseconds(c, options.block))
    for c in good:
        error = once(c, c.tensors or t)
        if not error < ALLOWED[s.kind]:
            rows.append(base | {"who": c.name, "failed": f"wrong after timing: relative error {error:.3g}"})
            continue
        rows.append(base | {"who": c.name} | c.notes
                    | {"ms": [float(f"{x:.5g}") for x in c.ms],
                       "TFLOP_per_s": round(1e-9 * flop(s, c.notes.get("pairs", pairs)) / statistics.median(c.ms), 1)})
    return rows


def settings(options: argparse.Namespace) -> list[tuple[Setting, bool]]:
    """What matters most comes first: time may end before the list does. And: with FlexAttention?"""
    sizes = (2048,) if options.quick else (131072, 16384)
    found = [(Setting(kind, tokens, d, distribution), False) for tokens in sizes for d in (128, 64)
             for kind in ("forward", "backward") for distribution in DISTRIBUTIONS]
    if options.flex and not options.quick:
        found += [(Setting(kind, 16384, 128, "uniform"), True) for kind in ("forward", "backward")]
        found = [one for one in found if one not in [(Setting(kind, 16384, 128, "uniform"), False)
                                                     for kind in ("forward", "backward")]]
    return found


def gpu(fields: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0"],
                              capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def commit() -> str:
    if given := os.environ.get("FA_COMMIT"):
        return given
    try:
        done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True,
                              check=False)
        return done.stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def context(library: Library, options: argparse.Namespace) -> Row:
    device = torch.cuda.get_device_properties(0)
    fa3 = {name: getattr(options.fa3.c, f"fa_peer_{function}")().decode()
           for name, function in (("fa3_commit", "commit"), ("cutlass_commit", "cutlass"))} if options.fa3 else {}
    return {"device": device.name, "isa": f"sm_{device.major}{device.minor}", "cores": device.multi_processor_count,
            "memory_bytes": device.total_memory, "compiler": library.c.fa_peer_compiler().decode(),
            "flags": library.c.fa_peer_flags().decode(), "commit": commit(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "torch": torch.__version__,
            "driver": gpu("driver_version"), "clocks_limits": gpu("clocks.max.sm,clocks.max.mem,power.limit"),
            "seed": options.seed,
            "method": f"{options.rounds} rounds, order drawn anew; launches for {options.block:g} ms between two events; "
                      f"bf16, causal, {H} heads; FLOP are those of the pairs that the mask leaves, x 2.5 in the backward; "
                      "lists of tiles are made anew in every call; to pack and to pad is not counted"} | fa3


def write(path: Path, data: Row) -> None:
    """All of it or nothing."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=None, separators=(",", ":")).replace('{"kind"', '\n{"kind"') + "\n",
                    encoding="utf-8")
    os.replace(part, path)


def told(rows: Sequence[Row]) -> str:
    return "  ".join(f"{r['who']} {r['TFLOP_per_s']:.0f}" if "ms" in r else f"[{r['who']}: {r['failed'][:60]}]"
                     for r in rows)


def run(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        sys.exit("packed_bench.py: PyTorch finds no GPU")
    library = Library(options.library)
    began = time.monotonic()
    data: Row = {"context": context(library, options), "skipped": [], "rows": []}
    print(data["context"]["device"], flush=True)
    for s, with_flex in settings(options):
        random.seed(f"{options.seed} {s}")
        torch.manual_seed(random.getrandbits(32))
        if time.monotonic() - began > options.limit:
            data["skipped"].append({"kind": s.kind, "setting": str(s), "why": "no time left"})
            print(f"{s}: no time left", flush=True)
            continue
        try:
            with torch.no_grad():
                rows = measured(library, s, options, with_flex)
        except (RuntimeError, Failed) as error:
            rows = [{"kind": s.kind, "tokens": s.tokens, "d": s.d, "lengths": s.distribution, "who": "all",
                     "failed": first_line(error)}]
        data["rows"] += rows
        torch.cuda.empty_cache()
        print(f"{s}: {told(rows)}", flush=True)
        write(options.json, data)
    data["context"]["seconds"] = round(time.monotonic() - began, 1)
    data["context"]["clocks_after"] = gpu("clocks.sm,temperature.gpu,power.draw")
    write(options.json, data)
    print(f"{options.json}, {data['context']['seconds']} s")
    ours = [row for row in data["rows"] if row["who"].startswith("ours") or row["who"] == "all"]
    return 0 if ours and all("ms" in row for row in ours) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path, help="build/06_optimized/libstage06_peer.so")
    parser.add_argument("json", type=Path, help="where the results go")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=float, default=4, help="milliseconds of launches per timing")
    parser.add_argument("--limit", type=float, default=80, help="seconds after which no setting is begun")
    parser.add_argument("--fa3", type=lambda path: Library(Path(path), Library.FA3), metavar="LIBRARY",
                        help="FlashAttention-3 (build/fa3/libfa3.so)")
    parser.add_argument("--flex", type=int, default=1, help="0: without FlexAttention")
    parser.add_argument("--quick", action="store_true", help="a first try: 2,048 tokens, two rounds, no FlexAttention")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds = min(options.rounds, 2)
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
