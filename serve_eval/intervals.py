"""How sure a ratio of two measurements is: Student's t over the logarithms of paired ratios.

A gain is a ratio, so its middle is the geometric mean (Fleming and Wallace, CACM 1986) and its range comes from the
logarithms, whose mean follows Student's t when repeats are few (Georges, Buytaert and Eeckhout, OOPSLA 2007).

What is paired: with three repeats of a window or more, the output tokens per second of the windows of each repeat, so
that everything that differs between windows (the drift of the machine too, where methods take turns) is in the range.
With fewer, the prompts, each with its two speeds (output tokens per second of that request, queueing included; of
repeats the mean of the logarithms). Their spread then gives the width of the range around the ratio of the windows'
throughputs, which is what is claimed, and which a long answer at a window's end can move away from the mean of the
prompts. Such a range holds for other prompts of this traffic on a machine that stands still, and says nothing of drift.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

CONFIDENCE = 0.95
ENOUGH_REPEATS = 3

Windows = Sequence[Mapping[str, Any]]
"""Records of cells.jsonl."""


def t_cdf(t: float, degrees: int) -> float:
    """P(T <= t) of Student's t with whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(theta)
    term, total = (cosine, cosine) if degrees % 2 else (1.0, 1.0)
    for place in range(3 if degrees % 2 else 2, degrees - 1, 2):
        term *= cosine**2 * (place - 1) / place
        total += term
    if degrees % 2 == 0:
        within = math.sin(theta) * total
    else:
        within = 2 / math.pi * (theta + (math.sin(theta) * total if degrees > 1 else 0.0))
    return 0.5 + within / 2


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """How many standard errors hold `confidence` of Student's t, both sides together."""
    low, high = 0.0, 1.0
    while t_cdf(high, degrees) < (1 + confidence) / 2:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < (1 + confidence) / 2 else (low, middle)
    return high


def range_of(logs: Sequence[float]) -> list[float] | None:
    """The range, at CONFIDENCE, of the geometric mean behind some logarithms of ratios; None of fewer than two."""
    if len(logs) < 2:
        return None
    mean = sum(logs) / len(logs)
    variance = sum((each - mean) ** 2 for each in logs) / (len(logs) - 1)
    half = t_quantile(len(logs) - 1) * math.sqrt(variance / len(logs))
    return [round(math.exp(mean - half), 4), round(math.exp(mean + half), 4)]


def speeds(windows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """(route, prompt) -> logarithm of its output tokens per second, sending to last token; the mean over repeats."""
    found: dict[tuple[str, str], list[float]] = {}
    for window in windows:
        for request in window["outcomes"]:
            if request["failed"] is None and request["tokens"] and request["ttft_ms"] is not None:
                seconds = (request["ttft_ms"] + sum(request["itl_ms"])) / 1e3
                found.setdefault((window["route"], request["id"]), []).append(math.log(request["tokens"] / seconds))
    return {place: sum(logs) / len(logs) for place, logs in found.items()}


def throughput(windows: Windows) -> float | None:
    """Output tokens per second of windows one after the other; None where a count is unknown or nothing came."""
    counts = [request["tokens"] for window in windows for request in window["outcomes"] if request["failed"] is None]
    seconds = sum(window["seconds"] for window in windows)
    return sum(counts) / seconds if counts and None not in counts and seconds > 0 and sum(counts) else None


def by_repeat(windows: Windows) -> dict[int, float]:
    """Repeat -> logarithm of its throughput."""
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for window in windows:
        groups.setdefault(window.get("repeat", 0), []).append(window)
    rates = {repeat: throughput(group) for repeat, group in groups.items()}
    return {repeat: math.log(rate) for repeat, rate in rates.items() if rate}


def paired_logs(base: Windows, ours: Windows) -> tuple[list[float], str]:
    """Logarithms of the paired ratios ours / base, and what the pairs are: "repeats" or "prompts"."""
    before, after = by_repeat(base), by_repeat(ours)
    both = sorted(before.keys() & after.keys())
    if len(both) >= ENOUGH_REPEATS:
        return [after[repeat] - before[repeat] for repeat in both], "repeats"
    slow, fast = speeds(base), speeds(ours)
    return [fast[place] - slow[place] for place in slow if place in fast], "prompts"


def paired_interval(base: Windows, ours: Windows) -> tuple[list[float] | None, int]:
    """Range of the gain from windows without and with speculation, and the pairs behind it.

    None for a range when there are fewer than two pairs that both sides answered.
    """
    logs, pairs = paired_logs(base, ours)
    before, after = throughput(base), throughput(ours)
    if pairs == "prompts" and logs and before and after:
        shift = math.log(after / before) - sum(logs) / len(logs)
        logs = [each + shift for each in logs]
    return range_of(logs), len(logs)


def interval_from(repeats: int, side_by_side: bool) -> str:
    """Where the ranges of a sweep come from, in words."""
    turns = "methods taking turns" if side_by_side else "methods one after the other: drift is not excluded"
    if repeats >= ENOUGH_REPEATS:
        return f"Student's t over log ratios of tokens/s in {repeats} repeats, {turns}"
    return f"Student's t over paired log speeds of the same prompts with and without speculation, {turns}"
