"""`python -m featurize.inspect` shows what is trained, with and without a terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from featurize.config import DataConfig, InspectConfig
from featurize.inspect import inspect
from featurize.spans import Renderer
from models.errors import Refused

ROOT = Path(__file__).parents[2]
CHATML = (Path(__file__).parent / "templates/chatml.jinja").read_text()


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    def messages(*texts: str) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]

    rows = [
        {"id": "one", "route": "code", "messages": messages("what?", "two\nlines")},
        {"id": "none", "messages": messages("no answer")},
        {"id": "two", "messages": messages("q\x1b[31m", "a", "r", "b")},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig([str(file)])


def shown(data: DataConfig, make_tokenizer: Any, colour: bool = False, **settings: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=colour, color_system="standard" if colour else None, width=40)
    inspect(data, Renderer(make_tokenizer(CHATML, eos="<|im_end|>")), InspectConfig(**settings), console)
    return out.getvalue()


def test_spans_are_marked_without_a_terminal(data: DataConfig, make_tokenizer: Any) -> None:
    text = shown(data, make_tokenizer, documents=1)
    assert text.splitlines() == [
        f"one [code], {data.conversations[0]}:1: 34 tokens, 10 supervised in 1 spans",
        "| <|im_start|>user↵",
        "| what?<|im_end|>↵",
        "| <|im_start|>assistant↵",
        "+ two↵",
        "+ lines<|im_end|>",
        "",
    ]


def test_spans_are_green_on_a_terminal(data: DataConfig, make_tokenizer: Any) -> None:
    text = shown(data, make_tokenizer, colour=True, documents=1)
    assert "\x1b[32m+ lines<|im_end|>\x1b[0m" in text
    assert "\x1b[2m| what?<|im_end|>↵\x1b[0m" in text


def test_one_document_by_its_id_and_what_was_left_out(data: DataConfig, make_tokenizer: Any) -> None:
    text = shown(data, make_tokenizer, id="two")
    assert "what?" not in text
    assert "| q\\x1b[31m<|im_end|>" in text  # what a row holds does not reach the terminal as a command
    assert "left out: 1 x no assistant message" in text
    data.turns = "split"
    assert "two#message-1" in shown(data, make_tokenizer, id="two")
    only = shown(data, make_tokenizer, id="two#message-3")
    assert "two#message-1" not in only
    assert [line for line in only.splitlines() if line.startswith("+")] == ["+ b<|im_end|>"]
    with pytest.raises(Refused, match="no document has the id three"):
        shown(data, make_tokenizer, id="three")


def test_no_more_is_shown_than_what_is_made(data: DataConfig, make_tokenizer: Any) -> None:
    data.turns = "split"
    for limits, ids in (
        ({}, ["one#message-1", "two#message-1", "two#message-3"]),
        ({"limit": 2}, ["one#message-1", "two#message-1"]),
        ({"route_limits": {"": 1}}, ["one#message-1", "two#message-1"]),
        ({"route_limits": {"code": 0}}, ["two#message-1", "two#message-3"]),
    ):
        text = shown(replace(data, **limits), make_tokenizer, documents=9)
        assert [line.split()[0].rstrip(",") for line in text.splitlines() if "supervised in" in line] == ids
    with pytest.raises(ValueError, match="data.limit=-1 must be at least 1"):
        DataConfig(limit=-1)


def test_the_command_takes_a_runs_configuration_and_writes_nothing(
    tmp_path: Path, tiny_target_dir: Path, tiny_conversations: Path
) -> None:
    overrides = ["name=a", f"root={tmp_path}", f"target.path={tiny_target_dir}"]
    overrides += [f"data.conversations=[{tiny_conversations}]", "inspect.documents=2"]
    result = subprocess.run(
        [sys.executable, "-m", "featurize.inspect", *overrides],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii:backslashreplace"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert [line.split(",")[0] for line in result.stdout.splitlines() if line.startswith("c0")] == [
        "c000 [chat]",
        "c001 [json]",
    ]
    assert "+ " in result.stdout
    assert not list(tmp_path.iterdir())
