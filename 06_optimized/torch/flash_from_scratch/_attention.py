"""attention(): arguments, checks, and the way to a kernel."""

from __future__ import annotations

import warnings
from typing import Any, Literal, Optional, Union

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _operators
from ._choice import why_not
from ._fallback import sdpa
from ._library import Cannot
from ._plan import Ask, Plan, _plans, in_rows, plan_for, walks_of

CAUSAL = {False: 0, True: 1, "top_left": 1, "bottom_right": 2}
LAYOUTS = {"bhnd": False, "bnhd": True}
Window = Union[None, int, tuple[Optional[int], Optional[int]]]


def attention(q: Tensor, k: Tensor, v: Tensor, causal: Union[bool, Literal["top_left", "bottom_right"]] = False,
              scale: Optional[float] = None, key_lengths: Optional[Tensor] = None, window: Window = None,
              dropout: float = 0.0, deterministic: bool = False, layout: Literal["bhnd", "bnhd"] = "bhnd",
              kernel: str = "best", fallback: bool = False) -> Tensor:
    """softmax(scale q kᵀ + mask) v, by the kernels of the course, with gradients for q, k and v.

    q: [B, Hq, Nq, d]; k, v: [B, Hkv, Nk, d], Hq a multiple of Hkv: query head h reads key head h / (Hq / Hkv). With
    layout="bnhd" heads and rows change places, [B, N, H, d]. The result is like q, in its order in memory.

    causal        True and "top_left": row i sees keys j <= i, as with is_causal=True of scaled_dot_product_attention.
                  "bottom_right": j <= i + Nk - Nq, as in flash-attn from 2.1 on. They differ only if Nq != Nk.
    scale         factor of the scores, 1 / sqrt(d) unless given
    key_lengths   [B], integers on the device of q: batch entry b sees keys j < key_lengths[b]. On the CPU a length
                  outside [0, Nk] raises; a GPU takes the nearest that lies inside.
    window        (left, right): row i sees keys i + s - left to i + s + right, where s is Nk - Nq at the bottom right,
                  else 0; None or -1 is no limit, one number stands for both. A causal mask and key lengths hide more.
    dropout       probability, in [0, 1), that a weight is set to 0; those that are kept grow, so that the mean stays.
                  Which they are is for PyTorch's generator on the device of q to say: each call draws a seed and an
                  offset, two integers in a tensor that stays on the device, and the backward reads the same tensor.
                  So torch.manual_seed decides; a checkpoint draws them again, a compiled call or a replayed CUDA graph
                  draws others. Another implementation of attention drops other weights for the same seed.
    deterministic  the gradients have the same bits in every run; torch.use_deterministic_algorithms(True) asks for it
    kernel        "best"; a stage ("04"), a rung ("06.pingpong"), for the backward "06.backward_fused" or "05.atomic",
                  two with a comma; "mine", the file in NN_*/mine that was saved last, or "04.mine": built when a
                  process first asks for it, and the same until it ends. kernels() lists the names.
    fallback      what a kernel cannot take goes to scaled_dot_product_attention, and a warning says why, once a cause.
                  What only a rung of the backward cannot take raises when the gradients are asked for.

    window and dropout are for "best" and "06", in float32 by kernels like 04.tiled, in 16 bits by kernels like 06.fa2
    and, on compute capability 9.0, 06.hopper; on a GPU or, with "06" and a library that was built without nvcc, on the
    emulator. No kernel has both at once.

    A row that sees no key is 0. Types and devices of "best": float32 and float64 on the CPU (stages 03 and 05,
    d <= 512); on a GPU float32 (04 and 05, d <= 128), float16 and bfloat16 (06, d <= 256, compute capability 8.0 and
    later). Under autocast q, k and v are cast to its type first; on the CPU it is computed in float32 and the result
    is cast.

    Any strides will do if the last is 1, expanded tensors included; others are copied. Work goes to the current stream,
    scratch comes from PyTorch's allocator, and a call can be captured in a CUDA graph. For the backward q, k, v, the
    result and one number for each row are kept. Second derivatives, and forward-mode ones, raise RuntimeError.

    Raises ValueError in one sentence for arguments that make no sense and, without fallback, for what the kernel cannot
    take; TypeError for what is no tensor; RuntimeError with CUDA's words where CUDA fails.
    """
    if torch.compiler.is_compiling() or not _plain(q, k, v):
        return _general(q, k, v, causal, scale, key_lengths, window, dropout, deterministic, layout, kernel, fallback)
    # The shortest way: this very kind of call was made before.
    if key_lengths is None and not dropout and layout in LAYOUTS and (not any_autocast() or not _autocast(q) or _cast_already(q)):
        try:
            left, right = (-1, -1) if window is None else _window(window, causal)
            ask = (CAUSAL[causal], scale, kernel, deterministic, LAYOUTS[layout], left, right, 0.0)  # equal to an Ask
            plan = _plans.get((q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, ask))
        except (KeyError, TypeError, ValueError):
            plan = None  # the long way says what is wrong
        if plan is not None and k.dtype == v.dtype == q.dtype and k.device == v.device == q.device:
            try:
                return _apply(plan, q, k, v, None, None)
            except Cannot as error:  # of this call's addresses
                if not fallback:
                    raise
                _warn(str(error))
                return sdpa(q, k, v, CAUSAL[causal], scale, None, (left, right), 0.0, LAYOUTS[layout])
    return _general(q, k, v, causal, scale, key_lengths, window, dropout, deterministic, layout, kernel, fallback)


def _general(q: Tensor, k: Tensor, v: Tensor, causal: Any, scale: Optional[float], key_lengths: Optional[Tensor],
             window: Window, dropout: float, deterministic: bool, layout: str, kernel: str, fallback: bool) -> Tensor:
    ask = check(q, k, v, causal, scale, key_lengths, window, dropout, deterministic, layout, kernel)
    if key_lengths is not None:
        key_lengths = key_lengths.to(torch.int64).contiguous()
    given = None
    if _autocast(q) and q.dtype != torch.float64:
        given = torch.get_autocast_dtype(q.device.type)
        to = torch.float32 if q.device.type == "cpu" and kernel[:2] != "06" else given
        q, k, v = q.to(to), k.to(to), v.to(to)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one type, got {q.dtype}, {k.dtype} and {v.dtype}")
    why = cannot(q, v, ask)
    if not why:
        try:
            out = _with(q, k, v, key_lengths, ask)
        except Cannot as error:  # what only the library knows
            why = str(error)
    if why:
        if not fallback:
            raise Cannot(why)
        _warn(why)
        out = sdpa(q, k, v, ask.causal, ask.scale, key_lengths, (ask.window_left, ask.window_right), dropout, ask.bnhd)
    return out if given is None else out.to(given)


def _autocast(q: Tensor) -> bool:
    device = q.device.type
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # the short question


def _cast_already(q: Tensor) -> bool:
    return q.is_cuda and q.dtype == torch.get_autocast_dtype("cuda")


def _with(q: Tensor, k: Tensor, v: Tensor, key_lengths: Optional[Tensor], ask: Ask) -> Tensor:
    # Drawn by PyTorch's generator of that device, and read by the kernel when it runs: so torch.manual_seed decides, a
    # checkpoint draws it again, and a compiled call or a recorded graph draws a new one each time.
    seed = torch.randint(1 << 62, (2,), device=q.device) if ask.dropout else None
    if torch.compiler.is_compiling() or not _plain(q, k, v):
        return _operators.attention(q, k, v, key_lengths, seed, *ask)[0]
    q, k, v = (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in (q, k, v))
    return _apply(plan_for(q, k, v, ask), q, k, v, key_lengths, seed)


# ---- without the operators: the same calls, without what a dispatcher of Python costs ----------

def _plain(q: Any, k: Any, v: Any) -> bool:
    """Nobody looks on who would have to see an operator: no subclass, mode, transform or dual number."""
    return (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN and not dispatch_modes() and transforms() is None
            and forward_ad._current_level < 0)


PLAIN = (Tensor, torch.nn.Parameter)
dispatch_modes = torch._C._len_torch_dispatch_stack
transforms = torch._C._functorch.peek_interpreter_stack


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_lengths: Optional[Tensor], seed: Optional[Tensor],
                plan: Plan) -> Tensor:
        out, lse = plan.forward(q, k, v, key_lengths, seed)
        ctx.save_for_backward(q, k, v, out, lse, key_lengths, seed)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Optional[Tensor], ...]:
        # With create_graph=True somebody may go on from here.
        if torch.is_grad_enabled() or not _plain(d_out, d_out, d_out):
            gradients = _operators.attention_backward(d_out, *ctx.saved_tensors, *ctx.plan.ask)
        else:
            q, k, v, *others = ctx.saved_tensors
            plan = ctx.plan
            if (q.stride(), k.stride(), v.stride()) != plan.strides:  # a hook has kept them in another order
                q, k, v = in_rows(q), in_rows(k), in_rows(v)
                plan = plan_for(q, k, v, plan.ask)
            gradients = plan.backward(d_out, q, k, v, *others)
        return *gradients, None, None, None


# Function.apply() looks for transforms first, which _plain() has done; behind it is this.
apply = super(torch.autograd.Function, _Attention).apply


def _apply(plan: Plan, q: Tensor, k: Tensor, v: Tensor, key_lengths: Optional[Tensor],
           seed: Optional[Tensor]) -> Tensor:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return apply(q, k, v, key_lengths, seed, plan)
    return plan.forward(q, k, v, key_lengths, seed)[0]


# ---- what makes no sense, and what these kernels do not take -----------------------------------

def check(q: Tensor, k: Tensor, v: Tensor, causal: Any, scale: Optional[float], key_lengths: Optional[Tensor],
          window: Window, dropout: float, deterministic: bool, layout: str, kernel: str) -> Ask:
    """The choices of a call that makes sense; ValueError for any other, whoever would compute it."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, got {x.dim()}")
        if x.device != q.device:
            raise ValueError(f"q, k and v must be on one device, got q on {q.device} and {name} on {x.device}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be 'bhnd' or 'bnhd', got {layout!r}")
    if not isinstance(causal, (bool, str)) or causal not in CAUSAL:
        raise ValueError(f"causal must be False, True, 'top_left' or 'bottom_right', got {causal!r}")
    bnhd = LAYOUTS[layout]
    heads, rows = (2, 1) if bnhd else (1, 2)
    if k.shape[heads] != v.shape[heads] or k.shape[rows] != v.shape[rows]:
        raise ValueError(f"k and v must have the same heads and rows, got {tuple(k.shape)} and {tuple(v.shape)}")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v must have one batch, got {q.shape[0]}, {k.shape[0]} and {v.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same d, got {q.shape[3]} and {k.shape[3]}")
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise ValueError("d must be positive, got 0")
    if k.shape[heads] == 0 or q.shape[heads] % k.shape[heads] != 0:
        raise ValueError(f"the heads of q must be a multiple of those of k, got {q.shape[heads]} and {k.shape[heads]}")
    if key_lengths is not None:
        if not isinstance(key_lengths, Tensor) or key_lengths.is_floating_point() or key_lengths.dtype == torch.bool:
            raise ValueError("key_lengths must be a tensor of integers")
        if key_lengths.dim() != 1 or key_lengths.shape[0] != q.shape[0]:
            raise ValueError(f"key_lengths must be [B] = [{q.shape[0]}], got {list(key_lengths.shape)}")
        if key_lengths.device != q.device:
            raise ValueError(f"key_lengths must be on the device of q, {q.device}, got {key_lengths.device}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
    if scale is not None:
        scale = float(scale)
        if scale != scale or scale in (float("inf"), float("-inf")):
            raise ValueError(f"scale must be finite, got {scale}")
    if not isinstance(kernel, str):
        raise ValueError(f"kernel must be a name, got {kernel!r}")
    left, right = _window(window, causal)
    return Ask(CAUSAL[causal], scale, kernel, bool(deterministic), bnhd, left, right, float(dropout))


def _window(window: Window, causal: Any) -> tuple[int, int]:
    if window is None:
        return -1, -1
    pair = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    if len(pair) != 2 or not all(one is None or (isinstance(one, int) and one >= -1) for one in pair):
        raise ValueError(f"window must be None, a number or (left, right), not negative, got {window!r}")
    left, right = (-1 if one is None else one for one in pair)
    return left, min(right, 0) if causal else right  # behind its own key a causal row sees nothing anyway


def cannot(q: Tensor, v: Tensor, ask: Ask) -> str:
    """Why no kernel of the library takes this call, or "": what can be told without looking at an address."""
    sign = 1 if ask.scale is None else (ask.scale > 0) - (ask.scale < 0)
    why, largest = _why_not(ask.kernel, q.dtype, q.device.type, walks_of(ask), sign)
    if why:
        return why
    if v.shape[3] != q.shape[3]:
        return f"v must have the d of q, {q.shape[3]}, got {v.shape[3]}"
    if q.shape[3] > largest:
        return f"d must be at most {largest} here, got {q.shape[3]}"
    return ""


@torch.compiler.assume_constant_result  # a compiler takes the answer for a constant and does not look inside
def _why_not(kernel: str, dtype: torch.dtype, device: str, walks: tuple[str, ...], sign: int) -> tuple[str, int]:
    return why_not(kernel, dtype, device, walks, sign)


_warned: set[str] = set()


def _warn(why: str) -> None:
    if torch.compiler.is_compiling() or why in _warned:
        return
    _warned.add(why)
    warnings.warn(f"flash_from_scratch: {why}; scaled_dot_product_attention takes it", stacklevel=4)
