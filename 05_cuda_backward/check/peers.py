"""The backward kernels beside PyTorch's memory-efficient and materialising fp32 backward.

    python3 05_cuda_backward/check/peers.py build/05_cuda_backward/libstage05_peer.so results.json
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "common" / "measure" / "peers"))
from peers import Case, Library, SDPBackend, Tensors, expected_rows, run, torch, torch_forward, verified  # noqa: E402


def gradients(o: torch.Tensor, t: Tensors) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: torch.autograd.grad(o, (t.q, t.k, t.v), t.do, retain_graph=True)


def prepare(library: Library, case: Case) -> dict[str, Callable[[], object]]:
    t = Tensors(case, torch.float32, backward=True)
    want = expected_rows(t)
    library.run("forward", "best", t)()
    verified("the forward", t.o, want, 1e-5)
    timed: dict[str, Callable[[], object]] = {}
    results: dict[str, list[torch.Tensor]] = {}
    for name, backend in (("memory_efficient", SDPBackend.EFFICIENT_ATTENTION), ("math", SDPBackend.MATH)):
        if name == "math" and case.n > 4096:
            continue  # it stores the scores several times over
        once = gradients(torch_forward(t, backend)(), t)
        results[name] = [g.detach() for g in once()]
        timed[name] = once
    for name in ("two_kernels", "atomic", "fast", "fast_atomic"):
        once = library.run("backward", name, t)
        once()
        results[name] = [g.clone() for g in t.grads]
        timed[name] = once
    reference = results["memory_efficient"]
    for name, found in results.items():
        for tensor, got, wanted in zip(("dQ", "dK", "dV"), found, reference):
            error = ((got - wanted).abs().max() / wanted.abs().max()).item()
            if not error <= 1e-4:  # NaN is not
                sys.exit(f"peers.py: {tensor} of {name} differs from PyTorch's by {error:.2g}; nothing written")
    return timed


if __name__ == "__main__":
    sys.exit(run(__doc__.splitlines()[0], "backward", prepare, "f32"))
