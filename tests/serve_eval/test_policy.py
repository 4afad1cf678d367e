"""The policy says what was measured, "none" where the gain is not sure, and is refused when it is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.errors import Refused
from serve_eval.intervals import paired_interval
from serve_eval.policy import (
    Policy,
    engine_flags,
    make_policy,
    read_policy,
    read_records,
    show,
    write_policy,
)

Speeds = dict[str, list[float]]


def seconds_of(c: int, speeds: list[float]) -> float:
    """How long c clients take for 100 tokens at each of these tokens per second."""
    return 100 * len(speeds) / (c * sum(speeds) / len(speeds))


def record(method: str, c: int, route: str, speeds: list[float], seconds: float | None = None) -> dict[str, Any]:
    """A window of 100-token requests at these tokens per second."""
    outcomes = [
        {"id": f"{route}-{index}", "tokens": 100, "ttft_ms": 1e5 / speed - 60, "itl_ms": [20.0, 40.0], "failed": None}
        for index, speed in enumerate(speeds)
    ]
    return {
        "method": method,
        "concurrency": c,
        "route": route,
        "seconds": seconds or seconds_of(c, speeds),
        "outcomes": outcomes,
    }


def measured(routes: dict[str, dict[int, tuple[list[float], list[float]]]], al: float = 2.4) -> tuple[Any, list[Any]]:
    """(summary, records): per route and concurrency the requests' speeds without and with eagle3."""
    records, cells = [], []
    for route, levels in routes.items():
        for c, speeds in levels.items():
            for method, mine in zip(("none", "eagle3"), speeds, strict=True):
                records.append(record(method, c, route, mine))
                figures = {"output_tokens_per_s": c * sum(mine) / len(mine), "al": al if method == "eagle3" else None}
                cells.append(
                    {"method": method, "concurrency": c, "route": route, "seconds": round(seconds_of(c, mine), 6)}
                    | figures
                    | {"ttft_ms": {"p95": 100.0 * c}}
                )
                cells.append(cells[-1] | {"route": "all"})
    served = {"engine": "vllm", "version": "0.32.0", "k": 3, "cells": cells}
    summary = {"served": served, "target": "t", "head": "runs/x/export", "date": "2026-11-30", "machine": "m"}
    return summary, records


SURE = ([50.0, 52.0, 48.0, 50.0], [80.0, 82.0, 78.0, 80.0])
UNSURE = ([50.0, 52.0, 48.0, 50.0], [80.0, 30.0, 120.0, 40.0])
LOSS = ([50.0, 52.0, 48.0, 50.0], [40.0, 42.0, 38.0, 40.0])


def test_speculation_is_on_exactly_where_the_whole_interval_lies_above_one() -> None:
    policy = make_policy(*measured({"chat": {1: SURE, 2: UNSURE, 8: LOSS}}))
    levels = policy.routes["chat"].levels
    assert [(level.up_to, level.method, level.k) for level in levels] == [
        (1, "eagle3", 3),
        (2, "none", 0),
        (8, "none", 0),
    ]
    for level in levels:
        assert level.interval is not None and level.speedup is not None
        assert level.interval[0] < level.speedup < level.interval[1]
    assert levels[1].speedup is not None and levels[1].speedup > 1, "a gain that may be none"
    assert (levels[0].requests, levels[0].tokens_per_s) == (4, [50.0, 80.0])


def test_one_prompt_or_failed_ones_are_no_evidence() -> None:
    base, ours = record("none", 1, "chat", [50.0, 50.0]), record("eagle3", 1, "chat", [90.0, 90.0])
    ours["outcomes"][1]["failed"] = "timeout"
    assert paired_interval([base], [ours]) == (None, 1)


def test_a_load_between_measurements_is_judged_by_the_higher_one_and_beyond_them_nothing_is_claimed() -> None:
    route = make_policy(*measured({"chat": {2: SURE, 8: LOSS}})).routes["chat"]
    told = [route.level(load) for load in (1, 2, 3, 8, 9)]
    assert [level and level.method for level in told] == ["eagle3", "eagle3", "none", "none", None]


def test_the_least_acceptance_length_is_where_the_gain_is_gone() -> None:
    level = make_policy(*measured({"chat": {1: SURE}}, al=2.4)).routes["chat"].levels[0]
    assert level.min_al == pytest.approx(2.4 / 1.6)
    assert make_policy(*measured({"chat": {1: LOSS}})).routes["chat"].levels[0].min_al is None


def test_the_queue_threshold_is_the_longest_first_token_time_of_levels_that_are_on() -> None:
    assert make_policy(*measured({"chat": {1: SURE, 4: SURE, 8: LOSS}})).max_queue_wait_ms == 400.0
    assert make_policy(*measured({"chat": {1: LOSS}})).max_queue_wait_ms is None


def test_of_several_k_of_one_method_each_level_names_its_own() -> None:
    summary, records = measured({"chat": {1: SURE}})
    for each in (*summary["served"]["cells"], *records):
        each["method"] = {"none": "none", "eagle3": "eagle3-k2"}[each["method"]]
    summary["served"]["methods"] = {"eagle3-k2": {"method": "eagle3", "k": 2, "model": "h", "lookup": [2, 4]}}
    policy = make_policy(summary, records)
    assert (policy.routes["chat"].levels[0].method, policy.routes["chat"].levels[0].k) == ("eagle3", 2)
    assert (set(policy.flags), policy.max_queue_wait_ms) == ({"eagle3-k2"}, 100.0)


def test_flags_of_prompt_lookup_are_those_that_were_measured() -> None:
    summary, records = measured({"chat": {1: SURE}})
    summary["served"]["methods"] = {"eagle3": {"method": "ngram", "k": 5, "model": None, "lookup": [3, 6]}}
    (words,) = [told["vllm"] for told in make_policy(summary, records).flags.values()]
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        **{"method": "ngram", "num_speculative_tokens": 5},
        **{"prompt_lookup_min": 3, "prompt_lookup_max": 6},
    }


def test_a_gain_without_a_known_acceptance_length_is_shown_without_its_end() -> None:
    summary, records = measured({"chat": {1: SURE}})
    for cell in summary["served"]["cells"]:
        cell["al"] = None
    told = show(make_policy(summary, records))
    assert "eagle3 k=3" in told and "None" not in told


def test_all_pools_the_prompts_of_every_route() -> None:
    policy = make_policy(*measured({"chat": {1: SURE}, "code": {1: SURE}}))
    assert policy.routes["all"].levels[0].requests == 8
    assert (policy.route("code"), policy.route("other"), policy.route(None)) == ("code", "all", "all")


def test_older_windows_in_the_file_are_not_taken_for_the_summarys() -> None:
    summary, records = measured({"chat": {1: SURE}})
    stale = [record("eagle3", 1, "chat", [1.0] * 4, seconds=11.0)]
    assert make_policy(summary, records + stale) == make_policy(summary, records)
    with pytest.raises(Refused, match="no window of eagle3 at concurrency 1 on chat"):
        make_policy(summary, records[:1] + stale)


def test_without_a_served_measurement_there_is_nothing_to_decide() -> None:
    with pytest.raises(Refused, match="measured no server"):
        make_policy({"served": None}, [])


def test_b41_flags_mean_the_same_k_in_both_engines() -> None:
    flags = engine_flags("eagle3", 3, "some head")
    speculation = json.loads(flags["vllm"][flags["vllm"].index("--speculative-config") + 1])
    assert speculation == {"method": "eagle3", "model": "some head", "num_speculative_tokens": 3}
    told = dict(zip(flags["sglang"][::2], flags["sglang"][1::2], strict=False))
    assert told["--speculative-algorithm"] == "EAGLE3"
    assert (told["--speculative-num-steps"], told["--speculative-num-draft-tokens"]) == ("3", "4")
    with pytest.raises(Refused, match="'medusa'"):
        engine_flags("medusa", 3, "head")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    policy = make_policy(*measured({"chat": {1: SURE, 2: UNSURE}}))
    write_policy(policy, tmp_path / "policy.yaml")
    assert read_policy(tmp_path / "policy.yaml") == policy
    assert "chat" in show(policy)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("routes: {all: {shares: 0.5}}", "shares"),
        ("routes: {all: {share: much}}", "much"),
        ("routes: {all: {share: 1.5}}", "share of 0 to 1"),
        ("routes: {chat: {}}", "no route 'all'"),
        ("routes: {all: {levels: [{up_to: 4}, {up_to: 2}]}}", "ascending up_to"),
        ("routes: {all: {levels: [{up_to: 0}, {up_to: 2}]}}", "from 1"),
        ("routes: {all: {levels: [{up_to: 4, method: eagle3}]}}", "k is 0 exactly"),
        ("routes: {all: {levels: [{up_to: 4, method: eagle3, k: -3}]}}", "k is 0 exactly"),
        ("routes: {all: {levels: [{up_to: 4, method: eagle3, k: 3, min_al: .nan}]}}", "min_al=nan"),
        ("routes: {all: {levels: null}}", "not Optional"),
        ("{routes: {all: {}}, max_queue_wait_ms: .nan}", "max_queue_wait_ms=nan"),
        ("- all", "is no policy"),
        ("{format: 2, routes: {all: {}}}", "format 2"),
        ("{probe_every: 0, routes: {all: {}}}", "probe_every=0"),
        ("routes: [", "no policy"),
    ],
)
def test_b43_a_policy_that_is_broken_is_refused_with_the_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(Refused, match=message):
        read_policy(tmp_path / "policy.yaml")


def test_a_missing_policy_or_measurement_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="serve_eval.policy"):
        read_policy(tmp_path / "policy.yaml")
    with pytest.raises(Refused, match="run serve_eval"):
        read_records(tmp_path / "cells.jsonl")


def test_an_empty_policy_sends_nothing_to_speculation() -> None:
    assert Policy().route("chat") == "all"
