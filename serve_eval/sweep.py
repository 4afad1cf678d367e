"""The measured grid: methods x loads x routes x repeats on real servers, each cell with figures of its own.

A cell is a window of one route at one load. Routes are run one after the other rather than mixed, because a server's
counters know no routes. A window holds at least as many requests as clients: with fewer, the concurrency would be one
in name only. All methods get the same prompts in the same order from the same server settings.

Side by side, the servers of all methods run at once and each window is measured on one after the other (A B A B), so
that a machine that drifts over minutes drifts for all of them; only one of them works at a time. That costs the memory
of all. Otherwise one server runs at a time, and drift is not excluded.

Finished windows are kept (`windows.py`); a rerun measures only what is missing and starts no server when nothing is.
Side by side, what is missing of one method is missing of all: a ratio is of windows that followed one another.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from models.artefact import file_sha256, fingerprint
from models.config import EngineConfig
from models.errors import Refused
from models.servers import Server
from serve_eval.config import POOLED, EvalConfig
from serve_eval.figures import figures, summarise
from serve_eval.latency import model_of
from serve_eval.methods import Method, check_methods, methods_of, opened
from serve_eval.prompts import Prompt, by_route
from serve_eval.servers import describe_machine
from serve_eval.windows import Load, Place, Record, append, measure, read_windows, sampling_of, warm_up
from serve_eval.workloads import lengthened

log = logging.getLogger(__name__)

Chosen = dict[Load, dict[str, list[Prompt]]]
"""Load -> route -> the prompts of its window."""


def choose_prompts(prompts: Sequence[Prompt], settings: EvalConfig, concurrency: int) -> dict[str, list[Prompt]]:
    """The prompts of each route's window at one concurrency: the first of the route, at least one per client.

    Raises:
        Refused: a route has too few prompts for that.
    """
    count = max(settings.requests_per_route, concurrency)
    chosen = {}
    for route, group in by_route(prompts).items():
        if len(group) < count:
            raise Refused(
                f"route {route} has {len(group)} prompts, but a window at concurrency {concurrency} takes {count}; "
                "write more prompts, or lower eval.concurrencies or eval.requests_per_route"
            )
        chosen[route] = group[:count]
    return chosen


def choose(prompts: Sequence[Prompt], settings: EvalConfig) -> Chosen:
    """The prompts of every window.

    Raises:
        Refused: as `choose_prompts`; too few prompts are short enough for an input length; a name of eval.sampling is
            no route.
    """
    clients = sorted(set(settings.concurrencies))
    every = [*prompts, *lengthened(prompts, settings.input_lengths, max(settings.requests_per_route, *clients))]
    loads = [Load(concurrency=c) for c in clients] + [Load(rate=rate) for rate in sorted(set(settings.rates))]
    chosen = {load: choose_prompts(every, settings, load.concurrency or 1) for load in loads}
    routes = chosen[loads[0]]
    if strange := [name for name in settings.sampling if name != POOLED and name not in routes]:
        raise Refused(f"eval.sampling names {strange[0]!r}; the routes are {', '.join(routes)}")
    return chosen


def _contents(directory: str) -> Any:
    """What identifies a checkpoint: every file's hash, for files over 1 GiB their size only."""
    path = Path(directory).expanduser()
    if not path.is_dir():
        return directory  # a hub name
    files = [file for file in sorted(path.iterdir()) if file.is_file()]
    return {file.name: file_sha256(file) if (size := file.stat().st_size) <= 1 << 30 else size for file in files}


def window_keys(
    engine: EngineConfig, settings: EvalConfig, target_path: str, methods: Sequence[Method], chosen: Chosen
) -> dict[Place, str]:
    """Per window, in the order of a sweep side by side, a fingerprint of everything that its figures depend on.

    All methods are in it for the baseline too: a ratio is only worth something within one sitting. So is
    the machine. Paths and patience (where the interpreter is, how long to wait for it) are not.
    """
    served = {key: value for key, value in asdict(engine).items() if key not in ("python", "startup_timeout_s", "host")}
    common = fingerprint(
        {
            "format": 2,
            "machine": describe_machine(),
            "engine": served,
            "target": _contents(target_path),
            "methods": [asdict(each) | {"model": each.model and _contents(each.model)} for each in methods],
            "max_new_tokens": settings.max_new_tokens,
            "warmup_requests": settings.warmup_requests,
            "ignore_eos": settings.ignore_eos,
            "seed": settings.seed,
        }
    )
    return {
        Place(method.name, load, route, repeat): fingerprint(
            [
                *(common, method.name, asdict(load), route, repeat, asdict(sampling_of(settings, route))),
                [[prompt.id, list(prompt.ids)] for prompt in group],
            ]
        )
        for load, groups in chosen.items()
        for route, group in groups.items()
        for repeat in range(settings.repeats)
        for method in methods
    }


def in_server(settings: EvalConfig) -> EvalConfig:
    """The settings of the served sweep, whose answers may be shorter."""
    return replace(settings, max_new_tokens=settings.served_new_tokens or settings.max_new_tokens)


def lossless_in(engine: EngineConfig, served: dict[str, Any]) -> dict[str, Any]:
    """Take `lossless` out of the served section, named after engine and dtype; None for samples, never compared."""
    told = served.pop("lossless")
    dtype = "fp32" if engine.dtype == "float32" else engine.dtype
    return {f"{engine.kind}_{dtype}": told if told["prompts"] else None}


def check_served_k(settings: EvalConfig) -> None:
    """Raise Refused where the reference decoder's best k would be that of another method than the head."""
    if settings.reference and settings.drafting.method != "eagle3" and settings.served_k is None:
        raise Refused(
            "eval.served_k must be given: the server drafts with the head, and the best k of the reference decoder "
            f"is that of eval.drafting.method={settings.drafting.method}"
        )


def check_possible(
    engine: EngineConfig, settings: EvalConfig, prompts: Sequence[Prompt], head: Path, of_head: str | None = None
) -> None:
    """Everything that can be known to fail before the first minute is spent.

    Args:
        head: the exported head.
        of_head: its method, for a dry run before its export.

    Raises:
        Refused: no interpreter with the engine, a method that it has not, no head, too few prompts, answers longer than
            the server's context.
    """
    methods = methods_of(settings, head, settings.served_k or settings.k, of_head)
    check_methods(engine, methods, of_head)
    chosen = choose(prompts, settings).values()
    longest = max(len(prompt.ids) for groups in chosen for group in groups.values() for prompt in group)
    k = max(method.k for method in methods)
    if longest + settings.max_new_tokens + k > engine.max_model_len:
        raise Refused(
            f"the longest prompt has {longest} tokens: with answers of {settings.max_new_tokens} (eval.max_new_tokens, "
            f"or eval.served_new_tokens) and k={k} it does not fit into engine.max_model_len={engine.max_model_len}"
        )


def failures(summary: dict[str, Any]) -> int:
    """Requests of a finished summary that failed; such cells are measured again."""
    served = summary.get("served") or {}
    return sum(cell["failed"] for cell in [*served.get("cells", []), *served.get("open_loop", [])])


def _tell(places: Iterable[Place], done: Mapping[Place, Record]) -> None:
    """One line about a load of a method that is finished, its routes and repeats pooled."""
    windows = [done[place] for place in places]
    told, first = figures(windows), next(iter(places))
    rate, al = told["output_tokens_per_s"], told["al"]
    log.info("%s at %s: %s tokens/s, AL %s", first.method, first.load, rate, "n/a" if al is None else al)


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
    """Measure every method against the same server without one; resumes what `directory`/cells.jsonl already holds.

    Args:
        head: the exported head, for the methods that draft with one.
        k: tokens drafted per step, where a method names no k of its own.
        prompts: all evaluation prompts; the first of each route are sent (see `choose_prompts`).
        directory: where cells.jsonl and the servers' logs are kept.

    Returns:
        The `served` section of summary.json, with `lossless` inside (see `figures.summarise`).

    Raises:
        Refused: no head, too few prompts, answers longer than the server's context, a server that does not
            start or dies, or cells that were measured with another version of the engine.
    """
    check_possible(engine, settings, prompts, head)
    methods = methods_of(settings, head, k)
    chosen = choose(prompts, settings)
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "cells.jsonl"
    keys = window_keys(engine, settings, target_path, methods, chosen)
    done = read_windows(file, keys)
    together = settings.side_by_side or all(method.url for method in methods)
    if together:
        halves = {place[1:] for place in keys if place not in done}
        done = {place: record for place, record in done.items() if place[1:] not in halves}
    for sitting in [methods] if together else [[method] for method in methods]:
        names = {method.name: method for method in sitting}
        missing = [place for place in keys if place.method in names and place not in done]
        if not missing:
            continue
        with contextlib.ExitStack() as stack:
            servers: dict[str, Server] = {}
            for name in dict.fromkeys(place.method for place in missing):
                servers[name] = stack.enter_context(opened(engine, target_path, names[name], directory))
            versions = {record["version"] for record in done.values()} | {each.version for each in servers.values()}
            if len(versions) > 1:
                raise Refused(
                    f"{file} was measured with another version of the engine ({', '.join(sorted(versions))}); "
                    "delete it to measure all of it again"
                )
            for server in servers.values():
                warm_up(server, prompts, settings)
            for place in missing:
                group = chosen[place.load][place.route]
                record = measure(servers[place.method], names[place.method], place, group, settings)
                done[place] = record | {"key": keys[place]}
                append(file, done[place])
                same = [other for other in keys if other.method == place.method and other.load == place.load]
                if all(other in done for other in same):
                    _tell(same, done)
    ids = {prompt.id: prompt.ids for groups in chosen.values() for group in groups.values() for prompt in group}
    windows = {place: done[place] for place in keys}
    served = summarise(windows, methods, engine, settings, ids, side_by_side=together)
    return served | {"model": model_of(windows, methods, {name: len(each) for name, each in ids.items()})}
