#!/usr/bin/env python3
"""Predictions: a reader's figures, written down before a benchmark runs, beside what it then measures.

A stage's check/predictions.txt asks: two lines a question, and the second says how the answer follows from what was
measured, in the words of charts/said.py (`said.py --help`),

    memory: By what factor does the extra memory grow from N = 1024 to N = 2048?
      times = mib(naive, N=2048) / mib(naive, N=1024)

and NN_*/mine/predictions.txt answers: `memory = 2`, a line each. On a terminal what has no answer yet is asked for.
"""
from __future__ import annotations

import argparse
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent / "charts"), str(Path(__file__).resolve().parents[1] / "judge")]
from results import BadResults, load  # noqa: E402
from said import BadMark, Page  # noqa: E402
from source import Bad, Parser, run  # noqa: E402

RIGHT = 1.1     # as far as this a prediction is right: benchmarks scatter


@dataclass(frozen=True)
class Question:
    name: str
    words: str
    unit: str
    rule: str


@dataclass(frozen=True)
class Run(Page):
    """What said.py evaluates a rule on: here not the recorded files but the one that was just measured."""
    file_of_results: Path = Path()

    def measured(self, record: str) -> Path:
        return self.file_of_results


def code_lines(text: str) -> list[tuple[int, str]]:
    """The lines that are neither empty nor comments, with their numbers."""
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.partition("#")[0].strip()]


def questions(stage: Path) -> list[Question]:
    file = stage / "check" / "predictions.txt"
    found: list[Question] = []
    lines = code_lines(file.read_text(encoding="utf-8"))
    for (number, first), (_, second) in zip(lines[::2], [*lines[1::2], (0, "")]):
        asked = re.fullmatch(r"([a-z_0-9]+): (\S.*\?)", first)
        rule = re.fullmatch(r"  (\S[^=]*) = (\S.*)", second)
        if not asked or not rule or asked[1] in (q.name for q in found):
            raise Bad(f"{file}:{number}: two lines a question, `name: words?` and `  unit = rule`, each name once")
        found.append(Question(asked[1], asked[2], rule[1], rule[2]))
    return found


def own(stage: Path) -> Path:
    return stage / "mine" / "predictions.txt"


def number_of(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def predictions(stage: Path, asked: list[Question]) -> dict[str, float]:
    """The reader's; Bad for a file with anything else in it."""
    file, found = own(stage), {}
    label = f"{stage.name}/mine/{file.name}"
    if not file.exists():
        return {}
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Bad(f"{label}: is not UTF-8; write lines like `{asked[0].name} = 2`") from None
    for number, line in code_lines(text):
        name, equals, value = (part.strip() for part in line.partition("#")[0].partition("="))
        if not equals or number_of(value) is None:
            raise Bad(f"{label}:{number}: not `name = number`: {line.strip()[:60]}")
        if name not in (q.name for q in asked):
            raise Bad(f"{label}:{number}: no question '{name[:40]}'; stage {stage.name[:2]} asks {', '.join(q.name for q in asked)}")
        if name in found:
            raise Bad(f"{label}:{number}: a second prediction of {name}; leave one")
        found[name] = float(value)
    return found


def ask(stage: Path) -> None:
    """Checks what is there; on a terminal asks for the rest and adds it."""
    asked = questions(stage)
    open_ones = [q for q in asked if q.name not in predictions(stage, asked)]
    if not open_ones or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return
    print("Predict before it runs. Enter skips a question.")
    for q in open_ones:
        try:
            while (said := input(f"{q.words} ({q.unit}) ").strip()) and number_of(said) is None:
                print("a number, or Enter")
        except EOFError:
            print()
            return
        if said:
            add(own(stage), f"{q.name} = {said}\n")


def add(file: Path, line: str) -> None:
    file.parent.mkdir(exist_ok=True)
    before = file.read_bytes() if file.exists() else b""
    with file.open("a", encoding="utf-8") as out:
        out.write("\n" * (before != b"" and not before.endswith(b"\n")) + line)


def figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def verdict(predicted: float, measured: float) -> str:
    if predicted * measured <= 0:
        return "right" if predicted == measured else f"off by {figure(abs(predicted - measured))}"
    factor = max(predicted / measured, measured / predicted)
    return "right" if factor <= RIGHT else f"off by a factor of {figure(factor)}"


def compare(stage: Path, file: Path) -> list[str]:
    if load(file).context.get("size") == "smoke":
        return ["--smoke shows that the benchmark runs; it measures nothing, and no prediction is compared"]
    asked = questions(stage)
    said = predictions(stage, asked)
    if not said:
        return [f"no predictions in {stage.name}/mine/predictions.txt; what to predict: ./learn bench {stage.name[:2]} --help"]
    lines = ["", "predicted and measured"]
    page = Run(stage / "README.md", stage.parent, None, file)
    for q in asked:
        if q.name not in said:
            continue
        try:
            measured = page.value(q.rule, "")
            result = f"measured {figure(measured)} {q.unit}: {verdict(said[q.name], measured)}"
        except BadMark:
            result = "not measured in this run"
        lines += [f"  {q.words}", f"    {q.name}: you said {figure(said[q.name])}, {result}"]
    return lines


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("questions", "ask", "compare"))
    parser.add_argument("stage", type=Path)
    parser.add_argument("results", type=Path, nargs="?", help="compare: what was measured")
    args = parser.parse_args()
    stage = args.stage.resolve()
    try:
        if args.command == "questions":
            print(*(f"  {q.name}: {q.words} ({q.unit})" for q in questions(stage)), sep="\n")
        elif args.command == "ask":
            ask(stage)
        elif args.results is None:
            parser.error("compare needs a file of results")
        else:
            print(*compare(stage, args.results), sep="\n")
    except BadResults as error:
        raise Bad(str(error)) from None
    except Bad as error:        # the reader's file, before anything was measured
        parser.exit(2, f"{error}\n")
    except KeyboardInterrupt:
        print()
        return 130
    return 0


if __name__ == "__main__":
    run(main)
