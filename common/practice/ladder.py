"""What is right and what is not in a reader's headers and kernels of a ladder (stage 06), on one screen.

A kernel runs on the CPU in late order, first with a few tiles, then in all its tests; where they pass, at other times,
too. What fails is tried with each hole alone, the others filled by the lesson (see weave.py). So the screen names the
step, with the emulator's sentence if the step breaks a rule of the hardware. Of a header, the tests that
check/practice.txt names judge a hole.
"""
from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from marks import Region
from suite import Suite, Test, broken_rules, pattern, run_suite
from verdict import ENVIRONMENT, Copy, equations, grouped
from weave import Notes, bit

# What a test of a kernel says once more, or says of speed alone; and the times that no default shows.
SPARED = "*Determinism:*Spread:*LargeOffsets:*Layouts:*Values:*NonFinite:*Fuzz"
TIMES = ("early", "1", "2")
LIMIT = 8.0     # seconds for a test; the emulator itself ends a deadlock at once


def family(kernel: str) -> str:
    """The tests of a ladder's kernel: forward/1_mma.cu has mma.*, backward/1_mma.cu backward_mma.*; all kernels of a walk
    of beyond/ have NAME.*"""
    if kernel.startswith("beyond/"):
        return kernel.split("/")[1]
    return re.sub(r"^.*/(\d+_)?", "backward_" if kernel.startswith("backward/") else "", kernel.removesuffix(".cu"))


def tiles(kernel: str) -> str:
    """The first of them: small, with a few tiles."""
    of = family(kernel)
    return f"{of}.Tiles*" if kernel.startswith("beyond/") else f"Tiles.*/{of}"


def said(suite: Suite) -> list[str]:
    return broken_rules(suite) or [line for line in pattern(suite) if not line.startswith("fails, and nothing else")]


@dataclass
class Ladder:
    """The verdict of one build."""
    mine: list[Copy]
    tests: list[Test] = field(default_factory=list)
    words: dict[str, str] = field(default_factory=dict)     # of each hole: right, not yet, not written, not judged
    wrong: dict[str, list[str]] = field(default_factory=dict)   # what is wrong with a hole by itself
    broken: bool = False    # it fails with the lesson's code in every hole, too
    cut_short: bool = False     # the first tests failed

    @property
    def empty(self) -> list[str]:
        return [name for c in self.mine for name in c.empty()]

    @property
    def ok(self) -> bool:
        return Suite(Path(), self.tests).ok and not self.empty

    @property
    def right(self) -> list[str]:
        return [name for name, word in self.words.items() if word == "right"]

    def judge_on_host(self, exe: Path, copies: list[Copy], notes: Notes) -> None:
        """Code that no emulator runs: the tests that check/practice.txt names judge a hole."""
        suite = run_suite(exe, env=dict(ENVIRONMENT), limit=LIMIT)
        self.tests += suite.tests
        judged = True       # what fails behind another may fail for that alone
        for copy in copies:
            for hole in copy.text.regions:
                filters = notes.tests.get(hole.name, "*").split(":")
                bad = [t for t in suite.bad if any(fnmatchcase(t.name, f) for f in filters)]
                word = "not written" if hole.name in self.empty else "right" if not bad else "not yet" if judged else "not judged"
                self.words[hole.name] = word
                judged = judged and word == "right"
                if word == "not yet":
                    self.wrong[hole.name] = [f"fails {bad[0].name}"]

    def headers(self) -> list[Copy]:
        return [c for c in self.mine if c.name.endswith("pp") and not c.name.startswith("ring/")]

    def ring(self) -> list[Copy]:
        return [c for c in self.mine if c.name.startswith("ring/")]

    def kernels(self) -> list[Copy]:
        return [c for c in self.mine if c.name.endswith(".cu")]

    def judge_kernels(self, exe: Path, woven: bool) -> None:
        names = ":".join(f"{family(c.name)}.*" for c in self.kernels())
        first = ":".join(tiles(c.name) for c in self.kernels())
        time: dict[str, str] = {}
        suite = run_suite(exe, first, limit=LIMIT)
        self.cut_short = not suite.ok
        if suite.ok:
            runs = [(f"{names}-{SPARED}", time), *((first, {"FA_TIMING": t}) for t in (() if self.empty else TIMES))]
            with ThreadPoolExecutor(len(runs)) as pool:
                suites = list(pool.map(lambda run: run_suite(exe, run[0], env=run[1], limit=LIMIT), runs))
            for (_, time), more in zip(runs, suites):
                suite = Suite(exe, suite.tests + more.tests)
                if not more.ok:
                    break
        self.tests += suite.tests
        if not suite.ok and woven:
            self.blame(exe, suite, time)

    def blame(self, exe: Path, suite: Suite, time: dict[str, str]) -> None:
        """Which holes fail alone in the smallest test that fails of all."""
        tests = min((t.name for t in suite.bad), key=lambda name: "AndAMask" not in name)
        if not run_suite(exe, tests, env={**time, "FA_STEPS": "0"}, limit=LIMIT).ok:
            self.broken = True
            return
        for hole in (h for c in self.kernels() for h in c.text.regions):
            if hole.name in self.empty:
                self.words[hole.name] = "not written"
                continue
            alone = run_suite(exe, tests, env={**time, "FA_STEPS": f"{1 << bit(hole.name):x}"}, limit=LIMIT)
            self.words[hole.name] = "right" if alone.ok else "not yet"
            if not alone.ok:
                self.wrong[hole.name] = said(alone)

    def lines(self) -> list[str]:
        suite = Suite(Path(), self.tests)
        holes: list[Region] = [h for c in self.mine for h in c.text.regions]
        lines = []
        if self.broken:
            lines.append("steps   not judged: with the lesson's code in every hole it fails, too; what stands outside of them has changed")
        elif suite.ok and not self.empty:
            lines.append("steps   all written")
        elif self.words:
            lines.append("steps   " + grouped(list(self.words.items())) + "   (as far as one test tells)" * bool(self.wrong and self.kernels()))
        elif self.empty:
            lines.append(f"steps   not written: {' '.join(self.empty)}")
        told = [h for h in holes if h.name in self.wrong] or [h for h in holes if h.name in self.empty]
        for hole in told[:1]:
            of = equations(hole.equations)
            lines += [f"{hole.name}" + f", equation{'s' * (',' in of)} {of}" * bool(of) + f": {hole.text}",
                      *(f"  {line}" for line in self.wrong.get(hole.name, []))]
        if self.tests:
            lines.append(f"tests   {len(suite.of('passed'))} right" + (f", {len(suite.bad)} wrong" if suite.bad else "")
                         + "; the others wait until these pass" * self.cut_short)
            lines += [f"  {line}" for line in said(suite)] if suite.bad and not self.wrong else []
        return lines
