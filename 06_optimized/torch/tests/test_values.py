"""The result and the gradients: masks, groups, layouts, strides, sizes, and every kernel for the CPU by name."""

from __future__ import annotations

import unittest

from reference import Case, reference, tensors, torch

from flash_from_scratch import attention, kernels

BOTH = (torch.float32, torch.float64)


class Values(Case):
    def test_masks_groups_and_layouts(self) -> None:
        for dtype in BOTH:
            for causal in (False, True, "top_left", "bottom_right"):
                for lengths in (None, torch.tensor([50, 23]), torch.tensor([1, 0], dtype=torch.int32)):
                    for Hq, Hkv in ((3, 3), (4, 2), (4, 1)):
                        for layout in ("bhnd", "bnhd"):
                            inputs = tensors(Hq=Hq, Hkv=Hkv, dtype=dtype, layout=layout, grad=True)
                            self.agrees(attention, inputs, causal=causal, key_lengths=lengths, layout=layout)

    def test_sizes(self) -> None:
        for Nq, Nk in ((1, 1), (1, 200), (65, 64), (130, 3), (5, 0), (0, 7)):
            for causal in (False, "top_left", "bottom_right"):
                inputs = tensors(Nq=Nq, Nk=Nk, grad=True)
                self.agrees(attention, inputs, causal=causal, words=f"{Nq} x {Nk}, {causal}")
        self.agrees(attention, tensors(B=0, grad=True))
        for d in (1, 5, 64, 80, 128, 512):
            self.agrees(attention, tensors(d=d, grad=True), words=f"d = {d}")

    def test_scale(self) -> None:
        for scale in (1, 0.3, 0.0, -2.0):
            self.agrees(attention, tensors(grad=True), scale=scale)

    def test_every_kernel_for_the_cpu(self) -> None:
        for name in ("00_naive", "01_safe_softmax", "02", "02.rows", "02.lanes", "03", "03_tiled_cpu", "03.fast", "05", "best",
                     "03.tiled, 05.on_cpu"):
            causal = name != "00_naive"
            self.agrees(attention, tensors(grad=True, d=32), kernel=name, causal=causal)
        self.assertIn("02.lanes", kernels())

    def test_stages_00_to_03_differ_by_rounding_alone(self) -> None:
        inputs = tensors(dtype=torch.float64)
        first = attention(*inputs, kernel="00")
        for name in ("01", "02", "03"):
            self.close(attention(*inputs, kernel=name), first, 1e-14, name)


class Places(Case):
    """Where the numbers lie must not matter, and what can be read in place is."""

    def test_strides(self) -> None:
        q, k, v = tensors(Hq=4, Hkv=4, Nq=21, Nk=21, layout="bnhd")
        packed = torch.stack([q, k, v], dim=2)  # [B, N, 3, H, d], as a projection of all three gives it
        parts = [part.transpose(1, 2).requires_grad_() for part in packed.unbind(2)]
        self.agrees(attention, parts, causal=True, words="slices of a packed tensor")
        self.agrees(attention, [x.requires_grad_() for x in packed.unbind(2)], causal=True, layout="bnhd")
        self.agrees(attention, [tensors()[0], *(x[:, :1].expand(2, 4, 50, 16) for x in tensors()[1:])], words="expanded heads")
        self.agrees(attention, [x[:1].expand(2, -1, -1, -1) for x in tensors()], words="expanded batch")
        self.agrees(attention, [x[..., 3:11] for x in tensors()], words="unaligned slices")
        self.agrees(attention, [x.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in tensors()],
                    words="columns in one piece")

    def test_the_result_lies_as_q_does(self) -> None:
        q, k, v = (x.transpose(1, 2) for x in tensors(layout="bnhd"))
        self.assertEqual(attention(q, k, v).stride(), q.stride())
        self.assertTrue(attention(*tensors(layout="bnhd"), layout="bnhd").is_contiguous())

    def test_gradients_of_what_is_expanded(self) -> None:
        q, k, v = tensors(Hq=4, Hkv=1, grad=True)
        self.agrees(lambda q, k, v: attention(q, k.expand(2, 4, 50, 16), v.expand(2, 4, 50, 16)), [q, k, v])

    def test_a_gradient_that_is_one_number(self) -> None:
        inputs = tensors(grad=True)
        got = torch.autograd.grad(attention(*inputs).sum(), inputs)  # dO is one number, expanded
        want = torch.autograd.grad(reference(*inputs).sum(), inputs)
        for ours, theirs in zip(got, want):
            self.close(ours, theirs, 1e-4)

    def test_some_inputs_want_no_gradient(self) -> None:
        for wanting in range(3):
            inputs = tensors()
            inputs[wanting].requires_grad_()
            attention(*inputs).sum().backward()
            self.assertEqual([x.grad is not None for x in inputs], [n == wanting for n in range(3)])

    def test_bits_do_not_depend_on_threads(self) -> None:
        inputs, threads = tensors(Nq=200, Nk=200), torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            one = attention(*inputs)
            torch.set_num_threads(2)
            self.assertTrue(torch.equal(one, attention(*inputs)))
        finally:
            torch.set_num_threads(threads)


if __name__ == "__main__":
    unittest.main()
