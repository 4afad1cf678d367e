"""`python -m serve_eval.policy experiment=demo`: from a measurement to policy.yaml, where to speculate and where not.

Per route and load level the policy names the method and k to use, with the numbers behind it. It claims nothing
that was not measured: a load between two measured concurrencies is judged by the higher one (gains shrink with
load), a load above the highest is "none", and so is every level at which the interval of the gain holds 1.0.

The interval is that of `serve_eval.intervals`: over repeats of the windows, or over the prompts where there are too
few repeats. Two prompts are hardly evidence, and the policy then says "none": more of them (`eval.requests_per_route`)
or repeats (`eval.repeats`) are the cure.

A gain depends on acceptance, and acceptance on traffic, which changes. With k and load as they are, the speedup is
proportional to AL, so the gain is gone at AL / speedup: that is `min_al`, below which the gateway falls back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from models.artefact import read_json, write_bytes
from models.engines import HEADS
from models.errors import Refused
from serve_eval.config import FOUND_AGAIN, METHODS, POOLED
from serve_eval.intervals import CONFIDENCE, interval_from, paired_interval
from serve_eval.servers import speculation


@dataclass
class Level:
    """What to do while a server has up to `up_to` requests in flight, the new one included.

    Attributes:
        method, k: what to use; "none" and 0 where speculation does not surely pay.
        candidate: the method and k that the numbers are about.
        speedup: output tokens/s of the candidate over the same server without it.
        interval: range of the gain at the policy's confidence; null when it cannot be told.
        requests: pairs (prompts or repeats) behind the interval.
        tokens_per_s: without and with the candidate.
        al: the candidate's measured acceptance length.
        min_al: acceptance length at which the gain is gone; null where there is none.
    """

    up_to: int
    method: str = "none"
    k: int = 0
    candidate: str = ""
    speedup: float | None = None
    interval: list[float] | None = None
    requests: int = 0
    tokens_per_s: list[float] | None = None
    al: float | None = None
    min_al: float | None = None


@dataclass
class RoutePolicy:
    """A route's levels, ascending, and the share of its traffic that may speculate (gradual rollout)."""

    share: float = 1.0
    levels: list[Level] = field(default_factory=list)

    def level(self, load: int) -> Level | None:
        """The level that a server with `load` requests in flight is on; None above all measured ones."""
        return next((level for level in self.levels if load <= level.up_to), None)


@dataclass
class Policy:
    """policy.yaml.

    Attributes:
        confidence, interval_from: of the levels' intervals.
        max_queue_wait_ms: mean wait in a speculating server's queue above which nothing more is sent there: the
            longest p95 of TTFT of the levels that are on. What waits longer is in a state that was not measured.
        window_drafts: drafting steps over which a route's live AL is taken; it is judged from a quarter on.
        probe_every: of the requests that are kept from speculation because AL fell, every so many-th is sent to it
            all the same, so that a recovery is seen.
        routes: label -> levels; "all" serves what has no label or an unknown one.
        flags: method and k -> arguments for each engine.
    """

    format: int = 1
    date: str = ""
    target: str = ""
    head: str = ""
    engine: str = ""
    machine: str = ""
    confidence: float = CONFIDENCE
    interval_from: str = ""
    max_queue_wait_ms: float | None = None
    window_drafts: int = 2000
    probe_every: int = 20
    routes: dict[str, RoutePolicy] = field(default_factory=dict)
    flags: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def route(self, label: str | None) -> str:
        """The policy's name for a request's label."""
        return label if label in self.routes else POOLED


def engine_flags(method: str, k: int, head: str | None, lookup: tuple[int, int] = FOUND_AGAIN) -> dict[str, list[str]]:
    """Arguments that put a method into each engine that has it, counters and per-request figures included.

    Args:
        head: what drafts: the exported head, or the draft model; None of a method that has neither.
        lookup: least and most tokens that prompt lookup finds again.

    Raises:
        Refused: a method that neither engine is known to have.
    """
    engines = [engine for engine, methods in METHODS.items() if method in methods]
    if not engines or method == "none":
        raise Refused(f"no engine flags are known for method {method!r}")
    metrics: dict[str, list[str]] = {"vllm": [], "sglang": ["--enable-metrics"]}
    return {engine: speculation(method, head, k, engine=engine, lookup=lookup) + metrics[engine] for engine in engines}


def _windows(summary: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int, str], Any]:
    """The records that the summary's cells were made from, told by their duration: the file may hold older ones."""
    durations = {
        (cell["method"], cell["concurrency"], cell["route"]): cell.get("window_seconds", [cell["seconds"]])
        for cell in summary["served"]["cells"]
    }
    found: dict[tuple[str, int, str], Any] = {}
    for record in records:
        place = (record["method"], record["concurrency"], record["route"])
        if round(record["seconds"], 6) in durations.get(place, ()):
            found.setdefault(place, []).append(record)
    return found


def make_policy(summary: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> Policy:
    """Decide, per route and measured concurrency, from summary.json and the windows in cells.jsonl.

    Raises:
        Refused: the summary has no served part, or windows of it are missing.
    """
    served = summary.get("served")
    if not served:
        raise Refused("the evaluation measured no server, so there is nothing to decide; run it with an engine")
    cells = {
        (cell["method"], cell["concurrency"], cell["route"]): cell
        for cell in served["cells"]
        if not cell.get("input_length")  # lengths are no labels of traffic
    }
    windows = _windows(summary, records)
    routes = list(dict.fromkeys(route for _, _, route in cells))
    labels = [route for route in routes if route != POOLED]
    methods = [method for method in dict.fromkeys(method for method, _, _ in cells) if method != "none"]
    told = served.get("methods", {})
    specs = {name: told.get(name) or {"method": name, "k": served["k"]} for name in methods}

    def flags(spec: Mapping[str, Any]) -> dict[str, list[str]]:
        head = spec.get("model") or (summary["head"] if spec["method"] in HEADS else None)
        least, most = spec.get("lookup", FOUND_AGAIN)
        return engine_flags(spec["method"], spec["k"], head, (least, most))

    def group(method: str, c: int, route: str) -> list[Any]:
        names = labels if route == POOLED else [route]
        missing = [name for name in names if (method, c, name) not in windows]
        if missing:
            raise Refused(
                f"cells.jsonl holds no window of {method} at concurrency {c} on {', '.join(missing)} that the summary "
                "was made from; run serve_eval again"
            )
        return [window for name in names for window in windows[method, c, name]]

    def judge(method: str, c: int, route: str) -> Level:
        plain, ours = cells["none", c, route], cells[method, c, route]
        speeds = [plain["output_tokens_per_s"], ours["output_tokens_per_s"]]
        interval, requests = paired_interval(group("none", c, route), group(method, c, route))
        spec = specs[method]
        level = Level(
            up_to=c, candidate=f"{spec['method']}-k{spec['k']}", interval=interval, requests=requests, al=ours["al"]
        )
        if None not in speeds and speeds[0] > 0:
            level.tokens_per_s, level.speedup = speeds, round(speeds[1] / speeds[0], 4)
        if level.speedup and level.speedup > 1 and interval and interval[0] > 1:
            level.method, level.k = spec["method"], spec["k"]
            level.min_al = None if level.al is None else round(level.al / level.speedup, 4)
        return level

    policy = Policy(
        date=str(summary.get("date", "")),
        target=str(summary["target"]),
        head=str(summary["head"]),
        engine=f"{served['engine']} {served['version']}",
        machine=str(summary.get("machine", "")),
        interval_from=served.get("interval_from", interval_from(1, side_by_side=False)),
        flags={f"{each['method']}-k{each['k']}": flags(each) for each in specs.values()},
    )
    waits = []
    for route in routes:
        levels = []
        for c in sorted({c for _, c, _ in cells}):
            judged = [(judge(method, c, route), method) for method in methods]
            best, name = max(judged, key=lambda each: (each[0].method != "none", each[0].speedup or 0.0))
            if best.method != "none":
                waits.append(cells[name, c, route]["ttft_ms"]["p95"])
            levels.append(best)
        policy.routes[route] = RoutePolicy(levels=levels)
    policy.max_queue_wait_ms = max((wait for wait in waits if wait is not None), default=None)
    return policy


def write_policy(policy: Policy, path: Path) -> None:
    """Write `policy` as YAML, atomically."""
    head = "# Where speculation pays, as measured; made by `python -m serve_eval.policy`, read by the gateway.\n"
    write_bytes(path, (head + OmegaConf.to_yaml(OmegaConf.structured(policy))).encode())


def read_policy(path: Path) -> Policy:
    """Read policy.yaml, as made or edited by hand.

    Raises:
        Refused: no such file, an unknown key, a wrong type, no route "all", levels out of order, a bad share.
    """
    if not path.exists():
        raise Refused(f"no policy at {path}; make one with `python -m serve_eval.policy`, or name one: gateway.policy")
    try:
        policy = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Policy), OmegaConf.load(path)))
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise Refused(f"{path} is no policy: {' '.join(str(error).split())}") from None
    assert isinstance(policy, Policy)
    if policy.format != 1:
        raise Refused(f"{path}: format {policy.format} is not 1, the only one that is known here")
    if POOLED not in policy.routes:
        raise Refused(f"{path} has no route {POOLED!r}, which serves requests without a label")
    for name in ("window_drafts", "probe_every"):
        if getattr(policy, name) < 1:
            raise Refused(f"{path}: {name}={getattr(policy, name)} must be at least 1")
    if policy.max_queue_wait_ms is not None and not policy.max_queue_wait_ms >= 0:  # so .nan is none either
        raise Refused(f"{path}: max_queue_wait_ms={policy.max_queue_wait_ms} must be 0 or more")
    for label, route in policy.routes.items():
        ends = [level.up_to for level in route.levels]
        if ends != sorted(set(ends)) or min(ends, default=1) < 1 or not 0 <= route.share <= 1:
            raise Refused(f"{path}: route {label} needs ascending up_to from 1 (they are {ends}), a share of 0 to 1")
        for level in route.levels:
            if (level.method == "none") != (level.k == 0) or level.k < 0:
                raise Refused(f"{path}: route {label} up to {level.up_to}: k is 0 exactly for method none")
            if level.min_al is not None and not level.min_al >= 0:
                raise Refused(f"{path}: route {label} up to {level.up_to}: min_al={level.min_al} must be 0 or more")
    return policy


def read_records(path: Path) -> list[dict[str, Any]]:
    """The windows of cells.jsonl; a torn last line is left out.

    Raises:
        Refused: there is no such file, or a line of it is no record.
    """
    if not path.exists():
        raise Refused(f"{path} is not there; run serve_eval with an engine first")
    lines = path.read_bytes().split(b"\n")[:-1]
    try:
        return [json.loads(line) for line in lines if line]
    except ValueError:
        raise Refused(f"{path} holds a line that is no JSON; delete the file and measure again") from None


def windows_of(directory: Path, summary: Mapping[str, Any]) -> Path:
    """The file with the windows of an evaluation's served section, which may lie in one of its parts."""
    return directory / summary.get("cells", "cells.jsonl")


def show(policy: Policy) -> str:
    """The policy as lines for a terminal: a row per route and level."""
    told = []
    for label, route in policy.routes.items():
        for level in route.levels:
            gain = "n/a" if level.speedup is None else f"{level.speedup:.2f}x"
            within = "n/a" if level.interval is None else "{:.2f}..{:.2f}".format(*level.interval)
            use = "off" if level.method == "none" else f"{level.method} k={level.k}"
            use += "" if level.min_al is None else f", while AL >= {level.min_al}"
            told.append(f"{label:12} up to {level.up_to:4}: {gain:>6} ({within}, {level.requests} pairs): {use}")
    return "\n".join(told)


if __name__ == "__main__":
    from conf import Run, stage

    def main(run: Run) -> None:
        """Write policy.yaml beside the summary."""
        directory = run.directory / "eval"
        if not (directory / "summary.json").exists():
            raise Refused(f"no {directory / 'summary.json'}; run `python -m serve_eval` first")
        summary = read_json(directory / "summary.json")
        policy = make_policy(summary, read_records(windows_of(directory, summary)))
        write_policy(policy, directory / "policy.yaml")
        print(f"{show(policy)}\npolicy: {directory / 'policy.yaml'}")

    stage("policy", main)
