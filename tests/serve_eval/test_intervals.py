"""The range of a gain is Student's t over log ratios: of repeats where there are three, else of prompts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from serve_eval.intervals import interval_from, paired_interval, paired_logs, range_of, t_cdf, t_quantile, throughput


def window(seconds: float, *speeds: float, repeat: int = 0) -> dict[str, Any]:
    """100-token requests at these tokens per second, in a window of so many seconds."""
    outcomes = [
        {"id": f"p{index}", "tokens": 100, "ttft_ms": 1e5 / speed - 60, "itl_ms": [20.0, 40.0], "failed": None}
        for index, speed in enumerate(speeds)
    ]
    return {"route": "chat", "repeat": repeat, "seconds": seconds, "outcomes": outcomes}


@pytest.mark.parametrize(("degrees", "value"), [(1, 12.706), (2, 4.303), (30, 2.042), (40, 2.021), (120, 1.980)])
def test_the_quantiles_are_those_of_the_tables(degrees: int, value: float) -> None:
    assert t_quantile(degrees) == pytest.approx(value, abs=6e-4)


@pytest.mark.parametrize(("degrees", "value"), [(1, 63.657), (2, 9.925), (9, 3.250), (10, 3.169)])
def test_the_quantiles_of_another_confidence_are_too(degrees: int, value: float) -> None:
    assert t_quantile(degrees, 0.99) == pytest.approx(value, abs=6e-4)
    assert t_cdf(0, degrees) == 0.5


def test_three_repeats_are_paired_by_repeat_and_their_prompts_do_not_count() -> None:
    base = [window(10.0, 50.0, 70.0, repeat=repeat) for repeat in range(3)]
    ours = [window(10.0 / ratio, 5.0, 900.0, repeat=repeat) for repeat, ratio in enumerate((1.2, 1.5, 1.8))]
    logs = [math.log(ratio) for ratio in (1.2, 1.5, 1.8)]
    mean = sum(logs) / 3
    half = 4.30265 * math.sqrt(sum((each - mean) ** 2 for each in logs) / 2 / 3)
    interval, pairs = paired_interval(base, ours)
    assert interval == pytest.approx([math.exp(mean - half), math.exp(mean + half)], abs=2e-4)
    assert pairs == 3


def test_a_drift_that_both_methods_share_is_not_in_the_range() -> None:
    base = [window(10.0 * slow, 50.0, repeat=repeat) for repeat, slow in enumerate((1.0, 1.5, 3.0))]
    ours = [window(5.0 * slow, 50.0, repeat=repeat) for repeat, slow in enumerate((1.0, 1.5, 3.0))]
    assert paired_interval(base, ours) == ([2.0, 2.0], 3)


def test_two_repeats_are_paired_by_prompt_in_the_mean_of_their_logarithms() -> None:
    base = [window(10.0, 50.0, 50.0, repeat=0), window(10.0, 200.0, 50.0, repeat=1)]
    ours = [window(10.0, 150.0, 100.0, repeat=repeat) for repeat in range(2)]
    logs, what = paired_logs(base, ours)
    assert what == "prompts"
    assert logs == pytest.approx([math.log(1.5), math.log(2.0)])


def test_the_range_of_prompts_lies_around_the_ratio_of_the_throughputs() -> None:
    base, ours = [window(10.0, 50.0, 20.0, 90.0)], [window(8.0, 50 * 1.2, 20 * 1.5, 90 * 1.8)]
    logs = [math.log(ratio) for ratio in (1.2, 1.5, 1.8)]
    half = 4.30265 * math.sqrt(sum((each - sum(logs) / 3) ** 2 for each in logs) / 2 / 3)
    interval, pairs = paired_interval(base, ours)
    assert interval == pytest.approx([1.25 * math.exp(-half), 1.25 * math.exp(half)], abs=2e-4)
    assert pairs == 3


def test_one_pair_is_no_range_and_neither_is_an_unknown_count() -> None:
    assert range_of([0.3]) is None
    unknown = window(10.0, 50.0)
    unknown["outcomes"][0]["tokens"] = None
    assert throughput([unknown]) is None
    assert paired_interval([unknown] * 3, [window(5.0, 50.0)] * 3) == (None, 0)


def test_the_words_say_whether_drift_is_excluded() -> None:
    assert "drift is not excluded" in interval_from(3, side_by_side=False)
    assert "taking turns" in interval_from(3, side_by_side=True)
    assert "3 repeats" in interval_from(3, side_by_side=True)
    assert "same prompts" in interval_from(2, side_by_side=True)
