"""What is right and what is not in a reader's version of a lesson, on one screen.

First the chapter's problem: every quantity that the steps compute, yours beside the chapter's, up to the first that
differs, with its equation. Then each hole alone, the others filled by the lesson (see weave.py), on a few trials with
a trait each. Then the stage's tests, the pattern of what fails first.
"""
from __future__ import annotations

import math
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from marks import Lesson, Region
from suite import Suite, Test, cores, numbers, pattern, run_suite
from weave import Notes, bit

LIMIT = 10.0        # seconds for the trials of one hole
COLUMNS = 4         # numbers in a line of the table
QUANTITIES = 5      # lines of the table
# A step that is not written must not pass by chance, and fail the same way each time. Not for the whole suite: it runs
# when all trials pass, and the emulator's many stacks would be filled each time.
ENVIRONMENT = {"MALLOC_PERTURB_": "165", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "GTEST_COLOR": "no"}
# Trials whose wrong elements tell most of where they lie, the best first.
TELLING = ("several tiles", "rising scores", "causal, bottom right", "several heads", "a few keys")


@dataclass(frozen=True)
class Copy:
    """A reader's file, and the lesson that it stands for."""
    lesson: Lesson
    text: Lesson
    told: list[str]     # what is wrong with its marks

    @property
    def name(self) -> str:
        return self.lesson.label.partition("/")[2]

    def empty(self) -> list[str]:
        return [h.name for h in self.text.regions if not self.text.written(h)]


@dataclass
class Trials:
    """What a choice of holes makes of the trials."""
    right: list[str] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)     # by trait: what the comparison says
    ended: str = ""     # how, if not by itself
    cost: str = ""      # what tests of its own say, though the trials are right

    @property
    def ok(self) -> bool:
        return bool(self.right) and not self.wrong and not self.ended and not self.cost


Seen = dict[str, dict[str, list[float]]]       # by stage and name, in their order


@dataclass
class Trace:
    """What the program notes on the chapter's problem."""
    seen: Seen = field(default_factory=dict)
    launched: dict[str, list[str]] = field(default_factory=dict)     # by stage, the names of its kernels; where that is known


@dataclass(frozen=True)
class Program:
    """The tests of a stage with the reader's files in them."""
    exe: Path
    stages: list[str]       # of the conformance suite, that these files decide
    filter: str             # of all tests that do

    def run(self, test: str, steps: int | None, **env: str) -> tuple[int, str]:
        env = {**os.environ, **ENVIRONMENT, "FA_SUITES": ",".join(self.stages), **env}
        if steps is not None:
            env["FA_STEPS"] = f"{steps:x}"
        try:
            done = subprocess.run([str(self.exe), f"--gtest_filter={test}", "--gtest_brief=1"], env=env, text=True, errors="replace",
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired as late:
            out = late.stdout or b""
            return 124, out.decode(errors="replace") if isinstance(out, bytes) else out
        return done.returncode, done.stdout

    def trials(self, steps: int | None, **env: str) -> Trials:
        code, output = self.run("Practice.Trials", steps, **env)
        found, at = Trials(), ""
        for line in output.split("\n"):
            kind, *fields = line.split("\t")
            if kind == "begins":
                at = fields[0]
            elif kind == "trial" and len(fields) == 2:
                if fields[1]:
                    found.wrong.setdefault(fields[0], fields[1].replace("\\n", "\n"))
                else:
                    found.right.append(fields[0])
                at = ""
        if at or code not in (0, 1):
            cause = re.search(r"^ended by (.+) at$", output, re.M)
            found.ended = f"{'does not end' if code == 124 else 'crashes'} at the trial: {at or 'the first one'}" + \
                (f"; {cause[1]}" if cause and code != 124 else "")
        found.right = [name for name in dict.fromkeys(found.right) if name not in found.wrong]
        return found

    def judged_by(self, test: str, steps: int) -> Trials:
        """A hole that no trial reaches, by tests of its own."""
        code, output = self.run(test, steps)
        if code == 0:
            return Trials([test])
        # Which test and which case; what it compares is often the solution itself.
        failed = list(dict.fromkeys(re.findall(r"^\[  FAILED  \] (\w[\w./]*)", output, re.M)))
        case = re.search(r"^case  (.+)|: case  (.+)", output, re.M)
        at = f" at case {case[1] or case[2]}" if case else ""
        return Trials(cost=f"fails {some(failed)}{at}") if code == 1 and failed else Trials(ended=f"crashes in {test}")

    def trace(self, steps: int | None, outside: bool) -> Trace:
        found, stage = Trace(), ""
        for line in self.run("Practice.Trace", steps, **({"FA_OUTSIDE": "1"} if outside else {}))[1].split("\n"):
            kind, *fields = line.split("\t")
            if kind == "stage":
                stage = fields[0]
                found.seen[stage] = {}
            elif kind == "see" and stage and len(fields) == 2:
                found.seen[stage].setdefault(fields[0], []).append(float(fields[1]))
            elif kind == "launched" and stage and fields:
                found.launched[stage] = fields[0].split()
        return found

    def suite(self) -> Suite:
        return run_suite(self.exe, self.filter, env={"FA_FUZZ_CASES": "10"})


def program(exe: Path, mine: list[Copy], notes: Notes) -> Program:
    words = list(dict.fromkeys(w for copy in mine for w in notes.judges.get(copy.name, [])))
    left_out = [w[1:] for w in words if w.startswith("-")] if len(mine) == 1 else []
    words = [w for w in words if not w.startswith("-")]
    stages = [w for w in words if "." not in w]
    wanted = [f"{s}.*" for s in stages] + [w for w in words if "." in w]
    return Program(exe, stages, ":".join(wanted) + "-" + ":".join(["Practice.*", *left_out]))


# ---- saying it ---------------------------------------------------------------------------------

def close(x: float, y: float) -> bool:
    return x == y or abs(x - y) <= 1e-4 * max(1.0, abs(y)) < math.inf or (x != x and y != y)


def number(x: float) -> str:
    return "nan" if x != x else f"{x:.4g}" if abs(x) < 1e5 else f"{x:.2g}"


def equations(of: tuple[int, ...]) -> str:
    return ", ".join(f"({n})" for n in of)


def differs(got: list[float], want: list[float]) -> int | None:
    """The first place."""
    for i in range(max(len(got), len(want))):
        if i >= len(got) or i >= len(want) or not close(got[i], want[i]):
            return i
    return None


def origin_of(name: str, got: list[float], wrong: set[str], origin: dict[str, str]) -> str:
    """The equation of a quantity: that of `A and B` if both are wrong, of `A nan` if yours is no number, of `nothing` if the
    program ended before it."""
    if not got:
        return origin.get(f"{name} nothing", origin.get("nothing", origin.get(name, "")))
    for pair in origin:
        if " and " in pair and name in (parts := pair.removesuffix(" nan").split(" and ")) and set(parts) <= wrong:
            name = " and ".join(parts)
            break
    no_number = any(abs(x) == float("inf") or x != x for x in got)
    return origin.get(f"{name} nan" if no_number else name, origin.get(name, ""))


def table(yours: dict[str, list[float]], theirs: dict[str, list[float]], origin: dict[str, str]) -> list[str]:
    """A line for each quantity up to the first that differs; nothing if none does."""
    lines = []
    wrong = {name for name, want in theirs.items() if differs(yours.get(name, []), want) is not None}
    for name, want in theirs.items():
        got = yours.get(name, [])
        at = differs(got, want)
        first = (at or 0) // COLUMNS * COLUMNS
        ours, its = (" ".join(map(number, x[first:first + COLUMNS])) or "nothing" for x in (got, want))
        from_ = origin_of(name, got, wrong, origin)
        if at is None:
            lines.append(f"  {name:<15} {from_:<13} {ours:<32} the same")
            continue
        place = f"   numbers {first + 1} to {min(first + COLUMNS, len(want))} of {len(want)}" if len(want) > COLUMNS else ""
        head = f"  {'tiny problem':<15} {'equation':<13} {'yours':<32} the chapter's"
        return [head, *lines[1 - QUANTITIES:], f"  {name:<15} {from_:<13} {ours:<32} {its}  <-{place}"]
    return []


def never_launched(yours: Trace, theirs: Trace) -> list[str]:
    """Then every number is wrong, and no number says why."""
    idle = [kernel for stage, kernels in theirs.launched.items() for kernel in kernels
            if stage in yours.launched and kernel not in yours.launched[stage]]
    names = ", ".join(dict.fromkeys(idle))
    return [f"never launched: {names} (its FA_LAUNCH is missing, or is not reached)"] if names else []


def some(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def of_trials(t: Trials) -> list[str]:
    """The pattern: which results are wrong where, with what, and with what not."""
    lines = [said for said in (t.ended, t.cost) if said]
    if not t.wrong:
        return lines
    first = next((name for trait in TELLING for name in t.wrong if name.startswith(trait)), next(iter(t.wrong)))
    said = numbers([Test(first, "failed", f"case  {first}\n{t.wrong[first]}")])
    if said and "NaN" in t.wrong[first] and "NaN" not in said:
        said += " (NaN among them)"
    lines += [said[:260]] * bool(said)
    every = not t.right
    which = "every trial" if every else f"{some(list(t.wrong), 3)}; right with {some(t.right, 3)}"
    return [*lines, "wrong with " + re.sub(r"\((?=\d+ x )", "(Nq x Nk x d = ", which, count=1)]


class Verdict:
    """Of one build: how each hole does, and what to print."""

    def __init__(self, program: Program, mine: list[Copy], notes: Notes, woven: bool) -> None:
        self.program, self.mine, self.notes = program, mine, notes
        self.holes = [h for c in mine for h in c.text.regions]
        self.empty = [name for c in mine for name in c.empty()]
        self.written = [h for h in self.holes if h.name not in self.empty]
        self.woven = woven and bool(self.holes)
        self.wrong: dict[str, list[str]] = {}       # by hole, what is wrong with it
        self.broken = False     # it fails with the lesson's code in every hole, too
        self.suite: Suite | None = None
        self.lines: list[str] = []

    @property
    def right(self) -> list[str]:
        return [] if self.broken else [h.name for h in self.written if h.name not in self.wrong]

    @property
    def passed(self) -> bool:
        return self.suite is not None and self.suite.ok and not self.wrong

    def judge(self) -> None:
        with ThreadPoolExecutor(cores()) as pool:
            outside = any(c.text.level == 3 for c in self.mine)
            theirs, yours = (pool.submit(self.program.trace, steps, outside) for steps in (0, None))
            alone = {h.name: pool.submit(self.alone, h) for h in self.written if self.woven}
            together, none = (pool.submit(self.program.trials, steps) for steps in (None, 0))
            found = {name: trials.result() for name, trials in alone.items()}
        self.broken = self.woven and not none.result().ok
        if self.broken:     # then no hole can be judged
            found = {}
        self.wrong = {name: of_trials(t) for name, t in found.items() if not t.ok}
        if self.woven:
            self.lines += never_launched(yours.result(), theirs.result())
            self.lines += self.chapter(yours.result().seen, theirs.result().seen, outside)
        if together.result().ok:
            self.suite = self.program.suite()
            if self.suite.ok:
                # Alone a step may differ, if the others agree with it.
                self.wrong = {name: said for name, said in self.wrong.items() if self.notes.tests.get(name, "").startswith("seen ")}
            elif not self.wrong and self.woven:
                self.blame(self.suite)
        self.say_steps()
        self.say_tests(together.result())

    def alone(self, hole: Region) -> Trials:
        steps = 1 << bit(hole.name)
        found = self.program.trials(steps)
        test = self.notes.tests.get(hole.name)
        if not test or not found.ok:
            return found
        if not test.startswith("seen "):
            return self.program.judged_by(test, steps)
        name = test.removeprefix("seen ")
        yours, theirs = (next(iter(self.program.trace(s, False).seen.values()), {}).get(name, []) for s in (steps, 0))
        if differs(yours, theirs) is None:
            return found
        return Trials(cost=f"{name}: {some([number(x) for x in yours])}; the chapter's: {some([number(x) for x in theirs])}")

    def blame(self, suite: Suite) -> None:
        """Of the first tests that fail: the holes that make them fail alone."""
        jobs = [(h.name, t.name) for t in suite.bad[:4] for h in self.written]
        with ThreadPoolExecutor(cores()) as pool:
            for (hole, test), (code, _) in zip(jobs, pool.map(lambda j: self.program.run(j[1], 1 << bit(j[0])), jobs)):
                if code:
                    self.wrong.setdefault(hole, []).append(f"alone it fails {test}")

    def cures(self) -> list[str]:
        """Where each hole is right alone and all of them are not: those without which all is right."""
        every = sum(1 << bit(h.name) for h in self.written)
        with ThreadPoolExecutor(cores()) as pool:
            tried = pool.map(lambda h: self.program.trials(every - (1 << bit(h.name))), self.written)
            return [h.name for h, trials in zip(self.written, tried) if trials.ok]

    def chapter(self, yours: Seen, theirs: Seen, outside: bool) -> list[str]:
        origin = dict(self.notes.means)
        for hole in self.holes:
            for name in re.findall(r'see\("([^"]+)"', self.notes.after.get(hole.name, "")):
                origin[name] = equations(hole.equations)
        for hole in self.holes:
            origin[self.notes.tests.get(hole.name, "").removeprefix("seen ")] = equations(hole.equations)
        if outside:
            origin |= self.notes.outside
            for copy in self.mine:
                own = f"{copy.name} "
                origin |= {name.removeprefix(own): of for name, of in self.notes.outside.items() if name.startswith(own)}
        for stage, want in theirs.items():
            if lines := table(yours.get(stage, {}), want, origin):
                return [lines[0].replace("tiny problem ", "from outside "), *lines[1:]] if outside else lines
        seen = list(dict.fromkeys(name for its in theirs.values() for name in its))
        if not seen:    # the judge itself stops, as where a line outside of the holes is wrong
            return []
        if outside:
            return [f"from outside: as the lesson, in {len(seen)} quantities on small problems"]
        return [f"tiny problem: as in the chapter ({', '.join(seen)})"]

    def say_steps(self) -> None:
        if not self.woven:
            return
        if self.broken:
            self.lines.append("steps   not judged: with the lesson's code in every hole it fails, too; what stands outside of them has changed")
            return
        words = {name: "not written" for name in self.empty} | {name: "not yet" for name in self.wrong}
        # Few trials have judged as yet: the tests, which run when all of them pass, may see more.
        self.lines.append("steps   " + grouped([(h.name, words.get(h.name, "right")) for h in self.holes])
                          + ("   (as far as the trials tell)" if self.right and self.suite is None else ""))
        told = [h for h in self.holes if h.name in self.wrong] or [h for h in self.holes if h.name in self.empty]
        for hole in told[:1]:
            of = equations(hole.equations)
            if hole.kind == "blank" and self.suite and self.suite.of("crashed"):   # only now: numbers are right, places are not
                of = self.notes.outside.get("nothing", of)
            self.lines += [f"{hole.name}" + f", equation{'s' * (',' in of)} {of}" * bool(of) + f": {hole.text}",
                           *(f"  {line}" for line in self.wrong.get(hole.name, [])[:3])]

    def say_tests(self, together: Trials) -> None:
        if self.suite is None:
            if not self.wrong and not self.empty or len(self.wrong) > 1 or not self.woven:
                lines = [f"  {line}" for line in of_trials(together)[:3]]
                if self.woven and not self.wrong and not self.broken and len(self.written) > 1:
                    lines += [f"  right with the lesson's code in place of {' or '.join(cures)}" for cures in [self.cures()] if cures]
                self.lines += ["all together", *lines] if not set(lines) <= set(self.lines) else []
            return
        right, wrong = len(self.suite.of("passed")), len(self.suite.bad)
        self.lines.append(f"tests   {right} right" + (f", {wrong} wrong" if wrong else ""))
        self.lines += [f"  {line}" for line in pattern(self.suite)][:4]


def grouped(verdicts: list[tuple[str, str]]) -> str:
    """02.1 right · 02.2 not yet; where they are many, those that agree in one."""
    if len(verdicts) <= 8:
        return " · ".join(f"{name} {word}" for name, word in verdicts)
    parts = []
    for word in ("right", "not yet", "not written"):
        names = [name for name, said in verdicts if said == word]
        parts += [f"{word}: {' '.join(names) if word != 'right' or len(names) < 12 else str(len(names)) + ' of them'}"] * bool(names)
    return " · ".join(parts)
