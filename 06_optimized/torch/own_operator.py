"""An operator of your own on one page: the kernel's forward, and a backward by the formulas, registered with PyTorch.

The forward is a kernel of this course, which gives O and L. All else that PyTorch wants to know is here. What stands
between [hole ...] and [end] is yours to write: ./learn torch practice
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_from_scratch._operators import attention as kernel


@torch.library.custom_op("own::attention", mutates_args=(), schema="(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """O, [B, H, Nq, d], and L, [B, H, Nq]: PyTorch calls this with numbers."""
    return kernel(q, k, v, None, None, 0, None, "best", False, False, -1, -1, 0.0)


@attention.register_fake
def shapes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's compiler calls this, with shapes alone: what comes out, and of which type? L has the type of q here."""
    # [hole 1: empty tensors like O and L (2 lines)]
    O = torch.empty_like(q)
    L = q.new_empty(q.shape[:3])
    # [end]
    return O, L


def save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    """After the forward: what must the backward have? Nothing of Nq x Nk."""
    # [hole 2: the inputs and what came out, by ctx.save_for_backward (1 line)]
    ctx.save_for_backward(*inputs, *output)
    # [end]
    ctx.mark_non_differentiable(output[1])


def backward(ctx: Any, dO: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, O, L = ctx.saved_tensors
    scale = q.shape[-1] ** -0.5
    # (1) P = exp(scale Q Kᵀ - L): no maximum, no sum, since both are in L     [B, H, Nq, Nk]
    # [hole 3: P (1 line)]
    P = torch.exp(scale * q @ k.transpose(2, 3) - L[..., None])
    # [end]
    # (2) D_i = Σ_x dO_ix O_ix, one number for each row                      [B, H, Nq, 1]
    # [hole 4: D (1 line)]
    D = (dO * O).sum(-1, keepdim=True)
    # [end]
    # (3) dV = Pᵀ dO,  dS = P ∘ (dO Vᵀ - D),  dQ = scale dS K,  dK = scale dSᵀ Q
    # [hole 5: dS and the three gradients (4 lines)]
    dS = P * (dO @ v.transpose(2, 3) - D)
    dQ = scale * dS @ k
    dK = scale * dS.transpose(2, 3) @ q
    dV = P.transpose(2, 3) @ dO
    # [end]
    return dQ, dK, dV


# [hole 6: tell PyTorch that backward and save belong to attention, by attention.register_autograd (1 line)]
attention.register_autograd(backward, setup_context=save)
# [end]
