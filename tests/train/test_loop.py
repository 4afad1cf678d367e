"""A run killed and resumed ends where an uninterrupted one does; two processes train as one does."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


def overrides(target: Path, conversations: Path, root: Path) -> list[str]:
    return [
        "name=run",
        f"root={root}",
        f"target.path={target}",
        "target.dtype=float32",
        "target.aux_layers=[2,4,5]",
        f"data.conversations=[{conversations}]",
        "data.validation_share=0.15",
        "draft.vocab_size=128",
        "objective.unroll_steps=3",
        "objective.row_share=0.8",
        "optim.lr=1e-3",
        "optim.warmup_steps=2",
        "trainer.epochs=2",
        "trainer.pack_tokens=128",
        "trainer.packs_per_step=2",
        "trainer.precision=fp32",
        "trainer.device=cpu",
        "trainer.validate_every=8",
        "trainer.checkpoint_every=4",
        "trainer.log_every=1",
        "trainer.keep_checkpoints=2",
    ]


def run(module: str, arguments: list[str], *prefix: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *prefix, "-m", module, *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    if check:
        assert result.returncode == 0, result.stderr[-3000:]
    return result


@pytest.fixture(scope="module")
def features(tiny_target_dir, tiny_conversations, tmp_path_factory) -> tuple[Path, list[str]]:
    root = tmp_path_factory.mktemp("runs")
    arguments = overrides(tiny_target_dir, tiny_conversations, root)
    run("featurize", arguments)
    return root / "run" / "features", arguments


def place(features: tuple[Path, list[str]], root: Path) -> list[str]:
    """Arguments of a new run that has these features already."""
    shutil.copytree(features[0], root / "run" / "features")
    return [argument if not argument.startswith("root=") else f"root={root}" for argument in features[1]]


@pytest.fixture(scope="module")
def whole(features, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    run("train", place(features, root))
    return root / "run" / "train"


def final_head(train: Path) -> dict[str, torch.Tensor]:
    manifest = json.loads((train / "manifest.json").read_text())
    return load_file(train / manifest["checkpoints"]["last"] / "head.safetensors")


def losses(train: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (train / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_training_leaves_metrics_curves_and_checkpoints(whole):
    manifest = json.loads((whole / "manifest.json").read_text())
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, manifest["steps"] + 1))
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert manifest["best_al"] == max(line["val_al"] for line in lines if "val_al" in line) >= 1
    assert losses(whole)[manifest["steps"]] < losses(whole)[1]
    for which in ("best", "last"):
        assert (whole / manifest["checkpoints"][which] / "state.json").exists()


def test_b25_killed_anywhere_and_resumed_is_bitwise_the_uninterrupted_run(features, whole, tmp_path):
    arguments = place(features, tmp_path)
    train = tmp_path / "run" / "train"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "train", *arguments], cwd=ROOT, env=environment)
    deadline = time.monotonic() + 120
    while not list((train / "checkpoints").glob("step-*4")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not (train / "manifest.json").exists(), "it was over before it could be killed"
    newest = max((train / "checkpoints").glob("step-*"), key=lambda path: path.name)
    torn = newest.with_name("step-0000099")
    shutil.copytree(newest, torn)
    (torn / "head.safetensors").write_bytes((torn / "head.safetensors").read_bytes()[:1000])
    result = run("train", arguments)
    assert "not complete" in result.stderr and "going on after step" in result.stderr
    resumed, straight = final_head(train), final_head(whole)
    assert resumed.keys() == straight.keys()
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    assert losses(train) == losses(whole)


def test_sigterm_saves_and_leaves_with_a_code_of_its_own(features, whole, tmp_path):
    arguments = place(features, tmp_path)
    train = tmp_path / "run" / "train"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "train", *arguments], cwd=ROOT, env=environment)
    deadline = time.monotonic() + 120
    while not losses(train) if (train / "metrics.jsonl").exists() else time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    run("train", arguments)
    assert all(torch.equal(a, b) for a, b in zip(final_head(train).values(), final_head(whole).values(), strict=True))


def test_b16_two_processes_train_as_one_does(features, whole, tmp_path):
    arguments = place(features, tmp_path)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    run("train", arguments, *launcher)
    one, two = losses(whole), losses(tmp_path / "run" / "train")
    assert one.keys() == two.keys()
    assert all(math.isclose(one[step], two[step], rel_tol=1e-4) for step in one)


def test_a_finished_run_does_nothing_and_other_settings_are_refused(features, tmp_path):
    arguments = [*place(features, tmp_path), "trainer.epochs=1"]
    run("train", arguments)
    assert "nothing to do" in run("train", arguments).stdout
    refused = run("train", [*arguments, "optim.lr=5e-4"], check=False)
    assert refused.returncode == 2 and "other settings" in refused.stderr and "Traceback" not in refused.stderr
