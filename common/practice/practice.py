#!/usr/bin/env python3
"""./learn practice: a reader's own version of a lesson, made, built and judged.

    practice.py begin|judge 02_online_softmax [FILE...] [--level N] [--reset] [-v] [--watch] [--race] [--asan] [--no-gpu WHY]

`begin` refuses what cannot work before anything is installed or built, and makes the copies; `judge` does the rest.
"""
from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Iterator, NoReturn

from ladder import Ladder, family
from marks import BARRIER, Lesson, Region, load_copy, marked_lessons, stage_of  # puts common/judge on the path
from progress import next_of, note, read, stages_of
from source import Bad, Parser, bare, run, write_whole
from suite import BAD, pattern, run_suite
from verdict import ENVIRONMENT, Copy, Verdict, program
from weave import notes

ROOT = Path(__file__).resolve().parents[2]
USAGE, MISSING = 2, 3   # exit codes: the command cannot work; this machine lacks something
SCREEN = 14         # lines at most without -v, after the one that `begin` may have said
PATIENCE = 10.0     # seconds until a build says how far it is, where there is no terminal
OWN = {"predictions.txt"}       # what mine/ may hold beside lessons
EDITORS = re.compile(r"(^|/)[.#]|~$|#$|\.(sw[op]|bak|orig|tmp|rej)$|(^|/)4913$")
SANITIZERS = {"race": ("tsan", "ThreadSanitizer"), "asan": ("asan", "AddressSanitizer and UndefinedBehaviorSanitizer")}


@dataclass(frozen=True)
class Wish:
    """What the command line asks for."""
    stage: Path
    loud: bool
    no_gpu: str     # why no GPU can judge here; empty if one can

    @property
    def id(self) -> str:
        return self.stage.name[:2]

    @property
    def command(self) -> str:
        return f"./learn practice {self.id}"


# ---- the reader's files ------------------------------------------------------------------------

def refuse(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    sys.exit(USAGE)


def cmake(stage: Path) -> str:
    return (stage / "CMakeLists.txt").read_text(encoding="utf-8")


def is_ladder(stage: Path) -> bool:
    return "fa_add_ladder" in cmake(stage)


def name_of(lesson: Lesson) -> str:
    return lesson.label.partition("/")[2]


def skeletons(stage: Path) -> list[Lesson]:
    return [lesson for lesson in marked_lessons(stage) if lesson.holes(1)]


def chosen(stage: Path, names: list[str]) -> list[Lesson]:
    """The lessons that the names stand for: a path in exercise/, or the end of one."""
    lessons, found = skeletons(stage), []
    for name in names:
        fits = [x for x in lessons if name_of(x) == name] or [x for x in lessons if name_of(x).endswith("/" + name)]
        if len(fits) != 1:
            refuse(f"no skeleton {stage.name}/exercise/{name}; there are: {' '.join(map(name_of, lessons))}")
        found += fits
    return found


def begin(wish: Wish, names: list[str], level: int | None, reset: bool, sanitizer: str | None) -> None:
    """The reader's copies, which nothing ever writes again. First comes all that may be refused."""
    named = chosen(wish.stage, names)
    if sanitizer and is_ladder(wish.stage):
        refuse(f"stage {wish.id}: {wish.command} itself names the rules that a kernel breaks; compute-sanitizer on a GPU: "
               "docs/cuda_debugging.md")
    if sanitizer == "race" and not re.search(r"CUDA|THREADS", cmake(wish.stage)):
        refuse(f"stage {wish.id} has one thread: nothing can race there")
    mine = {lesson.label: wish.stage / "mine" / name_of(lesson) for lesson in skeletons(wish.stage)}
    kept = [] if reset else [lesson for lesson in skeletons(wish.stage) if mine[lesson.label].is_file()]
    for place in (f for f in mine.values() if f.exists() and not f.is_file()):
        refuse(f"{place.relative_to(ROOT)} is no file, but the place for one; move it away")
    begun = named or ([] if kept and not level else skeletons(wish.stage)[:1])
    for lesson in begun:
        has = load_copy(lesson, wish.stage, mine[lesson.label])[0].level if lesson in kept else level
        if level and level != has:
            refuse(f"{mine[lesson.label].relative_to(ROOT)} is at level {has} and stays as it is; to throw it away: "
                   f"{wish.command} {name_of(lesson)} --level {level} --reset")
    if reset:       # the copies named, or all; predictions stay
        for lesson in named or skeletons(wish.stage):
            mine[lesson.label].unlink(missing_ok=True)
    for lesson in begun:
        if not mine[lesson.label].exists():
            write_whole(mine[lesson.label], lesson.skeleton(level or 1))
            print(f"your copy, level {level or 1}: {mine[lesson.label].relative_to(ROOT)}", flush=True)


def copies(stage: Path) -> list[Copy]:
    found = []
    for lesson in skeletons(stage):
        file = stage / "mine" / name_of(lesson)
        if file.is_file():
            found.append(Copy(lesson, *load_copy(lesson, stage, file)))
    return found


def strangers(stage: Path) -> list[str]:
    """A line for files in mine/ that nothing here judges; what editors leave behind is not told."""
    known = {name_of(lesson) for lesson in skeletons(stage)} | OWN
    mine = stage / "mine"
    files = [f.relative_to(mine).as_posix() for f in sorted(mine.rglob("*")) if f.is_file()]
    names = [f for f in files if f not in known and not EDITORS.search(f)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"in {stage.name}/mine, but no skeleton of this stage, left alone: {', '.join(names[:3])}{more}"] if names else []


# ---- building ----------------------------------------------------------------------------------

class Progress:
    """How far a build is, `building: [n/m]`: on a terminal one line, rewritten and gone at the end; elsewhere a few lines,
    the first after ten seconds, each of the others when twice that time has passed."""

    def __init__(self, doing: str) -> None:
        self.doing, self.rewritten, self.width = doing, sys.stdout.isatty(), 0
        self.began, self.due = time.monotonic(), PATIENCE
        if self.rewritten:
            self.rewrite(f"{doing} ...")

    def rewrite(self, text: str) -> None:
        print("\r" + text.ljust(self.width), end="", flush=True)
        self.width = len(text)

    def step(self, line: str) -> None:
        m = re.match(r"\[\d+/\d+\]", line)
        if m and self.rewritten:
            self.rewrite(f"{self.doing}: {m[0]}")
        elif m and time.monotonic() - self.began >= self.due:
            print(f"{self.doing}: {m[0]}", flush=True)
            self.due *= 2

    def over(self) -> None:
        if self.rewritten:
            self.rewrite("")
            print("\r", end="", flush=True)


def call(wish: Wish, doing: str, *command: str) -> tuple[bool, str]:
    if wish.loud:
        print("+ " + " ".join(command), flush=True)
    progress = None if wish.loud else Progress(doing)
    output = []
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "NINJA_STATUS": "[%f/%t] "}, text=True, errors="replace",
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            for line in process.stdout or []:
                output.append(line)
                if progress:
                    progress.step(line)
                else:
                    print(line, end="", flush=True)
        finally:
            if progress:
                progress.over()
    return process.returncode == 0, "".join(output)


def configured(wish: Wish, preset: str, program: str) -> Path:
    """The build folder. Once it is there, CMake finds new files in mine/ by itself."""
    build = ROOT / "build" / ("" if preset == "default" else preset)
    if not (build / wish.stage.name / program).is_file():
        print("building your code and its judge; the first time takes a minute or more", flush=True)
    if not (build / "build.ninja").is_file():
        done, output = call(wish, "configuring", "cmake", "--preset", preset)
        if not done:
            raise Bad(output + "CMake could not configure; its own words are above")
    return build


def built(wish: Wish, build: Path, target: str) -> tuple[bool, str]:
    return call(wish, "building", "cmake", "--build", str(build.relative_to(ROOT)), "--target", target)


def first_errors(output: str) -> list[str]:
    """The compiler's first two errors, each with the line of code that it shows."""
    lines = output.replace(str(ROOT) + "/", "").split("\n")
    error = re.compile(r":\d+(?::\d+)?: (?:fatal )?error: |\(\d+\): error: |undefined reference|Undefined symbols|No space left")
    told: list[str] = []
    for at in [i for i, line in enumerate(lines) if error.search(line)][:2]:
        told.append(lines[at][:240])
        told += [line[:160] for line in lines[at + 1:at + 3] if re.match(r"\s*\d*\s*\|", line)]
    return told or [line for line in lines if line.strip()][-4:]


def not_compiled(output: str) -> int:
    print("it does not compile yet, so nothing was tested:")
    print(*(f"  {line}" for line in first_errors(output)), sep="\n")
    return 1


# ---- judging -----------------------------------------------------------------------------------

def fitted(lines: list[str], room: int) -> list[str]:
    """What fits: the first to go are quantities that agree, then details, the last ones first."""
    agree = [i for i, line in enumerate(lines) if line.endswith("  the same")]
    details = [i for i, line in enumerate(lines) if line.startswith("  ") and i not in agree]
    gone = set((agree + details[::-1])[:max(0, len(lines) - room)])
    return [line for i, line in enumerate(lines) if i not in gone][:room]


def practise(wish: Wish) -> int:
    mine = copies(wish.stage)
    files = ", ".join(f"{wish.stage.name}/mine/{c.name}" for c in mine)
    levels = "/".join(sorted({str(c.text.level) for c in mine}))
    said = [f"testing YOUR code: {files}, level {levels}", *[told for c in mine for told in c.told][:3], *strangers(wish.stage)]
    print(*said, sep="\n", flush=True)
    if is_ladder(wish.stage):
        return practise_ladder(wish, mine)
    target = f"exercise{wish.id}_tests"
    build = configured(wish, "default", target)
    woven, words = built(wish, build, target)
    if not woven:
        target = f"exercise{wish.id}_plain_tests"
        plain, words = built(wish, build, target)
        if not plain:
            return not_compiled(words)
        said.append("steps   cannot be judged one by one: one of them uses what another declares")
        print(said[-1])
    verdict = Verdict(program(build / wish.stage.name / target, mine, notes(wish.stage)), mine, notes(wish.stage), woven)
    verdict.judge()
    print(*(verdict.lines if wish.loud else fitted(verdict.lines, SCREEN - 2 - len(said))), sep="\n")
    if wish.loud:
        for name, lines in verdict.wrong.items():
            print(f"{name}, alone:", *lines, sep="\n  ")
        print(*(t.output for t in (verdict.suite or verdict.program.suite()).bad), sep="\n")
    keep(wish, mine, None if verdict.passed and not verdict.empty else verdict.right if verdict.woven else [])
    if not verdict.passed:
        advise(wish, mine, verdict)
        return 1
    if verdict.empty:
        print(f"the tests cannot tell, but {' '.join(verdict.empty)} {'is' if len(verdict.empty) == 1 else 'are'} not written"
              + (f"; what then goes wrong: {wish.command} --race" if has_barriers(mine) else ""))
        return 1
    if "CUDA" in cmake(wish.stage) and not wish.no_gpu:
        on_gpu, words = built(wish, build, f"exercise{wish.id}_on_gpu_tests")
        if not on_gpu:
            return not_compiled(words)
        suite = run_suite(build / wish.stage.name / f"exercise{wish.id}_on_gpu_tests", verdict.program.filter)
        print(f"on the GPU {len(suite.of('passed'))} right" + (f", {len(suite.bad)} wrong" if suite.bad else ""))
        if not suite.ok:
            print(*(f"  {line}" for line in pattern(suite)), sep="\n")
            return 1
    if has_barriers([c for c in mine if c.text.level > 1]):
        print(f"that no barrier is missing, no test can tell: {wish.command} --race")
    print(f"all tests pass on your code. Next: {following(wish, mine)}", flush=True)
    for line in wasteful(wish, mine):  # last, since it compiles once more
        print(line)
    return 0


def practise_ladder(wish: Wish, mine: list[Copy]) -> int:
    """06: headers are tested, and kernels on the CPU, then where a GPU answers there, too."""
    ladder, on_cpu = Ladder(mine), f"exercise{wish.id}_on_cpu_tests"
    kernels = ladder.kernels()
    build = configured(wish, "default", on_cpu if kernels else f"exercise{wish.id}_{'layouts' if ladder.headers() else 'ring'}_tests")
    folder, plain, told = build / wish.stage.name, "", []
    done, words = built(wish, build, f"exercise{wish.id}_tests")
    if not done and kernels:
        plain = "_plain"
        done, words = built(wish, build, f"exercise{wish.id}{plain}_tests")
        told = ["steps   cannot be judged one by one: one of them uses what another declares"]
    if not done:
        return not_compiled(words)
    if ladder.headers():
        ladder.judge_on_host(folder / f"exercise{wish.id}_layouts_tests", ladder.headers(), notes(wish.stage))
    if ladder.ring():
        ladder.judge_on_host(folder / f"exercise{wish.id}_ring_tests", ladder.ring(), notes(wish.stage))
    if kernels:
        ladder.judge_kernels(folder / on_cpu.replace("_on_cpu", f"{plain}_on_cpu"), not plain)
    if kernels and not wish.no_gpu and ladder.ok:
        done, words = built(wish, build, f"exercise{wish.id}_on_gpu_tests")
        if not done:
            return not_compiled(words)
        names = ":".join(f"{family(c.name)}.*" for c in kernels)
        ladder.tests += run_suite(folder / f"exercise{wish.id}_on_gpu_tests", names).tests
    lines = told + ladder.lines()
    print(*(lines if wish.loud else fitted(lines, SCREEN - 3)), sep="\n")
    if wish.loud:
        print(*(t.output for t in ladder.tests if t.state in BAD), sep="\n")
    keep(wish, mine, None if ladder.ok else ladder.right)
    if not ladder.ok:
        advise(wish, mine, None)
        return 1
    print(f"all tests pass on your code. Next: {following(wish, mine)}")
    return 0


UNITS = {"shared": "turns of shared memory", "global": "sectors of global memory"}


def taken(id_: str, *words: str) -> Counter[str]:
    """Of each memory, what `./learn xray` counts; nothing where it cannot run."""
    done = subprocess.run([ROOT / "learn", "xray", id_, *words, "--n", "128", "--csv"], capture_output=True, text=True, check=False)
    total: Counter[str] = Counter()
    for row in csv.DictReader(done.stdout.splitlines()) if done.returncode == 0 else ():
        total[row["memory"]] += int(row["took"])
    return total


def wasteful(wish: Wish, mine: list[Copy]) -> Iterator[str]:
    """A line for each kernel that takes a tenth more of a memory than the lesson's: no test can fail for that."""
    if wish.id not in ("04", "05"):  # a kernel of 06 takes longer to compile than a verdict may
        return
    for copy in mine:
        for kernel in re.findall(r"^void launch_(\w+)\(", "\n".join(copy.lesson.lines), re.M):
            yours, lessons = taken(wish.id, "mine", kernel), taken(wish.id, kernel)
            for memory, unit in UNITS.items():
                if yours[memory] > 1.1 * lessons[memory] > 0:
                    yield (f"right, but {kernel} takes {yours[memory]:,} {unit} where the lesson takes {lessons[memory]:,}: "
                           f"./learn xray {wish.id} mine {kernel}")


def has_barriers(mine: list[Copy]) -> bool:
    return any(re.search(r"__sync|barrier", "\n".join(c.lesson.lines)) for c in mine)


def advise(wish: Wish, mine: list[Copy], verdict: Verdict | None) -> None:
    walks = [c.name.rpartition("/")[0] for c in mine if c.name.startswith(("beyond/", "ring/"))]
    hints = f"{walks[0]}/README.md" if walks else "exercises.md" if (wish.stage / "exercises.md").exists() else "README.md, 'Your turn'"
    ways = [f"hints: {wish.stage.name}/{hints}"]
    launched = not verdict or not any(line.startswith("never launched") for line in verdict.lines)
    if verdict and verdict.written and launched and has_barriers(mine) and not (verdict.suite and verdict.suite.ok):
        ways.insert(0, f"is a barrier missing? {wish.command} --race")
    if verdict and any("crash" in line for line in verdict.lines):
        ways.insert(0, f"{wish.command} --asan names the line")
    elif verdict and any("(NaN among them)" in line for line in verdict.lines):
        ways.insert(0, f"is memory read that is not yours? {wish.command} --asan")
    if verdict and any("does not end" in line for line in verdict.lines):
        ways.insert(0, "which loop has no end" + (", or which barrier do not all threads reach?" if has_barriers(mine) else "?"))
    if not wish.loud:
        ways.append("-v: everything")
    print(f"edit {wish.stage.name}/mine, run {wish.command} again; " + "; ".join(ways))


def keep(wish: Wish, mine: list[Copy], right: list[str] | None) -> None:
    """A line in .progress for each step that is right for the first time; None: all are, those whose marks are gone, too."""
    known = {(n.stage, n.details.get("step"), n.details.get("level")) for n in read(ROOT)[0] if n.what == "practice"}
    for copy in mine:
        for hole in copy.lesson.holes(copy.text.level):
            level = str(copy.text.level)
            if (right is None or hole.name in right) and (wish.id, hole.name, level) not in known:
                note(ROOT, wish.id, "practice", step=hole.name, level=level)


def following(wish: Wish, mine: list[Copy]) -> str:
    """What ./learn progress says; and if this stage is done at this level, the next one."""
    notes = read(ROOT)[0]
    level = max(c.text.level for c in mine)
    done = len(mine) == len(skeletons(wish.stage)) and not any(c.empty() for c in mine)
    return next_of(stages_of(ROOT, notes), notes) + \
        (f"; or again with less help: {wish.command} --level {level + 1} --reset" if done and level < 3 else "")


# ---- sanitizers --------------------------------------------------------------------------------

def sanitize(wish: Wish, what: str) -> int:
    """The trials under a sanitizer: what it finds, and where in the reader's file."""
    preset, name = SANITIZERS[what]
    mine = copies(wish.stage)
    target = f"exercise{wish.id}_tests"
    build = configured(wish, preset, target)
    done, words = built(wish, build, target)
    if not done:    # as where it cannot be woven
        target = f"exercise{wish.id}_plain_tests"
        done, words = built(wish, build, target)
    if not done:
        return not_compiled(words)
    judged = program(build / wish.stage.name / target, mine, notes(wish.stage))
    code, output = judged.run("Practice.Trials", None)
    lines = finding(name, output, mine)
    if not lines:   # what the other methods do that these files decide, and that are tested by a few families
        others = {words.partition(".")[0] for words in judged.filter.partition("-")[0].split(":")} - set(judged.stages)
        more, output_of_others = replace(judged, stages=sorted(others)).run("Practice.Trials", None)
        code, output = code or more, output + output_of_others
        lines = finding(name, output, mine)
    if wish.loud:
        print(output)
    if lines:
        print(*lines, sep="\n")
        return 1
    right = code == 0 and not re.search(r"^trial\t[^\t\n]+\t.", output, re.M)
    print(f"{name}: nothing found in the trials on {', '.join(c.name for c in mine)}"
          + ("" if right else f"; but they do not all pass: {wish.command}"))
    return 0 if right else 1


FINDING = re.compile(r"WARNING: ThreadSanitizer: (.+?) \(pid|ERROR: AddressSanitizer: (\S+)|runtime error: (.+)")


def finding(name: str, output: str, mine: list[Copy]) -> list[str]:
    """The first thing that a sanitizer reports, with the reader's lines of it, two at most; nothing if there is none."""
    found = FINDING.search(output)
    if not found:
        return []
    report = output[found.start():].partition("SUMMARY")[0]
    if found[3]:    # the place stands before it
        report = output[:found.start()].rsplit("\n", 1)[-1] + report
    at: list[tuple[str, int]] = []      # of each access the innermost line that is the reader's; of a kernel, not of what it calls
    for access in [stack for stack in report.split("\n\n") if re.search("(?:read|write) of size", stack, re.I)] or [report]:
        seen = [("_kernel" not in m[1], m.start(), c.name, int(m[2])) for c in mine
                for m in re.finditer(rf"^(.*){re.escape(c.text.label)}:(\d+)", access, re.M)]
        at += [place[2:] for place in sorted(seen, key=lambda place: place[:2])[:1]]
    by_name, places = {c.name: c for c in mine}, []
    at = list(dict.fromkeys(at))[:2]
    for file, line in at:
        text = by_name[file].text
        places.append(f"  {text.label}:{line}: {text.lines[line - 1].strip() if line <= len(text.lines) else ''}")
    if found[1] and len({file for file, _ in at}) == 1:
        places += near(by_name[at[0][0]], [line for _, line in at])
    trials = re.findall(r"^begins\t(.+)$", output[:found.start()], re.M)
    return [f"{name}: {found[1] or found[2] or found[3]}",
            *(places or ["  no line of yours: the caller of your code, or the judge; -v shows the report"]),
            f"  at the trial: {trials[-1]}" if trials else "  at the first trial"]


def near(copy: Copy, lines: list[int]) -> list[str]:
    """What to look at where two lines race: the holes of a barrier that has none in it, those between the lines, else those
    next to them, since a loop leads from its last line to its first; and if there are none, the holes that they stand in."""
    first, last = min(lines) - 1, max(lines) - 1

    def barrier(text: Lesson, hole: Region) -> bool:
        return bool(BARRIER.search(bare("\n".join(text.code(hole)))))
    wanted = [h.name for h in copy.lesson.holes(2) if barrier(copy.lesson, h)]
    lacking = [h for h in copy.text.regions if h.name in wanted and not barrier(copy.text, h)]
    between = [h for h in lacking if first < h.first and h.last < last]
    around = [h for h in lacking if h.last < first][-1:] + [h for h in lacking if last < h.first][:1]
    if holes := between or around:
        where = "between them" if between else "around them" if first < last else "around it"
        return [f"  {where} no barrier: {'; '.join(f'{h.name}, {h.text}' for h in holes)}"]
    inside = [h.name for h in copy.text.regions if h.kind != "blank" and any(h.first < n - 1 < h.last for n in lines)]
    return [f"  in {' and '.join(inside)}"] if inside else []


# ---- watching ----------------------------------------------------------------------------------

State = dict[Path, tuple[int, int, int]]


def state(stage: Path) -> State:
    found = {}
    for file in sorted((stage / "mine").rglob("*")):
        try:
            if not EDITORS.search(file.name) and file.is_file():
                is_ = file.stat()
                found[file] = (is_.st_ino, is_.st_mtime_ns, is_.st_size)
        except OSError:     # gone between two looks, as when an editor puts another file in its place
            pass
    return found


def settled(stage: Path, before: State) -> State:
    """Waits until a save has begun and ended: another state, the same twice, no file empty or gone for two seconds."""
    last, since = state(stage), time.monotonic()
    while True:
        time.sleep(0.15)
        now = state(stage)
        if now != last:
            last, since = now, time.monotonic()
            continue
        half = set(before) - set(now) or any(size == 0 for *_, size in now.values())
        if now != before and (not half or time.monotonic() - since > 2):
            return now


def watch(wish: Wish, judge: Callable[[], int]) -> int:
    seen: State = {}
    try:
        while True:
            seen = settled(wish.stage, seen)
            if sys.stdout.isatty():
                print("\033[H\033[J\033[3J", end="")
            began = time.monotonic()
            try:
                judge()
            except (Bad, OSError) as error:     # as where a file goes while it is read; the next save is another chance
                print(error)
            print(f"[{time.strftime('%H:%M:%S')}, {time.monotonic() - began:.1f} s] watching {wish.stage.name}/mine; Ctrl-C ends it", flush=True)
    except KeyboardInterrupt:
        print()
        return 0


def main() -> int:
    parser = Parser(description=(__doc__ or "").partition("\n")[0], prog="./learn practice")
    parser.add_argument("what", choices=["begin", "judge"])
    parser.add_argument("stage", type=Path)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--level", type=int, choices=(1, 2, 3))
    parser.add_argument("--reset", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("--watch", action="store_true")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--race", dest="sanitizer", action="store_const", const="race")
    which.add_argument("--asan", dest="sanitizer", action="store_const", const="asan")
    parser.add_argument("--no-gpu", default="", metavar="WHY")
    args = parser.parse_intermixed_args()
    wish = Wish(stage_of(args.stage), args.verbose, args.no_gpu)
    if args.what == "begin":
        begin(wish, args.files, args.level, args.reset, args.sanitizer)
        return 0

    def judge() -> int:
        if not copies(wish.stage):
            raise Bad(f"nothing of yours is in {wish.stage.name}/mine; {wish.command} begins again")
        return sanitize(wish, args.sanitizer) if args.sanitizer else practise(wish)
    return watch(wish, judge) if args.watch else judge()


if __name__ == "__main__":
    run(main)
