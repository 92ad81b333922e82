#!/usr/bin/env python3
"""Deliberate defects (mutants) of a stage's code: lists them, applies one, judges its test.

check/mutants.txt holds paragraphs; a line that begins with # is a comment:

    no_maximum: safe_softmax.cpp
    symptom: large scores give NaN although every input is finite
    - const T m = S.row(i).head(n).maxCoeff();
    + const T m = T(0);
    kills: safe_softmax.Values

The - lines must stand in the source exactly once, one after the other (indentation and exercise
marks aside); the + lines, if any, take their place. `kills` names the test that must then fail.
With `race:` in the place of `kills:` the result may happen to be right: the defect is judged only
under ThreadSanitizer, which must report a race during that test. With `late:`, `early:` or `random 8:`
it is a defect of time: a GPU may show it or not, the emulator must in this order (FA_TIMING), or with one of 8 seeds. With
`gpu:` only a GPU shows it. `kills: Suite.Test (double)` says
that the test looks at double alone: else a mutant of Eigen's stages is built for float alone, and a kernel's for
bf16.

All mutants of a source are woven into one program, and FA_MUTANT=no_maximum says which of them it
is; without it, it is the lesson. `no_maximum: safe_softmax.cpp (alone)` is one that cannot be woven:
it gets a program of its own.
"""
from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from source import (Bad, Parser, bare, declared, for_one_type, is_mark, rest_of_block, run, top_level, unlabelled,
                    value_declaration, write_whole)

SKIPPED = 77        # the exit code that CMake's SKIP_RETURN_CODE is set to


@dataclass(frozen=True)
class Mutant:
    name: str
    source: str     # relative to the stage
    symptom: str
    kills: str      # test name without the stageNN. prefix
    old: list[str]
    new: list[str]
    order: str = ""             # late, early, or random and how many seeds: the emulator's; gpu: none
    race_only: bool = False
    in_double: bool = False     # `kills: Suite.Test (double)`: the test looks at double alone
    alone: bool = False         # `name: source (alone)`: cannot be woven


def parse(file: Path) -> list[Mutant]:
    text = re.sub(r"^#.*\n?", "", file.read_text(encoding="utf-8"), flags=re.M)
    mutants: list[Mutant] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()) if text.strip() else []:
        head, *lines = paragraph.strip().split("\n")
        bad = f"{file}: {head}: "
        title = re.fullmatch(r"(\w+): ([\w./-]+)( \(alone\))?", head.strip())
        if not title or title[2].startswith("/") or ".." in title[2]:
            raise Bad(f"{bad}a mutant begins with `name: source`, the source inside the stage")
        if title[1] in (m.name for m in mutants):
            raise Bad(f"{bad}a second mutant of that name; rename one")
        shape = re.sub(r"(.)\1+", r"\1", "".join(line[:1] for line in lines[1:-1]))
        if shape not in ("-", "-+") or not lines[0].startswith("symptom:") or lines[-1][:1] in "+-":
            raise Bad(f"{bad}after it come one `symptom:`, `-` lines, `+` lines, one `kills:`")
        symptom = re.fullmatch(r"symptom: +(\S.*)", lines[0])
        kills = re.fullmatch(r"(kills|race|late|early|random \d+|gpu): +([\w./]+)( \(double\))?\s*", lines[-1])
        if not symptom or not kills:
            raise Bad(f"{bad}write `symptom: what is seen` and `kills: Suite.Test`, one exact name")
        old, new = (textwrap.dedent("\n".join(x[1:] for x in lines if x[0] == sign)).split("\n")
                    for sign in "-+")
        mutants.append(Mutant(title[1], title[2], symptom[1].strip(), kills[2], old, new if "+" in shape else [],
                              "" if kills[1] in ("kills", "race") else kills[1],
                              kills[1] == "race", bool(kills[3]), bool(title[3])))
    return mutants


def find(file: Path, name: str) -> Mutant:
    for mutant in parse(file):
        if mutant.name == name:
            return mutant
    raise Bad(f"{file}: no mutant {name}; `mutants.py list` prints the names")


def locate(mutant: Mutant, folder: Path) -> tuple[list[str], list[int]]:
    """The lines of the source, and the indices of those that the mutant replaces."""
    if not (folder / mutant.source).is_file():
        raise Bad(f"{mutant.source}: no such file for mutant {mutant.name}; correct its first line")
    lines = (folder / mutant.source).read_text(encoding="utf-8").split("\n")
    return lines, places(lines, mutant.old, mutant.new, mutant.source, f"mutant {mutant.name}")


def places(lines: list[str], old: list[str], new: list[str], where: str, what: str) -> list[int]:
    """The indices of the old lines, which stand there once, one after the other."""
    code = [i for i, line in enumerate(lines) if not is_mark(line)]
    wanted, n = [line.strip() for line in old], len(old)
    found = [at for at in range(len(code) - n + 1)
             if [unlabelled(lines[i]).strip() for i in code[at:at + n]] == wanted]
    if len(found) != 1:
        raise Bad(f"{where}: the - lines of {what} match {len(found)} times "
                  "instead of once; copy them from the source again, with more context if need be")
    if meaning(old) == meaning(new):
        raise Bad(f"{where}: {what} changes nothing; change its + lines")
    return code[found[0]:found[0] + n]


def apply(mutant: Mutant, folder: Path) -> tuple[list[str], int]:
    """The lines of the mutated source, and the index of the first one that differs."""
    lines, gone = locate(mutant, folder)
    return substituted(lines, gone, mutant.new), gone[0]


def substituted(lines: list[str], gone: list[int], new: list[str]) -> list[str]:
    at, first = gone[0], lines[gone[0]]
    indent = first[:len(first) - len(first.lstrip())]
    rest = [line for i, line in enumerate(lines) if i > at and i not in gone]
    return lines[:at] + [(indent + line).rstrip() for line in new] + rest


def values(texts: list[list[str]]) -> list[re.Match[str]]:
    """If all of the texts declare the same variable, each with its value: those declarations."""
    found = [m for m in (value_declaration("\n".join(text)) for text in texts) if m]
    return found if len(found) == len(texts) and len({" ".join(m["head"].split()) for m in found}) == 1 else []


UNROLL = re.compile(r"\s*#\s*pragma unroll\b")    # of the loop that follows, which then has no choice of mutants before it


def inseparable(mutant: Mutant, lines: list[str], gone: list[int]) -> str:
    """Why the mutant's lines cannot stand beside the lesson's, or nothing. What this overlooks, the compiler does not."""
    code = bare("\n".join(lines)).split("\n")
    bodies = [bare("\n".join(text)).rstrip() for text in (mutant.old, mutant.new)]
    if any(re.search(r"^\s*#", body, re.M) for body in bodies):
        return "it has a line of the preprocessor"
    before = "\n".join(line for line in code[:gone[0]] if not UNROLL.match(line))
    if before.rstrip()[-1:] not in list(";{}") or \
            any(top_level(body) is None or body and body[-1] not in ";}" for body in bodies):
        return "its lines are not whole statements"
    if both := values([mutant.old, mutant.new]):
        fixed = re.search(r"\b(?:auto|constexpr|static)\b", both[0]["type"])
        return f"it declares something {fixed[0]}" if fixed else ""
    after = rest_of_block("\n".join(code[gone[-1] + 1:]))
    used = [name for body in bodies for name, _ in declared(body, top_level(body) or "")
            if re.search(rf"\b{name}\b", after)]
    return f"it declares {used[0]}, which is used after it" if used else ""


def choice(mutants: list[Mutant], old: list[str], line: int) -> str:
    """What takes the place of the lesson's lines, which begin at this one: all of the mutants', and they themselves."""
    texts = [*(m.new for m in mutants), old]
    asked = [f"fa_mutant_{m.name}" for m in mutants]
    if all_values := values(texts):
        *theirs, own = [f"static_cast<{m['type'].strip()}>({m['value'].strip()})" for m in all_values]
        return f"{all_values[-1]['head'].strip()} = " + "".join(
            f"{name} ? {value} : " for name, value in zip(asked, theirs)) + f"{own};"
    blocks = ["\n".join([f"{{\n#line {line}", *text, "}"]) for text in texts]
    return "".join(f"if ({name}) {block} else " for name, block in zip(asked, blocks)) + blocks[-1]


def weave(mutants: list[Mutant], folder: Path) -> str:
    """The source with all of these mutants in it, each of which asks fa_mutant(), of test_main.cpp, whether it is the
    one. What compilers and sanitizers say of lines is said of the lesson's."""
    spots: list[tuple[list[int], list[tuple[Mutant, list[int]]]]] = []     # lines, and whose lines overlap there
    lines: list[str] = []
    for mutant in mutants:
        lines, gone = locate(mutant, folder)
        here, others = set(gone), [(mutant, gone)]
        for spot in [s for s in spots if set(s[0]) & here]:
            spots.remove(spot)
            here, others = here | set(spot[0]), spot[1] + others
        spots.append((list(range(min(here), max(here) + 1)), others))
    chosen: list[tuple[list[int], list[Mutant]]] = []
    for spot, theirs in spots:
        whole = [lines[i] for i in spot]
        wider = [replace(m, old=whole, new=substituted(lines, gone, m.new)[spot[0]:len(m.new) - len(gone) + spot[-1] + 1])
                 for m, gone in theirs]
        for mutant in wider:
            if why := inseparable(mutant, lines, spot):
                raise Bad(f"{mutant.source}: mutant {mutant.name} cannot be woven: {why}; "
                          f"write {mutant.name}: {mutant.source} (alone)")
        chosen.append((spot, wider))
    out: list[str | None] = list(lines)
    for spot, here in chosen:
        out[spot[0]:spot[-1] + 1] = [None] * (spot[-1] + 1 - spot[0])
        if UNROLL.match(lines[spot[0] - 1]):
            out[spot[0] - 1] = ""
        out[spot[0]] = f"{choice(here, [lines[i] for i in spot], spot[0] + 1)}\n#line {spot[-1] + 2}"
    head = ["bool fa_mutant(const char* name);",
            *(f'static const bool fa_mutant_{m.name} = fa_mutant("{m.name}");' for m in mutants),
            f'#line 1 "{(folder / mutants[0].source).resolve()}"']
    return "\n".join(head + [line for line in out if line is not None])


def meaning(lines: list[str]) -> str:
    return " ".join(bare("\n".join(lines), literals=True).split())


def verdict(exe: Path, test: str, limit: float) -> tuple[int, str]:
    """Exit code and one line. If times are `random 8`, one of the seeds 1 to 8 must kill the mutant."""
    timing = os.environ.get("FA_TIMING", "")
    if not timing.startswith("random "):
        return verdict_of_a_run(exe, test, limit, os.environ)
    code, line = 1, ""
    for seed in range(1, int(timing.split()[1]) + 1):
        code, line = verdict_of_a_run(exe, test, limit, {**os.environ, "FA_TIMING": str(seed)})
        if code == 0 or not line.startswith("survived"):
            break
    return code, line


def verdict_of_a_run(exe: Path, test: str, limit: float, env: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and one line. Killed means: this test failed by assertion, and nothing else."""
    command = [str(exe.absolute()), f"--gtest_filter={test}", "--gtest_brief=1"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=limit, env={**env, "GTEST_COLOR": "no"})
    except subprocess.TimeoutExpired:
        return 1, f"timeout: {test} ran longer than {limit:g} s; the mutant must fail, not hang"
    output = done.stdout.decode(errors="replace")
    skipped = re.search(r"^\[  SKIPPED \]\s*(.*)", output, re.M)
    if done.returncode < 0:
        cause = signal.strsignal(-done.returncode)
        return 1, f"crashed: {test} ended by {cause}; a mutant must fail by assertion"
    if done.returncode == 1 and re.search(rf"^\[  FAILED  \] {re.escape(test)}(?![\w./])", output,
                                          re.M):
        return 0, f"killed by {test}"
    if done.returncode != 0:
        return 1, f"not killed: exit code {done.returncode}, but not by a failure of {test}"
    if skipped:
        reason = re.search(r"Skipped\n(.+)", output)
        return SKIPPED, f"[  SKIPPED ] {reason[1] if reason else skipped[1]}"
    if re.search(r"\b0 tests from 0", output):
        return 1, f"no test: nothing is called {test}; correct `kills:` in check/mutants.txt"
    return 1, f"survived: {test} passes with the mutant; sharpen the test"


def skeleton(exe: Path, limit: float, suite: str) -> tuple[int, str]:
    """Exit code and one line. A skeleton must fail, how does not matter: a step is missing."""
    for tests in (f"{suite}.*Sizes*", f"{suite}.*"):  # most fail the first ones: then the others need not run
        command = [str(exe.absolute()), "--gtest_brief=1", "--gtest_fail_fast", f"--gtest_filter={tests}"]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit)
        except subprocess.TimeoutExpired:
            return 0, f"does not pass: no verdict within {limit:g} s"
        if done.returncode != 0:
            break
    if done.returncode == 0:
        passed = re.search(rb"^\[  PASSED  \] (\d+)", done.stdout, re.M)
        if passed and int(passed[1]) == 0 and b"SKIPPED" in done.stdout:
            return SKIPPED, "[  SKIPPED ] every test was skipped"
        return 1, "passes all tests as it is: its steps are not judged, or not taken out"
    if done.returncode != 1 and done.returncode > 0:
        return 1, f"exit code {done.returncode}: the program did not run"
    return 0, "does not pass"


def removes_barrier(mutant: Mutant) -> bool:
    count = [sum(line.count("__sync") for line in lines) for lines in (mutant.old, mutant.new)]
    return count[1] < count[0]


def judged(file: Path, race: bool) -> list[Mutant]:
    """The mutants that a build judges: those without a barrier under ThreadSanitizer, else all but those for it."""
    return [m for m in parse(file) if (removes_barrier(m) if race else not m.race_only)]


def race(exe: Path, test: str, source: Path) -> tuple[int, str]:
    """A program built with ThreadSanitizer must report a race between two lines of the source."""
    done = subprocess.run([str(exe.absolute()), f"--gtest_filter={test}"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=100)
    output = done.stdout.decode(errors="replace")
    report = output.partition("WARNING: ThreadSanitizer: data race")[2].partition("SUMMARY")[0]
    lines = sorted(set(re.findall(rf"{re.escape(source.name)}:(\d+)", report)), key=int)
    if not lines:
        return 1, f"ThreadSanitizer reports no race in {source.name} during {test}"
    text = source.read_text(encoding="utf-8").split("\n")
    return 0, "\n".join(["the race:"] + [f"  {source.name}:{n}: {text[int(n) - 1].strip()}"
                                         for n in lines])


def main() -> int:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="print name, source, test, alone or woven, and any or its order, tab-separated")
    listing.add_argument("race", nargs="?", choices=["race"], help="only those without a barrier")
    listing.add_argument("file", type=Path)
    every = commands.add_parser("check", help="fail unless every mutant can be applied")
    every.add_argument("file", type=Path)
    every.add_argument("source_dir", type=Path)
    one = commands.add_parser("apply", help="write the mutated source")
    one.add_argument("file", type=Path)
    one.add_argument("name")
    one.add_argument("source_dir", type=Path)
    one.add_argument("-o", "--out", type=Path, required=True)
    woven = commands.add_parser("weave", help="write the source with all its mutants but those alone in it")
    woven.add_argument("race", nargs="?", choices=["race"], help="only those without a barrier")
    woven.add_argument("file", type=Path)
    woven.add_argument("source")
    woven.add_argument("source_dir", type=Path)
    woven.add_argument("-o", "--out", type=Path, required=True)
    judge = commands.add_parser("verdict", help="0: the test kills the mutant, 77: skipped, 1: no")
    judge.add_argument("exe", type=Path)
    judge.add_argument("test")
    judge.add_argument("--timeout", type=float, default=60, metavar="SECONDS")
    hole = commands.add_parser("skeleton", help="0: the skeleton fails its tests, 77: skipped, 1: it passes")
    hole.add_argument("exe", type=Path)
    hole.add_argument("--suite", default="*", help="the only tests that may fail")
    hole.add_argument("--timeout", type=float, default=60, metavar="SECONDS")
    racing = commands.add_parser("race", help="0: ThreadSanitizer reports a race in the mutant")
    racing.add_argument("exe", type=Path)
    racing.add_argument("test")
    racing.add_argument("source", type=Path)
    args = parser.parse_args()
    if args.command == "list":
        for m in judged(args.file, bool(args.race)):
            print(m.name, m.source, m.kills, "alone" if m.alone else "woven", m.order or "any", sep="\t")
        return 0
    if args.command == "check":
        for m in parse(args.file):
            apply(m, args.source_dir)
        return 0
    if args.command == "apply":
        mutant = find(args.file, args.name)
        text = "\n".join(apply(mutant, args.source_dir)[0])
        write_whole(args.out, text if mutant.in_double else for_one_type(text))
        return 0
    if args.command == "weave":
        mutants = [m for m in judged(args.file, bool(args.race)) if m.source == args.source and not m.alone and m.order != "gpu"]
        if not mutants:
            raise Bad(f"{args.file}: no mutant of {args.source} to weave; `mutants.py list` prints them all")
        text = weave(mutants, args.source_dir)
        write_whole(args.out, text if any(m.in_double for m in mutants) else for_one_type(text))
        return 0
    if args.command == "skeleton":
        code, line = skeleton(args.exe, args.timeout, args.suite)
        print(line)
        return code
    if args.command == "race":
        code, line = race(args.exe, args.test, args.source)
        print(line)
        return code
    code, line = verdict(args.exe, args.test, args.timeout)
    print(line)
    return code


if __name__ == "__main__":
    run(main)
