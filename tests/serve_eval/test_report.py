"""The report says what the figures say, with every figure there or not, and opens without a network."""

from __future__ import annotations

import base64
import io
import json
import re
from html import escape
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


def test_a_gain_whose_range_includes_1_is_not_called_sure() -> None:
    value = summary({1: {"all": 1.5, "chat": 1.4, "json": 1.6}}, None)
    value["served"]["interval_by_route"] = {"chat": {"1": [0.9, 2.2]}, "json": {"1": [1.2, 2.1]}}
    said = " ".join(verdict(value))
    assert "For chat that is not sure: the range includes 1" in said
    value["served"]["interval_by_route"]["chat"] = {"1": [1.1, 1.8]}
    assert "not sure" not in " ".join(verdict(value))


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


def test_the_terminal_table_fits_eighty_columns_however_far_the_head_drafts() -> None:
    value = summary(GAIN, 2.3)
    value["reference"] |= {"per_position": [0.5] * 12}
    value["reference"]["routes"]["chat"] |= {"per_position": [0.5] * 12, "tokens": 1_234_567}
    text = terminal(value)
    assert "…" not in text
    assert "1,234,567" in text and "pos 5" in text


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


def test_a_tree_is_not_told_as_a_chain(tmp_path: Path) -> None:
    value = summary(GAIN, 2.3)
    value["reference"]["how"] = "greedy, a tree of 21 drafts by confidence"
    write_report(value, tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    for text in (" ".join(verdict(value)), html):
        assert "tokens per target forward (a tree of 21 drafts by confidence)" in text
    assert "reference decoder, a tree of 21 drafts by confidence</span>" in html
    assert "reference decoder (a tree of 21 drafts by confidence)" in "".join(pictures(html))


def pictures(html: str) -> list[str]:
    """The SVG of each; its texts stand in comments."""
    return [base64.b64decode(data).decode() for data in re.findall(r"data:image/svg\+xml;base64,([^\"]*)", html)]


def test_a_route_whose_name_begins_with_an_underscore_is_in_every_legend(tmp_path: Path) -> None:
    value = json.loads(json.dumps(summary(GAIN, 2.3)).replace('"chat"', '"_chat"'))
    for each in (value["reference"], *value["reference"]["routes"].values()):
        each["al_by_k"] = [1.4, 1.6]
    write_report(value, tmp_path / "report.html")
    drawn = pictures((tmp_path / "report.html").read_text())
    assert [sum("_chat -->" in each for each in drawn), len(drawn)] == [4, 6]  # three legends and an axis


def wide(**more: Any) -> dict[str, Any]:
    """A summary of two methods with everything that a sweep can measure."""
    value = summary(GAIN, 2.3)
    served = value["served"]
    cells = []
    for cell in served["cells"]:
        told = {
            "e2e_ms": spread(900.0),
            "queue_ms": 1.5,
            "requests_per_s": 0.25,
            "output_lengths": {"min": 1, "p10": 11, "p50": 55, "p90": 99, "max": 120, "mean": 57.5},
            "al_by_request": {"min": 1.1, "p10": 1.3, "p50": 1.9, "p90": 2.6, "max": 2.9, "mean": 2.0},
            "cost_per_million": 12.5,
        }
        cells.append(cell | told | ({} if cell["method"] == "eagle3" else {"al_by_request": None}))
        if cell["method"] == "eagle3":
            cells.append(cells[-1] | {"method": "ngram"})
    ratios = {"1": 1.75, "4": 1.25}
    lookup = {
        **{"method": "ngram", "k": 5, "speedup": ratios, "interval": {"1": [1.6, 1.9], "4": None}},
        **{"speedup_by_route": {"chat": {"1": 1.8, "4": 1.1}, "json": {"1": 0.9, "4": 0.8}}},
        "interval_by_route": {"chat": {"1": [1.7, 1.9], "4": None}, "json": {"1": None, "4": None}},
    }
    head = {
        **{"method": "eagle3", "k": 2, "speedup": served["speedup"], "interval": {"1": [1.21, 1.38], "4": None}},
        **{"speedup_by_route": served["speedup_by_route"]},
        "interval_by_route": {"chat": {"1": None, "4": None}, "json": {"1": None, "4": None}},
    }
    rows = [
        {"method": kind, "k": k, "concurrency": c, "al": 1 + k / 4, "output_tokens_per_s": 20.0 * k, "measured": k == 2}
        | {"speedup": 1 + k / 10 if c == 1 else 1 - k / 10}
        for kind in ("eagle3", "ngram")
        for k in (1, 2, 3)
        for c in (1, 4)
    ]
    missed = {"left_out": "concurrency 4", "method": "ngram", "concurrency": 4, "measured": 50.0, "predicted": 53.0}
    served |= {
        **{"cells": cells, "head": "eagle3", "methods": {"eagle3": head, "ngram": lookup}, "confidence": 0.95},
        **{"interval": head["interval"], "interval_by_route": head["interval_by_route"], "side_by_side": False},
        **{
            "interval_from": "Student's t, as it happens",
            "overlap": {"chat": 0.71, "json": None},
            "price_per_hour": 2.0,
        },
        "open_loop": [cell | {"rate": 2.5, "concurrency": None} for cell in cells if cell["concurrency"] == 1],
        "model": {
            **{
                "step_ms": {"v0": 20.5, "v1": 0.25, "v2": 0.0, "d0 eagle3": 1.5, "d1 eagle3": 0.125},
                "held_out": [missed | {"error": 0.06}],
            },
            **{"median_error": 0.06, "largest_error": 0.061, "predictions": rows},
        },
    }
    served |= more
    value["reference"] |= {"al_by_k": [1.5, 1.8]}
    value["best_k"] = 2
    return value


@pytest.mark.filterwarnings("error")
def test_the_report_shows_every_method_with_its_range_and_what_else_was_measured(tmp_path: Path) -> None:
    write_report(wide(), tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    for words in (
        "prompt lookup, k = 5",
        '1.75x <span class="quiet">1.60..1.90</span>',
        '1.30x <span class="quiet">1.21..1.38</span>',
        "as it happens",
        '<td class="gain">0.71</td>',
        "11 / 55 / 99",
        "<h2>Open loop</h2>",
        "<td>2.5</td>",
        "<h2>Modelled</h2>",
        "A step costs 20.50 ms, 0.250 ms for each token in the batch, d0 eagle3 = 1.500 ms and d1 eagle3 = 0.125 ms",
        "off by 6.0 % (median), 6.1 % at most",
        "<td>50.0</td><td>53.0</td><td>6.0 %</td>",
    ):
        assert words in html, words
    assert html.count("data:image/svg+xml;base64,") == 3 + 4 + 2 + 1
    assert '<td class="gain">1.30x <span class="quiet">1.21..1.38' in html
    assert "None" not in re.sub(r'src="[^"]*"', "", html)
    assert not re.search(r"https?://|@import|url\(", re.sub(r'src="data:[^"]*"', "", html))


def test_a_speedup_is_coloured_only_where_its_range_leaves_out_1(tmp_path: Path) -> None:
    value = wide()
    value["served"]["speedup_by_route"]["chat"] = {"1": 1.6, "4": 0.7}
    for within, colour in (([1.1, 2.0], "gain"), ([0.5, 5.0], ""), ([0.5, 0.9], "loss")):
        value["served"]["interval_by_route"] = {"chat": {"1": within, "4": None}}
        write_report(value, tmp_path / "report.html")
        html = (tmp_path / "report.html").read_text()
        assert f'<td class="{colour}">1.60x <span class="quiet">{within[0]:.2f}..{within[1]:.2f}' in html


def test_the_terminal_shows_every_method_and_the_open_loop() -> None:
    text = terminal(wide())
    assert "…" not in text
    for words in ("ngram", "1.75x", "Open loop", "2.5", "900/1,800"):
        assert words in text, words


def test_the_verdict_says_how_sure_it_is_and_where_another_method_is_the_fastest() -> None:
    said = " ".join(verdict(wide()))
    assert "1.30 times (1.21 to 1.38 at 95 % confidence) the output tokens per second" in said
    assert "another method is the fastest on chat (prompt lookup, k = 5, 1.80x)" in said
    assert "a drift of the machine is not excluded" in said
    assert "drift" not in " ".join(verdict(wide(side_by_side=True)))


def test_prompt_lookup_is_advised_where_answers_repeat_their_prompts_and_it_was_not_measured() -> None:
    value = wide()
    assert "measure prompt lookup" not in " ".join(verdict(value))
    del value["served"]["methods"]["ngram"]
    assert "Answers repeat their prompts on chat: measure prompt lookup there" in " ".join(verdict(value))


def test_a_report_of_another_method_than_a_head_does_not_speak_of_a_head() -> None:
    value = wide()
    served = value["served"]
    served["cells"] = [cell for cell in served["cells"] if cell["method"] != "eagle3"]
    served["open_loop"] = []
    served |= {"head": "ngram", "methods": {"ngram": served["methods"]["ngram"]}}
    served |= {"speedup": {"1": 1.75, "4": 1.25}, "crossover_concurrency": None}
    said = " ".join(verdict(value | {"reference": None}))
    assert "makes without speculation" in said and "head" not in said


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a, b", "[/x]", "[red]y", ":smile:", "$\\frac$ x"])
def test_a_routes_name_is_shown_as_it_is(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = json.loads(json.dumps(summary(GAIN, 2.3)).replace('"chat"', json.dumps(name)))
    render_table(value)
    assert name in capsys.readouterr().out
    write_report(value, tmp_path / "report.html")
    assert escape(name) in (tmp_path / "report.html").read_text()
    assert "<script>alert" not in (tmp_path / "report.html").read_text()
