"""The report's pictures, each from the contents of summary.json alone: acceptance here, the served sweep beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from serve_eval.axes import (
    INK,
    LOSS,
    MUTED,
    ROUTES,
    SPECULATION,
    Summary,
    drafted,
    head_of,
    image,
    label,
    legend,
    measured_concurrencies,
    named,
    new_axes,
    pooled_cells,
)
from serve_eval.plots_served import (
    plot_cost,
    plot_latency,
    plot_open_loop,
    plot_predictions,
    plot_requests,
    plot_speedup,
    plot_throughput,
)

_OF_ALL: dict[str, Any] = {"color": INK, "linewidth": 2.4, "linestyle": (0, (4, 2))}


def _of_route(index: int) -> dict[str, Any]:
    """The look of a route's line."""
    return {"color": ROUTES[index % len(ROUTES)], "linewidth": 1.5, "marker": "o", "markersize": 3.5}


def _plot_positions(summary: Summary) -> Figure:
    figure, axes = new_axes()
    reference = summary["reference"]
    for index, (route, each) in enumerate(reference["routes"].items()):
        if shares := each["per_position"]:
            axes.plot(range(1, len(shares) + 1), shares, label=named(route), **_of_route(index))
    if shares := reference["per_position"]:
        axes.plot(range(1, len(shares) + 1), shares, label="all routes", **_OF_ALL)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1)
    label(axes, "draft position", "share of drafts accepted up to here")
    legend(axes, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=INK)
    return figure


def _plot_acceptance(summary: Summary) -> Figure:
    """AL by route: the reference decoder's, and the server's (lowest concurrency) where there is one."""
    figure, axes = new_axes()
    reference, served = summary["reference"], summary.get("served")
    routes = list(reference["routes"])
    series = [
        (f"reference decoder ({drafted(summary)})", [reference["routes"][route]["al"] for route in routes], SPECULATION)
    ]
    if served:
        lowest = measured_concurrencies(served)[0]
        als = [pooled_cells(served, route).get((head_of(served), lowest), {}).get("al") for route in routes]
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
    label(axes, "", "tokens per target forward")
    legend(axes, fontsize=8.5, loc="upper center", ncols=2, bbox_to_anchor=(0.5, 1.14), labelcolor=INK)
    return figure


def _plot_lengths(summary: Summary) -> Figure:
    """AL over k of every route: what one pass with the longest k says of the shorter ones."""
    figure, axes = new_axes()
    reference = summary["reference"]
    for index, (route, each) in enumerate(reference["routes"].items()):
        if als := each.get("al_by_k"):
            axes.plot(range(1, len(als) + 1), als, label=named(route), **_of_route(index))
    als = reference["al_by_k"]
    axes.plot(range(1, len(als) + 1), als, label="all routes", **_OF_ALL)
    best = summary.get("best_k")
    if best is not None and best <= len(als):
        axes.plot(best, als[best - 1], "*", color=LOSS, markersize=12, label="fastest k for one user")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label(axes, "drafted tokens per step, k", "tokens per target forward")
    legend(axes, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=INK)
    return figure


def draw_plots(summary: Summary) -> list[dict[str, Any]]:
    """All pictures that the summary has figures for: `title`, `note`, `image` (a data URL), `wide`."""
    drawn: list[tuple[str, str, Callable[[Summary], Figure]]] = []
    served, reference = summary.get("served"), summary.get("reference")
    if served:
        drawn += [
            ("Speedup over concurrency", "Above the dashed line the head pays; below it, it costs.", plot_speedup),
            ("Throughput over concurrency", "Output tokens per second of all clients together.", plot_throughput),
            ("Latency over concurrency", "Dot: p50; thick line: to p95; thin line: to p99.", plot_latency),
        ]
        if served.get("open_loop"):
            drawn.append(("Open loop", "End-to-end time as requests come, not as answers go.", plot_open_loop))
        if served.get("model"):
            drawn.append(("Speedup over k, modelled", "Star: the best k; dot: measured.", plot_predictions))
        if any(cell.get("al_by_request") and cell["method"] == head_of(served) for cell in served["cells"]):
            drawn.append(("AL of single requests", "Dot: median; thick: deciles; thin: extremes.", plot_requests))
        if served.get("price_per_hour"):
            drawn.append(("Cost of a million output tokens", "In the currency of eval.price_per_hour.", plot_cost))
    if reference:
        drawn += [
            ("Acceptance length by route", "1.0 (dashed) is what the target does alone.", _plot_acceptance),
            ("Acceptance by draft position", "Reference decoder, share of drafting steps.", _plot_positions),
        ]
        if reference.get("al_by_k"):
            drawn.append(("Acceptance length over k", "Reference decoder; shorter k are estimates.", _plot_lengths))
    with matplotlib.rc_context({"text.parse_math": False}):  # a route's name may hold dollars
        return [
            {"title": title, "note": note, "image": image(plot(summary)), "wide": plot is plot_speedup}
            for title, note, plot in drawn
        ]
