"""Two sweeps are compared route by route; a regression is one that chance and a drifting machine do not explain."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from models.errors import Refused
from serve_eval.compare import Ratio, change, confidence_of, main, paired, ratios, read_sweep, verdict_of, welch
from serve_eval.windows import Load

ROOT = Path(__file__).resolve().parents[2]
NOISE = (0.99, 1.0, 1.01, 1.0, 0.995, 1.005)


def sweep(
    folder: Path,
    gains: dict[str, float],
    *,
    repeats: int = 1,
    speed: float = 50.0,
    al: dict[str, float] | None = None,
    prompts: int = 6,
    machine: str = "m",
    noise: tuple[float, ...] = NOISE,
) -> Path:
    """An eval folder: per route the gain of eagle3 over a server alone at `speed` tokens per second."""
    folder.mkdir(parents=True)
    records: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    for method in ("none", "eagle3"):
        for route, gain in gains.items():
            for repeat in range(repeats):
                rate = speed * (gain if method == "eagle3" else 1.0)
                outcomes = []
                for index in range(prompts):
                    wobble = noise[(index + repeat + (method == "eagle3")) % len(noise)]
                    seconds = 100 / (rate * wobble)
                    accepted = round(1000 * ((al or {}).get(route, 2.0) * wobble - 1))
                    own = {"drafts": 1000, "draft_tokens": 3000, "accepted": accepted, "per_position": [accepted]}
                    outcomes.append(
                        {
                            "id": f"{route}-{index}",
                            "tokens": 100,
                            "failed": None,
                            "ttft_ms": 1e3 * seconds - 50,
                            "itl_ms": [50.0],
                            "acceptance": own if method == "eagle3" and al is not None else None,
                        }
                    )
                seconds = prompts * 100 / rate * noise[(repeat + (method == "eagle3")) % len(noise)]
                place = {"method": method, "concurrency": 1, "route": route, "repeat": repeat, "input_length": None}
                records.append(place | {"seconds": seconds, "outcomes": outcomes, "acceptance": None})
    for method in ("none", "eagle3"):
        for route in ("all", *gains):
            mine = [r for r in records if r["method"] == method and route in ("all", r["route"])]
            kept: list[Any] = [round(each["seconds"], 6) for each in mine]
            cells.append({"method": method, "concurrency": 1, "route": route, "window_seconds": kept, "seconds": 0})
    summary = {"machine": machine, "target": "t", "served": {"cells": cells, "open_loop": []}}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "cells.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


def told(a: Path, b: Path) -> tuple[int, str]:
    output = io.StringIO()
    return main([str(a), str(b)], Console(file=output, width=160)), output.getvalue()


@pytest.mark.parametrize("repeats", [1, 4])
def test_a_route_that_lost_its_gain_is_a_regression_and_the_others_are_not(tmp_path: Path, repeats: int) -> None:
    a = sweep(tmp_path / "a", {"chat": 1.5, "code": 2.0}, repeats=repeats)
    b = sweep(tmp_path / "b", {"chat": 1.2, "code": 2.0}, repeats=repeats)
    code, text = told(a, b)
    assert code == 1
    assert "regression: speedup of eagle3 at concurrency 1 on chat: 0.8" in text
    assert "on code:" not in text
    code, text = told(b, a)
    assert code == 0 and "better" in text and "no regression" in text


@pytest.mark.parametrize("repeats", [1, 4])
def test_the_same_sweep_again_is_no_regression(tmp_path: Path, repeats: int) -> None:
    a = sweep(tmp_path / "a", {"chat": 1.5, "code": 2.0}, repeats=repeats, al={})
    b = sweep(tmp_path / "b", {"chat": 1.5, "code": 2.0}, repeats=repeats, al={}, noise=NOISE[::-1])
    assert told(a, b)[0] == 0


def test_a_routes_name_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (sweep(tmp_path / side, {"[/x]": gain}) for side, gain in (("a", 1.5), ("b", 1.2)))
    assert main([str(a), str(b)]) == 1
    assert "concurrency 1 on [/x]: 0.8" in capsys.readouterr().out


def test_a_slower_machine_is_a_note_and_no_fault_of_the_head(tmp_path: Path) -> None:
    a = sweep(tmp_path / "a", {"chat": 1.5})
    b = sweep(tmp_path / "b", {"chat": 1.5}, speed=25.0, machine="another")
    code, text = told(a, b)
    assert code == 0
    assert "the server alone makes 0.50 times the tokens/s at concurrency 1" in text
    assert "another machine: m and another" in text


def test_a_fall_of_acceptance_is_a_regression_even_where_speed_hides_it(tmp_path: Path) -> None:
    a = sweep(tmp_path / "a", {"chat": 1.5}, al={"chat": 2.5})
    b = sweep(tmp_path / "b", {"chat": 1.5}, al={"chat": 2.2}, noise=NOISE)
    code, text = told(a, b)
    assert code == 1
    assert "regression: AL of eagle3 at concurrency 1 on chat: 0.88" in text
    assert "regression: speedup" not in text


def test_one_prompt_judges_nothing_and_says_so(tmp_path: Path) -> None:
    a = sweep(tmp_path / "a", {"chat": 1.5}, prompts=1)
    b = sweep(tmp_path / "b", {"chat": 0.5}, prompts=1)
    code, text = told(a, b)
    assert code == 0 and "too few prompts and repeats" in text and "n/a" in text


def test_older_windows_of_the_file_are_not_the_sweeps(tmp_path: Path) -> None:
    a = sweep(tmp_path / "a", {"chat": 1.5})
    stale = [json.loads(line) | {"seconds": 1.0} for line in (a / "cells.jsonl").read_text().splitlines()]
    (a / "cells.jsonl").open("a").write("".join(json.dumps(each) + "\n" for each in stale))
    groups = read_sweep(a / "summary.json").groups
    assert all(window["seconds"] != 1.0 for windows in groups.values() for window in windows)


def test_the_more_is_looked_at_the_wider_each_range() -> None:
    ratio = Ratio("speedup", ("eagle3", Load(1), "chat"), math.log(0.9), 0.04, 10, judged=True)
    assert verdict_of(ratio, confidence_of([ratio])) == "worse"
    assert verdict_of(ratio, confidence_of([ratio] * 20)) == ""
    assert confidence_of([ratio] * 20) == pytest.approx(1 - 0.05 / 20)


def test_pairs_take_out_what_prompts_have_in_common_and_welch_knows_uneven_spreads() -> None:
    before = {"a": 1.0, "b": 5.0, "c": 9.0}
    difference, error, degrees = paired(before, {"a": 1.1, "b": 5.3, "c": 9.2, "d": 0.0}) or (0, 0, 0)
    assert (difference, degrees) == (pytest.approx(0.2), 2)
    assert error == pytest.approx(0.1 / math.sqrt(3))
    assert paired(before, {"x": 1.0}) is None
    difference, error, degrees = welch([1.0, 2.0, 3.0], [4.0, 4.0, 4.0])
    assert (difference, error, degrees) == (2.0, pytest.approx(math.sqrt(1 / 3)), pytest.approx(2.0))


def test_repeats_that_do_not_differ_at_all_have_a_range_of_no_width() -> None:
    ratio = Ratio("speedup", ("eagle3", Load(1), "chat"), *welch([1.0] * 3, [2.0] * 3), judged=True)
    assert ratio.degrees == 4
    assert ratio.within(0.95) == (pytest.approx(math.e), pytest.approx(math.e))


def test_three_repeats_on_both_sides_are_needed_for_repeats_to_count() -> None:
    few: Any = ({0: 0.0, 1: 0.1}, {("chat", "a"): 0.0, ("chat", "b"): 0.2})
    many: Any = ({0: 0.0, 1: 0.1, 2: 0.2}, few[1])
    assert (change(few, many) or (0, 0, 0))[2] == 1, "two prompts"
    assert (change(many, many) or (0, 0, 0))[2] == pytest.approx(4)


def test_what_is_no_evaluation_or_has_nothing_in_common_is_refused(tmp_path: Path) -> None:
    a, b = sweep(tmp_path / "a", {"chat": 1.5}), sweep(tmp_path / "b", {"code": 1.5})
    for path in (b / "cells.jsonl", b / "summary.json"):
        path.write_text(path.read_text().replace('"eagle3"', '"ngram"'))
    with pytest.raises(Refused, match="no method, load and route in common"):
        ratios(read_sweep(a), read_sweep(b))
    with pytest.raises(Refused, match=r"no evaluation: it has no summary\.json"):
        read_sweep(tmp_path)
    (b / "cells.jsonl").write_text("")
    with pytest.raises(Refused, match="holds no window of none at concurrency 1 on all"):
        read_sweep(b)
    with pytest.raises(Refused, match="give it two"):
        main([str(a)])


def test_the_command_tells_by_its_exit_code(tmp_path: Path) -> None:
    a = sweep(tmp_path / "runs/a/eval", {"chat": 1.5}).parent
    b = sweep(tmp_path / "runs/b/eval", {"chat": 1.1}).parent

    def run(*arguments: Path) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "serve_eval.compare", *map(str, arguments)]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)

    worse = run(a, b)
    assert (worse.returncode, worse.stderr) == (1, "")
    nothing = run(a, tmp_path / "nowhere")
    assert nothing.returncode == 2 and nothing.stderr.startswith("compare: ") and nothing.stderr.count("\n") == 1
