"""A target that no device here could hold in fp32: its acceptance is what a server's counters say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import conf
import serve_eval.__main__ as evaluation
import serve_eval.reference
from models.config import TargetConfig
from models.errors import Refused
from models.target import describe_target
from tests.models.layouts import exported
from tests.serve_eval.conftest import STUB


@pytest.fixture
def arguments(tiny_target_dir: Path, tiny_prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run with an exported head and an engine that is a stub, on a machine too small for the reference decoder."""
    monkeypatch.setattr(serve_eval.reference, "fp32_bytes", lambda target: 10**15)
    script = tmp_path / "env/bin/python"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {STUB} "$@"\n')
    script.chmod(0o755)
    target = describe_target(TargetConfig(path=str(tiny_target_dir), dtype="float32"))
    (tmp_path / "runs/large").mkdir(parents=True)
    exported(target, tmp_path / "runs/large/export", dtype="float32")
    run = f"name=large root={tmp_path}/runs target.path={tiny_target_dir} target.dtype=float32"
    engine = f"engine=vllm engine.python={script} engine.dtype=float32 engine.max_model_len=512"
    asked = f"eval.prompts=[{tiny_prompts}] eval.k=3 eval.max_new_tokens=8 eval.concurrencies=[1,2]"
    return f"{run} {engine} {asked} eval.requests_per_route=2 eval.warmup_requests=0".split()


def test_the_reference_decoder_says_that_it_has_no_room_before_it_loads_anything(arguments: list[str]) -> None:
    with pytest.raises(
        Refused, match=r"in fp32: 1000000 GB, and cpu has .* GB; with eval.reference=false acceptance is"
    ):
        evaluation.main(conf.load([*arguments, "eval.device=cpu"]))


def test_without_it_the_server_alone_is_measured(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run = conf.load([*arguments, "eval.reference=false"])
    evaluation.dry_run(run)
    told = capsys.readouterr().out
    assert "reference decoder: none (eval.reference=false)" in told and "finds best" not in told
    assert evaluation.main(run) is True
    summary = json.loads((run.directory / "eval/summary.json").read_text())
    assert (summary["reference"], summary["best_k"], summary["k"], summary["served"]["k"]) == (None, None, 3, 3)
    assert summary["served"]["agreement"] == {} and list(summary["lossless"]) == ["reference", "vllm_fp32"]
    cells = [cell for cell in summary["served"]["cells"] if cell["method"] == "eagle3" and cell["route"] == "all"]
    assert [cell["al"] for cell in cells] == [3.0, 3.0]
    report = (run.directory / "eval/report.html").read_text()
    assert "The head yields 3.00 tokens per target forward (k = 3, vLLM" in report
    assert evaluation.main(run) is False


def test_what_needs_it_is_refused_without_it(arguments: list[str]) -> None:
    with pytest.raises(Refused, match="eval.reference=false engine.kind=none: nothing is left to measure"):
        evaluation.main(conf.load([*arguments, "eval.reference=false", "engine=none"]))
    with pytest.raises(Refused, match=r"eval.compare_with=\['a'\] compares what the reference decoder measures"):
        conf.load([*arguments, "eval.reference=false", "eval.compare_with=[a]"])
