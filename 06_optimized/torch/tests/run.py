"""Runs the tests with a Python that has PyTorch, wherever one is; 77, and a sentence, if there is none.

    run.py [--library libfa_torch.so | --python] [TEST...]     for example test_values; default: all
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Optional

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SKIPPED = 77
NONE = "no Python here has PyTorch 2.4 or later; ./learn torch brings it, FA_PYTHON names one"
LONG = ["test_train", "test_walks", "test_generate", "test_citizen"]
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


def installed_in(python: str) -> bool:
    """It is that of ./learn torch, and pip has put the package there; else that of this folder is meant."""
    place = ROOT / "build" / "torch" / "env"
    return python.startswith(str(place)) and any(place.glob("lib/python*/site-packages/flash_from_scratch"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--python", action="store_true", help="only print which Python that is")
    parser.add_argument("--installed", action="store_true", help="only: 0 if pip has put the package into that Python")
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args()
    python = python_with_torch()
    if options.python:
        print(python or NONE)
        return 0 if python else 1
    if options.installed:
        return int(not python or not installed_in(python))
    if not python:
        print(f"SKIPPED: {NONE}")
        return SKIPPED
    library = options.library or os.environ.get("FLASH_FROM_SCRATCH_LIBRARY")
    if library:  # tests run in their own folder
        os.environ["FLASH_FROM_SCRATCH_LIBRARY"] = str(Path(library).resolve())
    tests = options.tests or [file.stem for file in sorted(HERE.glob("test_*.py"))]
    # All of them on the emulator: half of the modules in each of two processes, and of those that take long, too. A GPU,
    # and who times it, is left alone.
    tests.sort(key=lambda name: LONG.index(name) if name in LONG else len(LONG))
    halves = 1 if len(tests) == 1 or shutil.which("nvidia-smi") else min(2, os.cpu_count() or 1)
    running = [subprocess.Popen([python, "-m", "unittest", "-v", *tests[i::halves]], cwd=HERE, stdout=subprocess.PIPE,
                                env=os.environ | ({"OMP_WAIT_POLICY": "passive"} if halves > 1 else {}),
                                stderr=subprocess.STDOUT, text=True) for i in range(halves)]
    with ThreadPoolExecutor() as readers:
        spoken = list(zip(running, readers.map(lambda one: one.communicate()[0], running)))
    said = "".join(words for _, words in sorted(spoken, key=lambda one: one[0].returncode != 0))  # what failed is last
    print(said, end="", flush=True)
    skipped = re.findall(r"""\.\.\. skipped (['"])(.*)\1""", said)
    failed = any(one.returncode for one in running)
    if not failed and skipped and sum(int(count) for count in re.findall(r"^Ran (\d+) test", said, re.M)) == len(skipped):
        print(f"SKIPPED: {skipped[0][1]}")
        return SKIPPED
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
