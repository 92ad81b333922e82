"""register_tiled and longest_first beside PyTorch's memory-efficient and materialising fp32 attention.

    python3 04_cuda_forward/check/peers.py build/04_cuda_forward/libstage04_peer.so results.json
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "common" / "measure" / "peers"))
from peers import Case, Library, SDPBackend, Tensors, expected_rows, run, torch, torch_forward, verified  # noqa: E402


def prepare(library: Library, case: Case) -> dict[str, Callable[[], object]]:
    t = Tensors(case, torch.float32, backward=False)
    want = expected_rows(t)
    timed: dict[str, Callable[[], object]] = {}
    for kernel in ("register_tiled", "longest_first"):
        ours = library.run("forward", kernel, t)
        ours()
        verified(kernel, t.o, want, 1e-5)
        timed[kernel] = ours
    for name, backend in (("memory_efficient", SDPBackend.EFFICIENT_ATTENTION), ("math", SDPBackend.MATH)):
        if name == "math" and case.n > 4096:
            continue  # it stores the scores several times over
        peer = torch_forward(t, backend)
        verified(name, peer(), want, 1e-5)
        timed[name] = peer
    return timed


if __name__ == "__main__":
    sys.exit(run(__doc__.splitlines()[0], "forward", prepare, "f32"))
