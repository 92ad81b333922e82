"""Stage 03's side trail beside PyTorch's own CPU kernel, in one run. Needs PyTorch and a built benchmark.

    python3 03_tiled_cpu/check/pytorch.py build/03_tiled_cpu/stage03_bench

Rounds alternate between the two; a ratio is taken within a round, and the median of the ratios is printed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    sys.exit("pytorch.py: PyTorch 2.3 or later is not installed for this Python; there is nothing to compare with")

ROUNDS = 9
HEADS = 4  # as in check/bench.cpp


def pytorch_ms(n: int, d: int, causal: bool, threads: int) -> float:
    """Milliseconds of one call, the median of enough calls to fill 0.2 s."""
    torch.set_num_threads(threads)
    q, k, v = (torch.randn(1, HEADS, n, d) for _ in range(3))
    times: list[float] = []
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.inference_mode():
        while sum(times) < 0.2 or len(times) < 3:
            start = time.perf_counter()
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])


def ours(bench: Path, n: int, d: int, causal: bool, threads: int) -> tuple[float, float]:
    """Milliseconds of one call, and the share of the multiply-add peak sampled beside it, in per cent."""
    variant = "fast" if threads == 1 else "fast_2_threads"
    name = f"stage03/forward/{variant}/N:{n}/d:{d}/causal:{int(causal)}/f32"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        subprocess.run([bench, "--rounds", "4", f"--benchmark_filter=^{name}", "--out", out],
                       check=True, stdout=subprocess.DEVNULL)
        rows = json.loads(out.read_text())["benchmarks"][1:]  # the first round of a process warms up
    return (statistics.median(row["real_time"] for row in rows),
            statistics.median(100 * row["flops"] / row["roof"] for row in rows))


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        print("pytorch.py: wants the path of stage03_bench; build it with: "
              "cmake --build build --target stage03_bench", file=sys.stderr)
        return 2
    bench = Path(sys.argv[1]).resolve()
    print(f"PyTorch {torch.__version__}, {HEADS} heads, float; medians of {ROUNDS} rounds\n"
          f"{'':34}{'PyTorch ms':>11}{'ours ms':>9}{'of peak':>9}{'ratio':>8}")
    for threads in (1, 2):
        for d in (64, 128):
            for n in (1024, 4096):
                for causal in (False, True):
                    theirs, mine, share = [], [], []
                    for _ in range(ROUNDS):
                        theirs.append(pytorch_ms(n, d, causal, threads))
                        ms, of_peak = ours(bench, n, d, causal, threads)
                        mine.append(ms)
                        share.append(of_peak)
                    ratio = statistics.median(t / m for t, m in zip(theirs, mine))
                    label = f"threads {threads}, d {d}, N {n}, {'causal' if causal else 'no mask'}"
                    print(f"{label:34}{statistics.median(theirs):11.2f}{statistics.median(mine):9.2f}"
                          f"{statistics.median(share):7.1f} %{ratio:7.2f}x", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
