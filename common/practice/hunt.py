#!/usr/bin/env python3
"""Bug hunt: hides one of a stage's mutants in a copy of its lesson, tells only the symptom."""
from __future__ import annotations

import base64
import random
import shutil
from pathlib import Path

from marks import stage_of  # puts common/judge on the path
from mutants import Mutant, apply, find, parse
from source import Bad, Parser, run, unmarked, write_whole


def hidden(stage: Path) -> Mutant:
    try:
        name = base64.b64decode((stage / "hunt" / ".mutant").read_bytes(), validate=True).decode()
    except (OSError, ValueError):
        raise Bad(f"{stage.name}/hunt: holds no hunt; clear it: ./learn hunt {stage.name[:2]} "
                  "--reset") from None
    return find(stage / "check" / "mutants.txt", name)


def start(stage: Path, seed: int | None, without_kernels: bool) -> None:
    if (stage / "hunt").exists():
        mutant = hidden(stage)
        print("The hunt goes on.")
    else:
        mutants = [m for m in parse(stage / "check" / "mutants.txt") if not m.race_only
                   and not (without_kernels and m.source.endswith(".cu"))]
        if not mutants:
            raise Bad(f"{stage.name}/check/mutants.txt: lists no mutant; hunt in another stage")
        mutant = random.Random(seed).choice(mutants)
        # Exercise marks point at the lines that matter: with them the place would be given away.
        lines, _ = apply(mutant, stage)
        write_whole(stage / "hunt" / mutant.source, "\n".join(unmarked(lines)))
        write_whole(stage / "hunt" / ".mutant", base64.b64encode(mutant.name.encode()).decode())
    command = f"./learn hunt {stage.name[:2]}"
    print(f"Symptom: {mutant.symptom}\n"
          f"See which tests fail: {command}. Find the place in {stage.name}/hunt/{mutant.source}, mend it, and run that again.\n"
          f"To give up: {command} --reveal")


def reveal(stage: Path) -> None:
    if not (stage / "hunt").exists():
        raise Bad(f"{stage.name}: no hunt is on; begin one: ./learn hunt {stage.name[:2]}")
    mutant = hidden(stage)
    lines, at = apply(mutant, stage)
    print(f"{stage.name}/{mutant.source}:{at + 1}, in the hunt's copy near line "
          f"{len(unmarked(lines[:at])) + 1}")
    for sign, text in (("-", mutant.old), ("+", mutant.new)):
        print(*(f"{sign} {line}" for line in text), sep="\n", end="\n" if text else "")
    print(f"Killed by the test stage{stage.name[:2]}.{mutant.kills}\n"
          f"To clear: ./learn hunt {stage.name[:2]} --reset")


def reset(stage: Path) -> None:
    hunt = stage / "hunt"
    if hunt.is_symlink() or hunt.exists() and not (hunt.is_dir() and (stage / "check").is_dir()):
        raise Bad(f"{stage.name}/hunt: is no folder inside a stage; remove it by hand")
    if hunt.exists():
        shutil.rmtree(hunt)
    print(f"{stage.name}: no hunt is on. To begin one: ./learn hunt {stage.name[:2]}")


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("command", choices=("start", "reveal", "reset"))
    parser.add_argument("stage", type=Path)
    parser.add_argument("--seed", type=int, help="start: choose the same mutant each time")
    parser.add_argument("--without-kernels", action="store_true",
                        help="start: only a mutant that is found without a GPU")
    args = parser.parse_args()
    stage = stage_of(args.stage)
    if args.command == "start":
        start(stage, args.seed, args.without_kernels)
    else:
        {"reveal": reveal, "reset": reset}[args.command](stage)
    return 0


if __name__ == "__main__":
    run(main)
