#!/usr/bin/env python3
"""Who sees which of the faults in check/mutants.txt: the emulator in each order of time, and a GPU.

    cmake --build build --target stage06_all
    python3 06_optimized/check/faults.py measure build 06_optimized/results/faults.json
    cmake --build build --target stage06_faults_on_gpu     where a Hopper GPU answers
    python3 06_optimized/check/faults.py measure build 06_optimized/results/faults.json --gpu "NVIDIA H200"
    python3 06_optimized/check/faults.py draw 06_optimized/results/faults.json 06_optimized/results/faults.md

Each fault of a kernel is planted, and the test that check/mutants.txt names is run: on the CPU late, early, and with the
seeds 1 to 8; with --gpu three times on the GPU, and if it passes there, all tests of its kernel once. What is not measured
stays in faults.json as it was. A fault on a GPU may hang: a run of one test is ended after ten seconds, of all after 100.
"""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "common" / "judge"))
from mutants import Mutant, parse  # noqa: E402
from source import Bad, Parser, run, write_whole  # noqa: E402

SEEDS = [str(seed) for seed in range(1, 9)]
RUNS_ON_GPU = 3


def program(mutant: Mutant, build: Path, on_gpu: bool) -> Path:
    file = re.sub(r"\W", "_", mutant.source.removesuffix(".cu"))
    name = f"mutant_{mutant.name}" if on_gpu else f"mutant_{mutant.name}_on_cpu" if mutant.alone else f"mutants_{file}"
    found = build / "06_optimized" / f"stage06_{name}"
    if not found.is_file():
        raise Bad(f"{found}: not built; build {'stage06_faults_on_gpu' if on_gpu else 'stage06_all'} first")
    return found


def sentence(output: str) -> str:
    """What the emulator said, without the kernel and the block."""
    said = re.search(r"(?:^threw: |description \")\w*kernel\w*: (?=block )(?:block \d+: )?(.+?)(?:\" thrown.*)?$", output, re.M)
    return re.sub(r"[\w./]*/(\w+\.(?:cu|cuh|hpp):\d+)", r"\1", said[1]).strip() if said else ""


def all_tests(mutant: Mutant) -> str:
    """Of the kernel whose test shows it: `ring.Sizes` and `Tiles.SeveralOfEach/ring` look at ring."""
    suite, _, test = mutant.kills.partition(".")
    kernel = test.partition("/")[2] or suite
    return f"{kernel}.*:*/{kernel}"


def verdict(exe: Path, mutant: Mutant, order: str, limit: float = 60, tests: str = "") -> tuple[str, str]:
    """What became of a run: passes, wrong, said, hangs or ends; and the sentence, if one was said."""
    env = {**os.environ, "FA_MUTANT": "" if mutant.alone else mutant.name, "FA_TIMING": order, "GTEST_COLOR": "no"}
    try:
        done = subprocess.run([exe, f"--gtest_filter={tests or mutant.kills}", "--gtest_brief=1"], env=env, text=True,
                              errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return "hangs", ""
    if done.returncode == 0:
        return "passes", ""
    if done.returncode != 1:
        return "ends", ""
    said = sentence(done.stdout)
    return ("said" if said else "wrong"), said


def on_cpu(mutant: Mutant, build: Path) -> dict[str, Any]:
    exe = program(mutant, build, False)
    runs = {order: verdict(exe, mutant, order) for order in ("late", "early", *SEEDS)}
    told = [said for said in (runs.get(mutant.order, ("", ""))[1], *(run[1] for run in runs.values())) if said]
    return {"late": runs["late"][0], "early": runs["early"][0],
            "random": sum(runs[seed][0] != "passes" for seed in SEEDS), "said": told[0] if told else ""}


WORDS = {"passes": "–", "wrong": "numbers", "said": "named", "hangs": "hangs", "ends": "ends"}


def summary(mutants: list[Mutant], known: dict[str, dict[str, Any]], gpus: list[str]) -> list[str]:
    """How many see how many, of the faults that have been tried everywhere: on the emulator, and on each GPU."""
    tried = [m for m in mutants if {"late", *gpus} <= known.get(m.name, {}).keys()]
    kinds = [[known[m.name] for m in tried if bool(m.order) == of_time] for of_time in (False, True)]

    def line(who: str, sees: Callable[[dict[str, Any]], bool]) -> str:
        return f"| {who} | " + " | ".join(str(sum(map(sees, rows))) for rows in kinds) + " |"

    lines = ["| who sees | wrong in any order | of time |", "| --- | ---: | ---: |", line("planted", bool)]
    for gpu in gpus:
        lines += [line(f"all tests of the kernel, on an {gpu}", lambda row: row[gpu] != "–"),
                  line(f"– by not coming to an end, on an {gpu}", lambda row: "hangs" in row[gpu])]
    return [*lines, line("one test, on the CPU, late", lambda row: row["late"] != "passes"),
            line("– early", lambda row: row["early"] != "passes"),
            line(f"– at random, one of {len(SEEDS)} seeds", lambda row: row["random"] > 0),
            line("– by a sentence that says where and why", lambda row: bool(row["said"]))]


def table(mutants: list[Mutant], known: dict[str, dict[str, Any]]) -> str:
    gpus = sorted({key for row in known.values() for key in row if key not in ("late", "early", "random", "said")})
    lines = ["# Who sees which fault", "",
             "Each fault of a kernel in [mutants.txt](../check/mutants.txt), planted and tested. Some are wrong in any order of",
             "events; some, those of time, only if somebody is late or early enough.", "", *summary(mutants, known, gpus), "",
             "**Named**: the emulator says in a sentence which rule is broken, and where; **numbers**: results are wrong; **–**: the",
             f"test passes. Random: how many of {len(SEEDS)} seeds do not pass. Empty: not tried there.",
             *([f"On a GPU: how many of {RUNS_ON_GPU} runs of the test do not pass, or that one does not end; if all pass, whether all",
                "tests of the kernel show it, many of them run again and compared bit by bit."] if gpus else []), "",
             "|".join(["", " fault ", " file ", " late ", " early ", " random ", *(f" {gpu} " for gpu in gpus), ""]),
             "|" + " --- |" * (5 + len(gpus))]
    for m in mutants:
        row = known.get(m.name, {})
        cells = [f"`{m.name}`: {m.symptom}", m.source, *(WORDS.get(row.get(key, ""), "") for key in ("late", "early")),
                 str(row.get("random", "")), *(str(row.get(gpu, "")) for gpu in gpus)]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## What is said", ""]
    for m in mutants:
        if said := known.get(m.name, {}).get("said"):
            lines.append(f"- `{m.name}`: {said}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("measure", help="run the faults; FILE keeps what is not measured")
    measure.add_argument("build", type=Path, help="the build folder")
    measure.add_argument("file", type=Path)
    measure.add_argument("--gpu", metavar="NAME", help="on the GPU of this name instead")
    measure.add_argument("--only", nargs="*", default=[], metavar="FAULT", help="only these")
    draw = commands.add_parser("draw", help="write FILE's table")
    draw.add_argument("file", type=Path)
    draw.add_argument("page", type=Path)
    args = parser.parse_args()
    mutants = [m for m in parse(ROOT / "06_optimized/check/mutants.txt") if m.source.endswith(".cu")]
    known: dict[str, dict[str, Any]] = json.loads(args.file.read_text(encoding="utf-8")) if args.file.is_file() else {}
    if args.command == "draw":
        if not known:
            raise Bad(f"{args.file}: nothing is measured; faults.py measure does")
        write_whole(args.page, table(mutants, known))
        return 0
    if strange := [name for name in args.only if name not in {m.name for m in mutants}]:
        raise Bad(f"no fault {strange[0]} in check/mutants.txt")
    chosen = [m for m in mutants if not args.only or m.name in args.only]
    if args.gpu:
        there = [m for m in chosen if (args.build / "06_optimized" / f"stage06_mutant_{m.name}").is_file()]

        def runs(m: Mutant) -> str:
            failed = 0
            for _ in range(RUNS_ON_GPU):
                said = verdict(program(m, args.build, True), m, "late", 10)[0]
                if said == "hangs":
                    return said
                failed += said != "passes"
            if failed:
                return f"{failed} of {RUNS_ON_GPU}"
            everything = verdict(program(m, args.build, True), m, "late", 100, all_tests(m))[0]
            return "–" if everything == "passes" else f"0 of {RUNS_ON_GPU}; all tests: {WORDS[everything]}"

        with ThreadPoolExecutor(6) as pool:
            for m, failed in zip(there, pool.map(runs, there)):
                known.setdefault(m.name, {})[args.gpu] = failed
                print(m.name, failed, flush=True)
    else:
        here = [m for m in chosen if m.order != "gpu"]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for m, row in zip(here, pool.map(lambda m: on_cpu(m, args.build), here)):
                known.setdefault(m.name, {}).update(row)
    known = {m.name: known[m.name] for m in mutants if m.name in known}
    write_whole(args.file, json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    run(main)
