"""Measures the ring, its rivals and PyTorch's context parallelism on this host's GPUs.

    python3 06_optimized/ring/check/ring_bench.py BUILD OUT.json --gpus 2 [--seconds 200]
    python3 06_optimized/ring/check/ring_bench.py BUILD OUT.json --gpus 2 --quick    results checked; a first look
    python3 06_optimized/ring/check/ring_bench.py BUILD OUT.json --add --only alone  what model.py wants, on one GPU

The most telling problems come first. Every row says on what machine, of what commit and with what settings it was
measured; OUT.json is written anew after each program, so that what was measured is kept whatever happens after it.
"""

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def load_launch():
    spec = importlib.util.spec_from_file_location("ring_launch", HERE.parent / "launch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


launch = load_launch()


def commit() -> str:
    if given := os.environ.get("FA_COMMIT"):
        return given
    said = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=7"], cwd=ROOT, capture_output=True,
                          text=True, check=False)
    return said.stdout.strip() if said.returncode == 0 else "unknown"


def how_connected() -> str:
    try:
        said = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False, timeout=20)
        return said.stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known: {error}"


# Options of the program, the share of the budget they may take, and whether PyTorch is asked for the same.
ALL = "ring,gather,heads"
R3, R6 = ["--rounds", "3"], ["--rounds", "6"]
GRID = [
    ("causal, groups of 1", ["--length", "131072,32768,65536", "--causal", "--kind", ALL, "--backward", *R6], 0.28,
     True),
    ("no mask, groups of 1", ["--length", "131072,32768", "--contiguous", "--kind", ALL, "--backward", *R6], 0.26,
     True),
    ("causal, short", ["--length", "2048,4096,8192,16384", "--causal", "--kind", ALL, "--backward", *R3], 0.1, False),
    ("causal, long", ["--length", "262144", "--causal", "--kind", "ring,gather", "--backward", "--rounds", "2"],
     0.14, False),
    ("causal, groups of 8", ["--length", "131072,32768", "--key-heads", "2", "--causal", "--kind", ALL, "--backward",
                             *R3], 0.1, False),
    ("causal, the longest", ["--length", "524288", "--causal", "--kind", "ring", "--backward", "--rounds", "1",
                         "--no-whole"], 0.12, False),
    ("no mask, long", ["--length", "262144,524288", "--contiguous", "--kind", "ring", "--rounds", "2", "--no-whole"],
     0.1, False),
    ("no mask, groups of 8", ["--length", "131072,32768", "--key-heads", "2", "--contiguous", "--kind", ALL,
                              "--backward", *R3], 0.1, True),
    ("causal, groups of 8, long", ["--length", "262144", "--key-heads", "2", "--causal", "--kind", ALL, "--backward",
                                   "--rounds", "2"], 0.1, False),
    ("no mask, the rest", ["--length", "65536,262144", "--contiguous", "--kind", ALL, "--backward", "--rounds", "2",
                           "--no-whole"], 0.2, False),
]
WITH_TIMELINE = ("causal, groups of 1", "causal, short", "causal")
# One process as a rank of P, without messages: its times are the model's, at 1,024 to 262,144 tokens a rank; and its
# memory. The last number is the share of the time again.
TOKENS = [1024 << k for k in range(7)]
ALONE = [(f"alone, {words}, {P} ranks", ["--alone", str(P), "--length", ",".join(str(P * n) for n in TOKENS), *options,
                                         "--backward", "--no-whole", *R3], 0.12)
         for words, options in (("causal", ["--causal"]), ("no mask", ["--contiguous"]),
                                ("causal, groups of 8", ["--causal", "--key-heads", "2"])) for P in (2, 4)]
ALONE += [("alone, causal, longest", ["--alone", "2", "--length", "262144,524288", "--causal", "--backward", "--no-whole",
                                      "--rounds", "2"], 0.2),
          ("alone, no mask, longest", ["--alone", "2", "--length", "262144,524288", "--contiguous", "--no-whole", "--rounds",
                                       "2"], 0.1)]
ALONE += [(f"alone, memory, {P} ranks", ["--alone", str(P), "--length", ",".join(str(N) for N in lengths), "--causal",
                                         "--backward", "--rounds", "0"], 0.05)
          for P, lengths in ((1, [32768, 131072]), (2, [32768, 131072]), (4, [32768, 131072, 524288]),
                             (8, [32768, 131072, 524288, 1048576]), (16, [32768, 131072, 524288, 1048576]),
                             (32, [131072, 524288, 1048576]))]
CHECKS = [
    ("checked, causal zigzag", ["--length", "2048,2051", "--heads", "8", "--key-heads", "8,2", "--causal", "--kind",
                                ALL]),
    ("checked, no mask", ["--length", "2048,1025", "--heads", "8", "--key-heads", "8,2", "--contiguous", "--kind",
                          ALL]),
    ("checked, fp16, d 64", ["--length", "2048", "--heads", "4", "--key-heads", "2", "--masks", "none,causal", "--kind",
                             ALL, "--type", "fp16", "--head-dim", "64"]),
    ("checked, larger", ["--length", "16384", "--heads", "4", "--key-heads", "2", "--causal", "--kind", ALL]),
]
QUICK = [
    ("causal", ["--length", "32768,131072", "--causal", "--kind", ALL, "--backward", "--rounds", "3"], 0.3, False),
    ("no mask", ["--length", "131072", "--contiguous", "--kind", ALL, "--rounds", "3"], 0.2, False),
]


class Bench:
    def __init__(self, asked):
        self.asked, self.begun = asked, time.monotonic()
        self.program = launch.program(asked.build, asked.cpu)
        self.found = {"commit": commit(), "date": datetime.date.today().isoformat(), "gpus": asked.gpus,
                      "connected": "" if asked.cpu else how_connected(), "rows": [], "timelines": [], "failures": []}
        if asked.add:
            self.found = {**json.loads(asked.out.read_text(encoding="utf-8")), "failures": []}
        self.kept = tempfile.TemporaryDirectory()  # as long as this object
        self.folder = Path(self.kept.name)

    def left(self) -> float:
        return self.asked.seconds - (time.monotonic() - self.begun)

    def save(self) -> None:
        beside = self.asked.out.with_suffix(".part")
        beside.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self.asked.out)

    def ring(self, title: str, options: list, seconds: float, timeline: bool = False, ranks: int = 0) -> None:
        if seconds < 3:
            self.found["failures"].append({"title": title, "why": "no time was left"})
            return
        out, steps = self.folder / "ring.json", self.folder / "steps.json"
        for file in (out, steps):
            file.unlink(missing_ok=True)
        command = [str(self.program), *options, "--json", str(out), "--seconds", f"{seconds:.0f}"]
        if timeline:
            command += ["--timeline", str(steps)]
        print(f"## {title}: {' '.join(command[1:])}", flush=True)
        # A problem that has begun comes to its end; a program that hangs does not.
        code, sentence = launch.run(command, ranks or self.asked.gpus, limit=seconds + 60)
        if code != 0:
            self.found["failures"].append({"title": title, "options": options, "exit": code, "why": sentence})
            print(sentence or f"exit code {code}", flush=True)
        self.keep(title, out, options)
        if steps.exists():
            self.found["timelines"] += json.loads(steps.read_text(encoding="utf-8"))
        self.save()

    def keep(self, title: str, out: Path, options: list) -> None:
        if not out.exists():
            return
        read = json.loads(out.read_text(encoding="utf-8"))
        rows = read.pop("rows")
        about = {"title": title, "options": options, **read}
        if about.get("commit") in (None, "", "unknown"):
            about["commit"] = commit()
        self.found["rows"] += [{**about, **row} for row in rows]

    def torch(self, title: str, options: list, seconds: float) -> None:
        if seconds < 8:
            self.found["failures"].append({"title": f"PyTorch, {title}", "why": "no time was left"})
            return
        out = self.folder / "torch.json"
        out.unlink(missing_ok=True)
        theirs, k = [], 0
        while k < len(options):
            option = options[k]
            if option == "--causal":
                theirs += ["--masks", "causal"]
            elif option == "--backward":
                theirs.append(option)
            elif option in ("--length", "--key-heads", "--rounds", "--type", "--head-dim"):
                theirs += options[k:k + 2]
            k += 2 if option.startswith("--") and k + 1 < len(options) and not options[k + 1].startswith("--") else 1
        command = [self.asked.python, "-m", "torch.distributed.run", "--nproc-per-node", str(self.asked.gpus),
                   "--master-port", str(launch.free_port()), str(HERE / "ring_torch.py"), *theirs, "--json", str(out),
                   "--seconds", f"{seconds:.0f}"]
        print(f"## PyTorch, {title}: {' '.join(command[1:])}", flush=True)
        # NVLS is off in all that is measured here (nccl.cpp says why).
        process = subprocess.Popen(command, env={"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "4", **os.environ},
                                   stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            _, errors = process.communicate(timeout=seconds + 60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            _, errors = process.communicate()
            errors += "\nit was ended: its time was over"
        if process.returncode != 0:
            lines = [line.strip() for line in errors.splitlines() if "Error" in line or "ended" in line]
            why = (lines or errors.strip().splitlines() or ["no word"])[-1][:400]
            self.found["failures"].append({"title": f"PyTorch, {title}", "exit": process.returncode, "why": why})
            print(why, flush=True)
        if out.exists():
            read = json.loads(out.read_text(encoding="utf-8"))
            if "refused" in read:
                self.found["failures"].append({"title": f"PyTorch, {title}", "why": read["refused"]})
            self.found["rows"] += [{"title": title, "commit": commit(),
                                    "machines": [read.get("machine", "")] * self.asked.gpus,
                                    "messages": f"PyTorch {read.get('version')}, NCCL {read.get('nccl')}", **row}
                                   for row in read["rows"]]
        self.save()

    def run(self) -> int:
        checks = [(title, [*options, "--backward", "--check", "--rounds", "0"]) for title, options in CHECKS]
        small = ["--head-dim", "32"] if self.asked.cpu else []
        if self.asked.quick or self.asked.checks:
            for title, options in checks[:1] if self.asked.cpu else checks:
                self.ring(title, [*options, *small], min(self.left(), max(10, 0.1 * self.asked.seconds)))
        grid = QUICK if self.asked.quick else [] if self.asked.only_checks else GRID
        for title, options, share, peer in grid:
            if self.asked.only not in title:
                continue
            if self.asked.cpu:
                options = ["--length", "512", "--heads", "4", *small, *options[2:]]
                if "--key-heads" not in options:
                    options += ["--key-heads", "2"]
            budget = min(self.left(), share * self.asked.seconds)
            # PyTorch has a part of a problem's time, for itself.
            with_peer = peer and not self.asked.cpu and not self.asked.no_torch
            self.ring(title, options, budget * (0.6 if with_peer else 1), timeline=title in WITH_TIMELINE)
            if with_peer:
                self.torch(title, options, min(self.left(), share * self.asked.seconds * 0.4))
        asked = self.asked
        for title, options, share in [] if asked.quick or asked.only_checks or asked.cpu or asked.no_alone else ALONE:
            if self.asked.only in title:
                self.ring(title, options, min(self.left(), share * self.asked.seconds), ranks=1)
        self.save()
        wrong = [row for row in self.found["rows"] if row.get("check", {}).get("right") is False]
        print(f"{len(self.found['rows'])} rows in {self.asked.out}, {len(self.found['failures'])} failures, "
              f"{len(wrong)} wrong results, {time.monotonic() - self.begun:.0f} s")
        for failure in self.found["failures"]:
            print(f"  {failure['title']}: {failure['why']}")
        return 1 if wrong or not self.found["rows"] else 0


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("build", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--quick", action="store_true", help="results checked, and a few problems; 40 s")
    parser.add_argument("--checks", action="store_true", help="results checked before the grid")
    parser.add_argument("--only-checks", action="store_true")
    parser.add_argument("--only", default="", metavar="WORDS", help="problems with these words in their titles")
    parser.add_argument("--add", action="store_true", help="to what OUT.json holds")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--no-alone", action="store_true", help="not one process that plays a rank of several")
    parser.add_argument("--cpu", action="store_true", help="small problems on the CPU, to try this script")
    parser.add_argument("--python", default=sys.executable, help="a Python that has PyTorch")
    asked = parser.parse_args()
    asked.checks = asked.checks or asked.only_checks
    asked.seconds = asked.seconds or (40 if asked.quick else 200)
    sys.exit(Bench(asked).run())


if __name__ == "__main__":
    main()
