"""Reads, checks and records the measurements that every chart and table is made from.

A results file is Google Benchmark JSON. One benchmark is named
stage/what/variant/key:value.../dtype and measured several times (repetitions).
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

CONTEXT_KEYS = ("machine", "device", "isa", "cores", "compiler", "flags", "commit", "date", "flop_formula")
PRIVATE_KEYS = ("host_name", "executable")
MAX_BYTES = 2 << 20
MOST_ROUNDS = 1000
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
KIND = ("stage", "what", "variant")
NOT_COUNTERS = {"family_index", "per_family_instance_index", "repetitions", "repetition_index",
                "threads", "iterations", "real_time", "cpu_time"}
POSITIVE = {"real_time", "flops", "roof", "bytes_per_second"}
TEXTS = {"name", "run_name", "run_type", "time_unit", "label", "error_message", "skip_message"}
# A figure is divided by a roof that is sampled beside it, so it may exceed it a little: the clock moves between the two
# samples, and cuBLAS is not quite the peak (the recorded kernels reach 1.03 of it). Neither explains a fifth more.
MOST_OF_ROOF = 1.2
GOOGLE_SUFFIX = re.compile(
    r"(real_time|manual_time|process_time|(repeats|min_time|min_warmup_time|iterations|threads):[^/]*)$")


class BadResults(Exception):
    """Input that cannot be used. The text is one line: what, why, how to fix it."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.split()))


@dataclass(frozen=True)
class Row:
    """One repetition of one benchmark."""

    name: str
    stage: str
    what: str
    variant: str
    keys: dict[str, float | str]
    dtype: str
    repetition: int
    time: float  # seconds
    counters: dict[str, float]
    repetitions: int = 1  # what the program says of them: how many there are
    family: int | None = None  # and which of its benchmarks this is

    def value(self, field: str) -> float:
        """A counter, 'time' in seconds, or 'of_roof': this repetition's flops over its own roof."""
        if field == "time":
            return self.time
        if field == "of_roof":
            return self.value("flops") / self.value("roof")
        if field not in self.counters:
            raise BadResults(f"{self.name} has no counter '{field}'; let its benchmark set it and measure again")
        return self.counters[field]

    @cached_property
    def properties(self) -> dict[str, float | str]:
        return {"stage": self.stage, "what": self.what, "variant": self.variant, "dtype": self.dtype} | self.keys

    def matches(self, where: dict[str, object]) -> bool:
        return all(self.properties.get(key) == wanted for key, wanted in where.items())


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over the repetitions (smallest and largest if there are fewer than four).

    Not the extremes of many: on a shared machine one disturbed round would be all that a chart shows.
    """

    mid: float
    low: float
    high: float

    def scaled(self, factor: float) -> Spread:
        return Spread(self.mid * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Results:
    path: Path
    context: dict[str, str]
    rows: list[Row]
    errors: list[tuple[str, str]]  # benchmarks that reported an error instead of a figure: name, message

    def select(self, **where: object) -> list[Row]:
        """The rows with these properties, e.g. select(what='forward', variant='naive', d=64)."""
        kind = tuple(where.get(name) for name in KIND)
        rows = self.rows if None in kind else self._of_kind.get(kind, [])  # thousands of rows, asked thousands of times
        return [row for row in rows if row.matches(where)]

    @cached_property
    def _of_kind(self) -> dict[tuple[object, ...], list[Row]]:
        kinds: dict[tuple[object, ...], list[Row]] = {}
        for row in self.rows:
            kinds.setdefault(tuple(row.properties[name] for name in KIND), []).append(row)
        return kinds

    @property
    def is_gpu(self) -> bool:
        return bool(re.match(r"sm_|gfx", self.context["isa"])) or self.context["machine"].startswith("nvidia-")


def group(rows: Sequence[Row], key: str) -> dict[float, list[Row]]:
    """The rows by the value of one numeric key, in ascending order."""
    groups: dict[float, list[Row]] = {}
    for row in rows:
        value = row.keys.get(key)
        if not isinstance(value, (int, float)):
            raise BadResults(f"{row.name} has no number '{key}:...' in its name; select the rows more narrowly")
        groups.setdefault(value, []).append(row)
    return dict(sorted(groups.items()))


def _one_benchmark(rows: Sequence[Row]) -> None:
    names = sorted({row.name for row in rows})
    if not names:
        raise BadResults("no rows to take a median of; measure this benchmark, or check what is selected")
    if len(names) > 1:
        raise BadResults(f"a median would mix {names[0]} and {names[1]}; select the rows more narrowly")


def _spread(values: Sequence[float]) -> Spread:
    if len(values) < 4:
        return Spread(statistics.median(values), min(values), max(values))
    low, mid, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(mid, low, high)


def spread(rows: Sequence[Row], field: str) -> Spread:
    _one_benchmark(rows)
    return _spread([row.value(field) for row in rows])


def median(rows: Sequence[Row], field: str) -> float:
    return spread(rows, field).mid


def ratio(a: Sequence[Row], b: Sequence[Row], field: str) -> Spread:
    """a/b, repetition by repetition: what slows the machine for a while slows both sides of a pair."""
    _one_benchmark(a)
    _one_benchmark(b)
    partner = {row.repetition: row.value(field) for row in b}
    pairs = [(row.value(field), partner[row.repetition]) for row in a if row.repetition in partner]
    if not pairs or any(below == 0 for _, below in pairs):
        raise BadResults(f"no ratio of {a[0].name} to {b[0].name}: no common repetition, or a zero {field}; "
                         "measure both in one run")
    return _spread([above / below for above, below in pairs])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(text: str) -> float | str:
    value = float(text) if _is_number(text) else math.nan
    if not math.isfinite(value):
        return text
    return int(value) if value.is_integer() else value


def _split(raw: dict[str, Any], path: Path) -> tuple[str, list[str]]:
    parts = str(raw.get("run_name", raw.get("name", ""))).split("/")
    while len(parts) > 1 and GOOGLE_SUFFIX.match(parts[-1]):
        parts.pop()
    name = "/".join(parts)
    pairs = parts[3:-1]
    if (len(parts) < 4 or not all(parts) or any(":" in part for part in (*parts[:3], parts[-1]))
            or not all(":" in pair for pair in pairs)):
        raise BadResults(f"{path}: the name '{name}' is not stage/what/variant/key:value.../dtype; "
                         "rename the benchmark")
    return name, parts


def _row(raw: dict[str, Any], path: Path) -> Row:
    name, parts = _split(raw, path)
    for key, value in raw.items():
        if key not in TEXTS and isinstance(value, str) and _is_number(value):
            raise BadResults(f"{path}: {name} has {key} = '{value}' as a text, not as a number; measure again")
    numbers = {key: value for key, value in raw.items()
               if isinstance(value, (int, float)) and not isinstance(value, bool)}
    for key, value in numbers.items():
        if not math.isfinite(value):
            raise BadResults(f"{path}: {name} has {key} = {value}, which is not a finite number; "
                             "count such values in the counter 'nonfinite' and measure again")
        if value < 0 or (value == 0 and key in POSITIVE):
            raise BadResults(f"{path}: {name} has {key} = {value}, which cannot be; measure again")
    unit = raw.get("time_unit", "ns")
    if "real_time" not in numbers or not isinstance(unit, str) or unit not in SECONDS:
        raise BadResults(f"{path}: {name} has no real_time in ns, us, ms or s; measure again")
    for key in ("repetition_index", "repetitions"):
        if numbers.get(key, 0) > MOST_ROUNDS:
            raise BadResults(f"{path}: {name} has {key} = {numbers[key]}; the most is {MOST_ROUNDS}, measure again")
    stage, what, variant, *pairs, dtype = parts
    return Row(name, stage, what, variant, dtype=dtype,
               keys={key: _number(value) for key, value in (pair.split(":", 1) for pair in pairs)},
               repetition=int(numbers.get("repetition_index", 0)),
               time=numbers["real_time"] * SECONDS[unit],
               counters={key: float(value) for key, value in numbers.items() if key not in NOT_COUNTERS},
               repetitions=int(numbers.get("repetitions", 1)),
               family=int(numbers["family_index"]) if "family_index" in numbers else None)


def _read(path: Path) -> tuple[dict[str, Any], Results]:
    try:
        # An integer may be longer than a float can hold, or than Python reads.
        data = json.loads(path.read_text(encoding="utf-8"), parse_int=lambda x: int(x) if len(x) < 19 else float(x))
    except FileNotFoundError:
        raise BadResults(f"{path}: no such file; measure first, then record") from None
    except OSError as error:
        raise BadResults(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadResults(f"{path}: not JSON ({error}); the run was cut short, measure again") from None
    if not isinstance(data, dict) or not isinstance(data.get("benchmarks"), list) \
            or not all(isinstance(raw, dict) for raw in data["benchmarks"]):
        raise BadResults(f"{path}: no list 'benchmarks'; write it with --benchmark_out_format=json")
    context = data["context"] if isinstance(data.get("context"), dict) else {}
    for key in CONTEXT_KEYS:
        if not isinstance(context.get(key), str) or not context[key]:
            raise BadResults(f"{path}: the context has no '{key}'; measure with this course's benchmark programs")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", context["machine"]):
        raise BadResults(f"{path}: machine '{context['machine']}' cannot name a file; use a-z, 0-9, '-' and '.'")

    rows: list[Row] = []
    errors: list[tuple[str, str]] = []
    seen: set[tuple[str, int]] = set()
    for raw in data["benchmarks"]:
        if raw.get("run_type") != "iteration":
            continue
        if raw.get("error_occurred") or raw.get("skipped"):
            errors.append((_split(raw, path)[0], str(raw.get("error_message") or raw.get("skip_message") or "?")))
            continue
        row = _row(raw, path)
        if (row.name, row.repetition) in seen:
            raise BadResults(f"{path}: {row.name} has repetition {row.repetition} twice; "
                             "two runs were joined, measure again in one run")
        seen.add((row.name, row.repetition))
        rows.append(row)
    if not rows:
        why = f"every row is an error, the first: {errors[0][1]}" if errors else "no rows"
        raise BadResults(f"{path}: {why}; run the benchmark without a filter")
    return data, Results(path, context, rows, errors)


def load(path: str | Path) -> Results:
    """What can be used of a measurement, be it complete or not."""
    return _read(Path(path))[1]


def recorded(stage: Path) -> list[Path]:
    """A file for each machine, the one that has measured most first: its figures are the chapter's.

    The rest is what the compiler said, who did what when, variants, faults and tiles."""
    others = re.compile(r"(kernels|timeline|ab|faults|tuning)(_\w+)?\.json")
    found = [path for path in (stage / "results").glob("*.json") if not others.fullmatch(path.name)]
    rows = {path: path.read_bytes().count(b'"run_type"') for path in found}
    return sorted(found, key=lambda path: (-rows[path], -path.stat().st_size, path.name))


def _figures_of(row: Row) -> tuple[str, ...]:
    if row.what == "error":
        return ("nonfinite",) if row.counters.get("nonfinite") else ("nonfinite", "max_error")
    if row.what == "bandwidth":
        return ("bytes_per_second",)
    if row.counters.get("unverified"):
        return ()  # a part of a method: a time, and nothing that could be credited
    return ("flops",) if row.stage == "peer" else ("flops", "roof")


def _missing(results: Results, size: str) -> str:
    context = results.context
    if context.get("size") == "smoke":
        return "it was measured with --smoke, which shows that the benchmark runs and gives no figures"
    if size == "full" and context.get("size") != "full":
        return "it was not measured with --full"
    if results.errors:
        name, message = results.errors[0]
        return f"{name} reported an error: {message}"
    for row in results.rows:
        for figure in _figures_of(row):
            if figure not in row.counters:
                return f"{row.name} has no '{figure}'"
    # A benchmark program says how many rows it has, and numbers its rows; older files lack the former.
    families = {row.family for row in results.rows if row.family is not None}
    names = {row.name for row in results.rows if row.stage != "peer"}
    rows = str(context.get("rows", ""))
    expected = int(rows) if re.fullmatch("[0-9]{1,9}", rows) else max(families, default=-1) + 1
    found = len(names if "rows" in context else families)
    if found != expected:
        return f"it has {found} of {expected} benchmarks"
    measured: dict[str, set[int]] = {}  # the repetitions of each name, and of all that were measured together
    together: dict[tuple[str, str], set[int]] = {}
    for row in results.rows:
        measured.setdefault(row.name, set()).add(row.repetition)
        together.setdefault((row.stage, row.what), set()).update(range(row.repetitions), range(row.repetition + 1))
    for row in results.rows:
        have, all_of_them = measured[row.name], together[row.stage, row.what]
        if have != all_of_them:
            return f"{row.name} has {len(have)} of {len(all_of_them)} repetitions"
    return ""


def _impossible(results: Results) -> str:
    shares: dict[str, list[float]] = {}
    for row in results.rows:
        if {"flops", "roof"} <= row.counters.keys():
            shares.setdefault(row.name, []).append(row.value("of_roof"))
    for name, share in shares.items():
        # The median, as in the charts: one disturbed round is what several rounds are for.
        if statistics.median(share) > MOST_OF_ROOF:
            return f"{name} is at {100 * statistics.median(share):.0f} % of the roof, so the machine was busy"
    return ""


def unfit(results: Results, size: str = "") -> str:
    """Why this is no measurement to record and to draw; empty if it has every benchmark's figures and repetitions, and
    none that cannot be. A `full` one has all that a `quick` one has."""
    return _missing(results, size) or _impossible(results)


def complete(path: str | Path, size: str = "") -> Results:
    results = load(path)
    if why := unfit(results, size):
        raise BadResults(f"{path}: {why}; measure again, everything")
    return results


def write_all(outputs: dict[Path, bytes]) -> None:
    """All these files, each whole, or none: a full disk is met before the first one is replaced."""
    temporaries = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in outputs}
    try:
        for path, content in outputs.items():
            temporaries[path].write_bytes(content)
        for path in outputs:
            os.replace(temporaries[path], path)
    except OSError as error:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)
        raise BadResults(f"{path}: cannot be written: {error.strerror}; nothing is lost, check the folder, its rights "
                         "and the room on the disk") from None


def write_whole(path: Path, content: bytes) -> None:
    """The whole file or nothing: a reader never meets half of one."""
    write_all({path: content})


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def cleaned(src: Path, replaces: Path | None = None) -> bytes:
    """A measurement in the form that is committed: nothing private, small, and stable in a diff.

    It has every row of the one that it replaces."""
    results = complete(src)
    if replaces and replaces.exists():
        try:
            lost = {row.name for row in load(replaces).rows} - {row.name for row in results.rows}
        except BadResults:  # nothing to lose
            lost = set()
        if lost:
            raise BadResults(f"{src}: lacks {len(lost)} of the benchmarks in {replaces}, {min(lost)} for one; "
                             f"measure them as well, or remove {replaces.name} first if they are gone for good")
    data = _read(src)[0]
    context = {key: value for key, value in sorted(data["context"].items()) if key not in PRIVATE_KEYS}
    raws = [raw for raw in data["benchmarks"] if raw.get("run_type") == "iteration"]
    order = sorted(zip(results.rows, raws), key=lambda pair: (pair[0].name, pair[0].repetition))
    benchmarks = [dict(sorted(raw.items(), key=lambda item: (item[0] != "name", item[0]))) for _, raw in order]
    text = json.dumps(_rounded({"context": context, "benchmarks": benchmarks}), indent=1, ensure_ascii=False) + "\n"
    content = text.encode()
    if len(content) >= MAX_BYTES:
        raise BadResults(f"{src}: {len(content)} bytes after cleaning, the limit is {MAX_BYTES}; measure fewer points")
    return content


def record(src: str | Path, dst: str | Path) -> None:
    write_whole(Path(dst), cleaned(Path(src), Path(dst)))
