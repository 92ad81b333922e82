"""./learn torch practice: own_operator.py with its holes empty, in mine/, and what is right in yours."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LESSON = HERE / "own_operator.py"
MINE = HERE / "mine" / "own_operator.py"
HOLE = re.compile(r"^( *)# \[hole (\d): ([^\n]*)\]\n(.*?)^ *# \[end\]\n", re.M | re.S)
RESULT = re.compile(r"^test_\d_(\w+) .*?\.\.\. (ok|FAIL|ERROR)", re.M)

sys.path.insert(0, str(HERE / "tests"))
from run import NONE, installed_in, python_with_torch  # noqa: E402


def skeleton(lesson: str) -> str:
    """The lesson with a question in the place of each hole; what is needed later is None until then."""
    def question(hole: re.Match[str]) -> str:
        indent, number, words, code = hole.groups()
        names = re.findall(rf"^{indent}(\w+) = ", code, re.M)
        until = f"{indent}{' = '.join(names)} = None  # until then\n" if names else ""
        return f"{indent}# TODO {number}: {words}\n{until}"

    return HOLE.sub(question, lesson)


def stop(code: int, why: str) -> NoReturn:
    print(f"learn: {why}", file=sys.stderr)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"torch practice: {message}", file=sys.stderr)
        sys.exit(2)


def main() -> int:
    parser = Parser(prog="./learn torch practice")
    parser.add_argument("--reset", action="store_true", help="throw your file away and begin again")
    parser.add_argument("-v", action="store_true", help="all that the tests say")
    options = parser.parse_args()
    python = python_with_torch()
    if not python:
        stop(3, NONE)
    if options.reset or not MINE.exists():
        MINE.parent.mkdir(parents=True, exist_ok=True)
        MINE.write_text(skeleton(LESSON.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{MINE.relative_to(ROOT)} is yours: six holes, each a line or a few; the same command judges it")
    print(f"testing YOUR code: {MINE.relative_to(ROOT)}", flush=True)
    environment = {**os.environ, "FA_OWN_OPERATOR": str(MINE)}
    if installed_in(python) and "FLASH_FROM_SCRATCH_LIBRARY" not in environment:
        environment["FLASH_FROM_SCRATCH_INSTALLED"] = "1"
    done = subprocess.run([python, "-m", "unittest", "-v", "test_own_operator"], cwd=HERE / "tests", text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    if options.v:
        print(done.stdout)
    results = RESULT.findall(done.stdout)
    if not results:
        print("it does not run: " + done.stdout.strip().splitlines()[-1])
        return 1
    for name, result in results:
        print(f"  {'right' if result == 'ok' else 'not yet':<8} {name.replace('_', ' ')}")
    if done.returncode:
        first = re.search(r"^\w+(?:\.\w+)*(?:Error|Exception|Failure)[^\n]*", done.stdout, re.M)
        print(first[0] if first else "-v shows what the tests say")
        return 1
    print("all is right: PyTorch can call, differentiate and compile it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
