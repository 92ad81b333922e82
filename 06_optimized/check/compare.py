"""Both ladders beside cuDNN, FlashAttention-2 (both PyTorch's), FlashAttention-3 and a matrix product, in one process.

    python3 06_optimized/check/compare.py build/06_optimized/libstage06_peer.so results.json

Three passes: the forward; the backward, from the O and LSE of a forward that is not timed; and a training step, both
of them, in one setting. All kernels get the same tensors, B N = 16384 and H d = 2048 (64 MiB each: more than a cache
holds; a step has half as many heads), and are timed once a round, in an order drawn anew: an untimed launch, then a
block of launches back to back, about 5 ms between two CUDA events. Two ways, since a GPU lowers its clock under load:
hot, block after block; and cool, with an idle gap before each. The clock follows the load late, so that a hot block
runs at the clock that others have left behind (--turns 1 shows how much that is): a hot round is the mean of five
turns, in five orders. A third way takes longer, and is there if asked for: sustained, where each kernel runs by itself
for half a second before its block, at the clock that it leaves to itself. A row's roof is the matrix product of its own
round.

What the host does at a launch (checks, tensor maps, PyTorch's dispatch and its graph) is hidden by the queue, for ours
and the peers alike: the host runs ahead of the GPU, and an untimed launch covers the first of a block. That holds while
a launch takes the host less time than the GPU; a row where it does not is an error, not a figure.

FlashAttention-3 is there if fa3/build.py has built it (--fa3; for fp16 and groups of heads with --more). Its rows and ours
called *_deterministic write the same bits in every run.

Every result is compared with double precision before and after it is timed. The file is written after each case;
--resume continues it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from contenders import (DTYPE, GEMM, PASSES, PEERS, ROOT, FlashAttention3, Library, Runner, Setting, Tensors,
                        fa3_library, gemm, peer)
from precision import Expected, expected, fault, relative_error

from peers import BadResults, torch, write_whole  # found where contenders says

LADDER_N = 4096  # the rungs on the way are measured at this length only
SAME_RUN = ("device", "commit", "compiler", "driver", "torch", "cudnn", "method")  # what a continued file must share
SAME_FA3 = ("fa3_commit", "cutlass_commit")  # this too; neither has them if FlashAttention-3 is absent
FA3 = ROOT / "build" / "fa3" / "libfa3.so"

Row = dict[str, Any]


# ---------------------------------------------------------------- how long does it take?

def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def timed(launch: Callable[[int], None], count: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = event(), event()
    begin.record()
    launch(count)
    end.record()
    return begin, end


def host_milliseconds(runner: Runner, count: int) -> float:
    """What the host takes for a launch, with a queue that has room."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    runner.launch(count)
    taken = (time.perf_counter() - begin) / count
    torch.cuda.synchronize()
    return 1e3 * taken


def launches(runner: Runner, block_ms: float) -> int:
    runner.launch(2)
    begin, end = timed(runner.launch, 3)
    end.synchronize()
    return max(2, round(3 * block_ms / begin.elapsed_time(end)))


def rounds_of(runners: Sequence[Runner], chip: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of a launch, by runner and round."""
    counts = {r.name: launches(r, options.block) for r in runners}
    first = {r.name: launches(r, options.sustain) if chip == "sustained" else 1 for r in runners}
    turns = options.turns if chip == "hot" else 1
    taken: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {r.name: [] for r in runners}
    for turn in range(-options.burn_in * turns, options.rounds * turns):
        for r in random.sample(list(runners), len(runners)):
            if chip == "cool":
                torch.cuda.synchronize()
                time.sleep(1e-3 * options.gap)
            r.launch(first[r.name])
            pair = timed(r.launch, counts[r.name])
            if turn >= 0:
                taken[r.name].append(pair)
    torch.cuda.synchronize()
    each = {name: [begin.elapsed_time(end) / counts[name] for begin, end in pairs] for name, pairs in taken.items()}
    return {name: [statistics.mean(ms[i:i + turns]) for i in range(0, len(ms), turns)] for name, ms in each.items()}


# ---------------------------------------------------------------- one case, one file

def error_row(name: str, message: str) -> Row:
    print(f"      ERROR {name}: {message}", flush=True)
    return {"name": name, "run_type": "iteration", "repetition_index": 0, "error_occurred": True,
            "error_message": message}


def measured(runners: Sequence[Runner], want: Sequence[Expected], s: Setting, chip: str,
             options: argparse.Namespace) -> tuple[list[Row], float]:
    """The rows, and the largest share of a launch's time that the host needs for it."""
    rows: list[Row] = []
    good = []
    share = 0.0
    for r in runners:
        r.forget()
        r.launch(1)
        torch.cuda.synchronize()
        wrong = fault(r, want, s.dtype)
        if wrong:
            rows.append(error_row(s.row_name(r.name, chip), f"wrong before timing: {wrong}"))
        else:
            good.append(r)
            r.forget()
    times = rounds_of(good, chip, options)
    roof = [2e3 * GEMM**3 / ms for ms in times["gemm"]]
    for r in good:
        if r.name == "gemm":
            continue
        name, ms = s.row_name(r.name, chip), times[r.name]
        wrong = fault(r, want, s.dtype)
        host = host_milliseconds(r, 20) / statistics.median(ms)
        if wrong:
            rows.append(error_row(name, f"wrong after timing: {wrong}"))
        elif host > 1:
            rows.append(error_row(name, f"a launch takes the host {host:.1f} times as long as the GPU"))
        else:
            share = max(share, host)
            error = relative_error(r, want)
            rows += [{"name": name, "run_type": "iteration", "repetition_index": i, "real_time": t, "time_unit": "ms",
                      "flops": 1e3 * s.work / t, "roof": peak, "error": error}
                     for i, (t, peak) in enumerate(zip(ms, roof))]
    return rows, share


def print_rows(rows: Sequence[Row]) -> None:
    """TFLOP/s and, against cuDNN round by round, the ratio."""
    by: dict[str, list[Row]] = {}
    for row in rows:
        if "flops" in row:
            by.setdefault(row["name"].split("/N:")[0], []).append(row)
    if not by:
        return
    rival = next((some for who, some in by.items() if who.startswith("peer/") and who.endswith("/cudnn")), [])
    texts = [f"GEMM {1e-12 * statistics.median(row['roof'] for row in next(iter(by.values()))):.0f}"]
    for who, some in by.items():
        stage, _, kernel = who.split("/")
        text = kernel if stage == "stage06" else f"[{kernel}]"
        text += f" {1e-12 * statistics.median(row['flops'] for row in some):.0f}"
        if rival and some is not rival:
            text += f" ({statistics.median(a['flops'] / b['flops'] for a, b in zip(some, rival)):.2f})"
        texts.append(text)
    print("      " + "  ".join(texts), flush=True)


class File:
    """The results so far, written whole after every case. `again`: what another commit has measured may stay beside
    what is measured now, whose rows then name their commit."""

    def __init__(self, path: Path, context: dict[str, str], resume: bool, again: bool = False) -> None:
        self.path, self.context, self.rows = path, context, []
        self.commit, self.again = context["commit"], again
        if not path.exists():
            return
        if not resume and not again:
            raise BadResults(f"{path} exists; --resume continues it, or choose another name")
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
            self.rows = old["benchmarks"]
            same = [key for key in SAME_RUN if not again or key != "commit"]
            differ = [key for key in same if old["context"][key] != context[key]]
            differ += [key for key in SAME_FA3 if old["context"].get(key) != context.get(key)]
        except (ValueError, KeyError, TypeError):
            raise BadResults(f"{path}: not a file of this program; choose another name") from None
        if differ:
            raise BadResults(f"{path}: measured with another {differ[0]}; one file holds one machine and one version")
        self.context = old["context"]

    def has(self, names: Sequence[str]) -> bool:
        kept = lambda row: not self.again or row.get("commit", self.context["commit"]) == self.commit  # noqa: E731
        done = {row["name"] for row in self.rows if "flops" in row and kept(row)}
        return all(name in done for name in names)

    def add(self, s: Setting, chip: str, rows: Sequence[Row], share: float) -> None:
        """In place of all earlier rows of this case: ratios pair rows of one run."""
        ending = s.row_name("", chip)
        earlier = lambda name: name.endswith(ending) and name.split("/")[1] == s.what  # noqa: E731
        named = {} if self.commit == self.context["commit"] else {"commit": self.commit}
        self.rows = [row for row in self.rows if not earlier(row["name"])] + [{**row, **named} for row in rows]
        self.context["host_share"] = f"{max(share, float(self.context.get('host_share', 0))):.2f}"
        self.context["clocks_after"] = gpu_state("clocks.sm,temperature.gpu,power.draw")
        content = json.dumps({"context": self.context, "benchmarks": self.rows}, indent=1) + "\n"
        write_whole(self.path, content.encode())


def gpu_state(fields: str) -> str:
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader",
                   "-i", f"GPU-{torch.cuda.get_device_properties(0).uuid}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (AttributeError, OSError, subprocess.CalledProcessError):
        return "unknown"


def commit() -> str:
    if given := os.environ.get("FA_COMMIT"):
        return given
    done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True,
                          check=False)
    return done.stdout.strip() or "unknown"


def describe(library: Library, fa3: FlashAttention3 | None, options: argparse.Namespace) -> dict[str, str]:
    others = dict(zip(SAME_FA3, (fa3.commit, fa3.cutlass))) if fa3 else {}
    device = torch.cuda.get_device_properties(0)
    machine = "".join(c.lower() if c.isalnum() else "-" for c in device.name)
    return others | {
        "machine": machine if machine.startswith("nvidia-") else f"nvidia-{machine}", "device": device.name,
        "isa": f"sm_{device.major}{device.minor}", "cores": str(device.multi_processor_count),
        "memory_bytes": str(device.total_memory), "compiler": library.c.fa_peer_compiler().decode(),
        "flags": library.c.fa_peer_flags().decode(), "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "flop_formula": "4 d FLOP per visible (query, key) pair", "torch": torch.__version__,
        "cudnn": str(torch.backends.cudnn.version()), "cuda_runtime": str(torch.version.cuda),
        "driver": gpu_state("driver_version"),
        "clocks_limits": gpu_state("clocks.max.sm,clocks.max.mem,power.limit"),
        "clocks_before": gpu_state("clocks.sm,temperature.gpu,power.draw"), "seed": str(options.seed),
        "method": f"{options.rounds} rounds after {options.burn_in}, blocks of {options.block:g} ms, order drawn anew, an "
                  f"untimed launch before each block; hot: a round is the mean of {options.turns} turns; "
                  f"cool: {options.gap:g} ms idle before each block; sustained: {options.sustain:g} ms by itself before "
                  "each block; launches queued"}


# ---------------------------------------------------------------- what is asked for

def numbers(allowed: Sequence[int]) -> Callable[[str], list[int]]:
    def parse(text: str) -> list[int]:
        values = [int(part) for part in text.split(",")]
        if not set(values) <= set(allowed):
            raise argparse.ArgumentTypeError(f"'{text}': any of {', '.join(map(str, allowed))}")
        return values
    return parse


def words(*allowed: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        values = text.split(",")
        if allowed and not set(values) <= set(allowed):
            raise argparse.ArgumentTypeError(f"'{text}': any of {', '.join(allowed)}")
        return values
    return parse


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path, help="build/06_optimized/libstage06_peer.so")
    parser.add_argument("json", type=Path, help="where the results go")
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    parser.add_argument("--lengths", type=numbers(lengths), default=lengths, metavar="512,...")
    parser.add_argument("--d", type=numbers([64, 128, 256]), default=[64, 128, 256], metavar="64,128,256")
    parser.add_argument("--mask", type=words("none", "causal"), default=["none", "causal"], metavar="none,causal")
    parser.add_argument("--groups", type=numbers([1, 2, 4, 8]), default=[1], metavar="1,8",
                        help="query heads per key head (default: 1)")
    parser.add_argument("--kernels", type=words(), metavar="fa2,hopper",
                        help=f"of ours (default: all; the rungs on the way at N = {LADDER_N} only; of a step, its "
                             "backward)")
    parser.add_argument("--pass", dest="passes", type=words(*PASSES), default=list(PASSES),
                        metavar="forward,backward,step", help="the settings of a step are its own")
    parser.add_argument("--chip", type=words("hot", "cool", "sustained"), default=["hot", "cool"], metavar="hot,cool,...")
    parser.add_argument("--dtype", choices=sorted(DTYPE), default="bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=5, help="of a hot round, which is their mean")
    parser.add_argument("--burn-in", type=int, default=1, help="rounds that are not kept")
    parser.add_argument("--block", type=float, default=5, help="milliseconds of launches per timing")
    parser.add_argument("--gap", type=float, default=25, help="idle milliseconds before a cool block")
    parser.add_argument("--sustain", type=float, default=500, help="milliseconds by itself before a sustained block")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fa3", type=Path, help="FlashAttention-3, by fa3/build.py (default: build/fa3/libfa3.so if it "
                        "is there)")
    parser.add_argument("--resume", action="store_true", help="keep what the file has, measure the rest")
    parser.add_argument("--again", action="store_true", help="measure what is asked for anew, in place of another "
                        "commit's rows in the file; the new ones name their commit")
    options = parser.parse_args(argv)
    if options.fa3 and not options.fa3.is_file():
        parser.error(f"--fa3 {options.fa3}: no such file; 06_optimized/check/fa3/build.py builds it")
    return options


def cases_of(options: argparse.Namespace) -> list[Setting]:
    found = []
    for what in options.passes:
        if what == "step":
            found.append(Setting.of_a_step(options.dtype))
        else:
            found += [Setting.of(what, n, d, mask == "causal", group, options.dtype) for d, mask, group, n in
                      itertools.product(options.d, options.mask, options.groups, options.lengths)]
    return found


def found_fa3(given: Path | None) -> FlashAttention3 | None:
    """Says which."""
    path = fa3_library(given, FA3)
    if not path:
        return None
    fa3 = FlashAttention3(path)
    print(f"FlashAttention-3: commit {fa3.commit}, CUTLASS {fa3.cutlass}", flush=True)
    return fa3


def wanted(library: Library, s: Setting, options: argparse.Namespace) -> list[str]:
    """The kernels of ours that this case is about."""
    if options.kernels:
        return [kernel for kernel in options.kernels if kernel in library.kernels(s.what)]
    everything = s.what != "step" and s.n == LADDER_N
    return library.kernels(s.what) if everything else library.whole(s.what)


def runners_of(library: Library, fa3: FlashAttention3 | None, kernels: Sequence[str], t: Tensors,
               named: bool) -> list[Runner]:
    """named: who asks for FlashAttention-3 by --fa3 is not to measure for minutes without it."""
    runners = []
    context = library.context(t) if t.setting.what == "backward" else {}
    those = [(library, kernel) for kernel in kernels]
    those += [(fa3, kernel) for kernel in fa3.kernels(t.setting.what)] if fa3 else []
    for whose, kernel in those:
        found = whose.runner(kernel, t, context)
        if isinstance(found, str):
            if named and kernel == "fa3" and "not built" in found:
                raise BadResults(f"--fa3: {found}; fa3/build.py builds it, and --d, --mask, --pass leave cases out")
            print(f"      without {kernel}: {found}", flush=True)
        else:
            runners.append(found)
    for name in PEERS:
        try:
            found = peer(name, t)
            found.launch(1)
            runners.append(found)
        except RuntimeError as error:
            print(f"      without {name}: {str(error).splitlines()[0]}", flush=True)
    return runners


def run_case(library: Library, fa3: FlashAttention3 | None, file: File, roof: Runner, s: Setting,
             options: argparse.Namespace) -> bool:
    """True if every row gave a figure."""
    random.seed(f"{options.seed} {s}")  # the same inputs however a run is cut into pieces
    torch.manual_seed(random.getrandbits(32))
    kernels = wanted(library, s, options)
    if not kernels:
        return True
    t = Tensors(s)
    runners = runners_of(library, fa3, kernels, t, bool(options.fa3))
    want = expected(t)
    good = True
    for chip in options.chip:
        if file.has([s.row_name(r.name, chip) for r in runners]):
            print(f"      {chip}: measured before, kept", flush=True)
            continue
        print(f"      {chip}, TFLOP/s (of cuDNN)", flush=True)
        rows, share = measured([*runners, roof], want, s, chip, options)
        file.add(s, chip, rows, share)
        print_rows(rows)
        good = good and all("flops" in row for row in rows)
    return good


def run(options: argparse.Namespace) -> bool:
    """True if every row gave a figure."""
    if not torch.cuda.is_available():
        raise BadResults("PyTorch finds no GPU")
    library = Library(options.library.resolve())
    names = list(dict.fromkeys(kernel for what in PASSES for kernel in library.kernels(what)))
    unknown = [kernel for kernel in options.kernels or () if kernel not in names]
    if unknown:
        raise BadResults(f"no kernel is called '{unknown[0]}'; there are {', '.join(names)}")
    fa3 = found_fa3(options.fa3)
    file = File(options.json, describe(library, fa3, options), options.resume, options.again)
    roof = gemm(options.dtype)
    cases = cases_of(options)
    good = True
    for number, s in enumerate(cases, 1):
        print(f"{number:3}/{len(cases)}  {s}", flush=True)
        good = run_case(library, fa3, file, roof, s, options) and good
        torch.cuda.empty_cache()
    print(options.json)
    return good


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    try:
        with torch.no_grad():  # not inference_mode: a backward's inputs cannot be made there
            return 0 if run(options) else 1
    except (BadResults, RuntimeError) as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"compare.py: stopped; --resume continues {options.json}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
