"""What only a GPU shows: types by default, streams, graphs, the allocator, other devices, what a call costs the host.

    python3 -m unittest discover -s 06_optimized/torch/tests     with the library of the checkout's build/
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import unittest
from pathlib import Path
from typing import Any

from reference import Case, tensors, torch

from flash_from_scratch import attention
from flash_from_scratch._library import library

HALVES = (torch.float16, torch.bfloat16)
SDPA = torch.nn.functional.scaled_dot_product_attention
LEAST_BATCH = 16  # from which on a layer of 8 heads and 1,024 rows takes any GPU longer than the host


@unittest.skipUnless(torch.cuda.is_available(), "no GPU answers")
@unittest.skipUnless(any(one.device == "cuda" for one in library().kernels), "this library was built without nvcc")
class Gpu(Case):
    def setUp(self) -> None:
        torch._dynamo.reset()

    def test_masks_types_and_layouts(self) -> None:
        lengths = torch.tensor([50, 23], device="cuda")
        for dtype in (torch.float32, *HALVES):
            for causal in (False, "top_left", "bottom_right"):
                for some in (None, lengths, lengths.int()):
                    for layout in ("bhnd", "bnhd"):
                        inputs = tensors(dtype=dtype, layout=layout, d=64, grad=True, device="cuda")
                        self.agrees(attention, inputs, causal=causal, key_lengths=some, layout=layout)

    def test_long(self) -> None:
        for dtype in (torch.float32, *HALVES):
            for d in (64, 128) if dtype == torch.float32 else (64, 128, 256):
                inputs = tensors(B=1, Hq=2, Hkv=1, Nq=1000, Nk=1536, d=d, dtype=dtype, grad=True, device="cuda")
                self.agrees(attention, inputs, causal="bottom_right")

    def test_windows_and_dropout(self) -> None:
        for dtype in (torch.float32, *HALVES):
            for d in (64, 128) if dtype == torch.float32 else (64, 128, 256):
                inputs = tensors(B=1, Hq=2, Hkv=1, Nq=1000, Nk=1536, d=d, dtype=dtype, grad=True, device="cuda")
                for causal in (False, "bottom_right"):
                    self.agrees(attention, inputs, causal=causal, window=(300, 100))
                    out = attention(*inputs, causal=causal, dropout=0.5)
                    dv, = torch.autograd.grad(out, inputs[2], out.detach())
                    self.has_one_mask(out.detach(), dv, inputs[2].detach())

    def test_strides(self) -> None:
        q, k, v = tensors(Hq=4, Hkv=4, Nq=21, Nk=21, d=64, layout="bnhd", dtype=torch.bfloat16, device="cuda")
        packed = torch.stack([q, k, v], dim=2)
        self.agrees(attention, [x.transpose(1, 2).requires_grad_() for x in packed.unbind(2)], causal=True)
        inputs = tensors(d=64, dtype=torch.bfloat16, device="cuda")
        self.agrees(attention, [x[:1].expand(2, -1, -1, -1) for x in inputs])
        self.agrees(attention, [x[..., 3:50] for x in inputs])

    def test_no_double(self) -> None:
        inputs = tensors(dtype=torch.float64, device="cuda")
        words = "no kernel takes double on a GPU; float16, bfloat16 and float32 run there"
        with self.assertRaisesRegex(ValueError, words):
            attention(*inputs)
        with self.assertWarnsRegex(UserWarning, "double on a GPU"):
            attention(*inputs, fallback=True)

    def test_autocast(self) -> None:
        inputs = tensors(grad=True, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = attention(*inputs, causal=True)
        self.assertEqual(out.dtype, torch.bfloat16)
        out.sum().backward()
        self.assertEqual(inputs[0].grad.dtype, torch.float32)

    def test_deterministic_algorithms(self) -> None:
        inputs = tensors(B=1, Hq=8, Hkv=8, Nq=2048, Nk=2048, d=128, dtype=torch.bfloat16, grad=True, device="cuda")
        for window in (None, (500, 0)):  # which have kernels of their own
            torch.use_deterministic_algorithms(True)
            try:
                runs = [torch.autograd.grad(attention(*inputs, window=window).sum(), inputs) for _ in range(3)]
            finally:
                torch.use_deterministic_algorithms(False)
            for again in runs[1:]:
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(runs[0], again)), window)

    def test_the_current_stream(self) -> None:
        inputs = tensors(B=1, Nq=4096, Nk=4096, d=128, dtype=torch.bfloat16, device="cuda")
        want = attention(*inputs)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            attention(*(x * 2 / 2 for x in inputs))  # what is loaded at its first use is there now
            stream.synchronize()
            torch.cuda._sleep(500_000_000)  # the result can only be right behind what comes before it on this stream
            late = [x * 2 for x in inputs]
            out = attention(*(x / 2 for x in late))
            done = torch.cuda.Event()
            done.record()
        self.assertFalse(done.query(), "the call waited for the GPU")
        stream.synchronize()
        self.assertTrue(torch.equal(out, want))

    @unittest.skipUnless(torch.cuda.device_count() > 1, "one GPU")
    def test_another_device(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            self.agrees(attention, tensors(d=64, dtype=dtype, grad=True, device="cuda:1"))
            self.assertEqual(torch.cuda.current_device(), 0)

    def test_graphs(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            inputs = tensors(Nq=256, Nk=256, d=64, dtype=dtype, grad=True, device="cuda")
            def step() -> Any:
                out = attention(*inputs, causal=True)
                return out, torch.autograd.grad(out.float().square().sum(), inputs)
            graph, (out, gradients) = recorded(step)
            with torch.no_grad():
                for x in inputs:
                    x.copy_(torch.randn_like(x))
            graph.replay()
            want, expected = step()
            self.close(out.detach(), want.detach())
            for ours, theirs in zip(gradients, expected):
                self.close(ours, theirs)

    def test_a_graph_drops_others_in_each_replay(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            inputs = tensors(Nq=256, Nk=256, d=64, dtype=dtype, grad=True, device="cuda")
            def step() -> Any:
                out = attention(*inputs, causal=True, dropout=0.5)
                return out.detach(), torch.autograd.grad(out, inputs[2], out.detach())[0]
            graph, (out, dv) = recorded(step)
            outs = []
            for seed in (1, 1, 2):
                torch.manual_seed(seed)
                for _ in range(2):
                    graph.replay()
                    self.has_one_mask(out, dv, inputs[2].detach())
                    outs.append(out.clone())
            for other in (1, 4):  # the second of a seed, and another seed
                self.assertGreater((outs[0] - outs[other]).abs().max().item(), 0.01)
            self.assertTrue(torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3]))

    def test_compiled_dropout(self) -> None:
        for mode in (None, "reduce-overhead"):
            compiled = torch.compile(lambda q, k, v: attention(q, k, v, dropout=0.5), fullgraph=True, mode=mode)
            inputs = tensors(Nq=128, Nk=128, d=64, dtype=torch.bfloat16, grad=True, device="cuda")
            outs = []
            for _ in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                out = compiled(*inputs)
                outs.append(out.detach().clone())
                self.has_one_mask(outs[-1], torch.autograd.grad(out, inputs[2], outs[-1])[0], inputs[2].detach())
            self.assertGreater((outs[2] - outs[3]).abs().max().item(), 0.01)

    def test_compiled(self) -> None:
        for mode in (None, "reduce-overhead"):
            compiled = torch.compile(lambda q, k, v: attention(q * 2, k, v, causal=True) + 1, fullgraph=True, mode=mode)
            inputs = tensors(Nq=128, Nk=128, d=64, dtype=torch.bfloat16, grad=True, device="cuda")
            for _ in range(3):
                got = torch.autograd.grad(compiled(*inputs).float().square().sum(), inputs)
            out = attention(inputs[0] * 2, *inputs[1:], causal=True) + 1
            want = torch.autograd.grad(out.float().square().sum(), inputs)
            for ours, theirs in zip(got, want):
                self.close(ours, theirs)

    def test_memory_is_the_allocators_and_linear(self) -> None:
        inputs = tensors(B=1, Hq=4, Hkv=4, Nq=16384, Nk=16384, d=64, dtype=torch.bfloat16, grad=True, device="cuda")
        attention(*inputs, causal=True).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        free = torch.cuda.mem_get_info()[0]
        attention(*inputs, causal=True).sum().backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        self.assertLess(peak, 16 * inputs[0].numel() * 2, "more than a few tensors of the size of q")
        self.assertLess(free - torch.cuda.mem_get_info()[0], 64 << 20, "memory that PyTorch knows nothing of")

    def test_the_first_that_a_backward_does(self) -> None:
        # In a thread of autograd's own, in which nothing of CUDA was called before.
        program = """from reference import tensors, torch
from flash_from_scratch import attention
inputs = tensors(d=128, dtype=torch.bfloat16, grad=True, device="cuda")
out = attention(*inputs)
assert all(x.isfinite().all() for x in torch.autograd.grad(out, inputs, out.detach()))"""
        done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True,
                              check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_what_a_call_costs_the_host(self) -> None:
        inputs = tensors(B=1, Hq=1, Hkv=1, Nq=64, Nk=64, d=64, dtype=torch.bfloat16, grad=True, device="cuda")
        d_out = torch.ones_like(inputs[0])

        def forward(function: Any) -> None:
            with torch.no_grad():
                layers(function, 10, *inputs)

        def both(function: Any) -> None:
            torch.autograd.grad(layers(function, 10, *inputs), inputs, d_out)

        for what, call, most in (("a forward", forward, 15.0), ("a forward and a backward", both, 25.0)):
            # In turn, since a host that has other work at the moment has it for both.
            pairs = [[microseconds_of_the_host(lambda: call(one)) / 10 for one in (attention, SDPA)] for _ in range(25)]
            ours, theirs = (statistics.median(column) for column in zip(*pairs))
            more = statistics.median(one - other for one, other in pairs)
            print(f"{what}: {ours:.1f} us of the host, scaled_dot_product_attention {theirs:.1f} us; {more:+.1f}")
            self.assertLess(more, max(most, theirs / 4), what)  # a host that is slow is slow for both

    def test_the_gpu_never_waits_for_ten_layers(self) -> None:
        def forward(function: Any, *inputs: Any) -> Any:
            with torch.no_grad():
                return layers(function, 10, *inputs)

        def both(function: Any, *inputs: Any) -> Any:
            return torch.autograd.grad(layers(function, 10, *inputs), inputs, inputs[0])

        for what, loop in (("forward", forward), ("forward and backward", both)):
            for B in (1, 2, 4, 8, 16):
                inputs = tensors(B=B, Hq=8, Hkv=8, Nq=1024, Nk=1024, d=64, dtype=torch.bfloat16, grad=True,
                                 device="cuda")
                (ours, graph), (theirs, _) = (queued_and_replayed(lambda: loop(function, *inputs))
                                              for function in (attention, SDPA))
                print(f"ten layers, B = {B}, {what}: {ours * 1e6:.0f} us, as a CUDA graph {graph * 1e6:.0f} us; "
                      f"scaled_dot_product_attention {theirs * 1e6:.0f} us")
                if B >= LEAST_BATCH:  # in a graph each of a layer's kernels starts some microseconds sooner
                    self.assertLess(ours, 1.07 * graph, what)


def recorded(step: Any) -> tuple[Any, Any]:
    """A CUDA graph of step(), and what it returned: tensors that a replay writes anew."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def layers(function: Any, count: int, x: Any, k: Any, v: Any) -> Any:
    for _ in range(count):
        x = function(x, k, v)
    return x


def microseconds_of_the_host(call: Any) -> float:
    """Of a call, in the middle one of three runs of five calls, which a GPU keeps up with."""
    samples = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            call()
        samples.append((time.perf_counter() - began) / 5 * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)


def queued_and_replayed(loop: Any) -> tuple[float, float]:
    """Seconds of a loop when Python queues its kernels, and when the GPU has all of them at hand: a CUDA graph."""
    graph, _ = recorded(loop)

    def seconds(run: Any) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / 20

    pairs = [(seconds(loop), seconds(graph.replay)) for _ in range(11)]
    return statistics.median(one for one, _ in pairs), statistics.median(other for _, other in pairs)


if __name__ == "__main__":
    unittest.main()
