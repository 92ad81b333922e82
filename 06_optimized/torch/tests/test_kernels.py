"""The kernels of 04, 05 and 06 by name: on a GPU, or on the emulator if the library was built without nvcc."""

from __future__ import annotations

import unittest
from typing import Any, Optional

from reference import Case, tensors, torch

from flash_from_scratch import attention
from flash_from_scratch._library import Kernel, library

GPU = torch.cuda.is_available() and any(one.device == "cuda" for one in library().kernels)
EMULATED = any(one.stage == 4 and one.device == "cpu" for one in library().kernels)
DEVICE = "cuda" if GPU else "cpu"
DTYPE = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}


def of_stage(stage: int, way: str) -> list[Kernel]:
    return [one for one in library().kernels
            if (one.stage, one.way, one.device) == (stage, way, DEVICE) and "double" not in one.types]


@unittest.skipUnless(GPU or EMULATED, "this library has kernels for GPUs alone, and no GPU answers")
class Kernels(Case):
    def takes(self, kernel: str, dtype: Any, sizes: dict[str, int], **choices: Any) -> None:
        try:
            inputs = tensors(dtype=dtype, grad=True, device=DEVICE, layout=choices.get("layout", "bhnd"), **sizes)
            self.agrees(attention, inputs, kernel=kernel, **choices)
        except ValueError as why:  # a GPU before 9.0
            if "built for compute capability" not in str(why):
                raise

    def test_every_rung(self) -> None:
        for stage, way in ((4, "forward"), (5, "backward"), (6, "forward"), (6, "backward")):
            for one in of_stage(stage, way):
                for name in sorted(one.types):
                    for causal in (False, "top_left", "bottom_right"):
                        sizes = {"B": 1, "Hq": 2, "Hkv": 1, "Nq": 70, "Nk": 130, "d": 128}
                        self.takes(one.name, DTYPE[name], sizes, causal=causal)

    def test_products_keep_the_whole_contract(self) -> None:
        lengths = torch.tensor([50, 7], device=DEVICE)
        for kernel, types in (("04", ("float",)), ("06", ("half", "bfloat16")), ("06.fa2", ("bfloat16",)), ("06.hopper", ("half",)),
                              ("06, 06.backward_swizzle", ("half",))):
            for name in types:
                for d in (16, 40, 100):
                    for causal in (False, "top_left", "bottom_right"):
                        self.takes(kernel, DTYPE[name], {"d": d}, causal=causal, key_lengths=lengths)
                self.takes(kernel, DTYPE[name], {"d": 24}, layout="bnhd")
                self.takes(kernel, DTYPE[name], {"d": 64}, scale=0.3)
        for Nq, Nk in ((0, 5), (5, 0), (1, 1)):
            self.takes("06", torch.float16, {"Nq": Nq, "Nk": Nk})
            self.takes("04", torch.float32, {"Nq": Nq, "Nk": Nk})

    def test_names(self) -> None:
        for kernel, dtype in (("04_cuda_forward", "float"), ("06_optimized", "half"), ("06.pingpong", "bfloat16"),
                              ("06.10_pingpong", "bfloat16"), ("06.pingpong, 06.backward_fused", "bfloat16"),
                              ("05.atomic", "float"), ("06.backward_hopper", "half")):
            self.takes(kernel, DTYPE[dtype], {"B": 1, "Nq": 64, "Nk": 64, "d": 128})

    def test_what_a_kernel_cannot_take(self) -> None:
        def says(words: str, kernel: str, dtype: Any = torch.bfloat16, sizes: Optional[dict[str, int]] = None,
                 **choices: Any) -> None:
            inputs = tensors(dtype=dtype, device=DEVICE, grad=True, **(sizes or {}))
            with self.assertRaisesRegex(ValueError, words):
                attention(*inputs, kernel=kernel, **choices).sum().backward()

        says("mma takes d = 64 or 128, got d = 16", "06.mma")
        says("swizzle takes no key_lengths", "06.swizzle", sizes={"d": 128}, key_lengths=torch.tensor([1, 2], device=DEVICE))
        says("d must be at most 256 here, got 264", "06", sizes={"d": 264})
        says("d must be at most 128 here, got 136", "04", torch.float32, {"d": 136})
        says("wants scale > 0", "06", scale=-1.0)
        says("04.best takes float, got half", "04", torch.float16)
        says("06.pingpong takes bfloat16|06.lock takes bfloat16, got half", "06.pingpong", torch.float16, {"d": 128})
        says("adds dQ up in an order that varies", "05.atomic", torch.float32, deterministic=True)
        says("adds dQ up in an order that varies|built for compute capability", "06.backward_fused", sizes={"d": 128},
             deterministic=True)
        if DEVICE == "cuda":
            says("03.tiled runs on the CPU, and the tensors are on a GPU", "03", torch.float32)

    def test_addresses(self) -> None:
        # A rung wants rows at multiples of 16 bytes. The same kind of call with other addresses is told apart.
        q, k, v = (torch.randn(1, 1, 64, 136, device=DEVICE).bfloat16() for _ in range(3))
        attention(q[..., :128], k[..., :128], v[..., :128], kernel="06.mma")
        with self.assertRaisesRegex(ValueError, "multiples of 16 bytes"):
            attention(q[..., 1:129], k[..., :128], v[..., :128], kernel="06.mma")
        with self.assertWarnsRegex(UserWarning, "multiples of 16 bytes"):
            instead = attention(q[..., 1:129], k[..., :128], v[..., :128], kernel="06.mma", fallback=True)
        self.close(instead, attention(q[..., 1:129], k[..., :128], v[..., :128], kernel="06.fa2"))

    def test_deterministic_gradients(self) -> None:
        for kernel, dtype in (("06", torch.bfloat16), ("04, 05.two_kernels", torch.float32)):
            inputs = tensors(B=1, Nq=200, Nk=200, d=64, dtype=dtype, device=DEVICE, grad=True)
            def gradients() -> list[Any]:
                out = attention(*inputs, kernel=kernel, deterministic=True)
                return list(torch.autograd.grad(out.float().square().sum(), inputs))
            for ours, again in zip(gradients(), gradients()):
                self.assertTrue(torch.equal(ours, again))


if __name__ == "__main__":
    unittest.main()
