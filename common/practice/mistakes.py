#!/usr/bin/env python3
"""Does the first screen of ./learn practice name the step that a learner's mistake is in?

    mistakes.py check [NN...]
    mistakes.py run [NN...] [--level N] [--step NN.k] [--name NAME...] [--races with|without|alone] [--jobs N | --here]

check/mistakes.txt holds paragraphs; a line that begins with # is a comment:

    no_rescale: 02.2
    - l = l * rescale + p;
    + l = l + p;

The - lines must stand in the lesson's hole exactly once; the + lines, if any, take their place. `name: 02.7 (3)` says
which of a hole's equations it breaks. For each level at which the hole is one, `run` writes a reader's copy, all holes
filled in as in the lesson but for the mistake, lets practice.py judge it, and reads the first screen. Named is a
mistake if the screen calls its step `not yet` and no right one, or names its equation among at most three. A mistake
that takes a barrier away is judged by `--race`, which must show a line close to it, and the screen must point there.
In a ladder (06) nothing else judges barriers: the screen must blame the hole, at level 3 the function that holds it.

All this happens in copies of the tree, build/mistakes/1, 2 ..., which stay for the next time; or in this one.
"""
from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue

from marks import BARRIER, Lesson, Region, load, marked_lessons, unmarked  # puts common/judge on the path
from mutants import places, substituted
from practice import is_ladder
from source import Bad, Parser, run, write_whole

ROOT = Path(__file__).resolve().parents[2]
SCREEN = 15         # lines that count
NEAR = 3            # lines between a barrier that is missing and the race that is shown
FEW = 3             # equations that still name one


@dataclass(frozen=True)
class Mistake:
    name: str
    hole: str       # 02.1 or 02.a
    old: list[str]
    new: list[str]
    equation: int = 0       # of the hole's, if it is known; else any of them

    @property
    def is_race(self) -> bool:
        return bool(BARRIER.search("\n".join(self.old))) and not BARRIER.search("\n".join(self.new))


def parse(file: Path) -> list[Mistake]:
    found: list[Mistake] = []
    text = re.sub(r"^#.*\n?", "", file.read_text(encoding="utf-8"), flags=re.M).strip()
    for paragraph in re.split(r"\n\s*\n", text) if text else []:
        head, *lines = paragraph.split("\n")
        title = re.fullmatch(r"([\w-]+): (\d\d\.\w+)(?: \((\d+)\))?", head.strip())
        shape = re.sub(r"(.)\1+", r"\1", "".join(line[:1] for line in lines))
        if not title or shape not in ("-", "-+"):
            raise Bad(f"{file}: {head}: a mistake is `name: NN.k`, `-` lines, and `+` lines if any")
        if title[1] in (m.name for m in found):
            raise Bad(f"{file}: {head}: a second mistake of that name; rename one")
        old, new = ([line[1:].removeprefix(" ") for line in lines if line[0] == sign] for sign in "-+")
        found.append(Mistake(title[1], title[2], old, new, int(title[3] or 0)))
    return found


def stages(names: list[str]) -> list[Path]:
    found = [f.parents[1] for f in sorted(ROOT.glob("[0-9][0-9]_*/check/mistakes.txt"))]
    if unknown := [n for n in names if n not in [s.name[:2] for s in found]]:
        raise Bad(f"{unknown[0]}: no stage with a check/mistakes.txt")
    return [s for s in found if not names or s.name[:2] in names]


# ---- the reader's copy -------------------------------------------------------------------------

def mistaken(stage: Path, mistake: Mistake) -> tuple[Lesson, Region, int]:
    """The lesson with the mistake in it, its hole, and the index of the line that differs."""
    for lesson in marked_lessons(stage):
        for hole in lesson.holes(2):
            if hole.name != mistake.hole:
                continue
            if mistake.equation and mistake.equation not in hole.equations:
                raise Bad(f"{stage.name}/check/mistakes.txt: {mistake.name}: {hole.name} has no equation ({mistake.equation})")
            code = lesson.code(hole)
            gone = places(code, mistake.old, mistake.new, lesson.label, f"mistake {mistake.name}")
            code = substituted(code, gone, mistake.new)
            lines = lesson.lines[:hole.first + 1] + code + lesson.lines[hole.last:]
            more = len(lines) - len(lesson.lines)
            regions = [replace(r, first=r.first + more * (r.first > hole.first), last=r.last + more * (r.last > hole.first))
                       for r in lesson.regions]
            return replace(lesson, lines=lines, regions=regions), hole, hole.first + 1 + gone[0]
    raise Bad(f"{stage.name}/check/mistakes.txt: {mistake.name}: no hole {mistake.hole} in the lessons")


def reader(lesson: Lesson, level: int, at: int) -> tuple[str, int]:
    """A copy of that level with everything written, and where in it the lesson's line `at` stands."""
    marks = {}
    for hole in lesson.holes(level):
        marks[hole.first], marks[hole.last] = hole.mark(level), hole.end()
    out, place = [lesson.skeleton(level).partition("\n")[0]], 0
    for i, line in enumerate(lesson.lines):
        if i == at:
            place = len(out)
        if i in marks:
            out.append(line[:len(line) - len(line.lstrip())] + marks[i])
        else:
            out += unmarked([line])
    return "\n".join(out), place


# ---- judging -----------------------------------------------------------------------------------

@dataclass(frozen=True)
class Result:
    stage: str
    mistake: Mistake
    level: int
    named: bool
    said: str
    seconds: float


def step_words(screen: list[str]) -> dict[str, str]:
    """What the line `steps` says of each hole."""
    found: dict[str, str] = {}
    for line in screen:
        if line.startswith("steps "):
            for part in line[5:].split(" · "):
                if m := re.match(r"\s*(right|not yet|not written): (.*)", part):
                    found |= {name: m[1] for name in re.findall(r"\d\d\.\w+(?:-\d\d\.\w+)?", m[2])}
                elif m := re.match(r"\s*(\S+) (right|not yet|not written)(?:   \(.*)?$", part):
                    found[m[1]] = m[2]
    return found


def told_equations(screen: list[str]) -> list[set[int]]:
    """The lists of equations that the screen puts forward: of the table, of the first wrong hole."""
    lists = []
    for line in screen:
        table = re.match(r"  .{15} (.{13}).*<-", line)
        hole = re.match(r"\d\d\.\S+?,? equations? ([^:]*):", line)
        if found := re.findall(r"\((\d+)\)", (table or hole or [""])[0]):
            lists.append({int(n) for n in found})
    return lists


def named(screen: list[str], mistake: Mistake, hole: Region, level: int, holder: str = "") -> tuple[bool, str]:
    """`holder`: of a ladder, which states no equations for a function's parts, the blank that the hole is in."""
    words, lists = step_words(screen), told_equations(screen)
    wanted = {mistake.equation} if mistake.equation else set(hole.equations)
    blamed = [name for name, word in words.items() if word == "not yet"]
    empty = [name for name, word in words.items() if word == "not written"]
    said = f"blames {' '.join(blamed) or 'no step'}" + "".join(f", ({', '.join(map(str, sorted(n)))})" for n in lists)
    if level < 3 and (blamed == [hole.name] or not mistake.new and empty == [hole.name]):
        return True, said
    if holder and level == 3:
        return blamed == [holder], said
    of_equation = [n for n in lists if len(n) <= FEW and n & wanted]
    return bool(of_equation), said if lists or blamed else "; ".join(screen[1:3])[:160]


def judge(tree: Path, stage: Path, mistake: Mistake, level: int) -> Result:
    lesson, hole, at = mistaken(stage, mistake)
    text, place = reader(lesson, level, at)
    name = lesson.label.partition("/")[2]
    mine = tree / stage.name / "mine"
    command = [sys.executable, str(tree / "common/practice/practice.py"), "judge", stage.name, "--no-gpu", "no GPU answers"]

    def screen(*more: str) -> list[str]:
        done = subprocess.run([*command, *more], cwd=tree, text=True, errors="replace", check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode not in (0, 1) or "testing YOUR code" not in done.stdout and "--race" not in more:
            raise Bad(f"{mistake.name}, level {level}: practice.py ends with {done.returncode}: {done.stdout.strip()[-500:]}")
        return [line for line in done.stdout.split("\n") if not line.startswith(("+ ", "building"))][:SCREEN]
    if not (mine / name).is_file():     # what is built once is not timed
        shutil.rmtree(mine, ignore_errors=True)
        write_whole(mine / name, text)
        screen()
        text += "\n"
    write_whole(mine / name, text)
    began = time.monotonic()
    seen = screen()
    seconds = time.monotonic() - began
    ladder = is_ladder(stage)
    holder = next((r.name for r in lesson.regions if ladder and r.level == 3 and r.first < hole.first < r.last), "")
    ok, said = named(seen, mistake, hole, level, holder)
    if mistake.is_race and not ladder:
        empty = step_words(seen).get(hole.name) == "not written"
        points = empty or any("--race" in line for line in seen)
        near = [int(n) for line in screen("--race") for n in re.findall(rf"{re.escape(name)}:(\d+): ", line)]
        off = min((abs(n - 1 - place) for n in near), default=None)
        ok = points and off is not None and off <= NEAR
        said = ("not written" if empty else "points to --race" if points else "says nothing of races") + \
            (f", --race is {off} lines off" if off is not None else ", --race shows no line")
    if os.environ.get("FA_SCREENS"):
        write_whole(ROOT / "build/mistakes/screens" / f"{mistake.hole}-{mistake.name}-{level}.txt", "\n".join(seen) + "\n")
    return Result(stage.name[:2], mistake, level, ok, said, seconds)


def copied(to: Path) -> Path:
    """The tree as it is now, without what git ignores; what has not changed is not touched, and not built again."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        ours, its = ROOT / name, to / name
        if ours.is_file() and not (its.is_file() and its.read_bytes() == ours.read_bytes()):
            its.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ours, its)
    return to


def judge_here(jobs: list[tuple[Path, Mistake, int]]) -> list[Result]:
    """In this tree, whose build is there already, and whose mine/ nobody uses."""
    places = {stage / "mine" for stage, _, _ in jobs}
    for mine in sorted(places):
        if mine.exists():
            raise Bad(f"{mine.relative_to(ROOT)} holds somebody's work; go without --here")
    try:
        return judge_all(jobs, [ROOT])
    finally:
        for mine in places:
            shutil.rmtree(mine, ignore_errors=True)


def judge_all(jobs: list[tuple[Path, Mistake, int]], where: list[Path]) -> list[Result]:
    trees: Queue[Path] = Queue()
    for tree in where:
        trees.put(tree)

    def one(job: tuple[Path, Mistake, int]) -> Result:
        tree = trees.get()
        try:
            found = judge(tree, *job)
        finally:
            trees.put(tree)
        print(f"{found.stage}  {found.mistake.hole}  {found.level}  {found.mistake.name:<28} "
              f"{'named' if found.named else 'NOT NAMED: ' + found.said:<40} {found.seconds:.1f} s", flush=True)
        return found
    with ThreadPoolExecutor(len(where)) as pool:
        return list(pool.map(one, jobs))


def summary(results: list[Result]) -> list[str]:
    lines = ["stage  level  named           median  longest"]
    for stage, level in sorted({(r.stage, r.level) for r in results}):
        some = [r for r in results if (r.stage, r.level) == (stage, level)]
        count, times = sum(r.named for r in some), [r.seconds for r in some]
        lines.append(f"{stage:<6} {level:<6} {count:>3} of {len(some):<3} {100 * count / len(some):>3.0f} %"
                     f" {statistics.median(times):>6.1f} s {max(times):>6.1f} s")
    return lines


def main() -> int:
    parser = Parser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("command", choices=("check", "run"))
    parser.add_argument("stages", nargs="*", metavar="NN")
    parser.add_argument("--level", type=int, choices=(1, 2, 3))
    parser.add_argument("--step", help="only mistakes in this hole")
    parser.add_argument("--name", nargs="+", help="only these mistakes")
    parser.add_argument("--races", choices=("with", "without", "alone"), default="with",
                        help="those that ThreadSanitizer judges, for which it builds all anew")
    parser.add_argument("--jobs", type=int, default=1, help="copies that are judged at the same time")
    parser.add_argument("--here", action="store_true", help="in this tree instead of a copy: mine/ must be free")
    args = parser.parse_args()
    jobs = []
    for stage in stages(args.stages):
        for mistake in parse(stage / "check" / "mistakes.txt"):
            if args.races != "with" and mistake.is_race != (args.races == "alone"):
                continue
            lesson, hole, at = mistaken(stage, mistake)
            inside = any(r.level == 3 and r.first < hole.first < r.last for r in lesson.regions)
            for level in range(hole.level, 3 + inside):
                reader(lesson, level, at)
                if args.level in (None, level) and args.step in (None, hole.name) and (not args.name or mistake.name in args.name):
                    jobs.append((stage, mistake, level))
    if args.command == "check":
        return 0
    if not jobs:
        raise Bad("no such mistake; check/mistakes.txt lists them")
    results = judge_here(jobs) if args.here else \
        judge_all(jobs, [copied(ROOT / "build/mistakes" / str(n + 1)) for n in range(args.jobs)])
    print(*summary(results), sep="\n")
    return 0 if all(r.named for r in results) else 1


if __name__ == "__main__":
    run(main)
