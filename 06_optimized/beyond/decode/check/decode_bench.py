"""Decoding beside PyTorch's attention, and beside what the memory gives: one JSON file, which a chart is drawn from.

    python3 06_optimized/beyond/decode/check/decode_bench.py build/06_optimized/libstage06_peer.so decode.json

Needs PyTorch and a GPU. bf16, one new query a sequence that sees all keys, if nothing else is said. Head settings: 32 query heads on 8 key heads
of d = 128, and 32 on 32 of d = 64; 1, 8 and 64 sequences of 1,024 to 131,072 tokens, as far as the memory reaches. Ours
runs with as many parts as its formula says, with one part, and in pages of 64 tokens in random order; at a few settings
with 1, 2, 4 ... 64 parts, and at some with 1, 2, 4 and 8 queries, of which query i sees the keys up to itself, in caches
that have their keys or are given them in the same launch. Beside it PyTorch's scaled_dot_product_attention by its backends, FlexAttention at a few
settings (--flex 0 leaves it out), and flash_attn_with_kvcache of FlashAttention-3 or 2 where their modules are there;
FlashAttention-3 by --fa3 too, the library that 06_optimized/check/fa3/build.py --decode builds.

Every contender gets the same tensors, recorded as a CUDA graph of several launches, so that no time of the host counts.
A launch reads other keys than the one before it, until 256 MiB are read (more than a cache holds). The contenders of a
setting are timed once a round, in an order drawn anew, so that ratios can be taken round by round. What each of them
writes is compared with fp64 on some rows, before and after. Bandwidth is that of K and V, each read once; the roof is
the best of four ways of reading a large tensor, measured in the same rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    sys.exit("decode_bench.py: PyTorch 2.5 or later is not installed for this Python; there is nothing to compare with")

ROOT = Path(__file__).resolve().parents[4]
PAGE = 64
COLD = 256 << 20  # bytes of keys and values before any is read again
MOST_COPIES = 64
GRAPH = 4 << 30  # bytes that a graph reads, if 64 launches do: about a millisecond
SAMPLES = 3  # rows that are compared
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
POINTERS = ("Q", "K", "V", "new_K", "new_V", "O", "LSE", "table", "lengths", "scratch", "stream")
Row = dict[str, Any]


class Call(ctypes.Structure):
    """struct fa_decode_call of peer.hpp."""

    _fields_ = ([(name, ctypes.c_int64) for name in ("B", "Hq", "Hkv", "Nq", "Nk", "d", "dtype", "page_size", "pages",
                                                      "table_stride", "splits", "scratch_bytes")]
                + [(name, ctypes.c_void_p) for name in POINTERS])


class Failed(Exception):
    """No figure for this contender here."""


@dataclass(frozen=True)
class Setting:
    B: int
    Hq: int
    Hkv: int
    N: int
    d: int
    Nq: int = 1

    @property
    def bytes(self) -> int:
        """Of K and V."""
        return 2 * self.B * self.Hkv * self.N * self.d * 2

    @property
    def copies(self) -> int:
        return max(1, min(MOST_COPIES, math.ceil(COLD / self.bytes)))

    def __str__(self) -> str:
        return f"B {self.B}, Hq {self.Hq}, Hkv {self.Hkv}, d {self.d}, N {self.N}, Nq {self.Nq}"


class Tensors:
    """Inputs and a place for the result. K and V have `copies` caches, one behind the other."""

    def __init__(self, s: Setting) -> None:
        self.setting = s
        shape = (s.copies, s.B, s.Hkv, s.N, s.d)
        self.Q = torch.randn(s.B, s.Hq, s.Nq, s.d, device="cuda", dtype=torch.bfloat16)
        self.K, self.V = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for X in (self.K, self.V):  # all at once would need as much again
            for part in X.view(-1).split(1 << 28):
                part.normal_()
        self.O = torch.full_like(self.Q, math.nan)
        self.pages = s.B * s.N // PAGE
        self.table = torch.randperm(self.pages, device="cuda").to(torch.int32).view(s.B, s.N // PAGE)
        self.lengths = torch.full((s.B,), s.N, device="cuda", dtype=torch.int64)
        some = sorted({(b, h) for b in (0, s.B // 2, s.B - 1) for h in (0, s.Hq // 2, s.Hq - 1)})
        self.samples = [(*one, random.randrange(s.Nq)) for one in random.sample(some, min(SAMPLES, len(some)))]
        self.samples[0] = (*self.samples[0][:2], s.Nq - 1)  # who asks with the last query alone has this one
        self.want: dict[tuple[bool, int, int, int], torch.Tensor] = {}

    def keys(self, X: torch.Tensor, b: int, g: int, paged: bool) -> torch.Tensor:
        """Those of the first copy, in fp64."""
        s = self.setting
        if not paged:
            return X[0, b, g].double()
        return X[0].view(self.pages, s.Hkv, PAGE, s.d)[self.table[b].long(), g].reshape(s.N, s.d).double()

    def last_tokens(self, X: torch.Tensor, paged: bool) -> torch.Tensor:
        """Those of the queries, of the first copy: [B, Hkv, Nq, d]."""
        s = self.setting
        if not paged:
            return X[0, :, :, s.N - s.Nq:].contiguous()
        at = torch.arange(s.N - s.Nq, s.N, device="cuda")
        pages = self.table[:, at // PAGE].long()
        return X[0].view(self.pages, s.Hkv, PAGE, s.d)[pages, :, at % PAGE].transpose(1, 2).contiguous()

    def expected(self, paged: bool, b: int, h: int, i: int) -> torch.Tensor:
        key = (paged, b, h, i)
        if key not in self.want:
            s = self.setting
            g, seen = h // (s.Hq // s.Hkv), s.N - s.Nq + i + 1
            scores = self.keys(self.K, b, g, paged)[:seen] @ self.Q[b, h, i].double() / math.sqrt(s.d)
            self.want[key] = torch.softmax(scores, 0) @ self.keys(self.V, b, g, paged)[:seen]
        return self.want[key]

    def error(self, got: torch.Tensor, paged: bool) -> float:
        """Relative, in the L2 norm, of the worst row; NaN stays NaN. `got` has the last queries, or all."""
        errors = []
        for b, h, i in self.samples:
            i_got = i - self.setting.Nq + got.shape[2]
            if i_got < 0:
                continue
            want = self.expected(paged, b, h, i)
            errors.append(((got[b, h, i_got].double() - want).norm() / want.norm()).item())
        return math.nan if any(map(math.isnan, errors)) else max(errors)


@dataclass
class Contender:
    name: str
    launch: Callable[[int], None]  # on the current stream, with a copy of the cache
    result: Callable[[], torch.Tensor]  # [B, Hq, Nq, d], or of the last queries
    paged: bool = False
    notes: Row = field(default_factory=dict)
    graph: Any = None
    ms: list[float] = field(default_factory=list)
    computes: bool = True  # and so can be right or wrong


# ---------------------------------------------------------------- ours

class Library:
    def __init__(self, path: Path, more: Sequence[str] = ()) -> None:
        try:
            self.c = ctypes.CDLL(str(path.resolve()))
            for name in ("fa_decode_forward", "fa_decode_plan", "fa_peer_compiler", "fa_peer_flags", *more):
                getattr(self.c, name).restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            sys.exit(f"decode_bench.py: {path}: {error}")

    def contender(self, t: Tensors, name: str, splits: int, paged: bool, lengths: bool = True, appends: bool = False,
                  last: bool = False) -> Contender:
        """appends: keys and values of the queries come with them. last: the last query alone."""
        s = t.setting
        Q, O = (X[:, :, -1:].contiguous() if last else X for X in (t.Q, t.O))
        call = Call(B=s.B, Hq=s.Hq, Hkv=s.Hkv, Nq=Q.shape[2], Nk=s.N, d=s.d, dtype=2, splits=splits, Q=Q.data_ptr(),
                    O=O.data_ptr(), lengths=t.lengths.data_ptr() if lengths else None)
        new = [t.last_tokens(X, paged) for X in (t.K, t.V)] if appends else []
        if new:
            call.new_K, call.new_V = (X.data_ptr() for X in new)
        if paged:
            call.page_size, call.pages, call.table_stride = PAGE, t.pages, s.N // PAGE
            call.table = t.table.data_ptr()
        size, parts = ctypes.c_int64(), ctypes.c_int64()
        complain(self.c.fa_decode_plan(ctypes.byref(call), ctypes.byref(size), ctypes.byref(parts)))
        scratch = torch.empty(size.value // 4 + 64, device="cuda", dtype=torch.float32)
        call.scratch, call.scratch_bytes, call.splits = scratch.data_ptr(), 4 * scratch.numel(), parts.value

        def launch(copy: int, _alive: object = (scratch, Q, new)) -> None:
            call.K, call.V = t.K[copy].data_ptr(), t.V[copy].data_ptr()
            call.stream = torch.cuda.current_stream().cuda_stream
            complain(self.c.fa_decode_forward(ctypes.byref(call)))
        return Contender(name, launch, lambda: O, paged, {"splits": parts.value})


def complain(error: bytes | None) -> None:
    if error:
        raise Failed(error.decode())


# ---------------------------------------------------------------- the others

def sdpa(t: Tensors, name: str, backend: SDPBackend) -> Contender:
    last: dict[str, torch.Tensor] = {}
    options = {"enable_gqa": True} if t.setting.Hq != t.setting.Hkv else {}

    def launch(copy: int) -> None:
        with sdpa_kernel(backend):
            last["O"] = torch.nn.functional.scaled_dot_product_attention(t.Q, t.K[copy], t.V[copy], **options)
    return Contender(name, launch, lambda: last["O"])


def flex(t: Tensors) -> Contender:
    from torch.nn.attention.flex_attention import flex_attention
    compiled = torch.compile(flex_attention, dynamic=False)
    last: dict[str, torch.Tensor] = {}

    def launch(copy: int) -> None:
        last["O"] = compiled(t.Q, t.K[copy], t.V[copy], enable_gqa=t.setting.Hq != t.setting.Hkv)
    return Contender("flex", launch, lambda: last["O"])


def with_kvcache(t: Tensors, name: str, module: str) -> Contender:
    """FlashAttention's own decoding, of caches [B, N, Hkv, d]: views of ours."""
    function = __import__(module).flash_attn_with_kvcache
    last: dict[str, torch.Tensor] = {}
    q = t.Q.transpose(1, 2)

    def launch(copy: int) -> None:
        found = function(q, t.K[copy].transpose(1, 2), t.V[copy].transpose(1, 2))
        last["O"] = found[0] if isinstance(found, tuple) else found
    return Contender(name, launch, lambda: last["O"].transpose(1, 2))


def read(library: Library, K: torch.Tensor, V: torch.Tensor, never: torch.Tensor) -> torch.Tensor:
    """Both once, by peer_read.cu, which writes nothing."""
    stream = torch.cuda.current_stream().cuda_stream
    complain(library.c.fa_decode_read(ctypes.c_void_p(K.data_ptr()), ctypes.c_void_p(V.data_ptr()),
                                      ctypes.c_int64(K.nbytes), ctypes.c_void_p(never.data_ptr()),
                                      ctypes.c_void_p(stream)))
    return never


def reader(library: Library, t: Tensors) -> Contender:
    """The same bytes, and no attention: what a launch of this size can reach."""
    never = torch.zeros(1, device="cuda", dtype=torch.int32)

    def launch(copy: int) -> None:
        read(library, t.K[copy], t.V[copy], never)
    return Contender("read", launch, lambda: t.O, computes=False)


def readers(library: Library, bytes_: int) -> list[Contender]:
    """Ways to read a large tensor once: peer_read.cu, and PyTorch's."""
    x = torch.ones(bytes_ // 4, device="cuda", dtype=torch.float32)
    halves = x.view(2, -1)
    never = torch.zeros(1, device="cuda", dtype=torch.int32)
    kept: dict[str, torch.Tensor] = {}

    def of(name: str, f: Callable[[], torch.Tensor]) -> Contender:
        def launch(_: int) -> None:
            kept[name] = f()
        return Contender(name, launch, lambda: kept[name])
    ones = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    matrix = x.view(torch.bfloat16).view(-1, 4096)
    return [of("read", lambda: read(library, *halves, never)), of("sum", x.sum), of("amax", lambda: halves.amax(1)),
            of("mv", lambda: matrix @ ones)]


# ---------------------------------------------------------------- how long does it take?

def recorded(c: Contender, copies: int, bytes_: int) -> None:
    """A graph of launches, each with the next copy, that reads so much that its own start does not count."""
    count = max(copies, 2, min(MOST_COPIES, GRAPH // bytes_))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for n in range(2):
            c.launch(n % copies)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(count):
            c.launch(n % copies)
    c.graph, c.notes["launches"] = graph, count


def milliseconds(c: Contender, least: float) -> float:
    """Of one launch; the graph is replayed for at least so many milliseconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    c.graph.replay()
    begin.record()
    c.graph.replay()
    end.record()
    end.synchronize()
    once = begin.elapsed_time(end)
    times = max(1, min(200, math.ceil(least / max(once, 1e-3))))
    if times > 1:
        begin.record()
        for _ in range(times):
            c.graph.replay()
        end.record()
        end.synchronize()
        once = begin.elapsed_time(end) / times
    return once / c.notes["launches"]


def once(c: Contender, t: Tensors) -> float:
    """The error of one launch of the first copy, over an O of NaN."""
    t.O.fill_(math.nan if c.computes else 0)
    c.launch(0)
    torch.cuda.synchronize()
    return t.error(c.result(), c.paged) if c.computes else 0


def roof(library: Library, options: argparse.Namespace) -> Row:
    free, _ = torch.cuda.mem_get_info()
    size = min(4 << 30, free // 4) // (8 << 20) * (8 << 20)
    found: Row = {"bytes": size}
    for c in readers(library, size):
        try:
            recorded(c, 1, size)
            ms = [milliseconds(c, 5) for _ in range(options.rounds)]
            found[c.name] = round(1e-6 * size / statistics.median(ms), 1)
        except (Failed, RuntimeError) as error:
            found[c.name + "_failed"] = first_line(error)
    torch.cuda.empty_cache()
    figures = [value for name, value in found.items() if name in ("read", "sum", "amax", "mv")]
    if not figures:
        raise Failed(f"no way to read worked: {found}")
    found["GB_per_s"] = max(figures)
    return found


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


# ---------------------------------------------------------------- who runs where

MODULES = {"fa3_kvcache": "flash_attn_interface", "fa2_kvcache": "flash_attn"}


def contenders(library: Library, fa3: Library | None, t: Tensors,
               kind: str) -> Iterator[tuple[str, Callable[[], Contender]]]:
    yield "ours", lambda: library.contender(t, "ours", 0, False)
    if kind == "queries":
        yield "ours_paged", lambda: library.contender(t, "ours_paged", 0, True)
        yield "ours_appends", lambda: library.contender(t, "ours_appends", 0, False, appends=True)
        yield "ours_paged_appends", lambda: library.contender(t, "ours_paged_appends", 0, True, appends=True)
        if t.setting.Nq > 1:
            yield "ours_last", lambda: library.contender(t, "ours_last", 0, False, last=True)
        if fa3:
            yield "fa3", lambda: fa3.contender(t, "fa3", 0, False, lengths=False)
        return
    if kind == "parts":
        for parts in (1, 2, 4, 8, 16, 32, 64):
            yield f"ours_{parts}", lambda parts=parts: library.contender(t, f"ours_{parts}", parts, False)  # type: ignore[misc]
        return
    yield "ours_paged", lambda: library.contender(t, "ours_paged", 0, True)
    yield "ours_1", lambda: library.contender(t, "ours_1", 1, False)
    yield "read", lambda: reader(library, t)
    for name, backend in BACKENDS.items():
        yield name, lambda name=name, backend=backend: sdpa(t, name, backend)  # type: ignore[misc]
    if fa3:
        yield "fa3", lambda: fa3.contender(t, "fa3", 0, False, lengths=False)
        yield "fa3_paged", lambda: fa3.contender(t, "fa3_paged", 0, True, lengths=False)
    for name, module in MODULES.items():
        yield name, lambda name=name, module=module: with_kvcache(t, name, module)  # type: ignore[misc]
    if kind == "flex":
        yield "flex", lambda: flex(t)


def measured(library: Library, s: Setting, kind: str, options: argparse.Namespace) -> list[Row]:
    """A row for each contender: its times round by round, or why it has none."""
    t = Tensors(s)
    base = {"kind": kind, "B": s.B, "Hq": s.Hq, "Hkv": s.Hkv, "Nq": s.Nq, "d": s.d, "N": s.N, "bytes": s.bytes,
            "copies": s.copies}
    rows: list[Row] = []
    good: list[Contender] = []
    for name, make in contenders(library, options.fa3, t, kind):
        try:
            c = make()
            error = once(c, t)
            if not error < 1e-2:
                raise Failed(f"wrong before timing: relative error {error:.3g}")
            recorded(c, s.copies, s.bytes)
            c.notes["error"] = float(f"{error:.3g}")
            good.append(c)
        except (ImportError, AttributeError):
            continue  # a module that is not there
        except Exception as error:  # noqa: BLE001  # whoever cannot run here is told of, and the others go on
            rows.append(base | {"who": name, "failed": first_line(error)})
            torch.cuda.synchronize()
    for _ in range(options.rounds):
        for c in random.sample(good, len(good)):
            c.ms.append(milliseconds(c, options.block))
    for c in good:
        error = once(c, t)
        if not error < 1e-2:
            rows.append(base | {"who": c.name, "failed": f"wrong after timing: relative error {error:.3g}"})
            continue
        ms = statistics.median(c.ms)
        rows.append(base | {"who": c.name} | c.notes | {"ms": [float(f"{x:.5g}") for x in c.ms],
                                                        "GB_per_s": round(1e-6 * s.bytes / ms, 1)})
    return rows


def settings(options: argparse.Namespace) -> list[tuple[str, Setting]]:
    """What matters most comes first: time or memory may end before the list does."""
    heads = [(32, 8, 128), (32, 32, 64)]
    main = [("main", Setting(B, Hq, Hkv, N, d)) for N in (16384, 1024, 131072, 4096, 65536)
            for Hq, Hkv, d in heads for B in (1, 8, 64)]
    parts = [("parts", Setting(B, 32, 8, N, 128)) for B, N in ((1, 16384), (1, 131072), (8, 16384), (64, 4096))]
    some = [("flex", Setting(B, 32, 8, 16384, 128)) for B in (1, 8, 64)][:options.flex]
    queries = [("queries", Setting(B, Hq, Hkv, N, d, Nq)) for B, N in ((1, 16384), (8, 16384), (64, 4096))
               for Hq, Hkv, d in heads for Nq in (1, 2, 4, 8)]
    return main[:6] + parts + main[6:] + queries + some


def gpu(fields: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0"],
                              capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def commit() -> str:
    if given := os.environ.get("FA_COMMIT"):
        return given
    try:
        done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True,
                              check=False)
        return done.stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def context(library: Library, options: argparse.Namespace) -> Row:
    device = torch.cuda.get_device_properties(0)
    fa3 = {name: getattr(options.fa3.c, f"fa_peer_{function}")().decode()
           for name, function in (("fa3_commit", "commit"), ("cutlass_commit", "cutlass"))} if options.fa3 else {}
    return {"device": device.name, "isa": f"sm_{device.major}{device.minor}", "cores": device.multi_processor_count,
            "memory_bytes": device.total_memory, "compiler": library.c.fa_peer_compiler().decode(),
            "flags": library.c.fa_peer_flags().decode(), "commit": commit(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "torch": torch.__version__,
            "cudnn": str(torch.backends.cudnn.version()), "driver": gpu("driver_version"),
            "clocks_limits": gpu("clocks.max.sm,clocks.max.mem,power.limit"), "seed": options.seed,
            "method": f"{options.rounds} rounds, order drawn anew; CUDA graphs of a launch for each copy of the cache, "
                      f"{COLD >> 20} MiB of keys and values or more before any is read again, replayed for "
                      f"{options.block:g} ms; bf16, one query a sequence; bytes are those of K and V"} | fa3


def write(path: Path, data: Row) -> None:
    """All of it or nothing."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=None, separators=(",", ":")).replace('{"kind"', '\n{"kind"') + "\n",
                    encoding="utf-8")
    os.replace(part, path)


def told(rows: Sequence[Row], best: float) -> str:
    return "  ".join(f"{r['who']} {r['GB_per_s']:.0f} ({100 * r['GB_per_s'] / best:.0f} %)" if "ms" in r else
                     f"[{r['who']}: {r['failed'][:60]}]" for r in rows)


def run(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        sys.exit("decode_bench.py: PyTorch finds no GPU")
    library = Library(options.library, ("fa_decode_read",))
    began = time.monotonic()
    data: Row = {"context": context(library, options), "roof": roof(library, options), "skipped": [], "rows": []}
    best = data["roof"]["GB_per_s"]
    print(f"{data['context']['device']}: reads {best:.0f} GB/s", flush=True)
    for kind, s in settings(options):
        random.seed(f"{options.seed} {kind} {s}")
        torch.manual_seed(random.getrandbits(32))
        free, _ = torch.cuda.mem_get_info()
        needed = s.copies * s.bytes * 1.02 + (1 << 30)
        late = time.monotonic() - began > options.limit
        if late or needed > free or s.N > options.longest:
            why = "no time left" if late else "longer than asked for" if s.N > options.longest else "too little memory"
            data["skipped"].append({"kind": kind, "setting": str(s), "why": why})
            print(f"{kind:5}  {s}: {why}", flush=True)
            continue
        try:
            with torch.no_grad():
                rows = measured(library, s, kind, options)
        except RuntimeError as error:
            rows = [{"kind": kind, "B": s.B, "Hq": s.Hq, "Hkv": s.Hkv, "d": s.d, "N": s.N, "who": "all",
                     "failed": first_line(error)}]
        data["rows"] += rows
        torch.cuda.empty_cache()
        print(f"{kind:5}  {s}: {told(rows, best)}", flush=True)
        write(options.json, data)
    data["context"]["seconds"] = round(time.monotonic() - began, 1)
    data["context"]["clocks_after"] = gpu("clocks.sm,temperature.gpu,power.draw")
    write(options.json, data)
    print(f"{options.json}, {data['context']['seconds']} s")
    ours = [row for row in data["rows"] if row["who"].startswith("ours")]
    return 0 if ours and all("ms" in row for row in ours) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path, help="build/06_optimized/libstage06_peer.so")
    parser.add_argument("json", type=Path, help="where the results go")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block", type=float, default=4, help="milliseconds of launches per timing")
    parser.add_argument("--limit", type=float, default=140, help="seconds after which no setting is begun")
    parser.add_argument("--longest", type=int, default=131072, help="tokens")
    parser.add_argument("--fa3", type=lambda path: Library(Path(path), ("fa_peer_commit", "fa_peer_cutlass")),
                        metavar="LIBRARY", help="FlashAttention-3 (build/fa3/libfa3.so)")
    parser.add_argument("--flex", type=int, default=3, help="settings with FlexAttention, 0 to 3")
    parser.add_argument("--seed", type=int, default=1)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
