"""Figures of cells, exact against windows made by hand; what is sampled, long or unknown is told apart."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.config import EngineConfig
from serve_eval.config import EvalConfig
from serve_eval.figures import figures, summarise
from serve_eval.gpu import parse, watched_gpus
from serve_eval.methods import Method
from serve_eval.overlap import overlap
from serve_eval.windows import Load, Place

PLAIN, HEAD = Method("none"), Method("eagle3", "eagle3", 2, "head")


def request(name: str, tokens: int, ttft: float = 100.0, gaps: tuple[float, ...] = (50.0, 50.0), **more: Any) -> Any:
    own = {"failed": None, "text": "", "token_ids": None, "acceptance": None, "tpot_ms": 10.0, "route": "chat"}
    times = {"ttft_ms": ttft, "itl_ms": list(gaps), "e2e_ms": ttft + sum(gaps)}
    return {"id": name, "tokens": tokens} | own | times | more


def window(method: str, requests: list[Any], seconds: float = 2.0, **more: Any) -> dict[str, Any]:
    base = {"method": method, "concurrency": 1, "rate": None, "route": "chat", "repeat": 0, "input_length": None}
    base |= {"temperature": 0.0, "version": "1", "command": method, "acceptance": None, "queue": None, "gpu": None}
    return base | {"seconds": seconds, "outcomes": requests, "warnings": []} | more


def drafted(steps: int, accepted: int) -> dict[str, Any]:
    return {"drafts": steps, "draft_tokens": 2 * steps, "accepted": accepted, "per_position": [accepted, 0]}


def test_a_cell_pools_its_windows() -> None:
    first = window("none", [request("a", 10), request("b", 30, ttft=300.0)], queue={"seconds": 0.3, "requests": 2})
    second = window("none", [request("a", 20)], seconds=3.0, queue={"seconds": 0.3, "requests": 1})
    told = figures([first, second | {"repeat": 1}])
    assert told["output_tokens_per_s"] == 12.0
    assert told["requests_per_s"] == 0.6
    assert told["e2e_ms"]["p50"] == 200.0 and told["e2e_ms"]["p99"] == pytest.approx(396)
    assert told["queue_ms"] == 200.0
    assert told["output_lengths"] == {"min": 10, "p10": 12, "p50": 20, "p90": 28, "max": 30, "mean": 20}
    assert (told["requests"], told["seconds"], told["window_seconds"]) == (3, 5.0, [2.0, 3.0])


def test_percentiles_are_of_all_requests_and_all_gaps() -> None:
    told = figures([window("none", [request(str(n), 10, ttft=float(n), gaps=(2.0 * n,)) for n in range(101)])])
    assert told["ttft_ms"] == {"p50": 50, "p95": 95, "p99": 99}
    assert told["itl_ms"] == {"p50": 100, "p95": 190, "p99": 198}


def test_failed_requests_have_no_rate_and_unknown_counts_no_lengths() -> None:
    failed: dict[str, Any] = {
        "id": "a",
        "failed": "timeout",
        "tokens": None,
        "itl_ms": [],
        "ttft_ms": None,
        "e2e_ms": None,
    }
    told = figures([window("none", [failed, request("b", 10)])])
    assert (told["requests_per_s"], told["failed"], told["output_tokens"]) == (0.5, 1, 10)
    assert figures([window("none", [request("a", 10) | {"tokens": None}])])["output_lengths"] is None


def test_al_of_requests_is_a_distribution_where_they_tell_theirs() -> None:
    requests = [request(str(n), 10, acceptance=drafted(10, accepted)) for n, accepted in enumerate((0, 5, 10))]
    told = figures([window("eagle3", [*requests, request("3", 10, acceptance=drafted(0, 0))])])
    assert told["al_by_request"] == {"min": 1.0, "p10": 1.1, "p50": 1.5, "p90": 1.9, "max": 2.0, "mean": 1.5}
    assert figures([window("eagle3", [request("a", 10)])])["al_by_request"] is None


def test_gpu_figures_are_weighted_by_time_and_none_where_a_window_has_none() -> None:
    seen = [window("none", [request("a", 10)], gpu={"utilisation": 90.0, "memory_mib": 100.0})]
    seen.append(window("none", [request("a", 10)], seconds=6.0, gpu={"utilisation": 50.0, "memory_mib": 300.0}))
    assert figures(seen)["gpu"] == {"utilisation": 60.0, "memory_mib": 300.0}
    assert figures([*seen, window("none", [request("a", 10)])])["gpu"] is None


def summary(windows: list[dict[str, Any]], settings: EvalConfig | None = None, **prompts: list[int]) -> dict[str, Any]:
    placed = {
        Place(each["method"], Load(each["concurrency"], each["rate"]), each["route"], each["repeat"]): each
        for each in windows
    }
    ids = {"a": [1, 2, 3, 4, 5], "b": [9, 9, 9, 9]} | prompts
    return summarise(placed, [PLAIN, HEAD], EngineConfig(), settings or EvalConfig(), ids, side_by_side=True)


def test_agreement_and_cost_stand_in_every_cell() -> None:
    windows = [window("none", [request("a", 10, token_ids=[1, 2]), request("b", 10, token_ids=[1, 2])])]
    windows.append(
        window("eagle3", [request("a", 10, token_ids=[1, 2]), request("b", 10, token_ids=[1, 3])], seconds=1.0)
    )
    served = summary(windows, EvalConfig(price_per_hour=3.6))
    cells = {(cell["method"], cell["route"]): cell for cell in served["cells"]}
    assert cells["eagle3", "chat"]["agreement"] == {"prompts": 2, "identical": 1}
    assert served["lossless"]["differing"] == ["b"]
    assert served["speedup"] == {"1": 2.0}
    assert cells["none", "all"]["cost_per_million"] == 100.0  # 10 tokens/s: 100,000 s of 0.001 each
    assert cells["eagle3", "all"]["cost_per_million"] == 50.0


def test_samples_are_not_compared_token_by_token() -> None:
    windows = [window("none", [request("a", 10, token_ids=[1])], temperature=0.7)]
    windows.append(window("eagle3", [request("a", 10, token_ids=[2])], temperature=0.7))
    assert summary(windows)["lossless"] == {"prompts": 0, "identical": 0, "differing": []}


def test_input_lengths_are_routes_that_the_pool_leaves_out_and_open_loops_stand_apart() -> None:
    windows = []
    for method in ("none", "eagle3"):
        windows.append(window(method, [request("a", 10)]))
        windows.append(window(method, [request("b", 90)], route="input 4", input_length=4))
        for route, length in (("chat", None), ("input 4", 4)):
            windows.append(
                window(method, [request("a", 10)], route=route, input_length=length, concurrency=None, rate=2.5)
            )
    served = summary(windows)
    assert [(c["method"], c["route"], c["output_tokens"], c["input_length"]) for c in served["cells"][:3]] == [
        ("none", "all", 10, None),
        ("none", "chat", 10, None),
        ("none", "input 4", 90, 4),
    ]
    assert {(cell["rate"], cell["route"]) for cell in served["open_loop"]} == {
        (2.5, "all"),
        (2.5, "chat"),
        (2.5, "input 4"),
    }
    assert set(served["speedup"]) == {"1"} and set(served["speedup_by_route"]) == {"chat", "input 4"}
    assert served["prompts"] == {"1": ["a"]}


def test_overlap_is_that_of_the_baselines_answers_by_route() -> None:
    windows = [window("none", [request("a", 5, token_ids=[1, 2, 3, 4, 5]), request("b", 4, token_ids=[1, 2, 3, 4])])]
    windows.append(window("eagle3", [request("a", 5, token_ids=[7] * 5), request("b", 4, token_ids=[7] * 4)]))
    # 9 tokens: 5 of 9 unigrams, 4 of 7, 3 of 5, 2 of 3 four-grams stand in the prompts
    assert summary(windows)["overlap"] == {"chat": round((5 / 9 * 4 / 7 * 3 / 5 * 2 / 3) ** 0.25, 4)}
    assert summary([window("none", [request("a", 5)]), window("eagle3", [request("a", 5)])])["overlap"] == {
        "chat": None
    }


def test_bleu_clips_repeats_and_does_not_punish_short_answers() -> None:
    assert overlap([(list(range(100)), list(range(10, 20)))]) == 1.0
    assert overlap([([1, 2, 3, 4], [1, 2, 3, 4, 1, 2, 3, 4])]) == pytest.approx((4 / 8 * 3 / 7 * 2 / 6 * 1 / 5) ** 0.25)
    assert overlap([([1, 2, 3, 4], [5, 6, 7, 8])]) == 0.0
    assert overlap([([1, 2, 3], [1, 2, 3])]) is None, "no 4-gram"
    assert overlap([]) is None


def test_what_nvidia_smi_prints_is_pooled_and_cut_lines_are_left_out() -> None:
    assert parse("0, 50, 1000\n1, 100, 3000\n0, 70, 1500\n1, [N/A], 4000\n0, 9") == {
        "utilisation": pytest.approx(73.3),
        "memory_mib": 4500.0,
    }
    assert parse("") is None


def test_gpus_are_watched_while_something_runs_where_there_is_an_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    asked = tmp_path / "asked"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {asked}.tmp\nyes "0, 40, 900" | head -n 10000\nmv {asked}.tmp {asked}\nexec sleep 60\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with watched_gpus() as seen:
        deadline = time.monotonic() + 20
        while not asked.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert seen == [{"utilisation": 40.0, "memory_mib": 900.0}]
    assert "--query-gpu=index,utilization.gpu,memory.used" in asked.read_text()
    with watched_gpus(wanted=False) as seen:
        pass
    assert seen == []
    monkeypatch.setenv("PATH", "/nowhere")
    with watched_gpus() as seen:
        pass
    assert seen == []


def test_a_method_of_another_name_is_compared_with_the_baseline_too() -> None:
    other = replace(HEAD, name="eagle3-k2")
    windows = [window("none", [request("a", 10)]), window("eagle3-k2", [request("a", 10)], seconds=1.0)]
    placed = {Place(each["method"], Load(1), "chat"): each for each in windows}
    served = summarise(placed, [PLAIN, other], EngineConfig(), EvalConfig(), {"a": [1]}, side_by_side=False)
    assert served["head"] == "eagle3-k2"
    assert served["lossless"] == {"prompts": 1, "identical": 1, "differing": []}
