"""PyTorch's own attention, for what the kernels do not take: the same masks, in the same words."""

from __future__ import annotations

import inspect
from typing import Optional

import torch
from torch import Tensor
from torch.nn import functional

HAS_GROUPS = "enable_gqa" in (inspect.getdoc(functional.scaled_dot_product_attention) or "")


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: int, scale: Optional[float], key_lengths: Optional[Tensor],
         window: tuple[int, int], dropout: float, bnhd: bool) -> Tensor:
    if bnhd:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    q, k, v = (at_16_bytes(x) for x in (q, k, v))
    if k.shape[2] == 0:  # no row sees a key
        out = q.new_zeros(*q.shape[:3], v.shape[3]) + 0 * q.sum()
        return out.transpose(1, 2) if bnhd else out
    groups = {}
    if q.shape[1] != k.shape[1]:
        if HAS_GROUPS:
            groups = {"enable_gqa": True}
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if causal != 2 and key_lengths is None and window == (-1, -1):
        out = functional.scaled_dot_product_attention(q, k, v, None, dropout, causal == 1, scale=scale, **groups)
    else:
        seen = visible(q.shape[2], k.shape[2], causal, key_lengths, window, q.device)
        # A softmax over no key is 0 / 0. Such a row sees all keys instead, and is not taken.
        none = ~seen.any(-1, keepdim=True)
        out = functional.scaled_dot_product_attention(q, k, v, seen | none, dropout, False, scale=scale, **groups)
        out = out.masked_fill(none, 0)
    return out.transpose(1, 2) if bnhd else out


def at_16_bytes(x: Tensor) -> Tensor:
    """A copy of tensors on a GPU that begin, or have a row that begins, elsewhere. PyTorch's kernels do not look: of
    such tensors some give wrong numbers, and some end with a misaligned address (PyTorch 2.11 on an H200)."""
    if x.is_cuda and any((n * x.element_size()) % 16 for n in (x.storage_offset(), *x.stride()[:-1])):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def visible(Nq: int, Nk: int, causal: int, key_lengths: Optional[Tensor], window: tuple[int, int],
            device: torch.device) -> Tensor:
    """Which keys a row sees, [B or 1, 1, Nq, Nk]."""
    i, j = torch.arange(Nq, device=device)[:, None], torch.arange(Nk, device=device)[None, :]
    diagonal = i + (Nk - Nq if causal == 2 else 0)
    seen = torch.ones(Nq, Nk, dtype=torch.bool, device=device)
    if causal:
        seen = seen & (j <= diagonal)
    left, right = window
    if left >= 0:
        seen = seen & (j >= diagonal - left)
    if right >= 0:
        seen = seen & (j <= diagonal + right)
    seen = seen[None, None]
    if key_lengths is not None:
        seen = seen & (j[None, None] < key_lengths[:, None, None, None])
    return seen
