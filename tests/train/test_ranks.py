"""Whatever the strategy and number of processes: the same gradients, weights, optimizer state and average."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.errors import Refused
from tests.train import runs, shared_steps
from train import launch, ranks, resume
from train.config import OptimConfig, TrainerConfig
from train.optimizer import Average

ZERO = [] if importlib.util.find_spec("deepspeed") is None else ["zero1", "zero2", "zero3"]
STRATEGIES = ["ddp", "fsdp2", *ZERO]
PAIRS = list(zip(STRATEGIES, STRATEGIES[1:] + STRATEGIES[:1], strict=True))

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Six steps by one process in `one`, and by two with every strategy in `two`."""
    root = tmp_path_factory.mktemp("shared")
    two = ["tests.train.shared_steps", str(root / "two"), *STRATEGIES]
    one = ["tests.train.shared_steps", str(root / "one"), "ddp"]
    runs.finish([*runs.start(two, two), *runs.start(one)])
    return root


def read(trained: Path, name: str, process: int = 0) -> Tensors:
    return load_file(trained / f"{name}.{process}.safetensors")


def part(tensors: Tensors, kind: str) -> Tensors:
    return {name: value for name, value in tensors.items() if name.startswith(kind)}


def assert_equals(got: Tensors, wanted: Tensors) -> None:
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        largest = wanted[name].abs().max().item()
        assert (value - wanted[name]).abs().max().item() <= 1e-5 * largest, name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_b16_two_uneven_processes_train_as_one_does(trained, strategy):
    one, two = read(trained, "one/ddp"), read(trained, f"two/{strategy}")
    for kind in ("norms", "seen/", "trained/", "average/", "moments/"):
        assert_equals(part(two, kind), part(one, kind))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_b16_weights_are_identical_on_both_processes(trained, strategy):
    first, second = (part(read(trained, f"two/{strategy}", process), "seen/") for process in (0, 1))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_b22_every_strategy_updates_once_a_step_at_the_rate_of_that_step_and_so_does_the_one_that_goes_on(
    trained, before, after
):
    factors = [0.5, 1, 1, *((1 + math.cos(math.pi * quarter)) / 2 for quarter in (0.25, 0.5, 0.75))]
    wanted = shared_steps.OPTIM.lr * torch.tensor(factors)
    torch.testing.assert_close(read(trained, "one/ddp")["rates"], wanted)
    for process in (0, 1):
        torch.testing.assert_close(read(trained, f"two/{before}", process)["rates"], wanted)
        resumed = read(trained, f"two/{before}-{after}", process)["rates"]
        torch.testing.assert_close(resumed, wanted[shared_steps.SAVED :])


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_b26_a_checkpoint_of_one_strategy_goes_on_with_another(trained, before, after):
    straight, resumed = read(trained, "one/ddp"), read(trained, f"two/{before}-{after}")
    for kind in ("seen/", "trained/", "average/", "moments/"):
        assert_equals(part(resumed, kind), part(straight, kind))
    torch.testing.assert_close(resumed["norms"], straight["norms"][shared_steps.SAVED :], rtol=1e-5, atol=0)


@pytest.mark.parametrize(("run", "strategy"), [("one", "ddp"), *(("two", strategy) for strategy in STRATEGIES)])
def test_b26_a_checkpoint_records_how_many_processes_wrote_it_and_how(trained, run, strategy):
    state = json.loads((trained / run / strategy / resume.name_of(shared_steps.SAVED) / "state.json").read_text())
    assert (state["processes"], state["strategy"]) == ({"one": 1, "two": 2}[run], strategy)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_a_process_holds_its_share_only(trained, strategy):
    weights, state = read(trained, "two/ddp")["held"].tolist()
    for process in (0, 1):
        own_weights, own_state = read(trained, f"two/{strategy}", process)["held"].tolist()
        assert own_state < 0.55 * state
        assert own_weights < 0.55 * weights if strategy in ("fsdp2", "zero3") else own_weights == weights


def test_when_the_first_process_fails_the_others_leave_quietly(trained):
    assert [read(trained, "two/failed", process)["left"].item() for process in (0, 1)] == [1, 2]


def test_muon_trains_on_two_processes_as_on_one(trained):
    one, two = read(trained, "one/muon"), read(trained, "two/muon")
    assert any("momentum_buffer" in name for name in one)
    for kind in ("norms", "seen/", "moments/"):
        assert_equals(part(two, kind), part(one, kind))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_b05_gradients_that_are_not_finite_are_refused_and_reach_no_weight(value):
    accelerator: Any = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
    objective = shared_steps.objective_of(1)
    shared = ranks.share(accelerator, "ddp", objective, OptimConfig())
    for parameter in objective.head.parameters():
        parameter.grad = torch.ones_like(parameter)
    objective.head.norm.weight.grad[0] = value
    before = {name: weight.clone() for name, weight in objective.head.state_dict().items()}
    with pytest.raises(Refused, match="gradients of step 1 are not finite"):
        shared.update(1.0, 1)
    assert all(torch.equal(weight, before[name]) for name, weight in objective.head.state_dict().items())


def test_the_average_rises_to_its_decay_and_is_the_weights_only_while_applied():
    piece = torch.tensor([1.0])
    average, wanted = Average({"w": piece}, decay=0.5), 1.0
    for step in range(1, 30):
        piece.fill_(float(step))
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        wanted = decay * wanted + (1 - decay) * step
    with average.applied():
        assert piece.item() == pytest.approx(wanted, rel=1e-6)
    assert piece.item() == 29
    assert average.values["w"].item() == pytest.approx(wanted, rel=1e-6)


LAUNCHES = {
    "a strategy that shards, by one process": ({}, {"strategy": "fsdp2"}, "torchrun --nproc_per_node"),
    "tasks of srun without a launcher": ({"SLURM_STEP_NUM_TASKS": "4"}, {}, "srun started 4 tasks"),
    "accelerate launch --use_deepspeed for ddp": (
        {"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
        {"strategy": "ddp"},
        "asked for zero2, but trainer.strategy=ddp",
    ),
    "accelerate launch with another stage": (
        {"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
        {"strategy": "zero2"},
        "asked for zero3, but trainer.strategy=zero2",
    ),
    "accelerate launch --use_fsdp for ddp": (
        {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"},
        {"strategy": "ddp"},
        "asked for fsdp, but trainer.strategy=ddp",
    ),
    "accelerate launch --cpu for ZeRO": (
        {"WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"},
        {"strategy": "zero1"},
        "--cpu excludes trainer.strategy=zero1",
    ),
}


@pytest.mark.parametrize(("variables", "settings", "told"), LAUNCHES.values(), ids=LAUNCHES.keys())
def test_a_launch_that_contradicts_the_settings_is_refused_in_one_line(monkeypatch, variables, settings, told):
    for name in ("WORLD_SIZE", "ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refused, match=told) as refused:
        launch.start(TrainerConfig(**settings), OptimConfig())
    assert "\n" not in str(refused.value)


def test_muon_with_sharded_matrices_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Refused, match=r"optim.muon_lr=0.01 .* trainer.strategy=fsdp2"):
        launch.start(TrainerConfig(strategy="fsdp2"), OptimConfig(muon_lr=0.01))
