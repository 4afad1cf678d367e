"""dry_run=true: every stage tells what it would do, with the sizes that it then has, and does nothing."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import conf
from models.artefact import read_json
from models.config import TargetConfig
from models.errors import Refused
from models.target import describe_target

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def overrides(tmp_path, tiny_target_dir, tiny_conversations, tiny_prompts) -> list[str]:
    """A run on the tiny target, which lies here without its weights."""
    bare = tmp_path / "target"
    shutil.copytree(tiny_target_dir, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    return [
        "name=dry",
        f"root={tmp_path / 'runs'}",
        f"target.path={bare}",
        f"data.conversations=[{tiny_conversations}]",
        "data.validation_share=0.2",
        "featurize.shard_tokens=700",
        "objective.unroll_steps=3",
        "draft.vocab_size=64",
        "trainer.epochs=2",
        "trainer.pack_tokens=128",
        f"eval.prompts=[{tiny_prompts}]",
        "eval.concurrencies=[1,2]",
        "engine.kind=vllm",
        f"engine.python={sys.executable}",
    ]


def told(stage: str, overrides: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a stage's dry run prints."""
    module: Any = importlib.import_module(f"{stage}.__main__" if stage != "models.export" else stage)
    run = conf.load(overrides)
    if stage == "models.export":
        module.tell(run.directory, run.export, run.target, run.draft)
    else:
        module.dry_run(run)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("stage", "words"),
    {
        "featurize": ["8 layers", "aux planes 2, 4, 5", "48 documents", "bytes per token", "free", "transformers"],
        "train": ["weights", "draft vocabulary 64", "supervised rows", "steps: ", "memory of a GPU", "FLOP"],
        "models.export": ["none yet", "15 tensors", "plain dialect"],
        "serve_eval": ["prompts: 6", "chat 3, json 3", "server none:", "server eagle3:", "--speculative-config"],
    }.items(),
)
def test_a_dry_run_needs_no_weights_and_leaves_nothing(stage, words, overrides, tmp_path, capsys) -> None:
    text = told(stage, overrides, capsys)
    assert [word for word in words if word not in text] == [], text
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_of_extraction_in_a_server_shows_its_command(overrides, capsys) -> None:
    text = told("featurize", [*overrides, "featurize.backend=vllm"], capsys)
    assert "vllm.entrypoints.openai.api_server" in text
    assert '"eagle_aux_hidden_state_layer_ids":[2,4,5,8]' in text


def test_a_dry_run_of_streaming_tells_what_passes_through_and_what_stays(overrides, capsys) -> None:
    streaming = [*overrides, "spool.gigabytes=0.01", "trainer.shuffle_shards=2"]
    assert "at most 0.01 GB at a time" in told("featurize", streaming, capsys)
    assert "steps: " in told("train", streaming, capsys)


def test_what_a_dry_run_tells_is_what_the_stages_then_do(overrides, tiny_target_dir, capsys) -> None:
    overrides = [*(word for word in overrides if not word.startswith("target.path")), f"target.path={tiny_target_dir}"]
    before = {stage: told(stage, overrides, capsys) for stage in ("featurize", "train")}
    run = conf.load([*overrides, "trainer.device=cpu", "trainer.precision=fp32"])
    featurize, train = (importlib.import_module(f"{name}.__main__") for name in ("featurize", "train"))
    assert featurize.work(run) and train.main(run)
    printed = capsys.readouterr().out
    line = re.compile(r"features: 48 documents.*bytes per token.*GB in \d+ shards", re.MULTILINE)
    assert line.search(before["featurize"])[0] == line.search(printed)[0]  # type: ignore[index]
    steps = re.search(r"steps: ([\d,]+) in 2 epochs", before["train"])
    last = read_json(run.directory / "train/manifest.json")["checkpoints"]["last"]
    assert steps and int(steps[1].replace(",", "")) == int(last.rpartition("-")[2])
    after = told("featurize", overrides, capsys)
    assert "; 0 shards (0.00 GB) to compute" in after


def test_a_dry_run_refuses_what_the_stage_would_refuse(overrides, capsys) -> None:
    with pytest.raises(Refused, match="all .* documents are held out"):
        told("train", [*overrides, "data.validation_share=0.9999"], capsys)
    with pytest.raises(Refused, match="does not fit into engine.max_model_len"):
        told("serve_eval", [*overrides, "engine.max_model_len=16"], capsys)


def command(module: str, overrides: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *overrides, "dry_run=true"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_on_the_command_line_a_dry_run_exits_with_0(overrides, tmp_path) -> None:
    result = command("models.export", overrides)
    assert (result.returncode, result.stderr) == (0, "")
    assert "writes: " in result.stdout
    assert not (tmp_path / "runs").exists()


def test_a_command_without_a_dry_run_refuses_it_rather_than_running(overrides, tmp_path) -> None:
    result = command("featurize.generate", overrides)
    assert result.returncode == 2
    assert "dry_run=true: this command has none" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_fetches_no_weights_from_the_hub_and_a_run_does(overrides, monkeypatch, capsys) -> None:
    fetched: list[list[str]] = []
    bare = next(word.partition("=")[2] for word in overrides if word.startswith("target.path="))

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        fetched.append(allow_patterns)
        return bare

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    text = told("featurize", [*overrides, "target.path=owner/model"], capsys)
    assert "target: owner/model, 8 layers" in text
    assert fetched and "*.safetensors" not in fetched[0] and "*.json" in fetched[0]
    describe_target(TargetConfig(path="owner/model"))
    assert "*.safetensors" in fetched[-1]
