"""Figures that running text says: checked against what is recorded and counted, or written from it.

    At N = 4096 it takes 4.9<!-- = ms(tiled, N=4096, d=64) / ms(safe_softmax, N=4096, d=64) --> times as long.

A mark stands right behind its figure, in digits or a word up to twelve, and shows nowhere on the page. What it holds is
arithmetic (+ - * /, brackets, numbers) with these words, all on one line; the figure keeps the decimals that the text
shows.

Measured: medians over the rounds of the rows that fit, from the stage's recorded file; causal=0 unless said. The words
are parts of a benchmark's name (tiled, stage03, backward, f32), the keys those of the name. Ratios are taken round by
round, as in the tables.
    ms(WORD..., KEY=VALUE...)    gflops(...) tflops(...) percent(...)    kib(...) mib(...) gib(...)
    percent is the share of the peak that was sampled beside each round, the bytes are extra memory
    counter(NAME, WORD..., KEY=VALUE...)    any other figure of a row: roof, bytes_per_second, max_error, ...
    least(X) most(X) middle(X)   where X fits several rows: of their medians, and the median of all rounds
    noted(FILE, LINE, COLUMN)    the figure in a column, from 1, of the one line of a text file that begins with LINE
Counted:
    tests()                      what `ctest -R stageNN` runs where nvcc is missing; needs --build
    mutants()                    of the stage
    lines(FILE)                  of a file, beside the page or else from the root
    line(FILE, TEXT)             where the one line that holds TEXT stands
    files(PATTERN)               that fit, from the root
    removed(A, B) added(A, B)    the lines that `diff A B` takes out and puts in; with space=0, `diff -w`; with code=1
                                 `diff -w` of what is neither a comment nor a blank line

The stage is the page's own; `<!-- =03 percent(fast, N=4096, d=64) -->` names another one. If several machines are
recorded, it is the one that has measured most; `<!-- =03/amd-epyc-avx512-2c ... -->` names another. A figure in a code
block has its mark above the block, with the words around it:

    <!-- = below: failed out of {tests()} -->

A figure that nothing can check says where it comes from: `4.8<!-- given: datasheet --> TB/s`. Outside of tables and
code, each count of tests, mutants or lines needs one of the two, and so does each figure with a unit that is measured,
but in 06, where test_sweep.py holds what the kernels say they measured against the record.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import operator
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2] / "judge")]

from mutants import parse  # noqa: E402
from results import BadResults, Results, load, recorded, write_whole  # noqa: E402
from source import Bad, bare  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
NUMBER = r"(?<![\w.,/])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
MARK = re.compile(rf"(?P<said>{NUMBER}|\b(?:{'|'.join(WORDS)})\b)?<!--\s*=(?P<record>\S*)\s+(?P<rule>.*?)\s*-->",
                  re.S | re.I)
BELOW = re.compile(r"^<!-- =(?P<record>\S*) below: (?P<words>.*) -->$", re.M)
CODE = re.compile(r"^( *)```.*?^\1```|``[^\n]*?``|`[^`]*`", re.S | re.M)
MARKED = rf"{NUMBER}(?:<!--(?:(?!-->).)*-->)?"
MEASURED = r"\s*%|×(?!\s*\d)|x\b|\s+(?:[munµ]s|[MGT]?FLOP/s|[GT]B/s|times|points)\b"
COUNTED = r"\s+(?:tests|mutants|(?:changed )?lines)\b"
LIST = rf"({MARKED}(?:(?:,|,? to|,? and|,? or| against)\s{MARKED})*)"
CLAIM = {everything: re.compile(LIST + rf"(?:{COUNTED}{'|' + MEASURED if everything else ''})", re.S)
         for everything in (False, True)}
CTEST = re.compile(r"failed out of (\d+)")
MEASURED_STAGES = ("00", "01", "02", "03", "04", "05")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class BadMark(Exception):
    """A mark that says nothing: what is wrong with it, in one line."""


class NotCounted(Exception):
    """Only a build with all tests can tell."""


# ---------------------------------------------------------------- measured

@dataclass(frozen=True)
class Samples:
    """A figure in every round of every row: {(the row's keys that the mark leaves open, round): figure}."""

    values: dict[tuple[tuple[tuple[str, object], ...], int], float]

    def with_each(self, other: Samples | float, do: Callable[[float, float], float], swap: bool = False) -> Samples:
        paired = {key: (value, other.values[key] if isinstance(other, Samples) else other)
                  for key, value in self.values.items() if not isinstance(other, Samples) or key in other.values}
        if not paired:
            raise BadMark("the two sides have no round in common; measure both in one run, or fix the same keys")
        return Samples({key: do(b, a) if swap else do(a, b) for key, (a, b) in paired.items()})

    def medians(self) -> list[float]:
        rows: dict[tuple[tuple[str, object], ...], list[float]] = {}
        for (row, _), value in self.values.items():
            rows.setdefault(row, []).append(value)
        return [median(values) for values in rows.values()]


Value = Samples | float


def one(value: Value) -> float:
    if not isinstance(value, Samples):
        return value
    medians = value.medians()
    if len(medians) > 1:
        rows = sorted({str(dict(row)) for row, _ in value.values})
        raise BadMark(f"fits {len(medians)} rows, such as {rows[0]} and {rows[1]}; fix a key, or say least() or most()")
    return medians[0]


def numbers_of(value: Value) -> Samples:
    if not isinstance(value, Samples):
        raise BadMark("least, most and middle are of measured rows")
    return value


@lru_cache(maxsize=None)
def results(path: Path) -> Results:
    return load(path)


def rows_of(measured: Path, field: str, words: Sequence[object], keys: dict[str, object]) -> Samples:
    fixed = {"causal": 0} | keys
    rows = [row for row in results(measured).rows
            if {row.stage, row.what, row.variant, row.dtype} >= set(words)
            and all(row.keys.get(key, 0 if key == "causal" else None) == value for key, value in fixed.items())]
    kinds = sorted({f"{row.stage}/{row.what}/{row.variant}/{row.dtype}" for row in rows})
    if len(kinds) != 1:
        fit = f"{kinds[0]} and {kinds[1]} fit; name more" if kinds else "no row fits"
        raise BadMark(f"{fit} ({', '.join(map(str, words))}; {fixed}; {measured.name})")
    return Samples({(tuple((key, value) for key, value in row.keys.items() if key not in fixed), row.repetition):
                    row.value(field) for row in rows})


FIELDS = {"ms": ("time", 1e3), "gflops": ("flops", 1e-9), "tflops": ("flops", 1e-12), "percent": ("of_roof", 100),
          "kib": ("extra_bytes", 2**-10), "mib": ("extra_bytes", 2**-20), "gib": ("extra_bytes", 2**-30)}


# ---------------------------------------------------------------- counted

@lru_cache(maxsize=None)
def tests_of(build: Path) -> list[str]:
    """What ctest would run, or nothing if this build leaves tests out."""
    try:
        cache = (build / "CMakeCache.txt").read_text(encoding="utf-8")
    except OSError:
        raise BadMark(f"{build}: no build folder; configure it first") from None
    ctest = re.search(r"^CMAKE_CTEST_COMMAND:\w+=(.+)$", cache, re.M)
    if not ctest or not all(re.search(rf"^{option}:\w+={value}$", cache, re.M)
               for option, value in (("FA_MUTANTS", "ON"), ("FA_BENCHMARKS", "ON"), ("FA_SANITIZE", ""))):
        return []
    listed = subprocess.run([ctest[1], "--test-dir", str(build), "--show-only=json-v1"], capture_output=True,
                            text=True, check=False)
    if listed.returncode:
        raise BadMark(f"ctest --test-dir {build} lists nothing: {listed.stderr.strip()}")
    return [test["name"] for test in json.loads(listed.stdout)["tests"]]


def tests(stage: Path, build: Path | None) -> int:
    number = f"stage{stage.name[:2]}"
    names = [name for name in (tests_of(build) if build else []) if name.startswith(number)]
    if not names or any("NOT_BUILT" in name for name in names):
        raise NotCounted
    on_gpu = f"{number}.on_gpu."
    if any(name.startswith(on_gpu) for name in names):  # with nvcc there are more; without it one says that they lack
        return 1 + sum(not name.startswith((on_gpu, f"{number}.bench_smoke")) for name in names)
    return len(names)


def changed(a: Path, b: Path, space: bool, code: bool) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        files = [a, b]
        for i, file in enumerate(files if code else []):
            lines = bare(file.read_text(encoding="utf-8"), literals=True).splitlines()
            files[i] = Path(folder, str(i))
            files[i].write_text("".join(f"{line}\n" for line in lines if line.strip()), encoding="utf-8")
        done = subprocess.run(["diff", *([] if space else ["-w"]), *map(str, files)], capture_output=True, text=True,
                              check=False)
    if done.returncode > 1:
        raise BadMark(done.stderr.strip())
    return tuple(sum(line.startswith(sign) for line in done.stdout.splitlines()) for sign in "<>")  # type: ignore


# ---------------------------------------------------------------- what a mark holds

@dataclass(frozen=True)
class Page:
    path: Path
    root: Path
    build: Path | None

    def stage(self, record: str) -> tuple[Path, str]:
        number, _, machine = record.partition("/")
        number = number or self.path.relative_to(self.root).parts[0][:2]
        found = sorted(self.root.glob(f"{number}_*")) if re.fullmatch(r"\d\d", number) else []
        if len(found) != 1:
            raise BadMark(f"'{record}' names no stage; on a page outside the stages write =03, or =03/MACHINE")
        return found[0], machine

    def measured(self, record: str) -> Path:
        """The results file that a mark means."""
        stage, machine = self.stage(record)
        found = [path for path in recorded(stage) if machine in ("", path.stem)]
        if not found:
            raise BadMark(f"no recorded file in {stage.name}/results{f' of {machine}' if machine else ''}")
        return found[0]

    def file(self, name: object) -> Path:
        for folder in (self.path.parent, self.root):
            if (folder / str(name)).is_file():
                return folder / str(name)
        raise BadMark(f"no file {name}")

    def call(self, name: str, record: str, words: list[Value | str], keys: dict[str, Value | str]) -> Value:
        if name in ("least", "most", "middle") and len(words) == 1 and not keys:
            rows = numbers_of(words[0])  # type: ignore[arg-type]
            return {"least": min, "most": max, "middle": median}[name](
                rows.values.values() if name == "middle" else rows.medians())
        if name in FIELDS:
            field, factor = FIELDS[name]
            return rows_of(self.measured(record), field, words, dict(keys)).with_each(factor, operator.mul)
        if name == "counter" and words:
            return rows_of(self.measured(record), str(words[0]), words[1:], dict(keys))
        if name == "tests" and not words:
            return tests(self.stage(record)[0], self.build)
        if name == "mutants" and not words:
            return len(parse(self.stage(record)[0] / "check" / "mutants.txt"))
        if name == "files" and len(words) == 1:
            return len(list(self.root.glob(str(words[0]))))
        if name == "lines" and len(words) == 1:
            return len(self.file(words[0]).read_text(encoding="utf-8").splitlines())
        if name == "line" and len(words) == 2:
            text = self.file(words[0]).read_text(encoding="utf-8").splitlines()
            at = [number for number, line in enumerate(text, 1) if str(words[1]) in line]
            if len(at) != 1:
                raise BadMark(f"{len(at)} lines of {words[0]} hold '{words[1]}'")
            return at[0]
        if name in ("removed", "added") and len(words) == 2:
            files, code = [self.file(word) for word in words], keys == {"code": 1}
            return changed(*files, space=not code and keys != {"space": 0}, code=code)[name == "added"]
        if name == "noted" and len(words) == 3:
            file, begin, column = words
            found = [line[len(str(begin)):].split() for line in self.file(file).read_text(encoding="utf-8").splitlines()
                     if line.startswith(str(begin))]
            if len(found) != 1 or not isinstance(column, (int, float)) or not 1 <= column <= len(found[0]):
                raise BadMark(f"{len(found)} lines of {file} begin with '{begin}', or there is no column {column}")
            word = found[0][int(column) - 1]
            try:
                return float(word.rstrip("x%"))
            except ValueError:
                raise BadMark(f"column {column} of '{begin}' is '{word}', not a number") from None
        raise BadMark(f"no '{name}' with {len(words)} words; the words are listed at the top of said.py")

    def value(self, rule: str, record: str) -> float:
        try:
            tree = ast.parse(" ".join(rule.split()), mode="eval")
        except SyntaxError:
            raise BadMark("is not arithmetic") from None

        def argument(node: ast.expr) -> Value | str:
            if isinstance(node, ast.Name):
                return node.id
            return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else walk(node)

        def walk(node: ast.expr) -> Value:
            if isinstance(node, ast.Constant) and type(node.value) in (int, float):
                return node.value
            if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
                do, left, right = OPERATORS[type(node.op)], walk(node.left), walk(node.right)
                if isinstance(left, Samples):
                    return left.with_each(right, do)
                return right.with_each(left, do, swap=True) if isinstance(right, Samples) else do(left, right)
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
                return walk(ast.BinOp(ast.Constant(0), ast.Sub(), node.operand))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                keys = {word.arg or "": argument(word.value) for word in node.keywords}
                return self.call(node.func.id, record, [argument(word) for word in node.args], keys)
            raise BadMark(f"'{ast.unparse(node)}' is none of its words; they are listed at the top of said.py")
        try:
            found = one(walk(tree.body))
        except (BadResults, Bad) as error:
            raise BadMark(str(error)) from None
        except ZeroDivisionError:
            raise BadMark("divides by zero") from None
        if not math.isfinite(found):
            raise BadMark(f"is {found}")
        return found


def written(value: float, said: str) -> str:
    """The value in the form of what stands there: a word, commas, as many decimals."""
    if said.lower() in WORDS:
        word = WORDS[round(value)] if 0 <= round(value) < len(WORDS) else str(round(value))
        return word.capitalize() if said[0].isupper() else word
    decimals = len(said.partition(".")[2])
    return f"{round(value, decimals) + 0.0:{',' if ',' in said else ''}.{decimals}f}"  # + 0.0: no minus before a zero


# ---------------------------------------------------------------- pages

def covered(text: str, *patterns: re.Pattern[str]) -> str:
    """The text with what the patterns find blanked, line for line and letter for letter."""
    for pattern in patterns:
        text = pattern.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
    return text


@dataclass(frozen=True)
class Said:
    """A figure at [start, end) of a page, and what its mark says it is."""

    start: int
    end: int
    rule: str
    record: str


def marks(text: str) -> Iterator[Said | tuple[int, str]]:
    """The figures under a mark; a position and a sentence for a mark without one."""
    prose = covered(text, CODE)
    for mark in MARK.finditer(covered(prose, BELOW)):
        if "\n" in mark[0]:  # Markdown would take a line that begins with * or - for a list
            yield mark.start(), "a mark stands on one line"
        elif not mark["said"]:
            yield mark.start(), "a mark stands right behind its figure"
        else:
            yield Said(*mark.span("said"), mark["rule"], mark["record"])
    for mark in BELOW.finditer(prose):
        rule = re.search(r"\{(.*)\}", mark["words"])
        block = re.compile(r"\n(?:<!-- =\S* below: [^\n]* -->\n)*(```.*?\n)```", re.S).match(text, mark.end())
        if not rule or not block:
            yield mark.start(), "write <!-- = below: words {figure} words -->, and the block on the next line"
            continue
        before, after = (re.escape(part) for part in (mark["words"][:rule.start()], mark["words"][rule.end():]))
        found = list(re.compile(f"{before}({NUMBER}){after}").finditer(text, block.start(1), block.end(1)))
        if len(found) != 1:
            yield mark.start(), f"the block holds '{mark['words']}' {len(found)} times instead of once"
        else:
            yield Said(*found[0].span(1), rule[1], mark["record"])


def without_mark(text: str, everything: bool) -> Iterator[tuple[int, str]]:
    """Figures that are counted, and those that are measured if `everything`, with no word of where they come from."""
    prose = covered(text, CODE, re.compile(r"^ *\|.*", re.M), re.compile(r"!?\[[^]\n]*\]\([^)]*\)|<[a-z/][^>]*>"))
    prose = re.sub("<!--.*?-->", lambda m: re.sub(r"\d", "x", m[0]), prose, flags=re.S)  # a mark's numbers say nothing
    for claim in CLAIM[everything].finditer(prose):
        *others, last = re.finditer(rf"({NUMBER})(<!-- *(?:=|given: *\w).*?-->)?", claim[1])
        # "d = 64 and 94 %" says one figure, "80 to 90 %" two; none and all are words.
        listed = [figure for figure in others if not prose.endswith("= ", 0, claim.start() + figure.start())] + [last]
        if any(not figure[2] and figure[1] not in ("0", "100") for figure in listed):
            yield claim.start(), " ".join(re.sub(r"<!--.*?-->", "", claim[0], flags=re.S).split())
    marked = {mark.start for mark in marks(text) if isinstance(mark, Said)}
    yield from ((found.start(), found[0]) for found in CTEST.finditer(text) if found.start(1) not in marked)


def pages(root: Path) -> list[Path]:
    found = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("[0-9][0-9]_*/**/*.md")]
    return sorted(page for page in found if not {"mine", "hunt"} & set(page.relative_to(root).parts))


def marks_everything(page: Path, root: Path) -> bool:
    place = page.relative_to(root).parts
    return place[0] in ("README.md", "docs") or place[0].startswith(MEASURED_STAGES)


def line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def read(page: Page) -> tuple[str, list[str], int, int]:
    """The page with its figures as they should be, what is wrong with it, how many figures, how many not counted."""
    text = page.path.read_text(encoding="utf-8")
    label = page.path.relative_to(page.root)
    problems: list[tuple[int, str]] = []
    right: list[tuple[int, int, str]] = []
    count = not_counted = 0
    for mark in marks(text):
        if not isinstance(mark, Said):
            problems.append(mark)
            continue
        said, count = text[mark.start:mark.end], count + 1
        try:
            found = written(page.value(mark.rule, mark.record), said)
        except NotCounted:
            not_counted += 1
            continue
        except BadMark as error:
            problems.append((mark.start, f"{said} = {mark.rule}: {error}"))
            continue
        if found != said:
            problems.append((mark.start, f"says {said}, found {found} = {' '.join(mark.rule.split())}"))
            right.append((mark.start, mark.end, found))
    problems += [(at, f"'{claim}' has no mark: <!-- = ... -->, or <!-- given: where it is from -->")
                 for at, claim in without_mark(text, marks_everything(page.path, page.root))]
    lines = [f"{label}:{line_of(text, at)}: {words}" for at, words in sorted(problems)]
    for start, end, found in sorted(right, reverse=True):
        text = text[:start] + found + text[end:]
    return text, lines, count, not_counted


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="said.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("check", "write"))
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE.md", help="default: all pages of the course")
    parser.add_argument("--build", type=Path, metavar="DIR", help="a build with all tests: tests() is counted there")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments()
    options = parser.parse_intermixed_args(argv)
    root = options.root.resolve()
    chosen = [page.resolve() for page in options.pages] or pages(root)
    for page in chosen:
        if not page.is_file() or root not in page.parents:
            parser.exit(2, f"said.py: {page}: no such page in {root}\n")
    wrong, figures, not_counted = 0, 0, 0
    for path in chosen:
        page = Page(path, root, options.build)
        text, lines, count, lacking = read(page)
        if options.command == "write" and text != path.read_text(encoding="utf-8"):
            write_whole(path, text.encode())
            print(f"{path.relative_to(root)}: written; read the sentences again")
            text, lines, count, lacking = read(page)
        print("\n".join(lines), end="\n" if lines else "", file=sys.stderr)
        wrong, figures, not_counted = wrong + len(lines), figures + count, not_counted + lacking
    lacks = f"; {not_counted} counts of tests not checked: --build DIR, with mutants and benchmarks"
    print(f"{figures} figures, {wrong} problems{lacks if not_counted else ''}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
