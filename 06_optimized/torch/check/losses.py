"""Trains the small model with kernels that are right and with mutants of them, and records the losses.

    python3 06_optimized/torch/check/losses.py OUT.csv [--steps 1000] [--device cpu|cuda] [NAME...]

A name is what `./learn train --attention` takes, with :SEED behind it if not 1; or a mutant, 03/no_rescale_of_o, which
is put where a reader's own file would be; or 03/, the lesson itself there. On a GPU it is the larger model, in bf16.
Everything happens in a copy of what git does not ignore, so nobody's mine/ is touched.
Rows of OUT.csv with the same name, seed and device are replaced, all others stay.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT / "common" / "judge"))
from mutants import apply, find  # noqa: E402

STAGES = {"03": "03_tiled_cpu", "05": "05_cuda_backward"}
MUTANTS = ["03/no_rescale_of_o", "03/full_tiles_only", "03/scale_forgotten", "05/no_delta", "05/row_of_next"]
LESSON = {"03": "tiled_cpu.cpp", "05": "tiled_backward.cpp"}
NAMES = ["sdpa", "sdpa:2", "sdpa:3", "00", "03", "03/", *MUTANTS]
HEADER = ["name", "seed", "device", "step", "loss"]
# Two tiles of keys, so that what happens between tiles is seen.
MODEL = ["--context", "96"]
# Kernels come from the library that is there, the reader's own file from the copy.
RUN = """import sys
from pathlib import Path
course = Path(sys.argv[1])
sys.argv[:2] = ["train.py"]
sys.path.insert(0, str(course / "06_optimized" / "torch"))
from flash_from_scratch._library import library
library().source = course
import train
train.Run(train.arguments()).train()
"""


def copy_of_the_course(to: Path) -> None:
    files = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                           capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def put_mutant(course: Path, stage: str, name: str) -> None:
    """The lesson with one defect, or none, as mine/ of its stage."""
    folder = course / STAGES[stage]
    file = LESSON[stage]
    lines = (folder / file).read_text(encoding="utf-8").split("\n")
    if name:
        mutant = find(folder / "check" / "mutants.txt", name)
        file, (lines, _) = mutant.source, apply(mutant, folder)
    for other in STAGES.values():
        shutil.rmtree(course / other / "mine", ignore_errors=True)
    (folder / "mine").mkdir()
    (folder / "mine" / file).write_text("\n".join(lines), encoding="utf-8")


def train(course: Path, name: str, device: str, steps: int) -> list[tuple[int, float]]:
    attention, _, seed = name.partition(":")
    if "/" in name:
        put_mutant(course, *name.split("/"))
        attention = "mine"
    command = [sys.executable, "-c", RUN, str(course), "--attention", attention, "--steps", str(steps),
               "--device", device, "--seed", seed or "1", *(MODEL if device == "cpu" else [])]
    print(f"## {name}: {' '.join(command[4:])}", flush=True)
    shutil.rmtree(course / "build" / "train", ignore_errors=True)
    subprocess.run(command, check=False)  # one that comes to NaN says so and ends; what it had learned is written
    file = next((course / "build" / "train").glob("*.csv"), None)
    if file is None:
        sys.exit(f"losses.py: {name} has left no losses; its own words are above")
    lines = file.read_text(encoding="utf-8").splitlines()
    return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(lines)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("names", nargs="*", default=NAMES)
    asked = parser.parse_intermixed_args()
    rows = list(csv.DictReader(asked.out.read_text(encoding="utf-8").splitlines())) if asked.out.is_file() else []
    with tempfile.TemporaryDirectory() as folder:
        course = Path(folder)
        copy_of_the_course(course)
        for name in asked.names:
            bare, _, seed = name.partition(":")
            key = [bare, seed or "1", asked.device]
            losses = train(course, name, asked.device, asked.steps)
            rows = [row for row in rows if [row["name"], row["seed"], row["device"]] != key]
            rows += [dict(zip(HEADER, [*key, step, loss])) for step, loss in losses]
            part = asked.out.with_suffix(".part")
            with part.open("w", newline="", encoding="utf-8") as out:
                writer = csv.DictWriter(out, HEADER)
                writer.writeheader()
                writer.writerows(rows)
            os.replace(part, asked.out)


if __name__ == "__main__":
    main()
