#!/usr/bin/env python3
"""./learn train: a small GPT learns to write like this course, a character at a time, with the attention that you name.

The model is Transformer blocks in plain PyTorch; line by line it is what a large one is. Its attention is one call.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import re
import shlex
import signal
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Callable, NoReturn, Optional

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUT = ROOT / "build" / "train"
WRONG, USAGE, MISSING = 1, 2, 3
SAVE_EVERY = 10.0  # seconds that a crash may cost
# On a GPU tensor cores multiply: weights are fp32, products bf16 (autocast).
SIZES = {"cpu": {"context": 64, "width": 96, "layers": 3, "heads": 3, "batch": 16, "steps": 1000, "rate": 5e-3},
         "cuda": {"context": 1024, "width": 512, "layers": 6, "heads": 4, "batch": 16, "steps": 1000, "rate": 1e-3}}

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
except ImportError:
    sys.exit("train: this Python has no PyTorch; ./learn torch brings it, FA_PYTHON names one that has it")
from generate import Attend, Caches, DecodeCache, KeptCache, generate  # noqa: E402


def stop(code: int, why: str) -> NoReturn:
    print(f"train: {why}", file=sys.stderr)
    sys.exit(code)


# ---- the text: this course ---------------------------------------------------------------------

def text() -> str:
    """What is running text on its pages: no marks, code, tables or headings."""
    pages = sorted(ROOT.glob("0?_*/**/*.md")) + sorted(ROOT.glob("docs/*.md"))
    pages = [page for page in pages if not {"mine", "hunt"} & set(page.parts)]
    bare = (re.sub(r"<!--.*?-->|^```.*?^```$|^[|#<!].*?$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
            for page in pages)
    words = re.sub(r"!?\[([^]]*)\]\([^)]*\)|[*`]", r"\1", "\n".join(bare))  # of links what is read, and no stars
    return re.sub(r"\n{2,}", "\n\n", words)


class Characters:
    """Tokens are characters: the most frequent ones, and one token for all others."""

    def __init__(self, text: str, most: int = 96) -> None:
        often = sorted(set(text), key=lambda c: (-text.count(c), c))[:most - 1]
        self.all = ["\N{REPLACEMENT CHARACTER}", *sorted(often)]
        self.number = {c: n for n, c in enumerate(self.all)}

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self.number.get(c, 0) for c in text])

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.all[n] for n in tokens)


# ---- the model ---------------------------------------------------------------------------------

class Block(nn.Module):
    """x + attention(norm x), then x + MLP(norm x)."""

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, cache: Optional[Attend] = None) -> Tensor:
        B, N, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, N, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # [B, H, N, d], views: nothing is copied
        attend = cache or self.attend
        x = x + self.out(attend(q, k, v).transpose(1, 2).reshape(B, N, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, tokens: int, context: int, width: int, layers: int, heads: int, attend: Any) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads, attend) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.token.weight
        for part in self.modules():
            if isinstance(part, (nn.Linear, nn.Embedding)):
                nn.init.normal_(part.weight, std=0.02)

    def forward(self, tokens: Tensor, place: int = 0, caches: Caches = None) -> Tensor:
        """Of tokens that stand at `place` and behind it; those before it are in the caches."""
        x = self.token(tokens) + self.place.weight[place:place + tokens.shape[1]]
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks)):
            x = block(x, cache)
        return self.head(self.norm(x))


# ---- its attention, by name --------------------------------------------------------------------

def stage_and_place(name: str) -> tuple[str, str]:
    """Of "mine" those of the file that was saved last. A stage without a device runs on the CPU alone."""
    file = Path(name)
    if name == "mine":
        saved = [(file.stat().st_mtime, file.relative_to(ROOT)) for file in ROOT.glob("0?_*/mine/**/*.c*")
                 if file.relative_to(ROOT).parts[2] not in ("beyond", "ring")]
        file = max(saved)[1] if saved else file
    stage = str(file)[:2]
    return stage, "cpu" if stage in ("00", "01", "02", "03") or file.suffix in (".cpp", ".on_cpu") else ""


# The queries are the last of the tokens whose keys are there. In training those are all; in writing with a cache one.
def attention_by_name(name: str, device: str, context: int) -> tuple[Attend, Callable[[], Attend]]:
    """The attention, and what makes a cache for it."""
    if name == "sdpa":
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return attend, lambda: KeptCache(attend)
    if os.environ.get("FLASH_FROM_SCRATCH_INSTALLED"):  # not the one beside this file
        sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != HERE]
    try:
        from flash_from_scratch import attention
    except (ImportError, OSError) as error:
        stop(MISSING, str(error))
    stage, _ = stage_and_place(name)
    if stage == "00":
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # 00 has no mask. So each row is a call of its own, with the keys that it may see.
            before = k.shape[2] - q.shape[2]
            rows = [attention(q[:, :, i:i + 1], k[:, :, :before + i + 1], v[:, :, :before + i + 1], kernel=name)
                    for i in range(q.shape[2])]
            return torch.cat(rows, dim=2)
    elif stage == "06":
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # tensor cores take 16 bits
            q16, k16, v16 = (x.to(torch.bfloat16) for x in (q, k, v))
            return attention(q16, k16, v16, causal="bottom_right", kernel=name).to(q.dtype)
    elif stage in ("04", "05") and device == "cuda":
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # and these fp32
            with torch.autocast(device, enabled=False):
                return attention(q.float(), k.float(), v.float(), causal="bottom_right", kernel=name).to(q.dtype)
    else:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, causal="bottom_right", kernel=name)
    try:  # what cannot work is said before anything begins
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            attend(*(torch.zeros(1, 1, 4, 32, device=device) for _ in range(3)))
    except (ValueError, OSError, RuntimeError) as error:
        stop(MISSING if isinstance(error, OSError) else USAGE, str(error).splitlines()[0])
    if device == "cuda" or stage in ("04", "06"):  # where kernels of CUDA run, on the emulator too
        halves = stage == "06" or device == "cuda" and stage not in ("04", "05")
        return attend, lambda: DecodeCache(context, torch.bfloat16 if halves else torch.float32)
    return attend, lambda: KeptCache(attend)


# ---- training ----------------------------------------------------------------------------------

class Run:
    def __init__(self, options: argparse.Namespace) -> None:
        self.o = options
        torch.manual_seed(options.seed)
        everything = text()
        self.characters = Characters(everything)
        tokens = self.characters.encode(everything).to(options.device)
        self.seen, self.unseen = tokens[:-len(tokens) // 20], tokens[-len(tokens) // 20:]
        attend, self.new_cache = attention_by_name(options.attention, options.device, options.context)
        self.model = Gpt(len(self.characters.all), options.context, options.width, options.layers, options.heads,
                         attend)
        self.model.to(options.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.rate, betas=(0.9, 0.95),
                                           weight_decay=0.1)
        self.dice = torch.Generator().manual_seed(options.seed)  # which passages are read
        self.step, self.seconds, self.losses = 0, 0.0, []  # (step, seconds, loss)
        self.saved = time.monotonic()

    def passages(self, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(tokens) - self.o.context - 1, (count,), generator=self.dice)
        read = torch.stack([tokens[s:s + self.o.context + 1] for s in starts.tolist()])
        return read[:, :-1], read[:, 1:]

    def loss(self, tokens: Tensor, count: int) -> Tensor:
        before, after = self.passages(tokens, count)
        with self.in_bf16():
            logits = self.model(before)
        return functional.cross_entropy(logits.flatten(0, 1).float(), after.flatten())

    def in_bf16(self) -> torch.autocast:
        return torch.autocast(self.o.device, torch.bfloat16, enabled=self.o.device == "cuda")

    def rate(self) -> float:
        """Up over 50 steps, then down along a cosine to a tenth."""
        cosine = torch.cos(torch.tensor(self.step / self.o.steps * 3.1416)).item()
        return self.o.rate * min(1, (self.step + 1) / 50) * (0.55 + 0.45 * cosine)

    def one_step(self) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        loss = self.loss(self.seen, self.o.batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def train(self) -> bool:
        """True at the end; False if Ctrl-C came, after the step that was under way."""
        stopped = []
        signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
        began, told = time.monotonic() - self.seconds, 0.0
        while self.step < self.o.steps and not stopped:
            loss = self.one_step()
            self.seconds = time.monotonic() - began
            if self.step % 10 == 0 or self.step == self.o.steps or not math.isfinite(loss):
                self.losses.append((self.step, round(self.seconds, 2), round(loss, 4)))
            if not math.isfinite(loss):
                self.save_losses()  # weights are lost, and the last ones kept were not
                stop(WRONG, f"the loss of step {self.step} is {loss}: the kernel is wrong, or --rate {self.o.rate} is "
                     "too much for it")
            if self.seconds - told > (0.2 if sys.stdout.isatty() else 10) or self.step == self.o.steps:
                told = self.seconds
                left = self.seconds / self.step * (self.o.steps - self.step)
                print(f"step {self.step}/{self.o.steps}, loss {loss:.3f}, {left:.0f} s left  ",
                      end="\r" if sys.stdout.isatty() else "\n", flush=True)
            if time.monotonic() - self.saved > SAVE_EVERY:
                self.save()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if sys.stdout.isatty():
            print()
        self.save()
        return not stopped

    @torch.no_grad()
    def judged(self) -> float:
        """The loss on text that it was not trained on."""
        self.dice.manual_seed(0)
        self.model.eval()
        return sum(self.loss(self.unseen, self.o.batch).item() for _ in range(8)) / 8

    def writes(self, new_caches: Callable[[], Caches], lines: int = 3, longest: int = 100) -> tuple[str, float]:
        """So many lines, the same for the same seed, and in how many seconds."""
        dice = torch.Generator().manual_seed(self.o.seed)

        def draw(logits: Tensor) -> int:
            return int(torch.multinomial(torch.softmax(logits.float() / 0.7, -1).cpu(), 1, generator=dice))

        began, start = time.monotonic(), self.characters.encode("\nThe ").tolist()
        with self.in_bf16():
            tokens = generate(self.model, start, lines * longest, self.o.context, new_caches, draw)
        wrapped = textwrap.wrap(self.characters.decode(tokens), longest)[:lines]
        return "\n".join(wrapped), time.monotonic() - began

    def writes_twice(self) -> str:
        """With a cache, and again without one: the same text, but for rounding."""
        text, seconds = self.writes(lambda: [self.new_cache() for _ in self.model.blocks])
        again, longer = self.writes(lambda: None)
        how = ("by the decode walk, with K and V in pages" if isinstance(self.new_cache(), DecodeCache) else
               "with K and V kept in one piece, since the decode walk is for GPUs and the emulator")
        parted = next((n for n, (a, b) in enumerate(zip(text, again)) if a != b), len(text))
        same = "the same text" if text == again else f"from character {parted} on another text, by rounding"
        return f"{text}\nwritten in {seconds:.2f} s {how}; in {longer:.2f} s with all computed again, {same}"

    # The file is either the old one or the new one, whenever the process ends.
    def file(self, suffix: str) -> Path:
        return OUT / f"{re.sub('[^a-z0-9_.]+', '_', self.o.attention)}{suffix}"

    def save(self) -> None:
        OUT.mkdir(parents=True, exist_ok=True)
        new = self.file(".pt.part")
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                    "dice": self.dice.get_state(), "step": self.step, "seconds": self.seconds, "losses": self.losses,
                    "shape": shape_of(self.o)}, new)
        os.replace(new, self.file(".pt"))
        self.save_losses()
        self.saved = time.monotonic()

    def save_losses(self) -> None:
        OUT.mkdir(parents=True, exist_ok=True)
        with open(self.file(".csv.part"), "w", newline="", encoding="utf-8") as out:
            csv.writer(out).writerows([("step", "seconds", "loss"), *self.losses])
        os.replace(self.file(".csv.part"), self.file(".csv"))

    def keep(self) -> None:
        """What another run has left, before this one writes over it."""
        if self.file(".pt").is_file():
            os.replace(self.file(".pt"), self.file(".before.pt"))
            print(f"the run before this one is kept in {self.file('.before.pt').relative_to(ROOT)}")

    def load(self) -> None:
        if not self.file(".pt").is_file():
            stop(USAGE, f"nothing to resume: {self.file('.pt').relative_to(ROOT)} is not there")
        kept = torch.load(self.file(".pt"), map_location=self.o.device, weights_only=True)
        if kept["shape"] != shape_of(self.o):
            stop(USAGE, f"{self.file('.pt').relative_to(ROOT)} is of other options than these: {kept['shape']}")
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.dice.set_state(kept["dice"].cpu())
        self.step, self.seconds, self.losses = kept["step"], kept["seconds"], [tuple(one) for one in kept["losses"]]


def shape_of(o: argparse.Namespace) -> str:
    return f"context {o.context}, width {o.width}, layers {o.layers}, heads {o.heads}, seed {o.seed}"


def chart() -> str:
    """The losses of all runs that are kept, in one picture."""
    try:
        import matplotlib
        matplotlib.use("svg")
        from matplotlib import pyplot
    except ImportError:
        return "no chart: this Python has no matplotlib"
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
    files = sorted(OUT.glob("*.csv"))
    for file in files:
        rows = [tuple(map(float, row)) for row in list(csv.reader(file.read_text(encoding="utf-8").splitlines()))[1:]]
        for panel, column in zip(axes, (0, 1)):
            panel.plot([row[column] for row in rows], [row[2] for row in rows], label=file.stem, linewidth=1)
    for panel, words in zip(axes, ("step", "seconds")):
        panel.set_xlabel(words)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("loss of a batch")
    axes[0].legend(frameon=False)
    figure.savefig(OUT / "losses.svg", facecolor="white")
    return f"{(OUT / 'losses.svg').relative_to(ROOT)} shows the losses of {', '.join(file.stem for file in files)}"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        stop(USAGE, message)


def arguments() -> argparse.Namespace:
    def positive(words: str) -> int:
        if not words.isdigit() or int(words) == 0:
            raise argparse.ArgumentTypeError(f"a number from 1 on, got '{words}'")
        return int(words)

    parser = Parser(prog="./learn train",
                    description="A small GPT on the text of this course, with the attention that you name.")
    parser.add_argument("--attention", default="best", metavar="NAME",
                        help="best, sdpa (PyTorch's), a stage or a rung like 00, 03, 06.pingpong, or mine")
    parser.add_argument("--resume", action="store_true", help="go on where it was stopped")
    parser.add_argument("--speed", action="store_true",
                        help="tokens a second against the length of the context, beside PyTorch's; wants a GPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="", metavar="cpu|cuda",
                        help="default: a GPU if one answers and the kernel runs there")
    for name, value in SIZES["cpu"].items():
        parser.add_argument(f"--{name}", type=float if name == "rate" else positive,
                            help=f"{value}, on a GPU {SIZES['cuda'][name]}")
    options = parser.parse_args()
    if options.device not in ("", "cpu", "cuda"):
        parser.error(f"--device is cpu or cuda, got '{options.device}'")
    if options.device == "cuda" and not torch.cuda.is_available():
        stop(MISSING, "no GPU answers; --device cpu trains without one")
    options.device = options.device or stage_and_place(options.attention)[1] or (
        "cuda" if torch.cuda.is_available() else "cpu")
    for name, value in SIZES[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.width % options.heads:
        parser.error(f"--width must be a multiple of --heads, got {options.width} and {options.heads}")
    return options


def speed(options: argparse.Namespace) -> int:
    """How many tokens a second a larger model learns from, with contexts of several lengths; beside PyTorch's."""
    if options.device != "cuda":
        stop(MISSING, "--speed compares kernels of a GPU, and none is there")
    from speed import measure, record
    attend, _ = attention_by_name(options.attention, "cuda", options.context)
    record(measure(Gpt, attend), OUT / "speed.json")
    print(f"in {(OUT / 'speed.json').relative_to(ROOT)}")
    return 0


def main() -> int:
    options = arguments()
    if options.speed:
        return speed(options)
    try:
        run = Run(options)
        if options.resume:
            run.load()
        else:
            run.keep()
    except KeyboardInterrupt:
        stop(130, "stopped before the first step")
    parameters = sum(one.numel() for one in run.model.parameters())
    print(f"{len(run.seen) + len(run.unseen)} characters, {parameters} parameters, attention {options.attention} on "
          f"{torch.cuda.get_device_name() if options.device == 'cuda' else 'the CPU'}", flush=True)
    if not run.train():
        asked = [word for word in sys.argv[1:] if word != "--resume"]
        print(f"stopped after step {run.step}; go on with: ./learn train {shlex.join([*asked, '--resume'])}")
        return 130
    print(f"loss {run.judged():.3f} on text that it has not seen, after {run.seconds:.0f} s of training; "
          "three lines of its own:")
    print(run.writes_twice())
    print(chart())
    return 0


if __name__ == "__main__":
    sys.exit(main())
