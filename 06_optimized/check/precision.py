"""Attention in double precision, head by head: what compare.py, ab.py and the big table hold results against."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from contenders import CONTEXT, DTYPE, GRADIENTS, WRITES, Runner, Tensors, torch

RELATIVE_L2 = {"bf16": 1e-2, "f16": 1.5e-3}
SAMPLES = 16  # rows of a long problem
SCORES = 2**24  # so many at once: 128 MiB in double precision


@dataclass(frozen=True)
class Expected:
    """Rows of one head of a tensor in double precision."""

    tensor: str
    b: int
    h: int
    rows: torch.Tensor
    value: torch.Tensor
    spread: torch.Tensor  # the sum of what is rounded: of P |V| for O


def expected(t: Tensors) -> list[Expected]:
    """Of three heads."""
    s = t.setting
    heads = {(0, 0), (s.batch // 2, s.heads // 2), (s.batch - 1, s.heads - 1)}
    found: list[Expected] = []
    if "O" in WRITES[s.what]:
        found += expected_rows(t, heads)
    if "dQ" in WRITES[s.what]:
        for b, h in heads:
            found += expected_gradients(t, b, h)
    return found


def masked(scores: torch.Tensor, rows: torch.Tensor, causal: bool) -> torch.Tensor:
    """Of these queries and all keys."""
    if not causal:
        return scores
    keys = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill(keys[None] > rows[:, None], -math.inf)


def sampled(n: int) -> list[int]:
    some = {0, n // 3, n // 2 + 1, n - 1}
    return sorted(some | set(random.sample(sorted(set(range(n)) - some), SAMPLES - len(some))))


def expected_rows(t: Tensors, heads: set[tuple[int, int]]) -> list[Expected]:
    """O and LSE: all rows of a short problem, some rows of a long one."""
    s = t.setting
    rows = torch.tensor(sampled(s.n) if s.n > 1024 else range(s.n), device=t.q.device)
    found = []
    for b, h in heads:
        q, k, v = t.q[b, h].double(), t.k[b, h // s.group].double(), t.v[b, h // s.group].double()
        found += [Expected(tensor, b, h, rows, *value) for tensor, value in
                  context_of_a_head(q, k, v, s.causal, rows).items()]
    return found


def context_of_a_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool,
                      rows: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """These rows of O and LSE, and the sum of what is rounded on the way."""
    scores = masked(q[rows] @ k.T / math.sqrt(q.shape[1]), rows, causal)
    p = torch.softmax(scores, -1)
    lse = torch.logsumexp(scores, -1)
    return {"O": [p @ v, p @ v.abs()], "LSE": [lse, lse.abs()]}


def expected_gradients(t: Tensors, b: int, h: int) -> list[Expected]:
    """All rows of dQ of a query head, of dK and dV of its key head: sums over the head's whole group."""
    s = t.setting
    key_head = h // s.group
    k, v = t.k[b, key_head].double(), t.v[b, key_head].double()
    rows = torch.arange(s.n, device=k.device)
    sums: dict[str, list[torch.Tensor]] = {}
    for head in range(key_head * s.group, (key_head + 1) * s.group):
        parts = gradients_of_a_head(t.q[b, head].double(), k, v, t.do[b, head].double(), s.causal)
        for tensor, part in parts.items():
            if tensor == "dQ":
                if head == h:
                    sums[tensor] = part
            elif tensor in sums:
                sums[tensor] = [x + y for x, y in zip(sums[tensor], part)]
            else:
                sums[tensor] = part
    return [Expected(tensor, b, h if tensor == "dQ" else key_head, rows, *sums[tensor]) for tensor in GRADIENTS]


def gradients_of_a_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor,
                        causal: bool) -> dict[str, list[torch.Tensor]]:
    """Each gradient and the sum of what is rounded on the way: P, dS and, in D = dO . O, O."""
    scale = 1 / math.sqrt(q.shape[1])
    zeros = {tensor: [torch.zeros_like(q), torch.zeros_like(q)] for tensor in GRADIENTS}
    (dq, eq), (dk, ek), (dv, ev) = zeros.values()
    for rows in torch.arange(q.shape[0], device=q.device).split(max(1, SCORES // k.shape[0])):
        p = torch.softmax(masked(scale * (q[rows] @ k.T), rows, causal), -1)
        terms = do[rows] * (p @ v)
        ds = scale * p * (do[rows] @ v.T - terms.sum(-1, keepdim=True))
        size = ds.abs() + scale * p * terms.abs().sum(-1, keepdim=True)
        dq[rows], eq[rows] = ds @ k, size @ k.abs()
        dk += ds.T @ q[rows]
        ek += size.T @ q[rows].abs()
        dv += p.T @ do[rows]
        ev += p.T @ do[rows].abs()
    return zeros


def fault(runner: Runner, want: Sequence[Expected], dtype: str) -> str:
    """Empty, or what is wrong. NaN fails every comparison here."""
    if runner.name == "gemm":
        return ""
    result = runner.result()
    for w in want:
        if w.tensor not in result:
            if w.tensor == "LSE" and "O" in result:
                continue  # PyTorch keeps it to itself
            return f"it wrote no {w.tensor}"
        wrong = fault_of(result[w.tensor][w.b, w.h, w.rows].double(), w, dtype)
        if wrong:
            return f"{w.tensor} is wrong by {wrong} in batch {w.b}, head {w.h}"
    return ""


def fault_of(got: torch.Tensor, w: Expected, dtype: str) -> str:
    error = (got - w.value).abs()
    eps = torch.finfo(DTYPE[dtype]).eps  # factors and results are rounded to within eps / 2
    limit = 2e-5 * w.spread.clamp(min=1) if w.tensor == "LSE" else eps * (w.value.abs() + w.spread) + 1e-6
    if not bool((error <= limit).all()):
        return f"up to {error.max().item():.2g}"
    relative = (error.norm() / w.value.norm()).item()
    if w.tensor != "LSE" and not relative <= RELATIVE_L2[dtype]:
        return f"{relative:.2g} (relative L2)"
    return ""


def relative_error(runner: Runner, want: Sequence[Expected]) -> float:
    """In the L2 norm, of the tensor where it is largest: what rounding to 16 bits leaves."""
    result = runner.result()

    def of(tensor: str) -> float:
        pairs = [(result[tensor][w.b, w.h, w.rows].double(), w.value) for w in want if w.tensor == tensor]
        errors = sum((got - value).square().sum().item() for got, value in pairs)
        return math.sqrt(errors / sum(value.square().sum().item() for _, value in pairs))
    return max(of(tensor) for tensor in {w.tensor for w in want} - {CONTEXT[1]})
