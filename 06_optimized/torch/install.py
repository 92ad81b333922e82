"""./learn torch: an environment with PyTorch and these kernels, under build/torch/env; and its tests.

Where pip reaches nothing, PyTorch must be there already, and the library is built by CMake alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "torch"
ENVIRONMENT = FOLDER / "env"
PYTHON = ENVIRONMENT / "bin" / "python3"
WITHOUT_GPU = "https://download.pytorch.org/whl/cpu"  # a tenth of the size
MISSING = 3


def shown(*command: str) -> bool:
    print("+", " ".join(command).replace(str(ROOT) + "/", ""), flush=True)
    return subprocess.run(command, check=False).returncode == 0


def has(python: str, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


def has_torch(python: str) -> bool:
    return has(python, "torch")


def gpu_answers() -> bool:
    smi = shutil.which("nvidia-smi")
    return bool(smi) and subprocess.run([smi, "-L"], capture_output=True, check=False).returncode == 0


def stop(why: str) -> NoReturn:
    print(f"learn: {why}", file=sys.stderr)
    sys.exit(MISSING)


def with_torch() -> str:
    """A Python with PyTorch: that of the environment, which uses what the system has, else fetches it."""
    if PYTHON.exists() and has_torch(str(PYTHON)):
        return str(PYTHON)
    there = has_torch(sys.executable)
    if os.environ.get("FA_NO_INSTALL") == "1":
        if there:
            return sys.executable
        stop("no Python here has PyTorch, and FA_NO_INSTALL=1 is set; FA_PYTHON names a Python that has it")
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    if not shown(sys.executable, "-m", "venv", *(["--system-site-packages"] if there else []), str(ENVIRONMENT)):
        if there:
            return sys.executable
        stop("Python's venv is missing; Debian and Ubuntu: apt-get install python3-venv")
    if there or has_torch(str(PYTHON)):
        return str(PYTHON)
    pip = (str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check", "torch", "numpy")
    print("PyTorch comes into build/torch/env", flush=True)
    if gpu_answers() or not shown(*pip, "--retries", "0", "--timeout", "15", "--index-url", WITHOUT_GPU):
        if not shown(*pip):
            shutil.rmtree(ENVIRONMENT, ignore_errors=True)
            stop("pip could not bring PyTorch, its own words are above; FA_PYTHON names a Python that has it")
    return str(PYTHON)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"torch: {message}", file=sys.stderr)
        sys.exit(2)


def main() -> int:
    parser = Parser(prog="./learn torch", usage="./learn torch [--no-tests] [--reset]",
                    description="PyTorch and these kernels in an environment of their own, build/torch/env; then the tests.")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--only-torch", action="store_true", help=argparse.SUPPRESS)  # the download, for .ci/run
    parser.add_argument("--reset", action="store_true", help="throw the environment away first")
    options = parser.parse_args()
    if options.reset:
        shutil.rmtree(FOLDER, ignore_errors=True)
    python = with_torch()
    if options.only_torch:
        return 0
    if python == str(PYTHON) and not has(python, "matplotlib"):  # ./learn train draws, if it can
        shown(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "matplotlib")
    cuda = [] if gpu_answers() else ["-DFA_CUDA=OFF"]  # then kernels run on the emulator
    if not cuda and not any(map(shutil.which, ("nvcc", os.environ.get("CUDACXX", ""), "/usr/local/cuda/bin/nvcc"))):
        print("a GPU answers, but no nvcc is found: the kernels will run on the emulator, and not on the GPU; the CUDA "
              "Toolkit from 12.4 on has it, and CUDACXX says where", flush=True)
    environment = {}
    installed = python == str(PYTHON) and os.environ.get("FA_NO_INSTALL") != "1" and shown(
        python, "-m", "pip", "install", "-q", "--disable-pip-version-check", str(HERE),
        *[f"--config-settings=cmake.define.{one[2:]}" for one in cuda])
    if installed:
        environment = {"FLASH_FROM_SCRATCH_INSTALLED": "1"}
        print(f"in {PYTHON.relative_to(ROOT)}: from flash_from_scratch import attention", flush=True)
    else:
        print("not installed by pip; built by CMake alone", flush=True)
        build = FOLDER / "lib"
        ninja = ["-G", "Ninja"] if shutil.which("ninja") else []
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), *ninja, "-DCMAKE_BUILD_TYPE=Release",
                     "-DBUILD_TESTING=OFF", "-DFA_BENCHMARKS=OFF", "-DFA_MUTANTS=OFF", *cuda]
        make = ("cmake", "--build", str(build), "--target", "stage06_torch", "-j", str(os.cpu_count() or 2))
        if not (shown(*configure) and shown(*make)):
            return 1
        library = next(build.glob("06_optimized/torch/libfa_torch.*"))
        environment = {"FLASH_FROM_SCRATCH_LIBRARY": str(library)}
        print(f"to use it: export PYTHONPATH={HERE} FLASH_FROM_SCRATCH_LIBRARY={library}", flush=True)
    if options.no_tests:
        return 0
    for variable in ("FLASH_FROM_SCRATCH_LIBRARY", "FLASH_FROM_SCRATCH_INSTALLED", "PYTHONPATH"):
        os.environ.pop(variable, None)
    os.environ.update(environment, FA_PYTHON=python)
    return 0 if shown(sys.executable, str(HERE / "tests" / "run.py")) else 1


if __name__ == "__main__":
    sys.exit(main())
