"""A run killed and resumed ends where an uninterrupted one does; two processes train as one does."""

from __future__ import annotations

import json
import logging
import math
import shutil
import signal

import pytest
import torch

from models.errors import Refused
from tests.train.runs import final_head, finish, losses, place, start, train_here, wait_for
from train.measure import Journal
from train.resume import checkpoints, complete
from train.signals import PREEMPTED


def test_training_leaves_metrics_curves_and_checkpoints(whole):
    manifest = json.loads((whole / "manifest.json").read_text())
    lines = Journal.read(whole / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, manifest["steps"] + 1))
    figures = {"loss", "loss_per_step", "accuracy", "lr", "grad_norm", "tokens_per_s", "rows_per_s", "data_wait"}
    assert all(line.keys() == {"step", "of", "memory", *figures} for line in lines if "loss" in line)
    assert all(line["memory"] > 10_000_000 and 0 <= line["data_wait"] <= 1 for line in lines if "loss" in line)
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert manifest["best_al"] == max(line["val_al"] for line in lines if "val_al" in line) >= 1
    assert losses(whole)[manifest["steps"]] < losses(whole)[1]
    for which in ("best", "last"):
        assert (whole / manifest["checkpoints"][which] / "state.json").exists()


def test_b25_stopped_then_killed_and_resumed_is_bitwise_the_uninterrupted_run(features, whole, tmp_path, caplog):
    arguments = place(features, tmp_path)
    train = tmp_path / "run" / "train"
    (process,) = start(["train", *arguments])
    wait_for(lambda: losses(train), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == PREEMPTED
    stopped = checkpoints(train / "checkpoints")[-1]

    (process,) = start(["train", *arguments])
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
    launch = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "train"]
    finish(start([*launch, *place(features, tmp_path)]))
    one, two = losses(whole), losses(tmp_path / "run" / "train")
    assert one.keys() == two.keys()
    assert all(math.isclose(one[step], two[step], rel_tol=1e-4) for step in one)


def test_a_finished_run_does_nothing_and_other_settings_are_refused(features, whole):
    arguments = [each if not each.startswith("root=") else f"root={whole.parents[1]}" for each in features[1]]
    assert train_here(arguments) is False
    with pytest.raises(Refused, match="other settings"):
        train_here([*arguments, "optim.lr=5e-4"])


def test_a_finished_run_whose_best_checkpoint_is_cut_short_is_mended(features, whole, tmp_path, caplog):
    arguments = place(features, tmp_path)
    shutil.copytree(whole, tmp_path / "run" / "train")
    manifest = tmp_path / "run" / "train" / "manifest.json"
    best = manifest.parent / json.loads(manifest.read_text())["checkpoints"]["best"] / "head.safetensors"
    best.write_bytes(best.read_bytes()[:-8])
    assert train_here(arguments) is True
    assert "is not complete" in caplog.text or "is gone" in caplog.text
    named = json.loads(manifest.read_text())["checkpoints"].values()
    assert all(complete(manifest.parent / path) for path in named)


def test_a_step_that_supervises_no_row_has_neither_loss_nor_accuracy(features, tmp_path):
    train_here([*place(features, tmp_path), "objective.unroll_steps=60", "trainer.epochs=1"])
    last = Journal.read(tmp_path / "run" / "train" / "metrics.jsonl")[-2]
    assert last["loss_per_step"][0] > 0 and last["loss_per_step"][-1] is None
    assert last["accuracy"][-1] is None
    assert (tmp_path / "run" / "train" / "curves.png").exists()


def test_a_run_without_a_held_out_document_says_so(features, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        train_here([*place(features, tmp_path), "data.validation_share=0", "trainer.epochs=1"])
    assert "no document is held out: AL is not simulated, and the last checkpoint counts as the best" in caplog.text


def test_a_line_of_the_journal_that_is_no_json_is_left_out_with_a_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\x00garbage\n{"step": 2}\n{"step"')
    assert Journal.read(path) == [{"step": 1}, {"step": 2}]
    assert "line 2 is not JSON" in caplog.text


def test_a_warm_up_that_runs_into_the_decay_is_refused(features, tmp_path):
    with pytest.raises(Refused, match=r"warmup_steps=9 and optim\.decay_share=1\.0 overlap"):
        train_here([*place(features, tmp_path), "optim.schedule=wsd", "optim.warmup_steps=9", "optim.decay_share=1.0"])


def test_b25_only_broken_checkpoints_are_refused_not_started_over(features, tmp_path):
    arguments = place(features, tmp_path)
    (tmp_path / "run" / "train" / "checkpoints" / "step-0000004").mkdir(parents=True)
    with pytest.raises(Refused, match="no checkpoint under .* is complete"):
        train_here(arguments)
