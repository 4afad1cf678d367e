"""dry_run=true: every stage tells what it would do, with the sizes that it then has, and does nothing."""

from __future__ import annotations

import importlib
import json
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
        "engine.python=/bin/true",  # which says that it has the engine
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


MTP = ["draft.algorithm=mtp", "draft.vocab_size=null", "featurize.final_everywhere=true"]


def test_a_dry_run_of_extraction_counts_what_is_kept_for_the_teacher(overrides, capsys) -> None:
    def size(*changes: str) -> int:
        text = told("featurize", [*overrides, *changes], capsys)
        return int(re.search(r"([\d,]+) bytes per token", text)[1].replace(",", ""))  # type: ignore[index]

    usual, everywhere, likeliest = size(), size("featurize.final_everywhere=true"), size("featurize.teacher_k=2")
    assert likeliest < usual < everywhere
    assert everywhere == 4 + (3 + 1) * 64 * 2
    with pytest.raises(Refused, match="features_of=other"):
        told("featurize", [*overrides, "features_of=other"], capsys)
    with pytest.raises(Refused, match="featurize.teacher_k=2 keeps no final plane"):
        told("featurize", [*overrides, "featurize.teacher_k=2", "draft.use_aux_hidden_state=false"], capsys)


def test_a_dry_run_of_a_new_mtp_head_tells_no_figure_that_is_not_its_own(overrides, capsys) -> None:
    text = told("train", [*overrides, *MTP], capsys)
    assert "head: MTP, " in text and "draft vocabulary 400 of 400" in text
    assert "not estimated for MTP heads" in text and "working copies" not in text
    assert "16 tensors" in told("models.export", [*overrides, *MTP], capsys)
    text = told("serve_eval", [*overrides, *MTP], capsys)
    assert "server mtp:" in text and "num_nextn_predict_layers" in text and "eagle3" not in text.split("sweep:")[1]
    with pytest.raises(Refused, match="featurize.final_everywhere=true"):
        told("train", [*overrides, *MTP, "featurize.final_everywhere=false"], capsys)
    with pytest.raises(Refused, match="export.dialect=speculators has no MTP heads"):
        told("models.export", [*overrides, *MTP, "export.dialect=speculators"], capsys)
    with pytest.raises(Refused, match="is a head of method mtp, not eagle3"):
        told("serve_eval", [*overrides, *MTP, "eval.methods=[{method: eagle3}]"], capsys)


def test_a_dry_run_of_a_targets_own_module_tells_of_the_copy_that_is_served(overrides, tmp_path, capsys) -> None:
    index = {"weight_map": {"model.mtp_layers.0.input_proj.weight": "model-00001.safetensors"}}
    (tmp_path / "target" / "model.safetensors.index.json").write_text(json.dumps(index))
    native = [*overrides, *MTP, "draft.algorithm=mtp_native"]
    text = told("train", native, capsys)
    assert "MTP, the target's own" in text and "arithmetic: not estimated" in text
    text = told("models.export", native, capsys)
    assert f"a copy of {tmp_path / 'target'}" in text and "model-mtp.safetensors" in text
    line = next(line for line in told("serve_eval", native, capsys).splitlines() if line.startswith("server mtp:"))
    assert f"--model {tmp_path / 'runs/dry/export'} " in line
    assert '{"method":"mtp","num_speculative_tokens":4}' in line


def test_a_dry_run_of_a_head_without_fc_counts_its_one_plane(overrides, capsys) -> None:
    without = [*overrides, "draft.use_aux_hidden_state=false", "featurize.final_everywhere=true"]
    assert "head: EAGLE-3 without fc" in told("train", without, capsys)
    assert "14 tensors" in told("models.export", without, capsys)


def test_a_dry_run_of_a_sweep_tells_every_server_and_every_window(overrides, capsys) -> None:
    several = [
        *overrides,
        "eval.methods=[{method: eagle3, k: 2}, {method: eagle3, k: 3}, {method: ngram}]",
        "eval.side_by_side=true",
        "eval.repeats=3",
        "eval.rates=[2]",
        "eval.input_lengths=[64]",
        "eval.requests_per_route=1",
    ]
    text = told("serve_eval", several, capsys)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("server ")] == [
        *("none:", "eagle3-k2:", "eagle3-k3:", "ngram:")
    ]
    # three loads on three routes, three times; 1 + 2 + 1 requests a route
    assert (
        "4 servers, all at once; of each 27 windows (concurrency 1; concurrency 2; 2 requests/s; on chat, json, "
        in text
    )
    assert "36 requests" in text
    running = "eval.methods=[{method: none, url: 'http://a:1'}, {method: eagle3, url: 'http://a:2'}]"
    assert "server eagle3: http://a:2" in told("serve_eval", [*overrides, running], capsys)


def test_a_dry_run_over_anothers_features_counts_those(overrides, tiny_target_dir, capsys) -> None:
    overrides = [*(word for word in overrides if not word.startswith("target.path")), f"target.path={tiny_target_dir}"]
    featurize = importlib.import_module("featurize.__main__")
    assert featurize.work(conf.load([*overrides, "data.limit=20", "featurize.final_everywhere=true"]))
    capsys.readouterr()
    text = told("train", [*overrides, *MTP, "name=second", "features_of=dry"], capsys)
    documents, held_out = re.search(r"data: (\d+) documents \((\d+) held out\)", text).groups()  # type: ignore[union-attr]
    assert int(documents) + int(held_out) == 20
    assert "dry/features\n" in text


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


def test_a_dry_run_refuses_what_the_stage_would_refuse(overrides, capsys, tmp_path) -> None:
    with pytest.raises(Refused, match="all .* documents are held out"):
        told("train", [*overrides, "data.validation_share=0.9999"], capsys)
    with pytest.raises(Refused, match=r"optim.decay_share=0.2 overlap in a run of \d+ steps; lower one of them"):
        told("train", [*overrides, "optim.schedule=wsd", "optim.warmup_steps=10000"], capsys)
    with pytest.raises(Refused, match="a spool holds few shards at a time; set trainer.shuffle_shards"):
        told("train", [*overrides, "spool.gigabytes=0.01"], capsys)
    with pytest.raises(Refused, match="does not fit into engine.max_model_len"):
        told("serve_eval", [*overrides, "engine.max_model_len=16"], capsys)
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(Refused, match=r"engine\.python=.*bare-python has no vllm .*; `pip install vllm`"):
        told("serve_eval", [*overrides, f"engine.python={bare}"], capsys)


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
