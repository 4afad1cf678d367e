"""Acceptance comes from differences of the server's counters, and is n/a when they say nothing."""

from __future__ import annotations

import pytest

from models.errors import Refused
from serve_eval.counters import Acceptance, CounterReset, counter_lines, difference, judge, parse_counters
from tests.serve_eval.stub import Behaviour, Stub, metrics, sglang_metrics


def exposition(drafts: int, accepted: int, k: int = 4, engines: int = 1, created: float = 5.0) -> str:
    lines = []
    for engine in range(engines):
        label = f'engine="{engine}",model_name="target"'
        for name, value in (("drafts", drafts), ("draft_tokens", k * drafts), ("accepted_tokens", accepted)):
            lines.append(f"# TYPE vllm:spec_decode_num_{name}_total counter")
            lines.append(f"vllm:spec_decode_num_{name}_total{{{label}}} {value}.0")
        lines.append("# TYPE vllm:spec_decode_num_drafts_created gauge")
        lines.append(f"vllm:spec_decode_num_drafts_created{{{label}}} {created}")
        for position in range(k):
            value = accepted // (position + 2)
            lines.append(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{position}"}} {value}.0'
            )
        lines.append(f"vllm:num_requests_running{{{label}}} 1.0")
    return "\n".join(lines) + "\n"


def test_b38_al_is_one_plus_accepted_per_draft_over_the_window() -> None:
    window = difference(parse_counters(exposition(100, 250)), parse_counters(exposition(200, 420)))
    assert window is not None
    assert window.al == pytest.approx(2.70)
    assert (window.accepted, window.draft_tokens) == (170, 400)
    assert window.positions == pytest.approx([(210 - 125) / 100, (140 - 83) / 100, (105 - 62) / 100, (84 - 50) / 100])


def test_b38_a_server_without_the_counters_has_no_al() -> None:
    plain = parse_counters("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0.0\n")
    assert plain.drafts is None
    assert difference(plain, plain) is None


def test_b38_counters_that_were_renamed_in_part_give_no_al_and_never_one() -> None:
    pages = [
        exposition(drafts, accepted).replace("num_accepted_tokens", "num_kept") for drafts, accepted in ((1, 1), (9, 9))
    ]
    assert difference(*map(parse_counters, pages)) is None


def test_b38_no_drafts_in_the_window_is_not_an_al_of_one() -> None:
    same = parse_counters(exposition(100, 250))
    window = difference(same, same)
    assert window is not None
    assert window.al is None
    assert window.positions is None


def test_b38_a_reset_between_the_readings_is_seen() -> None:
    with pytest.raises(CounterReset, match="went backwards.*200 -> 10"):
        difference(parse_counters(exposition(200, 420)), parse_counters(exposition(10, 20)))


def test_b38_a_reset_that_has_grown_past_the_first_reading_is_seen_by_its_birth() -> None:
    with pytest.raises(CounterReset, match="created anew"):
        difference(parse_counters(exposition(100, 250)), parse_counters(exposition(200, 420, created=9.0)))


def test_engines_of_one_server_are_summed() -> None:
    counters = parse_counters(exposition(100, 250, engines=2))
    assert (counters.drafts, counters.accepted, counters.busy) == (200, 500, 2)
    assert counters.per_position == (250, 166, 124, 100)


def test_windows_add_up_even_with_different_k() -> None:
    both = Acceptance(10, 20, 5, (4, 1)) + Acceptance(10, 30, 15, (8, 5, 2))
    assert both == Acceptance(20, 50, 20, (12, 6, 2))
    assert both.al == 2.0


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_lines_of_the_counters_say_all_that_the_page_says_of_them(kind: str) -> None:
    stub = Stub(("127.0.0.1", 0), Behaviour(waiting=3))
    stub.served, stub.queue_s = 4, 2.0
    page = sglang_metrics(stub) if kind == "sglang" else metrics(stub)
    stub.server_close()
    others = "# TYPE vllm:e2e_request_latency_seconds histogram\nvllm:e2e_request_latency_seconds_sum 1.0\n"
    others += "# TYPE sglang:gen_throughput gauge\nsglang:gen_throughput 1.0\n"
    assert counter_lines(others + page + others) == page
    assert parse_counters(page).queued == 4


def test_what_is_no_metrics_page_is_refused() -> None:
    with pytest.raises(Refused, match="/metrics is not in Prometheus"):
        parse_counters("<html>not metrics")
    with pytest.raises(Refused, match="/metrics is not in Prometheus"):
        parse_counters("vllm:num_requests_running +Inf\n")


@pytest.mark.parametrize(
    ("acceptance", "word"),
    [
        (Acceptance(100, 300, 0, (0, 0, 0)), "AL is 1.00"),
        (Acceptance(100, 300, 1, (1, 0, 0)), "AL is 1.01"),
        (Acceptance(0, 0, 0, ()), "drafted nothing"),
        (None, "no speculation counters"),
    ],
)
def test_b41_speculation_that_does_nothing_is_warned_about(acceptance: Acceptance | None, word: str) -> None:
    warning = judge("eagle3", acceptance)
    assert warning is not None
    assert word in warning


def test_b41_real_acceptance_and_the_baseline_are_not_warned_about() -> None:
    assert judge("eagle3", Acceptance(100, 300, 20, (20, 0, 0))) is None
    assert judge("none", None) is None
    assert judge("none", Acceptance(0, 0, 0, ())) is None


def test_b41_a_baseline_that_drafts_is_warned_about() -> None:
    assert "drafted in 100 steps" in (judge("none", Acceptance(100, 300, 20, (20, 0, 0))) or "")
