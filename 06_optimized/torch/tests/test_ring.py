"""ring_attention() on ranks that are processes: over gloo on the CPU, over NCCL where two GPUs are."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import time
import unittest
import warnings
from collections.abc import Callable
from typing import Any, Optional

import torch.distributed as dist
import torch.multiprocessing
from reference import TOLERANCE, Case, reference, tensors, torch

from flash_from_scratch import attention, ring_attention, ring_rows
from flash_from_scratch._library import library
from flash_from_scratch._ring import Piece, blocks_of, pieces_of

CAUSAL = (False, "top_left", "bottom_right")
# [Nq, Nk]: that divide, that do not, fewer rows than blocks, more queries than keys, and one of them alone.
LENGTHS = ((48, 48), (37, 50), (50, 37), (3, 5), (0, 7), (7, 0))


# What a group does, in each of its processes; a failed assertion there fails the test.

class Ranks(Case):
    """Within a process: groups of 1 to all ranks, and whole problems that are dealt out."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.me, self.world = device, dist.get_rank(), dist.get_world_size()
        # As torch.distributed wants it, all processes make all groups, in the same order.
        self.groups = [dist.new_group(list(range(ranks))) for ranks in range(1, self.world + 1)]

    def mine(self) -> list[Any]:
        return self.groups[self.me:]

    def dealt(self, whole: list[Any], group: Any, layout: str = "bhnd",
              order: str = "zigzag") -> tuple[list[Any], list[Any]]:
        """This rank's rows of q, k and v, and which they are."""
        at = 2 if layout == "bhnd" else 1
        rows = [ring_rows(x.shape[at], group, order).to(x.device) for x in whole]
        return [x.detach().index_select(at, row).requires_grad_(x.requires_grad) for x, row in zip(whole, rows)], rows

    def same_as_whole(self, group: Any, dtype: Any, tolerance: Optional[float] = None, order: str = "zigzag",
                      layout: str = "bhnd", kernel: str = "best", told: bool = True, d: int = 16,
                      lengths: tuple[int, int] = (37, 50), heads: tuple[int, int] = (4, 2), **choices: Any) -> None:
        words = f"{dist.get_world_size(group)} ranks, {dtype}, {order}, {layout}, {lengths}, {choices}"
        at = 2 if layout == "bhnd" else 1
        whole = tensors(2, *heads, *lengths, d, dtype, layout, grad=True, device=self.device)
        part, rows = self.dealt(whole, group, layout, order)
        out = ring_attention(*part, group, order=order, layout=layout, kernel=kernel, lengths=None if told else lengths,
                             **choices)
        want = reference(*whole, layout=layout, causal=choices.get("causal", False), scale=choices.get("scale"))
        up = torch.randn(want.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(self.device)
        own_up = up.index_select(at, rows[0])
        got = torch.autograd.grad(out, part, own_up.to(out.dtype))
        expected = torch.autograd.grad(want, whole, up)
        self.assertEqual(out.dtype, dtype)
        self.close(out.detach(), want.detach().index_select(at, rows[0]), tolerance, f"O, {words}")
        for name, ours, theirs, row in zip(("dQ", "dK", "dV"), got, expected, rows):
            self.close(ours, theirs.index_select(at, row), 4 * (tolerance or TOLERANCE[dtype]), f"{name}, {words}")

    def refused(self, words: str, call: Callable[[], Any], kind: Any = ValueError) -> None:
        with self.assertRaisesRegex(kind, words) as caught:
            call()
        self.assertNotIn("\n", str(caught.exception))


def values(case: Ranks) -> None:
    for group in case.mine():
        for causal in CAUSAL:
            for lengths in LENGTHS:
                case.same_as_whole(group, torch.float32, causal=causal, lengths=lengths)
            case.same_as_whole(group, torch.float64, causal=causal, order="contiguous", layout="bnhd", scale=0.3)
        case.same_as_whole(group, torch.float32, causal=True, heads=(4, 1), deterministic=True, told=False)


def one_rank(case: Ranks) -> None:
    if case.me == 0:
        q, k, v = tensors(grad=True)
        ours, whole = ring_attention(q, k, v, case.groups[0], causal=True), attention(q, k, v, causal=True)
        case.assertTrue(torch.equal(ours, whole))
        for a, b in zip(*(torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (ours, whole))):
            case.assertTrue(torch.equal(a, b))


def every_run(case: Ranks) -> None:
    """A ring adds up in one order, whoever is late."""
    group = case.groups[-1]
    part, _ = case.dealt(tensors(Nq=64, Nk=64, grad=True), group)
    runs = []
    for _ in range(2):
        out = ring_attention(*part, group, causal=True, deterministic=True)
        runs.append((out, *torch.autograd.grad(out.square().sum(), part)))
    for a, b in zip(*runs):
        case.assertTrue(torch.equal(a, b))


def differences(case: Ranks) -> None:
    """Of all ranks' results, for each number of a rank's q, k and v: what gradcheck does, on more than one rank."""
    group = case.groups[1]
    if case.me > 1:
        return
    part, _ = case.dealt(tensors(B=1, Hq=2, Hkv=1, Nq=5, Nk=6, d=3, dtype=torch.float64, grad=True), group)

    def total() -> Any:
        out = ring_attention(*part, group, causal="bottom_right")
        weights = torch.arange(1, out.numel() + 1, dtype=out.dtype).view(out.shape).sin()
        return (out * weights).sum()

    gradients = torch.autograd.grad(total(), part)
    for mover in range(2):  # one rank moves its numbers, one by one; both compute
        counts = [x.numel() for x in part]
        dist.broadcast_object_list(counts_of := [counts], mover, group)
        for which, count in enumerate(counts_of[0]):
            for at in range(count):
                ends = []
                for by in (1e-5, -1e-5):
                    with torch.no_grad():
                        moved = part[which].view(-1)
                        before = moved[at].clone() if mover == case.me else None
                        if before is not None:
                            moved[at] += by
                        end = total()
                        if before is not None:
                            moved[at] = before
                    dist.all_reduce(end, group=group)
                    ends.append(end.item())
                if mover == case.me:
                    slope = (ends[0] - ends[1]) / 2e-5
                    case.assertAlmostEqual(gradients[which].reshape(-1)[at].item(), slope, delta=1e-8)


def words(case: Ranks) -> None:
    group, me = case.groups[-1], case.me
    q, k, v = case.dealt(tensors(Nq=32, Nk=32), group)[0]
    bad = k[..., :8] if me == 1 else k
    case.refused("q and k must have the same d, got 16 and 8" if me == 1 else
                 "rank 1 was called with a bad argument: ValueError: q and k must have the same d, got 16 and 8",
                 lambda: ring_attention(q, bad, v, group))
    case.refused("all ranks must be called with the same problem; rank 0 has .*causal=1.*, rank 2 has .*causal=0",
                 lambda: ring_attention(q, k, v, group, causal=me != 2))
    case.refused("with the same problem; rank 0 has .*with gradients', rank 3 has .*without gradients",
                 lambda: ring_attention(q.clone().requires_grad_(me != 3), k, v, group))
    case.refused("of 31 queries on 4 ranks, zigzag, rank . holds",
                 lambda: ring_attention(q[:, :, me == 3:], k, v, group))
    case.refused(r"of 48 keys on 4 ranks, zigzag, rank . holds 12, got 8; ring_rows\(\) says which",
                 lambda: ring_attention(q, k, v, group, lengths=(32, 48)))
    case.refused("order must be 'zigzag' or 'contiguous', got 'striped'",
                 lambda: ring_attention(q, k, v, group, order="striped"))
    case.refused("stage 01 does", lambda: ring_attention(q, k, v, group, kernel="00"))
    case.refused("no kernel is called '07'", lambda: ring_attention(q, k, v, group, kernel="07"))
    if me == 3:
        case.refused("not in the group", lambda: ring_attention(q, k, v, case.groups[0]))
        case.refused(r"rank must lie in \[0, 4\), got 3 and 4", lambda: ring_rows(3, group, rank=4))
    x, y, z = (one.double().requires_grad_() for one in (q, k, v))
    first = torch.autograd.grad(ring_attention(x, y, z, group).square().sum(), x, create_graph=True)[0]
    case.refused("differentiate twice|once_differentiable", lambda: first.sum().backward(), RuntimeError)
    case.same_as_whole(group, torch.float32)  # after all that the group still works


def a_rank_dies(case: Ranks) -> None:
    """Between forward and backward: the others' backward must not hang, and must not claim gradients."""
    group = case.groups[-1]
    part, _ = case.dealt(tensors(Nq=32, Nk=32, grad=True), group)
    out = ring_attention(*part, group, causal=True)
    if case.me == 1:
        os._exit(0)
    began = time.monotonic()
    with case.assertRaises(RuntimeError):
        out.square().sum().backward()
    case.assertLess(time.monotonic() - began, 20)
    case.assertTrue(all(x.grad is None for x in part))


def citizens(case: Ranks) -> None:
    """What happens around a call: a compiler, autocast, more than one layer."""
    group = case.groups[-1]
    part, _ = case.dealt(tensors(Nq=40, Nk=40, grad=True), group)

    def two_layers(q: Any, k: Any, v: Any) -> Any:
        return ring_attention(ring_attention(q, k, v, group, causal=True).sin(), k, v, group, causal=True)

    plain = two_layers(*part)
    compiled = torch.compile(two_layers, backend="eager")(*part)
    case.assertTrue(torch.equal(plain, compiled))
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), part) for out in (plain, compiled))):
        case.assertTrue(torch.equal(a, b))
    with torch.autocast("cpu", torch.bfloat16):
        out = ring_attention(*part, group, causal=True)
    case.assertEqual(out.dtype, torch.bfloat16)
    case.close(out.detach(), ring_attention(*part, group, causal=True).detach(), TOLERANCE[torch.bfloat16])


def on_gpus(case: Ranks) -> None:
    group = case.groups[-1]
    for causal in CAUSAL:
        for dtype in (torch.float16, torch.bfloat16):
            for d in (64, 128):
                for lengths in ((1024, 1024), (700, 1300)):
                    case.same_as_whole(group, dtype, causal=causal, lengths=lengths, d=d, heads=(4, 2))
    case.same_as_whole(group, torch.float32, causal=True, lengths=(500, 700), d=64)
    # Against one GPU, and twice in the same bits.
    torch.manual_seed(0)
    whole = [torch.randn(1, 8, 8192, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    for x in whole:
        dist.broadcast(x.detach(), 0)
    part, rows = case.dealt(whole, group)
    one = attention(*whole, causal=True)
    wanted = torch.autograd.grad(one, whole, one.detach())
    runs = []
    for _ in range(2):
        out = ring_attention(*part, group, causal=True, deterministic=True)
        runs.append((out.detach(), *torch.autograd.grad(out, part, one.detach()[:, :, rows[0]])))
    for name, a, b, want, row in zip(("O", "dQ", "dK", "dV"), *runs, (one.detach(), *wanted), (rows[0], *rows)):
        case.assertTrue(torch.equal(a, b), name)
        case.close(a, want[:, :, row], TOLERANCE[torch.bfloat16], f"{name}, against one GPU")


def emulated(case: Ranks) -> None:
    for group in case.mine()[:2]:
        if dist.get_world_size(group) < 3:
            case.same_as_whole(group, torch.bfloat16, causal=True, lengths=(40, 40), heads=(2, 1), kernel="06", d=32)


# A process of a group.

def process(me: int, ranks: int, place: str, device: str, work: Callable[[Ranks], None]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(me)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{place}", rank=me,
                            world_size=ranks, timeout=datetime.timedelta(seconds=10 if work is a_rank_dies else 60))
    try:
        work(Ranks(device))
    finally:
        dist.destroy_process_group()


def together(ranks: int, work: Callable[[Ranks], None], device: str = "cpu") -> None:
    how = "spawn" if device == "cuda" else "forkserver"  # a server imports PyTorch once; CUDA survives no fork
    multiprocessing.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(process, (ranks, f"{folder}/store", device, work), ranks,
                                              start_method=how)


@unittest.skipUnless(dist.is_available() and dist.is_gloo_available(), "this PyTorch has no gloo")
class OnTheCpu(unittest.TestCase):
    def test_masks_lengths_orders_groups_and_types(self) -> None:
        together(4, values)

    def test_one_rank_gets_the_bits_of_attention_and_all_the_same_in_every_run(self) -> None:
        together(2, one_rank)
        together(2, every_run)

    def test_gradients_are_differences(self) -> None:
        together(2, differences)

    def test_words(self) -> None:
        together(4, words)

    def test_a_rank_that_dies(self) -> None:
        together(3, a_rank_dies)

    def test_compiled_and_autocast(self) -> None:
        together(2, citizens)

    @unittest.skipUnless(any(one.device == "cpu" and one.name.startswith("06") for one in library().kernels),
                         "this library was built with nvcc: no emulator")
    def test_emulated(self) -> None:
        together(2, emulated)

    def test_without_a_group(self) -> None:
        with self.assertRaisesRegex(RuntimeError, r"wants a process group: .*init_process_group\(\) comes first"):
            ring_attention(*tensors())


class Deal(unittest.TestCase):
    """Who holds what, and which of it is seen: the same as 06_optimized/ring/blocks.cpp, whose tests know more."""

    def test_rows(self) -> None:
        for order in ("zigzag", "contiguous"):
            for N in range(20):
                for ranks in range(1, 9):
                    rows = [row for rank in range(ranks) for block in blocks_of(N, ranks, rank, order) for row in block]
                    self.assertEqual(sorted(rows), list(range(N)))
        self.assertEqual(blocks_of(16, 4, 1, "zigzag"), [range(2, 4), range(12, 14)])

    def test_pieces_are_what_is_seen(self) -> None:
        for Nq, Nk, ranks, shift in ((16, 16, 2, 0), (13, 18, 3, 5), (13, 18, 3, 0), (18, 13, 4, -5), (2, 3, 4, 1)):
            for order in ("zigzag", "contiguous"):
                for rank in range(ranks):
                    for owner in range(ranks):
                        queries, keys = blocks_of(Nq, ranks, rank, order), blocks_of(Nk, ranks, owner, order)
                        pieces = pieces_of(2, shift, queries, keys)
                        seen = self.pairs_of(pieces)
                        self.assertEqual(len(seen), len(set(seen)), "a pair is in two pieces")
                        flat = [j for block in keys for j in block]
                        want = [(row, column) for row, i in enumerate(i for block in queries for i in block)
                                for column, j in enumerate(flat) if j <= i + shift]
                        self.assertEqual(sorted(seen), want)

    def test_zigzag_is_one_piece_a_step(self) -> None:
        for rank in range(4):
            for owner in range(4):
                pieces = pieces_of(1, 0, blocks_of(64, 4, rank, "zigzag"), blocks_of(64, 4, owner, "zigzag"))
                self.assertEqual(len(pieces), 1)
                self.assertEqual(sum(1 for _ in self.pairs_of(pieces)), 136 if rank == owner else 128)

    @staticmethod
    def pairs_of(pieces: list[Piece]) -> list[tuple[int, int]]:
        pairs = []
        for piece in pieces:
            shift = {0: piece.keys, 1: 0, 2: piece.keys - piece.rows}[piece.causal]
            pairs += [(piece.row + i, j) for i in range(piece.rows) for j in range(piece.keys) if j <= i + shift]
        return pairs


@unittest.skipUnless(torch.cuda.device_count() > 1 and dist.is_nccl_available(), "fewer than two GPUs answer")
@unittest.skipUnless(any(one.device == "cuda" for one in library().kernels), "this library was built without nvcc")
class OnGpus(unittest.TestCase):
    def test_values(self) -> None:
        together(torch.cuda.device_count(), on_gpus, "cuda")


if __name__ == "__main__":
    unittest.main()
