"""ring_attention(): attention of a sequence that lies on the ranks of a process group. Queries stay, keys travel.

The method is explained in 06_optimized/ring, and this is its ring.cpp, blocks.cpp and parts.cpp over torch.distributed:
ring attention (Liu, Zaharia and Abbeel, arXiv 2310.01889), with the blocks of a rank in zigzag order (as in Llama 3,
arXiv 2407.21783). What a piece of a step computes is a kernel of the course, as for attention().
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._attention import _autocast, attention, cannot, check
from ._choice import choose
from ._library import Cannot
from ._plan import Ask, empty_like, in_rows, plan_for

Order = Literal["zigzag", "contiguous"]
Group = Optional["dist.ProcessGroup"]


@torch.compiler.disable  # a compiler goes on behind it; what ranks send each other is not for one rank's graph
def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: Group = None,
                   causal: Union[bool, Literal["top_left", "bottom_right"]] = False, scale: Optional[float] = None,
                   order: Order = "zigzag", kernel: str = "best", deterministic: bool = False,
                   layout: Literal["bhnd", "bnhd"] = "bhnd", lengths: Optional[tuple[int, int]] = None) -> Tensor:
    """attention() of a whole sequence, of which each rank of a process group holds some rows, with gradients.

    Every rank calls it at once, with its own rows of q, k and v, and gets its own rows of the result:

        rows = ring_rows(N, group)
        out = ring_attention(q[:, :, rows], k[:, :, rows], v[:, :, rows], group, causal=True)

    group         of torch.distributed, all processes unless given: over gloo for tensors on the CPU, over NCCL on GPUs,
                  where torch.cuda.set_device() has been called first
    order         "zigzag": of 2P blocks rank r has r and 2P - 1 - r, which gives all ranks as much to do under a causal
                  mask. "contiguous": of P blocks rank r has r. Lengths need not divide, and ranks may be without rows.
    lengths       (Nq, Nk) of the whole sequence. Without them ranks tell each other before the first step what they
                  were called with. So an argument that is wrong, or not everyone's, raises on all ranks. A group of
                  NCCL alone tells it by the GPU, and the host waits until the GPU has come so far; in a group
                  "cpu:gloo,cuda:nccl" it does not. With lengths nobody tells anything, and a call that is not
                  everyone's ends when the group's timeout does.

    All else is as for attention(): causal, by positions in the whole sequence; scale, kernel, deterministic, layout,
    types, autocast. There are no key lengths, windows or dropout. One rank gets attention()'s bits. The backward is of
    all ranks, too: none may leave it out. Partial results and gradients are added up in float32, in float64 for
    float64, always in the same order; in 16 bits a part is rounded before. Memory: two times K and V of one rank, and O
    in float32, in the forward; in the backward two times K and V, three times their gradients and one of Q's, in
    float32; and what a part of a step takes. A rank that fails on its way
    leaves the others to the group's timeout.

    Raises ValueError in one sentence, RuntimeError without a process group and for second derivatives.
    """
    group, ranks, me = _place(group)
    told, wrong = _Told(), None
    try:
        _check_order(order)
        ask, to, given = _asked(q, k, v, causal, scale, deterministic, layout, kernel)
        told = _told(q, k, v, ask, to, order)
    except Exception as error:  # whatever it is: the others must not wait
        wrong, told = error, _Told(wrong=f"{type(error).__name__}: {error}")
    if lengths is None and ranks > 1:
        lengths = _agree(group, ranks, order, told, wrong)
    if wrong:
        raise wrong
    _check_rows(me, told.rows, lengths or told.rows, ranks, order)
    if ranks == 1:
        return attention(q, k, v, causal, scale, layout=layout, kernel=kernel, deterministic=deterministic)
    q, k, v = (x.to(to) for x in (q, k, v))
    if ask.bnhd:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert lengths is not None
    ring = _Ring(group, ranks, me, order, *lengths, ask._replace(bnhd=False))
    out = _RingAttention.apply(in_rows(q), in_rows(k), in_rows(v), ring).to(given)
    return out.transpose(1, 2) if ask.bnhd else out


def ring_rows(N: int, group: Group = None, order: Order = "zigzag", rank: Optional[int] = None) -> Tensor:
    """Which rows of N a rank holds, by default this one, in the order in which ring_attention() wants them.

    x[:, :, ring_rows(N)] are this rank's rows, and whole[:, :, ring_rows(N, rank=r)] = part puts those of rank r back.
    """
    _, ranks, me = _place(group)
    rank = me if rank is None else rank
    if N < 0 or not 0 <= rank < ranks:
        raise ValueError(f"N must not be negative and rank must lie in [0, {ranks}), got {N} and {rank}")
    _check_order(order)
    blocks = [torch.arange(block.start, block.stop) for block in blocks_of(N, ranks, rank, order)]
    return torch.cat([torch.arange(0), *blocks])


# ---- who holds what (blocks.cpp) ---------------------------------------------------------------

class Piece(NamedTuple):
    """Rows [row, row + rows) of a rank and the first `keys` of the keys that are here: their mask is one of Ask's."""

    row: int
    rows: int
    keys: int
    causal: int  # 0 none, 1 top_left, 2 bottom_right


def blocks_of(N: int, ranks: int, rank: int, order: str) -> list[range]:
    """The rows of a rank, ascending. Blocks are not empty, and two that touch are one."""
    parts, mine = (2 * ranks, (rank, 2 * ranks - 1 - rank)) if order == "zigzag" else (ranks, (rank,))
    blocks = [range(part * N // parts, (part + 1) * N // parts) for part in mine]
    blocks = [block for block in blocks if block]
    if len(blocks) == 2 and blocks[0].stop == blocks[1].start:
        return [range(blocks[0].start, blocks[1].stop)]
    return blocks


def rows_of(N: int, ranks: int, rank: int, order: str) -> int:
    return sum(map(len, blocks_of(N, ranks, rank, order)))


def pieces_of(causal: int, shift: int, queries: list[range], keys: list[range]) -> list[Piece]:
    """Keys that are here lie in ascending order, so a query sees the first so many of them: each row as many as the row
    before, or one more. The rows are cut where this changes, and then a mask is one that every kernel knows."""
    rows, all_keys = sum(map(len, queries)), sum(map(len, keys))
    if not rows or not all_keys:
        return []
    if not causal:
        return [Piece(0, rows, all_keys, 0)]
    pieces: list[Piece] = []
    blind = 0  # rows just before, which see nothing
    for row, rows, seen, grows in _runs(shift, queries, keys):
        if grows:
            # Aligned at the bottom right, as many keys as the last row sees are that mask; blind rows may come before.
            before = blind if seen == 1 else 0
            pieces.append(Piece(row - before, rows + before, seen + rows - 1, 2))
        elif seen:
            # Rows behind a whole triangle are its mask aligned at the top left.
            if pieces and pieces[-1].rows == pieces[-1].keys == seen:
                pieces[-1] = pieces[-1]._replace(rows=seen + rows, causal=1)
            else:
                pieces.append(Piece(row, rows, seen, 0))
        blind = rows if not grows and not seen else 0
    return pieces


def _runs(shift: int, queries: list[range], keys: list[range]) -> list[tuple[int, int, int, bool]]:
    """(first row, rows, keys that it sees, whether each further row sees one more), as long as they go on like this."""
    runs: list[tuple[int, int, int, bool]] = []
    row = 0
    for block in queries:
        edges = [edge - shift for key in keys for edge in (key.start, key.stop) if edge - shift in block]
        edges = sorted({block.start, block.stop, *edges})
        for first, end in zip(edges, edges[1:]):
            # (1) query i sees the keys before position i + 1 + shift
            seen = sum(min(max(first + 1 + shift - key.start, 0), len(key)) for key in keys)
            grows = any(first + shift in key for key in keys)
            if runs and runs[-1][3] == grows and runs[-1][2] + (runs[-1][1] if grows else 0) == seen:
                start, rows, seen, _ = runs.pop()
                runs.append((start, rows + end - first, seen, grows))
            else:
                runs.append((row, end - first, seen, grows))
            row += end - first
    return runs


# ---- the ring (ring.cpp, parts.cpp) ------------------------------------------------------------

class _Ring(NamedTuple):
    group: dist.ProcessGroup
    ranks: int
    me: int
    order: str
    Nq: int
    Nk: int
    ask: Ask

    def owner_of(self, step: int) -> int:
        """Whose keys are here. In step 0 everybody has their own; then all move on by one rank."""
        return (self.me - step) % self.ranks

    def room(self, kv: Tensor, step: int) -> Tensor:
        rows = rows_of(self.Nk, self.ranks, self.owner_of(step), self.order)
        return kv.new_empty(*kv.shape[:3], rows, kv.shape[4])

    def pieces(self, step: int) -> list[tuple[slice, slice, Ask]]:
        """Rows of this rank, keys of those that are here, and how to call a kernel with them."""
        queries = blocks_of(self.Nq, self.ranks, self.me, self.order)
        keys = blocks_of(self.Nk, self.ranks, self.owner_of(step), self.order)
        shift = self.Nk - self.Nq if self.ask.causal == 2 else 0
        return [(slice(piece.row, piece.row + piece.rows), slice(piece.keys), self.ask._replace(causal=piece.causal))
                for piece in pieces_of(self.ask.causal, shift, queries, keys)]

    def begin(self, sent: list[Tensor], received: list[Tensor]) -> list[dist.Work]:
        """To the next rank, from the one before. Until wait() nobody may write to the first, or touch the second."""
        after, before = (dist.get_global_rank(self.group, (self.me + n) % self.ranks) for n in (1, -1))
        messages = [dist.P2POp(dist.isend, x, after, self.group, tag) for tag, x in enumerate(sent) if x.numel()]
        messages += [dist.P2POp(dist.irecv, x, before, self.group, tag) for tag, x in enumerate(received) if x.numel()]
        return dist.batch_isend_irecv(messages) if messages else []


def _wait(works: list[dist.Work]) -> None:
    for work in works:  # on a GPU the current stream waits, and the host does not
        work.wait()


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """O and L of all keys so far, with those of others: two shares of exp(L) + exp(part_L). -inf has seen no key."""
    share = torch.sigmoid(part_lse - lse).masked_fill(part_lse == float("-inf"), 0)
    out.lerp_(part_out.to(out.dtype), share[..., None])
    lse.copy_(torch.logaddexp(lse, part_lse))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        sums = torch.float64 if q.dtype == torch.float64 else torch.float32
        total = q.new_zeros(q.shape, dtype=sums)
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=sums)
        here = torch.stack([k, v])  # [2, B, Hkv, rows, d]: one message takes both
        for step in range(ring.ranks):
            # The keys that are here are sent on and computed with at once: both only read them.
            coming = ring.room(here, step + 1)
            works = ring.begin([here], [coming]) if step + 1 < ring.ranks else []
            for rows, keys, ask in ring.pieces(step):
                part = q[:, :, rows], *here[:, :, :, keys]
                _merge(total[:, :, rows], lse[:, :, rows], *plan_for(*part, ask).forward(*part, None, None))
            _wait(works)
            here = coming
        out = empty_like(q).copy_(total)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Optional[Tensor], ...]:
        (q, k, v, out, lse), ring = ctx.saved_tensors, ctx.ring
        dq = torch.zeros_like(q, dtype=lse.dtype)
        here = torch.stack([k, v])
        leaving = here.new_empty(0)
        for step in range(ring.ranks):
            coming, arriving = ring.room(here, step + 1), torch.empty_like(here, dtype=lse.dtype)
            # Sums of dK and dV follow their keys one step behind: they are on their way while this rank computes what
            # it will add to those that come.
            more, sums = step + 1 < ring.ranks, step > 0
            works = ring.begin([here] * more + [leaving] * sums, [coming] * more + [arriving] * sums)
            mine = torch.zeros_like(arriving)
            for rows, keys, ask in ring.pieces(step):
                part = q[:, :, rows], *here[:, :, :, keys]
                plan = plan_for(*part, ask)
                # With the L of all keys a pair's P and dS are the whole problem's.
                own_dq, *own = plan.backward(d_out[:, :, rows], *part, out[:, :, rows], lse[:, :, rows], None, None)
                dq[:, :, rows] += own_dq
                for to, gradient in zip(mine, own):
                    to[:, :, keys] += gradient
            _wait(works)
            leaving, here = mine.add_(arriving) if sums else mine, coming
        # After P - 1 moves the sums are complete, but one rank short of home. They go as what they will be.
        home = k.new_empty(2, *k.shape)
        _wait(ring.begin([leaving.to(k.dtype)], [home]))
        return *(empty_like(x).copy_(total) for x, total in ((q, dq), (k, home[0]), (v, home[1]))), None


# ---- arguments, and that all ranks have the same ones (entry.cpp) -------------------------------

def _place(group: Group) -> tuple[dist.ProcessGroup, int, int]:
    """The group, its ranks, and which of them this is."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("ring_attention wants a process group: torch.distributed.init_process_group() comes first")
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not in the group")
    return group, dist.get_world_size(group), dist.get_rank(group)


def _check_order(order: str) -> None:
    if order not in ("zigzag", "contiguous"):
        raise ValueError(f"order must be 'zigzag' or 'contiguous', got {order!r}")


def _asked(q: Tensor, k: Tensor, v: Tensor, causal: Any, scale: Optional[float], deterministic: bool, layout: str,
           kernel: str) -> tuple[Ask, torch.dtype, torch.dtype]:
    """The choices of a call that the kernels take, the type of the work, and of the result."""
    ask = check(q, k, v, causal, scale, None, None, 0.0, deterministic, layout, kernel)
    to = given = q.dtype
    if _autocast(q) and q.dtype != torch.float64:
        given = torch.get_autocast_dtype(q.device.type)
        to = torch.float32 if q.device.type == "cpu" and kernel[:2] != "06" else given
    elif not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one type, got {q.dtype}, {k.dtype} and {v.dtype}")
    if why := cannot(q.to(to), v, ask):
        raise Cannot(why)
    if choose(kernel, to, q.device.type).forward.stage == 0:
        raise Cannot("00.naive gives no log-sum-exp, by which the results of a ring's steps are merged; stage 01 does")
    return ask, to, given


class _Told(NamedTuple):
    """What a rank tells the others before the first step."""

    called: str = ""
    rows: tuple[int, int] = (0, 0)
    wrong: str = ""


def _told(q: Tensor, k: Tensor, v: Tensor, ask: Ask, to: torch.dtype, order: str) -> _Told:
    heads, rows = (2, 1) if ask.bnhd else (1, 2)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    words = (f"B={q.shape[0]}, Hq={q.shape[heads]}, Hkv={k.shape[heads]}, d={q.shape[3]}, {to}, causal={ask.causal}, "
             f"scale={ask.scale}, kernel={ask.kernel}, deterministic={ask.deterministic}, order={order}, "
             f"{'with' if gradients else 'without'} gradients")
    return _Told(words, (q.shape[rows], k.shape[rows]))


def _agree(group: dist.ProcessGroup, ranks: int, order: str, told: _Told,
           wrong: Optional[Exception]) -> tuple[int, int]:
    """(Nq, Nk) of the whole sequence. Raises on every rank, unless all ranks' arguments are right and fit together."""
    all_told: list[Any] = [None] * ranks
    dist.all_gather_object(all_told, told, group)
    if wrong:
        raise wrong
    for rank, other in enumerate(all_told):
        if other.wrong:
            raise ValueError(f"ring_attention: rank {rank} was called with a bad argument: {other.wrong}")
    for rank, other in enumerate(all_told):
        if other.called != all_told[0].called:
            raise ValueError("ring_attention: all ranks must be called with the same problem; rank 0 has "
                             f"'{all_told[0].called}', rank {rank} has '{other.called}'")
    lengths = sum(other.rows[0] for other in all_told), sum(other.rows[1] for other in all_told)
    for rank, other in enumerate(all_told):
        _check_rows(rank, other.rows, lengths, ranks, order)
    return lengths


def _check_rows(rank: int, rows: tuple[int, int], lengths: tuple[int, int], ranks: int, order: str) -> None:
    for name, have, N in zip(("queries", "keys"), rows, lengths):
        want = rows_of(N, ranks, rank, order)
        if have != want:
            raise ValueError(f"ring_attention: of {N} {name} on {ranks} ranks, {order}, rank {rank} holds {want}, "
                             f"got {have}; ring_rows() says which")
