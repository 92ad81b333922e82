#!/usr/bin/env python3
"""What was tested, practised, hunted and measured here, stage by stage, and what comes next.

Kept in `.progress` at the root of the clone, which git ignores: a line for each thing done, only ever added to,

    2026-02-28 17:03 02 practice step=02.1 level=1

so that neither an update nor a new build loses any of it. `progress.py note 02 practice --step 02.1 --level 1` adds
one; in Python, `note(root, "02", "practice", step="02.1", level=1)`. Details: test result; practice step and level;
hunt result and name; bench and charts none.
"""
from __future__ import annotations

import argparse
import os
import re
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "judge"))
import summary  # noqa: E402
from marks import marked_lessons  # noqa: E402
from source import Bad, Parser, run  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
FILE = ".progress"
WHATS = ("test", "practice", "hunt", "bench", "charts")
LINE = re.compile(rf"(\d{{4}}-\d\d-\d\d) \d\d:\d\d (0\d) ({'|'.join(WHATS)})((?: [a-z]+=\S+)*)")
LEVELS = (1, 2, 3)


@dataclass(frozen=True)
class Note:
    day: str
    stage: str      # 02
    what: str
    details: dict[str, str]


def note(root: Path, stage: str, what: str, **details: object) -> None:
    """Adds a line. What cannot be kept is said on stderr and stops nobody."""
    words = [time.strftime("%Y-%m-%d %H:%M"), stage, what]
    words += [f"{key}={re.sub(r'[^!-~]+', '_', str(value))}" for key, value in details.items() if value not in (None, "")]
    line = " ".join(words) + "\n"
    if not LINE.fullmatch(line.strip()):
        raise ValueError(f"no line of {FILE}: {line}")
    try:
        with (root / FILE).open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            if size:        # a line that somebody has left unfinished stays his
                file.seek(size - 1)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode())
    except OSError as error:
        print(f"not noted: {error.filename}: {error.strerror}", file=sys.stderr)


def read(root: Path) -> tuple[list[Note], list[int]]:
    """All that was noted, and the numbers of the lines that cannot be read."""
    notes, broken = [], []
    try:
        text = (root / FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        text = ""
    for number, line in enumerate(text.split("\n"), 1):
        if m := LINE.fullmatch(line.strip()):
            notes.append(Note(m[1], m[2], m[3], dict(word.split("=", 1) for word in m[4].split())))
        elif line.strip():
            broken.append(number)
    return notes, broken


# ---- the view ----------------------------------------------------------------------------------

class Stage:
    """What the notes say of one stage."""

    def __init__(self, folder: Path, notes: list[Note]) -> None:
        self.folder, self.id = folder, folder.name[:2]
        self.notes = [n for n in notes if n.stage == self.id]
        self.lessons = marked_lessons(folder)
        self.steps = {level: {hole.name for lesson in self.lessons for hole in lesson.holes(level)} for level in LEVELS}
        self.done = {level: {n.details["step"] for n in self.of("practice") if n.details.get("level", "1") == str(level)
                             and "step" in n.details} for level in LEVELS}
        named = {result: {n.details.get("name", "?") for n in self.of("hunt") if n.details.get("result") == result}
                 for result in ("caught", "revealed")}
        self.revealed, self.caught = len(named["revealed"]), len(named["caught"] - named["revealed"])

    def of(self, *whats: str) -> list[Note]:
        return [n for n in self.notes if n.what in whats]

    @property
    def tested(self) -> str:
        return self.of("test")[-1].details.get("result", "") if self.of("test") else ""

    @property
    def practised(self) -> str:
        return ", ".join(f"level {level}: {len(done)} of {max(len(done), len(self.steps[level]))}"
                         for level, done in self.done.items() if done)

    @property
    def hunted(self) -> str:
        return ", ".join(f"{n} {result}" for n, result in ((self.caught, "caught"), (self.revealed, "revealed")) if n)

    @property
    def measured(self) -> str:
        return self.of("bench", "charts")[-1].day if self.of("bench", "charts") else ""

    def undone(self) -> Iterator[str]:
        """What is still to be done, in the order in which to do it, each with the command that does it. Who has practised has
        seen the tests run: then they come last, unless they failed."""
        tests = f"its tests: ./learn test {self.id}"
        if self.tested == "failed" or not self.tested and not self.of("practice"):
            yield tests
        if left := sorted(self.steps[1].difference(*self.done.values()), key=natural):
            yield f"its exercise, step {left[0]}: {self.practice_of(left[0])}"
        if not self.caught:
            yield f"a hunt: ./learn hunt {self.id}"
        if not self.measured and not re.search("CUDA|fa_add_ladder", (self.folder / "CMakeLists.txt").read_text()):
            yield f"its benchmark, after a prediction: ./learn bench {self.id}"
        if self.tested != "passed":
            yield tests

    def practice_of(self, step: str) -> str:
        """The command, with the file and the level that it needs where other steps were practised before."""
        command = f"./learn practice {self.id}"
        before = self.of("practice")
        files = [lesson.label.partition("/")[2] for lesson in self.lessons if lesson.holes(1)]
        if before and len(files) > 1:
            file = next(x.label.partition("/")[2] for x in self.lessons if step in (hole.name for hole in x.holes(1)))
            command += f" {file}"
            level = before[-1].details.get("level", "1")
            if level != "1" and not (self.folder / "mine" / file).is_file():
                command += f" --level {level}"
        return command


def natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\W", name)]


def stages_of(root: Path, notes: list[Note]) -> list[Stage]:
    return [Stage(folder, notes) for folder in sorted(root.glob("[0-9][0-9]_*")) if (folder / "CMakeLists.txt").is_file()]


def next_of(stages: list[Stage], notes: list[Note]) -> str:
    """What the reader was at goes on; then the stages after it, then those before. `practice` says the same when all is right."""
    at = [n.stage for n in notes if n.what in ("practice", "hunt", "bench")] or [stages[0].id]
    here = next((i for i, s in enumerate(stages) if s.id == at[-1]), 0)
    for stage in stages[here:] + stages[:here]:
        if what := next(stage.undone(), ""):
            return f"{stage.folder.name}/README.md, and {what}"
    again = next((s for s in stages if any(not s.steps[level] <= s.done[level] for level in LEVELS)), None)
    return "nothing, all of it is done" + (f"; once more, with less help: ./learn practice {again.id} --level 2" if again else "")


def show(root: Path) -> list[str]:
    notes, broken = read(root)
    lines = []
    if broken:
        lines = [f"{FILE}: line{'s' * (len(broken) > 1)} {', '.join(map(str, broken[:5]))}{' ...' * (len(broken) > 5)} "
                 "cannot be read, skipped and kept"]
    if not notes:
        return [*lines, "nothing is noted yet. To begin: ./learn see, then 00_naive/README.md with ./learn practice 00 beside it"]
    stages = stages_of(root, notes)
    rows = [("stage", "tested", "practised (steps)", "hunted", "measured")]
    rows += [(s.folder.name, s.tested or "-", s.practised or "-", s.hunted or "-", s.measured or "-") for s in stages]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return [*lines, f"next: {next_of(stages, notes)}"]


def note_tests(root: Path, files: list[Path]) -> None:
    """Of each stage that `ctest --output-junit` has run: whether all its tests passed, planted mistakes included."""
    results: dict[str, set[str]] = {}
    for file in files:
        try:
            tests = summary.read(file) if file.is_file() else []
        except ElementTree.ParseError:      # summary.py has said so
            continue
        for test in tests:
            if stage := re.fullmatch(r"stage(0\d)(?:_.*)?", test.group):
                results.setdefault(stage[1], set()).add(test.state)
    for stage_id, states in sorted(results.items()):
        if states != {"skipped"}:
            note(root, stage_id, "test", result="failed" if "failed" in states else "passed")


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command")
    one = commands.add_parser("note", help="add a line")
    one.add_argument("stage")
    one.add_argument("what", choices=WHATS)
    for name in ("step", "result", "name"):
        one.add_argument(f"--{name}")
    one.add_argument("--level", type=int, choices=LEVELS)
    tests = commands.add_parser("tests", help="note the stages whose tests have run")
    tests.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    if args.command == "note":
        if not re.fullmatch(r"0\d", args.stage):
            raise Bad(f"no stage '{args.stage}'; stages are 00 to 06")
        note(args.root, args.stage, args.what, step=args.step, level=args.level, result=args.result, name=args.name)
    elif args.command == "tests":
        note_tests(args.root, args.files)
    else:
        print(*show(args.root), sep="\n")
    return 0


if __name__ == "__main__":
    run(main)
