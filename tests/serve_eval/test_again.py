"""The evaluation asked again: without a server the served figures go, with it they come back from what was kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import conf
import serve_eval.__main__ as evaluation
from models.config import TargetConfig
from models.target import describe_target
from tests.models.layouts import exported
from tests.serve_eval.conftest import STUB


def test_served_figures_that_go_are_told_and_come_back_without_a_server(
    tiny_target_dir: Path, tiny_prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "again").mkdir()
    target = describe_target(TargetConfig(path=str(tiny_target_dir), dtype="float32"))
    exported(target, tmp_path / "again/export", dtype="float32")
    script, starts = tmp_path / "env/bin/python", tmp_path / "starts.jsonl"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\nSTUB_STARTS={starts} exec {sys.executable} {STUB} "$@"\n')
    script.chmod(0o755)
    common = ["name=again", f"root={tmp_path}", f"target.path={tiny_target_dir}", "target.dtype=float32"]
    common += [f"eval.prompts=[{tiny_prompts}]", "eval.k=2", "eval.max_new_tokens=8", "eval.concurrencies=[1]"]
    with_server = [*common, "engine=vllm", f"engine.python={script}", "engine.dtype=float32"]
    with_server += ["eval.requests_per_route=1", "engine.max_model_len=512"]
    told = []
    for words in (with_server, [*common, "engine=none"], with_server):
        assert evaluation.main(conf.load(words)) is True
        told.append(capsys.readouterr().out)
        summary = json.loads((tmp_path / "again/eval/summary.json").read_text())
        assert (summary["served"] is None) == ("engine=none" in words)
        if told[:-1] == []:
            first = summary
    assert summary == first
    assert len(starts.read_text().splitlines()) == 2, "the server alone and with the head, once"
    lost = "engine.kind=none: the summary has lost its served figures; the command that made them puts them back"
    assert [lost in text for text in told] == [False, True, False]
