"""Writing with the model of train.py, a token at a time; with a cache a layer computes K and V of the new one alone.

A cache is called in the place of attention: with q, k and v of the tokens that are new.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Caches = Optional[list[Attend]]  # one for each layer; None: there are none, and everything is computed again


class KeptCache:
    """K and V of one layer in one piece, for an attention that takes fewer queries than keys, the last ones."""

    def __init__(self, attend: Attend) -> None:
        self.attend = attend
        self.k: Optional[Tensor] = None
        self.v: Optional[Tensor] = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.k = k if self.k is None else torch.cat([self.k, k], dim=2)
        self.v = v if self.v is None else torch.cat([self.v, v], dim=2)
        return self.attend(q, self.k, self.v)


class DecodeCache:
    """K and V of one layer in pages, and the walk beyond/decode, in a type that it takes."""

    def __init__(self, longest: int, dtype: torch.dtype) -> None:
        self.longest, self.dtype, self.pages = longest, dtype, None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.pages is None:
            from flash_from_scratch import PagedCache
            self.pages = PagedCache(k.shape[0], k.shape[1], self.longest, k.shape[3], self.dtype, k.device, page=16)
        return self.pages.attend(*(x.to(self.dtype) for x in (q, k, v))).to(q.dtype)


@torch.no_grad()
def generate(model: Any, tokens: list[int], count: int, context: int, new_caches: Callable[[], Caches],
             draw: Callable[[Tensor], int]) -> list[int]:
    """Goes on until there are so many tokens; draw() takes one by the logits of the last.

    The model has places for `context` tokens. When they are used up it goes on with the later half, which stands at
    other places then: so nothing of a cache is of use, and the half is read again."""
    tokens, first, read, caches = list(tokens), max(0, len(tokens) - context), 0, None
    while len(tokens) < count:
        if len(tokens) - first > context:
            first, caches = len(tokens) - max(1, context // 2), None
        if caches is None:
            caches, read = new_caches(), first
        new = torch.tensor([tokens[read:]], device=model.head.weight.device)
        logits = model(new, read - first, caches)[0, -1]
        read = len(tokens)
        tokens.append(draw(logits))
    return tokens
