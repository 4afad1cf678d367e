"""Pictures of the served sweep: speedup, throughput, latency, open loop, acceptance per request, predictions, cost."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from serve_eval.axes import (
    INK,
    LOSS,
    ROUTES,
    Summary,
    clients,
    concurrency_axis,
    head_of,
    label,
    legend,
    measured_concurrencies,
    method_color,
    method_names,
    named,
    new_axes,
    plain_axes,
    pooled_cells,
)
from serve_eval.config import POOLED


def plot_speedup(summary: Summary) -> Figure:
    """Ratio to the server alone per concurrency: pooled, with its range, and by route."""
    served = summary["served"]
    figure, axes = new_axes(11.5, 3.8)
    concurrencies = measured_concurrencies(served)
    for index, (route, ratios) in enumerate(served.get("speedup_by_route", {}).items()):
        known = [(c, ratios[str(c)]) for c in concurrencies if ratios.get(str(c)) is not None]
        if known:
            axes.plot(
                *zip(*known, strict=True),
                color=ROUTES[index % len(ROUTES)],
                linewidth=1.1,
                alpha=0.75,
                label=named(route),
            )
    for name in list(method_names(served))[1:]:
        ratios = served["methods"][name]["speedup"] if name != head_of(served) else {}
        known = [(c, ratios[str(c)]) for c in concurrencies if ratios.get(str(c)) is not None]
        if known:
            text = f"all routes, {method_names(served)[name]}"
            axes.plot(
                *zip(*known, strict=True), color=method_color(served, name), linewidth=2.2, dashes=(4, 2), label=text
            )
    ranges = served.get("interval", {})
    sure = [c for c in concurrencies if ranges.get(str(c)) is not None]
    lows, highs = ([ranges[str(c)][side] for c in sure] for side in (0, 1))
    axes.fill_between(sure, lows, highs, color=INK, alpha=0.1, linewidth=0)
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
    concurrency_axis(axes, concurrencies)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.9), max(high, 1.1) + 0.06 * (high - low))
    label(axes, "concurrent clients", "speedup of output tokens/s")
    legend(axes, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=INK)
    return figure


def _plot_by_concurrency(summary: Summary, key: str, title: str) -> Figure:
    """A figure of the pooled cells of every method per concurrency, where it is known."""
    served = summary["served"]
    figure, axes = new_axes()
    concurrencies, pooled = measured_concurrencies(served), pooled_cells(served)
    for method, name in method_names(served).items():
        color, marker = method_color(served, method), "s" if method == "none" else "o"
        cells = [(c, pooled[method, c].get(key)) for c in concurrencies if (method, c) in pooled]
        known = [(c, value) for c, value in cells if value is not None]
        if known:
            axes.plot(*zip(*known, strict=True), color=color, linewidth=2.2, marker=marker, markersize=5, label=name)
    concurrency_axis(axes, concurrencies)
    axes.set_ylim(bottom=0)
    label(axes, "concurrent clients", title)
    legend(axes, fontsize=9, loc="best", labelcolor=INK)
    return figure


def plot_throughput(summary: Summary) -> Figure:
    """Output tokens/s of every method per concurrency."""
    return _plot_by_concurrency(summary, "output_tokens_per_s", "output tokens/s, all routes")


def plot_latency(summary: Summary) -> Figure:
    """p50 (mark) to p99 (thin end) of TTFT and TPOT per concurrency, of every method."""
    served = summary["served"]
    figure = Figure(figsize=(6.4, 3.7), layout="constrained")
    concurrencies, pooled = measured_concurrencies(served), pooled_cells(served)
    names = method_names(served)
    for axes, key, title in zip(figure.subplots(1, 2), ("ttft_ms", "tpot_ms"), ("TTFT", "TPOT"), strict=True):
        plain_axes(axes)
        for index, (method, name) in enumerate(names.items()):
            color, shift = method_color(served, method), 1.07 ** (2 * index - len(names) + 1)
            for c in concurrencies:
                spread = pooled.get((method, c), {}).get(key) or {"p50": None}
                if spread["p50"] is None:
                    continue
                axes.plot([c * shift] * 2, [spread["p50"], spread["p99"]], color=color, linewidth=1.4)
                axes.plot([c * shift] * 2, [spread["p50"], spread["p95"]], color=color, linewidth=3.2)
                axes.plot(c * shift, spread["p50"], "o", color=color, markersize=6)
            axes.plot([], [], color=color, marker="o", label=name)
        concurrency_axis(axes, concurrencies)
        axes.set_xlim(concurrencies[0] / 1.4, concurrencies[-1] * 1.4)
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        label(axes, "concurrent clients", "ms" if key == "ttft_ms" else "ms per token")
        if key == "ttft_ms":
            legend(axes, fontsize=8.5, loc="upper left", labelcolor=INK)
    return figure


def plot_open_loop(summary: Summary) -> Figure:
    """p50 and p95 of the end-to-end time of every method per rate of arrivals."""
    served = summary["served"]
    figure, axes = new_axes()
    cells = [cell for cell in served["open_loop"] if cell["route"] == POOLED]
    rates = sorted({cell["rate"] for cell in cells})
    for method, name in method_names(served).items():
        mine = [cell for cell in cells if cell["method"] == method and cell["e2e_ms"]["p50"] is not None]
        for share, dashes in (("p50", (None, None)), ("p95", (3, 2))):
            known = [(cell["rate"], cell["e2e_ms"][share] / 1e3) for cell in mine]
            if known:
                axes.plot(
                    *zip(*known, strict=True),
                    color=method_color(served, method),
                    dashes=dashes,
                    marker="o",
                    markersize=4,
                    label=f"{name}, {share}",
                )
    concurrency_axis(axes, rates)
    axes.set_ylim(bottom=0)
    label(axes, "requests per second (Poisson)", "seconds, end to end")
    legend(axes, fontsize=8.5, labelcolor=INK)
    return figure


def plot_requests(summary: Summary) -> Figure:
    """AL of single requests by route, at the lowest concurrency: median, deciles and extremes."""
    served = summary["served"]
    figure, axes = new_axes()
    lowest = measured_concurrencies(served)[0]
    cells = [
        cell
        for cell in served["cells"]
        if (cell["method"], cell["concurrency"]) == (head_of(served), lowest) and cell.get("al_by_request")
    ]
    for place, cell in enumerate(cells):
        told, color = cell["al_by_request"], INK if cell["route"] == POOLED else ROUTES[(place - 1) % len(ROUTES)]
        axes.plot([place] * 2, [told["min"], told["max"]], color=color, linewidth=1.2)
        axes.plot([place] * 2, [told["p10"], told["p90"]], color=color, linewidth=5, alpha=0.5)
        axes.plot(place, told["p50"], "o", color=color, markersize=6)
    axes.axhline(1.0, color=LOSS, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.set_xticks(range(len(cells)), [cell["route"] for cell in cells], rotation=20, fontsize=8.5)
    label(axes, "", "AL of a request")
    return figure


def plot_predictions(summary: Summary) -> Figure:
    """Modelled speedup over k per concurrency, with the best k marked; filled where it was measured."""
    served = summary["served"]
    figure, axes = new_axes()
    kind = served["methods"][head_of(served)]["method"]
    rows = [row for row in served["model"]["predictions"] if row["method"] == kind]
    for index, c in enumerate(sorted({row["concurrency"] for row in rows})):
        mine = [row for row in rows if row["concurrency"] == c]
        color = ROUTES[index % len(ROUTES)]
        name = f"{c} client{'s' if c > 1 else ''}"
        axes.plot([row["k"] for row in mine], [row["speedup"] for row in mine], color=color, linewidth=1.5, label=name)
        best = max(mine, key=lambda row: row["speedup"])
        axes.plot(best["k"], best["speedup"], "*", color=color, markersize=11)
        seen = [row for row in mine if row["measured"]]
        axes.plot([row["k"] for row in seen], [row["speedup"] for row in seen], "o", color=color, markersize=4)
    axes.axhline(1.0, color=LOSS, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label(axes, "drafted tokens per step, k", "modelled speedup")
    legend(axes, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=INK)
    return figure


def plot_cost(summary: Summary) -> Figure:
    """Cost of a million output tokens of every method per concurrency."""
    return _plot_by_concurrency(summary, "cost_per_million", "cost of 1M output tokens")
