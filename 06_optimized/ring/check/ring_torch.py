"""PyTorch's context parallelism, timed as the ring is: one process a rank, started by torchrun.

    python -m torch.distributed.run --nproc-per-node 2 ring_torch.py --json OUT.json [options of the ring's program]

Each rank has its rows of Q, K and V; under a causal mask PyTorch deals them out as zigzag does. What cannot run is a
sentence in the file, and no crash. Rank 0 writes.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path


def options() -> argparse.Namespace:
    def numbers(text):
        return [int(part) for part in text.split(",")]
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=numbers, default=[32768])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-heads", type=numbers, default=None)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--type", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--masks", type=lambda text: text.split(","), default=["none"])
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--backends", type=lambda text: text.split(","), default=["cudnn", "flash"])
    parser.add_argument("--rotate", type=lambda text: text.split(","), default=["alltoall", "allgather"])
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


def words(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:400]


class Peer:
    """All of PyTorch that is used, so that what is missing is known by name."""

    def __init__(self, asked: argparse.Namespace):
        import torch
        import torch.distributed as dist
        self.torch, self.dist, self.asked = torch, dist, asked
        local = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local)
        dist.init_process_group("nccl")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental import _attention
        from torch.nn.attention import SDPBackend, sdpa_kernel
        self.context_parallel, self.attention, self.sdpa_kernel = context_parallel, _attention, sdpa_kernel
        self.backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        self.mesh = init_device_mesh("cuda", (self.ranks,))
        self.dtype = torch.bfloat16 if asked.type == "bf16" else torch.float16

    def balance(self, on: bool) -> None:
        """Zigzag. The switch has moved between versions; without a mask PyTorch refuses it."""
        from torch.distributed.tensor.experimental import _attention
        holders = [_attention]
        try:
            from torch.distributed.tensor.experimental._context_parallel import _attention as newer
            holders.append(newer)
        except ImportError:
            pass
        for holder in holders:
            if hasattr(holder, "_cp_options"):
                holder._cp_options.enable_load_balance = on
                return
        raise RuntimeError("no _cp_options.enable_load_balance here")

    def slowest(self, value: float) -> float:
        told = self.torch.tensor([value], device="cuda", dtype=self.torch.float64)
        self.dist.all_reduce(told, op=self.dist.ReduceOp.MAX)
        return float(told.item())

    def failed_anywhere(self, why: str) -> str:
        told = [None] * self.ranks
        self.dist.all_gather_object(told, why)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), "")

    def row(self, N: int, key_heads: int, mask: str, backend: str, rotate: str) -> dict:
        torch, asked = self.torch, self.asked
        row = {"method": f"PyTorch {backend} {rotate}", "ranks": self.ranks, "N": N, "Hq": asked.heads,
               "Hkv": key_heads, "d": asked.head_dim, "type": asked.type, "causal": mask == "causal",
               "order": "zigzag" if mask == "causal" else "contiguous"}
        self.attention.set_rotate_method(rotate)
        self.balance(mask == "causal")
        # PyTorch's ring has no groups where enable_gqa is refused: then each key head is repeated, as users do.
        for repeated in ([False, True] if key_heads < asked.heads else [False]):
            why = ""
            try:
                self.measure(row, N, key_heads, mask == "causal", self.backends[backend], repeated)
            except Exception as error:  # whatever it is, it is what there is to say
                why = words(error)
            torch.cuda.empty_cache()
            why = self.failed_anywhere(why)
            if not why:
                row.pop("refused", None)
                row["key_heads_repeated"] = repeated
                return row
            row["refused"] = why
        return row

    def measure(self, row: dict, N: int, key_heads: int, causal: bool, backend, repeated: bool) -> None:
        torch, asked = self.torch, self.asked
        functional = torch.nn.functional
        rows = N // self.ranks
        torch.manual_seed(1 + self.rank)

        def drawn(heads):
            return torch.randn(1, heads, rows, asked.head_dim, device="cuda", dtype=self.dtype)
        Q, K, V, dO = drawn(asked.heads), drawn(key_heads), drawn(key_heads), drawn(asked.heads)
        groups = asked.heads // key_heads

        def attention(q, k, v):
            if repeated:
                k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            extra = {"enable_gqa": True} if groups > 1 and not repeated else {}
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **extra)

        def forward():
            with torch.no_grad():
                attention(Q, K, V)

        def both():
            for x in (Q, K, V):
                x.requires_grad_(True)
                x.grad = None
            attention(Q, K, V).backward(dO)
            for x in (Q, K, V):
                x.requires_grad_(False)

        torch.cuda.reset_peak_memory_stats()
        # The context cuts what it is given into shards; what is here are the ranks' shards already.
        spare = torch.zeros(2 * self.ranks, device="cuda")
        with self.sdpa_kernel(backend), self.context_parallel(self.mesh, buffers=[spare], buffer_seq_dims=[0]):
            for name, f in [("forward", forward)] + ([("forward+backward", both)] if asked.backward else []):
                f()
                once = self.timed(f, 1)
                calls = max(1, min(1000, int(60 / max(once, 1e-3)) + 1))
                rounds = [self.timed(f, calls) for _ in range(asked.rounds)]
                row[name] = {"ms": statistics.median(rounds), "ms_least": min(rounds), "rounds": rounds,
                             "calls_a_round": calls}
        row["bytes_used_on_gpu"] = self.slowest(float(torch.cuda.max_memory_allocated()))

    def timed(self, f, calls: int) -> float:
        torch = self.torch
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self.dist.barrier()
        begun.record()
        for _ in range(calls):
            f()
        ended.record()
        torch.cuda.synchronize()
        return self.slowest(begun.elapsed_time(ended) / calls)


def main() -> None:
    asked = options()
    begun = time.monotonic()
    leads = os.environ.get("RANK", "0") == "0"
    found = {"peer": "PyTorch context_parallel", "rows": []}

    def save():
        if leads:
            asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    save()
    try:
        peer = Peer(asked)
        found["version"] = peer.torch.__version__
        found["machine"] = peer.torch.cuda.get_device_name()
        found["nccl"] = ".".join(str(part) for part in peer.torch.cuda.nccl.version())
    except Exception as error:  # the sentence is the result
        found["refused"] = words(error)
        save()
        return
    given_up: dict[tuple, int] = {}
    for N in asked.length:
        for key_heads in asked.key_heads or [asked.heads]:
            for mask in asked.masks:
                for backend in asked.backends:
                    for rotate in asked.rotate:
                        late = 0 < asked.seconds < time.monotonic() - begun
                        if peer.slowest(float(late)) > 0:
                            found["stopped_early"] = True
                            continue
                        kind = (backend, rotate, mask, key_heads)
                        if given_up.get(kind):
                            continue
                        row = peer.row(N, key_heads, mask, backend, rotate)
                        given_up[kind] = int("refused" in row)
                        found["rows"].append(row)
                        if leads:
                            print(json.dumps({name: row[name] for name in row if name != "rounds"}), flush=True)
                        save()
    peer.dist.destroy_process_group()


if __name__ == "__main__":
    main()
