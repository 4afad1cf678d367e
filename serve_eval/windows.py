"""One window of the sweep: its load on one server, what came of it, and the file that keeps it.

Windows are appended to cells.jsonl with the outputs, each under a key of everything that its figures depend on; a
window in which requests failed is kept as it was, and measured again by the next run.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from models.artefact import write_bytes
from models.errors import Refused
from models.servers import Server
from serve_eval.config import POOLED, EvalConfig, SamplingConfig
from serve_eval.counters import Acceptance, CounterReset, Counters, difference, judge, read_counters
from serve_eval.gpu import watched_gpus
from serve_eval.load import Window, closed_loop, open_loop
from serve_eval.methods import Method
from serve_eval.prompts import Prompt
from serve_eval.streams import Ask, Outcome

log = logging.getLogger(__name__)

WARMUP_TOKENS = 16
LOOKUP = ("ngram", "suffix")
"""Methods that draft only where they find something."""
OTHERS = 0.02
"""Share of drafting steps beyond our requests' own from which on somebody else must have used the server."""

Record = dict[str, Any]
"""A window as it is kept."""


@dataclass(frozen=True)
class Load:
    """Clients of a closed loop, or requests per second of an open one."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}" if self.concurrency else f"{self.rate:g} requests/s"


class Place(NamedTuple):
    """Where a window stands in the sweep: name of the method, load, route, repeat."""

    method: str
    load: Load
    route: str
    repeat: int = 0


def place_of(record: Mapping[str, Any]) -> Place:
    """The place of a kept window."""
    load = Load(record["concurrency"], record.get("rate"))
    return Place(record["method"], load, record["route"], record.get("repeat", 0))


def sampling_of(settings: EvalConfig, route: str) -> SamplingConfig:
    """How the tokens of a route are drawn."""
    return settings.sampling.get(route) or settings.sampling.get(POOLED) or SamplingConfig()


def _kept(outcome: Outcome) -> Record:
    """An outcome as it is kept; times between chunks to a hundredth of a millisecond."""
    return asdict(outcome) | {"itl_ms": [round(gap, 2) for gap in outcome.itl_ms]}


def acceptance_of(kept: Mapping[str, Any]) -> Acceptance:
    """From its record."""
    return Acceptance(**(dict(kept) | {"per_position": tuple(kept["per_position"])}))


def _own(window: Window) -> Acceptance | None:
    """The sum of what each answer tells of itself; None unless all do, since the rest is unknown."""
    told = [outcome.acceptance for outcome in window.outcomes if outcome.failed is None]
    known = [each for each in told if each is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(told) else None


def _counted(server: Server, method: Method, before: Counters, after: Counters, window: Window) -> tuple[Any, str]:
    """(acceptance over the window or None, what is wrong or "")."""
    own = _own(window)
    if server.kind == "sglang":  # it has no counters of drafts, but its answers tell their own
        if own is None and method.k:
            gauge = "" if after.gauge is None else f" (its gauge, of an unknown span, says {after.gauge:.2f})"
            return None, f"the server tells no counts of drafts with its answers{gauge}; AL is n/a"
        return own, "" if method.method in LOOKUP else judge(method.method, own) or ""
    try:
        counted = difference(before, after)
    except CounterReset as error:
        return None, f"{error}; AL is n/a"
    # Prompt lookup that finds nothing is no fault of the server.
    wrong = "" if counted is not None and method.method in LOOKUP else judge(method.method, counted) or ""
    failed = any(outcome.failed for outcome in window.outcomes)
    if own is not None and counted is not None and not failed and counted.drafts > (1 + OTHERS) * own.drafts:
        wrong = wrong or (
            f"the server counted {counted.drafts} drafting steps, our requests had {own.drafts}: somebody else used it"
        )
    return counted, wrong


def _told(where: str, window: Window) -> list[str]:
    told = [f"{where}: request {outcome.id} failed: {outcome.failed}" for outcome in window.outcomes if outcome.failed]
    if unknown := sum(outcome.failed is None and outcome.tokens is None for outcome in window.outcomes):
        told.append(f"{where}: the server sent no usage for {unknown} requests: tokens and tokens/s are unknown")
    return told


def _send(
    url: str, prompts: Sequence[Prompt], load: Load, settings: EvalConfig, ask: Ask
) -> Coroutine[Any, Any, Window]:
    most, timeout_s = settings.max_new_tokens, settings.request_timeout_s
    if load.rate is not None:
        return open_loop(url, prompts, rate=load.rate, max_new_tokens=most, timeout_s=timeout_s, ask=ask)
    clients = load.concurrency or 1
    return closed_loop(url, prompts, concurrency=clients, max_new_tokens=most, timeout_s=timeout_s, ask=ask)


def measure(server: Server, method: Method, place: Place, prompts: Sequence[Prompt], settings: EvalConfig) -> Record:
    """One window: counters, load, counters.

    Raises:
        Refused: every request failed, or the server died.
    """
    sampling, load = sampling_of(settings, place.route), place.load
    # A repeat draws other samples at other arrivals, every method the same ones.
    seed = settings.seed + 1_000_003 * place.repeat
    ask = Ask(sampling.temperature, sampling.top_p, settings.ignore_eos, seed, server.model, server.kind)
    before = read_counters(server)
    with watched_gpus(wanted=server.process is not None) as gpus:
        window = uvloop.run(_send(server.url, prompts, load, settings, ask))
    where = f"{place.method} at {load}, {place.route}"
    if all(outcome.failed for outcome in window.outcomes):
        raise Refused(f"{where}: every request failed ({window.outcomes[0].failed}); {server.last_words()}")
    if server.ended:
        raise Refused(f"{where}: the server died; {server.last_words()}")
    after = read_counters(server)
    acceptance, wrong = _counted(server, method, before, after, window)
    warnings = _told(where, window) + ([f"{where}: {wrong}"] if wrong else [])
    for warning in warnings:
        log.warning("%s", warning)
    queued, queue_s = after.queued - before.queued, after.queue_s - before.queue_s
    return {
        "method": place.method,
        "concurrency": load.concurrency,
        "rate": load.rate,
        "route": place.route,
        "repeat": place.repeat,
        "input_length": prompts[0].input_length,
        "temperature": sampling.temperature,
        "version": server.version,
        "command": server.shown or f"a running server at {server.url}",
        "seconds": window.seconds,
        "outcomes": [_kept(outcome) for outcome in window.outcomes],
        "acceptance": None if acceptance is None else asdict(acceptance),
        "queue": {"seconds": queue_s, "requests": queued} if queued > 0 and queue_s >= 0 else None,
        "gpu": gpus[0] if gpus else None,
        "warnings": warnings,
    }


def warm_up(server: Server, prompts: Sequence[Prompt], settings: EvalConfig) -> None:
    """A few short requests outside every window, from the end of the list, where windows take none if they can."""
    if not (some := list(prompts)[-settings.warmup_requests :] if settings.warmup_requests else []):
        return
    uvloop.run(
        closed_loop(
            server.url,
            some,
            concurrency=len(some),
            max_new_tokens=min(WARMUP_TOKENS, settings.max_new_tokens),
            timeout_s=settings.request_timeout_s,
            ask=replace(Ask(), model=server.model, kind=server.kind),
        )
    )


def read_windows(file: Path, keys: Mapping[Place, str]) -> dict[Place, Record]:
    """Finished windows of this sweep. A torn last line (a killed run) is dropped from the file; a window in which
    requests failed is not finished, and neither is one of other contents.

    Raises:
        Refused: a line is no window.
    """
    if not file.exists():
        return {}
    lines = file.read_bytes().split(b"\n")
    if lines[-1]:
        log.warning("%s ended in a torn line; its cell is measured again", file)
        write_bytes(file, b"".join(line + b"\n" for line in lines[:-1]))
    found = {}
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
            place = place_of(record)
            finished = keys.get(place) == record["key"] and not any(each["failed"] for each in record["outcomes"])
        except (ValueError, KeyError, TypeError):
            raise Refused(f"{file}:{number} is no cell of a sweep; delete the file to measure again") from None
        if finished:
            found[place] = record
    return found


def append(file: Path, record: Record) -> None:
    """Add a window to the file, flushed to disk."""
    with file.open("ab") as handle:
        handle.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        handle.flush()
        os.fsync(handle.fileno())
