"""The sweep's client and vLLM's own benchmark are compared on the same prompts, in turns, and a difference is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.config import EngineConfig
from models.errors import Refused
from serve_eval.agreement import OURS, THEIRS, TURNS, Reading, compare, judge, texts_of, window_of
from serve_eval.config import EvalConfig, MethodConfig
from serve_eval.prompts import Prompt
from tests.serve_eval.stub import Behaviour

Make = Callable[..., EngineConfig]
Starts = Callable[[], list[dict[str, Any]]]


class Words:
    """A tokenizer whose tokens are words `w<id>`; 99 has no text."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(f"w{token}" for token in ids if token != 99)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word[1:]) for word in text.split()]}


@pytest.fixture
def both(head_dir: Path, numbered_prompts: list[Prompt], tmp_path: Path) -> Callable[..., dict[str, list[Reading]]]:
    def run(engine: EngineConfig, **settings: Any) -> dict[str, list[Reading]]:
        chosen = EvalConfig(requests_per_route=1, max_new_tokens=8, **settings)
        window = window_of(numbered_prompts, chosen)
        return compare(engine, chosen, "some/target", head_dir, window, Words(), tmp_path / "eval")

    return run


def test_both_clients_get_the_same_prompts_in_turns_from_one_server(
    both: Callable[..., dict[str, list[Reading]]], fake_engine: Make, starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    told = both(fake_engine(Behaviour(tokens=8)), ignore_eos=True)
    server, *benches = starts()
    assert "--speculative-config" in server["arguments"]
    assert len(benches) == TURNS == len(told[OURS]) == len(told[THEIRS])
    for bench in benches:
        texts = [f"w{first} w7 w7" for pair in zip(range(4), range(100, 104), strict=True) for first in pair]
        assert bench["rows"] == [{"prompt": text, "output_tokens": 8} for text in texts]
        options = dict(zip(bench["arguments"], bench["arguments"][1:], strict=False))
        assert (options["--max-concurrency"], options["--num-prompts"]) == ("4", "8")
        assert options["--temperature"] == "0" and '"add_special_tokens": false' in options["--extra-body"]
        assert {"--ignore-eos", "--skip-chat-template", "--disable-shuffle"} <= set(bench["arguments"])
    order = [OURS if OURS in line else THEIRS for line in capsys.readouterr().out.splitlines()]
    assert order == [OURS, THEIRS, THEIRS, OURS] * (TURNS // 2)
    assert [len(reading.ttft_ms) for reading in told[OURS]] == [8] * TURNS
    assert {reading.tokens_per_s for reading in told[THEIRS]} == {100.0}
    assert told[THEIRS][0].ttft == 20


@pytest.mark.parametrize("methods", [[], [MethodConfig()], [MethodConfig("eagle3", k=2), MethodConfig("none")]])
def test_the_first_method_is_served(
    both: Callable[..., dict[str, list[Reading]]], fake_engine: Make, starts: Starts, methods: list[MethodConfig]
) -> None:
    both(fake_engine(Behaviour(tokens=8)), methods=methods)
    words = starts()[0]["arguments"]
    assert '"method":"eagle3"' in words[words.index("--speculative-config") + 1]


def test_the_server_alone_can_be_asked_for(
    both: Callable[..., dict[str, list[Reading]]], fake_engine: Make, starts: Starts
) -> None:
    both(fake_engine(), methods=[MethodConfig("none")])
    assert "--speculative-config" not in starts()[0]["arguments"]


@pytest.mark.parametrize(
    ("bench", "word"),
    [
        ('{"fails": "no such flag"}', "exit code 1: ValueError: no such flag"),
        ('{"completed": 6}', "2 of 8 requests failed"),
        ('{"input_lens": [4, 4, 4, 4, 4, 4, 4, 4]}', "saw other prompts"),
    ],
)
def test_a_benchmark_that_measured_something_else_is_refused(
    both: Callable[..., dict[str, list[Reading]]],
    fake_engine: Make,
    monkeypatch: pytest.MonkeyPatch,
    bench: str,
    word: str,
) -> None:
    monkeypatch.setenv("STUB_BENCH", bench)
    with pytest.raises(Refused, match=word):
        both(fake_engine())


def test_a_request_of_ours_that_fails_is_refused(
    both: Callable[..., dict[str, list[Reading]]], fake_engine: Make
) -> None:
    with pytest.raises(Refused, match="code-1 failed: HTTP 500"):
        both(fake_engine(Behaviour(mishap={"101": "http500"})))


def test_prompts_without_a_text_of_their_own_are_refused() -> None:
    assert texts_of([Prompt("a", "chat", (1, 2))], Words()) == ["w1 w2"]
    with pytest.raises(Refused, match="the ids of b have no text"):
        texts_of([Prompt("b", "chat", (1, 99))], Words())


@pytest.mark.parametrize(
    ("rates", "ttft", "alike"),
    [
        ([100, 100, 100], 20.0, True),
        ([109, 300, 91], 18.1, True),
        ([111, 300, 91], 20.0, False),
        ([89, 1, 300], 20.0, False),
        ([100, 100, 100], 22.1, False),
        ([100, 100, 100], 17.9, False),
    ],
)
def test_both_figures_must_be_within_a_tenth_in_the_median(
    rates: list[float], ttft: float, alike: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = [Reading(rate, (1.0, ttft, 900.0), ("a", "b", "c")) for rate in rates]
    other = [Reading(100.0, (1.0, 20.0, 900.0), ("a", "b", "x")) for _ in rates]
    assert judge({OURS: mine, THEIRS: other}) is alike
    said = capsys.readouterr().out
    assert ("NOT within 10 %" in said) is not alike
    assert "answers: 6 of 9 are the same text" in said
