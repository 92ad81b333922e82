"""Keys and values of tokens that were there before, in pages, for the walk 06_optimized/beyond/decode. No gradients."""

from __future__ import annotations

import contextlib
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ._choice import decoder
from ._library import DECODE, POINTERS, PREFIX, library
from ._plan import DTYPES, NONE, empty_like, in_rows, stream_of

MOST = 8  # new tokens of one call


class PagedCache:
    """The keys and values of B sequences, which grow together, in one layer: [pages, heads, page, d] each.

    Token n of sequence b lies in row n % page of page table[b, n // page]. The pages of a sequence may be any: whoever
    wants others changes `table`, [B, pages of a sequence], before the first token comes. Types and devices are those of
    beyond.decode: float32 with d <= 128, float16 and bfloat16 with d <= 256, on a GPU or on the emulator.
    """

    def __init__(self, B: int, heads: int, longest: int, d: int, dtype: torch.dtype,
                 device: Union[str, torch.device], page: int = 64) -> None:
        self.kernel = decoder(dtype, torch.device(device).type)
        self.longest, self.page, self.length = longest, page, 0
        each = -(-longest // page)
        self.k, self.v = (torch.empty(B * each, heads, page, d, dtype=dtype, device=device) for _ in range(2))
        self.table = torch.arange(B * each, dtype=torch.int32, device=device).view(B, each)
        self.lengths = torch.zeros(B, dtype=torch.int64, device=device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: Optional[float] = None) -> Tensor:
        """Puts the keys and values of N new tokens, [B, heads, N, d], behind those that are there, and gives what their
        queries, [B, Hq, N, d], see: all tokens up to their own."""
        B, heads, N, d = self.table.shape[0], self.k.shape[1], q.shape[2], self.k.shape[3]
        if not k.shape == v.shape == (B, heads, N, d) or q.shape != (B, q.shape[1], N, d):
            raise ValueError(f"this cache takes keys and values [{B}, {heads}, N, {d}] and queries [{B}, Hq, N, {d}], "
                             f"got {list(k.shape)}, {list(v.shape)} and {list(q.shape)}")
        for x in (q, k, v):
            if (x.dtype, x.device) != (self.k.dtype, self.k.device):
                raise ValueError(f"this cache is {self.k.dtype} on {self.k.device}, got {x.dtype} on {x.device}")
        if self.length + N > self.longest:
            raise ValueError(f"this cache holds {self.longest} tokens, got {self.length + N}")
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise RuntimeError("flash_from_scratch: decoding has no gradients; it wants torch.no_grad()")
        with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
            parts = [self._step(*(in_rows(x[:, :, n:n + MOST]) for x in (q, k, v)), scale) for n in range(0, N, MOST)]
        return torch.cat(parts, 2) if parts else torch.empty_like(q)

    def _step(self, q: Tensor, k: Tensor, v: Tensor, scale: Optional[float]) -> Tensor:
        (B, Hq, N, d), (pages, heads, page, _) = q.shape, self.k.shape
        out = empty_like(q)
        stream, index, threads = (stream_of(q.device.index), q.device.index, 0) if q.is_cuda else (
            0, -1, torch.get_num_threads())
        length = self.length + N
        pages_at = DECODE.pack(page, pages, self.table.stride(0), *k.stride()[:3], *v.stride()[:3],
                               self.table.data_ptr(), k.data_ptr(), v.data_ptr())

        def call(scratch: int, at: int) -> bytes:
            shapes = PREFIX.pack(B, Hq, heads, N, length, d, 0, d ** -0.5 if scale is None else scale, DTYPES[q.dtype],
                                 index, self.kernel.stage, self.kernel.number, 0, -1, -1, 0.0, scratch, *q.stride()[:3],
                                 *self.k.stride()[:3], *self.v.stride()[:3], *out.stride()[:3], *4 * NONE)
            return shapes + POINTERS.pack(threads, stream, at, self.lengths.data_ptr(), 0, 0, q.data_ptr(),
                                          self.k.data_ptr(), self.v.data_ptr(), out.data_ptr(), 0, 0, 0, 0) + pages_at

        needs = library().decode_needs(call(0, 0))
        scratch: Any = torch.empty(needs, dtype=torch.uint8, device=q.device) if needs else None
        self.lengths += N
        if code := library().decode(call(needs, scratch.data_ptr() if needs else 0)):
            self.lengths -= N
            library().raise_error(code)
        self.length = length
        return out
