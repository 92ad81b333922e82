"""Runs a program, which must succeed and print what the page beside it quotes of it, if it quotes anything.

    python3 common/tests/quoted.py build/04_cuda_forward/vector_add_on_cpu 04_cuda_forward/warmup/README.md

A quotation stands behind the program's name, without what it was built for; its first line is the command:

    <!-- output vector_add -->
    ```text
    $ build/04_cuda_forward/vector_add_on_cpu
    ...                     what it prints, line for line
    ```
    <!-- end -->

A figure behind a ~ is rounding, which differs between computers: it may be up to twice or half of what is quoted.

Exits with what the program exits with, and with 1 if the lines differ.
"""

import re
import subprocess
import sys
from pathlib import Path

QUOTATION = re.compile(r"^<!-- output (?P<program>\S+) -->\n```text\n\$ [^\n]*\n(?P<lines>.*?)^```\n<!-- end -->$",
                       re.M | re.S)
ABOUT = re.compile(r" *~(\d[\d.]*(?:e[+-]\d+)?)")


def same(quoted: str, printed: str) -> bool:
    pairs = [sorted(map(float, pair)) for pair in zip(ABOUT.findall(quoted), ABOUT.findall(printed))]
    return (ABOUT.sub(" ~", quoted) == ABOUT.sub(" ~", printed)
            and all(large <= 2 * small for small, large in pairs))


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: quoted.py PROGRAM PAGE.md", file=sys.stderr)
        return 2
    program, page = map(Path, sys.argv[1:])
    for path in (program, page):
        if not path.is_file():
            print(f"quoted.py: {path}: no such file", file=sys.stderr)
            return 3
    done = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode:
        return done.returncode if done.returncode > 0 else 1  # a signal
    text = page.read_text(encoding="utf-8")
    quotations = list(QUOTATION.finditer(text))
    if len(quotations) != len(re.findall("^<!-- output", text, re.M)):
        print(f"{page}: behind each mark stands a block, and its end", file=sys.stderr)
        return 1
    for found in quotations:
        if found["program"] == re.sub("_on_[cg]pu$", "", program.name) and not same(found["lines"], done.stdout):
            print(f"{page} quotes instead:\n{found['lines']}", end="", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
