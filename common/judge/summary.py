"""One screen after the tests: what passed, what failed, what was skipped and why, what next.

    summary.py TESTS.xml [MUTANTS.xml] [--stage 01_safe_softmax]      as `ctest --output-junit` writes them
"""

from __future__ import annotations

import argparse
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

SHOWN = 8  # names of failed tests, reasons of skipped ones


@dataclass(frozen=True)
class Test:
    name: str
    state: str  # passed, failed, skipped
    why: str  # it was skipped

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]

    @property
    def planted(self) -> bool:
        return bool(re.search(r"\.(mutant|race|skeleton)\.", self.name))


def reason(output: str) -> str:
    """Why a test was skipped, in the words of the test."""
    found = (re.search(r"SKIPPED: *(.+)", output) or re.search(r": Skipped\n+(.+)", output)
             or re.search(r"\[  SKIPPED \] (?!\d+ test)(.+)", output))
    return " ".join(found[1].split()) if found else "no reason given"


def read(path: Path) -> list[Test]:
    tests = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        status, skipped = case.get("status", ""), case.find("skipped")
        state = "passed" if status == "run" else "failed"
        why = ""
        if status == "disabled":
            state, why = "skipped", "switched off in this build"
        elif skipped is not None and status == "notrun" and "NOT_BUILT" not in case.get("name", ""):
            state, why = "skipped", reason(case.findtext("system-out", ""))
        tests.append(Test(case.get("name", "?"), state, why))
    return tests


def count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def lines(tests: list[Test], planted_run: bool, stage: str) -> list[str]:
    out = ["", "summary"]
    for group in sorted({test.group for test in tests}, key=lambda name: (name == "common", name)):
        own = Counter(test.state for test in tests if test.group == group and not test.planted)
        caught = Counter(test.state for test in tests if test.group == group and test.planted)
        parts = [count(own["passed"], "test") + " passed"]
        parts += [f"{own['failed']} FAILED"] if own["failed"] else []
        parts += [f"{own['skipped'] + caught['skipped']} skipped"] if own["skipped"] + caught["skipped"] else []
        if planted_run and (caught["passed"] or caught["failed"]):
            parts.append(f"{caught['passed']} of {caught['passed'] + caught['failed']} planted mistakes caught")
        out.append(f"  {group:<8} " + ", ".join(parts))
    reasons = Counter(test.why for test in tests if test.state == "skipped")
    for why, number in reasons.most_common(SHOWN):
        out.append(f"  skipped  {number}: {why}")
    failed = [test.name for test in tests if test.state == "failed"]
    out += [f"  failed   {name}" for name in failed[:SHOWN]]
    out += [f"  failed   and {len(failed) - SHOWN} more"] if len(failed) > SHOWN else []
    if failed:
        which = stage[:2] or failed[0][5:7] if failed[0].startswith("stage") else ""
        out.append("next: the first failure above says what was expected, and the command for that case alone"
                   + (f"; then ./learn test {which}" if which else ""))
    elif stage:
        out.append(f"next: read {stage}/README.md, write it yourself with ./learn practice {stage[:2]}, see it with "
                   f"./learn charts {stage[:2]}")
    else:
        out.append("next: 00_naive/README.md, with ./learn practice 00 beside it; ./learn charts measures this machine")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--stage", default="")
    options = parser.parse_args()
    tests: list[Test] = []
    for path in options.files:
        try:
            if path.is_file():
                tests += read(path)
        except (OSError, ElementTree.ParseError) as error:
            print(f"summary.py: {path}: not what ctest writes ({error}); run the tests again", file=sys.stderr)
            return 1
    if not tests:
        print("summary.py: no test has run", file=sys.stderr)
        return 1
    print("\n".join(lines(tests, len(options.files) > 1 and options.files[1].is_file(), options.stage)))
    return int(any(test.state == "failed" for test in tests))


if __name__ == "__main__":
    sys.exit(main())
