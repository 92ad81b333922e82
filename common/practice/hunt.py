#!/usr/bin/env python3
"""Bug hunt: hides one of a stage's mutants in a copy of its lesson, shows what then fails, and on request the symptom."""
from __future__ import annotations

import base64
import random
import re
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import progress
from ladder import SPARED, family, tiles
from marks import stage_of  # puts common/judge on the path
from mutants import Mutant, apply, find, parse
from source import LEXEME, Bad, Parser, run, unmarked, write_whole
from suite import Suite, broken_rules, pattern, run_suite

NOT_JUDGED = 3


def command(stage: Path, *options: str) -> str:
    return " ".join(["./learn hunt", stage.name[:2], *options])


def hidden(stage: Path) -> Mutant:
    if not (stage / "hunt").exists():
        raise Bad(f"{stage.name}: no hunt is on; begin one: {command(stage)}")
    try:
        name = base64.b64decode((stage / "hunt" / ".mutant").read_bytes(), validate=True).decode()
    except (OSError, ValueError):
        raise Bad(f"{stage.name}/hunt: holds no hunt; clear it: {command(stage, '--reset')}") from None
    return find(stage / "check" / "mutants.txt", name)


def uncommented(lines: list[str]) -> list[str]:
    """Without the exercise's marks and without comments, but for those that open the file: marks point at the lines
    that matter, and a comment states what is right. Were it missing beside the mistake alone, it would give it away."""
    lines = unmarked(lines)
    opening = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("//")), len(lines))
    text = "\n".join(lines[opening:])
    cut = LEXEME.sub(lambda m: "\0" if m[1] else m[0], text).split("\n")
    code = [line.replace("\0", "").rstrip() for line in cut if line.strip() != "\0"]
    kept = [line for i, line in enumerate(code) if line or i == 0 or code[i - 1]]
    return lines[:opening] + kept


def start(stage: Path, seed: int | None, no_kernels: bool) -> None:
    if (stage / "hunt").exists():
        hidden(stage)
        return
    mutants = [m for m in parse(stage / "check" / "mutants.txt") if not m.race_only
               and not (no_kernels and m.order == "gpu")]
    if not mutants:
        raise Bad(f"{stage.name}/check/mutants.txt: lists no mutant; hunt in another stage")
    mutant = random.Random(seed).choice(mutants)
    lines, _ = apply(mutant, stage)
    write_whole(stage / "hunt" / mutant.source, "\n".join(uncommented(lines)))
    write_whole(stage / "hunt" / ".mutant", base64.b64encode(mutant.name.encode()).decode())
    print(f"A mistake is hidden in {stage.name}/hunt/{mutant.source}, a copy of the lesson without its comments.")


def programs(stage: Path, build: Path, mutant: Mutant) -> list[Path]:
    """The stage's tests with the hunt's copy in them: on the CPU, on the GPU, or both; a mistake of time on the CPU."""
    found = sorted(p for p in (build / stage.name).glob(f"hunt{stage.name[:2]}*_tests") if p.is_file())
    return [p for p in found if not (mutant.order not in ("", "gpu") and "on_gpu" in p.name)]


def times(mutant: Mutant) -> list[str]:
    """The emulator's order of time in which the mistake shows; where that is chance, the seeds to try."""
    if mutant.order.startswith("random "):
        return [str(seed) for seed in range(1, int(mutant.order.split()[1]) + 1)]
    return ["" if mutant.order == "gpu" else mutant.order]


def tests_for(stage: Path, program: Path, mutant: Mutant) -> str:
    """Of the kernels of a ladder, which have one program together, only the one that the mistake is in."""
    if "fa_add_ladder" not in (stage / "CMakeLists.txt").read_text(encoding="utf-8") or program.name.endswith(("layouts_tests", "ring_tests")):
        return "*"
    tests = family(mutant.source)
    spared = [one for one in SPARED.split(":") if not fnmatchcase(mutant.kills, one)]
    return f"{tests}.*:{tiles(mutant.source)}:{mutant.kills}" + ("-" + ":".join(spared) if "on_cpu" in program.name else "")


def judge(stage: Path, build: Path, no_kernels: str, verbose: bool) -> int:
    mutant = hidden(stage)
    place = f"{stage.name}/hunt/{mutant.source}"
    suites: list[Suite] = []
    for timing in times(mutant):
        env = {"FA_TIMING": timing} if timing else None
        suites += [run_suite(p, mutant.kills if suites else tests_for(stage, p, mutant), env=env) for p in programs(stage, build, mutant)]
        if any(s.bad for s in suites):
            break
    tests = [t for s in suites for t in s.tests]
    bad = [t for s in suites for t in s.bad]
    if bad:
        if verbose:
            print(*(t.output for t in bad), sep="\n")
        print(f"{len(bad)} of {len(tests)} tests fail:")
        suite = Suite(build, tests)
        print(*(f"  {line}" for line in broken_rules(suite) or pattern(suite, "docs/debugging.md")), sep="\n")
        print(f"Mend {place} and run {command(stage)} again.\n"
              "-v: all that the tests say; --symptom: what a user would see; --reveal: the answer")
        return 1
    if not any(t.name == mutant.kills and t.state == "passed" for t in tests):
        skipped = next((t.output for t in tests if t.name == mutant.kills and t.state == "skipped"), "")
        why = re.search(r": Skipped\n(.+)", skipped)
        print(f"not tested: {place}, since {why[1] if why else no_kernels or 'its test did not run'}")
        return NOT_JUDGED
    progress.note(stage.parent, stage.name[:2], "hunt", result="caught", name=mutant.name)
    print(f"caught: all {len(tests)} tests pass. Another one: {command(stage, '--reset')} && {command(stage)}")
    return 0


def symptom(stage: Path) -> None:
    print(f"Symptom: {hidden(stage).symptom}")


def reveal(stage: Path) -> None:
    mutant = hidden(stage)
    lines, at = apply(mutant, stage)
    progress.note(stage.parent, stage.name[:2], "hunt", result="revealed", name=mutant.name)
    print(f"{stage.name}/{mutant.source}:{at + 1}, in the hunt's copy near line {len(uncommented(lines[:at])) + 1}")
    for sign, text in (("-", mutant.old), ("+", mutant.new)):
        print(*(f"{sign} {line}" for line in text), sep="\n", end="\n" if text else "")
    print(f"Symptom: {mutant.symptom}\n"
          f"Killed by the test stage{stage.name[:2]}.{mutant.kills}\n"
          f"To clear: {command(stage, '--reset')}")


def reset(stage: Path) -> None:
    hunt = stage / "hunt"
    if hunt.is_symlink() or hunt.exists() and not (hunt.is_dir() and (stage / "check").is_dir()):
        raise Bad(f"{stage.name}/hunt: is no folder inside a stage; remove it by hand")
    if hunt.exists():
        shutil.rmtree(hunt)
    print(f"{stage.name}: no hunt is on. To begin one: {command(stage)}")


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("command", choices=("start", "judge", "symptom", "reveal", "reset"))
    parser.add_argument("stage", type=Path)
    parser.add_argument("--build", type=Path, default=Path("build"), help="judge: where the tests were built")
    parser.add_argument("--seed", type=int, help="start: choose the same mutant each time")
    parser.add_argument("--no-kernels", metavar="WHY", default="", help="why no kernel can run on a GPU here")
    parser.add_argument("-v", "--verbose", action="store_true", help="judge: all that the failing tests say")
    args = parser.parse_args()
    stage = stage_of(args.stage)
    if args.command == "judge":
        return judge(stage, args.build, args.no_kernels, args.verbose)
    if args.command == "start":
        start(stage, args.seed, bool(args.no_kernels))
    else:
        {"symptom": symptom, "reveal": reveal, "reset": reset}[args.command](stage)
    return 0


if __name__ == "__main__":
    run(main)
