"""Who compare.py times: this stage's kernels, PyTorch's, FlashAttention-3 and a matrix product, on the same tensors."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "common" / "measure" / "peers"))
from peers import DTYPES, BadResults, Call, Case, SDPBackend, sdpa_kernel, torch  # noqa: E402

ROWS, WIDTH = 16384, 2048  # B N and H d
PASSES = {"forward": "forward", "backward": "backward", "step": "both"}  # and what their FLOPs are called
CONTEXT, GRADIENTS = ("O", "LSE"), ("dQ", "dK", "dV")
WRITES = {"forward": CONTEXT, "backward": GRADIENTS, "step": CONTEXT + GRADIENTS}
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
DTYPE = {"bf16": torch.bfloat16, "f16": torch.float16}
GEMM = 8192

Result = dict[str, torch.Tensor]  # by the names of WRITES; empty if there is none


@dataclass(frozen=True)
class Setting(Case):
    """One problem, with the number of query heads that share a key head, and one of the PASSES."""

    group: int = 1
    dtype: str = "bf16"
    what: str = "forward"

    @staticmethod
    def of(what: str, n: int, d: int, causal: bool, group: int, dtype: str) -> Setting:
        return Setting(n, d, causal, batch=max(1, ROWS // n), heads=WIDTH // d, group=group, dtype=dtype, what=what)

    @staticmethod
    def of_a_step(dtype: str) -> Setting:
        """A forward and a backward of one long sequence."""
        return Setting(16384, 64, True, batch=1, heads=16, dtype=dtype, what="step")

    @property
    def work(self) -> float:
        return self.flops(PASSES[self.what])

    def row_name(self, who: str, chip: str) -> str:
        return f"{who}/N:{self.n}/d:{self.d}/causal:{int(self.causal)}/G:{self.group}/chip:{chip}/{self.dtype}"

    def __str__(self) -> str:
        return (("" if self.what == "forward" else f"{self.what}, ")
                + f"d {self.d}, {'causal' if self.causal else 'no mask'}, N {self.n}"
                + (f", {self.group} query heads per key head" if self.group > 1 else "") + f", {self.dtype}")


class Tensors:
    """Inputs of a setting: Q, K, V and, for a backward, dO."""

    def __init__(self, s: Setting) -> None:
        make = lambda heads: torch.randn(s.batch, heads, s.n, s.d, device="cuda", dtype=DTYPE[s.dtype])  # noqa: E731
        self.setting = s
        self.q, self.k, self.v = make(s.heads), make(s.heads // s.group), make(s.heads // s.group)
        self.do = make(s.heads) if s.what != "forward" else None

    def place_for(self, name: str) -> torch.Tensor:
        if name == "LSE":
            return torch.full(self.q.shape[:3], math.nan, device="cuda", dtype=torch.float32)
        return torch.full_like(self.k if name in ("dK", "dV") else self.q, math.nan)


@dataclass
class Runner:
    name: str  # stage06/forward/fa2, peer/backward/cudnn
    launch: Callable[[int], None]  # puts this many on the current stream
    result: Callable[[], Result]
    forget: Callable[[], None]  # the result, so that an old one cannot pass for a new one


# ---------------------------------------------------------------- this stage's, and FlashAttention-3

class Library:
    """Kernels behind the functions of peer.cpp."""

    whose = "stage06"  # in the names of rows

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path))
        for name in ("kernels", "compiler", "flags", "unsupported", "forward", "backward_kernels",
                     "backward_unsupported", "backward", "backward_scratch_bytes"):
            getattr(self.c, f"fa_peer_{name}").restype = ctypes.c_char_p
        texts = {"forward": self.c.fa_peer_kernels(), "backward": self.c.fa_peer_backward_kernels()}
        self.promises = {what: dict(each.split(":") for each in text.decode().split()) for what, text in texts.items()}
        self.promises["step"] = self.promises["backward"]  # after the best forward

    def kernels(self, what: str) -> list[str]:
        return list(self.promises[what])

    def whole(self, what: str) -> list[str]:
        """Those that take every problem. `best` of a backward is hopper or two_kernels, which need no rows of their own."""
        found = [kernel for kernel, promise in self.promises[what].items() if promise == "whole"]
        return [kernel for kernel in found if "best" not in found or kernel not in ("hopper", "two_kernels")]

    def scratch(self, kernel: str, call: Call) -> torch.Tensor:
        """Enough for either pass; what it holds does not matter."""
        size = ctypes.c_int64(0)
        if call.dO:
            complain(self.c.fa_peer_backward_scratch_bytes(kernel.encode(), ctypes.byref(call), ctypes.byref(size)))
        return torch.full((size.value // 4 + 64,), 77, device="cuda", dtype=torch.int32)

    def context(self, t: Tensors) -> Result:
        """O and LSE of the best forward: what a backward is given."""
        result = {name: t.place_for(name) for name in CONTEXT}
        call = call_of(t, result)
        scratch = self.scratch("best", call)
        call.scratch = scratch.data_ptr()
        complain(self.c.fa_peer_forward(b"best", ctypes.byref(call)))
        torch.cuda.synchronize()
        return result

    def runner(self, kernel: str, t: Tensors, context: Result) -> Runner | str:
        """Or why there is none. context: what context() returned, for a backward."""
        what = t.setting.what
        result = {tensor: t.place_for(tensor) for tensor in WRITES[what]}
        call = call_of(t, context | result)
        pointer = ctypes.byref(call)
        forward = self.c.fa_peer_unsupported, self.c.fa_peer_forward
        backward = self.c.fa_peer_backward_unsupported, self.c.fa_peer_backward
        parts = {"forward": [(*forward, kernel.encode())], "backward": [(*backward, kernel.encode())],
                 "step": [(*forward, b"best"), (*backward, kernel.encode())]}[what]
        for unsupported, _, name in parts:
            if why := unsupported(name, pointer):
                return why.decode()
        scratch = self.scratch(kernel, call)
        call.scratch = scratch.data_ptr()

        def launch(count: int, _alive: object = (scratch, context)) -> None:
            for _ in range(count):
                for _, function, name in parts:
                    complain(function(name, pointer))

        def forget() -> None:
            for tensor in result.values():
                tensor.fill_(math.nan)
        return Runner(f"{self.whose}/{what}/{kernel}", launch, lambda: result, forget)


def fa3_library(given: Path | None, usual: Path) -> Path | None:
    """What was asked for, what lies where it is built, or none, which is said."""
    path = given or usual
    if path.is_file():
        return path.resolve()
    print("without FlashAttention-3: absent; 06_optimized/check/fa3/build.py CHECKOUT builds it", flush=True)
    return None


class FlashAttention3(Library):
    """What fa3/build.py has built: fa3 and, backward, fa3_deterministic."""

    whose = "peer"

    def __init__(self, path: Path) -> None:
        try:
            super().__init__(path)
            self.commit, self.cutlass = self.says("commit"), self.says("cutlass")
        except (OSError, AttributeError) as error:
            raise BadResults(f"{path}: no library of fa3/build.py ({error})") from None

    def says(self, what: str) -> str:
        function = getattr(self.c, f"fa_peer_{what}")
        function.restype = ctypes.c_char_p
        return function().decode()


def complain(error: bytes | None) -> None:
    if error:
        raise RuntimeError(error.decode())


def call_of(t: Tensors, tensors: Result) -> Call:
    s = t.setting
    given = {"Q": t.q, "K": t.k, "V": t.v, **tensors} | ({} if t.do is None else {"dO": t.do})
    return Call(B=s.batch, H=s.heads, Hkv=s.heads // s.group, N=s.n, d=s.d, causal=int(s.causal),
                dtype=DTYPES[t.q.dtype], stream=torch.cuda.current_stream().cuda_stream,
                **{name: tensor.data_ptr() for name, tensor in given.items()})


# ---------------------------------------------------------------- the others

def attention(inputs: Sequence[torch.Tensor], s: Setting) -> torch.Tensor:
    options = {"enable_gqa": True} if s.group > 1 else {}
    return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=s.causal, **options)


def forward_of(backend: SDPBackend, t: Tensors, last: Result) -> Callable[[int], None]:
    def launch(count: int) -> None:
        with sdpa_kernel(backend):
            for _ in range(count):
                last["O"] = attention((t.q, t.k, t.v), t.setting)
    return launch


def leaves(t: Tensors) -> list[torch.Tensor]:
    return [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]


def backward_of(backend: SDPBackend, t: Tensors, last: Result) -> Callable[[int], None]:
    """One forward, here and now; its graph is kept and gone through again and again."""
    inputs = leaves(t)
    with torch.enable_grad(), sdpa_kernel(backend):
        o = attention(inputs, t.setting)

    def launch(count: int) -> None:
        for _ in range(count):
            last.update(zip(GRADIENTS, torch.autograd.grad(o, inputs, t.do, retain_graph=True)))
    return launch


def step_of(backend: SDPBackend, t: Tensors, last: Result) -> Callable[[int], None]:
    inputs = leaves(t)

    def launch(count: int) -> None:
        with torch.enable_grad(), sdpa_kernel(backend):
            for _ in range(count):
                o = attention(inputs, t.setting)
                last.update(zip(GRADIENTS, torch.autograd.grad(o, inputs, t.do)), O=o.detach())
    return launch


def peer(name: str, t: Tensors) -> Runner:
    last: Result = {}
    make = {"forward": forward_of, "backward": backward_of, "step": step_of}[t.setting.what]
    return Runner(f"peer/{t.setting.what}/{name}", make(PEERS[name], t, last), lambda: last, last.clear)


def gemm(dtype: str) -> Runner:
    a, b = (torch.randn(GEMM, GEMM, device="cuda", dtype=DTYPE[dtype]) for _ in range(2))
    out = torch.empty_like(a)

    def launch(count: int) -> None:
        for _ in range(count):
            torch.matmul(a, b, out=out)
    return Runner("gemm", launch, dict, lambda: None)
