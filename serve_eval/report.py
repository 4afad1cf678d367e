"""What the measurement says, for a terminal and as one HTML file that opens from disk without a network.

Both are made from summary.json alone, so a report can be made again, anywhere, from the numbers. The
verdict is computed from the same cells that the tables show, and is allowed to be bad news: where there is no
gain it says so, and a gain is always stated with its concurrency.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import jinja2
from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from models.artefact import write_bytes
from models.card import method_of_head
from models.engines import HEADS
from models.terminal import tables
from serve_eval.axes import Summary, clients, drafted, head_of, measured_concurrencies, method_names, pooled_cells
from serve_eval.beside import rows
from serve_eval.config import POOLED
from serve_eval.overlap import THRESHOLD
from serve_eval.plots import draw_plots

TEMPLATE = Path(__file__).with_name("report.html.j2")


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure as text; "n/a" when it is not known."""
    return "n/a" if value is None else f"{value:,.{digits}f}{unit}"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def verdict(summary: Summary) -> list[str]:
    """What the figures mean, in sentences: acceptance, gain at the lowest concurrency and by route, where it ends."""
    told = []
    reference = summary.get("reference")
    if reference:
        routes = {route: figures["al"] for route, figures in reference["routes"].items() if figures["al"] is not None}
        if routes and reference["al"] is not None:
            best, worst = max(routes, key=routes.__getitem__), min(routes, key=routes.__getitem__)
            drafts = {"prompt lookup": "Prompt lookup", "a draft model": "The draft model"}
            what = drafts.get(reference.get("how", "").split(",")[0], "The head")
            sentence = f"{what} yields {number(reference['al'])} tokens per target forward ({drafted(summary)})"
            if len(routes) > 1:
                sentence += f", from {number(routes[worst])} on {worst} to {number(routes[best])} on {best}"
            told.append(sentence + ".")
    served = summary.get("served")
    if not served:
        return [*told, "No server was measured: what this is worth in tokens per second is not known."]
    concurrencies = measured_concurrencies(served)
    lowest = concurrencies[0]
    by_route = served.get("speedup_by_route", {})
    here = {route: ratios.get(str(lowest)) for route, ratios in by_route.items()}
    gains = sorted((route for route, ratio in here.items() if ratio and ratio > 1), key=lambda route: -here[route])
    losses = [route for route, ratio in here.items() if ratio is not None and ratio <= 1]
    pooled = served["speedup"].get(str(lowest))
    engine = {"vllm": "vLLM", "sglang": "SGLang"}.get(served["engine"], served["engine"])
    if not reference and method_of_head(served):
        al = pooled_cells(served)[head_of(served), lowest]["al"]
        if al is not None:
            told.append(
                f"The head yields {number(al)} tokens per target forward (k = {served['k']}, {engine}'s counters)."
            )
    without = "without the head" if method_of_head(served) else "without speculation"
    within = (served.get("interval") or {}).get(str(lowest))
    sure = f" ({number(within[0])} to {number(within[1])} at 95 % confidence)" if within else ""
    if pooled is None:
        told.append(f"The throughput of {engine} at concurrency {lowest} is not known, so neither is the gain.")
    elif pooled > 1:
        told.append(
            f"At concurrency {lowest}, {engine} makes {number(pooled)} times{sure} the output tokens per second that "
            f"it makes {without}, over all routes together."
        )
    else:
        told.append(
            f"At concurrency {lowest} there is no gain over all routes together: {engine} makes {number(pooled)} "
            f"times{sure} the output tokens per second that it makes {without}."
        )
    if gains and losses:
        told.append(
            f"It gains on {_listed([f'{route} ({number(here[route])}x)' for route in gains])}, "
            f"not on {_listed([f'{route} ({number(here[route])}x)' for route in losses])}."
        )
    elif gains and len(here) > 1:
        told.append(f"Every route gains, most of all {gains[0]} ({number(here[gains[0]])}x).")
    elif losses and not gains:
        told.append("No route gains there.")
    ranges = {route: each.get(str(lowest)) for route, each in (served.get("interval_by_route") or {}).items()}
    unsure = [route for route, span in ranges.items() if span and span[0] <= 1 <= span[1]]
    if unsure and len(here) > 1:
        told.append(f"For {_listed(unsure)} that is not sure: the range includes 1; more eval.repeats would tell.")
    end = served["crossover_concurrency"]
    known = [ratio for ratio in served["speedup"].values() if ratio is not None]
    if end is not None and end > lowest:
        told.append(f"The gain ends at a concurrency of about {clients(end)}; above it, speculation costs throughput.")
    elif end is None and known:
        told.append(f"The gain does not end in the measured range (up to concurrency {concurrencies[-1]}).")
    elif end is not None and any(ratio > 1 for ratio in known):
        at = [c for c, ratio in served["speedup"].items() if ratio is not None and ratio > 1]
        told.append(
            f"A gain was measured only at concurrency {_listed(at)}, above a loss: take it for noise until repeated."
        )
    return told + _choices(served, lowest) + _in_parts(summary)


def _in_parts(summary: Summary) -> list[str]:
    """Which part these figures are of, where there are several."""
    if not summary.get("parts"):
        return []
    return [
        f"What is said of the server is of {summary['part']}; the table of parts has every engine and method, each "
        "held to the server alone on its own machine."
    ]


def _choices(served: Summary, lowest: int) -> list[str]:
    """Where another method than the head is the fastest, where prompt lookup should be tried, and what is not sure."""
    told = []
    names, methods = method_names(served), served.get("methods", {})
    if len(methods) > 1:
        by_route: dict[str, dict[str, float]] = {}
        for name, each in methods.items():
            for route, ratios in each["speedup_by_route"].items():
                if ratios.get(str(lowest)) is not None:
                    by_route.setdefault(route, {})[name] = ratios[str(lowest)]
        better = {route: max(ratios, key=ratios.__getitem__) for route, ratios in by_route.items()}
        others = [
            f"{route} ({names[name]}, {number(by_route[route][name])}x)"
            for route, name in better.items()
            if name != head_of(served) and by_route[route][name] > 1
        ]
        if others:
            told.append(f"At concurrency {lowest} another method is the fastest on {_listed(others)}.")
    alike = [route for route, value in served.get("overlap", {}).items() if value is not None and value > THRESHOLD]
    if alike and not any(each["method"] == "ngram" for each in methods.values()):
        told.append(f"Answers repeat their prompts on {_listed(alike)}: measure prompt lookup there (method ngram).")
    if served.get("side_by_side") is False:
        told.append("Methods ran one after the other, so a drift of the machine is not excluded.")
    return told


def _lossless(summary: Summary) -> list[tuple[str, int, int]]:
    names = {"reference": "reference decoder, fp32", "vllm_fp32": "vLLM, fp32", "sglang_fp32": "SGLang, fp32"}
    found = summary.get("lossless") or {}
    return [(names.get(key, key), each["identical"], each["prompts"]) for key, each in found.items() if each]


# Terminal -----------------------------------------------------------------------------------------------------


def _ratio_text(ratio: float | None) -> Text:
    return Text(number(ratio, 2, "x"), style="dim" if ratio is None else "green" if ratio > 1 else "red")


SHOWN = 5
"""Draft positions that fit a terminal; the report has them all."""


def _reference_table(summary: Summary) -> Table:
    reference = summary["reference"]
    how = reference.get("how") or f"greedy, k = {summary['k']}"
    table = Table(title=f"Reference decoder, {how}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("route")
    table.add_column("AL", justify="right")
    positions = max((len(each["per_position"] or ()) for each in reference["routes"].values()), default=0)
    width = min(positions, SHOWN)
    for position in range(1, width + 1):
        table.add_column(f"pos {position}", justify="right")
    table.add_column("entropy", justify="right")
    table.add_column("tokens", justify="right")
    for route, each in reference["routes"].items():
        shares = [number(share) for share in (each["per_position"] or ())[:width]]
        rest = [*["n/a"] * (width - len(shares)), number(each.get("entropy"))]
        table.add_row(route, number(each["al"]), *shares, *rest, f"{each['tokens']:,}")
    table.add_section()
    shares = [number(share) for share in (reference["per_position"] or ())[:width]]
    total = sum(each["tokens"] for each in reference["routes"].values())
    rest = [*["n/a"] * (width - len(shares)), number(reference.get("entropy"))]
    table.add_row("all", number(reference["al"]), *shares, *rest, f"{total:,}", style="bold")
    return table


def speedups(served: Summary, method: str) -> Summary:
    """Concurrency -> pooled speedup of a method."""
    return served["speedup"] if method == head_of(served) else served["methods"][method]["speedup"]


def _open_loop_table(served: Summary) -> Table:
    """Fits 80 columns: latencies as p50/p95, in ms."""
    title = "Open loop, Poisson arrivals"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("req/s", "method", "tokens/s", "TTFT", "TPOT", "end to end", "queue", "failed"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for cell in sorted(served["open_loop"], key=lambda cell: cell["rate"]):
        if cell["route"] == POOLED:
            spreads = [
                f"{number(cell[key]['p50'], digits)}/{number(cell[key]['p95'], digits)}"
                for key, digits in (("ttft_ms", 0), ("tpot_ms", 1), ("e2e_ms", 0))
            ]
            rate, failed = number(cell["output_tokens_per_s"], 1), f"{cell['failed']}/{cell['requests']}"
            table.add_row(f"{cell['rate']:g}", cell["method"], rate, *spreads, number(cell["queue_ms"], 0), failed)
    return table


def _served_table(summary: Summary) -> Table:
    """Fits 80 columns: latencies as p50/p95, in ms."""
    served = summary["served"]
    pooled = pooled_cells(served)
    title = f"{served['engine']} {served['version']}, {served.get('dtype', '')}, k = {served.get('k', summary['k'])}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    names = method_names(served)
    short = {"none": "no"} | dict.fromkeys(HEADS, "yes")
    first = "head" if set(names) <= set(short) else "method"
    for name in ("clients", first, "tokens/s", "speedup", "AL", "TTFT", "ITL", "TPOT", "failed"):
        table.add_column(name, justify="left" if name == first else "right", no_wrap=True)
    for concurrency in measured_concurrencies(served):
        for method in names:
            cell = pooled.get((method, concurrency))
            if cell is None:
                continue
            plain = method == "none"
            spreads = [
                f"{number(cell[key]['p50'], digits)}/{number(cell[key]['p95'], digits)}"
                for key, digits in (("ttft_ms", 0), ("itl_ms", 0), ("tpot_ms", 1))
            ]
            table.add_row(
                str(concurrency) if plain else "",
                short[method] if first == "head" else method,
                number(cell["output_tokens_per_s"], 1),
                Text("") if plain else _ratio_text(speedups(served, method).get(str(concurrency))),
                "-" if plain else number(cell["al"]),
                *spreads,
                Text(f"{cell['failed']}/{cell['requests']}", style="red" if cell["failed"] else ""),
            )
        table.add_section()
    table.caption = "all routes pooled; TTFT, ITL and TPOT in ms, p50/p95"
    return table


def _parts_table(summary: Summary) -> Table:
    table = Table(title="Engines and methods", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("part", "k", "clients", "alone", "tokens/s", "speedup", "range", "AL", "failed"):
        table.add_column(name, justify="left" if name == "part" else "right", no_wrap=True)
    before = None
    for row in summary["parts"]:
        within = row["interval"]
        table.add_row(
            row["part"] if row["part"] != before else "",
            str(row["k"]) if row["part"] != before else "",
            str(row["concurrency"]),
            number(row["alone_tokens_per_s"], 1),
            number(row["tokens_per_s"], 1),
            _ratio_text(row["speedup"]),
            f"{number(within[0])}..{number(within[1])}" if within else "n/a",
            number(row["al"]),
            Text(str(row["failed"]), style="red" if row["failed"] else ""),
        )
        before = row["part"]
    table.caption = "all routes pooled; each part's server alone was measured beside it, on its machine"
    return table


def _route_table(served: Summary) -> Table:
    concurrencies = measured_concurrencies(served)
    table = Table(title="Speedup by route", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("route")
    for concurrency in concurrencies:
        table.add_column(f"{concurrency} client{'s' if concurrency > 1 else ''}", justify="right")
    table.add_column(f"AL ({concurrencies[0]})", justify="right")
    for route, ratios in served.get("speedup_by_route", {}).items():
        cell = pooled_cells(served, route).get((head_of(served), concurrencies[0]), {})
        table.add_row(route, *(_ratio_text(ratios.get(str(c))) for c in concurrencies), number(cell.get("al")))
    return table


def _compared_table(summary: Summary) -> Table:
    heads, lines = rows(summary)
    table = Table(title=f"AL of heads, {drafted(summary)}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("route")
    for head in heads:
        table.add_column(head, justify="right")
    for route, als in lines:
        table.add_row(route, *(number(al) for al in als), style="bold" if route == POOLED else None)
    return table


def render_table(summary: Summary, console: Console | None = None) -> Group:
    """Print the summary's tables and verdict to the terminal; returns what was printed."""
    parts: list[Any] = []
    if summary.get("reference"):
        parts.append(_reference_table(summary))
    if summary.get("compared"):
        parts.append(_compared_table(summary))
    if summary.get("served"):
        parts += [_served_table(summary), _route_table(summary["served"])]
        if summary["served"].get("open_loop"):
            parts.append(_open_loop_table(summary["served"]))
    if summary.get("parts"):
        parts.append(_parts_table(summary))
    for name, identical, prompts in _lossless(summary):
        style = "green" if identical == prompts else "red"
        parts.append(Text(f"identical to the target alone ({name}): {identical} of {prompts} prompts", style=style))
    for concurrency, each in ((summary.get("served") or {}).get("agreement") or {}).items():
        text = f"AL at concurrency {concurrency}: server {number(each['served'], 3)}, "
        parts.append(Text(f"{text}reference decoder on the same prompts {number(each['reference'], 3)}"))
    for warning in (summary.get("served") or {}).get("warnings", ()):
        parts.append(Text(f"warning: {warning}", style="yellow"))
    parts.append(Panel(" ".join(verdict(summary)), title="verdict", title_align="left"))
    group = Group(*parts)
    (console or tables()).print(group)
    return group


# HTML ---------------------------------------------------------------------------------------------------------


def _name(value: Any) -> str:
    """A target or head as a title: the last part of its path."""
    return Path(str(value)).name or str(value)


def write_report(summary: Summary, path: Path) -> None:
    """Write `summary` (the contents of summary.json) as one self-contained HTML file, atomically."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "clients": clients}
    served = summary.get("served")
    html = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        summary=summary,
        reference=summary.get("reference"),
        drafted=drafted(summary) if summary.get("reference") else "",
        compared=rows(summary) if summary.get("compared") else None,
        drafts_with_head=served is not None and method_of_head(served) is not None,
        served=served,
        parts=summary.get("parts") or [],
        title=_name(summary["target"]),
        date=summary.get("date") or date.today().isoformat(),
        verdict=verdict(summary),
        plots=draw_plots(summary),
        lossless=_lossless(summary),
        concurrencies=measured_concurrencies(served) if served else [],
        pooled=pooled_cells(served) if served else {},
        names=method_names(served) if served else {},
        head=head_of(served) if served else "",
        speedups=speedups,
        threshold=THRESHOLD,
        grid={(cell["method"], cell["concurrency"], cell["route"]): cell for cell in served["cells"]} if served else {},
    )
    write_bytes(path, html.encode())
