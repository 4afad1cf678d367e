"""SGLang's own stream gives the same figures as an OpenAI-compatible one, whatever a chunk repeats or leaves out."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace

import pytest

from serve_eval.counters import Acceptance
from serve_eval.load import Window, arrivals, closed_loop, open_loop
from serve_eval.prompts import Prompt
from serve_eval.streams import Ask
from tests.serve_eval.stub import Behaviour, running

SGLANG = Ask(kind="sglang")
PROMPTS = [Prompt(f"p{index}", "chat", (index, 1, 2)) for index in range(4)]


def load(url: str, ask: Ask = SGLANG, count: int = 4, timeout_s: float = 20, concurrency: int = 2) -> Window:
    return asyncio.run(
        closed_loop(url, PROMPTS[:count], concurrency=concurrency, max_new_tokens=64, timeout_s=timeout_s, ask=ask)
    )


@pytest.mark.parametrize("increments", [False, True])
def test_b40_tokens_of_sglang_come_from_its_counts_and_text_and_ids_are_whole(increments: bool) -> None:
    behaviour = Behaviour(tokens=10, tokens_per_chunk=4, chunk_ms=20, kind="sglang", increments=increments)
    with running(behaviour) as (url, _):
        outcome = load(url).outcomes[1]
    assert outcome.tokens == 10
    assert outcome.token_ids == tuple(range(1004, 1014))
    assert outcome.text == "".join(f" w{token}" for token in range(1004, 1014))
    assert len(outcome.itl_ms) == 2, "gaps between three chunks"
    assert outcome.tpot_ms == pytest.approx(sum(outcome.itl_ms) / 9)
    assert outcome.ttft_ms is not None and outcome.e2e_ms is not None
    assert outcome.e2e_ms == pytest.approx(outcome.ttft_ms + sum(outcome.itl_ms))


def test_b40_an_empty_first_chunk_of_sglang_is_not_the_first_token() -> None:
    with running(Behaviour(kind="sglang", empty_first_delta=True, empty_delay_ms=80)) as (url, _):
        (outcome,) = load(url, count=1).outcomes
    assert outcome.ttft_ms is not None and outcome.ttft_ms >= 80
    assert len(outcome.itl_ms) == 2


def test_b40_without_counts_the_tokens_of_sglang_are_unknown_and_times_are_not() -> None:
    with running(Behaviour(kind="sglang", usage=False)) as (url, _):
        (outcome,) = load(url, count=1).outcomes
    assert (outcome.failed, outcome.tokens, outcome.tpot_ms) == (None, None, None)
    assert outcome.ttft_ms is not None


@pytest.mark.parametrize(
    ("mishap", "reason"),
    [("http500", "HTTP 500.*out of order"), ("abort", "thrown out"), ("hang", "timeout after 1 s")],
)
def test_b40_a_failing_request_of_sglang_fails_alone_and_with_its_reason(mishap: str, reason: str) -> None:
    with running(Behaviour(kind="sglang", mishap={"1": mishap})) as (url, _):
        window = load(url, timeout_s=1)
    assert [outcome.failed is not None for outcome in window.outcomes] == [False, True, False, False]
    assert re.search(reason, window.outcomes[1].failed or "")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_requests_own_counts_are_read_where_the_server_tells_them(kind: str) -> None:
    with running(Behaviour(kind=kind, own_figures=True)) as (url, _):
        told = load(url, replace(SGLANG, kind=kind)).outcomes
    for outcome in told:
        assert outcome.acceptance is not None
        assert outcome.acceptance.per_position[:3] in ((10, 10), (10, 10, 0))
        assert replace(outcome.acceptance, per_position=()) == Acceptance(10, 40, 20, ())
    with running(Behaviour(kind=kind)) as (url, _):
        assert load(url, replace(SGLANG, kind=kind)).outcomes[0].acceptance is None


def test_how_tokens_are_drawn_is_asked_for_in_both_dialects() -> None:
    ask = Ask(temperature=0.7, top_p=0.9, ignore_eos=True, seed=40, model="name")
    bodies = {}
    for kind in ("vllm", "sglang"):
        with running(Behaviour(kind=kind)) as (url, stub):
            load(url, replace(ask, kind=kind), count=2, concurrency=1)
            bodies[kind] = stub.bodies
    first, second = bodies["vllm"]
    wanted = {"temperature": 0.7, "top_p": 0.9, "ignore_eos": True, "repetition_penalty": 1.0}
    assert {key: first[key] for key in wanted} == wanted
    assert (first["model"], first["seed"], second["seed"]) == ("name", 40, 41)
    sampling = bodies["sglang"][0]["sampling_params"]
    assert sampling == wanted | {"max_new_tokens": 64}
    assert bodies["sglang"][0]["input_ids"] == [0, 1, 2]


def test_arrivals_are_random_keep_the_rate_and_come_again_with_the_seed() -> None:
    times = arrivals(400, 20.0, seed=3)
    assert times == sorted(times) == arrivals(400, 20.0, seed=3)
    assert times != arrivals(400, 20.0, seed=4)
    assert times[0] >= 0 and 19.5 < times[-1] <= 20.0
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert sum(gap < 0.05 * 0.693 for gap in gaps) == pytest.approx(200, abs=40), "half are below the median of exp(20)"


def test_b40_an_open_loop_sends_whether_answers_come_or_not() -> None:
    prompts = [Prompt(f"p{index}", "chat", (index, 1, 2)) for index in range(30)]
    with running(Behaviour(tokens=4, mishap={"any": "late"})) as (url, stub):

        async def story() -> Window:
            asyncio.get_running_loop().call_later(1.0, stub.go.set)
            return await open_loop(url, prompts, rate=100, max_new_tokens=8, timeout_s=20, ask=Ask(seed=1))

        started = time.monotonic()
        window = asyncio.run(story())
    assert time.monotonic() - started < 15
    assert stub.most_in_flight == 30, "all had been sent before the first was answered"
    assert [outcome.id for outcome in window.outcomes] == [prompt.id for prompt in prompts]
    assert [outcome.tokens for outcome in window.outcomes] == [4] * 30
    assert window.seconds >= 1.0
