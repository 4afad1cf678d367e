"""Stopped, killed or gone on with otherwise: a run ends where an uninterrupted one does."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import shutil
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import train.__main__ as train_stage
import train.loop
from models.errors import Refused
from tests.train.runs import final_head, finish, losses, place, start, train_here, wait_for
from train.config import OptimConfig, TrainerConfig
from train.loop import Trainer
from train.measure import Journal
from train.optimizer import schedule
from train.resume import Progress, checkpoints, step_of
from train.signals import PREEMPTED

ZERO = importlib.util.find_spec("deepspeed") is not None


class StopAfter:
    """Stands for StopRequest: asked to stop once the loop has looked `steps` times."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    @property
    def asked(self) -> bool:
        self.left -= 1
        return self.left <= 0


def train_until(monkeypatch, steps: int, arguments: list[str]) -> None:
    """The train stage in this process, preempted after so many steps."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as left:
        patch.setattr(train_stage, "StopRequest", lambda: StopAfter(steps))
        train_here(arguments)
    assert left.value.code == PREEMPTED


def rates(train: Path) -> list[float]:
    """Learning rate of every step, in order, from the journal."""
    return [line["lr"] for line in Journal.read(train / "metrics.jsonl") if "lr" in line]


def assert_close(train: Path, other: Path) -> None:
    assert losses(train).keys() == losses(other).keys()
    assert all(math.isclose(losses(train)[step], loss, rel_tol=1e-4) for step, loss in losses(other).items())


@pytest.fixture(scope="module")
def plain(features) -> tuple[Path, list[str]]:
    """The features, and arguments without Muon, which is for whole matrices only."""
    return features[0], [each for each in features[1] if "muon" not in each]


@pytest.fixture(scope="module")
def straight(plain, tmp_path_factory) -> Path:
    """One process, never interrupted."""
    root = tmp_path_factory.mktemp("straight")
    assert train_here(place(plain, root)) is True
    return root / "run" / "train"


def test_b25_b22_b21_signalled_on_one_rank_then_killed_then_on_one_process(plain, straight, tmp_path):
    """2 processes (DDP) -> SIGUSR1 to rank 1 -> 2 processes (FSDP2) -> SIGKILL of rank 1 -> 1 process.

    Both have local rank 0 and at first a disk of their own, as on two nodes.
    """
    arguments, train = place(plain, tmp_path / "node0"), tmp_path / "node0" / "run" / "train"
    elsewhere = place(plain, tmp_path / "node1")
    before = sorted((tmp_path / "node1").rglob("*"))
    both = start(["train", *arguments], ["train", *elsewhere])
    wait_for(lambda: losses(train), both[0])
    both[1].send_signal(signal.SIGUSR1)
    assert [process.wait(timeout=60) for process in both] == [PREEMPTED, PREEMPTED]
    assert sorted((tmp_path / "node1").rglob("*")) == before, "only the first of all processes writes"
    stopped = checkpoints(train / "checkpoints")[-1]
    assert step_of(stopped) == max(losses(train)), "saved at the step at which they agreed"

    command = ["train", *arguments, "trainer.strategy=fsdp2"]
    both = start(command, command)
    wait_for(lambda: checkpoints(train / "checkpoints")[-1] != stopped, both[0])
    both[1].kill()
    killed = time.monotonic()
    said = both[0].communicate(timeout=120)[1]
    assert both[0].returncode == 2
    assert time.monotonic() - killed < 60
    assert "train: another process of this job is gone" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert not (train / "manifest.json").exists()

    assert train_here(arguments) is True
    assert_close(train, straight)
    steps = json.loads((train / "manifest.json").read_text())["steps"]
    optim = OptimConfig(lr=1e-3, warmup_steps=2)
    assert rates(train) == rates(straight) == [optim.lr * schedule(optim, step, steps) for step in range(steps)]


def test_all_processes_leave_a_finished_run_even_where_only_the_first_can_see_it(features, whole, tmp_path):
    arguments = place(features, tmp_path / "node0")
    shutil.copytree(whole, tmp_path / "node0" / "run" / "train")
    elsewhere = place(features, tmp_path / "node1")
    finish(start(["train", *arguments], ["train", *elsewhere]))


@pytest.mark.parametrize("strategy", ["fsdp2", *(["zero3"] if ZERO else [])])
def test_b26_one_process_then_two_under_accelerate_launch(plain, straight, tmp_path, monkeypatch, strategy):
    arguments = place(plain, tmp_path)
    train_until(monkeypatch, 9, arguments)
    options = ["--use_fsdp", "--fsdp_version", "2"]
    if strategy.startswith("zero"):
        options = ["--use_deepspeed", "--zero_stage", strategy[-1]]
    options += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = ["accelerate.commands.launch", *options, "-m", "train", *arguments, f"trainer.strategy={strategy}"]
    (said,) = finish(start(command, DS_ACCELERATOR="cpu"))
    assert f"the checkpoint of 1 processes (ddp) goes on with 2 ({strategy})" in said
    assert_close(tmp_path / "run" / "train", straight)


def test_b26_a_checkpoint_of_eight_processes_goes_on_with_one_and_both_are_named(
    features,
    whole,
    tmp_path,
    monkeypatch,
    caplog,
):
    arguments = place(features, tmp_path)
    train = tmp_path / "run" / "train"
    train_until(monkeypatch, 9, arguments)
    state = checkpoints(train / "checkpoints")[-1] / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"processes": 8, "strategy": "zero3"}))
    with caplog.at_level(logging.INFO):
        assert train_here(arguments) is True
    assert "the checkpoint of 8 processes (zero3) goes on with 1 (ddp)" in caplog.text
    assert all(torch.equal(final_head(train)[name], value) for name, value in final_head(whole).items())


def test_a_checkpoint_says_what_it_is_of(whole):
    state = json.loads((checkpoints(whole / "checkpoints")[-1] / "state.json").read_text())
    assert (state["processes"], state["strategy"]) == (1, "ddp")
    assert state["features"]["aux_layers"] == [2, 4, 5]
    assert state["config"]["optim"]["lr"] == 1e-3
    assert state["config"]["trainer"]["seed"] == 0


def test_b25_the_newest_complete_checkpoint_is_found_by_number(features, tmp_path, monkeypatch, caplog):
    arguments = [*place(features, tmp_path), "trainer.keep_checkpoints=9", "trainer.checkpoint_every=1"]
    train_until(monkeypatch, 11, arguments)
    folder = tmp_path / "run" / "train" / "checkpoints"
    for name in ("head.safetensors", "optimizer.safetensors"):
        torn = folder / "step-0000011" / name
        whole_file = torn.read_bytes()
        torn.write_bytes(whole_file[: len(whole_file) // 2])
        assert train.loop.resume.newest(folder, identity_of(folder / "step-0000010"), {}) == folder / "step-0000010"
        torn.write_bytes(whole_file)
    (folder / "step-0000011" / "state.json").unlink()
    (folder / "step-0000009").rename(folder / "step-9")
    (folder / "step-tmp").mkdir()
    (folder / "step-99").write_text("a file")
    assert train.loop.resume.newest(folder, identity_of(folder / "step-0000010"), {}) == folder / "step-0000010"
    assert "step-0000011 is not complete" in caplog.text


def test_a_run_of_other_settings_is_refused_with_those_that_decide_weights(features, tmp_path, monkeypatch):
    arguments = place(features, tmp_path)
    others = ["optim.lr=0.5", "trainer.seed=1", "trainer.keep_checkpoints=7"]
    told = r"\(optim\.lr was 0\.001, is 0\.5; trainer\.seed was 0, is 1\); set them back"
    train_until(monkeypatch, 2, arguments)
    with pytest.raises(Refused, match=told):
        train_here([*arguments, *others])
    train_here(arguments)
    with pytest.raises(Refused, match=told):
        train_here([*arguments, *others])


def test_pruning_deletes_only_what_a_run_made(tmp_path):
    for name in (
        "step-0000001",
        "step-0000002",
        "step-0000003",
        "step-0000002-keep",
        "step-best",
        ".step-0000003.a.tmp",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    train.loop.resume.prune(tmp_path, 1, train.loop.resume.Progress(step=3, best_step=1))
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"step-0000001", "step-0000003", "step-0000002-keep", "step-best"}


def test_a_checkpoint_that_cannot_be_read_just_now_is_not_taken_for_a_torn_one(whole, monkeypatch):
    def fail(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "head.safetensors")

    monkeypatch.setattr(train.loop.resume, "load_head", fail)
    with pytest.raises(PermissionError):
        train.loop.resume.newest(whole / "checkpoints", "any", {})


def test_a_signal_before_the_first_step_is_remembered(features, tmp_path):
    arguments = place(features, tmp_path)
    (process,) = start(["train", *arguments])
    wait_for(lambda: (tmp_path / "run" / ".train.lock").exists(), process)
    time.sleep(0.2)  # from taking the lock to the first line of the stage
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=120) == PREEMPTED
    assert checkpoints(tmp_path / "run" / "train" / "checkpoints")


def identity_of(checkpoint: Path) -> str:
    return json.loads((checkpoint / "state.json").read_text())["progress"]["identity"]


def test_b28_masters_are_fp32_in_bf16_training_and_go_on_bit_for_bit(plain, tmp_path, monkeypatch):
    options = ["trainer.precision=bf16", "optim.lr=1e-4", "optim.warmup_steps=0", "trainer.epochs=4"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    arguments = [*place(plain, straight), *options]
    kept: dict[str, torch.Tensor] = {}
    update = train.loop.ranks.Ranks.update

    def remember(self: Any, factor: float, step: int) -> float:
        norm = update(self, factor, step)
        if step == 25:
            kept.update({name: value.detach().clone() for name, value in self.parameters.items()})
        return norm

    with monkeypatch.context() as patch:
        patch.setattr(train.loop.ranks.Ranks, "update", remember)
        assert train_here(arguments) is True
    train_until(monkeypatch, 25, [*place(plain, resumed), *options])
    restored = load_file(checkpoints(resumed / "run/train/checkpoints")[-1] / "head.safetensors")
    assert all(torch.equal(restored[name], value) for name, value in kept.items())
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):  # they start at 1
        weight = kept[f"midlayer.{name}.weight"]
        assert 0 < (weight - 1).abs().max() < 2**-7, "it moves by less than bf16 can tell from 1"
    assert train_here(place_again(arguments, resumed)) is True
    assert losses(resumed / "run/train") == losses(straight / "run/train")
    ends = [final_head(root / "run/train") for root in (straight, resumed)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def place_again(arguments: list[str], root: Path) -> list[str]:
    return [each if not each.startswith("root=") else f"root={root}" for each in arguments]


def test_the_average_is_what_is_judged_and_kept_and_both_go_on_bit_for_bit(features, tmp_path, monkeypatch):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    arguments = [*place(features, straight), "optim.ema_decay=0.95"]
    judged: list[dict[str, torch.Tensor]] = []
    validate = train.loop.validate

    def remember(objective: Any, *rest: Any) -> Any:
        judged.append({name: value.detach().clone() for name, value in objective.head.named_parameters()})
        return validate(objective, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(train.loop, "validate", remember)
        assert train_here(arguments) is True
    last = final_head(straight / "run/train")
    assert all(torch.equal(last[name], value) for name, value in judged[-1].items())
    manifest = json.loads((straight / "run/train/manifest.json").read_text())
    tensors = load_file(straight / "run/train" / manifest["checkpoints"]["last"] / "optimizer.safetensors")
    assert not torch.equal(tensors["fc.weight/weight"], last["fc.weight"])

    place(features, resumed)
    train_until(monkeypatch, 9, place_again(arguments, resumed))
    assert train_here(place_again(arguments, resumed)) is True
    assert losses(resumed / "run/train") == losses(straight / "run/train")
    again = load_file(resumed / "run/train" / manifest["checkpoints"]["last"] / "optimizer.safetensors")
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert all(torch.equal(value, last[name]) for name, value in final_head(resumed / "run/train").items())


class FakeWandb(types.ModuleType):
    """wandb as far as the journal knows it; every call is noted, and logging of one step can fail."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__("wandb")
        self.errors = types.SimpleNamespace(Error=RuntimeError)
        self.calls: list[tuple[str, Any]] = []
        self.fail_at = fail_at
        self.id = "id-of-the-run"

    def init(self, **options: Any) -> FakeWandb:
        self.calls.append(("init", options))
        return self

    def define_metric(self, *names: Any, **options: Any) -> None:
        self.calls.append(("define_metric", (names, options)))

    def log(self, values: dict[str, Any], **options: Any) -> None:
        if values["step"] == self.fail_at:
            raise KeyboardInterrupt
        self.calls.append(("log", (values["step"], options)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_b27_wandb_goes_on_in_the_same_run_by_its_own_step(features, tmp_path, monkeypatch):
    arguments = [*place(features, tmp_path), "trainer.wandb=offline", "trainer.checkpoint_every=6"]
    arguments += ["trainer.validate_every=1000"]
    crashed, resumed = FakeWandb(fail_at=9), FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", crashed)
    with pytest.raises(KeyboardInterrupt):
        train_here(arguments)
    monkeypatch.setitem(sys.modules, "wandb", resumed)
    assert train_here(arguments) is True
    first, second = (dict(fake.calls)["init"] for fake in (crashed, resumed))
    assert (first["id"], second["id"]) == (None, "id-of-the-run")
    assert first["mode"] == second["mode"] == "offline"
    logged = [call[1] for call in resumed.calls if call[0] == "log"]
    assert logged[0] == (7, {}), "the points after the checkpoint again, and never wandb's own step"
    assert all(options == {} for _, options in logged)
    assert ("define_metric", (("*",), {"step_metric": "step"})) in resumed.calls
    train = tmp_path / "run" / "train"
    told = [line["step"] for line in Journal.read(train / "metrics.jsonl") if "loss" in line]
    assert told == list(range(1, json.loads((train / "manifest.json").read_text())["steps"] + 1)), "each step once"


@pytest.mark.parametrize("rank", [0, 1])
def test_b27_the_first_process_alone_logs(tmp_path, monkeypatch, rank):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda *_, **__: None)
    accelerator = types.SimpleNamespace(
        is_main_process=rank == 0, is_local_main_process=True, num_processes=2, device=None
    )
    settings = TrainerConfig(wandb="offline")
    trainer: Any = types.SimpleNamespace(accelerator=accelerator, directory=tmp_path, settings=settings, name="run")
    journal = Trainer._open_journal(trainer, Progress())
    assert (journal is None, fake.calls == [], list(tmp_path.iterdir()) == []) == (rank == 1,) * 3


def test_b27_wandb_not_installed_is_one_clear_line(features, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(Refused, match="trainer.wandb=offline, but wandb is not installed"):
        train_here([*place(features, tmp_path), "trainer.wandb=offline"])
