#!/usr/bin/env python3
"""Exercise marks in the lessons: checks them, makes the skeletons, fills the chapter's quotations.

    // [step 02.1: rescale the old sum to the new maximum (2 lines)]   a hole at levels 1 and 2
    // [end]
    // [02.a]                                                          a hole at level 2 alone; one
    // [end]                                                           line may bear it: `x = 1;  // [02.a] why`
    // [blank]                                                         gone at level 3, with all in it
    // [end blank]
    // [quote attention]                                               only for quoting
    // [end quote]

What is to be done in a hole of level 2 stands in check/practice.txt, so that the lesson stays readable:

    hole 02.a: wait until the tile is complete
    hole 02.b (2): the tile's keys; until then 0                       a value hole: its declaration
                                                                       stays, with 0 in its place
Steps are numbered 1, 2, 3 through the stage, the others a, b, c. Which numbered equations a hole
belongs to says the last comment above it that states any, `// (2) ...`, or the hole itself:
`[step 02.1 (2, 3): ...]`. At level 2 such comments are cut down to their numbers, and so is what a
step says. A skeleton, and with it a reader's copy, keeps the marks of its holes.

Holes lie in a blank or a quote region, but not in each other. Whether a skeleton compiles is only
guessed here (see `declared` in judge/source.py): the proof is the build, which compiles every skeleton.
"""
from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "judge"))
from source import (LABEL, LEXEME, MARK, Bad, Parser, bare, declared, for_one_type, rest_of_block, run,  # noqa: E402
                    top_level, unlabelled, unmarked, value_declaration, write_whole)

LEVELS = (1, 2, 3)
SUFFIXES = (".cpp", ".cu", ".hpp", ".cuh")
# Of a stage: where lessons and chapters lie.
FOLDERS = (".", "fast", "warmup", "ladder", "ptx", "ptx/on_cpu", "forward", "backward", "beyond", "beyond/*", "ring")
STAGE = re.compile(r"\d\d_\w+")
FORM = re.compile(r"// \[(?:(?:step (?P<step>\d\d\.\d+)|more (?P<more>\d\d\.[a-z]))"
                  r"(?: \((?P<equations>\d+(?:, \d+)*)\))?: (?P<text>.+?)"
                  r"(?:; until then (?P<until>.+?))? \((?P<count>[1-9]\d*) lines?\)"
                  r"|quote (?P<quote>[\w.-]+)|(?P<blank>blank)|(?P<end>end|end quote|end blank))\]")
FORMS = ("// [step NN.k: what to do (n lines)], // [more NN.a: what to do (n lines)], "
         "// [blank], // [quote name], or the end of one")
# The same in a reader's copy, where anything may have happened to them.
OPENING = re.compile(r"//\s*\[\s*(?:step|more|blank)\s+(?P<name>\d\d\.\w+(?:-\d\d\.\w+)?)")
ENDING = re.compile(r"//\s*\[\s*end(?:\s+blank)?\s*\]")
HEAD = re.compile(r"// Practice \d\d, level (?P<level>[123]), of ")
QUOTATION = re.compile(r"^<!-- quote (\S+) -->\n(?:```(\S*)\n(?:(?!```).*\n)*```\n)?<!-- end -->$",
                       re.M)
STATEMENT = re.compile(r"//\s*(?P<label>\(\d+\)(?:(?:,| to| and) \(\d+\))*)(?=[\s,:]|$)(?P<rest>.*)")
# `#pragma unroll` may stand in a hole: it belongs to the loop below it and leaves with it.
FORBIDDEN = re.compile(r"^\s*#(?!\s*pragma unroll\b)\s*\w*|\b(?:return|goto)\b")
BARRIER = re.compile(r"\b__sync(?:threads|warp)\w*|\w*(?i:barrier)\w*|\barrive_and_wait\b|\.sync\(")
LEAVES = re.compile(r"\b(?:break|continue)\b")
LOOP = re.compile(r"\b(?:for|while|do|switch)\b")
NO_FUNCTION = {"if", "for", "while", "switch", "catch", "__launch_bounds__", "noexcept", "decltype"}


@dataclass(frozen=True)
class Region:
    kind: str       # step, more, value, blank or quote
    name: str       # 02.1 or 02.a of a hole, 02.1-02.4 of a blank, attention of a quote region
    first: int      # index of the opening mark
    last: int       # index of the closing mark
    text: str = ""  # what to do; of a blank, the function
    lines: int = 0  # of code that a hole promises
    equations: tuple[int, ...] = ()
    until: str = ""     # of a value hole: what the skeleton has in its place
    head: str = ""      # of a value hole: `const int n`

    @property
    def level(self) -> int:
        """The lowest one at which the region is a hole; 0 for a quote region, or a blank without holes."""
        if self.kind == "quote" or not self.name:
            return 0
        return 3 if self.kind == "blank" else 1 if self.name[3:].isdigit() else 2

    def end(self) -> str:
        return "// [end blank]" if self.kind == "blank" else "// [end]"

    def mark(self, level: int) -> str:
        """The opening mark in a skeleton."""
        if self.kind == "blank":
            return f"// [blank {self.name}: {self.text}]"
        keyword, text = "step" if self.level == 1 else "more", self.text
        told = ", ".join(f"({n})" for n in self.equations)
        if level == 2 and keyword == "step" and told:
            text = f"equation{'s'[:len(self.equations) > 1]} {told}"
        until = f"; until then {self.until}" if self.until else ""
        return f"// [{keyword} {self.name}: {text}{until} ({self.lines} line{'s'[:self.lines > 1]})]"


@dataclass(frozen=True)
class Statement:
    """A comment that states numbered equations."""
    first: int      # index of its line
    last: int       # of its last one
    column: int
    label: str      # (1) to (3), (5)
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Lesson:
    """A lesson, or a reader's copy of one."""
    label: str      # 02_online_softmax/fast/lanes.cpp
    lines: list[str]
    regions: list[Region] = field(default_factory=list)
    level: int = 0  # of a copy
    origin: list[int] = field(default_factory=list)     # of a lesson: each line's number in its file, from 1

    def holes(self, level: int) -> list[Region]:
        """What the reader writes at this level, in the order of the file."""
        if level == 3:
            return [r for r in self.regions if r.level == 3]
        return [r for r in self.regions if 0 < r.level <= level]

    def code(self, hole: Region) -> list[str]:
        return self.lines[hole.first + 1:hole.last]

    def written(self, hole: Region) -> bool:
        """Whether code stands in the hole; in a value hole, other code than its skeleton has."""
        tokens, until = (re.findall(r"\w+|\S", bare(text, literals=True))
                         for text in ("\n".join(self.code(hole)), f"{hole.head} = {hole.until};"))
        return bool(tokens) and tokens != until

    def value(self, hole: Region) -> str | None:
        """The expression that a value hole gives to its name; None if that is not what it does."""
        found = value_declaration("\n".join(self.code(hole)))
        name = hole.head.split()[-1].lstrip("&*") if hole.head else ""
        return found["value"].strip() if found and name in ("", found["name"]) else None

    def place(self, index: int) -> int:
        """The number of a line in its file."""
        return self.origin[index] if self.origin else index + 1

    def bad(self, index: int, why: str) -> Bad:
        return Bad(f"{self.label}:{self.place(index)}: {why}")

    def quotation(self, region: Region) -> str:
        body = unmarked(self.code(region))
        for at in range(len(body) - 2, -1, -1):     # a pragma stands at column 0: move it to its loop
            if body[at].startswith("#pragma"):
                body[at] = body[at + 1][:len(body[at + 1]) - len(body[at + 1].lstrip())] + body[at]
        return textwrap.dedent("\n".join(body)).strip("\n")

    def skeleton(self, level: int) -> str:
        stage, _, file = self.label.partition("/")
        out = [f"// Practice {stage[:2]}, level {level}, of {file}. Keep the marks; "
               f"./learn practice {stage[:2]}"]
        gone = self.holes(level) if level < 3 else [r for r in self.regions if r.kind == "blank"]
        lines = numbered(self.lines) if level > 1 else self.lines
        copied = 0
        for hole in gone:
            mark = self.lines[hole.first]
            indent = mark[:len(mark) - len(mark.lstrip())]
            todo = f"{hole.head} = {hole.until};  // TODO" if hole.until else "// TODO"
            out += unmarked([line for line in lines[copied:hole.first] if line is not None])
            if hole.level:
                out += [indent + line for line in (hole.mark(level), todo, hole.end())]
            copied = hole.last + 1
        return "\n".join(out + unmarked([line for line in lines[copied:] if line is not None]))


def comments(lines: list[str]) -> dict[int, int]:
    """The column of the `//` of every line that has one."""
    found: dict[int, int] = {}
    text = "\n".join(lines)
    for m in LEXEME.finditer(text):
        if m[1] and m[1].startswith("//"):
            found[text.count("\n", 0, m.start())] = m.start() - text.rfind("\n", 0, m.start()) - 1
    return found


def statements(lines: list[str]) -> list[Statement]:
    """Comments of the form `// (1) ...;  (2) ...`, with the lines that go on with them."""
    column = comments(lines)
    found: list[Statement] = []
    for i, at in column.items():
        m = STATEMENT.match(lines[i], at)
        if not m:
            continue
        last, rest = i, m["rest"]
        while column.get(last + 1) == at and not lines[last + 1][:at].strip() \
                and not MARK.search(lines[last + 1]) and not STATEMENT.match(lines[last + 1], at):
            last += 1
            rest += " " + lines[last][at + 2:].strip()
        more = re.findall(r";\s+\((\d+)\)(?=\s)", rest)
        label = ", ".join([m["label"], *(f"({n})" for n in more)])
        numbers = {int(n) for n in re.findall(r"\d+", label)}
        for low, high in re.findall(r"\((\d+)\) to \((\d+)\)", label):
            numbers |= set(range(int(low), int(high)))
        found.append(Statement(i, last, at, label, tuple(sorted(numbers))))
    return found


def numbered(lines: list[str]) -> list[str | None]:
    """The lines with nothing left of stated equations but their numbers; None for a line that goes."""
    out: list[str | None] = list(lines)
    for s in statements(lines):
        out[s.first] = f"{lines[s.first][:s.column]}// {s.label}"
        out[s.first + 1:s.last + 1] = [None] * (s.last - s.first)
    return out


def enclosing(code: str) -> str:
    """The function in whose body this code ends; for code outside any, nothing."""
    closed = 0
    for at in range(len(code) - 1, -1, -1):
        closed += (code[at] == "}") - (code[at] == "{")
        if closed < 0:
            closed = 0
            head = re.split(r"[;{}]", code[:at])[-1]
            names = [n for n in re.findall(r"(\w+)\s*\(", top_level(head) or "") if n not in NO_FUNCTION]
            if names and not re.search(r"\b(?:if|for|while|switch|else|do)\b", head):
                return names[-1]
    return ""


def told_holes(stage: Path) -> dict[str, str]:
    """What check/practice.txt says of holes: by name, `04.e (2): text`."""
    file = stage / "check" / "practice.txt"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return {m[1]: m[0].removeprefix("hole ") for m in re.finditer(r"^hole (\d\d\.[a-z])\b.*", text, re.M)}


def spelt_out(stage: Path, label: str, lines: list[str]) -> Lesson:
    """The lesson with a mark, as a skeleton has it, before each hole that a label names, and an end after it."""
    told = told_holes(stage)
    lesson = Lesson(label, [])

    def put(line: str, at: int) -> None:
        lesson.lines.append(line)
        lesson.origin.append(at + 1)
    for at, line in enumerate(lines):
        m = LABEL.search(line)
        if not m or MARK.search(line):
            put(line, at)
            continue
        if m["name"] not in told:
            raise Bad(f"{label}:{at + 1}: check/practice.txt does not say what to do in {m['name']}: hole {m['name']}: ...")
        alone = not line[:m.start()].strip()
        if alone and line[m.end():]:
            raise Bad(f"{label}:{at + 1}: a label alone, or behind the only line of its hole")
        ends = next((i for i in range(at, len(lines)) if lines[i].strip() == "// [end]"), 0) if alone else at
        if not ends:
            raise Bad(f"{label}:{at + 1}: {m['name']} is unclosed; add its end mark")
        count = sum(bool(text.strip()) for text in bare("\n".join(lines[at:ends + 1])).split("\n"))
        indent = line[:len(line) - len(line.lstrip())]
        put(f"{indent}// [more {told[m['name']]} ({count} line{'s'[:count > 1]})]", at)
        if not alone:
            put(unlabelled(line), at)
            put(f"{indent}// [end]", at)
    return lesson


def load(stage: Path, file: Path) -> Lesson:
    label = os.path.join(stage.name, os.path.relpath(file, stage)).replace(os.sep, "/")
    lesson = spelt_out(stage, label, file.read_text(encoding="utf-8").split("\n"))
    stated = statements(lesson.lines)
    opened: list[Region] = []
    for i, line in enumerate(lesson.lines):
        if not MARK.search(line):
            continue
        form = FORM.fullmatch(line.strip())
        if not form:
            raise lesson.bad(i, f"a broken mark; alone on its line, it reads {FORMS}")
        inner = opened[-1] if opened else None
        if not form["end"]:
            kind = "quote" if form["quote"] else "blank" if form["blank"] else \
                "value" if form["until"] else "step" if form["step"] else "more"
            name = form["quote"] or form["step"] or form["more"] or ""
            if inner and (inner.lines or any(r.kind == kind for r in opened)):
                raise lesson.bad(i, f"{name or 'a blank'} is nested in {inner.name or 'a blank'}; "
                                    "close that one first")
            above = [s for s in stated if s.first < i]
            told = form["equations"]
            numbers = tuple(map(int, told.split(", "))) if told else above[-1].numbers if above else ()
            opened.append(Region(kind, name, i, i, form["text"] or "", int(form["count"] or 0),
                                 () if kind in ("quote", "blank") else numbers, form["until"] or ""))
            continue
        if not inner or form["end"] != {"quote": "end quote", "blank": "end blank"}.get(inner.kind, "end"):
            raise lesson.bad(i, f"{line.strip()} while {inner.name or 'a blank' if inner else 'nothing'} "
                                "is open; set the mark that matches")
        lesson.regions.append(closed(lesson, replace(opened.pop(), last=i), stated))
    if opened:
        raise lesson.bad(opened[-1].first, f"{opened[-1].name or 'a blank'} is unclosed; add its end mark")
    lesson.regions.sort(key=lambda r: r.first)
    return lesson


def closed(lesson: Lesson, region: Region, stated: list[Statement]) -> Region:
    """The region with what only its body tells."""
    if region.kind == "value":
        m = value_declaration("\n".join(lesson.code(region)))
        if not m:
            raise lesson.bad(region.first, f"{region.name} has a value until then, but is not one "
                                           "declaration `TYPE NAME = EXPR;`; make it one")
        return replace(region, head=m["head"].strip())
    if region.kind == "blank":
        held = [r for r in lesson.regions if region.first < r.first and r.level]
        named = [r.name for r in held if r.level == 1] or [r.name for r in held]
        numbers = {n for r in held for n in r.equations}
        numbers |= {n for s in stated if region.first < s.first < region.last for n in s.numbers}
        return replace(region, name="-".join(dict.fromkeys([named[0], named[-1]])) if named else "",
                       text=enclosing(bare("\n".join(lesson.lines[:region.first]))),
                       equations=tuple(sorted(numbers)) if named else ())
    return region


def load_copy(lesson: Lesson, stage: Path, file: Path) -> tuple[Lesson, list[str]]:
    """A reader's copy of the lesson, with those of its holes whose marks are there, and a line for
    each thing that is wrong with the others. Nothing in it is an error: it is the reader's."""
    name = file.relative_to(stage).as_posix()
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    opened: dict[str, list[int]] = {}
    marks: list[tuple[int, str]] = []       # in order; an end mark has no name
    for i, line in enumerate(lines):
        m = OPENING.search(line)
        if m or ENDING.search(line):
            marks.append((i, m["name"] if m else ""))
            opened.setdefault(m["name"] if m else "", []).append(i)
    heads = [int(m["level"]) for m in map(HEAD.match, lines) if m]
    level = heads[0] if heads else max((r.level for r in lesson.regions if r.name in opened), default=1)
    copy = Lesson(f"{stage.name}/{name}", lines, [], level)
    file_of = lesson.label.partition("/")[2]
    whole = f"exercise/{file_of}" if level == 1 else \
        f"python3 common/practice/marks.py skeleton {lesson.label} --level {level}"
    gone, twice = [], []
    for hole in lesson.holes(level):
        at = opened.get(hole.name, [])
        after = next((m for m in marks if at and m[0] > at[0]), (0, hole.name))
        if len(at) > 1:
            twice.append(hole.name)
        elif after[1]:
            gone.append(hole.name)
        else:
            copy.regions.append(replace(hole, first=at[0], last=after[0]))
    copy.regions.sort(key=lambda r: r.first)
    known = {r.name for r in lesson.holes(level)} | {""}
    strange = [n for n in opened if n not in known]
    told = []
    if gone:
        told.append(f"{name}: the marks of {', '.join(gone)} are gone; get them back from {whole}")
    if twice:
        told.append(f"{name}: {', '.join(twice)} is marked twice; keep one pair of marks")
    if strange and level < 3:
        told.append(f"{name}: {', '.join(strange)} is no hole of {file_of} at level {level}; "
                    "its marks are ignored")
    return copy, told


def check_holes(lesson: Lesson, step: int, more: int) -> tuple[int, int]:
    """Raises Bad for a hole that would break its skeleton. Gives the numbers of the next ones."""
    code = bare("\n".join(lesson.lines)).split("\n")
    outside = list(code)    # of all blanks
    blanks = [r for r in lesson.regions if r.kind == "blank"]
    for blank in blanks:
        outside[blank.first:blank.last] = [""] * (blank.last - blank.first)
    for hole in (r for r in lesson.regions if r.kind != "quote"):
        name, lines = hole.name or "a blank", code[hole.first + 1:hole.last]
        if hole.lines:
            if hole.level == 1:
                due, step = f"{lesson.label[:2]}.{step}", step + 1
            else:
                due, more = f"{lesson.label[:2]}.{chr(ord('a') + more)}", more + 1
            if name != due:
                raise lesson.bad(hole.first, f"{name} should be {due}, as steps count 1, 2, 3 through "
                                             "the stage, and the others a, b, c; renumber it")
            count = sum(bool(line.strip()) for line in lines)
            if count != hole.lines:
                raise lesson.bad(hole.first, f"{name} promises {hole.lines} but holds {count} lines of "
                                             "code; correct the mark")
        if hole.level == 1 and not any(b.first < hole.first < b.last for b in blanks):
            raise lesson.bad(hole.first, f"{name} lies in no blank, so level 3 would give it away; set "
                                         "// [blank] and // [end blank] around what a reader writes there")
        check_lines(lesson, hole, lines)
        # All that is left of the preprocessor is `#pragma unroll`; it must not hide what follows.
        body = re.sub(r"#[^\n]*", lambda m: " " * len(m[0]), "\n".join(lines))
        top = top_level(body)
        if top is None:
            raise lesson.bad(hole.first, f"{name} has unbalanced brackets; move a mark so that both "
                                         "ends lie inside")
        after = outside if hole.kind == "blank" else code
        rest = rest_of_block("\n".join(after[hole.last:]))
        for one, offset in () if hole.kind == "value" else declared(body, top):
            if re.search(rf"\b{one}\b", rest):
                raise lesson.bad(hole.first + 1 + body.count("\n", 0, offset),
                                 f"{one} is declared in {name} and used after it; "
                                 "declare it before the mark")
    return step, more


def check_lines(lesson: Lesson, hole: Region, lines: list[str]) -> None:
    looped = False
    for i, line in enumerate(lines, hole.first + 1):
        wrong = FORBIDDEN.search(line)
        if hole.kind == "blank":
            wrong = wrong if wrong and "#" in wrong[0] else None
        elif not wrong and hole.level == 1:
            wrong = BARRIER.search(line)
        looped = looped or bool(LOOP.search(line))
        if not wrong and not looped and hole.kind != "blank":
            wrong = LEAVES.search(line)
        if wrong:
            raise lesson.bad(i, f"the skeleton would lack {wrong[0].strip()} of {hole.name or 'a blank'}; "
                                "keep it outside the marks")


def stage_of(folder: Path) -> Path:
    folder = folder.resolve()
    if not folder.is_dir() or not STAGE.fullmatch(folder.name):
        raise FileNotFoundError(2, "is no stage folder NN_name", str(folder))
    return folder


def marked_lessons(stage: Path) -> list[Lesson]:
    """The lessons with marks, in the order of their first steps."""
    files = [f for sub in FOLDERS for f in sorted(stage.glob(f"{sub}/*")) if f.suffix in SUFFIXES]
    found = [load(stage, f) for f in files if MARK.search(f.read_text(encoding="utf-8"))]
    return sorted(found, key=lambda x: min((int(s.name[3:]) for s in x.holes(1)), default=1 << 30))


def fill_quotations(stage: Path, label: str, text: str, steps: dict[str, str]) -> str:
    def bad(m: re.Match[str], why: str) -> Bad:
        line = text.count("\n", 0, m.start()) + 1
        return Bad(f"{label}:{line}: {why}")

    def fill(m: re.Match[str]) -> str:
        file, _, name = m[1].rpartition(":")
        found = [steps[name]] if name in steps and not file else []
        if file and (stage / file).is_file():
            source = load(stage, stage / file)
            found = [source.quotation(r) for r in source.regions if r.name == name]
        if len(found) != 1:
            raise bad(m, f"{len(found) or 'no'} regions {m[1]}; name one: NN.k, NN.a or file:name")
        return f"<!-- quote {m[1]} -->\n```{m[2] or 'cpp'}\n{found[0]}\n```\n<!-- end -->"

    for m in re.finditer("<!-- quote", text):
        if not QUOTATION.match(text, m.start()):
            raise bad(m, "a broken quotation; write <!-- quote NAME -->, one fenced block and "
                         "<!-- end -->, each on its own lines")
    return QUOTATION.sub(fill, text)


def generated(stage: Path, names: list[str]) -> dict[Path, str]:
    """Every generated file of the stage as it should be. Names are relative to the stage."""
    lessons = [load(stage, stage / n) for n in names] if names else marked_lessons(stage)
    wanted: dict[Path, str] = {}
    steps: dict[str, str] = {}
    step, more = 1, 0
    for lesson in lessons:
        if "/.." in lesson.label:
            raise FileNotFoundError(2, "lies outside the stage", lesson.label)
        step, more = check_holes(lesson, step, more)
        steps.update((s.name, lesson.quotation(s)) for s in lesson.holes(2))
        if lesson.holes(1):
            wanted[stage / "exercise" / lesson.label.partition("/")[2]] = lesson.skeleton(1)
    for file in (stage / "exercise").rglob("*"):
        if file.suffix in SUFFIXES and file not in wanted:
            raise Bad(f"{stage.name}/exercise/{file.name}: its lesson has no step; delete it")
    for chapter in (c for sub in FOLDERS for c in sorted(stage.glob(f"{sub}/*.md"))):
        label = f"{stage.name}/{chapter.relative_to(stage).as_posix()}"
        text = chapter.read_text(encoding="utf-8")
        wanted[chapter] = fill_quotations(stage, label, text, steps)
    return wanted


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("skeleton", help="make the skeleton of one lesson")
    one.add_argument("lesson", type=Path)
    one.add_argument("-o", "--out", type=Path, help="where to; default: the terminal")
    one.add_argument("--level", type=int, choices=LEVELS, default=1, help="default: 1")
    one.add_argument("--for-one-type", action="store_true", help="without the instantiations for double, or for __half")
    for name, text in (("check", "fail unless marks, exercise/ and quotations are in step"),
                       ("write", "rewrite exercise/ and the chapter's quotations")):
        command = commands.add_parser(name, help=text)
        command.add_argument("stage", type=Path)
        command.add_argument("lessons", nargs="*", help="relative to the stage, in step order; "
                             "default: every lesson with marks, in the order of its first step")
    args = parser.parse_args()
    if args.command == "skeleton":
        file = args.lesson.resolve()
        stage = next((p for p in file.parents if STAGE.fullmatch(p.name)), file.parent)
        lesson = load(stage_of(stage), file)
        if not lesson.holes(args.level):
            raise Bad(f"{lesson.label}: there is nothing to take out at level {args.level}; mark it: {FORMS}")
        text = lesson.skeleton(args.level)
        if args.for_one_type:
            text = for_one_type(text)
        if args.out:
            write_whole(args.out, text)
        else:
            print(text, end="")
        return 0
    stage = stage_of(args.stage)
    wanted = generated(stage, args.lessons)
    stale = [p for p, text in wanted.items() if not p.is_file() or p.read_bytes() != text.encode()]
    names = ", ".join(p.relative_to(stage).as_posix() for p in stale)
    if stale and args.command == "check":
        raise Bad(f"{stage.name}: {names} not in step with the lesson; run marks.py write "
                  f"{stage.name}")
    for path in stale:
        write_whole(path, wanted[path])
    print(f"{stage.name}: " + (f"wrote {names}" if stale else "in step"))
    return 0


if __name__ == "__main__":
    run(main)
