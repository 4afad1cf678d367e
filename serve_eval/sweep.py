"""The measured grid: methods x concurrencies x routes on a real server, each cell with figures of its own.

A cell is one window of one route at one concurrency. Routes are run one after the other rather than mixed,
because a server's counters know no routes; "all" pools the windows of a concurrency (sums of tokens,
seconds and counts, percentiles of all samples), so no request is sent twice for it. A window holds at least
as many requests as clients: with fewer, the concurrency would be one in name only. Both methods get the
same prompts in the same order from the same server settings; one server start per method.

Finished cells are appended to cells.jsonl with the outputs, keyed by the contents of everything that
matters; a rerun measures only what is missing and starts no server when nothing is. Given up here: methods
interleaved against a drifting machine, and repeats.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from models.artefact import file_sha256, fingerprint, write_bytes
from models.config import EngineConfig
from models.errors import Refused
from models.servers import Server, find_interpreter
from serve_eval.config import EvalConfig
from serve_eval.counters import Acceptance, CounterReset, difference, judge, read_counters
from serve_eval.load import Outcome, Window, closed_loop
from serve_eval.prompts import Prompt, by_route
from serve_eval.servers import describe_machine, method_of, serving

log = logging.getLogger(__name__)

PLAIN = "none"
"""The method of the server that does not draft."""
POOLED = "all"
"""Name of the route that pools all others."""

WARMUP_TOKENS = 16

Cell = dict[str, Any]
Place = tuple[str, int, str]
"""Method, concurrency, route."""


def choose_prompts(prompts: Sequence[Prompt], settings: EvalConfig, concurrency: int) -> dict[str, list[Prompt]]:
    """The prompts of each route's window at one concurrency: the first of the route, at least one per client.

    Raises:
        Refused: a route has too few prompts for that, or is called "all".
    """
    count = max(settings.requests_per_route, concurrency)
    chosen = {}
    for route, group in by_route(prompts).items():
        if route == POOLED:
            raise Refused(f"eval.prompts: no route may be called {POOLED!r}, the name of the pooled figures")
        if len(group) < count:
            raise Refused(
                f"route {route} has {len(group)} prompts, but a window at concurrency {concurrency} takes {count}; "
                "write more prompts, or lower eval.concurrencies or eval.requests_per_route"
            )
        chosen[route] = group[:count]
    return chosen


def _percentiles(samples: Sequence[float]) -> dict[str, float | None]:
    if not samples:
        return {"p50": None, "p95": None, "p99": None}
    p50, p95, p99 = np.percentile(np.asarray(samples, dtype=np.float64), [50, 95, 99])
    return {"p50": round(float(p50), 3), "p95": round(float(p95), 3), "p99": round(float(p99), 3)}


def _record(outcome: Outcome) -> dict[str, Any]:
    """An outcome as it is kept in cells.jsonl; times to a hundredth of a millisecond."""
    kept = asdict(outcome)
    kept["itl_ms"] = [round(gap, 2) for gap in outcome.itl_ms]
    return kept


def _acceptance(kept: dict[str, Any]) -> Acceptance:
    return Acceptance(**(kept | {"per_position": tuple(kept["per_position"])}))


def _figures(windows: Sequence[Cell]) -> Cell:
    """The figures of one cell, or of several windows pooled."""
    requests = [request for window in windows for request in window["outcomes"]]
    good = [request for request in requests if request["failed"] is None]
    counts = [request["tokens"] for request in good]
    seconds = sum(window["seconds"] for window in windows)
    known = bool(counts) and None not in counts and seconds > 0
    counted = [_acceptance(window["acceptance"]) for window in windows if window["acceptance"] is not None]
    acceptance = None
    if len(counted) == len(windows):
        acceptance = sum(counted[1:], counted[0])
    al = acceptance.al if acceptance else None
    positions = acceptance.positions if acceptance else None
    return {
        "output_tokens_per_s": round(sum(counts) / seconds, 3) if known else None,
        "ttft_ms": _percentiles([request["ttft_ms"] for request in good if request["ttft_ms"] is not None]),
        "itl_ms": _percentiles([gap for request in good for gap in request["itl_ms"]]),
        "tpot_ms": _percentiles([request["tpot_ms"] for request in good if request["tpot_ms"] is not None]),
        "al": None if al is None else round(al, 4),
        "per_position": None if positions is None else [round(share, 4) for share in positions],
        "requests": len(requests),
        "failed": len(requests) - len(good),
        "output_tokens": sum(counts) if known else None,
        "seconds": round(seconds, 6),
    }


def _warnings(where: str, window: Window) -> list[str]:
    told = [f"{where}: request {outcome.id} failed: {outcome.failed}" for outcome in window.outcomes if outcome.failed]
    if unknown := sum(outcome.failed is None and outcome.tokens is None for outcome in window.outcomes):
        told.append(f"{where}: the server sent no usage for {unknown} requests: tokens and tokens/s are unknown")
    return told


def _measure(server: Server, method: str, route: str, prompts: list[Prompt], c: int, settings: EvalConfig) -> Cell:
    """One window: counters, load, counters."""
    before = read_counters(server)
    window = asyncio.run(
        closed_loop(
            server.url,
            prompts,
            concurrency=c,
            max_new_tokens=settings.max_new_tokens,
            timeout_s=settings.request_timeout_s,
        )
    )
    where = f"{method} at concurrency {c}, {route}"
    if all(outcome.failed for outcome in window.outcomes):
        raise Refused(f"{where}: every request failed ({window.outcomes[0].failed}); {server.last_words()}")
    if server.ended:
        raise Refused(f"{where}: the server died; {server.last_words()}")
    warnings = _warnings(where, window)
    acceptance: Acceptance | None = None
    try:
        acceptance = difference(before, read_counters(server))
        verdict = judge(method, acceptance)
    except CounterReset as error:
        verdict = f"{error}; AL is n/a"
    if verdict:
        warnings.append(f"{where}: {verdict}")
    for warning in warnings:
        log.warning("%s", warning)
    return {
        "method": method,
        "concurrency": c,
        "route": route,
        "version": server.version,
        "command": server.shown,
        "seconds": window.seconds,
        "outcomes": [_record(outcome) for outcome in window.outcomes],
        "acceptance": None if acceptance is None else asdict(acceptance),
        "warnings": warnings,
    }


def _contents(directory: str) -> Any:
    """What identifies a checkpoint: every file's hash, for files over 1 GiB their size only."""
    path = Path(directory).expanduser()
    if not path.is_dir():
        return directory  # a hub name
    files = [file for file in sorted(path.iterdir()) if file.is_file()]
    return {file.name: file_sha256(file) if (size := file.stat().st_size) <= 1 << 30 else size for file in files}


def window_keys(
    engine: EngineConfig,
    settings: EvalConfig,
    target_path: str,
    head: Path,
    k: int,
    chosen: dict[int, dict[str, list[Prompt]]],
) -> dict[Place, str]:
    """Per cell (method, concurrency, route), a fingerprint of everything that its figures depend on.

    The head and k are in it for the baseline too: a ratio is only worth something within one sitting. So is
    the machine. Paths and patience (where the interpreter is, how long to wait for it) are not.
    """
    served = {key: value for key, value in asdict(engine).items() if key not in ("python", "startup_timeout_s", "host")}
    common = fingerprint(
        {
            "format": 1,
            "machine": describe_machine(),
            "engine": served,
            "target": _contents(target_path),
            "head": _contents(str(head)),
            "k": k,
            "max_new_tokens": settings.max_new_tokens,
            "warmup_requests": settings.warmup_requests,
        }
    )
    return {
        (method, c, route): fingerprint([common, method, c, route, [[prompt.id, list(prompt.ids)] for prompt in group]])
        for method in (PLAIN, method_of(head))
        for c, groups in chosen.items()
        for route, group in groups.items()
    }


def _read_cells(file: Path, keys: dict[Place, str]) -> dict[Place, Cell]:
    """Finished cells of this sweep. A torn last line (a killed run) is dropped from the file; a cell in which
    requests failed is not finished, and neither is one of other contents."""
    if not file.exists():
        return {}
    lines = file.read_bytes().split(b"\n")
    if lines[-1]:
        log.warning("%s ended in a torn line; its cell is measured again", file)
        write_bytes(file, b"".join(line + b"\n" for line in lines[:-1]))
    cells = {}
    for number, line in enumerate(lines[:-1], 1):
        try:
            cell = json.loads(line)
            place = (cell["method"], cell["concurrency"], cell["route"])
            finished = keys.get(place) == cell["key"] and not any(request["failed"] for request in cell["outcomes"])
        except (ValueError, KeyError, TypeError):
            raise Refused(f"{file}:{number} is no cell of a sweep; delete the file to measure again") from None
        if finished:
            cells[place] = cell
    return cells


def _append(file: Path, cell: Cell) -> None:
    with file.open("ab") as handle:
        handle.write(json.dumps(cell, ensure_ascii=False).encode() + b"\n")
        handle.flush()
        os.fsync(handle.fileno())


def _warm_up(server: Server, prompts: Sequence[Prompt], settings: EvalConfig) -> None:
    """A few short requests outside every window, from the end of the list, where windows take none if they can."""
    if not (some := list(prompts)[-settings.warmup_requests :] if settings.warmup_requests else []):
        return
    asyncio.run(
        closed_loop(
            server.url,
            some,
            concurrency=len(some),
            max_new_tokens=min(WARMUP_TOKENS, settings.max_new_tokens),
            timeout_s=settings.request_timeout_s,
        )
    )


def _said(request: dict[str, Any]) -> Any:
    return request["text"] if request["token_ids"] is None else request["token_ids"]


def compare_outputs(cells: Iterable[Cell]) -> dict[str, Any]:
    """Speculation's outputs against the baseline's at the same concurrency, greedy: `prompts` compared,
    `identical` at every concurrency, ids of the `differing`. Token for token where the server tells ids.

    A prompt whose request failed on either side at some concurrency is compared at the others.
    """
    plain: dict[tuple[int, str], Any] = {}
    drafted: dict[tuple[int, str], Any] = {}
    for cell in cells:
        for request in cell["outcomes"]:
            if request["failed"] is None:
                answers = plain if cell["method"] == PLAIN else drafted
                answers[cell["concurrency"], request["id"]] = request
    verdicts: dict[str, bool] = {}
    for place, baseline in plain.items():
        speculative = drafted.get(place)
        if speculative is None:
            continue
        if (baseline["token_ids"] is None) != (speculative["token_ids"] is None):
            same = baseline["text"] == speculative["text"]
        else:
            same = _said(baseline) == _said(speculative)
        verdicts[place[1]] = verdicts.get(place[1], True) and same
    differing = sorted(prompt for prompt, same in verdicts.items() if not same)
    return {"prompts": len(verdicts), "identical": len(verdicts) - len(differing), "differing": differing}


def crossover(speedup: dict[int, float | None]) -> float | None:
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


def summarise(cells: Sequence[Cell], engine: EngineConfig, k: int) -> dict[str, Any]:
    """The `served` section of summary.json from all finished cells.

    Beyond the named figures: `speedup_by_route`, `prompts` (ids per concurrency), `lossless`, `commands`, `warnings`.
    """
    grid = {(cell["method"], cell["concurrency"], cell["route"]): cell for cell in cells}
    concurrencies = sorted({c for _, c, _ in grid})
    routes = list(dict.fromkeys(route for _, _, route in grid))
    methods = list(dict.fromkeys(method for method, _, _ in grid))  # the plain one first
    figures: dict[tuple[str, int, str], Cell] = {}
    for method in methods:
        for c in concurrencies:
            windows = [grid[method, c, route] for route in routes]
            figures[method, c, POOLED] = _figures(windows)
            for route, window in zip(routes, windows, strict=True):
                figures[method, c, route] = _figures([window])

    def ratio(c: int, route: str) -> float | None:
        base, ours = (figures[method, c, route]["output_tokens_per_s"] for method in methods)
        return round(ours / base, 4) if base and ours is not None else None

    pooled = {c: ratio(c, POOLED) for c in concurrencies}
    return {
        "engine": engine.kind,
        "version": cells[0]["version"],
        "k": k,
        "dtype": engine.dtype,
        "cells": [
            {"method": method, "concurrency": c, "route": route} | figures[method, c, route]
            for method in methods
            for c in concurrencies
            for route in [POOLED, *routes]
        ],
        "speedup": {str(c): value for c, value in pooled.items()},
        "speedup_by_route": {route: {str(c): ratio(c, route) for c in concurrencies} for route in routes},
        "crossover_concurrency": crossover(pooled),
        "lossless": compare_outputs(cells),
        "prompts": {
            str(c): [request["id"] for route in routes for request in grid["none", c, route]["outcomes"]]
            for c in concurrencies
        },
        "commands": {method: grid[method, concurrencies[0], routes[0]]["command"] for method in methods},
        "warnings": [warning for cell in grid.values() for warning in cell["warnings"]],
    }


def check_possible(engine: EngineConfig, settings: EvalConfig, prompts: Sequence[Prompt]) -> None:
    """Everything that can be known to fail before the first minute is spent.

    Raises:
        Refused: no interpreter with the engine, too few prompts, answers longer than the server's context.
    """
    find_interpreter(engine)
    chosen = [choose_prompts(prompts, settings, c) for c in sorted(set(settings.concurrencies))]
    longest = max(len(prompt.ids) for groups in chosen for group in groups.values() for prompt in group)
    k = settings.served_k or settings.k
    if longest + settings.max_new_tokens + k > engine.max_model_len:
        raise Refused(
            f"the longest prompt has {longest} tokens: with eval.max_new_tokens={settings.max_new_tokens} and k={k} "
            f"it does not fit into engine.max_model_len={engine.max_model_len}"
        )


def failures(summary: dict[str, Any]) -> int:
    """Requests of a finished summary that failed; such cells are measured again."""
    return sum(cell["failed"] for cell in (summary.get("served") or {}).get("cells", []))


def run_sweep(
    *,
    engine: EngineConfig,
    settings: EvalConfig,
    target_path: str,
    head: Path,
    k: int,
    prompts: list[Prompt],
    directory: Path,
) -> dict[str, Any]:
    """Measure the head against the same server without it; resumes what `directory`/cells.jsonl already holds.

    Args:
        head: an exported head.
        k: tokens drafted per step.
        prompts: all evaluation prompts; the first of each route are sent (see `choose_prompts`).
        directory: where cells.jsonl and the servers' logs are kept.

    Returns:
        The `served` section of summary.json, with `lossless` inside (see `summarise`).

    Raises:
        Refused: no head, too few prompts, answers longer than the server's context, a server that does not
            start or dies, or cells that were measured with another version of the engine.
    """
    methods = (PLAIN, method_of(head))
    check_possible(engine, settings, prompts)
    concurrencies = sorted(set(settings.concurrencies))
    chosen = {c: choose_prompts(prompts, settings, c) for c in concurrencies}
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "cells.jsonl"
    keys = window_keys(engine, settings, target_path, head, k, chosen)
    done = _read_cells(file, keys)
    for method in methods:
        missing = [place for place in keys if place[0] == method and place not in done]
        if not missing:
            continue
        with serving(engine, target_path, method=method, head=head, k=k, directory=directory) as server:
            versions = {cell["version"] for cell in done.values()} | {server.version}
            if len(versions) > 1:
                raise Refused(
                    f"{file} was measured with another version of the engine ({', '.join(sorted(versions))}); "
                    "delete it to measure all of it again"
                )
            _warm_up(server, prompts, settings)
            for place in missing:
                _, c, route = place
                done[place] = _measure(server, method, route, chosen[c][route], c, settings) | {"key": keys[place]}
                _append(file, done[place])
                if all(other in done for other in missing if other[1] == c):
                    pooled = _figures([done[method, c, each] for each in chosen[c]])
                    log.info(
                        "%s at concurrency %d: %s tokens/s, AL %s",
                        method,
                        c,
                        pooled["output_tokens_per_s"],
                        pooled["al"],
                    )
    return summarise([done[place] for place in keys], engine, k)
