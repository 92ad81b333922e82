"""Runs a test program to its end, on all cores, and says in a few lines what fails: the pattern, not the log.

`run_suite(program)` starts a process for each test, so that one that crashes or never ends hides no other.
`pattern(suite)` condenses what the tests say: which numbers are wrong and where, with what (a mask, key lengths,
groups of heads, large scores ...) and where the program ended, if it did.
"""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Iterable

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "judge"))
from source import Bad  # noqa: E402

# Families of common/judge/conformance_*.cpp, and what all that fails has in common where the families before it pass.
# Those of a backward bear the same names after "Backward".
FAMILIES = {
    "Sizes": "",
    "Scale": "with another scale than 1/sqrt(d)",
    "Heads": "with several heads or batch entries",
    "Empty": "where a size is 0",
    "CausalTopLeft": "with a causal mask",
    "Causal": "with a causal mask",
    "MaskedRows": "rows that see no key",
    "CausalBottomRight": "with the mask bottom_right",
    "KeyLengths": "with key lengths",
    "ClampedLengths": "with key lengths outside [0, Nk]",
    "Values": "with unusual scores",
    "NonFinite": "where an input is NaN or infinite",
    "Layouts": "with strides, gaps or rows off their usual place",
    "Invariances": "what must stay the same when inputs are scaled, permuted or doubled",
    "Bounds": "memory behind the end of a tensor",
    "LongRows": "long rows",
    "LongSequences": "long sequences",
    "Determinism": "that the bits differ from run to run",
    "Races": "that the bits differ from run to run",
    "LargeOffsets": "far from the first element, where 32 bits hold no address",
    "Memory": "how much memory is taken",
    "Errors": "what must be refused in words",
    "GradientCheck": "the gradients of these numbers, against central differences",
    "Identities": "what must hold of any gradients",
    "Spread": "how far dQ strays from run to run",
    "Fuzz": "some random combinations of masks, lengths, groups and strides",
}
BAD = ("failed", "crashed", "hung")
KEPT = 1 << 18      # bytes of a test's output, from either end


@dataclass(frozen=True)
class Test:
    name: str       # Suite.Test
    state: str      # passed, failed, skipped, crashed, hung, left out
    output: str = ""

    @property
    def family(self) -> str:
        """Of the conformance suite, without the direction; empty for a stage's own test."""
        family = self.name.partition(".")[2]
        family = family.removeprefix("Backward") if family != "Backward" else family
        return family if family in FAMILIES else ""

    @property
    def method(self) -> str:
        return self.name.partition(".")[0]

    @property
    def case(self) -> str:
        """What it was at when it ended without a verdict."""
        words = re.findall(r"^(?:ended by|interrupted at|still at it).*\n(?:(?!case  ).*\n)?case  (.+)$", self.output, re.M)
        return str(words[-1]) if words else ""

    @property
    def cause(self) -> str:
        words = re.search(r"^ended by (.+) at$", self.output, re.M)
        sanitizer = re.search(r"^(?:==\d+==ERROR|.*?: runtime error|SUMMARY): *(.+)", self.output, re.M)
        return words[1] if words else sanitizer[1] if sanitizer else "a signal"


@dataclass(frozen=True)
class Suite:
    program: Path
    tests: list[Test]

    def of(self, *states: str) -> list[Test]:
        return [t for t in self.tests if t.state in states]

    @property
    def bad(self) -> list[Test]:
        return self.of(*BAD)

    @property
    def ok(self) -> bool:
        """Something was judged, and nothing was wrong."""
        return bool(self.of("passed")) and not self.of(*BAD, "left out")


# ---- running -----------------------------------------------------------------------------------

def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tests_of(program: Path, filter: str) -> list[str]:
    command = [str(program.absolute()), "--gtest_list_tests", f"--gtest_filter={filter}"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise Bad(f"{program.name}: does not even list its tests (exit code {done.returncode})")
    names, suite = [], ""
    for line in done.stdout.splitlines():
        if head := re.match(r"(\S+\.)(?:  #.*)?$", line):
            suite = head[1]
        elif suite and (test := re.match(r"  (\S+)", line)):
            names.append(suite + test[1])
    return names


class Runner:
    """One process for each test, each in a group of its own: what it has started ends with it."""

    def __init__(self, program: Path, env: dict[str, str], limit: float, jobs: int) -> None:
        self.program, self.limit, self.jobs = program, limit, jobs
        self.env = {**os.environ, **env, "GTEST_COLOR": "no"}
        self.lock = threading.Lock()
        self.going: set[subprocess.Popen[bytes]] = set()
        self.hung, self.stopped = 0, False

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            for process in self.going:
                self.end(process, signal.SIGKILL)

    @staticmethod
    def end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            pass

    def give_up(self, process: subprocess.Popen[bytes], over: threading.Event, hung: threading.Event) -> None:
        hung.set()
        self.end(process, signal.SIGTERM)       # upon which it says what it was at
        if not over.wait(2):
            self.end(process, signal.SIGKILL)

    def run(self, name: str) -> Test:
        command = [str(self.program.absolute()), f"--gtest_filter={name}", "--gtest_brief=1"]
        with tempfile.TemporaryFile() as output:
            with self.lock:
                # Where every core has waited in vain, the others would wait, too.
                if self.stopped or self.hung >= self.jobs:
                    return Test(name, "left out")
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                           env=self.env, start_new_session=True)
                self.going.add(process)
            over, hung = threading.Event(), threading.Event()
            clock = threading.Timer(self.limit, self.give_up, (process, over, hung))    # wait(timeout) would only poll
            clock.start()
            code = process.wait()
            over.set()
            clock.cancel()
            with self.lock:
                self.hung += hung.is_set()
                self.going.discard(process)
                self.end(process, signal.SIGKILL)
            text = ends(output)
        if hung.is_set():
            return Test(name, "hung", text)
        if code == 0:
            return Test(name, "skipped" if "[  SKIPPED ]" in text else "passed", text)
        failed = code == 1 and re.search(rf"^\[  FAILED  \] {re.escape(name)}(?![\w./])", text, re.M)
        return Test(name, "failed" if failed else "crashed", text)


def ends(file: IO[bytes]) -> str:
    """All that was written, or both ends of it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    text = file.read(KEPT)
    if size > 2 * KEPT:
        file.seek(size - KEPT)
        text += b"\n...\n"
    return (text + file.read()).decode(errors="replace")


def run_suite(program: Path, filter: str = "*", jobs: int = 0, env: dict[str, str] | None = None,
              limit: float = 30) -> Suite:
    """Every test that the filter names, to its end or for `limit` seconds; on all cores unless told."""
    names = tests_of(program, filter)
    jobs = jobs or cores()
    runner = Runner(program, env or {}, limit, jobs)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            longest_first = sorted(names, key=lambda name: "Fuzz" not in name)
            done = dict(zip(longest_first, pool.map(runner.run, longest_first)))
            return Suite(program, [done[name] for name in names])
        except BaseException:       # as by Ctrl-C
            runner.stop()
            raise


# ---- what the emulator says --------------------------------------------------------------------

SAID = r"(?:^threw: |description \")\w*kernel\w*: (?=block )(?:block \d+: )?(.+?)(?:\" thrown.*)?$"


def broken_rules(suite: Suite) -> list[str]:
    """The emulator's sentences on a kernel that breaks a rule of its hardware, each once, the most frequent two."""
    said = Counter(re.sub(r"(?<![\w./])(?!mine/)[\w./]*/(\w+\.\w+:\d+)", r"\1", words)
                   for t in suite.bad for words in re.findall(SAID, t.output, re.M))
    return [textwrap.shorten(words, 300) for words, _ in said.most_common(2)]


# ---- the pattern -------------------------------------------------------------------------------

@dataclass(frozen=True)
class Wrong:
    """A comparison that failed."""
    what: str       # O, LSE, dQ ...
    wrong: int
    count: int
    where: str      # "all of rows >= 64", "every element"

    @property
    def place(self) -> str:
        """`where`; but where next to everything is wrong, it is chance which columns are not."""
        chance = self.where.startswith("some of") or "column" in self.where
        return "nearly every element" if chance and self.wrong >= 0.9 * self.count else self.where

    @property
    def telling(self) -> tuple[bool, int]:
        return self.place.startswith("all of"), self.count


# Also where GoogleTest shows it as a line of a difference.
COMPARISON = re.compile(r"^-?(\w+)[^:\n]*: (\d+) of (\d+) elements are wrong.*(?:\n-?  wrong: (.*?)(?:\\n)?$)?", re.M)
RESULTS = ("m", "l", "O", "LSE", "dQ", "dK", "dV")      # in the order in which they are told


def wrongs(tests: list[Test]) -> list[Wrong]:
    return [Wrong(m[1], int(m[2]), int(m[3]), m[4] or "") for t in tests for m in COMPARISON.finditer(t.output)]


def in_order(names: Iterable[str]) -> str:
    words = sorted(set(names), key=lambda n: (RESULTS.index(n) if n in RESULTS else len(RESULTS), n))
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def listed(names: list[str], most: int = 3) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def first_failing(suite: Suite) -> dict[str, Test]:
    """Of each method that fails: the first of its families that does, which names the idea."""
    first: dict[str, Test] = {}
    for test in suite.bad:
        # What rows that see no key show, the mask that they come with may explain.
        wider = test.family == "MaskedRows" and any(t.name == f"{test.method}.CausalBottomRight" for t in suite.bad)
        if test.family and not wider:
            first.setdefault(test.method, test)
    return first


def with_what(suite: Suite, test: Test) -> str:
    """What all that fails has in common, as far as the families tell; empty if plain problems fail."""
    others = {t.family for t in suite.bad if t.method == test.method}
    if test.family == "CausalTopLeft" and "CausalBottomRight" not in others:
        return "with the mask top_left"
    if test.family == "CausalBottomRight" and "MaskedRows" in others and contrast(test).endswith("with Nq > Nk"):
        return FAMILIES["MaskedRows"]
    if test.family == "Heads" and "groups of query heads" in contrast(test):
        return "with groups of heads"
    if test.family in ("Scale", "Values"):
        cases = re.findall(r"^case  (.*) seed", test.output, re.M)
        parts = []
        if cases and all("scale-" in case for case in cases) and "Values" not in others:
            parts.append("a negative scale")
        if cases and all(re.search(r" [a-z_]+-?\d[\d.e+]*$", case) for case in cases):
            parts.append("large scores")
        if parts:
            return "with " + " and ".join(parts)
    return FAMILIES[test.family]


def contrast(test: Test) -> str:
    """In the test's own words: what tells its cases that fail from those that pass."""
    words = re.search(r"^  (passes: .+; fails: .+)$", test.output, re.M)
    return words[1].replace("passes:", "passes", 1).replace("fails:", "fails") if words else ""


def numbers(tests: list[Test]) -> str:
    """wrong: O, all of rows >= 64; LSE right"""
    output = "\n".join(t.output for t in tests)
    found = wrongs(tests)
    if not found:       # the first failure in the test's own words
        words = re.search(r"^case  .*\n(.+)$", output, re.M) or re.search(r": Failure\n(?:Failed\n)?((?:(?!.*: Failure$|\[).+\n){1,4})", output, re.M)
        if not words:
            return ""
        most = 240 if words[1].startswith("threw: ") else 120     # what a program throws says at its end what to do
        return textwrap.shorten("wrong: " + re.sub(r"(?:/[^/\s]+)+/", "", words[1]), most, placeholder=" ...")
    names = {w.what for w in found}
    right = {name for m in re.findall(r"^right: (.+)$", output, re.M) for name in re.split(", | and ", m)} - names
    place = max(found, key=lambda w: w.telling).place
    return f"wrong: {in_order(names)}{', ' * bool(place)}{place}" + (f"; {in_order(right)} right" if right else "")


def ended(suite: Suite, advice: str) -> list[str]:
    lines = []
    for state, words in (("crashed", "crashes"), ("hung", "does not end")):
        tests = suite.of(state)
        if not tests:
            continue
        one = next((t for t in tests if t.case), tests[0])
        more = f", and {len(tests) - 1} more" if len(tests) > 1 else ""
        cause = f": {one.cause}" if state == "crashed" else ""
        lines.append(f"{words}: {one.name}{more}{cause}" + (f"; at case {one.case}" if one.case else ""))
    return lines + ([f"to try: {advice}"] if lines and advice else [])


def pattern(suite: Suite, advice: str = "") -> list[str]:
    """At most six short lines. `advice`: what to try if the program crashes or never ends."""
    lines = ended(suite, advice)
    first = first_failing(suite)
    own = [t for t in suite.bad if not t.family]
    judged = [t for t in first.values() if t.state == "failed"] or [t for t in own if t.state == "failed"]
    if judged:
        lines += [numbers(judged)] * bool(numbers(judged))
    if first:
        common = {with_what(suite, t) for t in first.values()}
        only = [common.pop()] if len(common) == 1 and "" not in common else []
        right = {t.method for t in suite.of("passed") if t.family} - set(first)
        if right:
            only.append(f"in {in_order(first)}" + (f", not in {in_order(right)}" if len(right) < 3 else ""))
        lines += [f"only {', '.join(only)}"] * bool(only)
        lines += [f"{t.name} {contrast(t)}" for t in judged if contrast(t)][:1]
    if own:
        lines.append(("fails as well: " if first else "fails, and nothing else does: ") + listed([t.name for t in own]))
    if left := suite.of("left out"):
        lines.append(f"left out, since nothing came to an end: {len(left)} more tests")
    return lines
