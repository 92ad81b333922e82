"""./learn train --speed: how many tokens a second the model of train.py learns from, against the length of its context.

Each length has as many tokens a step. Of each round every attention makes some steps, one attention after the other, so
that ratios are of one time and one temperature.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any, Callable

import torch
from generate import Attend
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS, WIDTH, LAYERS, HEADS = 32768, 1024, 6, 8  # of a step; d = 128
BACKENDS = {"sdpa, FlashAttention-2": SDPBackend.FLASH_ATTENTION, "sdpa, cuDNN": SDPBackend.CUDNN_ATTENTION}
ROUNDS, STEPS = 7, 3


def sdpa(backend: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attend


class Training:
    """Steps of one model with one attention, on tokens that do not matter."""

    def __init__(self, gpt: Callable[..., nn.Module], attend: Attend, N: int) -> None:
        torch.manual_seed(0)
        self.model = gpt(96, N, WIDTH, LAYERS, HEADS, attend).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.tokens = torch.randint(96, (TOKENS // N, N + 1), device="cuda")

    def seconds(self, steps: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            with torch.autocast("cuda", torch.bfloat16):
                logits = self.model(self.tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten())
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps


def measure(gpt: Callable[..., nn.Module], ours: Attend, lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
    """For each length and attention: tokens a second of each round."""
    rows = []
    for N in lengths:
        trainings = {}
        for name, attend in {"this course": ours, **{name: sdpa(one) for name, one in BACKENDS.items()}}.items():
            try:
                trainings[name] = Training(gpt, attend, N)
                trainings[name].seconds(2)
            except RuntimeError as error:
                if name not in BACKENDS:
                    raise
                trainings.pop(name, None)  # a backend that this GPU or this PyTorch does not have
                print(f"N {N}: without {name}: {str(error).splitlines()[0]}", flush=True)
        rounds: dict[str, list[float]] = {name: [] for name in trainings}
        for _ in range(ROUNDS):
            for name, training in trainings.items():
                rounds[name].append(TOKENS / training.seconds(STEPS))
        theirs = {name: statistics.median(all_of_it) for name, all_of_it in rounds.items() if name in BACKENDS}
        best = max(theirs, key=lambda name: theirs[name]) if theirs else ""
        for name, all_of_it in rounds.items():
            rows.append({"N": N, "attention": name, "tokens_per_second": all_of_it})
        said = ", ".join(f"{name} {statistics.median(all_of_it):,.0f}" for name, all_of_it in rounds.items())
        ratio = statistics.median(a / b for a, b in zip(rounds["this course"], rounds[best])) if best else float("nan")
        print(f"N {N:6}: tokens a second: {said}; {ratio:.3f} of the faster", flush=True)
    return rows


def record(rows: list[dict[str, Any]], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
             "model": f"{LAYERS} layers, width {WIDTH}, {HEADS} heads, bf16, {TOKENS} tokens a step"}
    file.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
