"""What the report's pictures have in common: axes, colours, and the names of what they show.

Figures are made without pyplot (no global state, no display) and inlined as SVG images, so that no
identifier of one can clash with another's. One colour per meaning: grey is the server without a head, blue
with it, red the line at 1.0 below which speculation costs; further methods have colours of their own.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from serve_eval.config import POOLED

INK, MUTED, GRID = "#1c2330", "#667085", "#e4e7ec"
BASELINE, SPECULATION, LOSS = "#98a2b3", "#2f5fd0", "#c0392b"
ROUTES = ("#2f5fd0", "#d97706", "#12805c", "#a23b9c", "#0e8fa8", "#b4413c", "#6b5bd2", "#7a6a00")
METHOD_COLORS = ("#d97706", "#12805c", "#a23b9c", "#0e8fa8", "#b4413c", "#7a6a00")
METHOD_NAMES = {"ngram": "prompt lookup", "draft_model": "draft model", "suffix": "suffix decoding"}

Summary = Mapping[str, Any]


def clients(end: float) -> str:
    """A crossover concurrency as text: as exact as it is known, "5.4", "4" or "37"."""
    return f"{end:.0f}" if end >= 10 else f"{round(end, 1):g}"


def pooled_cells(served: Summary, route: str = POOLED) -> dict[tuple[str, int], Mapping[str, Any]]:
    """(method, concurrency) -> cell of one route; by default of all pooled."""
    return {(cell["method"], cell["concurrency"]): cell for cell in served["cells"] if cell["route"] == route}


def measured_concurrencies(served: Summary) -> list[int]:
    """The concurrencies that were measured, ascending."""
    return sorted({cell["concurrency"] for cell in served["cells"]})


def head_of(served: Summary) -> str:
    """The method that the summary's first figures are about."""
    return str(served.get("head", "eagle3"))


def method_names(served: Summary) -> dict[str, str]:
    """Method -> how it is called, in the order of the figures; the server alone comes first."""
    told = {"none": "without a head", "eagle3": "with the head", "mtp": "with the head"}
    others = {name: each for name, each in served.get("methods", {}).items() if name not in told}
    for name, each in others.items():
        told[name] = f"{METHOD_NAMES.get(each['method'], 'head')}, k = {each['k']}"
    measured = {cell["method"] for cell in served["cells"]}
    return {name: text for name, text in told.items() if name in measured}


def method_color(served: Summary, name: str) -> str:
    """Grey for the server alone, blue for the head (the summary's first method), another for each other method."""
    if name == "none":
        return BASELINE
    if name == head_of(served):
        return SPECULATION
    others = [each for each in method_names(served) if each not in ("none", head_of(served))]
    return METHOD_COLORS[others.index(name) % len(METHOD_COLORS)]


def drafted(summary: Summary) -> str:
    """How far the reference decoder drafted: "k = 4", or "a tree of 21 drafts"."""
    return str(summary["reference"].get("how") or f"k = {summary['k']}").rpartition(", ")[2]


def named(route: str) -> str:
    """A route as a label: matplotlib leaves those that begin with an underscore out of legends."""
    return f" {route}" if route.startswith("_") else route


def plain_axes(axes: Axes) -> None:
    """The look of all axes."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=9)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def new_axes(width: float = 6.4, height: float = 3.7) -> tuple[Figure, Axes]:
    """A figure of one picture."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    plain_axes(axes)
    return figure, axes


def label(axes: Axes, x: str, y: str) -> None:
    """Name both axes."""
    axes.set_xlabel(x, color=MUTED, fontsize=9.5)
    axes.set_ylabel(y, color=MUTED, fontsize=9.5)


def legend(axes: Axes, **options: Any) -> None:
    """The legend, or a word where nothing is known that it could name."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, **options)
    else:
        axes.text(0.5, 0.5, "not known", transform=axes.transAxes, ha="center", color=MUTED)


def image(figure: Figure) -> str:
    """The figure as a data URL of an SVG; the same figure gives the same bytes."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "draftsmith"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, facecolor="white")
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue().encode()).decode()


def concurrency_axis(axes: Axes, concurrencies: Sequence[float]) -> None:
    """A logarithmic axis with a tick at each."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(concurrencies)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(concurrencies[0] / 1.15, concurrencies[-1] * 1.15)
