"""What the tests share: the package of this checkout, and attention as it is written, in double."""

from __future__ import annotations

import os
import sys
import unittest
from pathlib import Path
from typing import Any, Optional

FOLDER = Path(__file__).resolve().parents[1]
if not os.environ.get("FLASH_FROM_SCRATCH_INSTALLED"):  # else the package that pip has put into this Python
    sys.path.insert(0, str(FOLDER))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def seen(Nq: int, Nk: int, causal: Any, lengths: Optional[Tensor], window: Any = None, device: Any = "cpu") -> Tensor:
    """Which keys a row sees, [B or 1, 1, Nq, Nk]."""
    i, j = torch.arange(Nq, device=device)[:, None], torch.arange(Nk, device=device)[None, :]
    own = i + (Nk - Nq if causal == "bottom_right" else 0)  # the key that a row stands at
    left, right = window if isinstance(window, tuple) else (window, window)
    keys = torch.ones(Nq, Nk, dtype=torch.bool, device=device)
    if left is not None:
        keys = keys & (own - j <= left)
    if right is not None:
        keys = keys & (j - own <= right)
    if causal:
        keys = keys & (j <= own)
    keys = keys[None, None]
    return keys if lengths is None else keys & (j < lengths[:, None, None, None])


def reference(q: Tensor, k: Tensor, v: Tensor, causal: Any = False, scale: Optional[float] = None,
              key_lengths: Optional[Tensor] = None, layout: str = "bhnd", window: Any = None,
              factors: Optional[Tensor] = None) -> Tensor:
    """(factors * softmax(scale q kᵀ + mask)) v in double; a row that sees no key is 0."""
    if layout == "bnhd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    keys = seen(q.shape[2], k.shape[2], causal, key_lengths, window, q.device)
    none = ~keys.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~(keys | none), float("-inf")), -1)
    out = ((weights if factors is None else factors * weights) @ v).masked_fill(none, 0)
    return out.transpose(1, 2) if layout == "bnhd" else out


def tensors(B: int = 2, Hq: int = 4, Hkv: int = 2, Nq: int = 37, Nk: int = 50, d: int = 16, dtype: Any = torch.float32,
            layout: str = "bhnd", grad: bool = False, device: Any = "cpu", seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, Hq, Nq, d), (B, Hkv, Nk, d), (B, Hkv, Nk, d))
    if layout == "bnhd":
        shapes = tuple((b, n, h, e) for b, h, n, e in shapes)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_(grad)
            for shape in shapes]


class Case(unittest.TestCase):
    """Compares with the reference; relative to the largest number."""

    def close(self, got: Tensor, want: Tensor, tolerance: Optional[float] = None, words: str = "") -> None:
        self.assertEqual(got.shape, want.shape, words)
        if want.numel() == 0:
            return
        limit = (tolerance or TOLERANCE[got.dtype]) * max(1.0, want.abs().max().item())
        error = (got.double() - want.double()).abs().max().item()
        self.assertLessEqual(error, limit, f"{words}: off by {error}, {limit} is allowed")  # false for NaN, too

    def agrees(self, attend: Any, inputs: list[Tensor], tolerance: Optional[float] = None, words: str = "",
               factors: Optional[Tensor] = None, **choices: Any) -> None:
        """The result, and the gradients if the inputs want some, against those of the reference."""
        masks = {name: value for name, value in choices.items()
                 if name in ("causal", "scale", "key_lengths", "layout", "window")}
        words = words or str(choices)
        out = attend(*inputs, **choices)
        want = reference(*inputs, factors=factors, **masks)
        self.close(out.detach(), want.detach(), tolerance, f"O, {words}")
        self.assertEqual(out.dtype, inputs[0].dtype)
        if not inputs[0].requires_grad:
            return
        up = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.device)
        got = torch.autograd.grad(out, inputs, up.to(out.dtype))
        expected = torch.autograd.grad(want, inputs, up)
        for name, ours, theirs in zip(("dQ", "dK", "dV"), got, expected):
            self.close(ours, theirs, 4 * (tolerance or TOLERANCE[out.dtype]), f"{name}, {words}")

    def has_one_mask(self, out: Tensor, dv: Tensor, v: Tensor) -> None:
        """Of a dropout, if dO was O. O is linear in V, so dV ∘ V and O ∘ O have one sum; with two masks they differ."""
        self.close((dv.double() * v.double()).sum(), out.double().square().sum(), TOLERANCE[out.dtype])
