"""Draws the charts and writes the tables of the stages from recorded measurements.

A stage says what it shows in <stage>/check/charts.py: charts(r: Results) -> list[Chart | Table].
"""

from __future__ import annotations

import argparse
import base64
import html
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from figure import Bar, Bars, Chart, Table, must_be_drawable, render, significant, summary  # noqa: E402
from results import (BadResults, Results, Row, cleaned, complete, load, median, recorded, spread,  # noqa: E402
                     unfit, write_all)

LADDER_N = 4096


# ---------------------------------------------------------------- what the stages declare

def figures(stage: Path, results: Results) -> list[Chart | Table]:
    """What the stage's own check/charts.py makes of these results."""
    source = stage / "check" / "charts.py"
    spec = importlib.util.spec_from_file_location(f"charts_of_{stage.name}", source)
    if not source.is_file() or spec is None or spec.loader is None:
        raise BadResults(f"{source}: no such file; a stage declares its charts there")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        items = list(module.charts(results))
        names = [item.name for item in items]
    except BadResults as error:
        raise BadResults(f"{results.path}, {stage.name}: {error}") from None
    except Exception as error:  # a mistake in a stage's file is reported like any other bad input
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        raise BadResults(f"{source}: {type(error).__name__}: {error} (line {line})") from None
    for name in names:
        if not re.fullmatch(r"[a-z0-9_-]+", name):
            raise BadResults(f"{source}: the name '{name}' cannot name a file; use a-z, 0-9, '-' and '_'")
    return items


def with_table(text: str, table: Table, readme: Path, caption: str) -> str:
    """The README with the table between its two marks."""
    start, end = f"<!-- table:{table.name} -->", "<!-- end -->"
    before, found, rest = text.partition(start)
    inside, closed, after = rest.partition(end)
    if not found or not closed or "<!-- table:" in inside:
        raise BadResults(f"{readme}: no place for the table '{table.name}'; add the lines {start} and {end}")
    return f"{before}{start}\n{table.markdown()}\n\n{caption}\n{end}{after}"


# ---------------------------------------------------------------- the ladder: every stage against its machine's roof

def best(stage: Path, results: Results) -> list[Row]:
    """The rows of the stage's fastest variant, forward, at the ladder's N or else the largest.

    Where a stage has nothing in f32 they are in bf16, and their roof is a matrix product in bf16."""
    where = {"stage": f"stage{stage.name[:2]}", "what": "forward", "d": 64, "causal": 0}
    rows = results.select(dtype="f32", **where) or [
        row for row in results.select(dtype="bf16", **where)
        if row.keys.get("G", 1) == 1 and row.keys.get("chip", "hot") == "hot"]
    lengths = {row.keys.get("N", 0) for row in rows}
    if not lengths:
        return []
    n = LADDER_N if LADDER_N in lengths else max(lengths)
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        if row.keys.get("N") == n:
            by_name.setdefault(row.name, []).append(row)
    return max(by_name.values(), key=lambda variant: median(variant, "of_roof"))


def ladder_chart(found: Sequence[tuple[Path, Results]]) -> Chart:
    """One panel for CPUs and one for GPUs, each for the one machine that has measured the most stages."""
    machines: dict[tuple[bool, str], list[tuple[Path, Results]]] = {}
    for stage, results in found:
        if best(stage, results):
            machines.setdefault((results.is_gpu, results.context["machine"]), []).append((stage, results))
    panels = []
    backward = sorted({stage.name.replace("_", " ") for stage, results in found
                       if not best(stage, results) and results.select(what="backward")})
    shown = [best(stage, results)[0].keys["N"] for runs in machines.values() for stage, results in runs]
    usual = LADDER_N if LADDER_N in shown else max(shown, default=LADDER_N, key=shown.count)
    for gpu in (False, True):
        candidates = [runs for (is_gpu, _), runs in sorted(machines.items()) if is_gpu == gpu]
        if not candidates:
            continue
        runs = max(candidates, key=len)
        bars = []
        for stage, results in sorted(runs, key=lambda run: run[0].name):
            rows = best(stage, results)
            share, n = spread(rows, "of_roof").scaled(100), rows[0].keys["N"]
            speed = median(rows, "flops")
            text = f"{significant(1e-9 * speed)} GFLOP/s" if speed < 1e12 else f"{significant(1e-12 * speed)} TFLOP/s"
            note = f"{significant(share.mid, 2)} %, {text}"
            half = rows[0].dtype == "bf16"
            bars.append(Bar(stage.name.replace("_", " ") + (", bf16" if half else ""), share,
                            note + (f", N {n}" if n != usual else "")))
        context = runs[0][1].context
        label = "Share of this machine's FMA peak" + (" (bf16: of a matrix product)" if half else "")
        panels.append(Bars(f"{'GPU' if gpu else 'CPU'}: {context['device']}", bars, label))
    if not panels:
        raise BadResults("no stage has a recorded forward row with d:64, causal:0, f32; measure and record one first")
    formula = context["flop_formula"]
    return Chart("ladder", "How much of the machine each stage uses", panels,
                 f"Forward, N {usual}, d 64, no mask, f32 unless said · median and middle half · FLOPs: {formula}"
                 + "".join(f" · {name} has no bar: it is a backward alone" for name in backward),
                 see="Each bar is a share of its own machine's peak, so that what a stage gains is its idea's and not "
                     "the hardware's.")


# ---------------------------------------------------------------- one page: this machine beside the recorded ones

# Each pair of colours is read by a test: text needs contrast in both.
PAGE_COLOURS = {"light": {"page": "#ffffff", "ink": "#1f1f1f", "faint": "#595959", "link": "#0a58a8"},
                "dark": {"page": "#17191c", "ink": "#e8e8e4", "faint": "#adada8", "link": "#85bdf5"}}


def variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


PAGE_STYLE = f"""
:root {{ color-scheme: light dark; {variables(PAGE_COLOURS["light"])} }}
@media (prefers-color-scheme: dark) {{ :root {{ {variables(PAGE_COLOURS["dark"])} }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem;
  background: var(--page); color: var(--ink); overflow-wrap: anywhere; }}
a {{ color: var(--link); }} h1 {{ line-height: 1.25; }} h2 {{ margin-top: 3rem; }}
nav > ul {{ list-style: none; padding: 0; columns: 24rem; }} nav > ul > li {{ break-inside: avoid; margin-bottom: .4rem; }}
nav ul ul {{ padding-left: 1.5rem; font-size: 14px; }}
.charts, .pair {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 0 1rem;
  align-items: start; }}
.chart.beside {{ grid-column: 1 / -1; }} .see {{ max-width: 44rem; }}
figure {{ margin: 0 0 1.5rem; }} img {{ width: 100%; max-width: 520px; border-radius: 6px; display: block; }}
figcaption, .missing {{ color: var(--faint); font-size: 14px; }}
table {{ border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }}
td, th {{ padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #8884; overflow-wrap: normal; }}
td:first-child, th:first-child {{ text-align: left; }} table:not(.context) td {{ white-space: nowrap; }}
.warning {{ border-left: 4px solid #d55e00; padding-left: .7rem; }}
details {{ margin: .5rem 0; overflow-x: auto; }} .context td {{ text-align: left; }}
"""


def missing(text: str) -> str:
    return f'<p class="missing">{html.escape(text)}</p>'


def warning(text: str) -> str:
    return f'<p class="warning">{html.escape(text)}</p>'


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
    return f'<table class="{kind}">{line(header, "th")}{"".join(line(row, "td") for row in rows)}</table>'


@dataclass(frozen=True)
class Shown:
    """A chart on the page: of this machine, or recorded."""

    chart: Chart
    context: dict[str, str]
    caption: str
    mine: bool


def picture(shown: Shown, svg: bytes) -> str:
    # A data URI keeps the ids of one drawing from meeting those of another.
    data = base64.b64encode(svg).decode()
    alt = html.escape(summary(shown.chart, shown.context), quote=True)
    return (f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{alt}">'
            f"<figcaption>{html.escape(shown.caption)}</figcaption></figure>")


def block(anchor: str, both: Sequence[Shown], svgs: Sequence[bytes]) -> str:
    """What to see, and below it this machine's drawing beside the recorded one."""
    pictures = "".join(map(picture, both, svgs))
    return (f'<div class="chart{" beside" * (len(both) > 1)}" id="{anchor}"><p class="see">'
            f'{html.escape(both[0].chart.see)}</p><div class="pair">{pictures}</div></div>')


def drawings(both: Sequence[Shown]) -> list[bytes]:
    """With the same ranges, since they stand side by side."""
    charts = [shown.chart for shown in both]
    return [render(shown.chart, shown.context, narrow=True, beside=charts) for shown in both]


def medians(results: Results) -> str:
    by_name: dict[str, list[Row]] = {}
    for row in results.rows:
        by_name.setdefault(row.name, []).append(row)
    lines = []
    for name, rows in by_name.items():
        time = spread(rows, "time").scaled(1e3)
        has = {key for key in ("flops", "roof") if all(row.counters.get(key, 0) > 0 for row in rows)}
        lines.append([name, significant(time.mid), f"{significant(time.low)} to {significant(time.high)}",
                      significant(1e-9 * median(rows, "flops")) if "flops" in has else "",
                      significant(100 * median(rows, "of_roof"), 2) if len(has) == 2 else ""])
    table = html_table(["Benchmark", "Time (ms)", "Range (ms)", "GFLOP/s", "% of the roof"], lines)
    return f"<details><summary>Medians of {len(lines)} benchmarks</summary>{table}</details>"


@dataclass(frozen=True)
class Section:
    """Of the page, with what the contents say of it."""

    anchor: str
    title: str
    state: str
    charts: list[tuple[str, str]]  # anchor, title
    body: str

    def entry(self) -> str:
        inside = "".join(f'<li><a href="#{anchor}">{html.escape(title)}</a></li>' for anchor, title in self.charts)
        return (f'<li><a href="#{self.anchor}">{html.escape(self.title)}</a>, {html.escape(self.state)}'
                + (f"<ul>{inside}</ul>" if inside else "") + "</li>")


def section_of_stage(stage: Path, measured: Path, out: Path, outputs: dict[Path, bytes],
                     runs: dict[str, list[tuple[Path, Results]]]) -> Section:
    mine = measured / f"{stage.name}.json"
    found: dict[str, list[Shown]] = {}  # by chart, this machine first
    warnings: list[str] = []
    after = []
    for path in [mine] * mine.exists() + recorded(stage):
        where = "this machine" if path == mine else "recorded"
        try:
            results = complete(path) if where == "recorded" else load(path)
            runs[where].append((stage, results))
            after += [missing(f"{where}: {name} gave no figure: {why}") for name, why in dict.fromkeys(results.errors)]
            caption = f"{where}: {results.context['machine']}, {results.context['date'][:10]}"
            for item in figures(stage, results):
                if isinstance(item, Chart):
                    must_be_drawable(item)
                    same = found.setdefault(item.name, [])
                    if not (item.counted and same):
                        same.append(Shown(item, results.context, "counted, not measured" if item.counted else caption,
                                          path == mine))
        except BadResults as error:
            after.append(missing(f"{where}: {error}"))
            continue
        if path == mine:
            warnings += [warning(str(words)) for words in (results.context.get("busy"), unfit(results)) if words]
            context = html_table(["Context", ""], [(k, str(v)) for k, v in results.context.items()
                                                   if k not in ("host_name", "executable")], "context")
            after.append(medians(results) + f"<details><summary>This machine</summary>{context}</details>")
    title = stage.name.replace("_", " ")
    parts = [f'<h2 id="{stage.name}">{html.escape(title)}</h2>']
    if (stage / "README.md").is_file():
        link = html.escape(os.path.relpath(stage / "README.md", out.resolve().parent), quote=True)
        parts.append(f'<p>The chapter: <a href="{link}">{stage.name}/README.md</a></p>')
    if not mine.exists():
        parts.append(missing("Not measured on this machine."))
    if not recorded(stage):
        parts.append(missing("Nothing recorded in the repository yet."))
    blocks = []
    for name, both in found.items():
        svgs = drawings(both)
        blocks.append(block(f"{stage.name}.{name}", both, svgs))
        outputs |= {measured / svg_name(shown.chart, shown.context, stage): svg
                    for shown, svg in zip(both, svgs) if shown.mine}
    parts += [*warnings, f'<div class="charts">{"".join(blocks)}</div>', *after]
    state = "measured here" if mine.exists() else "recorded" if recorded(stage) else "nothing yet"
    return Section(stage.name, title, state, [(f"{stage.name}.{name}", both[0].chart.title)
                                              for name, both in found.items()], "\n".join(parts))


def section_of_ladder(runs: dict[str, list[tuple[Path, Results]]]) -> Section:
    both, after = [], []
    for where, found in runs.items():
        try:
            both.append(Shown(ladder_chart(found), {}, where, where != "recorded"))
        except BadResults as error:
            after.append(missing(f"{where}: {error}"))
    parts = ['<h2 id="ladder">The ladder</h2>', *([block("ladder.chart", both, drawings(both))] if both else []), *after]
    return Section("ladder", "The ladder", "all stages in one chart", [], "\n".join(parts))


def page(stages: Sequence[Path], measured: Path, out: Path) -> dict[Path, bytes]:
    if not measured.is_dir():
        raise BadResults(f"{measured}: no such folder; measure first")
    outputs: dict[Path, bytes] = {}
    runs: dict[str, list[tuple[Path, Results]]] = {"this machine": [], "recorded": []}
    sections = [section_of_stage(stage, measured, out, outputs, runs) for stage in stages]
    sections.insert(0, section_of_ladder(runs))
    body = "\n".join(["<h1>FlashAttention from scratch: measured here, and recorded</h1>",
                      "<p>Where this machine has measured a stage, its chart stands before the recorded one and has the "
                      "same range. Dots are medians, bands the middle half of the rounds.</p>",
                      f'<nav><ul>{"".join(section.entry() for section in sections)}</ul></nav>',
                      *(section.body for section in sections)])
    outputs[out] = (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
                    f'<meta name="viewport" content="width=device-width"><title>FlashAttention from scratch</title>'
                    f"<style>{PAGE_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n").encode()
    return outputs


# ---------------------------------------------------------------- commands; each returns the files to write

def svg_name(chart: Chart, context: dict[str, str], stage: Path | None = None) -> str:
    return (f"{stage.name}." if stage else "") + f"{context['machine']}.{chart.name}.svg"


def draw(stages: Sequence[Path], results_name: str | None, out: Path | None, tables: bool) -> dict[Path, bytes]:
    outputs: dict[Path, bytes] = {}
    for stage in stages:
        named = results_name and (Path(results_name) if "/" in results_name else stage / "results" / results_name)
        paths = [named] if named else recorded(stage)
        if not paths:
            raise BadResults(f"{stage}: nothing recorded in results/; measure and record first")
        for path in paths:
            if tables and path.resolve().parent != stage / "results":
                raise BadResults(f"{path}: tables are written from recorded files only; record it first")
            results = complete(path)
            for item in figures(stage, results):
                if isinstance(item, Chart):
                    name = svg_name(item, results.context, stage if out else None)
                    outputs[(out or path.parent) / name] = render(item, results.context)
                elif tables and path == paths[0]:
                    readme = stage / item.page
                    if readme not in outputs and not readme.is_file():
                        raise BadResults(f"{readme}: no such file; the tables are written into it")
                    text = (outputs.get(readme) or readme.read_bytes()).decode()
                    caption = item.caption or f"Medians on {results.context['device']} (`results/{path.name}`)."
                    outputs[readme] = with_table(text, item, readme, caption).encode()
    return outputs


def ladder(stages: Sequence[Path], out: Path) -> dict[Path, bytes]:
    return {out: render(ladder_chart([(stage, complete(path)) for stage in stages for path in recorded(stage)]), {})}


def folder(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {text}")
    return path


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="charts.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, help: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help, description=help)

    one = command("draw", "draw the charts of stages from their recorded results")
    one.add_argument("stages", nargs="+", type=folder, metavar="STAGE_DIR")
    one.add_argument("--results-name", metavar="NAME.json", help="only this file in results/, or a path with a '/'")
    one.add_argument("--out", type=Path, metavar="DIR", help="write there (default: beside the results)")
    one.add_argument("--tables", action="store_true", help="also write the tables into the stages' README.md")
    one = command("record", "clean a measurement and put it into a stage's results/")
    one.add_argument("src", type=Path, metavar="SRC.json")
    one.add_argument("stage", type=folder, metavar="STAGE_DIR")
    one = command("check", "say in one line why a measurement cannot be used; nothing if it can")
    one.add_argument("file", type=Path, metavar="FILE")
    one.add_argument("--size", choices=("quick", "full"), default="", help="and it has what such a run has, or more")
    one = command("ladder", "draw every stage's share of its machine's peak")
    one.add_argument("--out", type=Path, required=True, metavar="FILE")
    one.add_argument("stages", nargs="+", type=folder, metavar="STAGE_DIR")
    one = command("page", "write one page with this machine's charts beside the recorded ones")
    one.add_argument("out", type=Path, metavar="OUT.html")
    one.add_argument("stages", nargs="+", type=folder, metavar="STAGE_DIR")
    one.add_argument("--measured", type=Path, required=True, metavar="DIR", help="holds <stage folder name>.json")
    one = command("summary", "print the figures of a results file as text")
    one.add_argument("file", type=Path, metavar="FILE")
    one.add_argument("--stage", type=folder, metavar="STAGE_DIR", help="default: the folder above the file's own")
    return parser


def run(options: argparse.Namespace) -> None:
    outputs: dict[Path, bytes] = {}
    if options.command == "draw":
        outputs = draw(options.stages, options.results_name, options.out, options.tables)
    elif options.command == "ladder":
        outputs = ladder(options.stages, options.out)
    elif options.command == "page":
        outputs = page(options.stages, options.measured, options.out)
    elif options.command == "record":
        target = options.stage / "results" / f"{load(options.src).context['machine']}.json"
        outputs = {target: cleaned(options.src, target)}
        target.parent.mkdir(exist_ok=True)
    elif options.command == "check":
        complete(options.file, options.size)
    else:
        results = load(options.file)
        stage = options.stage or options.file.resolve().parent.parent
        print("\n".join(summary(item, results.context) for item in figures(stage, results)))
    write_all(outputs)  # everything is drawn before the first byte is written
    for path in outputs:
        print(path)


def main(argv: Sequence[str] | None = None) -> int:
    sys.dont_write_bytecode = True  # the stages' folders stay as they are
    options = arguments().parse_args(argv)
    try:
        run(options)
    except BadResults as error:
        print(f"charts.py: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"charts.py: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
