"""Writing with a cache: PagedCache against the reference, and train.py's model against what it writes without one."""

from __future__ import annotations

import sys
import unittest
from typing import Any
from unittest import mock

from reference import FOLDER, Case, reference, tensors, torch

from flash_from_scratch import PagedCache, _decode, kernels
from flash_from_scratch._library import library

sys.path.append(str(FOLDER))
import train  # noqa: E402
from generate import DecodeCache, KeptCache, generate  # noqa: E402

DECODER = next(one for one in library().kernels if one.way == "decode")
RUNS = DECODER.device == "cpu" or torch.cuda.is_available()
CONTEXT = 24


@unittest.skipUnless(RUNS, "this library has kernels for GPUs alone, and no GPU answers")
class Paged(Case):
    def pieces(self, cache: PagedCache, inputs: list[torch.Tensor], sizes: tuple[int, ...],
               **choices: Any) -> torch.Tensor:
        outs, n = [], 0
        for size in sizes:
            outs.append(cache.attend(*(x[:, :, n:n + size] for x in inputs), **choices))
            n += size
        return torch.cat(outs, dim=2)

    def test_values(self) -> None:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for Hq, Hkv, d, page in ((4, 2, 32, 16), (3, 3, 100, 32), (8, 1, 64, 64)):
                inputs = tensors(Hq=Hq, Hkv=Hkv, Nq=50, Nk=50, d=d, dtype=dtype, device=DECODER.device)
                for sizes in ((5, 1, 1, 11, 8, 1, 23), (50,)):
                    cache = PagedCache(2, Hkv, 50, d, dtype, DECODER.device, page)
                    out = self.pieces(cache, inputs, sizes)
                    self.close(out, reference(*inputs, causal=True), words=f"{dtype}, {sizes}")
        cache = PagedCache(2, 1, 50, 64, dtype, DECODER.device)
        self.close(self.pieces(cache, inputs, (50,), scale=0.3), reference(*inputs, causal=True, scale=0.3))

    def test_pages_lie_anywhere(self) -> None:
        inputs = tensors(Nq=40, Nk=40, device=DECODER.device)
        plain, other = (PagedCache(2, 2, 40, 16, torch.float32, DECODER.device, page=16) for _ in range(2))
        other.table.copy_(torch.tensor([[4, 0, 3], [1, 5, 2]]))
        for cache in (plain, other):
            cache.k.fill_(float("nan"))
            cache.v.fill_(float("nan"))
        sizes = (7, 9, 1, 23)
        self.assertTrue(torch.equal(self.pieces(plain, inputs, sizes), self.pieces(other, inputs, sizes)))
        keys = other.k[other.table.long()].transpose(2, 3).flatten(1, 2)[:, :40]  # [B, tokens, heads, d]
        self.assertTrue(torch.equal(keys.transpose(1, 2), inputs[1]))
        self.assertTrue(other.k[3, :, 8:].isnan().all(), "behind the last token nothing is written")

    def test_strides(self) -> None:
        packed = torch.stack(tensors(Hq=4, Hkv=4, Nq=21, Nk=21, layout="bnhd", device=DECODER.device), dim=2)
        inputs = [part.transpose(1, 2) for part in packed.unbind(2)]
        cache = PagedCache(2, 4, 21, 16, torch.float32, DECODER.device)
        self.close(self.pieces(cache, inputs, (6, 15)), reference(*inputs, causal=True))

    def test_memory_that_is_not_there_leaves_it_as_it_was(self) -> None:
        inputs = tensors(Nq=12, Nk=12, device=DECODER.device)
        first, rest = ([x[:, :, part] for x in inputs] for part in (slice(0, 9), slice(9, 12)))
        cache = PagedCache(2, 2, 12, 16, torch.float32, DECODER.device)
        cache.attend(*first)
        empty = torch.empty

        def full(*sizes: Any, **options: Any) -> torch.Tensor:
            if options.get("dtype") is torch.uint8:
                raise RuntimeError("no room for scratch")
            return empty(*sizes, **options)

        with mock.patch.object(_decode, "library") as there, mock.patch.object(torch, "empty", full):
            there().decode_needs.return_value = 64
            with self.assertRaisesRegex(RuntimeError, "no room for scratch"):
                cache.attend(*rest)
        self.assertEqual((cache.length, cache.lengths.tolist()), (9, [9, 9]))
        self.close(cache.attend(*rest), reference(rest[0], *inputs[1:], causal="bottom_right"))

    def test_what_it_cannot_take(self) -> None:
        q, k, v = tensors(Nq=9, Nk=9, device=DECODER.device)
        cache = PagedCache(2, 2, 12, 16, torch.float32, DECODER.device)
        cache.attend(q, k, v)
        for words, inputs in (
                ("holds 12 tokens, got 18", (q, k, v)),
                (r"keys and values \[2, 2, N, 16\] and queries .*, got .*\[2, 1, 9, 16\]", (q, k[:, :1], v)),
                ("this cache is torch.float32 on .*, got torch.float16", (q.half(), k.half(), v.half()))):
            with self.assertRaisesRegex(ValueError, words):
                cache.attend(*inputs)
        with self.assertRaisesRegex(RuntimeError, "decoding has no gradients"):
            cache.attend(q[:, :, :1].requires_grad_(), k[:, :, :1], v[:, :, :1])
        with self.assertRaisesRegex(ValueError, "page_size must be a power of two in .16, 256., got 20"):
            PagedCache(2, 2, 12, 16, torch.float32, DECODER.device, page=20).attend(q, k, v)
        with self.assertRaisesRegex(ValueError, "beyond.decode takes bfloat16 and float and half, got double"):
            PagedCache(2, 2, 12, 16, torch.float64, DECODER.device)
        self.assertEqual(cache.length, 9)
        self.close(cache.attend(*(x[:, :, :1] for x in (q, k, v))),
                   reference(q[:, :, :1], *(torch.cat([x, x[:, :, :1]], 2) for x in (k, v))))
        self.assertNotIn("beyond.decode", kernels())


class Text(Case):
    """Weights are far from 0, so that a wrong number anywhere before changes what is written."""

    def model(self, attention: str, device: str = "cpu") -> tuple[Any, Any]:
        torch.manual_seed(3)
        attend, new_cache = train.attention_by_name(attention, device, CONTEXT)
        model = train.Gpt(tokens=40, context=CONTEXT, width=32, layers=2, heads=2, attend=attend).to(device)
        with torch.no_grad():
            for one in model.parameters():
                one.add_(0.3 * torch.randn(one.shape).to(device))
        return model, new_cache

    def writes(self, model: Any, new_caches: Any, greedy: bool) -> list[int]:
        dice = torch.Generator().manual_seed(7)

        def draw(logits: torch.Tensor) -> int:
            return int(logits.argmax()) if greedy else int(
                torch.multinomial(torch.softmax(logits / 4, -1).cpu(), 1, generator=dice))
        return generate(model, [1, 2, 3, 4, 5], 100, CONTEXT, new_caches, draw)

    def same_text(self, attention: str, kind: Any, device: str = "cpu") -> None:
        model, new_cache = self.model(attention, device)
        self.assertIsInstance(new_cache(), kind)
        for greedy in (True, False):
            want = self.writes(model, lambda: None, greedy)
            self.assertGreater(len(set(want)), 5)
            self.assertEqual(self.writes(model, lambda: [new_cache() for _ in model.blocks], greedy), want, attention)

    def test_the_text_is_the_same(self) -> None:
        for attention in ("sdpa", "00", "02", "03", "best"):
            self.same_text(attention, KeptCache)

    @unittest.skipUnless(RUNS, "this library has kernels for GPUs alone, and no GPU answers")
    def test_the_text_of_the_decode_walk_is_the_same(self) -> None:
        self.same_text("04", DecodeCache, DECODER.device)

    @unittest.skipUnless(RUNS, "this library has kernels for GPUs alone, and no GPU answers")
    def test_in_16_bits_it_is_the_same_but_for_rounding(self) -> None:
        model, new_cache = self.model("06", DECODER.device)
        tokens = torch.arange(CONTEXT, device=DECODER.device)[None] % 40
        caches, logits, place = [new_cache() for _ in model.blocks], [], 0
        with torch.no_grad():
            want = model(tokens)
            for size in (5, *[1] * (CONTEXT - 5)):
                logits.append(model(tokens[:, place:place + size], place, caches))
                place += size
        self.close(torch.cat(logits, 1), want, 3e-2)

    def test_a_cache_that_is_wrong_is_noticed(self) -> None:
        model, _ = self.model("sdpa")

        class Forgets(KeptCache):
            def __call__(self, q: Any, k: Any, v: Any) -> Any:
                out = super().__call__(q, k, v)
                self.k, self.v = self.k[:, :, 1:], self.v[:, :, 1:]
                return out

        want = self.writes(model, lambda: None, greedy=False)
        got = self.writes(model, lambda: [Forgets(block.attend) for block in model.blocks], greedy=False)
        self.assertNotEqual(got, want)

    def test_what_does_not_fit_is_read_from_its_half(self) -> None:
        """What the model is shown, and where."""
        shown = []

        class Shown:
            head = torch.nn.Linear(1, 1)

            def __call__(self, tokens: torch.Tensor, place: int, caches: Any) -> torch.Tensor:
                shown.append((tokens[0].tolist(), place))
                return tokens[:, :, None]

        generate(Shown(), [0, 1], 8, 4, lambda: [len(shown)], lambda logits: int(logits) + 1)
        self.assertEqual(shown, [([0, 1], 0), ([2], 2), ([3], 3), ([3, 4], 0), ([5], 2), ([6], 3)])


if __name__ == "__main__":
    unittest.main()
