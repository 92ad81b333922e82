#!/usr/bin/env python3
"""./learn practice: a reader's own version of a lesson, made, built and judged.

    practice.py 02_online_softmax [FILE...] [--level N] [--reset] [-v] [--watch] [--race] [--asan] [--no-gpu WHY]
"""
from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from marks import Lesson, load_copy, marked_lessons, stage_of  # puts common/judge on the path
from progress import note, read
from source import Bad, Parser, run, write_whole
from suite import Suite, Test, pattern, run_suite
from verdict import ENVIRONMENT, Copy, Verdict, program
from weave import notes

ROOT = Path(__file__).resolve().parents[2]
MISSING = 3         # the exit code for what this machine lacks
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
            print(f"no skeleton {stage.name}/exercise/{name}; there are: {' '.join(map(name_of, lessons))}", file=sys.stderr)
            sys.exit(2)
        found += fits
    return found


def begin(wish: Wish, lesson: Lesson, level: int | None) -> None:
    """The reader's copy, which nothing ever writes again."""
    mine = wish.stage / "mine" / name_of(lesson)
    if mine.exists():
        has = load_copy(lesson, wish.stage, mine)[0].level
        if level and level != has:
            raise Bad(f"{mine.relative_to(ROOT)} is at level {has} and stays as it is; to throw it away: "
                      f"{wish.command} {name_of(lesson)} --level {level} --reset")
        return
    write_whole(mine, lesson.skeleton(level or 1))
    print(f"your copy, level {level or 1}: {mine.relative_to(ROOT)}")


def reset(wish: Wish, lessons: list[Lesson]) -> None:
    """Throws away the copies named, or all; predictions stay."""
    for lesson in lessons or marked_lessons(wish.stage):
        mine = wish.stage / "mine" / name_of(lesson)
        if mine.exists():
            mine.unlink()
            print(f"removed {mine.relative_to(ROOT)}")


def copies(stage: Path) -> list[Copy]:
    found = []
    for lesson in skeletons(stage):
        file = stage / "mine" / name_of(lesson)
        if file.is_file():
            found.append(Copy(lesson, *load_copy(lesson, stage, file)))
    return found


def strangers(stage: Path) -> list[str]:
    """Files in mine/ that nothing here judges; what editors leave behind is not told."""
    known = {name_of(lesson) for lesson in skeletons(stage)} | OWN
    mine = stage / "mine"
    files = [f.relative_to(mine).as_posix() for f in sorted(mine.rglob("*")) if f.is_file()]
    return [f for f in files if f not in known and not EDITORS.search(f)]


# ---- building ----------------------------------------------------------------------------------

def call(wish: Wish, *command: str) -> tuple[bool, str]:
    if wish.loud:
        print("+ " + " ".join(command), flush=True)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    if wish.loud:
        print(done.stdout, end="")
    return done.returncode == 0, done.stdout


def configured(wish: Wish, build: Path, preset: str) -> None:
    """Once there is a build, CMake finds new files in mine/ by itself."""
    if not (build / "build.ninja").is_file():
        print(f"+ cmake --preset {preset}", flush=True)
        done, output = call(wish, "cmake", "--preset", preset)
        if not done:
            raise Bad(output + "CMake could not configure; its own words are above")


def built(wish: Wish, build: Path, target: str) -> tuple[bool, str]:
    return call(wish, "cmake", "--build", str(build.relative_to(ROOT)), "--target", target)


def first_errors(output: str) -> list[str]:
    """The compiler's first two errors, each with the line of code that it shows."""
    lines = output.replace(str(ROOT) + "/", "").split("\n")
    error = re.compile(r":\d+(?::\d+)?: (?:fatal )?error: |\(\d+\): error: |undefined reference|No space left")
    told: list[str] = []
    for at in [i for i, line in enumerate(lines) if error.search(line)][:2]:
        told.append(lines[at][:240])
        told += [line[:160] for line in lines[at + 1:at + 3] if re.match(r"\s*\d*\s*\|", line)]
    return told or [line for line in lines if line.strip()][-4:]


def not_compiled(output: str) -> None:
    print("it does not compile yet, so nothing was tested:")
    print(*(f"  {line}" for line in first_errors(output)), sep="\n")


# ---- judging -----------------------------------------------------------------------------------

def practise(wish: Wish) -> int:
    mine = copies(wish.stage)
    files = ", ".join(f"{wish.stage.name}/mine/{c.name}" for c in mine)
    levels = "/".join(sorted({str(c.text.level) for c in mine}))
    print(f"testing YOUR code: {files}, level {levels}", flush=True)
    for line in [told for c in mine for told in c.told]:
        print(line)
    for name in strangers(wish.stage):
        print(f"{wish.stage.name}/mine/{name}: no skeleton of this stage; left alone")
    build = ROOT / "build"
    configured(wish, build, "default")
    if "fa_add_ladder" in (wish.stage / "CMakeLists.txt").read_text(encoding="utf-8"):
        return practise_ladder(wish, build, mine)
    target = f"exercise{wish.id}_tests"
    woven, words = built(wish, build, target)
    if not woven:
        target = f"exercise{wish.id}_plain_tests"
        plain, words = built(wish, build, target)
        if not plain:
            not_compiled(words)
            return 1
        print("steps   cannot be judged one by one: one of them uses what another declares")
    verdict = Verdict(program(build / wish.stage.name / target, mine, notes(wish.stage)), mine, notes(wish.stage), woven)
    verdict.judge()
    print(*verdict.lines, sep="\n")
    if wish.loud and verdict.suite:
        print(*(t.output for t in verdict.suite.bad), sep="\n")
    keep(wish, mine, verdict.right if verdict.woven else [])
    if not verdict.passed:
        advise(wish, mine, verdict)
        return 1
    if verdict.empty:
        print(f"the tests cannot tell, but {' '.join(verdict.empty)} {'is' if len(verdict.empty) == 1 else 'are'} not written"
              + (f"; what then goes wrong: {wish.command} --race" if has_barriers(mine) else ""))
        return 1
    if "CUDA" in (wish.stage / "CMakeLists.txt").read_text(encoding="utf-8") and not wish.no_gpu:
        on_gpu, words = built(wish, build, f"exercise{wish.id}_on_gpu_tests")
        if not on_gpu:
            not_compiled(words)
            return 1
        suite = run_suite(build / wish.stage.name / f"exercise{wish.id}_on_gpu_tests", verdict.program.filter)
        print(f"on the GPU {len(suite.of('passed'))} right" + (f", {len(suite.bad)} wrong" if suite.bad else ""))
        if not suite.ok:
            print(*(f"  {line}" for line in pattern(suite)), sep="\n")
            return 1
    print(f"all tests pass on your code. Next: {following(wish, mine)}")
    return 0


def practise_ladder(wish: Wish, build: Path, mine: list[Copy]) -> int:
    """06: headers are tested everywhere, kernels where a GPU has tensor cores. Their holes are not judged one by one."""
    done, words = built(wish, build, f"exercise{wish.id}_tests")
    if not done:
        not_compiled(words)
        return 1
    folder = build / wish.stage.name
    tests: list[Test] = []
    kernels = [c.name for c in mine if c.name.endswith(".cu")]
    if len(kernels) < len(mine):
        tests += run_suite(folder / f"exercise{wish.id}_layouts_tests", env=dict(ENVIRONMENT)).tests
    if kernels and not wish.no_gpu:
        # forward/1_mma.cu is tested as mma.*, backward/1_mma.cu as backward_mma.*
        names = [re.sub(r"^.*/\d+_", "backward_" if name.startswith("backward/") else "", name.removesuffix(".cu")) for name in kernels]
        tests += run_suite(folder / f"exercise{wish.id}_on_gpu_tests", ":".join(f"{name}.*" for name in names)).tests
    empty = [name for c in mine for name in c.empty()]
    print("steps   " + (f"not written: {' '.join(empty)}" if empty else "all written"))
    suite = Suite(folder, tests)
    if tests:
        print(f"tests   {len(suite.of('passed'))} right" + (f", {len(suite.bad)} wrong" if suite.bad else ""))
        print(*(f"  {line}" for line in pattern(suite)), sep="\n", end="\n" if suite.bad else "")
        if wish.loud:
            print(*(t.output for t in suite.bad), sep="\n")
    if tests and not suite.ok or empty:
        advise(wish, mine, None)
        return 1
    if kernels and wish.no_gpu:
        print(f"not tested: {' '.join(kernels)}, since {wish.no_gpu}; they compile" if shutil.which("nvcc") else
              f"not tested: {' '.join(kernels)}, since {wish.no_gpu}")
        return MISSING
    keep(wish, mine, [h.name for c in mine for h in c.text.regions])
    print(f"all tests pass on your code. Next: {following(wish, mine)}")
    return 0


def has_barriers(mine: list[Copy]) -> bool:
    return any(re.search(r"__sync|barrier", "\n".join(c.lesson.lines)) for c in mine)


def advise(wish: Wish, mine: list[Copy], verdict: Verdict | None) -> None:
    ways = [f"hints: {wish.stage.name}/README.md, 'Your turn'"]
    if verdict and verdict.written and has_barriers(mine):
        ways.insert(0, f"is a barrier missing? {wish.command} --race")
    if verdict and any("crash" in line for line in verdict.lines):
        ways.insert(0, f"{wish.command} --asan names the line")
    if not wish.loud:
        ways.append("-v: everything")
    print(f"edit {wish.stage.name}/mine, run {wish.command} again; " + "; ".join(ways))


def keep(wish: Wish, mine: list[Copy], right: list[str]) -> None:
    """A line in .progress for each step that is right for the first time."""
    known = {(n.stage, n.details.get("step"), n.details.get("level")) for n in read(ROOT)[0] if n.what == "practice"}
    for copy in mine:
        for hole in copy.text.regions:
            level = str(copy.text.level)
            if hole.name in right and (wish.id, hole.name, level) not in known:
                note(ROOT, wish.id, "practice", step=hole.name, level=level)


def following(wish: Wish, mine: list[Copy]) -> str:
    """The next file of the stage that is not done, at the level of this one; then a hunt."""
    level = max(c.text.level for c in mine)
    done = {c.name for c in mine if not c.empty()}
    left = [name_of(x) for x in skeletons(wish.stage) if name_of(x) not in done]
    if left:
        return f"{wish.command} {left[0]}" + (f" --level {level}" if level > 1 else "")
    harder = f", or again with less help: {wish.command} --level {level + 1} --reset" if level < 3 else ""
    return f"./learn hunt {wish.id}{harder}"


# ---- sanitizers --------------------------------------------------------------------------------

def sanitize(wish: Wish, what: str) -> int:
    """The trials under a sanitizer: what it finds, and where in the reader's file."""
    preset, name = SANITIZERS[what]
    if what == "race" and not re.search(r"CUDA|THREADS", (wish.stage / "CMakeLists.txt").read_text(encoding="utf-8")):
        print(f"stage {wish.id} has one thread: nothing can race there", file=sys.stderr)
        return 2
    mine = copies(wish.stage)
    build = ROOT / "build" / preset
    if not (build / "build.ninja").is_file():
        print(f"building your code and its judge with {name}; the first time takes a minute or two", flush=True)
    configured(wish, build, preset)
    done, words = built(wish, build, f"exercise{wish.id}_tests")
    if not done:
        not_compiled(words)
        return 1
    judged = program(build / wish.stage.name / f"exercise{wish.id}_tests", mine, notes(wish.stage))
    _, output = judged.run("Practice.Trials", None)
    if wish.loud:
        print(output)
    found = re.search(r"WARNING: ThreadSanitizer: (.+?) \(pid|ERROR: AddressSanitizer: (\S+)|runtime error: (.+)", output)
    if not found:
        print(f"{name} finds nothing in the trials on {', '.join(c.name for c in mine)}")
        return 0
    report = output[found.start():].partition("SUMMARY")[0]
    if found[3]:    # the place stands before it
        report = output[:found.start()].rsplit("\n", 1)[-1] + report
    print(f"{name}: {found[1] or found[2] or found[3]}")
    # Of each access the innermost line that is the reader's.
    places = []
    for access in re.split(r"\n *(?=(?:Previous )?(?:atomic )?(?:read|write) of size)", report, flags=re.I)[-2:]:
        seen = [(c, int(m[1]), m.start()) for c in mine for m in re.finditer(rf"{re.escape(c.text.label)}:(\d+)", access)]
        places += sorted(seen, key=lambda place: place[2])[:1]
    for copy, line, _ in places:
        text = copy.text.lines
        print(f"  {copy.text.label}:{line}: {text[line - 1].strip() if line <= len(text) else ''}")
    if not places:
        print("  no line of yours: the caller of your code, or the judge; -v shows the report")
    trial = re.findall(r"^begins\t(.+)$", output[:found.start()], re.M)
    print(f"  at the trial: {trial[-1]}" if trial else "  at the first trial")
    return 1


# ---- watching ----------------------------------------------------------------------------------

def state(stage: Path) -> dict[Path, tuple[int, int]]:
    found = {}
    for file in sorted((stage / "mine").rglob("*")):
        try:
            if not EDITORS.search(file.name) and file.is_file():
                found[file] = (file.stat().st_mtime_ns, file.stat().st_size)
        except OSError:     # gone between two looks, as when an editor puts another file in its place
            pass
    return found


def settled(stage: Path, before: dict[Path, tuple[int, int]]) -> dict[Path, tuple[int, int]]:
    """Waits until a save has begun and ended: another state, the same twice, no file empty or gone for two seconds."""
    last, since = state(stage), time.monotonic()
    while True:
        time.sleep(0.15)
        now = state(stage)
        if now != last:
            last, since = now, time.monotonic()
            continue
        half = set(before) - set(now) or any(size == 0 for _, size in now.values())
        if now != before and (not half or time.monotonic() - since > 2):
            return now


def watch(wish: Wish, judge: object) -> int:
    seen: dict[Path, tuple[int, int]] = {}
    try:
        while True:
            seen = settled(wish.stage, seen)
            if sys.stdout.isatty():
                print("\033[H\033[J\033[3J", end="")
            began = time.monotonic()
            try:
                judge()     # type: ignore[operator]
            except Bad as bad:
                print(bad)
            print(f"[{time.strftime('%H:%M:%S')}, {time.monotonic() - began:.1f} s] watching {wish.stage.name}/mine; Ctrl-C ends it", flush=True)
            if not copies(wish.stage):
                print(f"nothing is left in {wish.stage.name}/mine")
                return 1
    except KeyboardInterrupt:
        print()
        return 0


def main() -> int:
    parser = Parser(description=(__doc__ or "").partition("\n")[0], prog="./learn practice")
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
    args = parser.parse_args()
    wish = Wish(stage_of(args.stage), args.verbose, args.no_gpu)
    lessons = chosen(wish.stage, args.files)
    if args.reset:
        reset(wish, lessons)
    for lesson in lessons or ([] if copies(wish.stage) and not args.level else skeletons(wish.stage)[:1]):
        begin(wish, lesson, args.level)
    if args.sanitizer and "fa_add_ladder" in (wish.stage / "CMakeLists.txt").read_text(encoding="utf-8"):
        print(f"stage {wish.id}: nothing emulates its kernels; compute-sanitizer on a GPU: docs/debugging.md", file=sys.stderr)
        return 2

    def judge() -> int:
        return sanitize(wish, args.sanitizer) if args.sanitizer else practise(wish)
    return watch(wish, judge) if args.watch else judge()


if __name__ == "__main__":
    run(main)
