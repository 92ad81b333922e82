"""What a chart says (plain data) and how it is drawn (matplotlib, to SVG).

Matplotlib is imported only when something is drawn, so that tables and summaries work without it.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from results import BadResults, Row, Spread, group, ratio, spread

Role = Literal["this", "previous", "peer", "bound"]
Scale = Literal["log2", "log10", "linear"]


# ---------------------------------------------------------------- what a chart says

@dataclass(frozen=True)
class Point:
    x: float
    y: Spread
    finite: bool = True  # False: the benchmark counted NaN or infinity here


@dataclass(frozen=True)
class Line:
    label: str
    points: Sequence[Point]
    role: Role = "this"
    dtype: str = ""


@dataclass(frozen=True)
class Bound:
    """A horizontal dashed line."""

    label: str
    y: float


@dataclass(frozen=True)
class Lines:
    """A panel of lines; panels of one chart stand side by side, and those of one quantity share its range."""

    y_label: str  # the quantity
    lines: Sequence[Line]
    x_label: str = "N, sequence length"
    bounds: Sequence[Bound] = ()
    x_scale: Scale = "log2"
    y_scale: Scale = "log10"
    where: str = ""  # of what, if other panels show the same quantity

    @property
    def heading(self) -> str:
        return self.y_label + (f", {self.where}" if self.where else "")


@dataclass(frozen=True)
class Bar:
    label: str
    value: Spread
    note: str
    role: Role = "this"


@dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars; panels of one chart stand one above the other, and share the range of one unit."""

    title: str
    bars: Sequence[Bar]
    x_label: str
    unit: str = " %"
    bounds: Sequence[Bound] = (Bound("", 100.0),)  # vertical; labels stand above them


@dataclass(frozen=True)
class Chart:
    name: str
    title: str
    panels: Sequence[Lines | Bars]  # all of one kind
    subtitle: str = ""  # empty: machine, precision and FLOP formula
    see: str = ""  # what to look for in it, on whatever machine: a sentence of the page
    counted: bool = False  # arithmetic, not measured: the same on every machine


@dataclass(frozen=True)
class Table:
    name: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    page: str = "README.md"  # where it is written, seen from the stage's folder
    caption: str = ""  # empty: "Medians on" the machine

    def markdown(self) -> str:
        rule = ["---"] + ["---:"] * (len(self.header) - 1)
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (self.header, rule, *self.rows))


def line(label: str, rows: Sequence[Row], field: str, x: str = "N", scale: float = 1.0, role: Role = "this") -> Line:
    """The median of a field (times scale) against the key x, with the band of its middle half."""
    if not rows:
        raise BadResults(f"no rows for the line '{label}'; measure its benchmark too, or check what is selected")
    points = []
    for value, repetitions in group(rows, x).items():
        finite = all(row.counters.get("nonfinite", 0) == 0 for row in repetitions)
        y = spread(repetitions, field).scaled(scale) if finite else Spread(math.nan, math.nan, math.nan)
        points.append(Point(value, y, finite))
    return Line(label, points, role, _dtype(rows))


def ratio_line(label: str, a: Sequence[Row], b: Sequence[Row], field: str, x: str = "N", role: Role = "this") -> Line:
    """a/b where both were measured, paired by repetition."""
    above, below = group(a, x), group(b, x)
    points = [Point(value, ratio(above[value], below[value], field)) for value in above if value in below]
    if not points:
        raise BadResults(f"no pair of rows for the line '{label}'; measure both benchmarks in one run")
    return Line(label, points, role, _dtype(a))


def slope(label: str, start: Line, power: float) -> Line:
    """A dashed reference that grows as x^power from the first finite point of a line."""
    finite = [point for point in start.points if point.finite]
    if not finite:
        raise BadResults(f"no finite point to start the reference '{label}' from")
    at = finite[0]
    values = [(point.x, at.y.mid * (point.x / at.x) ** power) for point in start.points]
    return Line(label, [Point(x, Spread(y, y, y)) for x, y in values], "bound")


def significant(value: float, digits: int = 3) -> str:
    """A number for a reader: 0.0123, 1.23, 123, 12300."""
    if value == 0 or not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits - 1}e}" if value else "0"
    value = float(f"{value:.{digits}g}")
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def _dtype(rows: Sequence[Row]) -> str:
    return ", ".join(sorted({row.dtype for row in rows}))


def subtitle(chart: Chart, context: dict[str, str]) -> str:
    if chart.subtitle:
        return chart.subtitle
    units = " SMs" if context["isa"].startswith("sm_") else " cores"
    cores = context["cores"] + (units if context["cores"].isdigit() else "")
    dtypes = sorted({line.dtype for panel in chart.panels for line in getattr(panel, "lines", ()) if line.dtype})
    return f"{context['device']} ({context['isa']}, {cores}) · {', '.join(dtypes)} · FLOPs: {context['flop_formula']}"


def summary(item: Chart | Table, context: dict[str, str]) -> str:
    """A figure in words and numbers; tests compare this, not pixels."""
    if isinstance(item, Table):
        return "\n".join([f"table {item.name}", *("  " + " | ".join(cells) for cells in (item.header, *item.rows))])

    def numbers(value: Spread) -> str:
        return f"{value.mid:.4g} [{value.low:.4g}, {value.high:.4g}]"

    text = [f"chart {item.name}: {item.title}", f"  {subtitle(item, context)}"]
    for panel in item.panels:
        if isinstance(panel, Bars):
            text.append(f"  bars: {panel.title}; {panel.x_label}")
            text += [f"    {bar.label}: {numbers(bar.value)} ({bar.note})" for bar in panel.bars]
            text += [f"    bound '{bound.label}': {bound.y:.4g}" for bound in panel.bounds if bound.label]
            continue
        text.append(f"  panel: {panel.heading} ({panel.y_scale}) against {panel.x_label} ({panel.x_scale})")
        for each in panel.lines:
            points = [f"{p.x:g}: {numbers(p.y) if p.finite else 'not finite'}" for p in each.points]
            text.append(f"    {each.role} line '{each.label}': " + "; ".join(points))
        text += [f"    bound '{bound.label}': {bound.y:.4g}" for bound in panel.bounds]
    return "\n".join(text)


# ---------------------------------------------------------------- how it is drawn; all lengths in points (1/72 inch)

# A wide chart, for chapters, has its panels side by side; a narrow one, for the page, stacks them, and its text still has
# 11 pixels where a telephone shrinks it to 388.
WIDE, NARROW = 640.0, 350.0
MARGIN, GAP, PLOT_HEIGHT, BAR_HEIGHT = 16.0, 14.0, 215.0, 24.0
SIZE, TITLE = 10.0, 13.0  # of text
LINE = 1.35 * SIZE
LOG = " (log\N{NO-BREAK SPACE}scale)"
INK, FAINT, GRID, CARD = "#222222", "#5a5a5a", "#e3e3de", "#fcfcfa"
# Okabe and Ito, and Tol's wine and a brown: told apart with any kind of colour vision.
COLOURS: dict[Role, list[str]] = {"this": ["#0072B2", "#D55E00", "#882255"], "previous": ["#8a8a8a", "#7a5c3a"],
                                  "peer": ["#009E73", "#CC79A7", "#B07900"], "bound": ["#222222"]}
LEAST_CONTRAST = 4.5  # of text and what it stands on
# Text becomes outlines: it then looks the same in every browser. The salt makes the ids the same in every run.
STYLE = {"font.family": "DejaVu Sans", "font.size": SIZE, "svg.fonttype": "path", "svg.hashsalt": "flash-attention",
         "text.color": INK, "lines.solid_capstyle": "round"}
SCALES = {"log2": math.log2, "log10": math.log10, "linear": float}
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def push_apart(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Centres as near as possible to the wanted ones, in the same order, without overlap, within [low, high].

    Subtract from each centre the room that those below it need; then "no overlap" reads "not decreasing",
    and the nearest such sequence (least squares) is the mean over blocks: isotonic regression.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    room, total = [], 0.0
    for i in order:
        room.append(total + sizes[i] / 2)
        total += sizes[i]
    blocks: list[tuple[float, int]] = []  # mean, count
    for i, below in zip(order, room):
        mean, count = wanted[i] - below, 1
        while blocks and blocks[-1][0] > mean:
            other, others = blocks.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        blocks.append((mean, count))
    shifts = [mean for mean, count in blocks for _ in range(count)]
    centres = [0.0] * len(wanted)
    for i, shift, below in zip(order, shifts, room):
        centres[i] = max(low, min(shift, high - total)) + below
    return centres


def tick_texts(values: Sequence[float]) -> list[str]:
    """Plain numbers, or powers of ten all along an axis where some would be too long."""
    if all(value == 0 or 1e-3 <= abs(value) < 1e5 for value in values):
        return [f"{value:g}" for value in values]
    parts = [f"{value:.1e}".split("e") for value in values]
    powers = ["10" + str(int(exponent)).translate(SUPERSCRIPT) for _, exponent in parts]
    return ["0" if float(mantissa) == 0 else power if float(mantissa) == 1 else f"{float(mantissa):g}·{power}"
            for (mantissa, _), power in zip(parts, powers)]


def ticks(scale: Scale, low: float, high: float) -> list[float]:
    if scale == "log2":
        return [2.0 ** k for k in range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)]
    if scale == "log10":
        decades = math.log10(high / low)
        steps = (1,) if decades > 2.5 else (1, 2, 5) if decades > 0.8 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
        every = max(1, math.ceil(decades / 6))
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [m * 10.0 ** k for k in powers if k % every == 0 for m in steps if low <= m * 10.0 ** k <= high]
    unit = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(m * unit for m in (1, 2, 5, 10) if (high - low) / (m * unit) <= 5.5)
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def limits(values: Sequence[float], scale: Scale, above: float) -> tuple[float, float]:
    """The axis range: some air around the values; a linear axis starts at zero, so that heights compare."""
    low, high = min(values), max(values)
    if scale == "linear":
        return min(0.0, low), (high or 1.0) * (1 + above)
    if low <= 0:
        raise BadResults("zero or a negative number cannot stand on a logarithmic axis; give the panel a linear one")
    decades = max(math.log10(high / low), 0.3)
    return low * 10 ** (-0.06 * decades), high * 10 ** (above * decades)


def right_end(outline) -> float:
    """The largest x of an outline: get_extents() of those contours alone that can reach so far, a hundred times as fast."""
    from matplotlib.path import Path
    contours: list[tuple[float, Path]] = []
    starts = [at for at, code in enumerate(outline.codes) if code == Path.MOVETO] + [len(outline.codes)]
    for begin, end in zip(starts, starts[1:]):
        contour = Path(outline.vertices[begin:end], outline.codes[begin:end])
        contours.append((float(contour.vertices[contour.codes != Path.CLOSEPOLY, 0].max()), contour))
    end = 0.0
    for bound, contour in sorted(contours, key=lambda pair: -pair[0]):  # a curve stays within its control points
        if bound <= end:
            break
        end = max(end, float(contour.get_extents().x1))
    return end


@lru_cache(maxsize=None)
def text_width(text: str, size: float, weight: str = "normal") -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath
    font = FontProperties(family="DejaVu Sans", weight=weight)
    return max((right_end(TextPath((0, 0), part, size=size, prop=font)) for part in text.split("\n") if part.strip()),
               default=0.0)


def wrap(text: str, size: float, width: float, weight: str = "normal") -> list[str]:
    lines: list[str] = []
    for word in text.split(" "):
        if lines and text_width(f"{lines[-1]} {word}", size, weight) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


class Canvas:
    """A figure whose coordinates are points from the upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.figure import Figure
        from matplotlib.transforms import Affine2D
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / 72, height / 72), facecolor=CARD, edgecolor="#d4d4ce", linewidth=1)
        self.points = Affine2D().scale(1 / 72, -1 / 72).translate(0, height / 72) + self.figure.dpi_scale_trans

    def text(self, x: float, y: float, text: str, **style: object) -> None:
        self.figure.text(x, y, text, transform=self.points, **({"va": "center"} | style))

    def line(self, xs: Sequence[float], ys: Sequence[float], **style: object) -> None:
        from matplotlib.lines import Line2D
        self.figure.add_artist(Line2D(xs, ys, transform=self.points, **style))

    def axes(self, left: float, top: float, width: float, height: float):
        box = (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box, facecolor="none")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.tick_params(length=3, color=FAINT, labelcolor=FAINT, pad=3)
        return axes


def contrast(colour: str, behind: str) -> float:
    """The ratio of WCAG 2, from 1 to 21."""
    def luminance(text: str) -> float:
        parts = [int(text[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear))
    low, high = sorted((luminance(colour), luminance(behind)))
    return (high + 0.05) / (low + 0.05)


def legible(colour: str) -> str:
    """The same hue, as dark as text on the card must be."""
    while contrast(colour, CARD) < LEAST_CONTRAST:
        colour = "#" + "".join(f"{int(int(colour[i:i + 2], 16) * 0.95):02x}" for i in (1, 3, 5))
    return colour


def labelled(at: Sequence[float], widths: Sequence[float]) -> list[int]:
    """Which ticks at these places have room for labels this wide: all, or every second, or fewer; always the last."""
    for every in range(1, len(at)):
        kept = list(range(len(at) - 1, -1, -every))[::-1]
        if all(at[b] - at[a] >= (widths[a] + widths[b]) / 2 + 3 for a, b in zip(kept, kept[1:])):
            return kept
    return [len(at) - 1]


def y_range(panel: Lines, panels: Sequence[Lines]) -> tuple[float, float]:
    """Of all panels that show the quantity of this one."""
    same = [other for other in panels if (other.y_label, other.y_scale) == (panel.y_label, panel.y_scale)]
    points = [p for other in same for each in other.lines for p in each.points]
    values = [v for p in points if p.finite for v in (p.y.low, p.y.high)]
    values += [bound.y for other in same for bound in other.bounds]
    return limits(values or [1.0], panel.y_scale, 0.08 if all(p.finite for p in points) else 0.3)


def x_range(panel: Lines, panels: Sequence[Lines]) -> tuple[float, float]:
    xs = [p.x for other in panels if (other.x_label, other.x_scale) == (panel.x_label, panel.x_scale)
          for each in other.lines for p in each.points]
    if panel.x_scale != "linear" and min(xs) <= 0:
        raise BadResults(f"'{panel.x_label}' has the value {min(xs):g}, which a logarithmic axis cannot show")
    return min(xs), max(xs)


def heading(panel: Lines, width: float) -> list[str]:
    return wrap(panel.heading + LOG * (panel.y_scale != "linear"), SIZE, width, "bold")


def below(panel: Lines, width: float) -> list[str]:
    return wrap(panel.x_label + LOG * (panel.x_scale != "linear"), SIZE, width)


def lines_height(panel: Lines, width: float) -> float:
    return LINE * len(heading(panel, width)) + 6 + PLOT_HEIGHT + 24 + LINE * len(below(panel, width)) + 12


def draw_lines(canvas: Canvas, panel: Lines, panels: Sequence[Lines], left: float, top: float, width: float) -> None:
    """The panel, with the ranges of all panels; above `top` stands its heading."""
    fx, fy = SCALES[panel.x_scale], SCALES[panel.y_scale]
    (y_low, y_high), (x_low, x_high) = y_range(panel, panels), x_range(panel, panels)
    x_ticks = ticks(panel.x_scale, x_low, x_high) or sorted({x_low, x_high})
    y_ticks = ticks(panel.y_scale, y_low, y_high)
    x_texts, y_texts = tick_texts(x_ticks), tick_texts(y_ticks)

    labels = ["\n".join(wrap(each.label, SIZE, 0.3 * width)) for each in (*panel.lines, *panel.bounds)]
    before = max((text_width(text, SIZE) for text in y_texts), default=0) + 5
    after = max(text_width(label, SIZE) for label in labels) + 14
    plot_left, plot_width = left + before, width - before - after
    words = heading(panel, width)
    canvas.text(left, top - 6 - LINE * len(words), "\n".join(words), weight="bold", color=FAINT, va="top")
    words = below(panel, width)
    half = max(text_width(text, SIZE) for text in words) / 2
    canvas.text(min(max(plot_left + plot_width / 2, left + half), left + width - half), top + PLOT_HEIGHT + 24,
                "\n".join(words), ha="center", va="top", color=FAINT)

    axes = canvas.axes(plot_left, top, plot_width, PLOT_HEIGHT)
    pad = 0.03 * (fx(x_high) - fx(x_low) or 1)
    x0, x1 = fx(x_low) - pad, fx(x_high) + pad
    axes.set_xlim(x0, x1)
    axes.set_ylim(fy(y_low), fy(y_high))

    def page(x: float, y: float) -> tuple[float, float]:
        return (plot_left + (fx(x) - x0) / (x1 - x0) * plot_width,
                top + PLOT_HEIGHT * (1 - (fy(y) - fy(y_low)) / (fy(y_high) - fy(y_low))))

    shown = labelled([page(tick, y_high)[0] for tick in x_ticks], [text_width(text, SIZE) for text in x_texts])
    axes.set_xticks([fx(x_ticks[i]) for i in shown], [x_texts[i] for i in shown])
    axes.set_yticks([fy(tick) for tick in y_ticks], y_texts)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)

    ends: list[tuple[float, float, str]] = []  # where each label's line ends, and its colour
    used: dict[Role, int] = {}
    cross_rows = 0
    for each in panel.lines:
        colour = COLOURS[each.role][used.setdefault(each.role, 0) % len(COLOURS[each.role])]
        used[each.role] += 1
        dashed = each.role in ("peer", "bound")
        good = [p for p in each.points if p.finite]
        bad = [p for p in each.points if not p.finite]
        at = [fx(p.x) for p in good]
        axes.fill_between(at, [fy(p.y.low) for p in good], [fy(p.y.high) for p in good],
                          color=colour, alpha=0.18, linewidth=0)
        axes.plot(at, [fy(p.y.mid) for p in good], color=colour, linewidth=1.2 if each.role == "bound" else 2,
                  linestyle=(0, (4, 3)) if dashed else "-", marker="" if each.role == "bound" else "o", markersize=4)
        end = page(each.points[-1].x, y_high)
        if bad:
            # Lines that fail in the same place get a row each, below the top edge.
            cross_y = top + 4 + 26 * cross_rows
            cross_rows += 1
            crosses = [page(p.x, y_high)[0] for p in bad]
            canvas.line(crosses, [cross_y] * len(bad), color=colour, linestyle="", marker="x", markersize=6,
                        markeredgewidth=1.8)
            forever = all(p.x < bad[0].x for p in good)
            note = "NaN / inf from here" if forever else "NaN / inf"
            fits = crosses[0] + text_width(note, SIZE) <= plot_left + plot_width + 6
            canvas.text(crosses[0] - 4 if fits else crosses[0] + 4, cross_y + 14, note,
                        ha="left" if fits else "right", color=legible(colour))
            end = (end[0], cross_y)
        if each.points[-1].finite:
            end = page(each.points[-1].x, each.points[-1].y.mid)
        ends.append((*end, colour))
    for bound in panel.bounds:
        axes.axhline(fy(bound.y), color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        ends.append((plot_left + plot_width, page(x_low, bound.y)[1], INK))

    heights = [LINE * (label.count("\n") + 1) for label in labels]
    centres = push_apart([y for _, y, _ in ends], heights, top - 6, top + PLOT_HEIGHT + 6)
    at_label = plot_left + plot_width + 12
    for label, (x, y, colour), centre in zip(labels, ends, centres):
        canvas.line([x + 4, at_label - 2], [y, centre], color=colour, linewidth=0.7, alpha=0.7)
        canvas.text(at_label, centre, label, color=legible(colour), linespacing=1.1)


@dataclass(frozen=True)
class BarRows:
    """How the rows of bars stand: label, bar and note side by side, or in a narrow chart the bar below the two."""

    before: float
    after: float
    height: float
    bar: tuple[float, float]  # its upper and lower edge, as shares of the row
    text: float  # likewise


def bar_rows(panels: Sequence[Bars], narrow: bool) -> BarRows:
    if narrow:
        return BarRows(0, 10, 36, (0.46, 0.88), 0.22)
    bars = [bar for panel in panels for bar in panel.bars]
    return BarRows(max((text_width(bar.label, SIZE) for bar in bars), default=0) + 10,
                   max((text_width(bar.note, SIZE) for bar in bars), default=0) + 10, BAR_HEIGHT, (0.19, 0.81), 0.5)


def bound_labels(panel: Bars, width: float) -> list[list[str]]:
    """Each in lines, none wider than its share of the width."""
    named = [bound.label for bound in panel.bounds if bound.label]
    return [wrap(label, SIZE, width / len(named) - 12) for label in named]


def bounds_height(panel: Bars, width: float) -> float:
    """The room that the labels of the bounds need above the bars."""
    return max((LINE * len(words) + 10 for words in bound_labels(panel, width)), default=0.0)


def bars_height(panel: Bars, rows: BarRows, width: float) -> float:
    title = LINE * len(wrap(panel.title, SIZE, width, "bold"))
    return title + 5 + bounds_height(panel, width) + rows.height * len(panel.bars) + 54


def draw_bars(canvas: Canvas, panel: Bars, panels: Sequence[Bars], left: float, top: float, width: float,
              rows: BarRows) -> None:
    title = wrap(panel.title, SIZE, width, "bold")
    height = rows.height * len(panel.bars)
    canvas.text(left, top, "\n".join(title), weight="bold", color=FAINT, va="top")
    plot_left, plot_width = left + rows.before, width - rows.before - rows.after
    plot_top = top + LINE * len(title) + 5 + bounds_height(panel, width)
    axes = canvas.axes(plot_left, plot_top, plot_width, height)
    same = [other for other in panels if other.unit == panel.unit]
    most = max(value for other in same for value in (*(bound.y for bound in other.bounds),
                                                     *(bar.value.high for bar in other.bars)))
    marks = ticks("linear", 0, most)
    if marks[-1] < most:
        marks.append(marks[-1] + marks[1])  # the axis ends with a tick
    axes.set_xlim(0, marks[-1])
    axes.set_ylim(len(panel.bars), 0)
    axes.set_yticks([])
    texts = [f"{mark:g}{panel.unit}" for mark in marks]
    shown = labelled([plot_width * mark / marks[-1] for mark in marks], [text_width(text, SIZE) for text in texts])
    axes.set_xticks([marks[i] for i in shown], [texts[i] for i in shown])
    spans = [(0, len(panel.bars))] if rows.before else [(i + rows.bar[0], i + rows.bar[1])
                                                        for i in range(len(panel.bars))]
    for bound in panel.bounds:
        axes.vlines([bound.y] * len(spans), *zip(*spans), color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    named = [bound for bound in panel.bounds if bound.label]
    at = [plot_left + plot_width * bound.y / marks[-1] for bound in named]
    words = bound_labels(panel, width)
    sizes = [max(text_width(text, SIZE) for text in lines) + 12 for lines in words]
    for lines, x, centre in zip(words, at, push_apart(at, sizes, left, left + width)):
        canvas.text(centre, plot_top - 10, "\n".join(lines), ha="center", va="bottom", color=FAINT)
        canvas.line([centre, x], [plot_top - 8, plot_top], color=FAINT, linewidth=0.7)
    for i, bar in enumerate(panel.bars):
        colour = COLOURS[bar.role][0]
        middle = i + sum(rows.bar) / 2
        axes.barh(middle, bar.value.mid, height=rows.bar[1] - rows.bar[0], color=colour)
        axes.plot([bar.value.low, bar.value.high], [middle, middle], color=INK, linewidth=1.2)
        y = plot_top + rows.height * (i + rows.text)
        canvas.text(left, y, bar.label)
        canvas.text(left + width, y, bar.note, ha="right", color=legible(colour))
    canvas.text(plot_left + plot_width / 2, plot_top + height + 28, panel.x_label, ha="center", color=FAINT)


def must_be_drawable(chart: Chart) -> None:
    if not chart.panels or not all(p.bars if isinstance(p, Bars) else any(each.points for each in p.lines)
                                   for p in chart.panels):
        raise BadResults(f"the chart '{chart.name}' has nothing to show; measure what it selects")
    for panel in chart.panels:
        try:
            if isinstance(panel, Lines):
                x_range(panel, [panel]), y_range(panel, [panel])
        except BadResults as error:
            raise BadResults(f"chart '{chart.name}', panel '{panel.heading}': {error}") from None


def render(chart: Chart, context: dict[str, str], narrow: bool = False, beside: Sequence[Chart] = ()) -> bytes:
    """The chart as SVG, with the ranges of those that will stand beside it; the same input gives the same bytes."""
    must_be_drawable(chart)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no word about font caches on a reader's terminal
    try:
        import matplotlib.style
    except ImportError:
        raise BadResults("matplotlib is missing and the charts are drawn with it; install the package "
                         "python3-matplotlib, or: python3 -m pip install matplotlib") from None
    with matplotlib.style.context(["default", STYLE]):
        full = NARROW if narrow else WIDE
        inner = full - 2 * MARGIN
        title = wrap(chart.title, TITLE, inner, "bold")
        about = wrap(subtitle(chart, context), SIZE, inner)
        top = MARGIN + 18 * len(title) + LINE * len(about) + 14
        bars = [panel for panel in chart.panels if isinstance(panel, Bars)]
        lines = [panel for panel in chart.panels if isinstance(panel, Lines)]
        columns = 1 if narrow or bars else len(lines)
        width = (inner - GAP * (columns - 1)) / columns
        rows = bar_rows(bars, narrow)
        heights = [bars_height(panel, rows, width) for panel in bars] or [lines_height(panel, width) for panel in lines]
        canvas = Canvas(full, top + (max(heights) if columns > 1 else sum(heights)))
        canvas.text(MARGIN, MARGIN - 3, "\n".join(title), fontsize=TITLE, weight="bold", va="top", linespacing=1.15)
        canvas.text(MARGIN, MARGIN + 18 * len(title), "\n".join(about), color=FAINT, va="top")
        everyone = [panel for one in (chart, *beside) for panel in one.panels]
        for panel, height in zip(bars, heights):
            draw_bars(canvas, panel, [p for p in everyone if isinstance(p, Bars)], MARGIN, top, width, rows)
            top += height
        highest = max((len(heading(panel, width)) for panel in lines), default=0)
        for i, (panel, height) in enumerate(zip(lines, heights)):
            above = LINE * (highest if columns > 1 else len(heading(panel, width))) + 6
            draw_lines(canvas, panel, [p for p in everyone if isinstance(p, Lines)],
                       MARGIN + (i * (width + GAP) if columns > 1 else 0), top + above, width)
            if columns == 1:
                top += height
        file = io.BytesIO()
        canvas.figure.savefig(file, format="svg",
                              metadata={"Date": None, "Creator": None, "Title": chart.title})
        return file.getvalue()
