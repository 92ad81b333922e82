"""What makes no sense is said in one sentence, and so is what a kernel cannot take; or PyTorch takes it."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest
import warnings
from typing import Any

from reference import FOLDER, Case, reference, tensors, torch

import flash_from_scratch._attention as inside
from flash_from_scratch import attention


class Refused(Case):
    def refused(self, words: str, inputs: Any = None, kind: Any = ValueError, **choices: Any) -> None:
        for fallback in (False, True):  # nonsense stays nonsense
            with self.assertRaisesRegex(kind, words) as caught:
                attention(*(inputs or tensors()), fallback=fallback, **choices)
            self.assertNotIn("\n", str(caught.exception))

    def test_nonsense(self) -> None:
        q, k, v = tensors()
        self.refused("q must be a tensor, got list", ([1.0], k, v), TypeError)
        self.refused("k must have 4 dimensions, got 3", (q, k[0], v))
        self.refused(r"k and v must have the same heads and rows, got \(2, 2, 50, 16\) and \(2, 2, 49, 16\)",
                     (q, k, v[:, :, 1:]))
        self.refused("must have one batch, got 2, 1 and 1", (q, k[:1], v[:1]))
        self.refused("q and k must have the same d, got 16 and 8", (q, k[..., :8], v[..., :8]))
        self.refused("a multiple of those of k, got 3 and 2", (q[:, :3], k, v))
        self.refused("one type, got torch.float32, torch.float64 and torch.float64", (q, k.double(), v.double()))
        self.refused("got q on cpu and k on meta", (q, k.to("meta"), v))
        self.refused("layout must be 'bhnd' or 'bnhd', got 'bhdn'", layout="bhdn")
        self.refused("'top_left' or 'bottom_right', got 'yes'", causal="yes")
        self.refused("got 2", causal=2)
        self.refused("key_lengths must be a tensor of integers", key_lengths=[50, 20])
        self.refused("key_lengths must be a tensor of integers", key_lengths=torch.ones(2))
        self.refused(r"key_lengths must be \[B\] = \[2\], got \[3\]", key_lengths=torch.ones(3, dtype=torch.int64))
        self.refused(r"dropout must lie in \[0, 1\), got 1", dropout=1.0)
        self.refused("scale must be finite, got nan", scale=float("nan"))
        self.refused("window must be", window=(1, 2, 3))
        self.refused("window must be", window=-5)
        self.refused(r"not negative, got \(3, -2\)", window=(3, -2))
        self.refused("window must be None, a number or", window=2.5)
        self.refused(r"dropout must lie in \[0, 1\), got -0.1", dropout=-0.1)
        self.refused(r"dropout must lie in \[0, 1\), got nan", dropout=float("nan"))
        self.refused("no kernel is called '07'", kernel="07", window=3)
        self.refused("no kernel is called '07'; there are best, mine, 00 to 06, and those that", kernel="07")
        self.refused("no kernel is called '03.slow'", kernel="03.slow")
        self.refused("kernel names two forwards, 01.safe_softmax and 02", kernel="01, 02")
        self.refused("kernel must be a name, got None", kernel=None)

    def test_what_was_right_once_is_still_checked(self) -> None:
        q, k, v = tensors()
        attention(q, k, v)
        self.refused("must be 'bhnd'", (q, k, v), layout="x")
        self.refused("one type", (q, k.double(), v))
        self.refused("two forwards", (q, k, v), kernel="01,02")


class Fallback(Case):
    def falls_back(self, why: str, inputs: Any = None, **choices: Any) -> Any:
        """Raises without fallback; with it, one warning says why, and only once."""
        inputs = inputs or tensors()
        with self.assertRaisesRegex(ValueError, why) as caught:
            attention(*inputs, **choices)
        self.assertNotIn("\n", str(caught.exception))
        inside._warned.clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            outs = [attention(*inputs, fallback=True, **choices) for _ in range(2)]
        said = [str(one.message) for one in said if "flash_from_scratch" in str(one.message)]
        self.assertEqual(len(said), 1, said)
        self.assertRegex(said[0], why)
        self.assertTrue(torch.equal(outs[0], outs[1]) or choices.get("dropout"))
        return outs[0]

    def test_types_and_sizes(self) -> None:
        for dtype in (torch.float16, torch.bfloat16):
            out = self.falls_back("on the CPU; float32 and float64 run there", tensors(dtype=dtype))
            self.close(out, reference(*tensors(dtype=dtype)))
        self.falls_back("d must be at most 512 here, got 520", tensors(d=520))
        q, k, v = tensors()
        self.assertEqual(self.falls_back("v must have the d of q, 16, got 8", (q, k, v[..., :8])).shape, (2, 4, 37, 8))

    def test_what_a_stage_does_not_promise(self) -> None:
        for kernel, why, choices in (("00", "no causal mask; stage 01 has", {"causal": True}),
                                     ("00", "no key_lengths; stage 01 has", {"key_lengths": torch.tensor([50, 1])}),
                                     ("02.lanes", "02.lanes takes float, got double", {}),
                                     ("best", "key_lengths", {"key_lengths": torch.tensor([51, 1])})):
            inputs = tensors(dtype=torch.float64 if kernel == "02.lanes" else torch.float32)
            with self.subTest(kernel=kernel, why=why):
                out = self.falls_back(why, inputs, kernel=kernel, **choices)
                self.close(out, reference(*inputs, **choices))

    def test_windows(self) -> None:
        for causal in (False, True, "bottom_right"):
            for window in ((3, 0), (0, 2), (4, None), 4):
                for lengths in (None, torch.tensor([50, 2])):
                    choices = {"causal": causal, "window": window, "key_lengths": lengths}
                    self.falls_back("no kernel for the CPU has window=", **choices)
                    self.agrees(lambda *inputs, **all: attention(*inputs, fallback=True, **all), tensors(grad=True),
                                **choices)

    def test_dropout(self) -> None:
        torch.manual_seed(1)
        out = self.falls_back("no kernel for the CPU has dropout=", tensors(Nk=200), dropout=0.5)
        self.assertGreater((out - attention(*tensors(Nk=200))).abs().max().item(), 0.01)

    def test_what_has_no_windows_and_no_dropout(self) -> None:
        for kernel in ("03", "03.fast, 05", "05"):
            out = self.falls_back("has no window=; best and 06 have, by beyond.masks", kernel=kernel, window=3)
            self.close(out, reference(*tensors(), window=3))
        self.falls_back("02.rows has no dropout=; best and 06 have, by beyond.dropout", kernel="02.rows", dropout=0.1)
        self.falls_back("mine has no dropout=", kernel="mine", dropout=0.1)
        self.falls_back("beyond.masks has no dropout=", kernel="beyond.masks", dropout=0.1)
        for kernel in ("best", "06"):
            self.falls_back("no kernel has both window= and dropout=", kernel=kernel, window=3, dropout=0.1)

    def test_no_kernel_for_a_place(self) -> None:
        inputs = [x.to("meta") for x in tensors()]
        with self.assertRaisesRegex(ValueError, "on NVIDIA's GPUs, got tensors on 'meta'"):
            attention(*inputs)
        inside._warned.clear()
        with self.assertWarnsRegex(UserWarning, "got tensors on 'meta'"):
            self.assertEqual(attention(*inputs, fallback=True).device.type, "meta")

    def test_masked_rows_and_no_keys(self) -> None:
        inputs = tensors(dtype=torch.bfloat16, grad=True)
        out = self.falls_back("bfloat16", inputs, key_lengths=torch.tensor([0, 50]), causal="bottom_right")
        self.assertEqual(out[0].abs().max().item(), 0)
        out.float().square().sum().backward()
        self.assertTrue(all(torch.isfinite(x.grad).all() for x in inputs))
        self.assertEqual(attention(*tensors(Nk=0, dtype=torch.bfloat16), fallback=True).abs().sum().item(), 0)


class Library(unittest.TestCase):
    def run_with(self, place: str) -> str:
        command = "import flash_from_scratch as f, torch; x = torch.ones(1, 1, 1, 1); f.attention(x, x, x)"
        done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False,
                              env={**os.environ, "FLASH_FROM_SCRATCH_LIBRARY": place, "PYTHONPATH": str(FOLDER)})
        self.assertEqual(done.returncode, 1)
        return done.stderr.strip().splitlines()[-1]

    def test_a_library_that_is_not_there_or_none(self) -> None:
        self.assertIn("OSError: /nowhere/libfa_torch.so is not there: pip install ./06_optimized/torch",
                      self.run_with("/nowhere/libfa_torch.so"))
        self.assertIn("cannot be loaded", self.run_with(__file__))


if __name__ == "__main__":
    unittest.main()
