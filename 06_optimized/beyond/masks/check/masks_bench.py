"""Time against what is visible: windows, lists of blocks, sinks and documents beside the plain kernels and others.

    python3 06_optimized/beyond/masks/check/masks_bench.py build/06_optimized/libstage06_peer.so masks.json

Needs PyTorch and a GPU. bf16, one sequence of N = 16,384, 16 heads of d = 128 and 64, forward and backward. Windows of
256 to 12,288 keys to the left, with as many to the right or none; lists of 10, 25, 50 and 100 % of all blocks of
128 x 128, drawn at random; a window with learnable sinks; 16 documents. `ours` is the walk by hopper, where that takes
the pattern, and by fa2 with swizzle; `plain` the kernels without the walk, without a mask and with a causal one. Beside
them, for windows, PyTorch's FlashAttention-2; FlashAttention-3 with --fa3,
the library that 06_optimized/check/fa3/build.py --walks builds; FlexAttention at --flex settings, each of which takes
PyTorch some ten seconds to compile.

All contenders of a head dimension are timed once a round, in an order drawn anew, so that ratios can be taken round by
round. What each of them writes is compared with fp64 before and after: O and dQ of some rows, dK and dV of some keys.
FLOP are those of visible pairs.
"""

from __future__ import annotations

import argparse
import ctypes
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
sys.path[:0] = [str(ROOT / "06_optimized/beyond/scores/check")]
try:
    import torch
    from scores_bench import Failed, PeerCall, commit, complain, first_line, gpu, write
except ImportError as error:
    sys.exit(f"masks_bench.py: {error}; it needs PyTorch 2.5 or later")

HEADS, BLOCK, DOCUMENTS = 16, 128, 16
WIDTHS, SHARES = (256, 1024, 4096, 8192, 12288), (10, 25, 50, 100)
SAMPLES, TOLERANCE = 2, 2e-2
Row = dict[str, Any]
Launch = Callable[[], None]
Sees = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
IN_TURNS = "hopper, in turns"  # its backward, if it shall have the same bits in every run
KERNELS = {"fa2": 1, "hopper": 2, IN_TURNS: 3}  # as in peer.hpp
PLAIN = {"fa2": (b"fa2", b"swizzle"), "hopper": (b"hopper", b"hopper")}  # forward and backward
TENSORS = ("Q", "K", "V", "O", "LSE", "dO", "dQ", "dK", "dV")
OF_A_PASS = {"forward": ("O",), "backward": ("dQ", "dK", "dV")}
PASSES = tuple(OF_A_PASS)


class Call(ctypes.Structure):
    """struct fa_masks_call of peer.hpp."""

    _fields_ = ([(name, ctypes.c_int64) for name in ("B", "Hq", "Hkv", "Nq", "Nk", "d", "dtype", "causal", "left",
                                                     "right", "first", "entries", "scratch_bytes", "kernel")]
                + [(name, ctypes.c_void_p) for name in (
                    *TENSORS, "keys_offsets", "keys_numbers", "queries_offsets", "queries_numbers", "sinks", "dsinks",
                    "scratch", "stream", "query_documents", "key_documents")])


@dataclass(frozen=True)
class Pattern:
    """What is visible. left, right: below 0 for no limit."""

    kind: str  # plain, window, list, sinks, documents
    left: int = -1
    right: int = -1
    share: int = 0  # of a list, in percent

    @property
    def causal(self) -> bool:
        return self.kind == "plain" and self.right == 0

    def __str__(self) -> str:
        if self.kind == "list":
            return f"{self.share} % of the blocks"
        return self.kind + (f" {self.left}, {self.right}" if self.left >= 0 else " causal" if self.right == 0 else "")


def patterns(widths: Sequence[int]) -> list[Pattern]:
    return [Pattern("plain"), Pattern("plain", right=0),
            *(Pattern("window", w, right) for w in widths for right in (w, 0)), *(Pattern("list", share=share) for share in SHARES), Pattern("sinks", widths[min(1, len(widths) - 1)], 0),
            Pattern("documents", right=0)]


class Tensors:
    def __init__(self, N: int, d: int) -> None:
        self.N, self.d = N, d
        shape = (1, HEADS, N, d)
        self.Q, self.K, self.V, self.dO = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        self.O, self.dQ, self.dK, self.dV = (torch.empty_like(self.Q) for _ in range(4))
        self.LSE = torch.empty(shape[:3], device="cuda", dtype=torch.float32)
        self.sinks, self.dsinks = torch.randn(HEADS, device="cuda"), torch.empty(HEADS, device="cuda")
        self.scratch = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)
        self.document = (torch.arange(N, device="cuda", dtype=torch.int32) * DOCUMENTS // N).contiguous()
        blocks = N // BLOCK
        order = torch.rand(blocks, blocks, device="cuda").argsort(1).argsort(1)
        self.lists = {share: order < max(1, round(blocks * share / 100)) for share in SHARES}
        self.samples = [(random.randrange(HEADS), random.randrange(N // 2, N), random.randrange(N))
                        for _ in range(SAMPLES)]
        self.want: dict[tuple[Pattern, str, int], torch.Tensor] = {}

    def sees(self, p: Pattern) -> Sees:
        def visible(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            if p.kind == "list":
                return self.lists[p.share][i // BLOCK, j // BLOCK]
            found = torch.ones_like(i + j, dtype=torch.bool)
            if p.left >= 0:
                found &= j >= i - p.left
            if p.right >= 0:
                found &= j <= i + p.right
            if p.kind == "documents":
                found &= self.document[i] == self.document[j]
            return found
        return visible

    def pairs(self, p: Pattern) -> int:
        """Visible ones of a head."""
        if p.kind == "list":
            return int(self.lists[p.share].sum().item()) * BLOCK * BLOCK
        i = torch.arange(self.N, dtype=torch.int64)
        low = (i - p.left).clamp(min=0) if p.left >= 0 else torch.zeros_like(i)
        high = (i + p.right).clamp(max=self.N - 1) if p.right >= 0 else torch.full_like(i, self.N - 1)
        if p.kind == "documents":
            low = torch.maximum(low, (i * DOCUMENTS // self.N * self.N + DOCUMENTS - 1) // DOCUMENTS)
        return int((high - low + 1).clamp(min=0).sum().item())

    def expect(self, p: Pattern) -> None:
        """In fp64: O and dQ of the sampled rows, dK and dV of the sampled keys."""
        if (p, "O", 0) in self.want:
            return
        visible, scale, all_ = self.sees(p), 1 / math.sqrt(self.d), torch.arange(self.N, device="cuda")
        for n, (h, row, key) in enumerate(self.samples):
            q, k, v, do = (X[0, h].double() for X in (self.Q, self.K, self.V, self.dO))
            sink = torch.exp(self.sinks[h].double()) if p.kind == "sinks" else 0

            def weights(i: torch.Tensor, q: torch.Tensor = q, k: torch.Tensor = k, sink: Any = sink) -> torch.Tensor:
                S = (scale * (q[i] @ k.T)).masked_fill(~visible(i[:, None], all_[None]), -math.inf)
                E = torch.exp(S)  # inputs are normal: nothing overflows
                return E / (E.sum(1, keepdim=True) + sink)
            one = torch.tensor([row], device="cuda")
            P, dP = weights(one)[0], v @ do[row]
            self.want[p, "O", n] = P @ v
            self.want[p, "dQ", n] = scale * ((P * (dP - P @ dP)) @ k)
            dK, dV = torch.zeros_like(k[0]), torch.zeros_like(v[0])
            for first in range(0, self.N, 1024):
                some = all_[first:first + 1024]
                P, dP = weights(some), do[some] @ v.T
                D = (P * dP).sum(1)
                dV += P[:, key] @ do[some]
                dK += scale * (P[:, key] * (dP[:, key] - D)) @ q[some]
            self.want[p, "dK", n], self.want[p, "dV", n] = dK, dV

    def error(self, p: Pattern, got: dict[str, torch.Tensor]) -> float:
        """Relative, in the L2 norm, the worst of all samples; NaN stays NaN."""
        self.expect(p)
        errors = []
        for n, (h, row, key) in enumerate(self.samples):
            for name, X in got.items():
                want = self.want[p, name, n]
                value = X[0, h, key if name in ("dK", "dV") else row].double()
                errors.append(((value - want).norm() / want.norm().clamp(min=1e-2)).item())  # it may be 0
        return math.nan if any(map(math.isnan, errors)) else max(errors)


@dataclass
class Contender:
    who: str
    pattern: Pattern
    way: str  # forward or backward
    launch: Launch
    results: Callable[[], dict[str, torch.Tensor]]
    before: Launch = lambda: None  # what a backward needs to have been done
    kernel: str = ""  # if it is ours
    notes: Row = field(default_factory=dict)
    ms: list[float] = field(default_factory=list)


# ---------------------------------------------------------------- ours

class Library:
    def __init__(self, path: Path) -> None:
        try:
            self.c = ctypes.CDLL(str(path.resolve()))
            for name in ("fa_masks_forward", "fa_masks_backward", "fa_masks_scratch_bytes", "fa_peer_forward",
                         "fa_peer_backward", "fa_peer_backward_scratch_bytes", "fa_peer_compiler", "fa_peer_flags"):
                getattr(self.c, name).restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            sys.exit(f"masks_bench.py: {path}: {error}")

    def walk(self, t: Tensors, p: Pattern, way: str, kernel: str) -> Contender:
        pointers = {name: getattr(t, name).data_ptr() for name in (*TENSORS, "scratch")}
        call = Call(B=1, Hq=HEADS, Hkv=HEADS, Nq=t.N, Nk=t.N, d=t.d, dtype=2, left=p.left, right=p.right,
                    scratch_bytes=t.scratch.numel(), kernel=KERNELS[kernel], **pointers)
        alive: list[torch.Tensor] = []
        if p.kind == "list":
            for side, wanted in (("keys", t.lists[p.share]), ("queries", t.lists[p.share].T.contiguous())):
                offsets = torch.nn.functional.pad(wanted.sum(1).cumsum(0), (1, 0)).to(torch.int32)
                numbers = wanted.nonzero()[:, 1].to(torch.int32)
                alive += [offsets, numbers]
                setattr(call, f"{side}_offsets", offsets.data_ptr())
                setattr(call, f"{side}_numbers", numbers.data_ptr())
                call.entries = numbers.numel()
        if p.kind == "sinks":
            call.sinks, call.dsinks = t.sinks.data_ptr(), t.dsinks.data_ptr()
        if p.kind == "documents":
            call.query_documents = call.key_documents = t.document.data_ptr()
        size = ctypes.c_int64()
        complain(self.c.fa_masks_scratch_bytes(ctypes.byref(call), ctypes.byref(size)))
        if size.value > t.scratch.numel():
            raise Failed(f"needs {size.value} bytes of scratch, the benchmark has {t.scratch.numel()}")

        def run(function: str) -> Launch:
            def launch(_alive: object = alive) -> None:
                call.stream = torch.cuda.current_stream().cuda_stream
                complain(getattr(self.c, function)(ctypes.byref(call)))
            return launch
        return Contender("ours", p, way, run(f"fa_masks_{way}"), results(t, way),
                         run("fa_masks_forward") if way == "backward" else lambda: None)

    def plain(self, t: Tensors, p: Pattern, way: str, kernel: str) -> Contender:
        """The course's kernels without a pattern."""
        call = peer_call(t, p.causal)
        size = ctypes.c_int64()
        of_forward, of_backward = PLAIN[kernel]
        complain(self.c.fa_peer_backward_scratch_bytes(of_backward, ctypes.byref(call), ctypes.byref(size)))
        if size.value > t.scratch.numel():
            raise Failed(f"needs {size.value} bytes of scratch, the benchmark has {t.scratch.numel()}")

        def run(function: str, kernel: bytes) -> Launch:
            def launch() -> None:
                call.stream = torch.cuda.current_stream().cuda_stream
                complain(getattr(self.c, function)(kernel, ctypes.byref(call)))
            return launch
        forward = run("fa_peer_forward", of_forward)
        return Contender("plain", p, way, forward if way == "forward" else run("fa_peer_backward", of_backward),
                         results(t, way), forward if way == "backward" else lambda: None)


def peer_call(t: Tensors, causal: bool) -> PeerCall:
    return PeerCall(B=1, H=HEADS, Hkv=HEADS, N=t.N, d=t.d, causal=int(causal), dtype=2,
                    **{name: getattr(t, name).data_ptr() for name in (*TENSORS, "scratch")})


def results(t: Tensors, way: str) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {name: getattr(t, name) for name in OF_A_PASS[way]}


# ---------------------------------------------------------------- the others

class FlashAttention3:
    """Its windows."""

    def __init__(self, path: Path) -> None:
        try:
            self.c = ctypes.CDLL(str(path.resolve()))
            for name in ("fa3_window_forward", "fa3_window_backward", "fa_peer_commit", "fa_peer_cutlass"):
                getattr(self.c, name).restype = ctypes.c_char_p
            self.c.fa3_twist_scratch_bytes.restype = ctypes.c_int64
        except (OSError, AttributeError) as error:
            sys.exit(f"masks_bench.py: {path}: {error}")

    def window(self, t: Tensors, p: Pattern, way: str) -> Contender:
        call = peer_call(t, False)
        scratch = torch.empty(self.c.fa3_twist_scratch_bytes(ctypes.byref(call)), device="cuda", dtype=torch.uint8)
        call.scratch = scratch.data_ptr()

        def run(function: str) -> Launch:
            def launch(_alive: object = scratch) -> None:
                call.stream = torch.cuda.current_stream().cuda_stream
                complain(getattr(self.c, function)(ctypes.byref(call), ctypes.c_int64(p.left), ctypes.c_int64(p.right)))
            return launch
        return Contender("fa3", p, way, run(f"fa3_window_{way}"), results(t, way),
                         run("fa3_window_forward") if way == "backward" else lambda: None)


def fa2(t: Tensors, p: Pattern, way: str) -> Contender:
    """PyTorch's FlashAttention-2, with its window."""
    q, k, v, do = (x.transpose(1, 2) for x in (t.Q, t.K, t.V, t.dO))
    sides = {"window_size_left": p.left, "window_size_right": p.right}
    kept: dict[str, Any] = {}

    def forward() -> None:
        kept["all"] = torch.ops.aten._flash_attention_forward(q, k, v, None, None, t.N, t.N, 0.0, False, False, **sides)
        kept["O"] = kept["all"][0].transpose(1, 2)

    def backward() -> None:
        out, lse, state, unused = kept["all"][:4]
        found = torch.ops.aten._flash_attention_backward(do, q, k, v, out, lse, None, None, t.N, t.N, 0.0, False, state,
                                                         unused, **sides)
        kept.update(zip(("dQ", "dK", "dV"), (x.transpose(1, 2) for x in found)))
    return Contender("fa2", p, way, forward if way == "forward" else backward,
                     lambda: {name: kept[name] for name in OF_A_PASS[way]},
                     forward if way == "backward" else lambda: None)


def flex(t: Tensors, p: Pattern, way: str) -> Contender:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    lists, left, right = t.lists.get(p.share), p.left, p.right
    if p.kind == "list":
        visible = lambda b, h, i, j: lists[i // BLOCK, j // BLOCK]  # noqa: E731
    else:
        visible = lambda b, h, i, j: (i - j <= left) & (j - i <= right)  # noqa: E731
    block_mask = create_block_mask(visible, None, None, t.N, t.N, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    inputs = [x.detach().requires_grad_() for x in (t.Q, t.K, t.V)]
    kept: dict[str, torch.Tensor] = {}

    def forward() -> None:
        with torch.enable_grad():
            kept["O"] = compiled(*inputs, block_mask=block_mask)

    def backward() -> None:
        kept.update(zip(("dQ", "dK", "dV"), torch.autograd.grad(kept["O"], inputs, t.dO, retain_graph=True)))
    return Contender("flex", p, way, forward if way == "forward" else backward,
                     lambda: {name: kept[name].detach() for name in OF_A_PASS[way]},
                     forward if way == "backward" else lambda: None)


# ---------------------------------------------------------------- how long does it take?

def milliseconds(c: Contender, least: float) -> float:
    """Of one launch, in at least so many milliseconds of launches."""
    c.before()
    c.launch()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(times: int) -> float:
        begin.record()
        for _ in range(times):
            c.launch()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / times
    once = timed(1)
    times = max(1, min(100, math.ceil(least / max(once, 1e-3))))
    return timed(times) if times > 1 else once


def checked(c: Contender, t: Tensors) -> float:
    """The error of one launch, over results of NaN."""
    for X in (t.O, t.dQ, t.dK, t.dV):
        X.fill_(math.nan)
    c.before()
    c.launch()
    torch.cuda.synchronize()
    return t.error(c.pattern, c.results())


Made = tuple[str, str, Pattern, str, Callable[[], Contender]]


def makers(library: Library, t: Tensors, options: argparse.Namespace) -> list[Made]:
    """Who, the kernel if it is ours, pattern, way, and how it is made."""
    found: list[Made] = []

    def add(who: str, kernel: str, p: Pattern, way: str, make: Callable[..., Contender]) -> None:
        chosen = {"kernel": kernel} if kernel else {}
        found.append((who, kernel, p, way, lambda: make(t, p, way, **chosen)))

    for p in patterns(options.widths):
        for way in PASSES:
            for kernel in KERNELS:
                if kernel == IN_TURNS and (p.kind == "plain" or way == "forward"):
                    continue
                if p.kind == "plain":
                    add("plain", kernel, p, way, library.plain)
                if kernel == "fa2" or p.kind != "documents" and (p.kind, kernel) != ("list", IN_TURNS):
                    add("ours", kernel, p, way, library.walk)
            if p.kind == "window":
                add("fa2", "", p, way, fa2)
                if options.fa3:
                    add("fa3", "", p, way, options.fa3.window)
    chosen = [Pattern("window", options.widths[len(options.widths) // 2], 0), Pattern("list", share=25)][:options.flex]
    for p in chosen if t.d == 128 else ():
        for way in PASSES:
            add("flex", "", p, way, flex)
    return found


def measured(library: Library, N: int, d: int, options: argparse.Namespace) -> list[Row]:
    """A row for each contender: its times round by round, or why it has none."""
    t = Tensors(N, d)
    rows: list[Row] = []
    good: list[Contender] = []

    def row(who: str, kernel: str, p: Pattern, way: str) -> Row:
        return {"N": N, "d": d, "H": HEADS, "kind": p.kind, "left": p.left, "right": p.right, "share": p.share,
                "pass": way, "pairs": t.pairs(p), "who": who} | ({"kernel": kernel} if kernel else {})

    for who, kernel, p, way, make in makers(library, t, options):
        try:
            c = make()
            c.kernel = kernel
            error = checked(c, t)
            if not error < TOLERANCE:
                raise Failed(f"wrong before timing: relative error {error:.3g}")
            c.notes["error"] = float(f"{error:.3g}")
            good.append(c)
        except Exception as error:  # noqa: BLE001  # whoever cannot run here is told of, and the others go on
            rows.append(row(who, kernel, p, way) | {"failed": first_line(error)})
            torch.cuda.synchronize()
    for _ in range(options.rounds):
        for c in random.sample(good, len(good)):
            c.ms.append(milliseconds(c, options.block))
    for c in good:
        found = row(c.who, c.kernel, c.pattern, c.way)
        try:
            error = checked(c, t)
            if not error < TOLERANCE:
                raise Failed(f"wrong after timing: relative error {error:.3g}")
        except Exception as error:  # noqa: BLE001
            rows.append(found | {"failed": first_line(error)})
            continue
        flops = 4 * d * HEADS * found["pairs"] * (1 if c.way == "forward" else 2.5)
        rows.append(found | c.notes | {"ms": [float(f"{x:.5g}") for x in c.ms],
                                       "TFLOP_per_s": round(1e-9 * flops / statistics.median(c.ms), 1)})
    return rows


def told(rows: Sequence[Row]) -> str:
    lines: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        p = Pattern(r["kind"], r["left"], r["right"], r["share"])
        words = f"{r['who']} {r.get('kernel', '')} {statistics.median(r['ms']):.3f} ms ({r['TFLOP_per_s']:.0f})" if "ms" in r else \
            f"[{r['who']}: {r['failed'][:60]}]"
        lines.setdefault((str(p), r["pass"]), []).append(words)
    return "\n".join(f"  {p}, {way}: " + "  ".join(words) for (p, way), words in lines.items())


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
            "method": f"{options.rounds} rounds, order drawn anew, at least {options.block:g} ms of launches a timing; "
                      f"bf16, one sequence, {HEADS} heads; FLOP of visible pairs, times 2.5 for the backward"} | fa3


def run(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        sys.exit("masks_bench.py: PyTorch finds no GPU")
    library = Library(options.library)
    began = time.monotonic()
    data: Row = {"context": context(library, options), "rows": []}
    print(data["context"]["device"], flush=True)
    for d in (128, 64):
        random.seed(f"{options.seed} {d}")
        torch.manual_seed(random.getrandbits(32))
        if time.monotonic() - began > options.limit:
            print(f"d {d}: no time left", flush=True)
            continue
        rows = measured(library, options.length, d, options)
        data["rows"] += rows
        torch.cuda.empty_cache()
        print(f"d {d}, {time.monotonic() - began:.0f} s\n{told(rows)}", flush=True)
        write(options.json, data)
    data["context"]["seconds"] = round(time.monotonic() - began, 1)
    data["context"]["clocks_after"] = gpu("clocks.sm,temperature.gpu,power.draw")
    write(options.json, data)
    print(f"{options.json}, {data['context']['seconds']} s")
    ours = [r for r in data["rows"] if r["who"] in ("ours", "plain")]
    return 0 if ours and all("ms" in r for r in ours) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path, help="build/06_optimized/libstage06_peer.so")
    parser.add_argument("json", type=Path, help="where the results go")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=float, default=6, help="milliseconds of launches per timing")
    parser.add_argument("--limit", type=float, default=50, help="seconds after which no head dimension is begun")
    parser.add_argument("--length", type=int, default=16384, help="N, a multiple of 256")
    parser.add_argument("--widths", type=lambda text: [int(n) for n in text.split(",")], default=list(WIDTHS))
    parser.add_argument("--fa3", type=lambda path: FlashAttention3(Path(path)), metavar="LIBRARY",
                        help="FlashAttention-3 (build/fa3/libfa3.so)")
    parser.add_argument("--flex", type=int, default=2, help="settings with FlexAttention, 0 to 2")
    parser.add_argument("--quick", action="store_true", help="a first try: N = 2,048, two rounds, no FlexAttention")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.block, options.length, options.widths, options.flex = 2, 1, 2048, [128, 512], 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
