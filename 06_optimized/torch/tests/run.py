"""Runs the tests with a Python that has PyTorch, wherever one is; 77, and a sentence, if there is none.

    run.py [--library libfa_torch.so | --python] [TEST...]     for example test_values; default: all
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Optional

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SKIPPED = 77
NONE = "no Python here has PyTorch 2.4 or later; ./learn torch brings it, FA_PYTHON names one"
ASK = "import importlib.metadata as m, sys; sys.exit(tuple(int(n) for n in m.version('torch').split('.')[:2]) < (2, 4))"


def python_with_torch() -> Optional[str]:
    candidates = [os.environ.get("FA_PYTHON"), str(ROOT / "build" / "torch" / "env" / "bin" / "python3"), sys.executable,
                  "python3", "/usr/bin/python3"]
    for one in dict.fromkeys(candidate for candidate in candidates if candidate):
        try:  # which version is there takes a moment to ask; to import it takes seconds
            if subprocess.run([one, "-c", ASK], capture_output=True, check=False).returncode == 0:
                return one
        except OSError:
            continue
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--python", action="store_true", help="only print which Python that is")
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args()
    python = python_with_torch()
    if options.python:
        print(python or NONE)
        return 0 if python else 1
    if not python:
        print(f"SKIPPED: {NONE}")
        return SKIPPED
    if options.library:
        os.environ["FLASH_FROM_SCRATCH_LIBRARY"] = str(options.library.resolve())
    tests = options.tests or [file.stem for file in sorted(HERE.glob("test_*.py"))]
    done = subprocess.run([python, "-m", "unittest", "-v", *tests], cwd=HERE, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout, end="", flush=True)
    skipped = re.findall(r"""\.\.\. skipped (['"])(.*)\1""", done.stdout)
    if done.returncode == 0 and skipped and f"Ran {len(skipped)} test" in done.stdout:
        print(f"SKIPPED: {skipped[0][1]}")
        return SKIPPED
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
