"""What PyTorch asks of an operator: opcheck, torch.compile, fake tensors, autocast, modes."""

from __future__ import annotations

import shutil
import unittest
import warnings
from typing import Any

from reference import Case, tensors, torch

import flash_from_scratch
from flash_from_scratch import attention
from flash_from_scratch import _operators as operators

CHOICES = (1, None, "best", False, False, -1, -1, 0.0)


class Operators(Case):
    def test_opcheck(self) -> None:
        for dtype in (torch.float32, torch.float64):
            for bnhd in (False, True):
                for lengths in (None, torch.tensor([50, 3])):
                    choices = (2, 0.4, "best", False, bnhd, -1, -1, 0.0)
                    inputs = tensors(dtype=dtype, layout="bnhd" if bnhd else "bhnd", grad=True)
                    torch.library.opcheck(operators.attention, (*inputs, lengths, None, *choices))
                    detached = [x.detach() for x in inputs]
                    out, lse = operators.attention(*detached, lengths, None, *choices)
                    torch.library.opcheck(operators.attention_backward,
                                          (torch.ones_like(out), *detached, out, lse, lengths, None, *choices))
        strided = [x.transpose(1, 2).requires_grad_() for x in tensors(layout="bnhd")]
        torch.library.opcheck(operators.attention, (*strided, None, None, *CHOICES))

    def test_fake_tensors_tell_shapes_and_strides(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        inputs = [x.transpose(1, 2) for x in tensors(layout="bnhd")]
        real = attention(*inputs)
        with FakeTensorMode() as mode:
            fake = attention(*(mode.from_tensor(x) for x in inputs))
        self.assertEqual((fake.shape, fake.stride(), fake.dtype), (real.shape, real.stride(), real.dtype))


class Compiled(Case):
    def setUp(self) -> None:
        torch._dynamo.reset()

    def same(self, compiled: Any, plain: Any, inputs: list[Any], **choices: Any) -> None:
        out, want = compiled(*inputs, **choices), plain(*inputs, **choices)
        self.close(out.detach(), want.detach(), 1e-6)
        for ours, theirs in zip(*(torch.autograd.grad(one.square().sum(), inputs) for one in (out, want))):
            self.close(ours, theirs, 1e-5)

    def test_without_a_break(self) -> None:
        def layer(q: Any, k: Any, v: Any, **choices: Any) -> Any:
            return attention(q * 2, k + 1, v, **choices) * 3

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for choices in ({}, {"causal": True}, {"causal": "bottom_right", "scale": 0.3},
                        {"key_lengths": torch.tensor([50, 20])}, {"kernel": "01"},
                        {"dropout": 0.0, "fallback": True, "deterministic": True}):
            self.same(compiled, layer, tensors(grad=True), **choices)
        self.same(compiled, layer, tensors(layout="bnhd", grad=True), layout="bnhd")

    def test_dynamic_shapes(self) -> None:
        compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
        counter = torch._dynamo.utils.counters["stats"]
        counter.clear()
        for Nq, Nk in ((37, 50), (38, 60), (100, 100), (64, 128)):
            self.same(compiled, attention, tensors(Nq=Nq, Nk=Nk, grad=True), causal=True)
        self.assertLessEqual(counter["unique_graphs"], 2, "a graph for each length")

    def test_a_fallback_is_compiled_too(self) -> None:
        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.same(compiled, attention, tensors(grad=True), window=(3, 0), causal=True, fallback=True,
                      key_lengths=torch.tensor([9, 0]))

    @unittest.skipUnless(shutil.which("g++") or shutil.which("clang++"), "no C++ compiler for PyTorch's own")
    def test_pytorchs_own_compiler(self) -> None:
        self.same(torch.compile(attention, fullgraph=True), attention, tensors(grad=True), causal=True)


class Modes(Case):
    def test_autocast(self) -> None:
        inputs = tensors(grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attention(*inputs, causal=True)
            half = attention(*(x.bfloat16() for x in inputs), causal=True)
        self.assertEqual((out.dtype, half.dtype), (torch.bfloat16, torch.bfloat16))
        self.close(out.detach(), attention(*inputs, causal=True).detach())
        out.sum().backward()
        self.assertEqual(inputs[0].grad.dtype, torch.float32)

    def test_inference_mode_and_default_device(self) -> None:
        inputs = tensors()
        want = attention(*inputs)
        with torch.inference_mode():
            self.assertTrue(torch.equal(attention(*inputs), want))
        with torch.device("cpu"):
            self.assertTrue(torch.equal(attention(*inputs), want))

    def test_deterministic_algorithms(self) -> None:
        torch.use_deterministic_algorithms(True)
        try:
            attention(*(inputs := tensors(grad=True))).sum().backward()
            self.assertIsNotNone(inputs[0].grad)
        finally:
            torch.use_deterministic_algorithms(False)

    def test_a_subclass_is_seen(self) -> None:
        seen = []

        class Watched(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(str(function))
                return super().__torch_function__(function, types, args, kwargs or {})

        attention(*(x.as_subclass(Watched) for x in tensors()))
        self.assertTrue(any("flash_from_scratch" in name for name in seen), seen)

    def test_a_model_moves_and_copies(self) -> None:
        self.assertTrue(callable(flash_from_scratch.attention))
        parameters = [torch.nn.Parameter(x) for x in tensors()]
        attention(*parameters).sum().backward()
        self.assertTrue(all(one.grad is not None for one in parameters))


if __name__ == "__main__":
    unittest.main()
