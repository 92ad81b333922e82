"""./learn ring: starts the program once a rank on this host, and shows what the first rank that failed had to say.

    launch.py --gpus N [options of the program]        a GPU a rank, messages by NCCL
    launch.py --gpus N --cpu [options of the program]  N ranks on the CPU, messages by sockets
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
USAGE = "usage: ./learn ring --gpus N [--cpu] [options of the program; --help lists them]"


VALUED = {"--alone", "--length", "--heads", "--key-heads", "--head-dim", "--type", "--masks", "--kind", "--rounds", "--seconds",
          "--json", "--timeline", "--timeout"}
FLAGS = {"--causal", "--contiguous", "--backward", "--deterministic", "--check", "--no-whole", "--sockets"}


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


def find_nccl() -> "str | None":
    """Where NCCL is, if neither the environment nor the system knows and a Python here has PyTorch's."""
    if os.environ.get("FA_NCCL"):
        return os.environ["FA_NCCL"]
    try:
        ctypes.CDLL("libnccl.so.2")
        return None
    except OSError:
        pass
    ask = "import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])"
    own = ROOT / "build/torch/env/bin/python3"
    for python in dict.fromkeys([sys.executable, os.environ.get("FA_PYTHON", ""), "python3", str(own)]):
        try:
            said = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        found = Path(said.stdout.strip() or "/nowhere") / "lib/libnccl.so.2"
        if said.returncode == 0 and found.exists():
            return str(found)
    return None


def environment(rank: int, ranks: int, port: int, nccl: "str | None") -> dict:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
           "FA_RING_PARENT": os.getpid()}
    if nccl:
        own["FA_NCCL"] = nccl
    left = {name: value for name, value in os.environ.items()
            if name not in ("TORCHELASTIC_USE_AGENT_STORE", "FA_RING_PORT")}
    return {**left, **{name: str(value) for name, value in own.items()}}


class Ranks:
    """The processes of one run. Whatever happens, none is left when it is over."""

    def __init__(self, command: list, ranks: int, output=None, extra: "dict | None" = None):
        self.errors = [tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") for _ in range(ranks)]
        self.processes, self.ends = [], []
        port, nccl = free_port(), find_nccl()
        try:
            for rank in range(ranks):
                # A group of its own: Ctrl-C reaches this process alone, which ends the others.
                self.processes.append(subprocess.Popen(
                    command, env={**environment(rank, ranks, port, nccl), **(extra or {})}, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=self.errors[rank], start_new_session=True))
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        for file in self.errors:
            file.close()

    def wait(self, patience: float, limit: "float | None" = None) -> int:
        """0, or the exit code of the rank that failed. After the first failure the others have `patience` seconds to
        end by themselves, which they do as soon as they hear of it."""
        end = time.monotonic() + limit if limit else None
        try:
            left = set(range(len(self.processes)))
            while left:
                for rank in sorted(left):
                    code = self.processes[rank].poll()
                    if code is None:
                        continue
                    left.discard(rank)
                    if code != 0:
                        self.ends.append((rank, code))
                        soon = time.monotonic() + patience
                        end = min(end, soon) if end else soon
                if left and end and time.monotonic() > end:
                    if not self.ends:
                        self.ends.append((min(left), None))
                    break
                time.sleep(0.02)
        finally:
            self.kill()
        return 0 if not self.ends else self.first()[1] or 124

    def words(self, rank: int) -> str:
        self.errors[rank].seek(0)
        lines = [line.strip() for line in self.errors[rank].read().splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("ring: ")]
        return (ours or lines or [""])[-1]

    def first(self) -> tuple:
        """The rank that failed by itself: killed, or with words of its own; not one that only heard of another."""
        def guilt(end):
            code = end[1]
            return 0 if code is not None and code < 0 else 2 if code in (3, None) else 1
        return min(self.ends, key=guilt)

    def sentence(self) -> str:
        rank, code = self.first()
        words = self.words(rank)
        if code is None:
            return f"ring: rank {rank} was ended: the time for all of it was over"
        if code < 0:
            heard = [self.words(other) for other, end in self.ends if end == 3]
            of_it = [text for text in heard if f"rank {rank} " in text]
            name = signal.Signals(-code).name
            return f"ring: rank {rank} was killed by {name}" + (f". {of_it[0]}" if of_it else "")
        if not words:
            return f"ring: rank {rank} ended with exit code {code} and without a word"
        # Wrong options are the same to all.
        of_all = code == 2 and {self.words(other) for other, end in self.ends if end == 2} == {words}
        return words if f"rank {rank}" in words or of_all else f"ring: rank {rank}: {words.removeprefix('ring: ')}"


def run(command: list, ranks: int, patience: float = 30, output=None, limit: "float | None" = None) -> tuple:
    """Exit code, and the sentence of the first rank that failed."""
    started = Ranks(command, ranks, output)
    try:
        code = started.wait(patience, limit)
        return code, started.sentence() if started.ends else ""
    finally:
        started.close()


def program(build: Path, cpu: bool) -> Path:
    return build / "06_optimized" / ("stage06_ring_on_host" if cpu else "stage06_ring")


def gpus_here() -> int:
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in said.stdout.splitlines()) if said.returncode == 0 else 0


def fail(code: int, text: str) -> None:
    print(text, file=sys.stderr)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        fail(2, f"ring: {message}")


def main() -> None:
    parser = Parser(prog="ring", add_help=False, allow_abbrev=False)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--build", type=Path)
    parser.add_argument("--help", action="store_true")
    parser.add_argument("--only-look", action="store_true")  # at the words, before anything is built
    asked, options = parser.parse_known_args()
    if asked.gpus is not None and not 1 <= asked.gpus <= 64:
        parser.error(f"--gpus must be a number from 1 to 64, got {asked.gpus}")
    if not asked.cpu and not asked.help:
        here = gpus_here()
        if here == 0:
            fail(3, "ring: no GPU answers here; --cpu runs the ranks on the CPU")
        if asked.gpus is not None and asked.gpus > here and "--sockets" not in options:
            fail(3, f"ring: --gpus {asked.gpus} wants a GPU a rank, and there {'is' if here == 1 else 'are'} {here}; "
                    "--sockets lets ranks share one, --cpu runs them on the CPU")
        asked.gpus = asked.gpus or here
    ranks = asked.gpus or 2
    words = iter(options)
    for word in words:
        if word not in VALUED | FLAGS:
            parser.error(f"no option '{word}'; --help lists all")
        if word in VALUED and next(words, None) is None:
            parser.error(f"{word} needs a value")
    if asked.only_look:
        return
    if asked.help:
        print(USAGE + "\n")
    build = asked.build or ROOT / "build"
    cpu = asked.cpu or asked.help
    binary = program(build, cpu)
    if asked.build is None:
        if not (build / "build.ninja").exists():
            subprocess.run(["cmake", "--preset", "default"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        made = subprocess.run(["cmake", "--build", "build", "--target", binary.name], cwd=ROOT, check=False,
                              capture_output=True, text=True)
        if made.returncode != 0 and "unknown target" in made.stdout + made.stderr:
            fail(3, "ring: the program for GPUs is not part of this build: nvcc was not found when it was set up")
        if made.returncode != 0:
            print(made.stdout, made.stderr)
            fail(1, f"ring: {binary.name} could not be built; the compiler's own words are above")
    if asked.help:
        sys.exit(subprocess.run([binary, "--help"], check=False).returncode)

    def stop(number, _frame):
        raise SystemExit(128 + number)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    code, sentence = run([str(binary), *options], ranks)
    if sentence:
        print(sentence, file=sys.stderr)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
