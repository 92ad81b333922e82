#!/usr/bin/env python3
"""Exercise marks in the lessons: checks them, makes the skeletons, fills the chapter's quotations.

    // [step 02.1: rescale the old sum to the new maximum (2 lines)]   an exercise, numbered NN.k
    // [end]
    // [quote attention]                                               only for quoting
    // [end quote]

A step may lie in a quote region; nothing else nests. Whether a skeleton compiles is only guessed
here (see `declared`): the proof is the build, which compiles every skeleton.
"""
from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "judge"))
from source import MARK, Bad, Parser, bare, run, unmarked, write_whole  # noqa: E402

SUFFIXES = (".cpp", ".cu", ".hpp", ".cuh")
FOLDERS = (".", "fast", "ptx", "forward", "backward")   # of a stage: where lessons and chapters lie
STAGE = re.compile(r"\d\d_\w+")
FORM = re.compile(r"// \[(?:step (?P<step>\d\d\.\d+): .+ \((?P<count>[1-9]\d*) lines?\)"
                  r"|quote (?P<quote>[\w.-]+)|end|end quote)\]")
FORMS = "// [step NN.k: what to do (n lines)], // [end], // [quote name] or // [end quote]"
QUOTATION = re.compile(r"^<!-- quote (\S+) -->\n(?:```(\S*)\n(?:(?!```).*\n)*```\n)?<!-- end -->$",
                       re.M)
# `#pragma unroll` may stand in a step: it belongs to the loop below it and leaves with it.
FORBIDDEN = re.compile(r"^\s*#(?!\s*pragma unroll\b)\s*\w*|\breturn\b|\b__sync(?:threads|warp)\w*"
                       r"|\w*(?i:barrier)\w*|\barrive_and_wait\b|\.sync\(")
DECLARATION = re.compile(r"\s*(?:[A-Za-z_][\w:]*(?:\s*<[^;=]*>(?:::\w+)*)?[\s&*]+){1,5}"
                         r"(?P<name>[A-Za-z_]\w*)\s*[=;{(\[,]")
NO_TYPE = re.compile(r"\s*(?:else|throw|delete|goto|case|do|new|asm|co_\w+)\b")
CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Region:
    name: str       # 02.1 of a step, attention of a quote region
    count: int      # the lines of code that a step promises; 0 for a quote region
    first: int      # index of the opening mark
    last: int       # index of the closing mark


@dataclass(frozen=True)
class Lesson:
    label: str      # 02_online_softmax/fast/lanes.cpp
    lines: list[str]
    regions: list[Region]

    def steps(self) -> list[Region]:
        return [r for r in self.regions if r.count]

    def bad(self, index: int, why: str) -> Bad:
        return Bad(f"{self.label}:{index + 1}: {why}")

    def quotation(self, region: Region) -> str:
        body = unmarked(self.lines[region.first + 1:region.last])
        for at in range(len(body) - 2, -1, -1):     # a pragma stands at column 0: move it to its loop
            if body[at].startswith("#pragma"):
                body[at] = body[at + 1][:len(body[at + 1]) - len(body[at + 1].lstrip())] + body[at]
        return textwrap.dedent("\n".join(body)).strip("\n")

    def skeleton(self) -> str:
        stage, _, file = self.label.partition("/")
        up = "../" * (file.count("/") + 1)
        out = [f"// Generated from {up}{file}. To fill in the TODOs: ./learn practice {stage[:2]}"]
        copied = 0
        for step in self.steps():
            out += self.lines[copied:step.first]
            out.append(re.sub(r"\[step (.*)\]", r"TODO \1", self.lines[step.first].rstrip()))
            copied = step.last + 1
        return "\n".join(unmarked(out + self.lines[copied:]))


def load(stage: Path, file: Path) -> Lesson:
    label = f"{stage.name}/{Path(os.path.relpath(file, stage)).as_posix()}"
    lesson = Lesson(label, file.read_text(encoding="utf-8").split("\n"), [])
    opened: list[Region] = []
    for i, line in enumerate(lesson.lines):
        if not MARK.search(line):
            continue
        form = FORM.fullmatch(line.strip())
        if not form:
            raise lesson.bad(i, f"a broken mark; alone on its line, it reads {FORMS}")
        name, inner = form["step"] or form["quote"], opened[-1] if opened else None
        if name:
            if inner and (inner.count or form["quote"]):
                raise lesson.bad(i, f"{name} is nested in {inner.name}; close that one first")
            opened.append(Region(name, int(form["count"] or 0), i, i))
        elif not inner or bool(inner.count) == ("quote" in line):
            raise lesson.bad(i, f"{line.strip()} while {inner.name if inner else 'nothing'} is "
                                "open; set the mark that matches")
        else:
            lesson.regions.append(replace(opened.pop(), last=i))
    if opened:
        raise lesson.bad(opened[-1].first, f"{opened[-1].name} is unclosed; add its end mark")
    return lesson


def top_level(text: str) -> str | None:
    """The text with the contents of all brackets blanked; None if they do not balance."""
    out: list[str] = []
    due: list[str] = []
    for c in text:
        if c in ")]}" and (not due or due.pop() != c):
            return None
        out.append(" " if due and c != "\n" else c)
        if c in CLOSING:
            due.append(CLOSING[c])
    return None if due else "".join(out)


def declared(body: str, top: str) -> Iterator[tuple[str, int]]:
    """Names declared outside all brackets, with their offsets. A heuristic: a statement of the
    form `words name` before one of = ; { ( [ , declares name, and so do `, name` after it and
    `auto [a, b]`. Macros, declarations behind a label and function pointers escape it."""
    for statement in re.finditer(r"[^;}]+[;}]?", top):
        text, at = statement[0], statement.start()
        binding = re.match(r"[\s\w]*\bauto[\s&]*(\[)", text)
        if binding:
            start = at + binding.start(1)
            yield from ((n, start) for n in re.findall(r"\w+", body[start:].partition("]")[0]))
        m = DECLARATION.match(text)
        if m and not NO_TYPE.match(text):
            yield m["name"], at + m.start("name")
            for more in re.finditer(r",[\s&*]*(\w+)\s*[=;,{(\[]", text[m.end("name"):]):
                yield more[1], at + m.end("name") + more.start(1)


def rest_of_block(text: str) -> str:
    """Up to the brace that closes the enclosing block: there a name of the region dies."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "{") - (c == "}")
        if depth < 0:
            return text[:i]
    return text


def check_steps(lesson: Lesson, k: int) -> int:
    """Raises Bad for a step that would break its skeleton. k: the first number; gives the next."""
    code = bare("\n".join(lesson.lines)).split("\n")
    for k, step in enumerate(lesson.steps(), k):
        number, lines = f"{lesson.label[:2]}.{k}", code[step.first + 1:step.last]
        count = sum(bool(line.strip()) for line in lines)
        if step.name != number:
            raise lesson.bad(step.first, f"step {step.name} should be {number}, as steps count "
                                         "1, 2, 3 through the stage; renumber it")
        if count != step.count:
            raise lesson.bad(step.first, f"step {number} promises {step.count} but holds {count} "
                                         "lines of code; correct the mark")
        for i, line in enumerate(lines, step.first + 1):
            wrong = FORBIDDEN.search(line)
            if wrong:
                raise lesson.bad(i, f"the skeleton would lack {wrong[0].strip()} of step {number}; "
                                    "keep it outside the marks")
        # All that is left of the preprocessor is `#pragma unroll`; it must not hide what follows.
        body = re.sub(r"#[^\n]*", lambda m: " " * len(m[0]), "\n".join(lines))
        top = top_level(body)
        if top is None:
            raise lesson.bad(step.first, f"step {number} has unbalanced brackets; move a mark so "
                                         "that both ends lie inside")
        rest = rest_of_block("\n".join(code[step.last:]))
        for name, offset in declared(body, top):
            if re.search(rf"\b{name}\b", rest):
                raise lesson.bad(step.first + 1 + body.count("\n", 0, offset),
                                 f"{name} is declared in step {number} and used after it; "
                                 "declare it before the mark")
    return k + 1 if lesson.steps() else k


def stage_of(folder: Path) -> Path:
    folder = folder.resolve()
    if not folder.is_dir() or not STAGE.fullmatch(folder.name):
        raise FileNotFoundError(2, "is no stage folder NN_name", str(folder))
    return folder


def marked_lessons(stage: Path) -> list[Lesson]:
    """The lessons with marks, in the order of their first steps."""
    files = [f for sub in FOLDERS for f in sorted((stage / sub).glob("*")) if f.suffix in SUFFIXES]
    found = [load(stage, f) for f in files if MARK.search(f.read_text(encoding="utf-8"))]
    return sorted(found, key=lambda x: min((int(s.name[3:]) for s in x.steps()), default=1 << 30))


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
            raise bad(m, f"{len(found) or 'no'} regions {m[1]}; name one: NN.k or file:name")
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
    k = 1
    for lesson in lessons:
        if "/.." in lesson.label:
            raise FileNotFoundError(2, "lies outside the stage", lesson.label)
        k = check_steps(lesson, k)
        steps.update((s.name, lesson.quotation(s)) for s in lesson.steps())
        if lesson.steps():
            wanted[stage / "exercise" / lesson.label.partition("/")[2]] = lesson.skeleton()
    for file in (stage / "exercise").rglob("*"):
        if file.suffix in SUFFIXES and file not in wanted:
            raise Bad(f"{stage.name}/exercise/{file.name}: its lesson has no step; delete it")
    for chapter in (c for sub in FOLDERS for c in sorted((stage / sub).glob("*.md"))):
        label = f"{stage.name}/{chapter.relative_to(stage).as_posix()}"
        text = chapter.read_text(encoding="utf-8")
        wanted[chapter] = fill_quotations(stage, label, text, steps)
    return wanted


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("skeleton", help="write the skeleton of one lesson")
    one.add_argument("solution", type=Path)
    one.add_argument("-o", "--out", type=Path, required=True)
    for name, text in (("check", "fail unless marks, exercise/ and quotations are in step"),
                       ("write", "rewrite exercise/ and the chapter's quotations")):
        command = commands.add_parser(name, help=text)
        command.add_argument("stage", type=Path)
        command.add_argument("lessons", nargs="*", help="relative to the stage, in step order; "
                             "default: every lesson with marks, in the order of its first step")
    args = parser.parse_args()
    if args.command == "skeleton":
        file = args.solution.resolve()
        stage = next((p for p in file.parents if STAGE.fullmatch(p.name)), file.parent)
        lesson = load(stage_of(stage), file)
        if not lesson.steps():
            raise Bad(f"{lesson.label}: there is no step to take out; mark one: {FORMS}")
        check_steps(lesson, int(lesson.steps()[0].name[3:]))
        write_whole(args.out, lesson.skeleton())
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
