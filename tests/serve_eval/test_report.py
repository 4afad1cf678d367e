"""The report says what the figures say, with every figure there or not, and opens without a network."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from serve_eval.report import render_table, verdict, write_report


def spread(value: float | None) -> dict[str, float | None]:
    return {"p50": value, "p95": value and 2 * value, "p99": value and 3 * value}


def summary(speedup: dict[int, dict[str, float | None]], end: float | None, al: float | None = 2.0) -> dict[str, Any]:
    """A summary whose speedups per concurrency and route ("all" among them) are given."""
    routes = ["chat", "json"]
    cells = [
        {
            "method": method,
            "concurrency": c,
            "route": route,
            "output_tokens_per_s": 10.0 * c if method == "none" else 10.0 * c * (ratios[route] or 0) or None,
            "ttft_ms": spread(50.0),
            "itl_ms": spread(20.0),
            "tpot_ms": spread(10.0 if al else None),
            "al": al if method == "eagle3" else None,
            "per_position": [0.6, 0.4] if al and method == "eagle3" else None,
            "requests": 2,
            "failed": 0,
        }
        for method in ("none", "eagle3")
        for c, ratios in speedup.items()
        for route in ("all", *routes)
    ]
    return {
        "target": "targets/Tiny <b>Target</b>",
        "head": "runs/x/export",
        "machine": "a machine, 2 cores",
        "k": 2,
        "reference": {
            "al": al,
            "per_position": [0.5, 0.3] if al else None,
            "routes": {r: {"al": al, "per_position": [0.5, 0.3] if al else None, "tokens": 1000} for r in routes},
        },
        "served": {
            "engine": "vllm",
            "version": "0.32.0",
            "k": 2,
            "dtype": "float32",
            "cells": cells,
            "speedup": {str(c): ratios["all"] for c, ratios in speedup.items()},
            "speedup_by_route": {r: {str(c): ratios[r] for c, ratios in speedup.items()} for r in routes},
            "crossover_concurrency": end,
            "commands": {"none": "python -m vllm", "eagle3": "python -m vllm --speculative-config '{}'"},
            "warnings": [],
        },
        "lossless": {"reference": {"prompts": 96, "identical": 96}, "vllm_fp32": {"prompts": 12, "identical": 11}},
    }


GAIN: dict[int, dict[str, float | None]] = {
    1: {"all": 1.3, "chat": 0.95, "json": 1.6},
    4: {"all": 0.8, "chat": 0.7, "json": 0.9},
}


def test_the_verdict_names_routes_with_and_without_a_gain_and_where_it_ends() -> None:
    said = " ".join(verdict(summary(GAIN, 2.3)))
    assert "At concurrency 1, vLLM makes 1.30 times" in said
    assert "gains on json (1.60x), not on chat (0.95x)" in said
    assert "ends at a concurrency of about 2.3" in said


def test_the_verdict_is_allowed_to_be_bad_news() -> None:
    losses: dict[int, dict[str, float | None]] = {1: {"all": 0.9, "chat": 0.8, "json": 0.95}}
    said = " ".join(verdict(summary(losses, 1)))
    assert "there is no gain over all routes together" in said
    assert "No route gains there." in said
    assert "gain ends" not in said


def test_a_gain_on_one_route_is_told_although_the_pool_loses() -> None:
    mixed: dict[int, dict[str, float | None]] = {1: {"all": 0.97, "chat": 0.8, "json": 1.2}}
    said = " ".join(verdict(summary(mixed, 1)))
    assert "no gain over all routes" in said
    assert "gains on json (1.20x), not on chat (0.80x)" in said


def test_a_gain_that_lasts_is_bounded_by_what_was_measured() -> None:
    lasting: dict[int, dict[str, float | None]] = {1: {"all": 1.5, "chat": 1.4, "json": 1.6}}
    said = " ".join(verdict(summary(lasting, None)))
    assert "does not end in the measured range (up to concurrency 1)" in said
    assert "Every route gains, most of all json" in said


def terminal(value: dict[str, Any]) -> str:
    output = io.StringIO()
    render_table(value, Console(file=output, width=80))
    return output.getvalue()


def test_the_terminal_table_fits_eighty_columns_uncut() -> None:
    text = terminal(summary(GAIN, 2.3))
    assert "…" not in text
    for word in ("tokens/s", "1.30x", "50/100", "chat", "11 of 12 prompts"):
        assert word in text


UNKNOWN: dict[int, dict[str, float | None]] = {1: {"all": None, "chat": None, "json": None}}


@pytest.mark.parametrize(
    "value",
    [
        summary(GAIN, 2.3),
        summary(UNKNOWN, None, al=None),
        summary(GAIN, 2.3) | {"served": None, "lossless": {"reference": {"prompts": 3, "identical": 3}}},
        {key: each for key, each in summary(GAIN, 2.3).items() if key not in ("served", "reference", "lossless")},
    ],
    ids=["whole", "nothing known", "no server", "header only"],
)
@pytest.mark.filterwarnings("error")
def test_the_report_is_one_file_whatever_is_missing(tmp_path: Path, value: dict[str, Any]) -> None:
    write_report(value, tmp_path / "report.html")
    terminal(value)
    html = (tmp_path / "report.html").read_text()
    assert re.findall(r'(?:src|href)="(?!data:)', html) == []
    assert not re.search(r"https?://|@import|url\(", re.sub(r'src="data:[^"]*"', "", html))
    assert "Tiny &lt;b&gt;Target" in html
    assert "None" not in re.sub(r'src="[^"]*"', "", html)
    pictures = 3 * bool(value.get("served")) + 2 * bool(value.get("reference"))
    assert html.count("data:image/svg+xml;base64,") == pictures


def test_warnings_and_failures_are_in_the_report(tmp_path: Path) -> None:
    value = summary(GAIN, 2.3)
    value["served"]["warnings"] = ["eagle3 at concurrency 1, chat: AL is 1.00"]
    write_report(value, tmp_path / "report.html")
    assert "eagle3 at concurrency 1, chat: AL is 1.00" in (tmp_path / "report.html").read_text()
    assert "warning: eagle3 at concurrency 1" in terminal(value)


def test_the_same_summary_gives_the_same_report(tmp_path: Path) -> None:
    value = summary(GAIN, 2.3) | {"date": "2026-01-01"}
    for name in ("a", "b"):
        write_report(value, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_report_says_how_drafts_were_made_and_what_each_routes_entropy_is(tmp_path: Path) -> None:
    value = summary(GAIN, 2.3)
    value["reference"] |= {"how": "prompt lookup, temperature 0.7, k = 2", "entropy": 1.25}
    value["reference"]["routes"]["json"]["entropy"] = 0.75
    value["lossless"]["reference"] = None  # samples are not compared token by token
    write_report(value, tmp_path / "report.html")
    for text in (" ".join(terminal(value).split()), (tmp_path / "report.html").read_text()):
        for words in ("prompt lookup, temperature 0.7, k = 2", "1.25", "0.75", "Prompt lookup yields 2.00"):
            assert words in text
        assert "reference decoder, fp32" not in text
