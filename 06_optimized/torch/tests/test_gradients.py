"""Gradients against differences, in double, for every mask and group; and what autograd may ask besides."""

from __future__ import annotations

import unittest

from reference import Case, tensors, torch

from flash_from_scratch import attention
from flash_from_scratch._operators import attention as operator


class Gradients(Case):
    def test_gradcheck(self) -> None:
        for causal in (False, "top_left", "bottom_right"):
            for lengths in (None, torch.tensor([5, 2])):
                for Hq, Hkv in ((2, 2), (2, 1)):
                    for layout in ("bhnd", "bnhd"):
                        inputs = tensors(Hq=Hq, Hkv=Hkv, Nq=3, Nk=5, d=4, dtype=torch.float64, layout=layout, grad=True)
                        self.assertTrue(torch.autograd.gradcheck(
                            lambda q, k, v: attention(q, k, v, causal, key_lengths=lengths, layout=layout), inputs))

    def test_gradcheck_of_00_and_of_the_operator(self) -> None:
        inputs = tensors(Nq=3, Nk=5, d=4, dtype=torch.float64, grad=True)
        self.assertTrue(torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, kernel="00"), inputs))
        self.assertTrue(torch.autograd.gradcheck(
            lambda q, k, v: operator(q, k, v, None, None, 1, 0.7, "best", False, False, -1, -1, 0.0)[0], inputs))

    def test_second_derivatives_are_refused_in_words(self) -> None:
        inputs, choices = tensors(grad=True), (0, None, "best", False, False, -1, -1, 0.0)
        for attend in (attention, lambda q, k, v: operator(q, k, v, None, None, *choices)[0]):
            first = torch.autograd.grad(attend(*inputs).square().sum(), inputs, create_graph=True)
            with self.assertRaisesRegex(RuntimeError, "second derivatives are not built in"):
                first[0].sum().backward()

    def test_forward_mode_is_refused(self) -> None:
        q, k, v = tensors()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(q.requires_grad_(), torch.ones_like(q))
            with self.assertRaises((RuntimeError, NotImplementedError)):
                attention(dual, k, v)

    def test_checkpoint_and_hooks(self) -> None:
        inputs = tensors(grad=True)
        want = torch.autograd.grad(attention(*inputs).square().sum(), inputs)
        again = torch.utils.checkpoint.checkpoint(attention, *inputs, use_reentrant=False)
        kept: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(tuple(x.shape)), x)[1], lambda x: x):
            hooked = attention(*inputs)
        for out in (again, hooked):
            for ours, theirs in zip(torch.autograd.grad(out.square().sum(), inputs), want):
                self.assertTrue(torch.equal(ours, theirs))
        # q, k, v, O and L: nothing of Nq x Nk.
        q, k = (2, 4, 37, 16), (2, 2, 50, 16)
        self.assertEqual(sorted(kept), sorted([q, k, k, q, (2, 4, 37)]))

    def test_what_is_kept_may_come_back_in_another_order(self) -> None:
        # As save_on_cpu(pin_memory=True) does it: the same numbers, without the gaps and the order that they had.
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors()]
        want = torch.autograd.grad(attention(*inputs).square().sum(), inputs)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.contiguous()):
            out = attention(*inputs)
        for ours, theirs in zip(torch.autograd.grad(out.square().sum(), inputs), want):
            self.assertTrue(torch.equal(ours, theirs))

    def test_what_was_changed_in_between_is_noticed(self) -> None:
        q, k, v = tensors(grad=True)
        out = attention(q, k, v)
        with torch.no_grad():
            k.add_(1)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            out.sum().backward()


if __name__ == "__main__":
    unittest.main()
