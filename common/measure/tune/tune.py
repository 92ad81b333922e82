#!/usr/bin/env python3
"""`./learn tune`: which tile sizes are best on this GPU, and how far the hand-made choice is from them.

    tune.py --list --gpu h200       every shape with what it costs, or why it need not be compiled; no GPU, no nvcc
    tune.py                         compiles those that are left, verifies and times them; needs nvcc and a GPU
    tune.py --compile --gpu h200    only compiles them, for a machine with that GPU and the same nvcc; no GPU
    tune.py table RESULTS.json      the table of a measurement, as Markdown
    tune.py write PAGE RESULTS.json the same, between the marks of a page

Each shape is a library: the kernel's file with the shape behind it (space.py), so that nothing in a lesson knows of it.
Libraries stay in OUT/shapes: what was compiled from the same sources is not compiled again.
A shape is verified in a process of its own, since one that is wrong may never end: short problems against double
precision. Then, at each setting, all shapes are compared with the hand-made one and timed once; those within 6 % of
the fastest go on to 11 rounds, in an order drawn anew for each. A figure is the median of a ratio, round by round.
That happens in a process for each head dimension. A shape that is wrong at a setting, or never ends there, is out, and
the others are timed without it.

Exit code 1: something failed; 2: wrong use; 3: this machine lacks something.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import os
import queue
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
for folder in (HERE, ROOT / "common/judge", ROOT / "common/cmake"):
    sys.path.insert(0, str(folder))
import ptxas  # noqa: E402
from source import write_whole  # noqa: E402
from space import KNOWN, Bad, Candidate, Count, Gpu, Space, sources  # noqa: E402

TYPES = ("fp32", "fp16", "bf16")  # TunedCall::Type
ALLOWED = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 1.5e-2}  # of a row of O, relative
ALLOWED_LSE = 2e-3
MASKS = ("none", "causal")
NEAR = 0.02  # as good as the best
FINALIST = 1.06  # this much slower than the fastest, and it is timed once only
BLOCK_MS = 3.0  # of launches, for one figure
PATIENCE = 20.0  # seconds without a launch that ends: it never will


Key = tuple[str, int, str]  # a shape: kernel, d, name


class Missing(Exception):
    """Something that this machine lacks, in one sentence."""


def spaces() -> list[Space]:
    found: list[Space] = []
    for file in sorted(ROOT.glob("[0-9]*_*/check/tune.py")):
        spec = importlib.util.spec_from_file_location(f"tune_{file.parts[-3]}", file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        found += module.SPACES
    return found


# ---------------------------------------------------------------- the list


def listed(chosen: Sequence[Space], gpu: Gpu) -> str:
    lines = [f"{gpu}: {gpu.shared_block} bytes of shared memory a block, {gpu.shared_sm} an SM"]
    for space in chosen:
        if unfit := space.unfit(gpu):
            lines += ["", f"{space.kernel}: nothing to try: {unfit}"]
            continue
        every = space.candidates(gpu)
        count = Count()
        lines += [
            "",
            f"{space.kernel}, {space.file}",
            f"  {'d':>3}  {'shape (rows x keys)':34} threads   shared  registers",
        ]
        for c in every:
            if c.dead:
                count.add(c.dead)
            else:
                lines.append(
                    f"{'*' if c.hand_made else ' '} {c.d:>3}  {c.name:34} "
                    f"{c.threads:>7} {c.shared:>8} {c.registers:>10}"
                )
        alive = sum(not c.dead for c in every)
        lines.append(f"  {alive} of {len(every)} shapes are worth compiling (*: in the code). The others:")
        lines += [f"  {n:>5}  {reason}" for reason, n in sorted(count.by.items(), key=lambda item: -item[1])]
    lines += [
        "",
        "registers: of a thread that computes, an estimate; what ptxas spills is found when a shape is compiled",
    ]
    return "\n".join(lines)


def gpu_named(word: str) -> Gpu:
    if word.lower() in KNOWN:
        return KNOWN[word.lower()]
    raise Bad(f"--gpu knows {', '.join(KNOWN)}, got '{word}'")


# ---------------------------------------------------------------- built and verified


def nvcc(text: str, library: Path, arch: str, version: str) -> str:
    """What ptxas said. The text goes beside the library, as a file to look into."""
    source, words = library.with_suffix(".cu"), library.with_suffix(".txt")
    # The text names the hash of all that it includes.
    stamp = hashlib.sha256(f"{arch} {version}\n{text}".encode()).hexdigest() + "\n"
    if library.exists() and words.exists() and (said := words.read_text(encoding="utf-8")).startswith(stamp):
        return said[len(stamp) :]
    words.unlink(missing_ok=True)
    source.write_text('#include "common/core/tuned.hpp"\n' + text, encoding="utf-8")
    command = [
        "nvcc",
        "-std=c++20",
        "-O3",
        "-diag-suppress=554,177",
        "-gencode",
        f"arch=compute_{arch},code=sm_{arch}",
        "-shared",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        "-Xptxas=-v",
        f"-I{ROOT}",
        str(source),
        "-o",
        str(library),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        wrong = re.search(r"error\s*:\s*(.*)", done.stderr)
        raise Bad(f"does not compile: {(wrong[1] if wrong else done.stderr).strip()[:200]}")
    words.write_text(stamp + done.stderr, encoding="utf-8")
    return done.stderr


def arch_of(space: Space, gpu: Gpu) -> str:
    return f"{gpu.capability}{'a' if space.alone else ''}"


def tried(space: Space, c: Candidate, gpu: Gpu, folder: Path, version: str, judge: Path | None) -> Path | None:
    """The library of a candidate that compiles, does not spill and is right; else c.dead says why not."""
    library = folder / f"{space.kernel}_d{c.d}_{c.name}.so"
    try:
        said = nvcc(space.source(c, (space.dtype,)), library, arch_of(space, gpu), version)
        kernels = ptxas.parse(said)
        c.registers = max(k.registers for k in kernels)
        spilled = max(k.spill_store_bytes + k.spill_load_bytes for k in kernels)
        if not c.hand_made and spilled > space.spills:
            raise Bad(f"ptxas spills {spilled} bytes")
        if not c.hand_made and ptxas.LOSS.search(said):
            raise Bad("ptxas makes its products wait for each other")
        if judge:
            verified(library, c.d, (space.dtype,), judge)
    except Bad as error:
        c.dead = str(error)
        if c.hand_made:
            raise Bad(f"{space.kernel}, d = {c.d}: the shape in the code, {c.name}: {error}") from error
        return None
    return library


def verified(library: Path, d: int, types: Sequence[str], judge: Path) -> None:
    command = [sys.executable, __file__, "verify", str(judge), str(library), str(d), ",".join(types)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        raise Bad("never ends") from None
    if done.returncode:
        raise Bad((done.stderr.strip().splitlines() or [f"ends with {done.returncode}"])[-1])


# ---------------------------------------------------------------- judge.cu


class Judge:
    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        for name in ("gpu", "case", "expect", "first", "check", "time"):
            getattr(self.library, f"fa_tune_{name}").restype = ctypes.c_char_p

    def ask(self, name: str, *arguments: Any) -> None:
        if error := getattr(self.library, f"fa_tune_{name}")(*arguments):
            raise Bad(error.decode())

    def gpu(self) -> Gpu:
        name, numbers = ctypes.create_string_buffer(256), (ctypes.c_int64 * 3)()
        self.ask("gpu", name, 256, numbers)
        return Gpu(name.value.decode(), *numbers)

    def case(self, batch: int, heads: int, n: int, d: int, mask: str, dtype: str) -> None:
        self.ask("case", *map(ctypes.c_int64, (batch, heads, n, d)), int(mask == "causal"), TYPES.index(dtype))

    def check(self, launch: Any, dtype: str) -> None:
        off = (ctypes.c_float * 2)()
        self.ask("check", launch, off)
        if not (off[0] <= ALLOWED[dtype] and off[1] <= ALLOWED_LSE):
            raise Bad(f"is wrong: a row of O is off by {off[0]:.2g}, LSE by {off[1]:.2g}")

    def ms(self, launch: Any, count: int) -> float:
        found = ctypes.c_float()
        self.ask("time", launch, count, ctypes.byref(found))
        return found.value


def launch_of(library: Path) -> Any:
    return ctypes.cast(ctypes.CDLL(str(library)).fa_tuned_launch, ctypes.c_void_p)


def verify(judge: Path, library: Path, d: int, types: Sequence[str]) -> None:
    ask, launch = Judge(judge), launch_of(library)
    for dtype in types:
        for n, mask in ((321, "none"), (321, "causal"), (1024, "causal"), (1, "none")):
            ask.case(2, 3, n, d, mask, dtype)
            ask.ask("expect")
            ask.check(launch, dtype)


# ---------------------------------------------------------------- timed


def flop(batch: int, heads: int, n: int, d: int, mask: str) -> float:
    return 4 * batch * heads * d * (n * (n + 1) / 2 if mask == "causal" else n * n)


Cell = dict[str, Any]


class Wrong(Exception):
    """A shape that is not what the others are, at this setting."""


def timed(
    judge: Judge, space: Space, d: int, mask: str, n: int, launches: dict[str, Any], rounds: int,
    begin: Callable[[str], None],
) -> Cell:
    """begin(name) is called before each launch of a shape, which may never end."""
    hand = space.hand_made(d, mask, n)
    batch, heads = max(1, space.tokens // n), space.heads_times_d // d
    judge.case(batch, heads, n, d, mask, space.dtype)
    begin(hand)
    judge.ask("first", launches[hand])
    once = {}
    for name, launch in launches.items():
        begin(name)
        try:
            judge.check(launch, space.dtype)
        except Bad as error:
            raise Wrong(str(error)) from error
        once[name] = judge.ms(launch, 1)
    fastest = min(once.values())
    finalists = [name for name in launches if name == hand or once[name] <= FINALIST * fastest]
    count = max(1, round(BLOCK_MS / fastest))
    ms: dict[str, list[float]] = {name: [] for name in finalists}
    for r in range(rounds + 2):
        random.shuffle(finalists)
        for name in finalists:
            begin(name)
            one = judge.ms(launches[name], count)
            if r >= 2:  # until then the chip warms up
                ms[name].append(one)
    ratio = {name: statistics.median(h / x for h, x in zip(ms[hand], ms[name])) for name in ms}
    best = max(ratio, key=lambda name: ratio[name])
    speed = {name: flop(batch, heads, n, d, mask) / statistics.median(ms[name]) / 1e9 for name in ms}
    return {
        "kernel": space.kernel,
        "d": d,
        "mask": mask,
        "N": n,
        "hand_made": hand,
        "best": best,
        "hand_of_best": 1 / ratio[best],
        "tflops": speed,
        "speed_of_hand_made": ratio,
        "once_ms": once,
    }


def time_settings(kernel: str, d: int, rounds: int, settings: str, judge: Path, shapes: Sequence[str]) -> None:
    """A process of its own: a line before each launch, one for each cell."""
    space = next(s for s in spaces() if s.kernel == kernel)
    judges = Judge(judge)
    launches = {Path(shape).stem.removeprefix(f"{kernel}_d{d}_"): launch_of(Path(shape)) for shape in shapes}

    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    for setting in settings.split(","):
        mask, n = setting.split(":")
        random.seed(f"{kernel} {d} {setting}")
        try:
            cell = timed(judges, space, d, mask, int(n), launches, rounds, lambda name: say(at=name))
        except Wrong as error:
            say(wrong=str(error))
            return
        say(cell=cell)


def lines_of(command: Sequence[str], patience: float) -> Iterator[str | None]:
    """What the command prints, and None where it prints nothing for `patience` seconds, which ends it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        said: queue.Queue[str] = queue.Queue()

        def read() -> None:
            assert process.stdout
            for line in process.stdout:
                said.put(line)
            said.put("")

        threading.Thread(target=read, daemon=True).start()
        while True:
            try:
                line = said.get(timeout=patience)
            except queue.Empty:
                process.kill()
                yield None
                return
            if not line:
                break
            yield line
        if process.wait():
            assert process.stderr
            raise Bad((process.stderr.read().strip().splitlines() or [f"ends with {process.returncode}"])[-1])


def cells_of(space: Space, d: int, libraries: dict[str, Path], judge: Path, rounds: int,
             dead: Callable[[str, str], None]) -> Iterator[Cell]:
    """Every setting. A shape that is wrong at one, or never ends there, is out, and dead(name, reason) is told."""
    left = [(mask, n) for mask in MASKS for n in space.lengths]
    while left:
        command = [sys.executable, __file__, "time", space.kernel, str(d), str(rounds),
                   ",".join(f"{mask}:{n}" for mask, n in left), str(judge), *map(str, libraries.values())]
        at = reason = ""
        for line in lines_of(command, PATIENCE):
            told = json.loads(line) if line else {"wrong": "never ends"}
            at = told.get("at", at)
            if "cell" in told:
                left.pop(0)
                yield told["cell"]
            elif "wrong" in told:
                mask, n = left[0]
                reason = f"{told['wrong']}, {mask}, N = {n}"
        if not reason:
            return
        if at in {space.hand_made(d, mask, n) for mask, n in left}:
            raise Bad(f"{space.kernel}, d = {d}: the shape in the code, {at}: {reason}")
        dead(at, reason)
        del libraries[at]


def chosen_of(cell: dict[str, Any]) -> str:
    """The shape for FA_TUNED: the hand-made one, "-", unless another one is clearly faster."""
    return "-" if cell["hand_of_best"] >= 1 - NEAR else cell["best"]


# ---------------------------------------------------------------- told


def table(data: dict[str, Any]) -> str:
    lines = [
        "| kernel | d | mask | N | in the code | TFLOP/s | best | TFLOP/s | code / best |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for c in data["cells"]:
        same = c["best"] == c["hand_made"]
        lines.append(
            f"| {c['kernel']} | {c['d']} | {c['mask']} | {c['N']} | `{c['hand_made']}` | "
            f"{c['tflops'][c['hand_made']]:.0f} | "
            f"{'the same' if same else '`' + c['best'] + '`'} | {c['tflops'][c['best']]:.0f} | "
            f"{c['hand_of_best']:.3f}{'' if c['hand_of_best'] >= 1 - NEAR else ' **!**'} |"
        )
    return "\n".join(lines)


def verdict(data: dict[str, Any]) -> str:
    lines = []
    for kernel in dict.fromkeys(c["kernel"] for c in data["cells"]):
        cells = [c for c in data["cells"] if c["kernel"] == kernel]
        near = sum(c["hand_of_best"] >= 1 - NEAR for c in cells)
        shapes = data["kernels"][kernel]
        lines.append(
            f"{kernel}: the shape in the code is within {NEAR:.0%} of the best in {near} of {len(cells)} cells; "
            f"{shapes['timed']} of {shapes['all']} shapes were timed."
        )
    return "\n".join(lines)


def of_page(data: dict[str, Any]) -> str:
    """Its figures are those of the file, as said.py wants to be told."""
    given = "<!-- given: results/tuning.json -->"
    told = re.sub(r"\d+%", lambda share: share[0][:-1] + given + " %", verdict(data).replace("\n", "\n\n"))
    method = re.sub(r"\d+(?= ms)", lambda number: number[0] + given, data["method"])
    return f"{table(data)}\n\n{told}\n\n{data['gpu']}, nvcc {data['compiler']}; {method}."


def in_page(page: str, text: str) -> str:
    new, count = re.subn(r"(<!-- tuning -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{text}\n{m[2]}", page, flags=re.S)
    if count != 1:
        raise Bad(f"the page has <!-- tuning --> ... <!-- end --> {count} times instead of once")
    return new


def tuned_file(data: dict[str, Any], libraries: dict[Key, str]) -> str:
    """What common/core/tuned.cpp reads."""
    lines = ["tuned 1", f"gpu {data['gpu']}", f"compiler nvcc {data['compiler']}"]
    lines += [f"kernel {name} {kernel['sources']}" for name, kernel in data["kernels"].items()]
    for c in data["cells"]:
        choice = chosen_of(c)
        lines.append(
            f"cell {c['kernel']} {c['d']} {c['mask']} {c['N']} "
            f"{'-' if choice == '-' else libraries[c['kernel'], c['d'], choice]}"
        )
    return "\n".join([*lines, "end", ""])


# ---------------------------------------------------------------- all of it


def compiler() -> str:
    if not shutil.which("nvcc"):
        raise Missing("tune compiles shapes with nvcc, which was not found; tune --list --gpu h200 only counts")
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found[1] if found else "unknown"


def judge_of(folder: Path) -> tuple[Path, Gpu]:
    library = folder / "judge.so"
    done = subprocess.run(
        [
            "nvcc",
            "-std=c++20",
            "-O2",
            "-diag-suppress=554",
            "-arch=native",
            "-shared",
            "-Xcompiler=-fPIC,-fvisibility=hidden",
            f"-I{ROOT}",
            str(HERE / "judge.cu"),
            "-o",
            str(library),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Missing(f"nvcc cannot compile for this machine's GPU: {done.stderr.strip().splitlines()[-1][:200]}")
    try:
        return library, Judge(library).gpu()
    except Bad as error:
        raise Missing(f"tune times on a GPU, and none answers ({error}); tune --list --gpu h200 only counts") from None


Work = list[tuple[Space, Candidate]]


def work_of(chosen: Sequence[Space], gpu: Gpu) -> tuple[dict[str, list[Candidate]], Work]:
    """All candidates by kernel, and those that are worth compiling."""
    every: dict[str, list[Candidate]] = {}
    for space in chosen:
        if unfit := space.unfit(gpu):
            print(f"{space.kernel}: not tuned: {unfit}")
        else:
            every[space.kernel] = space.candidates(gpu)
    work = [(s, c) for s in chosen for c in every.get(s.kernel, ()) if not c.dead]
    if not work:
        raise Missing("no kernel that can be tuned runs on this GPU")
    return every, work


def alive(work: Work, gpu: Gpu, out: Path, version: str, judge: Path | None, jobs: int) -> dict[Key, Path]:
    """The libraries of those that compile and, with a judge, are right."""
    began = time.monotonic()
    (out / "shapes").mkdir(parents=True, exist_ok=True)
    libraries: dict[Key, Path] = {}
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(tried, space, c, gpu, out / "shapes", version, judge) for space, c in work]
        for number, ((space, c), future) in enumerate(zip(work, futures), 1):
            if library := future.result():
                libraries[space.kernel, c.d, c.name] = library
            if number % 20 == 0 or number == len(work):
                print(
                    f"{number}/{len(work)} shapes compiled{' and verified' if judge else ''}, {len(libraries)} are "
                    f"alive, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
    return libraries


def measure(chosen: Sequence[Space], out: Path, rounds: int, jobs: int) -> None:
    began = time.monotonic()
    version = compiler()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as name:
        folder = Path(name)
        judge_library, gpu = judge_of(folder)
        data: dict[str, Any] = {
            "gpu": str(gpu),
            "compiler": version,
            "kernels": {},
            "cells": [],
            "shapes": [],
            "method": f"{rounds} rounds, order drawn anew, blocks of {BLOCK_MS:g} ms",
        }
        print(gpu)
        every, work = work_of(chosen, gpu)
        libraries = alive(work, gpu, out, version, judge_library, jobs)
        for space in chosen:
            if space.kernel not in every:
                continue
            data["kernels"][space.kernel] = {
                "file": space.file,
                "sources": sources(space.file),
                "all": len(every[space.kernel]),
            }
        for space in chosen:
            for d in space.d if space.kernel in every else ():
                shapes = {
                    name: path
                    for (kernel, of, name), path in libraries.items()
                    if (kernel, of) == (space.kernel, d)
                }

                def dead(name: str, reason: str, space: Space = space, d: int = d) -> None:
                    print(f"{space.kernel}, d {d}: {name} {reason}", flush=True)
                    next(c for c in every[space.kernel] if (c.d, c.name) == (d, name)).dead = reason

                for cell in cells_of(space, d, shapes, judge_library, rounds, dead):
                    data["cells"].append(cell)
                    print(
                        f"{space.kernel}, d {d}, {cell['mask']}, N {cell['N']}: {cell['best']}, the code's is at "
                        f"{cell['hand_of_best']:.3f} of it ({time.monotonic() - began:.0f} s)",
                        flush=True,
                    )
        for space in chosen:
            if space.kernel in every:
                data["kernels"][space.kernel]["timed"] = sum(not c.dead for c in every[space.kernel])
            data["shapes"] += [
                {
                    "kernel": space.kernel,
                    "d": c.d,
                    "name": c.name,
                    "shared": c.shared,
                    "registers": c.registers,
                    "dead": c.dead,
                }
                for c in every.get(space.kernel, ())
            ]
        names = kept(chosen, data, every, gpu, folder, out, judge_library, jobs)
        write_whole(out / "results.json", json.dumps(data, indent=1) + "\n")
        write_whole(out / "tuned.txt", tuned_file(data, names))
    print(
        f"\n{table(data)}\n\n{verdict(data)}\n\n{time.monotonic() - began:.0f} s. To use it: "
        f"FA_TUNED={(out / 'tuned.txt').resolve()}"
    )


def kept(
    chosen: Sequence[Space],
    data: dict[str, Any],
    every: dict[str, list[Candidate]],
    gpu: Gpu,
    folder: Path,
    out: Path,
    judge: Path,
    jobs: int,
) -> dict[Key, str]:
    """The winners once more, for all types of the product, and beside the file."""
    winners = {(c["kernel"], c["d"], chosen_of(c)) for c in data["cells"] if chosen_of(c) != "-"}
    by_name = {space.kernel: space for space in chosen}

    def one(key: Key) -> str:
        space = by_name[key[0]]
        c = next(c for c in every[key[0]] if (c.d, c.name) == key[1:])
        library = folder / f"{key[0]}_d{c.d}_{c.name}_{sources(space.file)}.so"
        nvcc(space.source(c, space.types), library, arch_of(space, gpu), data["compiler"])
        verified(library, c.d, space.types, judge)
        os.replace(library, out / library.name)
        return library.name

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(sorted(winners), pool.map(one, sorted(winners))))


def source_names(out: Path) -> None:
    """For the build: sources_of() of common/core/tuned.cpp."""
    lines = "".join(f'  if (kernel == "{s.kernel}") return "{sources(s.file)}";\n' for s in spaces())
    text = (
        "// Made by common/measure/tune/tune.py: what the sources of a kernel are called, for FA_TUNED.\n"
        "#include <string>\n\n"
        "namespace fa {\nconst char* sources_of(const std::string& kernel);\n"
        f"const char* sources_of(const std::string& kernel) {{\n{lines}  return nullptr;\n}}\n}}  // namespace fa\n"
    )
    if not out.exists() or out.read_text(encoding="utf-8") != text:
        write_whole(out, text)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        print(f"learn: tune: {message}", file=sys.stderr)
        sys.exit(2)


def tune(words: Sequence[str]) -> None:
    parser = Parser(
        prog="./learn tune",
        usage="./learn tune [--only fa2,hopper,longest_first] [--list [--gpu NAME]] [--compile --gpu NAME] "
        "[--rounds N] [--out FOLDER]",
        allow_abbrev=False,
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--gpu")
    parser.add_argument("--only")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, default=ROOT / "build/tune")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(words)
    there = spaces()
    wanted = options.only.split(",") if options.only is not None else [s.kernel for s in there]
    if unknown := [w for w in wanted if w not in [s.kernel for s in there]]:
        parser.error(f"no kernel '{unknown[0]}'; there are {', '.join(s.kernel for s in there)}")
    if options.rounds < 1 or options.jobs < 1:
        parser.error("--rounds and --jobs must be at least 1")
    if options.gpu and not (options.list or options.compile):
        parser.error("--gpu is for --list and --compile; what is timed is the GPU of this machine")
    chosen = [s for s in there if s.kernel in wanted]
    if options.compile:
        try:
            gpu = gpu_named(options.gpu or "")
        except Bad as error:
            parser.error(str(error))
        alive(work_of(chosen, gpu)[1], gpu, options.out, compiler(), None, options.jobs)
        return None
    if not options.list:
        return measure(chosen, options.out, options.rounds, options.jobs)
    if options.gpu:
        try:
            gpu = gpu_named(options.gpu)
        except Bad as error:
            parser.error(str(error))
    else:
        with tempfile.TemporaryDirectory() as name:
            try:
                compiler()
                gpu = judge_of(Path(name))[1]
            except Missing:
                parser.error(f"no GPU answers here, so --list wants one of --gpu {', '.join(KNOWN)}")
    print(listed(chosen, gpu))


def main(words: list[str]) -> int:
    try:
        if words[:1] == ["sources"]:
            source_names(Path(words[1]))
        elif words[:1] == ["verify"]:
            verify(Path(words[1]), Path(words[2]), int(words[3]), words[4].split(","))
        elif words[:1] == ["time"]:
            time_settings(words[1], int(words[2]), int(words[3]), words[4], Path(words[5]), words[6:])
        elif words[:1] == ["table"]:
            print(of_page(json.loads(Path(words[1]).read_text(encoding="utf-8"))))
        elif words[:1] == ["write"]:
            page = Path(words[1])
            data = json.loads(Path(words[2]).read_text(encoding="utf-8"))
            write_whole(page, in_page(page.read_text(encoding="utf-8"), of_page(data)))
        else:
            tune(words)
    except Missing as error:
        print(f"learn: {error}", file=sys.stderr)
        return 3
    except (Bad, OSError, ValueError) as error:
        print(f"learn: tune: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
