"""What the warpgroups of a block do when, and its loader: clock stamps in copies of the rungs, drawn as bars.

    python3 06_optimized/check/timeline.py measure 06_optimized/results/timeline.json     needs nvcc and a GPU of compute capability 9.0
    python3 06_optimized/check/timeline.py draw 06_optimized/results/timeline.json 06_optimized/results/timeline.svg
    python3 06_optimized/check/timeline.py check                     do the rules below still fit the rungs?

`measure --ladder backward` does the same for the backward kernels; `draw` sees from the file which they are.

The lessons stay as they are: stamps are put into a copy, before it is compiled. They disturb: the time with and without
them is measured in the same call, and drawn beside each rung.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAGE = ROOT / "06_optimized"
STAMPS = 600  # of each thread that stamps: 40 steps or more


# ---------------------------------------------------------------- what is stamped, and what is drawn

@dataclass(frozen=True)
class Rule:
    """A stamp before or after each call that the pattern finds.

    `{what}` in the name is the pattern's group of that name. A tagged stamp also notes an address in shared memory,
    that of the barrier: the call's argument that ends in `full`. Asked for and found are paired by it.
    """

    name: str
    where: str
    pattern: str
    tagged: bool = False


@dataclass(frozen=True)
class Function:
    """Whose calls are stamped, into which of the lists, and by which of its threads."""

    name: str
    who: str
    thread: str
    header: str = ""  # where it stands, if not in the rung's own file


@dataclass(frozen=True)
class Bar:
    """From one stamp to the next that ends it."""

    name: str
    begin: str
    end: str
    colour: str
    key: str


@dataclass(frozen=True)
class Rung:
    title: str
    file: str
    functions: tuple[Function, ...]
    flags: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()  # in place of the ladder's
    lacks: tuple[str, ...] = ()  # rules of the ladder that fit nothing here
    at_once: tuple[int, int] = (0, 0)  # queries and keys of a step of all blocks that an SM has; (0, 0): the ladder's
    drawn: bool = True


@dataclass(frozen=True)
class Ladder:
    launch: str  # the prefix of the launch functions
    flags: tuple[str, ...]
    others: tuple[str, ...]  # files that the rungs call
    rungs: dict[str, Rung]
    rules: tuple[Rule, ...]
    at_once: tuple[int, int]  # queries and keys of a step of an SM
    bars: tuple[Bar, ...]
    lanes: tuple[tuple[str, int, tuple[str, ...]], ...]  # label, whose stamps, bars
    loads: dict[str, tuple[str, str]]  # of which barriers (their `what`) the copies are drawn: colour, key
    cycles: int  # drawn


def issued(into: str) -> Rule:
    """A product of wgmma: its first argument is what it adds to. The fence must be the last thing before it."""
    return Rule(f"{into} issued", "before",
                rf"(?:wgmma_fence\(\);\s*)?\bmultiply\w*<[^;()]*>\({into}\b|\bissue_(?:sum|pairs)\({into}\b")


def product(into: str) -> tuple[Rule, Rule]:
    return issued(into), Rule(f"{into} there", "after", rf"\bwgmma_wait<[^;()]*>\({into}\)")


ASKED = Rule("asked", "before", r"\b(?:bring[<(]|bring_keys<Tiles>\(|arrive_expecting\()", tagged=True)
FOUND = Rule("found {what}", "after", r"\bwait\(&shared\.(?P<what>\w*?)_?full\b", tagged=True)

# Products of mma.sync have no request and no wait, and the softmax's instructions lie among them: of those rungs only the
# step is stamped, at the barrier behind which K_j is there (rung 1: behind which nobody reads the one before).
STEP = Rule("step", "before", r"\bcp_async_wait<0>\(\)(?=;\s*__syncthreads\(\);\s*// K_j)|"
                              r"\b__syncthreads\(\)(?=;\s*// \[06\.a\])|\bwait\(&shared\.KV_full, phase\)")


def by_mma(title: str, file: str, kernel: str, at_once: tuple[int, int]) -> Rung:
    function = Function(kernel, "0", "threadIdx.x == 0")
    return Rung(title, f"forward/{file}", (function,), rules=(STEP,), at_once=at_once, drawn=False)


GROUP = Function("compute", "threadIdx.x / 128 - 1", "threadIdx.x % 128 == 0")
LOADER, PUSHERS = 2, 3  # groups are 0 and 1; a pusher for each
LOAD = Function("load", str(LOADER), "true")  # one thread calls it
ROLES = (GROUP, LOAD)

FORWARD = Ladder(
    launch="launch_",
    flags=(),
    others=(),
    rungs={
        # Three blocks of 64 queries, then two, then two of 128: what registers and shared memory have room for.
        "mma": by_mma("1 mma", "1_mma.cu", "mma_kernel", (3 * 64, 64)),
        "cp_async": by_mma("2 cp.async", "2_cp_async.cu", "cp_async_kernel", (2 * 64, 64)),
        "swizzle": by_mma("3 swizzle", "3_swizzle.cu", "swizzle_kernel", (2 * 64, 64)),
        "wide_warps": by_mma("4 wide warps", "4_wide_warps.cu", "wide_warps_kernel", (2 * 128, 64)),
        "two_loops": by_mma("5 two loops", "5_two_loops.cu", "two_loops_kernel", (2 * 128, 64)),
        "fa2": by_mma("fa2", "fa2.cu", "fa2_kernel", (2 * 128, 64)),
        "tma": by_mma("6 TMA", "6_tma.cu", "tma_kernel", (2 * 64, 128)),
        "wgmma": Rung("7 wgmma", "forward/7_wgmma.cu", (Function("wgmma_kernel", "0", "threadIdx.x == 0"),)),
        "ring": Rung("8 ring", "forward/8_ring.cu", (Function("compute", "0", "threadIdx.x == 0"), LOAD)),
        "specialised": Rung("9 specialised", "forward/9_specialised.cu", ROLES),
        "lock": Rung("10 lock", "forward/10_pingpong.cu", ROLES),
        "no_lock": Rung("10 no lock", "forward/10_pingpong.cu", ROLES),
        "overlap": Rung("11 overlap", "forward/11_overlap.cu", ROLES),
        "rows": Rung("12 rows", "forward/12_rows.cu", ROLES),
        "persistent": Rung("13 persistent", "forward/13_persistent.cu", ROLES),
        "longest_first": Rung("14 longest first", "forward/14_longest_first.cu", ROLES, ("-DFA_WITH_COUNTER",), drawn=False),
        "hopper": Rung("hopper", "forward/hopper.cu", ROLES, ("-DFA_WITH_COUNTER",)),
    },
    rules=(*product("S"), *product("O"), Rule("scaled", "after", r"\bscale_rows\(O, alpha\)"), ASKED, FOUND),
    at_once=(128, 128),
    bars=(
        Bar("S", "S issued", "S there", "#0072b2", "Q K^T: issue until S is there"),
        Bar("PV", "O issued", "O there", "#56b4e9", "P V: issue until O is waited for"),
        Bar("softmax", "S there", "scaled", "#e69f00", "softmax: from S to the scaled O"),
    ),
    lanes=(("1", 0, ("S", "PV", "softmax")), ("2", 1, ("S", "PV", "softmax"))),
    loads={"K": ("#009e73", "K: asked for until found"), "V": ("#cc79a7", "V: the same"),
           "KV": ("#666666", "K and V by one barrier (rung 7)")},
    cycles=9000,
)

PUSH = Function("push", f"{PUSHERS} + threadIdx.x / 32", "true")  # stamps: its elected thread
SHARED_LOAD = replace(LOAD, header="backward/bring.cuh")
GROUP_BARS = ("S", "dP", "P", "dV", "dS", "dQ", "dK", "hand")
BACKWARD = Ladder(
    launch="launch_backward_",
    flags=("-DFA_BACKWARD",),
    others=("backward/0_around.cu", "backward/2_swizzle.cu", "backward/2_swizzle_keys.cu"),
    rungs={
        "fused": Rung("4 fused", "backward/4_fused.cu", (GROUP, SHARED_LOAD),
                      lacks=("dQ ready", "dQ left", "push asked", "push read"), drawn=False),
        "bulk": Rung("5 bulk", "backward/5_bulk.cu", (GROUP, SHARED_LOAD, PUSH), drawn=False),
        "early": Rung("6 early", "backward/6_early.cu", (GROUP, SHARED_LOAD, PUSH)),
        "at_once": Rung("7 at once", "backward/7_at_once.cu", (GROUP, SHARED_LOAD, PUSH)),
        "late": Rung("8 late", "backward/8_late.cu", (GROUP, SHARED_LOAD, PUSH)),
        "masks": Rung("9 masks", "backward/9_masks.cu", (GROUP, SHARED_LOAD, PUSH), drawn=False),
        "in_order": Rung("10 in turns", "backward/10_in_order.cu", (GROUP, SHARED_LOAD, PUSH), ("-DFA_IN_TURNS",), drawn=False),
        "hopper": Rung("hopper", "backward/hopper.cu", (GROUP, LOAD, PUSH)),
    },
    # Of dV and dK there is no wait of their own: products end in order, and the next one is waited for.
    rules=(*product("S"), *product("dP"), *product("dQ"), issued("dV"), issued("dK"),
           Rule("P rounded", "after", r"\bround_to(?:<T>)?\(\w+, P\)"),
           Rule("dS rounded", "after", r"\bround_to(?:<T>)?\(\w+, dP\)"), ASKED, FOUND,
           Rule("dQ ready", "before", r"\bsync\(dQ_free\b"), Rule("dQ left", "after", r"\barrive\(dQ_full\b"),
           Rule("push asked", "before", r"\bbulk_add\("), Rule("push read", "after", r"\btma_wait(?:_read)?\(\)")),
    at_once=(64, 128),
    bars=(
        Bar("S", "S issued", "S there", "#0072b2", "S: issue until waited for"),
        Bar("dP", "dP issued", "dP there", "#56b4e9", "dP: the same"),
        Bar("P", "S there", "P rounded", "#e69f00", "P: from S to the rounded P"),
        Bar("dV", "dV issued", "dQ there", "#009e73", "dV: issue until dQ is waited for"),
        Bar("dS", "dP there", "dS rounded", "#f0e442", "dS: from dP to the rounded dS"),
        Bar("dQ", "dQ issued", "dQ there", "#d55e00", "dQ: issue until waited for"),
        Bar("dK", "dK issued", "S there", "#cc79a7", "dK: issue until the next S is waited for"),
        Bar("hand", "dQ ready", "dQ left", "#000000", "dQ into its buffer, once that is free"),
        Bar("push", "push asked", "push read", "#999999", "dQ added up: asked for until read"),
    ),
    lanes=(("1", 0, GROUP_BARS), ("2", 1, GROUP_BARS),
           ("dQ 1", PUSHERS, ("push",)), ("dQ 2", PUSHERS + 1, ("push",))),
    loads={"Q": ("#7a5c3a", "Q: asked for until found"), "dO": ("#882255", "dO: the same")},
    cycles=14000,
)
LADDERS = {"forward": FORWARD, "backward": BACKWARD}


class Bad(Exception):
    pass


# ---------------------------------------------------------------- stamps into a copy

PRELUDE = f"""#include <cuda_runtime.h>
#define FA_STAMPS {STAMPS}
#define FA_WHO 5
__device__ uint2 fa_stamps[FA_WHO][FA_STAMPS];
"""
# By a predicate, not by a branch: ptxas moves nothing over a branch, so that one would change what is measured.
FUNCTIONS = """
__device__ inline void fa_stamp(uint2*& to, int& left, unsigned what) {
  asm volatile(
      "{ .reg .pred p;\\n.reg .u32 t;\\n"
      "setp.gt.s32 p, %2, 0;\\n"
      "mov.u32 t, %%clock;\\n"
      "@p st.global.v2.u32 [%0], {%1, t}; }"
      :
      : "l"(to), "r"(what), "r"(left)
      : "memory");
  ++to;
  --left;
}
"""


def arguments(text: str, at: int) -> tuple[list[str], int]:
    """Of the call whose bracket is the first from `at` on, and where it ends."""
    start = text.index("(", at) + 1
    depth, parts = 1, [start]
    for i in range(start, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            ends = [*(p - 1 for p in parts[1:]), i]
            return [text[a:b].strip() for a, b in zip(parts, ends)], i + 1
        if depth == 1 and text[i] == ",":
            parts.append(i + 1)
    raise Bad("a call without an end")


def body(text: str, name: str) -> tuple[int, int]:
    """Of the function, between its braces."""
    start = re.search(rf"\b{name}\([^;{{}}]*\)\s*\{{", text)
    if not start:
        raise Bad(f"no function {name}()")
    return start.end(), text.index("\n}", start.end())


def stamped(text: str, function: Function, rules: Sequence[Rule], kinds: list[str]) -> str:
    """The function's body. A stamp and its call are one expression, so that any `if` before them has both."""
    pieces: list[tuple[int, str]] = []
    for rule in rules:
        for found in re.finditer(rule.pattern, text):
            kind = rule.name.format(**found.groupdict())
            if kind not in kinds:
                kinds.append(kind)
            what = str(kinds.index(kind) + 1)
            if rule.tagged:
                words, _ = arguments(text, found.start())
                barrier = next((word for word in words if re.search(r"full\b", word)), None)
                if not barrier:
                    raise Bad(f"{function.name}(): no barrier among {', '.join(words)}")
                what += f" | shared_address({barrier}) << 8"
            stamp = f"fa_stamp(fa_to, fa_left, {what})"
            if rule.where == "before":
                pieces.append((found.start(), f"{stamp}, "))
            else:
                pieces.append((arguments(text, found.start())[1], f", {stamp}"))
    for at, piece in sorted(pieces, reverse=True):
        text = text[:at] + piece + text[at:]
    return (f"\n  uint2* fa_to = fa_stamps[{function.who}];"
            f"\n  int fa_left = {function.thread} && blockIdx.x == 66 ? FA_STAMPS : 0;" + text)


def instrumented(ladder: Ladder, rung: Rung) -> tuple[dict[str, str], list[str]]:
    """The source, and a header that holds one of the functions, with stamps, by their names; and the names of the stamps'
    kinds, from 1 on. Every rule must fit."""
    kinds: list[str] = []
    texts: dict[str, str] = {}
    rules = rung.rules or tuple(rule for rule in ladder.rules if rule.name not in rung.lacks)
    for function in rung.functions:
        file = function.header or rung.file
        text = texts.get(file) or (STAGE / file).read_text(encoding="utf-8")
        try:
            begin, end = body(text, function.name)
            texts[file] = text[:begin] + stamped(text[begin:end], function, rules, kinds) + text[end:]
        except Bad as error:
            raise Bad(f"{file}: {error}") from None
    for rule in rules:
        if not any(re.fullmatch(rule.name.format(what=r"\w*"), kind) for kind in kinds):
            raise Bad(f"{rung.file}: no call fits '{rule.pattern}' ({rule.name})")
    if ASKED.name in kinds:
        stamp = rf"fa_left, {kinds.index(ASKED.name) + 1} \| shared_address\((?:&shared\.)?(\w*?)_?full\b"
        asked = {what for text in texts.values() for what in re.findall(stamp, text)}
        for what in ladder.loads:
            if f"found {what}" in kinds and what not in asked:
                raise Bad(f"{rung.file}: {what} is found, but no call that fits '{ASKED.pattern}' asks for it")
    texts[rung.file] = PRELUDE + FUNCTIONS + texts[rung.file]
    return texts, kinds


# ---------------------------------------------------------------- measured

def nvcc(*words: str) -> None:
    done = subprocess.run(["nvcc", "-std=c++20", "-O3", "-diag-suppress=554", "-gencode", "arch=compute_90a,code=sm_90a",
                           *words, f"-I{ROOT}"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Bad(f"{' '.join(words)}: {done.stderr.strip()[:2000]}")


def built(folder: Path, ladder: Ladder, kernel: str, stamps: bool) -> tuple[Path, list[str]]:
    """Not yet a program: the others are linked to it."""
    rung, kinds = ladder.rungs[kernel], []
    source, includes = STAGE / rung.file, []
    if stamps:
        copies = folder / kernel
        texts, kinds = instrumented(ladder, rung)
        for file, text in texts.items():
            copy = copies / STAGE.name / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, encoding="utf-8")
        source, includes = copies / STAGE.name / rung.file, [f"-I{copies}"]  # before the tree's own
    target = folder / f"{kernel}_{'stamps' if stamps else 'plain'}.o"
    nvcc(f'-DFA_RUNG="{source}"', f"-DFA_LAUNCH_RUNG={ladder.launch}{kernel}", *ladder.flags, *rung.flags,
         *includes, "-c", str(STAGE / "check" / "timeline.cu"), "-o", str(target))
    return target, kinds


def output(program: Path, kinds: Sequence[str]) -> tuple[float, list[list[int]]]:
    """Milliseconds, and the stamps: who, kind, address of the barrier or 0, clock."""
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Bad(f"{program.name}: {done.stderr.strip()}")
    head, *rest = done.stdout.splitlines()
    found = []
    for line in rest:
        who, what, clock = map(int, line.split())
        found.append([who, what & 255, what >> 8, clock])
    if any(not 1 <= kind <= len(kinds) for _, kind, _, _ in found):
        raise Bad(f"{program.name}: a stamp of no kind")
    return float(head.split()[1]), found


def measure(path: Path, name: str) -> None:
    ladder = LADDERS[name]
    rungs: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with ThreadPoolExecutor() as pool:
            others = {file: folder / file.replace("/", "_").replace(".cu", ".o") for file in ladder.others}
            waiting = [pool.submit(nvcc, "-c", str(STAGE / file), "-o", str(to)) for file, to in others.items()]
            jobs = {(k, s): pool.submit(built, folder, ladder, k, s) for k in ladder.rungs for s in (False, True)}
            for job in waiting:
                job.result()
            objects = {key: job.result() for key, job in jobs.items()}
        device = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True,
                                text=True, check=True).stdout.split("\n")[0]
        for kernel in ladder.rungs:
            results = []
            for stamps in (False, True):
                target, kinds = objects[kernel, stamps]
                program = target.with_suffix("")
                nvcc(str(target), *map(str, others.values()), "-o", str(program))
                results.append(output(program, kinds))
            (plain, _), (ms, found) = results
            rungs[kernel] = {"ms": plain, "ms_with_stamps": ms, "kinds": kinds, "stamps": found}
            print(f"{kernel}: {plain:.4f} ms, with stamps {ms:.4f} ({ms / plain - 1:+.1%}), {len(found)} stamps")
    path.write_text(json.dumps({"device": device, "ladder": name, "setting": "N 4096, d 128, no mask, bf16",
                                "rungs": rungs}) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- the picture

Span = tuple[int, int]
WIDTH, LEFT, LANE, LOAD_LANE = 1000, 196, 11, 7
DRAWN = WIDTH - LEFT - 16


@dataclass(frozen=True)
class Stamp:
    who: int
    kind: str
    tag: int
    clock: int


def stamps_of(rung: dict) -> list[Stamp]:
    """The clock has 32 bits and may pass zero: counted from the first stamp."""
    origin = rung["stamps"][0][3]
    return [Stamp(who, rung["kinds"][kind - 1], tag, (clock - origin + 2**31) % 2**32 - 2**31)
            for who, kind, tag, clock in rung["stamps"]]


def spans(stamps: Sequence[Stamp], who: int, bar: Bar) -> list[Span]:
    found, begin = [], None
    for s in stamps:
        if s.who != who:
            continue
        if s.kind == bar.end and begin is not None:
            found.append((begin, s.clock))
            begin = None
        if s.kind == bar.begin:
            begin = s.clock
    return found


def steps(ladder: Ladder, kernel: str, stamps: Sequence[Stamp]) -> list[float]:
    """Of the block that is stamped, in cycles of an SM for the ladder's queries and keys: blocks run beside each other."""
    clocks = [s.clock for s in stamps if s.kind == STEP.name] or [begin for begin, _ in spans(stamps, 0, ladder.bars[0])]
    (queries, keys), (here, these) = ladder.at_once, ladder.rungs[kernel].at_once
    share = queries * keys / (here * these) if here else 1
    return [share * (b - a) for a, b in zip(clocks, clocks[1:])]


def copies(stamps: Sequence[Stamp], loads: Sequence[str]) -> Iterator[tuple[str, list[Span]]]:
    """Of each buffer: from the ask to the first group that finds the tile there. Both are counted from the start."""
    for name in loads:
        for tag in sorted({s.tag for s in stamps if s.kind == f"found {name}"}):
            asked = [s.clock for s in stamps if s.kind == "asked" and s.tag == tag]
            by_group: dict[int, list[int]] = {}
            for s in stamps:
                if s.kind == f"found {name}" and s.tag == tag:
                    by_group.setdefault(s.who, []).append(s.clock)
            yield name, list(zip(asked, map(min, zip(*by_group.values()))))


def bars(some: Sequence[Span], begin: int, cycles: int, top: int, height: int, colour: str) -> Iterator[str]:
    for a, b in some:
        a, b = max(a - begin, 0), min(b - begin, cycles)
        if a < b:
            width = max(DRAWN * (b - a) / cycles - 1, 0.5)  # a gap, should the next begin at once
            yield (f'<rect x="{LEFT + DRAWN * a / cycles:.1f}" y="{top}" width="{width:.1f}" '
                   f'height="{height}" fill="{colour}"/>')


def lane(label: str, y: int, height: int) -> list[str]:
    return [f'<text x="{LEFT - 6}" y="{y + height / 2 + 4:g}" class="s" text-anchor="end">{label}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{DRAWN}" height="{height}" class="b"/>']


def drawn_rung(ladder: Ladder, title: str, rung: dict, y: int) -> tuple[list[str], int]:
    stamps, first, top = stamps_of(rung), ladder.bars[0], y
    starts = [a for a, _ in spans(stamps, 0, first)]
    begin = starts[min(12, len(starts) // 2)]
    steps = sorted(b - a for a, b in zip(starts, starts[1:]))
    more = rung["ms_with_stamps"] / rung["ms"] - 1
    rows = [f'<text x="16" y="{y + 20}" class="t">{title}</text>',
            f'<text x="16" y="{y + 38}" class="s">step {steps[len(steps) // 2]},</text>',
            f'<text x="16" y="{y + 54}" class="s">stamps {more:+.1%}</text>']
    buffers = list(copies(stamps, list(ladder.loads)))
    if buffers:
        rows += lane("load", y, LOAD_LANE * len(buffers))
        for name, some in buffers:
            rows += bars(some, begin, ladder.cycles, y + 1, LOAD_LANE - 2, ladder.loads[name][0])
            y += LOAD_LANE
        y += 6
    of = {bar.name: bar for bar in ladder.bars}
    for label, who, names in ladder.lanes:
        if not any(s.who == who for s in stamps):
            continue
        rows += lane(label, y, LANE * len(names))
        for name in names:
            rows += bars(spans(stamps, who, of[name]), begin, ladder.cycles, y + 1, LANE - 2, of[name].colour)
            y += LANE
        y += 6
    return rows, max(y, top + 60) + 16  # three lines of text stand beside them


def draw(source: Path, target: Path) -> None:
    data = json.loads(source.read_text(encoding="utf-8"))
    ladder = LADDERS[data["ladder"]]
    key, x, y = [], 16, 58
    for colour, text in [*((bar.colour, bar.key) for bar in ladder.bars), *ladder.loads.values()]:
        if x + 17 + 7 * len(text) > WIDTH:
            x, y = 16, y + 20
        key.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>'
                   f'<text x="{x + 17}" y="{y + 11}" class="s">{text}</text>')
        x += 328
    rows: list[str] = []
    y += 32
    for kernel, rung in ladder.rungs.items():
        if kernel in data["rungs"] and rung.drawn:
            some, y = drawn_rung(ladder, rung.title, data["rungs"][kernel], y)
            rows += some
    svg = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 20}" width="{WIDTH}" font-family="DejaVu Sans, sans-serif">
<style>.t {{ font-size: 14px; fill: #222 }} .s {{ font-size: 13px; fill: #555 }} .b {{ fill: #eee }}</style>
<rect width="{WIDTH}" height="{y + 20}" fill="#fdfdfb"/>
<text x="16" y="26" font-size="17" font-weight="bold" fill="#222">Who runs when: the loader and the warpgroups of one block</text>
<text x="16" y="44" class="s">{data["device"]} · {data["setting"]} · {ladder.cycles} cycles</text>
{chr(10).join(key)}
{chr(10).join(rows)}
<text x="{LEFT}" y="{y + 4}" class="s">0</text><text x="{WIDTH - 16}" y="{y + 4}" class="s" text-anchor="end">{ladder.cycles} cycles</text>
</svg>
"""
    target.write_text(svg, encoding="utf-8")


def check() -> None:
    for ladder in LADDERS.values():
        names = [re.sub(r"\{what\}", "", rule.name) for rule in ladder.rules]
        for bar in ladder.bars:
            if not {bar.begin, bar.end} <= set(names):
                raise Bad(f"no rule makes the stamps of {bar.name}: {bar.begin}, {bar.end}")
        for rung in ladder.rungs.values():
            instrumented(ladder, rung)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    one = modes.add_parser("measure")
    one.add_argument("json", type=Path)
    one.add_argument("--ladder", choices=LADDERS, default="forward")
    one = modes.add_parser("draw")
    one.add_argument("json", type=Path)
    one.add_argument("svg", type=Path)
    modes.add_parser("check")
    options = parser.parse_args()
    try:
        if options.mode == "measure":
            measure(options.json, options.ladder)
        elif options.mode == "draw":
            draw(options.json, options.svg)
        else:
            check()
    except (Bad, OSError, subprocess.CalledProcessError) as error:
        print(f"timeline.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
