"""The grid is complete, comparable, resumable, and honest about what it does not know."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.config import EngineConfig
from models.errors import Refused
from models.servers import attached
from serve_eval.config import EvalConfig, SamplingConfig
from serve_eval.figures import compare_outputs, crossover
from serve_eval.methods import Method, methods_of
from serve_eval.prompts import Prompt
from serve_eval.report import render_table, write_report
from serve_eval.sweep import choose_prompts, run_sweep, window_keys
from serve_eval.windows import Load, Place, measure
from tests.serve_eval.stub import Behaviour, running

Make = Callable[..., EngineConfig]
Starts = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def sweep(head_dir: Path, numbered_prompts: list[Prompt], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the sweep with small settings: concurrency 1 and 2, two requests per route."""

    def run(engine: EngineConfig, **more: Any) -> dict[str, Any]:
        settings = EvalConfig(concurrencies=[1, 2], requests_per_route=2, max_new_tokens=8, request_timeout_s=10)
        arguments: dict[str, Any] = {"settings": settings, "k": 4, "prompts": numbered_prompts}
        return run_sweep(
            engine=engine, target_path="some/target", head=head_dir, directory=tmp_path / "eval", **(arguments | more)
        )

    return run


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "eval/cells.jsonl").read_text().splitlines()]


def test_every_cell_has_its_figures_and_all_pools_the_routes(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, starts: Starts
) -> None:
    served = sweep(fake_engine(Behaviour(chunk_ms=5)))
    assert len(starts()) == 2
    cells = {(cell["method"], cell["concurrency"], cell["route"]): cell for cell in served["cells"]}
    assert set(cells) == {(m, c, r) for m in ("none", "eagle3") for c in (1, 2) for r in ("all", "chat", "code")}
    for cell in cells.values():
        assert cell["failed"] == 0
        assert cell["requests"] == (4 if cell["route"] == "all" else 2)
        assert cell["output_tokens"] == 8 * cell["requests"]
        assert cell["output_tokens_per_s"] == pytest.approx(cell["output_tokens"] / cell["seconds"], rel=0.01)
        for key in ("ttft_ms", "itl_ms", "tpot_ms"):
            assert 0 <= cell[key]["p50"] <= cell[key]["p95"] <= cell[key]["p99"]
    # 10 drafts and 20 accepted per request, in the stub; the warm-up's are outside
    assert cells["eagle3", 2, "chat"]["al"] == 3.0
    assert cells["eagle3", 1, "all"]["per_position"] == [1.0, 1.0, 0.0, 0.0]
    assert cells["none", 1, "chat"]["al"] is None
    assert set(served["speedup"]) == {"1", "2"}
    rates = [cells[method, 1, "all"]["output_tokens_per_s"] for method in ("none", "eagle3")]
    assert served["speedup"]["1"] == pytest.approx(rates[1] / rates[0], abs=1e-3)
    assert set(served["speedup_by_route"]) == {"chat", "code"}
    assert served["lossless"] == {"prompts": 4, "identical": 4, "differing": []}
    assert served["prompts"]["2"] == ["chat-0", "chat-1", "code-0", "code-1"]
    assert (served["engine"], served["version"], served["k"], served["dtype"]) == ("vllm", "0.0.stub", 4, "float32")
    assert "--speculative-config" in served["commands"]["eagle3"]
    assert "--speculative-config" not in served["commands"]["none"]
    assert served["warnings"] == []


def test_a_second_run_starts_no_server_and_says_the_same(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, starts: Starts
) -> None:
    engine = fake_engine()
    first = sweep(engine)
    assert sweep(engine) == first
    assert len(starts()) == 2


def test_a_killed_sweep_measures_only_what_is_missing(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, starts: Starts, tmp_path: Path
) -> None:
    engine = fake_engine()
    first = sweep(engine)
    file = tmp_path / "eval/cells.jsonl"
    whole = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(whole[:6]) + whole[6][:50])  # all of "none", two cells of "eagle3", a torn third
    again = sweep(engine)
    assert len(starts()) == 3
    assert "--speculative-config" in starts()[2]["arguments"]
    assert file.read_bytes().splitlines(keepends=True)[:6] == whole[:6]
    assert len(lines(tmp_path)) == 8
    assert again["cells"][:6] == first["cells"][:6]


def test_another_head_k_length_or_prompt_is_another_measurement_and_another_place_is_not(
    fake_engine: Make, head_dir: Path, numbered_prompts: list[Prompt]
) -> None:
    engine, settings = fake_engine(), EvalConfig(max_new_tokens=8)

    def keys(engine: EngineConfig = engine, settings: EvalConfig = settings, k: int = 4, first: int = 0) -> set[str]:
        chosen = {Load(1): {"chat": numbered_prompts[first : first + 1]}}
        return set(window_keys(engine, settings, "some/target", methods_of(settings, head_dir, k), chosen).values())

    before = keys()
    assert len(before) == 2
    assert keys(engine=replace(engine, python="/elsewhere/bin/python", startup_timeout_s=1)) == before
    assert keys(settings=replace(settings, concurrencies=[1, 2], k=7)) == before
    others = [
        keys(k=2),
        keys(first=1),
        keys(engine=replace(engine, dtype="bfloat16")),
        keys(settings=replace(settings, max_new_tokens=9)),
    ]
    (head_dir / "model.safetensors").write_bytes(b"other weights")
    others.append(keys())
    assert len(set.union(before, *others)) == 2 + 2 * len(others)


def test_a_further_concurrency_adds_its_cells_and_keeps_the_others(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, tmp_path: Path
) -> None:
    engine = fake_engine()
    settings = EvalConfig(concurrencies=[1], requests_per_route=1, max_new_tokens=8)
    sweep(engine, settings=settings)
    assert len(lines(tmp_path)) == 4
    served = sweep(engine, settings=replace(settings, concurrencies=[2, 1]))
    assert len(lines(tmp_path)) == 8
    assert list(served["speedup"]) == ["1", "2"]


def test_b38_neither_the_warm_up_nor_what_came_before_it_is_counted(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, tmp_path: Path
) -> None:
    sweep(fake_engine())  # which has counted 100 drafts when it starts, and counts ten a request
    drafts = [window["acceptance"]["drafts"] for window in lines(tmp_path) if window["method"] == "eagle3"]
    assert drafts == [20] * 4


def test_b38_counters_that_are_reset_give_no_al_and_a_word(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make
) -> None:
    # the third request after the two of the warm-up falls into the second window
    served = sweep(fake_engine(Behaviour(reset_after=5)))
    cells = {(cell["concurrency"], cell["route"]): cell for cell in served["cells"] if cell["method"] == "eagle3"}
    assert cells[1, "chat"]["al"] == 3.0
    assert cells[1, "code"]["al"] is None
    assert cells[1, "all"]["al"] is None
    assert cells[2, "all"]["al"] == 3.0
    assert [warning for warning in served["warnings"] if "went backwards" in warning]


def test_b41_a_method_that_accepts_nothing_is_warned_about_and_reported_as_that(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, tmp_path: Path
) -> None:
    served = sweep(fake_engine(Behaviour(accepted_per_draft=0)))
    assert all("AL is 1.00" in warning for warning in served["warnings"])
    assert len(served["warnings"]) == 4
    summary = {"served": served, "target": "t", "head": "h", "machine": "m", "k": 4, "reference": None}
    write_report(summary, tmp_path / "report.html")
    render_table(summary)
    assert {each["al"] for each in served["cells"]} == {None, 1.0}


def test_a_server_that_dies_is_told_with_what_was_measured_kept(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, tmp_path: Path, starts: Starts
) -> None:
    with pytest.raises(Refused, match="ended with exit code 7"):
        sweep(fake_engine(Behaviour(die_after=5)))  # two of the warm-up, a window of two, and one of the next
    assert len(lines(tmp_path)) == 1
    sweep(fake_engine())
    assert len(lines(tmp_path)) == 1 + 8, "another behaviour of the stub is another engine"


def test_b41_a_method_that_never_drafts_is_warned_about_and_has_no_al(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make
) -> None:
    served = sweep(fake_engine(Behaviour(drafts=False)))
    assert all(cell["al"] is None for cell in served["cells"])
    assert all("no speculation counters" in warning for warning in served["warnings"])


def test_b40_without_usage_throughput_and_speedup_are_unknown(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make
) -> None:
    served = sweep(fake_engine(Behaviour(usage=False)))
    assert all(cell["output_tokens_per_s"] is None for cell in served["cells"])
    assert served["speedup"] == {"1": None, "2": None}
    assert served["crossover_concurrency"] is None
    assert all("no usage" in warning for warning in served["warnings"])


def test_failed_requests_are_counted_told_and_measured_again(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, starts: Starts
) -> None:
    served = sweep(fake_engine(Behaviour(mishap={"101": "http500"})))
    failed = {(cell["method"], cell["concurrency"], cell["route"]): cell["failed"] for cell in served["cells"]}
    assert failed["none", 1, "code"] == failed["eagle3", 2, "all"] == 1
    assert failed["none", 1, "chat"] == 0
    assert served["lossless"]["prompts"] == 3
    assert any("code-1 failed: HTTP 500" in warning for warning in served["warnings"])
    sweep(fake_engine(Behaviour(mishap={"101": "http500"})))
    assert len(starts()) == 4


def test_a_window_in_which_everything_fails_is_refused(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, tmp_path: Path
) -> None:
    engine = fake_engine(Behaviour(mishap={"100": "cut", "101": "http500"}))
    with pytest.raises(Refused, match="none at concurrency 1, code: every request failed .*log: .*server-none.log"):
        sweep(engine)
    assert len(lines(tmp_path)) == 1, "what was measured before is kept"


def test_outputs_that_differ_are_named(sweep: Callable[..., dict[str, Any]], fake_engine: Make) -> None:
    served = sweep(fake_engine(Behaviour(change_answers=True)))
    assert served["lossless"] == {
        "prompts": 4,
        "identical": 0,
        "differing": ["chat-0", "chat-1", "code-0", "code-1"],
    }


def test_a_repeat_draws_other_samples_and_every_method_the_same(numbered_prompts: list[Prompt]) -> None:
    settings = EvalConfig(max_new_tokens=4, sampling={"chat": SamplingConfig(temperature=0.7)}, request_timeout_s=10)
    drawn = []
    with running(Behaviour()) as (url, stub):
        for name, repeat in (("none", 0), ("none", 1), ("eagle3", 1)):
            stub.bodies.clear()
            place = Place(name, Load(2), "chat", repeat)
            measure(attached(url, "eval.methods"), Method(name), place, numbered_prompts[:4], settings)
            drawn.append({body["prompt"][0]: body["seed"] for body in stub.bodies})
    assert len(drawn[0].keys()) == 4
    assert not set(drawn[0].values()) & set(drawn[1].values())
    assert drawn[1] == drawn[2]


def cell(method: str, concurrency: int, **answers: list[int] | str) -> dict[str, Any]:
    outcomes = [
        {"id": name, "failed": None, "text": str(said), "token_ids": said if isinstance(said, list) else None}
        for name, said in answers.items()
    ]
    return {"method": method, "concurrency": concurrency, "outcomes": outcomes}


def test_a_prompt_is_identical_only_if_it_is_at_every_concurrency() -> None:
    cells = [cell("none", 1, a=[1], b="x"), cell("none", 2, a=[1], b="x")]
    cells += [cell("eagle3", 1, a=[1], b="x"), cell("eagle3", 2, a=[2], b="x")]
    assert compare_outputs(cells, "eagle3") == {"prompts": 2, "identical": 1, "differing": ["a"]}


def test_a_window_never_has_fewer_requests_than_clients(numbered_prompts: list[Prompt]) -> None:
    settings = EvalConfig(requests_per_route=2)
    assert [len(group) for group in choose_prompts(numbered_prompts, settings, 1).values()] == [2, 2]
    assert [len(group) for group in choose_prompts(numbered_prompts, settings, 4).values()] == [4, 4]
    with pytest.raises(Refused, match="route chat has 4 prompts, but a window at concurrency 8 takes 8"):
        choose_prompts(numbered_prompts, settings, 8)


def test_answers_that_do_not_fit_the_context_are_refused_before_a_server_starts(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, starts: Starts
) -> None:
    with pytest.raises(Refused, match=r"engine\.max_model_len=12"):
        sweep(fake_engine(max_model_len=12))
    assert starts() == []


@pytest.mark.parametrize(
    ("speedup", "end"),
    [
        ({1: 1.5, 2: 1.2, 4: 0.8, 8: 0.7}, 2 * 2**0.5),
        ({1: 0.9, 2: 1.2}, 1),
        ({1: 1.5, 2: 1.2}, None),
        ({1: 1.5, 2: None, 4: 0.5}, 2.0),
        ({1: 1.0, 2: 0.5}, 1),
        ({1: None}, None),
        ({8: 1.1, 4: 1.2, 16: 0.9}, 8 * 2**0.5),
    ],
)
def test_the_gain_ends_where_the_speedup_crosses_one(speedup: dict[int, float | None], end: float | None) -> None:
    found = crossover(speedup)
    assert found == (None if end is None else pytest.approx(end, abs=0.01))
