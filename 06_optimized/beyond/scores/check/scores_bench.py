"""What a changed score costs, beside the plain kernels and PyTorch's attention: one JSON file, a chart's source.

    python3 06_optimized/beyond/scores/check/scores_bench.py build/06_optimized/libstage06_peer.so scores.json

Needs PyTorch and a GPU. bf16, 16 heads of d = 128 and 64, N = 4,096 and 16,384 with B N = 16,384; forward and backward.
With a causal mask, `plain` is the course's own fa2 and swizzle, and `plain_hopper` its hopper; `walk` is this walk's fa2
with nothing asked for; then ALiBi, a soft cap, a bias [1, H, N, N] (its backward with dbias and without) and rotary
positions, each alone: `ours`, what forward() and backward() take here, and, where that may be hopper, also `fa2`, by
name. Beside them PyTorch's FlashAttention (plain, and with alibi_slopes, where it was built with them),
scaled_dot_product_attention with the bias as attn_mask, positions turned by PyTorch before the course's plain kernels,
and FlexAttention with a score_mod (--flex says at how many settings; each takes PyTorch some ten seconds to compile).
FlashAttention-3 has the soft cap alone of these changes, and is there with --fa3, the library that
06_optimized/check/fa3/build.py --walks builds. Without a mask: both plain kernels, ALiBi, the soft cap.

All contenders of a setting are timed once a round, in an order drawn anew, so that ratios can be taken round by round.
What each of them writes is compared with fp64 before and after: O and dQ in some rows, dK and dV of some keys.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    sys.exit("scores_bench.py: PyTorch 2.5 or later is not installed for this Python; there is nothing to compare with")

ROOT = Path(__file__).resolve().parents[4]
HEADS, CAP, TOKENS = 16, 15.0, 16384
SAMPLES = 3  # rows, and keys, that are compared
TOLERANCE = 2e-2
BEST, FA2 = 0, 1  # kernels of struct fa_scores_call
Row = dict[str, Any]
Launch = Callable[[], None]


class PeerCall(ctypes.Structure):
    """struct fa_peer_call of common/measure/peers/peer.hpp."""

    _fields_ = ([(name, ctypes.c_int64) for name in ("B", "H", "Hkv", "N", "d", "causal", "dtype")]
                + [(name, ctypes.c_void_p) for name in ("Q", "K", "V", "O", "LSE", "dO", "dQ", "dK", "dV", "scratch", "stream")])


class Call(ctypes.Structure):
    """struct fa_scores_call of peer.hpp."""

    _fields_ = ([(name, ctypes.c_int64) for name in ("B", "H", "N", "d", "causal", "positions", "dims", "interleaved",
                                                     "bias_batch", "bias_head", "bias_row", "scratch_bytes", "kernel")]
                + [("cap", ctypes.c_double)]
                + [(name, ctypes.c_void_p) for name in ("Q", "K", "V", "O", "LSE", "dO", "dQ", "dK", "dV", "slopes", "bias",
                                                        "cos", "sin", "dbias", "scratch", "stream")])


class Failed(Exception):
    """No figure for this contender here."""


def complain(error: bytes | None) -> None:
    if error:
        raise Failed(error.decode())


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


@dataclass(frozen=True)
class Setting:
    N: int
    d: int
    flex: bool = False  # FlexAttention beside the plain kernel, and nobody else
    causal: bool = True

    @property
    def B(self) -> int:
        return max(1, TOKENS // self.N)

    @property
    def kind(self) -> str:
        return "flex" if self.flex else "main" if self.causal else "no mask"

    def __str__(self) -> str:
        return f"B {self.B}, H {HEADS}, N {self.N}, d {self.d}" + ("" if self.kind == "main" else f", {self.kind}")


# ---------------------------------------------------------------- what is computed

def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (k, k + d / 2) of the last dimension; in fp32, rounded to x's type."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Tensors:
    """Inputs, places for results, and what they should be."""

    def __init__(self, s: Setting) -> None:
        self.setting = s
        shape = (s.B, HEADS, s.N, s.d)
        self.Q, self.K, self.V, self.dO = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        self.O, self.dQ, self.dK, self.dV = (torch.empty_like(self.Q) for _ in range(4))
        self.LSE = torch.empty(shape[:3], device="cuda", dtype=torch.float32)
        self.slopes = torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)], device="cuda", dtype=torch.float32)
        far = s.N if s.causal else 0
        self.bias = torch.randn(1, HEADS, far, far, device="cuda", dtype=torch.bfloat16)
        self.dbias = torch.empty(1, HEADS, far, far, device="cuda", dtype=torch.float32)
        angles = torch.outer(torch.arange(s.N, device="cuda", dtype=torch.float64),
                             10000.0 ** (-torch.arange(0, s.d, 2, device="cuda", dtype=torch.float64) / s.d))
        self.cos, self.sin = angles.cos().float(), angles.sin().float()
        self.scratch = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)
        self.samples = [(random.randrange(s.B), random.randrange(HEADS), random.randrange(s.N // 2, s.N))
                        for _ in range(SAMPLES)]
        self.want: dict[tuple[str, str, int], torch.Tensor] = {}

    def turned(self, change: str) -> tuple[torch.Tensor, torch.Tensor]:
        if change != "rotary":
            return self.Q, self.K
        return turn(self.Q, self.cos, self.sin), turn(self.K, self.cos, self.sin)

    def changed(self, change: str, s: torch.Tensor, h: int, i: torch.Tensor, j: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Scores of queries i and keys j, and their derivative; -infinity where j is hidden."""
        slope: Any = 1.0
        if change == "softcap":
            t = torch.tanh(s / CAP)
            s, slope = CAP * t, 1 - t * t
        elif change == "alibi":
            s = s - self.slopes[h].double() * (i - j).abs()
        elif change == "bias":
            s = s + self.bias[0, h][i, j].double()
        return (s.masked_fill(j > i, -math.inf) if self.setting.causal else s), slope

    def expect(self, change: str) -> None:
        """In fp64: O and dQ of each sampled row; dK and dV of the sampled key that is half as far along."""
        if ("O", change, 0) in self.want:
            return
        s = self.setting
        Q, K = self.turned(change)
        found: dict[tuple[str, str, int], torch.Tensor] = {}
        scale, all_ = 1 / math.sqrt(s.d), torch.arange(s.N, device="cuda")

        def back(x: torch.Tensor, n: int) -> torch.Tensor:
            if change != "rotary":
                return x
            a, b = x.chunk(2)
            c, z = self.cos[n].double(), self.sin[n].double()
            return torch.cat((a * c + b * z, b * c - a * z))
        for n, (b, h, i) in enumerate(self.samples):
            q, k, v, do = (X[b, h].double() for X in (Q, K, self.V, self.dO))
            row, slope = self.changed(change, scale * (k @ q[i]), h, torch.full_like(all_, i), all_)
            P = torch.softmax(row, 0)
            dP = v @ do[i]
            dS = P * (dP - P @ dP) * slope
            found["O", change, n] = P @ v
            found["dQ", change, n] = back(scale * (dS @ k), i)
            if change == "bias":  # of all batch entries
                found["dbias", change, n] = self.bias_gradient(h, i)
            j = i // 2
            L = torch.empty(s.N, device="cuda", dtype=torch.float64)
            D = torch.empty_like(L)
            for first in range(0, s.N, 1024):  # all rows of the head, in pieces
                some = all_[first:first + 1024]
                S, _ = self.changed(change, scale * (q[some] @ k.T), h, some[:, None], all_[None, :])
                L[some] = torch.logsumexp(S, 1)
                D[some] = (torch.exp(S - L[some, None]) * (do[some] @ v.T)).sum(1)
            column, slope = self.changed(change, scale * (q @ k[j]), h, all_, torch.full_like(all_, j))
            P = torch.exp(column - L)
            dS = P * (do @ v[j] - D) * slope
            found["dV", change, n] = P @ do
            found["dK", change, n] = back(scale * (dS @ q), j)
        self.want.update(found)

    def bias_gradient(self, h: int, i: int) -> torch.Tensor:
        s = self.setting
        total = torch.zeros(s.N, device="cuda", dtype=torch.float64)
        all_ = torch.arange(s.N, device="cuda")
        for b in range(s.B):
            q, k, v, do = (X[b, h].double() for X in (self.Q, self.K, self.V, self.dO))
            row, _ = self.changed("bias", (k @ q[i]) / math.sqrt(s.d), h, torch.full_like(all_, i), all_)
            P, dP = torch.softmax(row, 0), v @ do[i]
            total += P * (dP - P @ dP)
        return total

    def error(self, change: str, got: dict[str, torch.Tensor]) -> float:
        """Relative, in the L2 norm, the worst of all samples; NaN stays NaN."""
        self.expect(change)
        errors = []
        for n, (b, h, i) in enumerate(self.samples):
            for name, X in got.items():
                if name == "dbias":
                    value = X[0, h, i, :].double().masked_fill(torch.arange(self.setting.N, device="cuda") > i, 0)
                else:
                    value = X[b, h, i // 2 if name in ("dK", "dV") else i].double()
                want = self.want[name, change, n]
                errors.append(((value - want).norm() / want.norm()).item())
        return math.nan if any(map(math.isnan, errors)) else max(errors)


@dataclass
class Contender:
    """One pass of one kernel."""

    who: str
    change: str
    way: str  # forward or backward
    launch: Launch
    results: Callable[[], dict[str, torch.Tensor]]
    before: Launch = lambda: None  # what a backward needs to have been done
    notes: Row = field(default_factory=dict)
    ms: list[float] = field(default_factory=list)


# ---------------------------------------------------------------- ours

class Library:
    def __init__(self, path: Path) -> None:
        try:
            self.c = ctypes.CDLL(str(path.resolve()))
            for name in ("fa_scores_forward", "fa_scores_backward", "fa_scores_scratch_bytes", "fa_peer_forward",
                         "fa_peer_backward", "fa_peer_backward_scratch_bytes", "fa_peer_compiler", "fa_peer_flags"):
                getattr(self.c, name).restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            sys.exit(f"scores_bench.py: {path}: {error}")

    def call(self, t: Tensors, change: str, kernel: int, dbias: bool) -> Call:
        s = t.setting
        call = Call(B=s.B, H=HEADS, N=s.N, d=s.d, causal=int(s.causal), kernel=kernel, Q=t.Q.data_ptr(), K=t.K.data_ptr(),
                    V=t.V.data_ptr(),
                    O=t.O.data_ptr(), LSE=t.LSE.data_ptr(), dO=t.dO.data_ptr(), dQ=t.dQ.data_ptr(), dK=t.dK.data_ptr(),
                    dV=t.dV.data_ptr(), scratch=t.scratch.data_ptr(), scratch_bytes=t.scratch.numel())
        if change == "alibi":
            call.slopes = t.slopes.data_ptr()
        elif change == "softcap":
            call.cap = CAP
        elif change == "bias":
            call.bias, call.bias_head, call.bias_row = t.bias.data_ptr(), s.N * s.N, s.N
            call.dbias = t.dbias.data_ptr() if dbias else None
        elif change == "rotary":
            call.cos, call.sin, call.positions, call.dims = t.cos.data_ptr(), t.sin.data_ptr(), s.N, s.d
        size = ctypes.c_int64()
        complain(self.c.fa_scores_scratch_bytes(ctypes.byref(call), ctypes.byref(size)))
        if size.value > t.scratch.numel():
            raise Failed(f"needs {size.value} bytes of scratch, the benchmark has {t.scratch.numel()}")
        return call

    def walk(self, t: Tensors, who: str, change: str, way: str) -> Contender:
        dbias = who != "ours_without_dbias"
        call = self.call(t, change, FA2 if who in ("walk", "fa2") else BEST, dbias)

        def run(function: str) -> Launch:
            def launch() -> None:
                call.stream = torch.cuda.current_stream().cuda_stream
                complain(getattr(self.c, function)(ctypes.byref(call)))
            return launch
        names = ("O",) if way == "forward" else ("dQ", "dK", "dV", *(("dbias",) if change == "bias" and dbias else ()))
        return Contender(who, change, way, run(f"fa_scores_{way}"), lambda: {name: getattr(t, name) for name in names},
                         run("fa_scores_forward") if way == "backward" else lambda: None)

    def plain(self, t: Tensors, way: str, who: str = "plain") -> Contender:
        """The course's fa2 and swizzle, the same with positions turned by PyTorch around them, or its hopper."""
        s, turned = t.setting, who == "before"
        kernels = (b"hopper", b"hopper") if who == "plain_hopper" else (b"fa2", b"swizzle")
        Q, K, dQ, dK = (torch.empty_like(t.Q) for _ in range(4)) if turned else (t.Q, t.K, t.dQ, t.dK)
        call = PeerCall(B=s.B, H=HEADS, Hkv=HEADS, N=s.N, d=s.d, causal=int(s.causal), dtype=2, Q=Q.data_ptr(), K=K.data_ptr(),
                        V=t.V.data_ptr(), O=t.O.data_ptr(), LSE=t.LSE.data_ptr(), dO=t.dO.data_ptr(), dQ=dQ.data_ptr(),
                        dK=dK.data_ptr(), dV=t.dV.data_ptr(), scratch=t.scratch.data_ptr())
        size = ctypes.c_int64()
        complain(self.c.fa_peer_backward_scratch_bytes(kernels[1], ctypes.byref(call), ctypes.byref(size)))
        if size.value > t.scratch.numel():
            raise Failed(f"needs {size.value} bytes of scratch, the benchmark has {t.scratch.numel()}")

        def forward() -> None:
            if turned:
                Q.copy_(turn(t.Q, t.cos, t.sin))
                K.copy_(turn(t.K, t.cos, t.sin))
            call.stream = torch.cuda.current_stream().cuda_stream
            complain(self.c.fa_peer_forward(kernels[0], ctypes.byref(call)))

        def backward() -> None:
            call.stream = torch.cuda.current_stream().cuda_stream
            complain(self.c.fa_peer_backward(kernels[1], ctypes.byref(call)))
            if turned:
                t.dQ.copy_(turn(dQ, t.cos, -t.sin))
                t.dK.copy_(turn(dK, t.cos, -t.sin))
        names = ("O",) if way == "forward" else ("dQ", "dK", "dV")
        return Contender(who, "rotary" if turned else "plain", way,
                         forward if way == "forward" else backward, lambda: {name: getattr(t, name) for name in names},
                         forward if way == "backward" else lambda: None)


# ---------------------------------------------------------------- the others

class FlashAttention3:
    """Its soft cap."""

    def __init__(self, path: Path) -> None:
        try:
            self.c = ctypes.CDLL(str(path.resolve()))
            for name in ("fa3_softcap_forward", "fa3_softcap_backward", "fa_peer_commit", "fa_peer_cutlass"):
                getattr(self.c, name).restype = ctypes.c_char_p
            self.c.fa3_twist_scratch_bytes.restype = ctypes.c_int64
        except (OSError, AttributeError) as error:
            sys.exit(f"scores_bench.py: {path}: {error}")

    def softcap(self, t: Tensors, way: str) -> Contender:
        s = t.setting
        call = PeerCall(B=s.B, H=HEADS, Hkv=HEADS, N=s.N, d=s.d, causal=int(s.causal), dtype=2,
                        **{name: getattr(t, name).data_ptr() for name in ("Q", "K", "V", "O", "LSE", "dO", "dQ", "dK", "dV")})
        scratch = torch.empty(self.c.fa3_twist_scratch_bytes(ctypes.byref(call)), device="cuda", dtype=torch.uint8)
        call.scratch = scratch.data_ptr()

        def run(function: str) -> Launch:
            def launch(_alive: object = scratch) -> None:
                call.stream = torch.cuda.current_stream().cuda_stream
                complain(getattr(self.c, function)(ctypes.byref(call), ctypes.c_double(CAP)))
            return launch
        names = ("O",) if way == "forward" else ("dQ", "dK", "dV")
        return Contender("fa3", "softcap", way, run(f"fa3_softcap_{way}"), lambda: {name: getattr(t, name) for name in names},
                         run("fa3_softcap_forward") if way == "backward" else lambda: None)


def with_autograd(t: Tensors, who: str, change: str, way: str, attention: Callable[..., torch.Tensor],
                  bias: torch.Tensor | None = None) -> Contender:
    """attention(Q, K, V, bias), all [B, H, N, d]; its forward, too, keeps what a backward needs, as ours does."""
    inputs = [x.detach().requires_grad_() for x in (t.Q, t.K, t.V, *(() if bias is None else (bias,)))]
    kept: dict[str, torch.Tensor] = {}

    def forward() -> None:
        kept["O"] = attention(*inputs)

    def backward() -> None:
        found = torch.autograd.grad(kept["O"], inputs, t.dO, retain_graph=True)
        kept.update(zip(("dQ", "dK", "dV", "dbias"), found))
    names = ("O",) if way == "forward" else ("dQ", "dK", "dV", *(() if bias is None else ("dbias",)))
    return Contender(who, change, way, forward if way == "forward" else backward,
                     lambda: {name: kept[name].detach() for name in names},
                     forward if way == "backward" else lambda: None)


def torch_plain(t: Tensors, way: str) -> Contender:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return with_autograd(t, "torch_flash", "plain", way, attention)


def torch_bias(t: Tensors, way: str) -> Contender:
    """attn_mask holds the causal mask, too: the call takes one or the other."""
    hidden = torch.ones(t.setting.N, t.setting.N, device="cuda", dtype=torch.bool).triu(1)
    mask = t.bias.masked_fill(hidden, -math.inf)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(t.setting.B, -1, -1, -1))
    return with_autograd(t, "torch_mask", "bias", way, attention, mask)


def torch_alibi(t: Tensors, way: str) -> Contender:
    if way == "backward":
        raise Failed("PyTorch's _flash_attention_backward takes no alibi_slopes")
    kept: dict[str, torch.Tensor] = {}
    q, k, v = (x.transpose(1, 2) for x in (t.Q, t.K, t.V))

    def launch() -> None:
        kept["O"] = torch.ops.aten._flash_attention_forward(q, k, v, None, None, t.setting.N, t.setting.N, 0.0, True, False,
                                                            alibi_slopes=t.slopes)[0]
    return Contender("torch_flash", "alibi", way, launch, lambda: {"O": kept["O"].transpose(1, 2)})


def flex(t: Tensors, change: str, way: str) -> Contender:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    compiled = torch.compile(flex_attention, dynamic=False)
    N = t.setting.N
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, device="cuda")
    slopes, bias = t.slopes, t.bias

    def alibi(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return score - slopes[h] * (i - j).abs()

    def softcap(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return CAP * torch.tanh(score / CAP)

    def biased(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return score + bias[0, h, i, j]
    mod = {"alibi": alibi, "softcap": softcap, "bias": biased}[change]
    return with_autograd(t, "flex", change, way,
                         lambda q, k, v: compiled(q, k, v, score_mod=mod, block_mask=block_mask))


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
    if c.change == "bias":
        t.dbias.fill_(math.nan)
    c.before()
    c.launch()
    torch.cuda.synchronize()
    return t.error(c.change, c.results())


def makers(library: Library, fa3: FlashAttention3 | None, t: Tensors) -> list[tuple[str, str, str, Callable[[], Contender]]]:
    """who, change, way, and how it is made."""
    found: list[tuple[str, str, str, Callable[[], Contender]]] = []
    ours: list[tuple[str, str]] = []
    for way in ("forward", "backward"):
        found.append(("plain", "plain", way, lambda way=way: library.plain(t, way)))  # type: ignore[misc]
        if t.setting.flex:
            found += [("flex", change, way, lambda change=change, way=way: flex(t, change, way))  # type: ignore[misc]
                      for change in ("alibi", "softcap", "bias")]
            continue
        found.append(("plain_hopper", "plain", way,
                      lambda way=way: library.plain(t, way, "plain_hopper")))  # type: ignore[misc]
        ours = [(who, change) for change in ("alibi", "softcap") for who in ("ours", "fa2")]
        if t.setting.causal:
            ours += [("walk", "plain"), ("ours", "bias"), ("ours", "rotary")]
            found += [("before", "rotary", way, lambda way=way: library.plain(t, way, "before")),  # type: ignore[misc]
                      ("torch_flash", "plain", way, lambda way=way: torch_plain(t, way)),  # type: ignore[misc]
                      ("torch_flash", "alibi", way, lambda way=way: torch_alibi(t, way)),  # type: ignore[misc]
                      ("torch_mask", "bias", way, lambda way=way: torch_bias(t, way))]  # type: ignore[misc]
        if t.setting.causal and way == "backward":
            ours.append(("ours_without_dbias", "bias"))
        if fa3:
            found.append(("fa3", "softcap", way, lambda way=way: fa3.softcap(t, way)))  # type: ignore[misc]
        found += [(who, change, way,
                   lambda who=who, change=change, way=way: library.walk(t, who, change, way))  # type: ignore[misc]
                  for who, change in ours]
    return found


def measured(library: Library, s: Setting, options: argparse.Namespace) -> list[Row]:
    """A row for each contender: its times round by round, or why it has none."""
    t = Tensors(s)
    base = {"B": s.B, "H": HEADS, "N": s.N, "d": s.d, "kind": s.kind}
    rows: list[Row] = []
    good: list[Contender] = []

    def failed(who: str, change: str, way: str, error: BaseException) -> None:
        rows.append(base | {"who": who, "change": change, "pass": way, "failed": first_line(error)})

    for who, change, way, make in makers(library, options.fa3, t):
        try:
            c = make()
            error = checked(c, t)
            if not error < TOLERANCE:
                raise Failed(f"wrong before timing: relative error {error:.3g}")
            c.notes["error"] = float(f"{error:.3g}")
            good.append(c)
        except Exception as error:  # noqa: BLE001  # whoever cannot run here is told of, and the others go on
            failed(who, change, way, error)
            torch.cuda.synchronize()
    for _ in range(options.rounds):
        for c in random.sample(good, len(good)):
            try:
                c.ms.append(milliseconds(c, options.block))
            except Exception as error:  # noqa: BLE001
                failed(c.who, c.change, c.way, error)
                good.remove(c)
    for c in good:
        try:
            error = checked(c, t)
            if not error < TOLERANCE:
                raise Failed(f"wrong after timing: relative error {error:.3g}")
        except Exception as error:  # noqa: BLE001
            failed(c.who, c.change, c.way, error)
            continue
        rows.append(base | {"who": c.who, "change": c.change, "pass": c.way} | c.notes
                    | {"ms": [float(f"{x:.5g}") for x in c.ms]})
    return rows


def told(rows: Sequence[Row]) -> str:
    """Each as a multiple of the time of the plain fa2 and swizzle, round by round."""
    lines = []
    for way in ("forward", "backward"):
        here = [row for row in rows if row["pass"] == way]
        plain = next((row["ms"] for row in here if row["who"] == "plain" and "ms" in row), None)
        words = [f"{row['change']}/{row['who']} " + (f"{statistics.median(a / b for a, b in zip(row['ms'], plain)):.3f}"
                                                     if plain else f"{statistics.median(row['ms']):.3f} ms")
                 for row in here if "ms" in row]
        words += [f"[{row['change']}/{row['who']}: {row['failed'][:70]}]" for row in here if "failed" in row]
        lines.append(f"  {way}: " + "  ".join(words))
    return "\n".join(lines)


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
            "seed": options.seed, "cap": CAP,
            "method": f"{options.rounds} rounds, order drawn anew, at least {options.block:g} ms of launches a timing; bf16, "
                      f"causal where nothing else is said, {HEADS} heads, {TOKENS} tokens in all; bias [1, H, N, N] in bf16, "
                      "its gradient with it; rotary positions of all of d, in halves"} | fa3


def write(path: Path, data: Row) -> None:
    """All of it or nothing."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=None, separators=(",", ":")).replace('{"B"', '\n{"B"') + "\n", encoding="utf-8")
    os.replace(part, path)


def settings(options: argparse.Namespace) -> list[Setting]:
    """What matters most comes first: time or memory may end before the list does."""
    main = [Setting(N, d) for d in (128, 64) for N in options.lengths]
    return (main + [Setting(s.N, s.d, causal=False) for s in main]
            + [Setting(s.N, s.d, True) for s in main[:options.flex]])


def run(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        sys.exit("scores_bench.py: PyTorch finds no GPU")
    library = Library(options.library)
    began = time.monotonic()
    data: Row = {"context": context(library, options), "skipped": [], "rows": []}
    print(data["context"]["device"], flush=True)
    for s in settings(options):
        random.seed(f"{options.seed} {s}")
        torch.manual_seed(random.getrandbits(32))
        free, _ = torch.cuda.mem_get_info()
        needed = HEADS * s.N * s.N * 16 + (4 << 30)  # the bias, its gradients, and those of the peers
        if time.monotonic() - began > options.limit or needed > free:
            why = "too little memory" if needed > free else "no time left"
            data["skipped"].append({"setting": str(s), "why": why})
            print(f"{s}: {why}", flush=True)
            continue
        try:
            rows = measured(library, s, options)
        except Exception as error:  # noqa: BLE001
            rows = [{"B": s.B, "H": HEADS, "N": s.N, "d": s.d, "kind": "main", "who": "all", "change": "all", "pass": "forward",
                     "failed": first_line(error)}]
        data["rows"] += rows
        torch.cuda.empty_cache()
        print(f"{s}, {time.monotonic() - began:.0f} s\n{told(rows)}", flush=True)
        write(options.json, data)
    data["context"]["seconds"] = round(time.monotonic() - began, 1)
    data["context"]["clocks_after"] = gpu("clocks.sm,temperature.gpu,power.draw")
    write(options.json, data)
    print(f"{options.json}, {data['context']['seconds']} s")
    ours = [row for row in data["rows"] if row["who"] in ("ours", "ours_without_dbias", "fa2", "walk", "plain")]
    return 0 if ours and all("ms" in row for row in ours) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path, help="build/06_optimized/libstage06_peer.so")
    parser.add_argument("json", type=Path, help="where the results go")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block", type=float, default=10, help="milliseconds of launches per timing")
    parser.add_argument("--limit", type=float, default=90, help="seconds after which no setting is begun")
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")], default=[4096, 16384],
                        help="N, the most important first")
    parser.add_argument("--flex", type=int, default=1, help="settings with FlexAttention, 0 to 4")
    parser.add_argument("--fa3", type=lambda path: FlashAttention3(Path(path)), metavar="LIBRARY",
                        help="FlashAttention-3 (build/fa3/libfa3.so)")
    parser.add_argument("--quick", action="store_true", help="a first try: N = 1,024, two rounds, no FlexAttention")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.block, options.lengths, options.flex = 2, 1, [1024], 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
