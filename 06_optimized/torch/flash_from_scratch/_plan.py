"""From tensors to one call of the library. What depends on shapes and strides alone is worked out once and kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ._choice import Choice, choose
from ._library import POINTERS, PREFIX, Kernel, Library

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
MOST_PLANS = 1024
NONE = (0, 0, 0)


class Ask(NamedTuple):
    """All choices of a call: hashable, and the same for every call of a layer."""

    causal: int = 0  # 0 none, 1 top_left, 2 bottom_right
    scale: Optional[float] = None
    kernel: str = "best"
    deterministic: bool = False
    bnhd: bool = False
    window_left: int = -1
    window_right: int = -1
    dropout: float = 0.0


def walks_of(ask: Ask) -> tuple[str, ...]:
    """What the ladders' kernels have not, and a walk of its own has."""
    windows = ("window",) if max(ask.window_left, ask.window_right) >= 0 else ()
    return windows + (("dropout",) if ask.dropout else ())


def strides(x: Tensor, bnhd: bool) -> tuple[int, int, int]:
    batch, second, third, _ = x.stride()
    return (batch, third, second) if bnhd else (batch, second, third)


def in_rows(x: Tensor) -> Tensor:
    """With a last stride of 1, which every kernel wants: a copy where it is another."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def empty_like(x: Tensor) -> Tensor:
    """Without gaps, in the order of x's dimensions in memory, as far as rows stay in one piece."""
    made = torch.empty_like(x, requires_grad=False)
    return made if x.shape[-1] == 1 or made.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def maker_like(x: Tensor) -> Callable[[Tensor], Tensor]:
    """empty_like() for all tensors of x's shape and strides: without a question where the answer is known."""
    return torch.empty_like if torch.empty_like(x).stride(-1) == 1 else empty_like


def maker_of(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """torch.empty() of these; from a tensor of one element it is made in half of the time that its words take."""
    one = torch.empty((), dtype=dtype, device=device).expand(shape)
    return lambda: torch.empty_like(one, memory_format=torch.contiguous_format)


def lse_of(q: Tensor, bnhd: bool) -> Tensor:
    shape = (q.shape[0], q.shape[2], q.shape[1]) if bnhd else q.shape[:3]
    return torch.empty(shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)


def address(x: Optional[Tensor]) -> int:
    return 0 if x is None else x.data_ptr()


def _stream_function() -> Callable[[int], int]:
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)


stream_of = _stream_function()
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class _Way:
    """The forward or the backward of a plan: a packed prefix, how much scratch it wants, and the function."""

    __slots__ = ("function", "library", "new_scratch", "prefix")

    def __init__(self, ask: Ask, kernel: Kernel, where: Library, problem: tuple[int, ...], scale: float, dtype: int,
                 device: torch.device, deterministic: bool, of_tensors: tuple[int, ...], pointers: bytes) -> None:
        self.library = where
        self.function, needs = (getattr(where, kernel.way + part) for part in ("", "_needs"))

        index = device.index or 0 if device.type == "cuda" else -1

        def prefix(scratch: int) -> bytes:
            return PREFIX.pack(*problem, scale, dtype, index, kernel.stage, kernel.number, deterministic,
                               ask.window_left, ask.window_right, ask.dropout, scratch, *of_tensors)

        scratch = needs(prefix(0) + pointers)
        self.prefix = prefix(scratch)
        self.new_scratch = maker_of((scratch,), torch.uint8, device) if scratch else None

    def __call__(self, pointers: bytes) -> None:
        if code := self.function(self.prefix + pointers):
            self.library.raise_error(code)


class Plan:
    """One kind of call: its kernels and everything that shapes, strides and choices decide."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> None:
        self.ask = ask
        self.cuda = q.device.type == "cuda"
        self.device = q.device
        self.index = q.device.index
        self.choice: Choice = choose(ask.kernel, q.dtype, q.device.type, walks_of(ask))
        heads, rows = (2, 1) if ask.bnhd else (1, 2)
        self.problem = (q.shape[0], q.shape[heads], k.shape[heads], q.shape[rows], k.shape[rows], q.shape[3],
                        ask.causal)
        self.scale = ask.scale if ask.scale is not None else q.shape[3] ** -0.5
        self.dtype = DTYPES[q.dtype]
        self.strides = q.stride(), k.stride(), v.stride()
        self.inputs = strides(q, ask.bnhd) + strides(k, ask.bnhd) + strides(v, ask.bnhd)
        self.new_lse = maker_of((self.problem[0], self.problem[1], self.problem[3]),
                                torch.float64 if q.dtype == torch.float64 else torch.float32, q.device)
        self.like_q, self.like_k, self.like_v = maker_like(q), maker_like(k), maker_like(v)
        self._forward: list[Optional[_Way]] = [None, None]  # without lengths and with them, which may want scratch
        self._backward: dict[Any, _Way] = {}

    def _way(self, way: str, deterministic: bool, others: tuple[int, ...], pointers: bytes) -> _Way:
        where = getattr(self.choice, way + "_library")
        return _Way(self.ask, getattr(self.choice, way), where, self.problem, self.scale, self.dtype, self.device,
                    deterministic, self.inputs + others, pointers)

    def _here(self) -> contextlib.AbstractContextManager[Any]:
        """The GPU of the tensors as the current one."""
        return torch.cuda.device(self.device)

    def _elsewhere(self) -> bool:
        return self.cuda and self.index != current_device()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Optional[Tensor],
                seed: Optional[Tensor]) -> tuple[Tensor, Tensor]:
        if self._elsewhere():
            with self._here():
                return self.forward(q, k, v, lengths, seed)
        out = self.like_q(q)
        lse = self.new_lse()
        stream, threads = (stream_of(self.index), 0) if self.cuda else (0, torch.get_num_threads())
        at = (address(lengths), address(seed), lse.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
              0, 0, 0, 0)
        masked = lengths is not None
        way = self._forward[masked]
        if way is None:
            others = strides(out, self.ask.bnhd) + 4 * NONE
            pointers = POINTERS.pack(threads, stream, 0, *at)
            way = self._forward[masked] = self._way("forward", self.ask.deterministic, others, pointers)
        if way.new_scratch:
            scratch = way.new_scratch()
            way(POINTERS.pack(threads, stream, scratch.data_ptr(), *at))
        else:
            way(POINTERS.pack(threads, stream, 0, *at))
        if self.choice.forward.stage == 0:
            lse.fill_(float("nan"))  # it computes none, and its own backward reads none
        return out, lse

    def backward(self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                 lengths: Optional[Tensor], seed: Optional[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        if self._elsewhere():
            with self._here():
                return self.backward(d_out, q, k, v, out, lse, lengths, seed)
        deterministic = self.ask.deterministic or torch.are_deterministic_algorithms_enabled()
        key = (deterministic, lengths is None, out.stride(), d_out.stride())
        way = self._backward.get(key)
        if way is None:  # of an unknown kind, or of strides that no kernel takes
            d_out, out = in_rows(d_out), in_rows(out)
            key = (deterministic, lengths is None, out.stride(), d_out.stride())
            way = self._backward.get(key)
        lse = lse.contiguous()
        dq, dk, dv = self.like_q(q), self.like_k(k), self.like_v(v)
        stream, threads = (stream_of(self.index), 0) if self.cuda else (0, torch.get_num_threads())
        at = (address(lengths), address(seed), lse.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
              d_out.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr())
        if way is None:
            others = sum((strides(x, self.ask.bnhd) for x in (out, d_out, dq, dk, dv)), ())
            pointers = POINTERS.pack(threads, stream, 0, *at)
            way = self._backward[key] = self._way("backward", deterministic, others, pointers)
        if way.new_scratch:
            scratch = way.new_scratch()
            way(POINTERS.pack(threads, stream, scratch.data_ptr(), *at))
        else:
            way(POINTERS.pack(threads, stream, 0, *at))
        return dq, dk, dv


_plans: dict[Any, Plan] = {}


def plan_for(q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> Plan:
    """For tensors whose shapes fit together (see check() in _attention.py) and whose last strides are 1."""
    key = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, ask)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = Plan(q, k, v, ask)
    return plan
