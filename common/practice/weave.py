#!/usr/bin/env python3
"""Weaves a reader's copy and the lesson into one source, which takes each hole from the one or the other.

    weave.py 02_online_softmax mine/online_softmax.cpp -o OUT [--type float]

Outside of the holes stands what the reader has. A hole becomes `if (step(k)) { the reader's } else { the lesson's }`,
k its bit in FA_STEPS (see steps.hpp), and what check/practice.txt notes after it follows. `#line` keeps the places of
both. Where the marks are gone, the reader's code stands alone.
"""
from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from marks import Lesson, Region, load, load_copy, stage_of  # puts common/judge on the path
from source import Bad, Parser, run, unmarked, write_whole

# The lesson's instantiations for a type, each a part of its own: two compilers share the work.
OF_TYPE = r"^template [^;{{]*<(?:const )?{}>[^;{{]*;\n"
OTHER = {"float": "double", "double": "float", "__half": "__nv_bfloat16", "__nv_bfloat16": "__half"}


@dataclass(frozen=True)
class Notes:
    """A stage's check/practice.txt:

        online_softmax.cpp: rows Running.* Softmax.*    the tests that judge this file; stages, or filters
        after 02.2: see("l", l);                        what is noted behind a hole, for the tiny problem; of a
                                                        constexpr x, x_of[@02.a] is the reader's or the lesson's
        tests 02.5: Merge.*                             what judges a hole that the trials do not reach: tests,
        tests 04.a: seen turns of K                     or what is noted of the tiny problem
        hole 02.a: the largest number so far            what to do in a hole of level 2, for marks.py
        means L: (6)                                    the equation to look at if a result differs,
        outside P: (1), (2)                             if that is all that is known: at level 3, of what
        outside P and L: (1)                            trials.cpp sees from outside; if both differ,
        outside P nan: (2)                              if it is no number,
        outside lanes.cpp P: (2)                        if this file is the reader's,
        outside nothing: (1)                            and if the program ends before it comes to it
    """
    judges: dict[str, list[str]] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)
    means: dict[str, str] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)


def notes(stage: Path) -> Notes:
    file = stage / "check" / "practice.txt"
    found = Notes()
    for i, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        head, colon, rest = line.partition(": ")
        kind, _, name = head.partition(" ")
        if not colon or not rest.strip() or name and kind not in ("after", "tests", "means", "outside", "hole"):
            raise Bad(f"{stage.name}/check/practice.txt:{i}: write `FILE: tests`, or after, tests, means, outside "
                      "with a name, a colon and what it says")
        if kind == "hole":
            continue
        if name:
            getattr(found, kind)[name] = rest.strip()
        else:
            found.judges[head] = rest.split()
    return found


def bit(hole: str) -> int:
    """Of 02.3, 02.c or 02.1-02.4 in FA_STEPS."""
    number = hole.partition("-")[0][3:]
    return int(number) - 1 if number.isdigit() else 30 + ord(number) - ord("a")


def woven_hole(copy: Lesson, mine: Region, lesson: Lesson, ours: Region, after: str, uses: list[str]) -> list[str]:
    step = f"::fa::practice::step({bit(mine.name)})"
    indent = re.match(r"\s*", copy.lines[mine.first])[0]    # type: ignore[index]
    own, told = copy.code(mine), lesson.code(ours)
    after = re.sub(r"@(\d\d\.\w+)", lambda m: f"::fa::practice::step({bit(m[1])})", after)
    note = [f"{indent}{{ using ::fa::practice::see, ::fa::practice::turns; {after} }}"] if after else []
    if ours.kind == "value":
        value, its = copy.value(mine), lesson.value(ours)
        if value is None:
            return own
        if "constexpr" not in ours.head:
            return [f"{indent}{ours.head} = {step} ? ({value}) : ({its});", *note]
        *words, name = ours.head.split()    # the compiler wants one value; both are there to be noted
        kind = " ".join(word for word in words if word not in ("static", "constexpr"))
        return [f"{indent}{ours.head} = {value};", f"{indent}static constexpr {kind} {name}_of[2] = {{{its}, {value}}};", *note]
    return [f"{indent}if ({step}) {{", f'#line {mine.first + 2} "{copy.label}"', *own, f"{indent}}} else {{", *uses,
            f'#line {lesson.place(ours.first + 1)} "{lesson.label}"', *unmarked(told), f"{indent}}}", *note]


HELPER = re.compile(r"\b(\w+)\([^;{}]*\)\s*\{")


def helpers(lesson: Lesson) -> list[tuple[str, list[str], list[str]]]:
    """What is gone at level 3 beside the holes: the line of code that it stood before, the code, its functions."""
    found = []
    for blank in lesson.regions:
        if blank.kind == "blank" and not blank.level:
            rest = [line for line in unmarked(lesson.lines[blank.last + 1:]) if line.strip()]
            code = [f'#line {lesson.place(blank.first + 1)} "{lesson.label}"', *unmarked(lesson.code(blank))]
            found.append((rest[0], code, HELPER.findall(re.sub(r"\{[^{}]*\}", "{", "\n".join(lesson.code(blank))))))
    return found


def woven(copy: Lesson, lesson: Lesson, after: dict[str, str]) -> str:
    ours = {r.name: r for r in lesson.holes(copy.level)}
    out = ['#include "common/practice/steps.hpp"', f'#line 1 "{copy.label}"']
    gone = helpers(lesson) if copy.level == 3 else []
    inserted = {copy.lines.index(before): code for before, code, _ in gone if before in copy.lines}
    uses = [f"using fa_lesson::{name};" for _, _, names in gone for name in names]
    copied = 0
    for mine in copy.regions:
        for at in range(copied, mine.first):
            if at in inserted:
                out += ["namespace fa_lesson {", *inserted[at], "}", f'#line {at + 1} "{copy.label}"']
            out.append(copy.lines[at])
        out += woven_hole(copy, mine, lesson, ours[mine.name], after.get(mine.name, ""), uses)
        out.append(f'#line {mine.last + 2} "{copy.label}"')
        copied = mine.last + 1
    return "\n".join(out + copy.lines[copied:])


def of_type(text: str, kept: str) -> str:
    return re.sub(OF_TYPE.format(OTHER[kept]), lambda m: "\n" * m[0].count("\n"), text, flags=re.M)


def main() -> int:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("stage", type=Path)
    parser.add_argument("file", type=Path, help="the reader's, relative to the stage: mine/FILE")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--type", choices=list(OTHER), help="only the instantiations for this type")
    args = parser.parse_args()
    stage = stage_of(args.stage)
    lesson = load(stage, stage / args.file.relative_to("mine"))
    copy, _ = load_copy(lesson, stage, stage / args.file)
    text = woven(copy, lesson, notes(stage).after)
    write_whole(args.out, of_type(text, args.type) if args.type else text)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    run(main)
