"""The picture of a run: nothing unlabelled, whatever there is to show."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from train.curves import draw_curves, smooth


def step(number: int) -> dict[str, Any]:
    per_step = {"loss_per_step": [2.0 / number, 3.0 / number], "accuracy": [0.5, None]}
    return {"step": number, "loss": 5.0 / number, **per_step, "grad_norm": 1.0, "lr": 1e-4}


def validation(number: int, al: float) -> dict[str, Any]:
    return {"step": number, "val_al": al, "val_al_sampled": al - 0.1}


def drawn(lines: list[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch, best: int | None = None) -> Any:
    """The figure that was written, with its axes as they were."""
    figures: list[Any] = []
    monkeypatch.setattr("matplotlib.pyplot.close", figures.append)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw_curves(folder / "metrics.jsonl", folder / "curves.png", best)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    return figures[0]


@pytest.mark.parametrize("steps", [0, 1, 40])
def test_every_axis_has_a_name_and_every_line_an_entry(steps: int, tmp_path: Path, monkeypatch) -> None:
    lines = [step(number) for number in range(1, steps + 1)] + ([validation(steps, 2.0)] if steps else [])
    figure = drawn(lines, tmp_path, monkeypatch)
    assert len(figure.axes) == 5
    assert all(panel.get_ylabel() for panel in figure.axes)
    assert all(panel.get_xlabel() == "optimizer step" for panel in figure.axes[:4])
    told = [panel.get_legend() for panel in figure.axes if panel.get_legend()]
    entries = [[text.get_text() for text in legend.get_texts()] for legend in told]
    shown = [["unroll step 0", "unroll step 1"], ["unroll step 0"]] if steps else []
    assert entries == [*shown, ["greedy", "sampled"]]


def test_the_checkpoint_that_is_exported_is_marked(tmp_path: Path, monkeypatch) -> None:
    lines = [step(1), validation(1, 1.9), step(2), validation(2, 1.7)]
    lengths = drawn(lines, tmp_path, monkeypatch, best=1).axes[2]
    assert [text.get_text() for text in lengths.get_legend().get_texts()] == ["greedy", "sampled", "best: 1.90"]


def test_a_moving_average_keeps_what_is_level_and_flattens_what_jumps() -> None:
    assert smooth([2.0] * 5) == [2.0] * 5
    jumps = smooth([float(number % 2) for number in range(100)])
    assert len(jumps) == 100
    assert all(math.isclose(value, 0.5, abs_tol=0.11) for value in jumps)
