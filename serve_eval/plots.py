"""The report's pictures, each from the contents of summary.json alone.

Figures are made without pyplot (no global state, no display) and inlined as SVG images, so that no
identifier of one can clash with another's. One colour per meaning: grey is the server without a head, blue
with it, red the line at 1.0 below which speculation costs.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

INK, MUTED, GRID = "#1c2330", "#667085", "#e4e7ec"
BASELINE, SPECULATION, LOSS = "#98a2b3", "#2f5fd0", "#c0392b"
ROUTES = ("#2f5fd0", "#d97706", "#12805c", "#a23b9c", "#0e8fa8", "#b4413c", "#6b5bd2", "#7a6a00")
Summary = Mapping[str, Any]


def method_names(served: Summary) -> dict[str, str]:
    """The methods that were measured, the plain server's first, and what they are called."""
    methods = dict.fromkeys(cell["method"] for cell in served["cells"])
    return {method: "without a head" if method == "none" else f"with the head ({method})" for method in methods}


def drafting_method(served: Summary) -> str:
    """The method that drafts."""
    return next((method for method in method_names(served) if method != "none"), "none")


def clients(end: float) -> str:
    """A crossover concurrency as text: as exact as it is known, "5.4", "4" or "37"."""
    return f"{end:.0f}" if end >= 10 else f"{round(end, 1):g}"


def pooled_cells(served: Summary, route: str = "all") -> dict[tuple[str, int], Mapping[str, Any]]:
    """(method, concurrency) -> cell of one route; by default of all pooled."""
    return {(cell["method"], cell["concurrency"]): cell for cell in served["cells"] if cell["route"] == route}


def measured_concurrencies(served: Summary) -> list[int]:
    """The concurrencies that were measured, ascending."""
    return sorted({cell["concurrency"] for cell in served["cells"]})


def _axes(width: float = 6.4, height: float = 3.7) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=9)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, color=MUTED, fontsize=9.5)
    axes.set_ylabel(y, color=MUTED, fontsize=9.5)


def _legend(axes: Axes, **options: Any) -> None:
    """The legend, or a word where nothing is known that it could name."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, **options)
    else:
        axes.text(0.5, 0.5, "not known", transform=axes.transAxes, ha="center", color=MUTED)


def _image(figure: Figure) -> str:
    """The figure as a data URL of an SVG; the same figure gives the same bytes."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "draftsmith"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, facecolor="white")
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue().encode()).decode()


def _concurrency_axis(axes: Axes, concurrencies: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(concurrencies)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(concurrencies[0] / 1.15, concurrencies[-1] * 1.15)


def _plot_speedup(summary: Summary) -> Figure:
    served = summary["served"]
    figure, axes = _axes(11.5, 3.8)
    concurrencies = measured_concurrencies(served)
    for index, (route, ratios) in enumerate(served.get("speedup_by_route", {}).items()):
        known = [(c, ratios[str(c)]) for c in concurrencies if ratios.get(str(c)) is not None]
        if known:
            axes.plot(
                *zip(*known, strict=True), color=ROUTES[index % len(ROUTES)], linewidth=1.1, alpha=0.75, label=route
            )
    pooled = [(c, served["speedup"][str(c)]) for c in concurrencies if served["speedup"].get(str(c)) is not None]
    if pooled:
        axes.plot(*zip(*pooled, strict=True), color=INK, linewidth=2.4, marker="o", markersize=5, label="all routes")
    axes.axhline(1.0, color=LOSS, linewidth=1.1, linestyle=(0, (4, 3)))
    end = served["crossover_concurrency"]
    if end is not None:
        axes.axvline(end, color=LOSS, linewidth=0.9, alpha=0.6)
        right = end > (concurrencies[0] * concurrencies[-1]) ** 0.5
        axes.annotate(
            f"gain ends at {clients(end)}" if end > concurrencies[0] else "no gain",
            (end, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-5 if right else 5, -3),
            textcoords="offset points",
            ha="right" if right else "left",
            va="top",
            color=LOSS,
            fontsize=9,
        )
    _concurrency_axis(axes, concurrencies)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.9), max(high, 1.1) + 0.06 * (high - low))
    _label(axes, "concurrent clients", "speedup of output tokens/s")
    _legend(axes, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=INK)
    return figure


def _plot_throughput(summary: Summary) -> Figure:
    served = summary["served"]
    figure, axes = _axes()
    concurrencies, pooled = measured_concurrencies(served), pooled_cells(served)
    names = method_names(served)
    for method, color, marker in (("none", BASELINE, "s"), (drafting_method(served), SPECULATION, "o")):
        cells = [(c, pooled[method, c]["output_tokens_per_s"]) for c in concurrencies if (method, c) in pooled]
        known = [(c, rate) for c, rate in cells if rate is not None]
        if known:
            axes.plot(
                *zip(*known, strict=True), color=color, linewidth=2.2, marker=marker, markersize=5, label=names[method]
            )
    _concurrency_axis(axes, concurrencies)
    axes.set_ylim(bottom=0)
    _label(axes, "concurrent clients", "output tokens/s, all routes")
    _legend(axes, fontsize=9, loc="best", labelcolor=INK)
    return figure


def _plot_positions(summary: Summary) -> Figure:
    figure, axes = _axes()
    reference = summary["reference"]
    for index, (route, each) in enumerate(reference["routes"].items()):
        if shares := each["per_position"]:
            color = ROUTES[index % len(ROUTES)]
            axes.plot(
                range(1, len(shares) + 1), shares, color=color, linewidth=1.5, marker="o", markersize=3.5, label=route
            )
    if shares := reference["per_position"]:
        axes.plot(
            range(1, len(shares) + 1), shares, color=INK, linewidth=2.4, linestyle=(0, (4, 2)), label="all routes"
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1)
    _label(axes, "draft position", "share of drafts accepted up to here")
    _legend(axes, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=INK)
    return figure


def _plot_acceptance(summary: Summary) -> Figure:
    """AL by route: the reference decoder's, and the server's (lowest concurrency) where there is one."""
    figure, axes = _axes()
    reference, served = summary["reference"], summary.get("served")
    routes = list(reference["routes"])
    series = [
        (f"reference decoder (k = {summary['k']})", [reference["routes"][route]["al"] for route in routes], SPECULATION)
    ]
    if served:
        lowest = measured_concurrencies(served)[0]
        als = [pooled_cells(served, route).get((drafting_method(served), lowest), {}).get("al") for route in routes]
        k = served.get("k", summary["k"])
        if any(al is not None for al in als):
            series.append((f"server (k = {k}, {lowest} client{'s' if lowest > 1 else ''})", als, "#9db7ee"))
    width = 0.78 / len(series)
    for shift, (name, als, color) in enumerate(series):
        places = [index + (shift - (len(series) - 1) / 2) * width for index in range(len(routes))]
        heights = [al if al is not None else 0.0 for al in als]
        axes.bar(places, heights, width * 0.94, color=color, label=name)
        for place, al in zip(places, als, strict=True):
            text = "n/a" if al is None else f"{al:.2f}"
            axes.annotate(
                text, (place, al or 0), (0, 2), textcoords="offset points", ha="center", fontsize=7.5, color=MUTED
            )
    axes.axhline(1.0, color=LOSS, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.set_xticks(range(len(routes)), routes)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.14)
    _label(axes, "", "tokens per target forward")
    _legend(axes, fontsize=8.5, loc="upper center", ncols=2, bbox_to_anchor=(0.5, 1.14), labelcolor=INK)
    return figure


def _plot_latency(summary: Summary) -> Figure:
    """p50 (mark) to p99 (thin end) of TTFT and TPOT per concurrency, both methods."""
    served = summary["served"]
    figure = Figure(figsize=(6.4, 3.7), layout="constrained")
    concurrencies, pooled = measured_concurrencies(served), pooled_cells(served)
    for axes, key, title in zip(figure.subplots(1, 2), ("ttft_ms", "tpot_ms"), ("TTFT", "TPOT"), strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(MUTED)
        axes.tick_params(colors=MUTED, labelsize=9)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        for method, color, shift in (("none", BASELINE, 1 / 1.07), (drafting_method(served), SPECULATION, 1.07)):
            for c in concurrencies:
                spread = pooled.get((method, c), {}).get(key) or {"p50": None}
                if spread["p50"] is None:
                    continue
                axes.plot([c * shift] * 2, [spread["p50"], spread["p99"]], color=color, linewidth=1.4)
                axes.plot([c * shift] * 2, [spread["p50"], spread["p95"]], color=color, linewidth=3.2)
                axes.plot(c * shift, spread["p50"], "o", color=color, markersize=6)
            axes.plot([], [], color=color, marker="o", label=method_names(served)[method])
        _concurrency_axis(axes, concurrencies)
        axes.set_xlim(concurrencies[0] / 1.4, concurrencies[-1] * 1.4)
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        _label(axes, "concurrent clients", "ms" if key == "ttft_ms" else "ms per token")
        if key == "ttft_ms":
            _legend(axes, fontsize=8.5, loc="upper left", labelcolor=INK)
    return figure


def draw_plots(summary: Summary) -> list[dict[str, Any]]:
    """All pictures that the summary has figures for: `title`, `note`, `image` (a data URL), `wide`."""
    drawn: list[tuple[str, str, Callable[[Summary], Figure]]] = []
    if summary.get("served"):
        drawn += [
            ("Speedup over concurrency", "Above the dashed line the head pays; below it, it costs.", _plot_speedup),
            ("Throughput over concurrency", "Output tokens per second of all clients together.", _plot_throughput),
            ("Latency over concurrency", "Dot: p50; thick line: to p95; thin line: to p99.", _plot_latency),
        ]
    if summary.get("reference"):
        drawn += [
            ("Acceptance length by route", "1.0 (dashed) is what the target does alone.", _plot_acceptance),
            ("Acceptance by draft position", "Reference decoder, share of drafting steps.", _plot_positions),
        ]
    return [
        {"title": title, "note": note, "image": _image(plot(summary)), "wide": plot is _plot_speedup}
        for title, note, plot in drawn
    ]
