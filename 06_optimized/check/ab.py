"""What each technique of a kernel is worth: the kernel with one change each, timed beside it and cuDNN.

    python3 06_optimized/check/ab.py measure results.json      needs nvcc, PyTorch and a GPU of compute capability 9.0
    python3 06_optimized/check/ab.py table results.json        as Markdown
    python3 06_optimized/check/ab.py check                     do the changes in variants.txt still fit the source?

The changes are in variants.txt: of the last kernel of each ladder, of those that are chosen where it is not, and of
rungs whose page asks for one. All
are built first, each into a library of its own. At each setting every result is compared with double precision and with
the unmodified kernel's, at that length and at an odd short one, before anything is timed. Then a kernel, its variants
and cuDNN are timed once a round, in an order drawn anew, as compare.py does; a figure is the median of the ratios,
round by round.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STAGE = ROOT / "06_optimized"
VARIANTS = STAGE / "check" / "variants.txt"
AS_IT_IS = "as it is"
SETTINGS = {"d": ["64", "128", "256"], "mask": ["none", "causal"], "N": ["1024", "4096", "16384"]}
ODD = 321  # a short problem: its last tiles are not full
LADDERS = ("forward", "backward")


@dataclass(frozen=True)
class Kernel:
    launcher: str  # what check/ab.cu calls
    define: str = ""
    others: tuple[str, ...] = ()  # files that it is linked with
    ptxas: str = ""  # what ptxas is known to say of it
    edits: tuple[tuple[list[str], list[str]], ...] = ()  # of all its variants, and of it as it is


# Hopper's blocks alone, with one shape at each d: else a change of D128 would not show where others take its place.
KERNELS = {"forward/hopper.cu": Kernel("launch_hopper", "FA_COUNTS", edits=((["p.Nk >= 8192 &&"], ["false &&"]),
                                                                           (["p.Nk >= 6144 ?"], ["false ?"]))),
           "forward/fa2.cu": Kernel("launch_fa2", ptxas="spills"),
           "forward/3_swizzle.cu": Kernel("launch_swizzle"),
           "forward/10_pingpong.cu": Kernel("launch_no_lock"),
           "forward/11_overlap.cu": Kernel("launch_overlap"),
           "forward/12_rows.cu": Kernel("launch_rows"),
           "backward/hopper.cu": Kernel("launch_backward_hopper", "FA_ADDS_DQ", ("backward/0_around.cu",)),
           "backward/3_two_kernels_queries.cu": Kernel("launch_backward_two_kernels", "",
                                                       ("backward/0_around.cu", "backward/3_two_kernels.cu",
                                                        "backward/3_two_kernels_wide.cu"))}


class Bad(Exception):
    pass


# ---------------------------------------------------------------- variants

@dataclass
class Variant:
    name: str
    file: str  # of the kernel, relative to the stage
    row: str = ""
    table: str = ""
    at: dict[str, list[str]] = field(default_factory=dict)
    define: str = ""
    ptxas: str = ""  # what ptxas is known to say: spills, serialized
    edits: list[tuple[list[str], list[str]]] = field(default_factory=list)

    @property
    def ladder(self) -> str:
        return self.file.split("/")[0]

    def fits(self, d: str, mask: str, n: str) -> bool:
        return all(value in self.at.get(key, SETTINGS[key]) for key, value in (("d", d), ("mask", mask), ("N", n)))


def settings(text: str, bad: str) -> dict[str, list[str]]:
    found = {}
    for part in text.split(","):
        key, *values = part.split()
        if key not in SETTINGS or not values or not set(values) <= set(SETTINGS[key]):
            raise Bad(f"{bad}cannot read 'at: {text}'")
        found[key] = values
    return found


def parse(file: Path) -> list[Variant]:
    text = re.sub(r"^#.*\n?", "", file.read_text(encoding="utf-8"), flags=re.M)
    found: list[Variant] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        head, *lines = paragraph.strip().split("\n")
        bad = f"{file.name}: {head}: "
        title = re.fullmatch(r"(\w+): ((?:forward|backward)/\w+\.cu)", head)
        if not title or title[1] in (v.name for v in found) or title[2] not in KERNELS:
            raise Bad(f"{bad}a variant begins with `name: file`, a name that is not yet taken and one of "
                      f"{', '.join(KERNELS)}")
        v = Variant(title[1], title[2])
        before = ""
        for line in lines:
            if line[0] in "-+":
                if line[0] == "-" and before != "-":
                    v.edits.append(([], []))
                if not v.edits:
                    raise Bad(f"{bad}a + without a - before it")
                v.edits[-1][line[0] == "+"].append(line[1:].strip())
            elif known := re.fullmatch(r"(row|table|at|define|ptxas): +(.*\S)\s*", line):
                setattr(v, known[1], settings(known[2], bad) if known[1] == "at" else known[2])
            else:
                raise Bad(f"{bad}cannot read '{line}'")
            before = line[0]
        if not v.row or not v.table or not (v.edits or v.define):
            raise Bad(f"{bad}there must be `row:`, `table:`, and a change")
        if any(w.table == v.table and w.file != v.file and w.ladder == v.ladder for w in found):
            raise Bad(f"{bad}the table '{v.table}' is another kernel's")
        found.append(v)
    return found


def changed(v: Variant) -> dict[str, str]:
    """The files that differ, by name relative to the repository. Every - text must be there once, in one of them."""
    kernel = STAGE / v.file
    if not kernel.exists():
        raise Bad(f"{v.name}: there is no {v.file}")
    headers = [*sorted(kernel.parent.glob("*.cuh")), *sorted((STAGE / "ptx").glob("*.cuh"))]
    texts = {path: path.read_text(encoding="utf-8") for path in (kernel, *headers)}
    different = {}
    for old, new in (*KERNELS[v.file].edits, *v.edits):
        pattern = re.compile(r"\s*\n\s*".join(map(re.escape, old)))
        hits = {path: len(pattern.findall(text)) for path, text in texts.items()}
        if sum(hits.values()) != 1:
            raise Bad(f"{v.name}: '{old[0]}' is there {sum(hits.values())} times instead of once, in {v.file} and the "
                      "headers beside it and in ptx/")
        path = next(path for path, count in hits.items() if count)
        texts[path] = pattern.sub(lambda _, new=new: "\n".join(new), texts[path])
        different[str(path.relative_to(ROOT))] = texts[path]
    return different


# ---------------------------------------------------------------- built

def built(folder: Path, v: Variant) -> tuple[Path, str]:
    """The library, and what ptxas had to say. Changed files are found before those of the repository."""
    sys.path.insert(0, str(ROOT / "common" / "cmake"))
    import ptxas
    place, kernel = folder / v.name, KERNELS[v.file]
    place.mkdir()
    for name, text in changed(v).items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text, encoding="utf-8")
    library = place / "kernel.so"
    command = ["nvcc", "-std=c++20", "-O3", "-diag-suppress=554", "-gencode", "arch=compute_90a,code=sm_90a", "-shared",
               "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v", f"-I{place}", f"-I{ROOT}",
               f'-DFA_KERNEL="06_optimized/{v.file}"', f"-DFA_LAUNCHER={kernel.launcher}",
               *(f"-D{name}" for name in (f"FA_{v.ladder.upper()}", kernel.define, v.define) if name),
               str(STAGE / "check" / "ab.cu"), *(str(STAGE / other) for other in kernel.others), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Bad(f"{v.name}: {done.stderr.strip()[:2000]}")
    said = []
    if any(k.spills for k in ptxas.parse(done.stderr)):
        said.append("spills")
    if ptxas.LOSS.search(done.stderr):
        said.append("serialized")
    text = ", ".join(said)
    if text != v.ptxas:
        print(f"{v.name}: ptxas: {text or 'nothing to say'}; variants.txt expects '{v.ptxas}'", file=sys.stderr)
    return library, text


# ---------------------------------------------------------------- right, and how fast

class Case:
    """Tensors of a setting, one place for everybody's results, and the runners, which are contenders.Runner."""

    def __init__(self, kernel: str, n: int, d: int, causal: bool) -> None:
        from contenders import WRITES, Setting, Tensors, call_of, torch
        self.torch = torch
        s = Setting.of(kernel, n, d, causal, 1, "bf16")
        self.tensors = t = Tensors(s)
        self.results = {name: t.place_for(name) for name in WRITES[kernel]}
        self.given: dict[str, Any] = {}  # to a backward: PyTorch's O and LSE
        if kernel == "backward":
            o, lse = torch.ops.aten._scaled_dot_product_flash_attention(t.q, t.k, t.v, 0.0, causal)[:2]
            self.given = {"O": o.contiguous(), "LSE": lse[..., :n].contiguous()}
        rows = (n + 127) // 128 * 128 * s.batch * s.heads
        padded = 64 if d <= 64 else 128 if d <= 128 else 256
        self.given["scratch"] = torch.full((rows * (padded + 3) if kernel == "backward" else 64,), 77, device="cuda",
                                           dtype=torch.int32)
        self.call = call_of(t, self.given | self.results)

    def runner(self, name: str, library: ctypes.CDLL) -> Any:
        from contenders import Runner
        library.fa_ab_launch.restype = ctypes.c_char_p
        function, call = library.fa_ab_launch, ctypes.byref(self.call)

        def launch(count: int) -> None:
            for _ in range(count):
                if error := function(call):
                    raise Bad(f"{name}: {error.decode()}")

        def forget() -> None:
            for result in self.results.values():
                result.fill_(float("nan"))
        return Runner(name, launch, lambda: self.results, forget)

    def check(self, runners: Sequence[Any]) -> None:
        """Some heads against double precision; all rows against the unmodified kernel, which is the first."""
        from precision import RELATIVE_L2, expected, fault
        want = expected(self.tensors)
        first: dict[str, Any] = {}
        for r in runners:
            r.forget()
            r.launch(1)
            self.torch.cuda.synchronize()
            if wrong := fault(r, want, "bf16"):
                raise Bad(f"{r.name}: {wrong}")
            first = first or {name: result.clone() for name, result in self.results.items()}
            for name, result in self.results.items():
                a, b = result.float(), first[name].float()
                if name == "LSE":
                    a, b = a[..., None], b[..., None]
                size = b.norm(dim=-1)
                if not bool(((a - b).norm(dim=-1) <= 5 * RELATIVE_L2["bf16"] * (size + size.mean())).all()):
                    raise Bad(f"{r.name}: {name} is not that of the unmodified kernel")


def measure(options: argparse.Namespace) -> None:
    import compare
    from peers import torch, write_whole
    if not torch.cuda.is_available():
        raise Bad("PyTorch finds no GPU")
    chosen = [v for v in parse(VARIANTS) if v.ladder == options.kernel]
    if options.only is not None:
        unknown = set(options.only) - {v.name for v in chosen}
        if unknown:
            raise Bad(f"no variant of that name: {', '.join(sorted(unknown))}")
        chosen = [v for v in chosen if v.name in options.only]
    bases = {file: Variant(f"as_it_is_{Path(file).stem}", file, row=AS_IT_IS, ptxas=KERNELS[file].ptxas)
             for file in dict.fromkeys(v.file for v in chosen)}
    everybody = (*bases.values(), *chosen)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_properties(0).name, "torch": torch.__version__, "commit": compare.commit(),
        "cudnn": str(torch.backends.cudnn.version()), "kernel": options.kernel,
        "method": f"{options.rounds} rounds after {options.burn_in}, blocks of {options.block:g} ms, order drawn anew, "
                  f"an untimed launch before each block, {options.chip}",
        "variants": {}, "rows": []}
    with tempfile.TemporaryDirectory() as name:
        with ThreadPoolExecutor() as pool:
            jobs = {v.name: pool.submit(built, Path(name), v) for v in everybody}
            libraries = {}
            for v in everybody:
                path, said = jobs[v.name].result()
                libraries[v.name] = ctypes.CDLL(str(path))
                result["variants"][v.name] = {"file": v.file, "row": v.row, "table": v.table, "ptxas": said}
        print(f"{len(libraries)} kernels built", flush=True)
        random.seed(options.seed)
        torch.manual_seed(options.seed)
        for file, d, mask, n in itertools.product(bases, options.d, options.mask, options.N):
            if here := [v for v in chosen if v.file == file and v.fits(d, mask, n)]:
                measured(options, result, (d, mask, n), [bases[file], *here], libraries)
                write_whole(options.json, (json.dumps(result, indent=1) + "\n").encode())
    print(options.json)


def measured(options: argparse.Namespace, result: dict[str, Any], setting: tuple[str, str, str],
             variants: Sequence[Variant], libraries: dict[str, ctypes.CDLL]) -> None:
    import compare
    from contenders import peer
    d, mask, n = setting
    for length in (ODD, int(n)):
        case = Case(options.kernel, length, int(d), mask == "causal")
        runners = [case.runner(v.name, libraries[v.name]) for v in variants]
        case.check(runners)
    case.torch.cuda.empty_cache()
    cudnn = peer("cudnn", case.tensors)
    times = compare.rounds_of([*runners, cudnn], options.chip, options)
    ratio = lambda a, b: statistics.median(y / x for x, y in zip(times[a], times[b]))  # noqa: E731  speed of a, of b's
    texts = []
    for v in variants:
        row = {"variant": v.name, "d": d, "mask": mask, "N": n, "ms": statistics.median(times[v.name]),
               "of_unmodified": ratio(v.name, variants[0].name), "of_cudnn": ratio(v.name, cudnn.name)}
        result["rows"].append(row)
        texts.append(f"{v.name} {row['of_cudnn' if v is variants[0] else 'of_unmodified']:.3f}")
    print(f"d {d}, {mask}, N {n}: " + ", ".join(texts), flush=True)


# ---------------------------------------------------------------- as a table

def tables(data: dict[str, Any], to: str = "unmodified") -> dict[str, list[list[str]]]:
    """For each `table:` of variants.txt its header and its rows; a cell is the ratios by length."""
    by: dict[tuple[str, str, str], dict[str, dict]] = {}
    for row in data["rows"]:
        by.setdefault((row["variant"], row["d"], row["mask"]), {})[row["N"]] = row
    lengths = [n for n in SETTINGS["N"] if any(n in some for some in by.values())]
    found = {}
    for name in dict.fromkeys(v["table"] for v in data["variants"].values() if v["table"]):
        rows = [key for key, v in data["variants"].items() if v["table"] == name]
        file = data["variants"][rows[0]]["file"]
        base = next(key for key, v in data["variants"].items() if v["file"] == file and not v["table"])
        columns = [(d, mask) for d in ("128", "64", "256") for mask in SETTINGS["mask"]
                   if any((key, d, mask) in by for key in rows)]
        header = [f"d {d}{', causal' if mask == 'causal' else ''}" for d, mask in columns]
        found[name] = [[f"N = {' / '.join(lengths)}", *header]]
        for key in (base, *rows):
            v = data["variants"][key]
            which = "of_cudnn" if to == "cudnn" or key == base else "of_unmodified"
            cells = []
            for d, mask in columns:
                some = by.get((key, d, mask))
                figures = [f"{some[n][which]:.2f}" if n in some else "–" for n in lengths] if some else ["–"]
                cells.append(" / ".join(figures))
            title = v["row"] + (", relative to cuDNN" if key == base else "")
            news = v["ptxas"] if v["ptxas"] != data["variants"][base]["ptxas"] else ""
            found[name].append([f"{title}{' (' + news + ')' if news else ''}", *cells])
    return found


def table(path: Path, to: str) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    for name, ((of, *header), *rows) in tables(data, to).items():
        print(f"**{name}**, {of}\n")
        print("| | " + " | ".join(header) + " |")
        print("| --- |" + " --- |" * len(header))
        for cells in rows:
            print("| " + " | ".join(cells) + " |")
        print()
    relative = "cuDNN" if to == "cudnn" else "the kernel as it is"
    print(f"Speed relative to {relative}. {data['device']}, {data['method']}; PyTorch {data['torch']}, cuDNN "
          f"{data['cudnn']}, {data['commit']}.")


def words(allowed: Sequence[str] | None = None) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        values = [part for part in text.split(",") if part]
        if allowed and not set(values) <= set(allowed):
            raise argparse.ArgumentTypeError(f"'{text}': any of {', '.join(allowed)}")
        return values
    return read


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    one = modes.add_parser("measure")
    one.add_argument("json", type=Path)
    one.add_argument("--kernel", choices=LADDERS, default="forward", help="those of this ladder")
    one.add_argument("--only", type=words(), metavar="no_turns,one_Q", help="these variants (default: all)")
    for name, values in SETTINGS.items():
        one.add_argument(f"--{name}", type=words(values), default=values, metavar=",".join(values))
    one.add_argument("--chip", choices=("hot", "cool"), default="hot")
    one.add_argument("--rounds", type=int, default=15)
    one.add_argument("--turns", type=int, default=1, help="of a hot round, which is their mean")
    one.add_argument("--burn-in", type=int, default=3, help="rounds that are not kept")
    one.add_argument("--block", type=float, default=5, help="milliseconds of launches per timing")
    one.add_argument("--gap", type=float, default=25, help="idle milliseconds before a cool block")
    one.add_argument("--seed", type=int, default=1)
    one = modes.add_parser("table")
    one.add_argument("json", type=Path)
    one.add_argument("--to", choices=("unmodified", "cudnn"), default="unmodified", help="what speeds are relative to")
    modes.add_parser("check")
    options = parser.parse_args()
    try:
        if options.mode == "measure":
            measure(options)
        elif options.mode == "table":
            table(options.json, options.to)
        else:
            for file, kernel in KERNELS.items():
                for name in (file, *kernel.others):
                    if not (STAGE / name).is_file():
                        raise Bad(f"there is no {name}")
            for v in parse(VARIANTS):
                changed(v)
    except (Bad, OSError, RuntimeError) as error:
        print(f"ab.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
