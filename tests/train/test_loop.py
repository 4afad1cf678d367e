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
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import conf
import featurize.__main__ as featurize_stage
import train.__main__ as train_stage
from models.errors import Refused
from train.measure import Journal
from train.resume import checkpoints
from train.signals import PREEMPTED

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
        "optim.muon_lr=1e-3",
        "optim.warmup_steps=2",
        "trainer.epochs=2",
        "trainer.pack_tokens=128",
        "trainer.packs_per_step=2",
        "trainer.precision=fp32",
        "trainer.validate_every=8",
        "trainer.checkpoint_every=4",
        "trainer.log_every=1",
        "trainer.keep_checkpoints=2",
    ]


def start(arguments: list[str], *prefix: str) -> subprocess.Popen[str]:
    """`python -m train` as a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *prefix, "-m", "train", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def train_here(arguments: list[str]) -> bool:
    """The train stage in this process, with one thread as in the others: sums must not depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train_stage.main(conf.load(arguments))
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def features(tiny_target_dir, tiny_conversations, tmp_path_factory) -> tuple[Path, list[str]]:
    root = tmp_path_factory.mktemp("runs")
    arguments = overrides(tiny_target_dir, tiny_conversations, root)
    featurize_stage.work(conf.load(arguments))
    return root / "run" / "features", arguments


def place(features: tuple[Path, list[str]], root: Path) -> list[str]:
    """Arguments of a new run that has these features already."""
    shutil.copytree(features[0], root / "run" / "features")
    return [argument if not argument.startswith("root=") else f"root={root}" for argument in features[1]]


@pytest.fixture(scope="module")
def whole(features, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    assert train_here(place(features, root)) is True
    return root / "run" / "train"


def final_head(train: Path) -> dict[str, torch.Tensor]:
    manifest = json.loads((train / "manifest.json").read_text())
    return load_file(train / manifest["checkpoints"]["last"] / "head.safetensors")


def losses(train: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in Journal.read(train / "metrics.jsonl") if "loss" in line}


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "it was over before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_training_leaves_metrics_curves_and_checkpoints(whole):
    manifest = json.loads((whole / "manifest.json").read_text())
    lines = Journal.read(whole / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, manifest["steps"] + 1))
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert manifest["best_al"] == max(line["val_al"] for line in lines if "val_al" in line) >= 1
    assert losses(whole)[manifest["steps"]] < losses(whole)[1]
    for which in ("best", "last"):
        assert (whole / manifest["checkpoints"][which] / "state.json").exists()


def test_b25_stopped_then_killed_and_resumed_is_bitwise_the_uninterrupted_run(features, whole, tmp_path, caplog):
    arguments = place(features, tmp_path)
    train = tmp_path / "run" / "train"
    process = start(arguments)
    wait_for(lambda: losses(train), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == PREEMPTED
    stopped = checkpoints(train / "checkpoints")[-1]

    process = start(arguments)
    wait_for(lambda: checkpoints(train / "checkpoints")[-1] != stopped, process)
    process.kill()
    process.wait()
    assert not (train / "manifest.json").exists()

    torn = train / "checkpoints" / "step-0000099"
    shutil.copytree(checkpoints(train / "checkpoints")[-1], torn)
    (torn / "head.safetensors").write_bytes((torn / "head.safetensors").read_bytes()[:1000])
    assert train_here(arguments) is True
    assert "step-0000099 is not complete" in caplog.text
    resumed, straight = final_head(train), final_head(whole)
    assert resumed.keys() == straight.keys()
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    assert losses(train) == losses(whole)


def test_b16_two_processes_train_as_one_does(features, whole, tmp_path):
    process = start(place(features, tmp_path), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said[-3000:]
    one, two = losses(whole), losses(tmp_path / "run" / "train")
    assert one.keys() == two.keys()
    assert all(math.isclose(one[step], two[step], rel_tol=1e-4) for step in one)


def test_a_finished_run_does_nothing_and_other_settings_are_refused(features, whole):
    arguments = [each if not each.startswith("root=") else f"root={whole.parents[1]}" for each in features[1]]
    assert train_here(arguments) is False
    with pytest.raises(Refused, match="other settings"):
        train_here([*arguments, "optim.lr=5e-4"])


def test_b25_only_broken_checkpoints_are_refused_not_started_over(features, tmp_path):
    arguments = place(features, tmp_path)
    (tmp_path / "run" / "train" / "checkpoints" / "step-0000004").mkdir(parents=True)
    with pytest.raises(Refused, match="no checkpoint under .* is complete"):
        train_here(arguments)
