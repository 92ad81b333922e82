"""Measures stages 04, 05 and 06 again, step by step, and draws every chart and table from it.

    python3 common/measure/sweep/sweep.py build build/sweep               goes on where the last call was stopped
    python3 common/measure/sweep/sweep.py build build/sweep --list        what is there, and what the rest lacks
    python3 common/measure/sweep/sweep.py build build/sweep --only 04,table,charts

A step is done when its output is in OUT, and is then kept: remove the file to measure again. Until a step has ended
well its output is called OUT/part.NAME; the tools that can continue one do (compare.py, measure_table.py), the others begin
again. What a step says is in OUT/logs. The last steps put what OUT holds into the stages' results/, draw every chart
from what is recorded there, and write the tables that stand between <!-- table:NAME --> and <!-- end --> in the
chapters; they measure nothing and run on any machine that has matplotlib.

What stays by hand:
    figures in running text: charts/said.py write puts those with a mark right, and the sentences want reading again;
        the tables of lessons (06_optimized/*/N_*.md)
    04_cuda_forward/results/*.bandwidth.txt, by check/bandwidth.cu there
    04's table of single changes; 06's under "What limits it", by ncu, and under "What did not pay": experiments, of
        which those that variants.txt keeps are in ab*.json (ab.py table prints them)
    06_optimized/pictures/: drawn from counts, not from measurements (draw.py there)
    stages 00 to 03, which need no GPU: ./learn charts --full --record; beside PyTorch, 03_tiled_cpu/check/pytorch.py
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
CHARTS = ROOT / "common" / "measure" / "charts" / "charts.py"
TUNE = ROOT / "common" / "measure" / "tune" / "tune.py"
STAGES = {"04": "04_cuda_forward", "05": "05_cuda_backward", "06": "06_optimized"}
RECORDED = {  # output of a step: where 06's results keep it
    "kernels.json": "kernels.json", "timeline.json": "timeline.json",
    "timeline_backward.json": "timeline_backward.json", "ab_forward.json": "ab.json",
    "ab_backward.json": "ab_backward.json",
    "faults.json": "faults.json", "table.json": "table/table.json", "tuning.json": "tuning.json"}
WALKS = {path.parts[-3]: path for path in sorted((ROOT / STAGES["06"]).glob("beyond/*/check/*_bench.py"))}
RECORDED |= {f"{walk}.json": f"../beyond/{walk}/results/{walk}.json" for walk in WALKS}
PART = "{part}"  # in a command: the output until the step has ended well

Command = tuple[str, ...]


def command(*words: object) -> Command:
    return tuple(map(str, words))


def python(*words: object) -> Command:
    return command(sys.executable, *words)


@dataclass(frozen=True)
class Step:
    name: str  # its beginning is what --only asks for
    commands: tuple[Command, ...]
    output: str = ""  # a JSON file in OUT; without one the step runs every time
    needs: tuple[str, ...] = ()  # gpu, torch, nvcc, matplotlib
    files: dict[Path, str] = field(default_factory=dict)  # what must be there, and how to get it
    resumes: bool = False  # the tool continues what a stopped call has left
    begins_as: str = ""  # the output of another step, of which this one works on a copy
    written_to: Path | None = None  # where the tool writes if it takes no file name


@dataclass
class Outcome:
    name: str
    state: str  # done, kept, skipped, failed, stopped
    words: str = ""
    seconds: float = 0.0


# ---------------------------------------------------------------- what is done

def measuring(build: Path) -> list[Step]:
    def built(folder: str, target: str, library: bool = False) -> dict[Path, str]:
        path = build / folder / (f"lib{target}.so" if library else target)
        return {path: f"cmake --build {build} --target {target}"}

    steps = []
    for number in ("04", "05"):
        folder, stage = STAGES[number], f"stage{number}"
        bench, peer = built(folder, f"{stage}_bench"), built(folder, f"{stage}_peer", library=True)
        steps += [
            Step(f"{number}-bench", (command(*bench, "--full", "--out", PART),), f"{number}.bench.json",
                 ("gpu",), bench),
            Step(f"{number}-peers", (python(ROOT / folder / "check" / "peers.py", *peer, PART),), f"{number}.json",
                 ("gpu", "torch"), peer, begins_as=f"{number}.bench.json")]
    check = ROOT / STAGES["06"] / "check"
    peer = built(STAGES["06"], "stage06_peer", library=True)
    compare = python(check / "compare.py", *peer, PART, "--resume")
    steps += [
        Step("06-compare", (
            (*compare, "--pass", "forward,backward,step"),
            (*compare, "--pass", "forward", "--dtype", "f16", "--lengths", "4096", "--mask", "none", "--chip", "hot",
             "--kernels", "fa2,hopper"),
            (*compare, "--pass", "backward", "--dtype", "f16", "--lengths", "4096", "--mask", "none", "--chip", "hot",
             "--kernels", "swizzle,best,best_deterministic"),
            (*compare, "--pass", "forward,backward", "--groups", "8", "--d", "64,128", "--lengths", "1024,4096,16384",
             "--chip", "hot", "--kernels", "hopper,best,best_deterministic"),
            (*compare, "--pass", "forward", "--lengths", "16384,1024", "--chip", "sustained", "--kernels", "hopper"),
            (*compare, "--pass", "step,backward", "--lengths", "16384,1024", "--chip", "sustained",
             "--kernels", "best,best_deterministic")),
            "06.json", ("gpu", "torch"), peer, resumes=True)]
    steps += [Step(f"06-timeline-{ladder}", (python(check / "timeline.py", "measure", PART, "--ladder", ladder),),
                   output, ("gpu", "nvcc"))
              for ladder, output in (("forward", "timeline.json"), ("backward", "timeline_backward.json"))]
    steps += [Step(f"06-ab-{kernel}", (python(check / "ab.py", "measure", PART, "--kernel", kernel),),
                   f"ab_{kernel}.json", ("gpu", "nvcc", "torch")) for kernel in ("forward", "backward")]
    steps.append(Step("table", (python(ROOT / "06_optimized" / "check" / "measure_table.py", build, PART),), "table.json", ("gpu", "torch"),
                      built(STAGES["05"], "stage05_peer", library=True) | peer, resumes=True))
    steps += [Step(f"06-{walk}", (python(bench, *peer, PART),), f"{walk}.json", ("gpu", "torch"), peer)
              for walk, bench in WALKS.items()]
    steps.append(Step("tune", (python(TUNE),), "tuning.json", ("gpu", "nvcc"), written_to=ROOT / "build/tune/results.json"))
    faults = python(check / "faults.py", "measure", build, PART)
    steps.append(Step("06-faults", (faults, (*faults, "--gpu", "NVIDIA H200")), "faults.json", ("gpu",), {
        build / STAGES["06"] / "stage06_mutant_no_wait": f"cmake --build {build} --target all stage06_faults_on_gpu"}))
    # The last, since it writes into the checkout: the others note a commit, and whether something has changed.
    counted = (command("cmake", "--build", build, "--target", "stage06_kernels"), python(check / "loops.py", build))
    steps.append(Step("06-kernels", counted, "kernels.json", ("nvcc",), {build / "CMakeCache.txt": "cmake --preset default"},
                      written_to=ROOT / STAGES["06"] / "results" / RECORDED["kernels.json"]))
    return steps


def drawing(out: Path) -> list[Step]:
    """From what OUT holds into the stages' results/, and every chart and table of what is recorded there."""
    steps = []
    results = ROOT / STAGES["06"] / "results"

    def copied(*names: str) -> tuple[Command, ...]:
        return tuple(python(__file__, "--copy", out / name, results / RECORDED[name])
                     for name in names if complete(out / name))

    for number, folder in STAGES.items():
        stage = ROOT / folder
        source = next((out / name for name in (f"{number}.json", f"{number}.bench.json") if complete(out / name)), None)
        record: tuple[Command, ...] = (python(CHARTS, "record", source, stage),) if source else ()
        draw = python(CHARTS, "draw", stage, "--tables")
        if machine := source and context(source).get("machine"):
            draw += ("--results-name", f"{machine}.json")
        if number == "06":
            record += copied("kernels.json", "ab_forward.json", "ab_backward.json", *(f"{walk}.json" for walk in WALKS))
        steps += [Step(f"charts-record-{number}", record)] * bool(record)
        steps.append(Step(f"charts-{number}", (draw,), needs=("matplotlib",)))
    timelines = ("timeline.json", "timeline_backward.json")
    steps.append(Step("charts-timeline", (*copied(*timelines), *(
        python(ROOT / STAGES["06"] / "check" / "timeline.py", "draw", source, source.with_suffix(".svg"))
        for source in (results / RECORDED[name] for name in timelines)))))
    table = results / RECORDED["table.json"]
    steps.append(Step("charts-table", (*copied("table.json"), python(ROOT / "06_optimized" / "check" / "table.py", table, results)),
                      needs=("matplotlib",),
                      files={} if complete(out / "table.json") else {table: "the step table measures it"}))
    tuning = results / RECORDED["tuning.json"]
    steps.append(Step("charts-tuning", (*copied("tuning.json"), python(TUNE, "write", ROOT / "docs/tuning.md", tuning))))
    faults = results / RECORDED["faults.json"]
    steps.append(Step("charts-faults", (*copied("faults.json"), python(
        ROOT / STAGES["06"] / "check" / "faults.py", "draw", faults, faults.with_suffix(".md")))))
    every = sorted(path.parent for path in ROOT.glob("0?_*/CMakeLists.txt"))
    steps.append(Step("charts-ladder", (python(CHARTS, "ladder", "--out", ROOT / "docs" / "ladder.svg", *every),),
                      needs=("matplotlib",)))
    steps.append(Step("charts-memory", (python(CHARTS.with_name("memory.py")),)))
    return steps


# ---------------------------------------------------------------- what is there

def contents(path: Path) -> Any:
    """Of a JSON file; None if there is no whole one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def complete(path: Path) -> bool:
    return contents(path) is not None


def context(path: Path) -> dict[str, Any]:
    data = contents(path)
    found = data.get("context") if isinstance(data, dict) else None
    return found if isinstance(found, dict) else {}


def succeeds(*words: object) -> bool:
    try:
        return subprocess.run(command(*words), capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@lru_cache(maxsize=None)
def missing(need: str) -> str:
    """Empty, or what this machine lacks."""
    if need == "gpu":
        return "" if succeeds("nvidia-smi", "-L") else "no GPU: nvidia-smi finds none"
    if need == "nvcc":
        return "" if shutil.which("nvcc") else "no nvcc in the PATH"
    if need == "torch":
        if not succeeds(sys.executable, "-c", "import torch"):
            return f"no PyTorch for {sys.executable}"
        asked = "import sys, torch; sys.exit(not torch.cuda.is_available())"
        return "" if succeeds(sys.executable, "-c", asked) else "PyTorch is installed, but finds no GPU"
    return "" if succeeds(sys.executable, "-c", f"import {need}") else f"no {need} for {sys.executable}"


def chosen(steps: Sequence[Step], only: Sequence[str]) -> list[Step]:
    """Those whose name begins with one of the words: 06, 06-compare, charts."""
    return [step for step in steps
            if not only or any(step.name == word or step.name.startswith(f"{word}-") for word in only)]


# ---------------------------------------------------------------- doing it

class Stopped(Exception):
    """By a signal, or because the time is over."""


class Sweep:
    def __init__(self, out: Path, missing: Callable[[str], str] = missing, minutes: float | None = None) -> None:
        self.out, self.missing = out, missing
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        (out / "logs").mkdir(parents=True, exist_ok=True)

    def state(self, step: Step, will_be: Sequence[str] = ()) -> Outcome | None:
        """None if the step is to be run; will_be: outputs that earlier steps are going to make."""
        if step.output and complete(self.out / step.output):
            commit = context(self.out / step.output).get("commit")
            return Outcome(step.name, "kept", f"{step.output}" + (f", measured at commit {commit}" if commit else ""))
        reasons = [words for need in step.needs if (words := self.missing(need))]
        reasons += [f"{path} is missing: {how}" for path, how in step.files.items() if not path.exists()]
        if step.begins_as and step.begins_as not in will_be and not complete(self.out / step.begins_as):
            reasons.append(f"the step before it has not made {step.begins_as}")
        return Outcome(step.name, "skipped", "; ".join(reasons)) if reasons else None

    def run(self, step: Step) -> Outcome:
        if found := self.state(step):
            return found
        log = self.out / "logs" / f"{step.name}.log"
        print(f"{step.name}: begun; tail -f {log}", flush=True)
        begin = time.monotonic()
        outcome = Outcome(step.name, "done", step.output)
        try:
            if words := self.run_commands(step, log):
                outcome = Outcome(step.name, "failed", words)
        except Stopped as why:
            left = "the next call continues it" if step.resumes else "the next call begins it again"
            outcome = Outcome(step.name, "stopped", f"{why}; {left}")
        except OSError as error:
            outcome = Outcome(step.name, "failed", f"{error.filename}: {error.strerror}")
        outcome.seconds = time.monotonic() - begin
        return outcome

    def run_commands(self, step: Step, log: Path) -> str:
        """Empty, or what went wrong. The output gets its name last."""
        part = self.out / f"part.{step.output}"
        if step.output and not step.resumes:
            part.unlink(missing_ok=True)
        if step.begins_as:
            shutil.copyfile(self.out / step.begins_as, part)
        with log.open("a" if step.resumes else "w", encoding="utf-8") as file:
            for words in step.commands:
                words = tuple(word.replace(PART, str(part)) for word in words)
                file.write(f"+ {' '.join(words)}\n")
                file.flush()
                code = self.wait(subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                                                  start_new_session=True))
                if code:
                    return f"exit code {code}: {last_line(log)} ({log})"
        if not step.output:
            return ""
        if step.written_to:
            shutil.copyfile(step.written_to, part)
        if not complete(part):
            return f"exit code 0, but {part} is no JSON ({log})"
        os.replace(part, self.out / step.output)
        return ""

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(None if self.deadline is None else max(0.0, self.deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as why:
            for sign, seconds in ((signal.SIGINT, 5), (signal.SIGKILL, 5)):
                try:
                    os.killpg(process.pid, sign)
                    process.wait(seconds)
                    break
                except ProcessLookupError:
                    break
                except subprocess.TimeoutExpired:
                    continue
            raise Stopped("by a signal" if isinstance(why, KeyboardInterrupt) else "the time is over") from None

    def run_all(self, steps: Callable[[], Sequence[Step]]) -> list[Outcome]:
        """steps() is asked again after each one: what can be drawn depends on what was measured."""
        outcomes: list[Outcome] = []
        while step := next((s for s in steps() if s.name not in {o.name for o in outcomes}), None):
            outcomes.append(self.run(step))
            print(line(outcomes[-1]), flush=True)
            if outcomes[-1].state == "stopped":
                break
        return outcomes


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((text.strip()[:300] for text in reversed(lines)
                 if text.strip() and not text.startswith("+ ")), "it said nothing")


def line(o: Outcome) -> str:
    took = f"{o.seconds:7.1f} s" if o.seconds else " " * 9
    return f"  {o.name:20} {o.state:8} {took}  {o.words}"


def report(outcomes: Sequence[Outcome]) -> str:
    states = ("done", "kept", "skipped", "failed", "stopped")
    count = {state: sum(o.state == state for o in outcomes) for state in states}
    total = sum(o.seconds for o in outcomes)
    return "\n".join([", ".join(f"{n} {state}" for state, n in count.items() if n) + f", in {total:.0f} s",
                      *map(line, outcomes)])


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sweep.py", description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, help="where the course was built, of type Release")
    parser.add_argument("out", type=Path, help="where measurements and logs go")
    parser.add_argument("--only", default="", metavar="04,06-compare,charts", help="only steps whose name begins so")
    parser.add_argument("--list", action="store_true", help="say what would be done, do nothing")
    parser.add_argument("--minutes", type=float, help="stop after so many; the next call goes on")
    return parser.parse_args(argv)


def copy(source: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, to)


def main(argv: Sequence[str] | None = None) -> int:
    """0: all is there; 1: something failed or was stopped; 2: wrong usage; 3: something was skipped."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--copy"]:  # a command of drawing()
        copy(Path(argv[1]), Path(argv[2]))
        return 0
    options = arguments(argv)
    build, out = options.build.resolve(), options.out.resolve()
    only = [word for word in options.only.split(",") if word]

    def steps() -> list[Step]:
        return chosen([*measuring(build), *drawing(out)], only)

    if unknown := [word for word in only if not chosen([*measuring(build), *drawing(out)], [word])]:
        print(f"sweep.py: no step begins with '{unknown[0]}'; see --list", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopped like by Ctrl-C: no step is left running
    sweep = Sweep(out, minutes=options.minutes)
    if options.list:
        outcomes = []
        for step in steps():
            will_be = [o.words for o in outcomes if o.state == "to do"]
            outcomes.append(sweep.state(step, will_be) or Outcome(step.name, "to do", step.output))
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--list | head` ends without a word
        print("\n".join(map(line, outcomes)))
        return 0
    outcomes = sweep.run_all(steps)
    text = report(outcomes)
    (out / "report.txt").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}")
    states = {o.state for o in outcomes}
    return 1 if states & {"failed", "stopped"} else 3 if "skipped" in states else 0


if __name__ == "__main__":
    sys.exit(main())
