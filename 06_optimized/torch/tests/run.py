"""Runs the tests with a Python that has PyTorch, wherever one is; 77, and a sentence, if there is none.

    run.py [--library libfa_torch.so] [TEST...]     for example test_values; default: all
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Optional

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SKIPPED = 77
NONE = "no Python here has PyTorch 2.4 or later; ./learn torch brings it, FA_PYTHON names one"
ASK = "import sys, torch; sys.exit(tuple(int(n) for n in torch.__version__.split('.')[:2]) < (2, 4))"


def python_with_torch() -> Optional[str]:
    candidates = [os.environ.get("FA_PYTHON"), str(ROOT / "build" / "torch" / "env" / "bin" / "python3"), sys.executable,
                  "python3", "/usr/bin/python3"]
    for one in dict.fromkeys(candidate for candidate in candidates if candidate):
        try:  # to ask whether it is there at all takes a moment, to import it seconds
            there = subprocess.run([one, "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))"], check=False,
                                   capture_output=True).returncode == 0
            if there and subprocess.run([one, "-c", ASK], capture_output=True, check=False).returncode == 0:
                return one
        except OSError:
            continue
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path)
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args()
    python = python_with_torch()
    if not python:
        print(f"SKIPPED: {NONE}")
        return SKIPPED
    if options.library:
        os.environ["FLASH_FROM_SCRATCH_LIBRARY"] = str(options.library.resolve())
    tests = options.tests or [file.stem for file in sorted(HERE.glob("test_*.py"))]
    done = subprocess.run([python, "-m", "unittest", *tests], cwd=HERE, capture_output=True, text=True, check=False)
    print(done.stdout + done.stderr, end="")
    if done.returncode == 0 and "skipped=" in done.stderr and len(tests) == 1:
        ran, skipped = (int(done.stderr.split(word)[1].split()[0].rstrip(")")) for word in ("Ran ", "skipped="))
        if ran == skipped:
            said = subprocess.run([python, "-m", "unittest", "-v", *tests], cwd=HERE, capture_output=True, text=True, check=False)
            print("SKIPPED: " + said.stderr.split("skipped '")[1].split("'")[0])
            return SKIPPED
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
