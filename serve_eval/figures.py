"""From windows to the `served` section of summary.json: figures of cells, gains with their ranges, agreement.

A cell is a method at a load on a route, its repeats pooled: sums of tokens, seconds and counts, percentiles of all
samples. "all" pools the routes of the project in the same way, so no request is sent twice for it; routes of a given
input length are not in it. Nothing here is measured, so a summary can be made again from cells.jsonl alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from models.config import EngineConfig
from serve_eval.config import POOLED, EvalConfig
from serve_eval.intervals import CONFIDENCE, interval_from, paired_interval
from serve_eval.methods import PLAIN, Method, the_head
from serve_eval.overlap import overlap
from serve_eval.windows import Load, Place, Record, acceptance_of

Groups = dict[tuple[str, Load, str], list[Record]]
"""(method, load, route or "all") -> its windows."""


def _percentiles(samples: Sequence[float]) -> dict[str, float | None]:
    if not samples:
        return {"p50": None, "p95": None, "p99": None}
    p50, p95, p99 = np.percentile(np.asarray(samples, dtype=np.float64), [50, 95, 99])
    return {"p50": round(float(p50), 3), "p95": round(float(p95), 3), "p99": round(float(p99), 3)}


def _spread(samples: Sequence[float]) -> dict[str, float] | None:
    """Extremes, deciles and mean; None of nothing."""
    if not samples:
        return None
    values = np.asarray(samples, dtype=np.float64)
    told = dict(zip(("min", "p10", "p50", "p90", "max"), np.percentile(values, [0, 10, 50, 90, 100]), strict=True))
    return {name: round(float(value), 4) for name, value in (told | {"mean": values.mean()}).items()}


def _gpu(windows: Sequence[Record]) -> dict[str, float] | None:
    """Utilisation weighted by time, and the most memory; None unless every window has them."""
    seen = [window.get("gpu") for window in windows]
    told = [(each, window["seconds"]) for each, window in zip(seen, windows, strict=True) if each]
    if not told or len(told) < len(seen):
        return None
    seconds = sum(each for _, each in told)
    busy = sum(each["utilisation"] * share for each, share in told) / seconds
    return {"utilisation": round(busy, 1), "memory_mib": max(each["memory_mib"] for each, _ in told)}


def figures(windows: Sequence[Record]) -> Record:
    """The figures of one cell, from its windows."""
    requests = [request for window in windows for request in window["outcomes"]]
    good = [request for request in requests if request["failed"] is None]
    counts = [request["tokens"] for request in good]
    seconds = sum(window["seconds"] for window in windows)
    known = bool(counts) and None not in counts and seconds > 0
    counted = [acceptance_of(window["acceptance"]) for window in windows if window["acceptance"] is not None]
    acceptance = sum(counted[1:], counted[0]) if len(counted) == len(windows) else None
    al = acceptance.al if acceptance else None
    positions = acceptance.positions if acceptance else None
    own = [acceptance_of(each["acceptance"]).al for each in good if each.get("acceptance") is not None]
    waits = [window["queue"] for window in windows if window.get("queue")]
    waited = sum(each["requests"] for each in waits)

    def times(key: str) -> dict[str, float | None]:
        return _percentiles([request[key] for request in good if request.get(key) is not None])

    return {
        "output_tokens_per_s": round(sum(counts) / seconds, 3) if known else None,
        "requests_per_s": round(len(good) / seconds, 4) if seconds > 0 else None,
        "ttft_ms": times("ttft_ms"),
        "itl_ms": _percentiles([gap for request in good for gap in request["itl_ms"]]),
        "tpot_ms": times("tpot_ms"),
        "e2e_ms": times("e2e_ms"),
        "queue_ms": round(1e3 * sum(each["seconds"] for each in waits) / waited, 3) if waited else None,
        "al": None if al is None else round(al, 4),
        "per_position": None if positions is None else [round(share, 4) for share in positions],
        "al_by_request": _spread([each for each in own if each is not None]),
        "requests": len(requests),
        "failed": len(requests) - len(good),
        "output_tokens": sum(counts) if known else None,
        "output_lengths": _spread(counts) if known else None,
        "gpu": _gpu(windows),
        "seconds": round(seconds, 6),
        "window_seconds": [round(window["seconds"], 6) for window in windows],
    }


def _said(request: Mapping[str, Any]) -> Any:
    return request["text"] if request["token_ids"] is None else request["token_ids"]


def compare_outputs(windows: Iterable[Record], method: str) -> dict[str, Any]:
    """A method's outputs against the baseline's in the same windows, greedy ones only: `prompts` compared, `identical`
    in every window, ids of the `differing`. Token for token where the server tells ids.

    A prompt whose request failed on either side in some window is compared in the others.
    """
    answers: dict[str, dict[tuple[Any, ...], Any]] = {PLAIN: {}, method: {}}
    for window in windows:
        if window["method"] in answers and not window.get("temperature"):
            where = window["concurrency"], window.get("rate"), window.get("repeat", 0)
            for request in window["outcomes"]:
                if request["failed"] is None:
                    answers[window["method"]][(*where, request["id"])] = request
    verdicts: dict[str, bool] = {}
    for place, baseline in answers[PLAIN].items():
        speculative = answers[method].get(place)
        if speculative is None:
            continue
        if (baseline["token_ids"] is None) != (speculative["token_ids"] is None):
            same = baseline["text"] == speculative["text"]
        else:
            same = _said(baseline) == _said(speculative)
        verdicts[place[-1]] = verdicts.get(place[-1], True) and same
    differing = sorted(prompt for prompt, same in verdicts.items() if not same)
    return {"prompts": len(verdicts), "identical": len(verdicts) - len(differing), "differing": differing}


def crossover(speedup: Mapping[int, float | None]) -> float | None:
    """The concurrency at which the gain ends: where the speedup first falls below 1.

    Interpolated between the two measured concurrencies around it, linearly over the logarithm of the
    concurrency (the axis of the plot). The lowest one when there is no gain even there; None when the gain
    never ends in the measured range, or nothing is known.
    """
    known = [(c, ratio) for c, ratio in sorted(speedup.items()) if ratio is not None]
    for index, (c, ratio) in enumerate(known):
        if ratio >= 1:
            continue
        if index == 0:
            return float(c)
        c0, ratio0 = known[index - 1]
        share = (ratio0 - 1) / (ratio0 - ratio)
        return round(2 ** (math.log2(c0) + share * (math.log2(c) - math.log2(c0))), 2)
    return None


def grouped(windows: Mapping[Place, Record]) -> Groups:
    """Windows by cell, repeats in order, the pooled cells included."""
    groups: Groups = {}
    for place in sorted(windows, key=lambda place: place.repeat):
        record = windows[place]
        routes = [place.route] if record["input_length"] else [place.route, POOLED]
        for route in routes:
            groups.setdefault((place.method, place.load, route), []).append(record)
    return groups


def _gains(method: Method, groups: Groups, loads: Sequence[Load], routes: Sequence[str]) -> dict[str, Any]:
    """What a method is worth: ratios and ranges per load, pooled and by route."""

    def ratio(load: Load, route: str) -> float | None:
        base, ours = (figures(groups[name, load, route])["output_tokens_per_s"] for name in (PLAIN, method.name))
        return round(ours / base, 4) if base and ours is not None else None

    def within(load: Load, route: str) -> list[float] | None:
        return paired_interval(groups[PLAIN, load, route], groups[method.name, load, route])[0]

    names = {load: str(load.concurrency) for load in loads}
    pooled = {load: ratio(load, POOLED) for load in loads}
    return {
        "speedup": {names[load]: value for load, value in pooled.items()},
        "speedup_by_route": {route: {names[load]: ratio(load, route) for load in loads} for route in routes},
        "interval": {names[load]: within(load, POOLED) for load in loads},
        "interval_by_route": {route: {names[load]: within(load, route) for load in loads} for route in routes},
        "crossover_concurrency": crossover({load.concurrency or 0: value for load, value in pooled.items()}),
    }


def _overlaps(windows: Iterable[Record], prompts: Mapping[str, Sequence[int]]) -> dict[str, float | None]:
    """Route -> BLEU-4 of the baseline's first answers against their prompts; None where no ids are told."""
    pairs: dict[str, dict[str, tuple[Sequence[int], Sequence[int]]]] = {}
    for window in windows:
        if window["method"] == PLAIN:
            told = pairs.setdefault(window["route"], {})
            for request in window["outcomes"]:
                if request["token_ids"] is not None:
                    told.setdefault(request["id"], (prompts[request["id"]], request["token_ids"]))
    found = {route: overlap(told.values()) for route, told in pairs.items()}
    return {route: None if value is None else round(value, 4) for route, value in found.items()}


def summarise(
    windows: Mapping[Place, Record],
    methods: Sequence[Method],
    engine: EngineConfig,
    settings: EvalConfig,
    prompts: Mapping[str, Sequence[int]],
    *,
    side_by_side: bool,
) -> dict[str, Any]:
    """The `served` section of summary.json from all finished windows.

    `speedup`, `speedup_by_route`, `crossover_concurrency`, `lossless` and `k` are the head's (the first method that
    speculates, without one); `methods` has them for each. `cells` are those of closed loops, `open_loop` the others.

    Args:
        prompts: id -> token ids.
    """
    first = next(iter(windows.values()))
    groups = grouped(windows)
    loads = list(dict.fromkeys(load for _, load, _ in groups))
    closed = sorted((load for load in loads if load.concurrency), key=lambda load: load.concurrency or 0)
    opened = [load for load in loads if load.rate]
    lengths = {record["route"]: record["input_length"] for record in windows.values()}
    routes, shown = list(lengths), [POOLED, *lengths]
    head = the_head(methods)

    def cell(method: Method, load: Load, route: str) -> Record:
        group = groups[method.name, load, route]
        told = figures(group)
        if method.method != PLAIN:
            same = compare_outputs([*groups[PLAIN, load, route], *group], method.name)
            told["agreement"] = {key: same[key] for key in ("prompts", "identical")}
        if settings.price_per_hour is not None:
            rate = told["output_tokens_per_s"]
            told["cost_per_million"] = round(settings.price_per_hour / (rate * 3600) * 1e6, 4) if rate else None
        return {"route": route, "input_length": lengths.get(route)} | told

    about = {
        each.name: asdict(each)
        | _gains(each, groups, closed, routes)
        | {"lossless": compare_outputs(windows.values(), each.name)}
        for each in methods
        if each.method != PLAIN
    }
    mine = about[head.name]
    return {
        "engine": engine.kind,
        "version": first["version"],
        "k": head.k,
        "dtype": engine.dtype,
        "head": head.name,
        "repeats": settings.repeats,
        "side_by_side": side_by_side,
        "confidence": CONFIDENCE,
        "interval_from": interval_from(settings.repeats, side_by_side),
        "price_per_hour": settings.price_per_hour,
        "cells": [
            {"method": method.name, "concurrency": load.concurrency} | cell(method, load, route)
            for method in methods
            for load in closed
            for route in shown
        ],
        "open_loop": [
            {"method": method.name, "rate": load.rate} | cell(method, load, route)
            for method in methods
            for load in opened
            for route in shown
        ],
        "speedup": mine["speedup"],
        "speedup_by_route": mine["speedup_by_route"],
        "interval": mine["interval"],
        "interval_by_route": mine["interval_by_route"],
        "crossover_concurrency": mine["crossover_concurrency"],
        "methods": about,
        "lossless": mine["lossless"],
        "overlap": _overlaps(windows.values(), prompts),
        "prompts": {
            str(load.concurrency): list(
                dict.fromkeys(each["id"] for record in groups[PLAIN, load, POOLED] for each in record["outcomes"])
            )
            for load in closed
        },
        "commands": {each.name: groups[each.name, loads[0], routes[0]][0]["command"] for each in methods},
        "warnings": list(dict.fromkeys(warning for record in windows.values() for warning in record["warnings"])),
    }
