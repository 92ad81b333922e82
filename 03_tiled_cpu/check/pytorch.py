"""Stage 03's side trail beside PyTorch's own CPU kernel, in one process. Needs PyTorch and a built benchmark.

    python3 03_tiled_cpu/check/pytorch.py build/03_tiled_cpu/libstage03_peer.so              one and two threads
    python3 03_tiled_cpu/check/pytorch.py build/03_tiled_cpu/libstage03_peer.so --scaling    from one core to all

Both take the same tensors, and turns: in every round each setting is timed once for PyTorch and once for ours, one
right after the other. Ratios are taken within a round, and medians are printed. T threads are pinned to the same T
cores for both sides, one thread of a core before any second one.

--scaling divides by the speed of one thread. One core alone may clock higher than all of them together, which would
make every program look bad at scaling; so the multiply-add peak is measured for each number of threads, too, right
beside ours. Its column says what share of linear the machine itself can give. `apart` says whether the rest is the
program's fault: each thread computes a head of its own, with one thread, so that nothing is handed out, shared or
waited for.
A task of ours is 256 queries of a head. 16 heads of 4096 are 256 tasks, so 16 threads get 16 each: with few tasks a
thread, some threads would have one task more than others, and all would wait for them. There are as many heads as
cores, at least 16; PyTorch cuts each head into blocks of queries as well, and deals them out in equal parts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    sys.exit("pytorch.py: PyTorch 2.3 or later is not installed for this Python; there is nothing to compare with")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "common" / "measure" / "peers"))
from peers import Call  # noqa: E402

ROUNDS = 9
SCALING_ROUNDS = 5
LEAST_SECONDS = 0.1  # of calls in one sample
BLOCK_ROWS = 256  # queries in one of our tasks


def siblings(processor: int) -> str:
    """What two processors have in common if they are threads of one core."""
    path = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
    return path.read_text().strip() if path.is_file() else str(processor)


def processors() -> list[int]:
    """Those this process may use: first one thread of each core, then the second threads."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    seen: Counter[str] = Counter()
    turns: list[tuple[int, int]] = []
    for processor in usable:
        seen[siblings(processor)] += 1
        turns.append((seen[siblings(processor)], processor))
    limit = Path("/sys/fs/cgroup/cpu.max")  # a container may see more than it is given time for
    quota, period = limit.read_text().split() if limit.is_file() else ("max", "1")
    given = len(usable) if quota == "max" else max(1, int(quota) // int(period))
    return [processor for _, processor in sorted(turns)][:given]


def pin(chosen: list[int]) -> None:
    """All threads of this process to these cores; threads made later inherit them."""
    if hasattr(os, "sched_setaffinity"):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended since it was listed
                os.sched_setaffinity(int(thread), chosen)


def keep_memory() -> None:
    """PyTorch allocates its output in each call: from memory it has had before, not from fresh pages."""
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    libc.mallopt(-4, 0)  # M_MMAP_MAX
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


class Side:
    """Both kernels on the same tensors."""

    def __init__(self, library: ctypes.CDLL, heads: int, n: int, d: int, causal: bool) -> None:
        self.q, self.k, self.v = (torch.randn(1, heads, n, d) for _ in range(3))
        self.o = torch.empty_like(self.q)
        self.causal = causal
        self.flops = heads * 4 * d * (n * (n + 1) / 2 if causal else n * n)
        self.library = library
        self.call = Call(B=1, H=heads, Hkv=heads, N=n, d=d, causal=causal, Q=self.q.data_ptr(), K=self.k.data_ptr(),
                         V=self.v.data_ptr(), O=self.o.data_ptr())

    def theirs(self) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=self.causal)

    def ours(self, threads: int) -> None:
        error = self.library.fa_peer_forward(ctypes.byref(self.call), threads)
        if error:
            sys.exit(f"pytorch.py: {error.decode()}")

    def apart(self, threads: int) -> float:
        """FLOP/s of threads that share nothing: each computes one head of its own, again and again, by itself."""
        heads = int(self.call.H)
        speeds: list[float] = []

        def work(head: int) -> None:
            size = 4 * self.call.N * self.call.d * head
            call = Call(B=1, H=1, Hkv=1, N=self.call.N, d=self.call.d, causal=self.causal,
                        **{name: getattr(self.call, name) + size for name in "QKVO"})
            start, rounds = time.perf_counter(), 0
            while (taken := time.perf_counter() - start) < LEAST_SECONDS or rounds == 0:
                self.library.fa_peer_forward(ctypes.byref(call), 1)
                rounds += 1
            speeds.append(rounds * self.flops / heads / taken)

        workers = [threading.Thread(target=work, args=(thread % heads,)) for thread in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return sum(speeds)

    def verify(self, threads: int) -> None:
        self.o.fill_(float("nan"))
        self.ours(threads)
        if not torch.allclose(self.o, self.theirs(), rtol=1e-4, atol=1e-5):
            sys.exit("pytorch.py: the two kernels do not agree; nothing was timed")


def milliseconds(once: Callable[[], object]) -> float:
    """Of one call, the median of enough calls to fill a sample."""
    times: list[float] = []
    while sum(times) < LEAST_SECONDS:
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


@dataclass
class Samples:
    theirs: list[float] = field(default_factory=list)  # milliseconds
    ours: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)  # FLOP/s
    apart: list[float] = field(default_factory=list)

    def take(self, side: Side, small: Side, threads: int, chosen: list[int]) -> None:
        pin(chosen)
        torch.set_num_threads(threads)
        small.theirs()  # PyTorch keeps its threads between calls, so they are made before the clock runs
        pin(chosen)
        self.theirs.append(milliseconds(side.theirs))
        time.sleep(0.02)  # its threads wait for work with open eyes for a moment
        before = side.library.fa_peer_peak(threads, 0.03)
        self.ours.append(milliseconds(lambda: side.ours(threads)))
        self.peak.append((before + side.library.fa_peer_peak(threads, 0.03)) / 2)

    def take_apart(self, side: Side, threads: int) -> None:
        self.apart.append(side.apart(threads))

    def ratio(self) -> float:
        return statistics.median(t / o for t, o in zip(self.theirs, self.ours))

    def of_peak(self, flops: float) -> float:
        return statistics.median(100 * flops / (o / 1e3) / p for o, p in zip(self.ours, self.peak))


def of_linear(samples: dict[int, Samples], threads: int) -> list[float]:
    """The speed of PyTorch, ours, heads apart, and the peak: in per cent of `threads` times what one thread reaches in
    that round."""
    one, many = samples[1], samples[threads]
    pairs = [(many.theirs, one.theirs), (many.ours, one.ours), (one.apart, many.apart), (one.peak, many.peak)]
    return [statistics.median(100 * above / below / threads for below, above in zip(*pair)) for pair in pairs]


def label(d: int, n: int, causal: bool, threads: int) -> str:
    return f"threads {threads}, d {d}, N {n}, {'causal' if causal else 'no mask'}"


def few_threads(library: ctypes.CDLL, usable: list[int]) -> None:
    heads = 4  # as in check/bench.cpp
    small = Side(library, heads, 256, 64, False)
    print(f"PyTorch {torch.__version__}, {heads} heads, float; medians of {ROUNDS} rounds\n"
          f"{'':34}{'PyTorch ms':>11}{'ours ms':>9}{'of peak':>9}{'ratio':>8}")
    for threads in (1, 2):
        for d in (64, 128):
            for n in (1024, 4096):
                for causal in (False, True):
                    side, samples = Side(library, heads, n, d, causal), Samples()
                    side.verify(threads)
                    for _ in range(ROUNDS):
                        samples.take(side, small, threads, usable[:threads])
                    print(f"{label(d, n, causal, threads):34}{statistics.median(samples.theirs):11.2f}"
                          f"{statistics.median(samples.ours):9.2f}{samples.of_peak(side.flops):7.1f} %"
                          f"{samples.ratio():7.2f}x", flush=True)


def scaling(library: ctypes.CDLL, usable: list[int]) -> None:
    counts = [t for t in (1, 2, 4, 8, 16, 32, 64, 128) if t < len(usable)] + [len(usable)]
    heads, d = max(16, len(usable)), 64
    on = len({siblings(processor) for processor in usable})
    small = Side(library, heads, 256, d, False)
    print(f"PyTorch {torch.__version__}, {heads} heads, float; medians of {SCALING_ROUNDS} rounds; {len(usable)} "
          f"processors on {on} cores\nof linear: speed over that of one thread, in % of the number of threads; "
          f"peak: multiply-adds in registers\n"
          f"{'':38}{'PyTorch ms':>11}{'ours ms':>9}{'ratio':>8}{'of peak':>9}{'tasks a thread':>16}"
          f"{'of linear: PyTorch':>20}{'ours':>8}{'apart':>8}{'peak':>8}")
    for n in (4096, 8192):
        for causal in (False, True):
            side = Side(library, heads, n, d, causal)
            pin(usable)
            torch.set_num_threads(len(usable))
            side.verify(len(usable))
            samples = {threads: Samples() for threads in counts}
            for _ in range(SCALING_ROUNDS):
                for threads in random.sample(counts, len(counts)):
                    samples[threads].take(side, small, threads, usable[:threads])
                    samples[threads].take_apart(side, threads)
            for threads in counts:
                s = samples[threads]
                theirs, *others = of_linear(samples, threads)
                tasks = heads * ((n + BLOCK_ROWS - 1) // BLOCK_ROWS) / threads
                print(f"{label(d, n, causal, threads):38}{statistics.median(s.theirs):11.2f}"
                      f"{statistics.median(s.ours):9.2f}{s.ratio():7.2f}x{s.of_peak(side.flops):7.1f} %{tasks:16.1f}"
                      f"{theirs:18.1f} %" + "".join(f"{share:6.1f} %" for share in others), flush=True)


def main() -> int:
    paths = [argument for argument in sys.argv[1:] if argument != "--scaling"]
    if len(paths) != 1 or len(sys.argv) > 3 or not Path(paths[0]).is_file():
        print("pytorch.py: wants the path of libstage03_peer.so, and perhaps --scaling; build it with: "
              "cmake --build build --target stage03_bench", file=sys.stderr)
        return 2
    library = ctypes.CDLL(str(Path(paths[0]).resolve()))
    library.fa_peer_forward.restype = ctypes.c_char_p
    library.fa_peer_forward.argtypes = [ctypes.POINTER(Call), ctypes.c_int]
    library.fa_peer_peak.restype = ctypes.c_double
    library.fa_peer_peak.argtypes = [ctypes.c_int, ctypes.c_double]
    keep_memory()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.inference_mode():
        (scaling if "--scaling" in sys.argv else few_threads)(library, processors())
    return 0


if __name__ == "__main__":
    sys.exit(main())
