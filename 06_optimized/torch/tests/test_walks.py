"""window= and dropout=, by the walks of 06_optimized/beyond: on a GPU where one is, else on the emulator."""

from __future__ import annotations

import shutil
import unittest
from typing import Any

from reference import Case, reference, tensors, torch

from flash_from_scratch import attention
from flash_from_scratch import _operators as operators
from flash_from_scratch._library import library

GPU = torch.cuda.is_available() and any(one.device == "cuda" for one in library().kernels)
EMULATED = any(one.name == "beyond.masks" and one.device == "cpu" for one in library().kernels)
DEVICE = "cuda" if GPU else "cpu"
TYPES = (torch.float32, torch.float16, torch.bfloat16)


def on_device(**sizes: Any) -> list[torch.Tensor]:
    return tensors(device=DEVICE, **sizes)


def seeded(seed: int) -> Any:
    def attend(*inputs: torch.Tensor, **choices: Any) -> torch.Tensor:
        torch.manual_seed(seed)
        return attention(*inputs, kernel="06", **choices)
    return attend


@unittest.skipUnless(GPU or EMULATED, "this library has kernels for GPUs alone, and no GPU answers")
class Windows(Case):
    def test_values_and_gradients(self) -> None:
        some = torch.tensor([50, 7], device=DEVICE)
        for dtype in TYPES:
            for causal in (False, "top_left", "bottom_right"):
                for window in ((3, 0), (0, 2), (None, 1), (20, None), 4):
                    for lengths in (None, some):
                        self.agrees(attention, on_device(dtype=dtype, grad=True), kernel="06", causal=causal,
                                    window=window, key_lengths=lengths)
            inputs = on_device(dtype=dtype, layout="bnhd", grad=True)
            self.agrees(attention, inputs, kernel="06", window=(5, 3), layout="bnhd")
            self.agrees(attention, on_device(dtype=dtype, d=100, grad=True), kernel="06", window=(0, 0), scale=0.3)

    def test_sizes(self) -> None:
        # More queries than keys: at the bottom right some rows see nothing. And several tiles.
        for Nq, Nk in ((130, 70), (1, 200), (150, 300), (5, 0), (0, 5)):
            for causal in (False, "bottom_right"):
                for dtype in TYPES[::2]:
                    inputs = on_device(B=1, Nq=Nq, Nk=Nk, dtype=dtype, grad=True)
                    self.agrees(attention, inputs, kernel="06", causal=causal, window=(9, 17),
                                words=f"{Nq} x {Nk}, {causal}")

    def test_a_window_that_hides_nothing_is_the_plain_kernel(self) -> None:
        inputs = on_device(dtype=torch.bfloat16)
        for causal in (False, True):
            plain = attention(*inputs, kernel="06.fa2", causal=causal)
            self.assertTrue(torch.equal(attention(*inputs, kernel="06", causal=causal, window=60), plain))
            self.assertTrue(torch.equal(attention(*inputs, kernel="beyond.masks", causal=causal), plain))

    def test_behind_a_causal_row_there_is_nothing_to_hide(self) -> None:
        inputs = on_device()
        self.assertTrue(torch.equal(attention(*inputs, kernel="06", causal=True, window=(3, 5)),
                                    attention(*inputs, kernel="06", causal=True, window=(3, 0))))

    def test_what_it_cannot_take(self) -> None:
        for words, dtype, sizes, choices in (
                ("beyond.masks takes bfloat16 and float and half, got double", torch.float64, {}, {}),
                ("d must be at most 128 here, got 136", torch.float32, {"d": 136}, {}),
                ("d must be at most 256 here, got 264", torch.float16, {"d": 264}, {}),
                ("wants scale > 0", torch.float16, {}, {"scale": -1.0}),
                ("06.fa2 has no window=", torch.float16, {}, {"kernel": "06.fa2"}),
                ("06.backward_swizzle has no window=", torch.float16, {}, {"kernel": "06, 06.backward_swizzle"})):
            with self.assertRaisesRegex(ValueError, words):
                attention(*on_device(dtype=dtype, **sizes), **{"kernel": "06", "window": 3, **choices})
        self.agrees(attention, on_device(grad=True), kernel="06", window=3, scale=-0.5)


@unittest.skipUnless(GPU or EMULATED, "this library has kernels for GPUs alone, and no GPU answers")
class Dropout(Case):
    """With equal scores and V = 1 a result is the factors of the weights themselves: 0, or what those kept grow by."""

    def factors(self, p: float, seed: int) -> torch.Tensor:
        q, k, _ = on_device(d=64)
        v = torch.eye(50, 64, device=DEVICE).expand(2, 2, 50, 64)
        return 50 * seeded(seed)(0 * q, 0 * k, v, dropout=p)[..., :50]

    def test_which_are_kept(self) -> None:
        for p in (0.1, 0.5, 0.9):
            share = round((1 - p) * 65536) / 65536
            factors = self.factors(p, seed=5)
            kept = factors > 0
            self.close(factors, kept / share, 1e-5)
            self.assertLess(abs(kept.double().mean().item() - share), 4 * (share * (1 - share) / kept.numel()) ** 0.5)
            one = kept.flatten(0, 1).flatten(1).unbind()  # of each head and batch entry, and each is another
            for other in (*one[1:], (self.factors(p, seed=6) > 0)[0, 0].flatten()):
                self.assertLess((other == one[0]).double().mean().item(), share ** 2 + (1 - share) ** 2 + 0.05)
            self.assertTrue(torch.equal(factors, self.factors(p, seed=5)))

    def test_values_and_gradients(self) -> None:
        # The factors are those of places alone: the forward tells them, and the backward must have the same.
        factors = self.factors(0.3, seed=5).double()
        some = torch.tensor([50, 7], device=DEVICE)
        for dtype in TYPES:
            for causal in (False, "top_left", "bottom_right"):
                for lengths in (None, some):
                    for layout in ("bhnd", "bnhd"):
                        inputs = on_device(dtype=dtype, layout=layout, grad=True)
                        self.agrees(seeded(5), inputs, factors=factors, dropout=0.3, causal=causal, key_lengths=lengths,
                                    layout=layout)

    def test_the_mean_is_what_it_was(self) -> None:
        inputs = on_device(B=1, Hq=1, Hkv=1, Nq=8, Nk=20)
        torch.manual_seed(2)
        outs = torch.stack([attention(*inputs, kernel="06", dropout=0.4) for _ in range(200)]).double()
        off = (outs.mean(0) - reference(*inputs)).abs() / (outs.std(0) / 200 ** 0.5)
        self.assertLess(off.max().item(), 4.5)  # of 128 numbers, in their own standard errors

    def test_the_generator_decides(self) -> None:
        inputs = on_device(grad=True)
        torch.manual_seed(4)
        first, second = (attention(*inputs, kernel="06", dropout=0.2) for _ in range(2))
        again = seeded(4)(*inputs, dropout=0.2)
        self.assertTrue(torch.equal(first, again))
        self.assertGreater((first - second).abs().max().item(), 0.01)
        for ours, theirs in zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in (first, again))):
            self.assertTrue(torch.equal(ours, theirs))
        want = torch.autograd.grad(seeded(4)(*inputs, dropout=0.2).square().sum(), inputs)
        torch.manual_seed(4)
        checkpointed = torch.utils.checkpoint.checkpoint(
            lambda *x: attention(*x, kernel="06", dropout=0.2), *inputs, use_reentrant=False)
        attention(*inputs, kernel="06", dropout=0.2)  # somebody else draws in between
        for ours, theirs in zip(torch.autograd.grad(checkpointed.square().sum(), inputs), want):
            self.assertTrue(torch.equal(ours, theirs))

    def test_of_a_mask_the_seed_is_kept(self) -> None:
        kept: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(tuple(x.shape)), x)[1], lambda x: x):
            attention(*on_device(grad=True), kernel="06", dropout=0.1)
        q, k = (2, 4, 37, 16), (2, 2, 50, 16)
        self.assertEqual(sorted(kept), sorted([q, k, k, q, (2, 4, 37), (2,)]))

    def test_what_it_cannot_take(self) -> None:
        inputs = on_device()
        with self.assertRaisesRegex(ValueError, "dropout wants a seed, two integers, got none"):
            operators.attention(*inputs, None, None, 0, None, "06", False, False, -1, -1, 0.1)
        with self.assertRaisesRegex(ValueError, "beyond.dropout takes bfloat16 and float and half, got double"):
            attention(*on_device(dtype=torch.float64), kernel="06", dropout=0.1)


@unittest.skipUnless(GPU or EMULATED, "this library has kernels for GPUs alone, and no GPU answers")
class Operators(Case):
    def setUp(self) -> None:
        torch._dynamo.reset()

    def test_opcheck(self) -> None:
        seed = torch.tensor([7, 1], device=DEVICE)
        for given, choices in ((None, (2, 0.4, "06", False, False, 3, 0, 0.0)),
                               (seed, (1, None, "06", False, False, -1, -1, 0.2))):
            inputs = on_device(grad=True)
            torch.library.opcheck(operators.attention, (*inputs, None, given, *choices))
            detached = [x.detach() for x in inputs]
            out, lse = operators.attention(*detached, None, given, *choices)
            torch.library.opcheck(operators.attention_backward,
                                  (torch.ones_like(out), *detached, out, lse, None, given, *choices))

    def test_compiled_windows(self) -> None:
        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        for causal in (False, True):
            self.agrees(compiled, on_device(grad=True), kernel="06", window=(4, 2), causal=causal)

    def draws_anew(self, compiled: Any) -> None:
        inputs = on_device(grad=True)
        outs = [compiled(*inputs) for _ in range(2)]
        self.assertGreater((outs[0] - outs[1]).abs().max().item(), 0.01)
        for out in outs:
            self.has_one_mask(out.detach(), torch.autograd.grad(out, inputs[2], out.detach())[0], inputs[2].detach())

    def test_compiled_dropout(self) -> None:
        self.draws_anew(torch.compile(lambda q, k, v: attention(q, k, v, kernel="06", dropout=0.3), fullgraph=True,
                                      backend="aot_eager"))

    @unittest.skipUnless(shutil.which("g++") or shutil.which("clang++"), "no C++ compiler for PyTorch's own")
    def test_dropout_by_pytorchs_own_compiler(self) -> None:
        self.draws_anew(torch.compile(lambda q, k, v: attention(q, k, v, kernel="06", dropout=0.3), fullgraph=True))


if __name__ == "__main__":
    unittest.main()
