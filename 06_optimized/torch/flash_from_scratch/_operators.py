"""The kernels as two operators of PyTorch, with what torch.compile and autograd ask of them.

attention gives O and LSE; attention_backward, a separate operator, gives dQ, dK, dV from them. A fake one says what
shapes and strides come out, and computes nothing.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ._plan import Ask, empty_like, in_rows, lse_of, plan_for

TWICE = ("flash_from_scratch: second derivatives are not built in; its backward is a kernel without a gradient of its "
         "own. torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH has them")

# Both operators take all choices of a call (Ask), one by one.
CHOICES = ("int causal, float? scale, str kernel, bool deterministic, bool bnhd, int window_left, int window_right, "
           "float dropout")
FORWARD = f"(Tensor q, Tensor k, Tensor v, Tensor? key_lengths, Tensor? seed, {CHOICES}) -> (Tensor, Tensor)"
BACKWARD = ("(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? key_lengths, Tensor? seed, "
            f"{CHOICES}) -> (Tensor, Tensor, Tensor)")


@torch.library.custom_op("flash_from_scratch::attention", mutates_args=(), schema=FORWARD)
def attention(q: Tensor, k: Tensor, v: Tensor, key_lengths: Optional[Tensor], seed: Optional[Tensor],
              *choices: Any) -> tuple[Tensor, Tensor]:
    q, k, v = in_rows(q), in_rows(k), in_rows(v)
    return plan_for(q, k, v, Ask(*choices)).forward(q, k, v, key_lengths, seed)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, key_lengths: Optional[Tensor], seed: Optional[Tensor],
      *choices: Any) -> tuple[Tensor, Tensor]:
    return empty_like(in_rows(q)), lse_of(q, Ask(*choices).bnhd)


@torch.library.custom_op("flash_from_scratch::attention_backward", mutates_args=(), schema=BACKWARD)
def attention_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                       key_lengths: Optional[Tensor], seed: Optional[Tensor],
                       *choices: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = in_rows(q), in_rows(k), in_rows(v)
    return plan_for(q, k, v, Ask(*choices)).backward(d_out, q, k, v, out, lse, key_lengths, seed)


@attention_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key_lengths: Optional[Tensor],
      seed: Optional[Tensor], *choices: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(in_rows(q)), empty_like(in_rows(k)), empty_like(in_rows(v))


# What autograd keeps between the two passes: the inputs, O, and one number for each row, L; of a mask of dropout the
# seed alone.
def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, key_lengths, seed, *ctx.choices = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, key_lengths, seed)


def _gradients(ctx: Any, d_out: Tensor, _: Any) -> tuple[Optional[Tensor], ...]:
    dq, dk, dv = attention_backward(d_out, *ctx.saved_tensors, *ctx.choices)
    return dq, dk, dv, *[None] * 10


def _refuse(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError(TWICE)


attention.register_autograd(_gradients, setup_context=_save)
attention_backward.register_autograd(_refuse)
