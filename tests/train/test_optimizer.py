"""The learning rate is a function of the optimizer step alone, of the shape its name says."""

from __future__ import annotations

import pytest
import torch

from models.errors import Refused
from tests.train.test_objective import random_head
from train.config import OptimConfig
from train.optimizer import Optimizer, schedule

TOTAL = 100


def rates(**settings) -> list[float]:
    optim = OptimConfig(**{"warmup_steps": 10} | settings)
    return [schedule(optim, step, TOTAL) for step in range(TOTAL)]


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_every_schedule_warms_up_to_its_peak_and_never_rises_again(name):
    shape = rates(schedule=name)
    assert shape[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert all(later <= earlier for earlier, later in zip(shape[9:], shape[10:], strict=False))
    assert shape[-1] == (1.0 if name == "constant" else pytest.approx(0, abs=0.06))


def test_wsd_stays_at_the_peak_until_its_last_share_and_ends_at_the_final_one():
    shape = rates(schedule="wsd", decay_share=0.25, final_share=0.1)
    assert shape[9:76] == [1.0] * 67
    assert shape[76] == pytest.approx(1 - 0.9 / 25)
    assert shape[99] == pytest.approx(0.1 + 0.9 / 25)


WRONG = [
    {"schedule": "step"}, {"decay_share": 0.0}, {"ema_decay": 1.0}, {"max_grad_norm": -1.0}, {"lr": -1e-4},
    {"lr": float("nan")}, {"muon_lr": 0.0}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}, {"final_share": 2.0},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_an_impossible_setting_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=f"optim.{next(iter(wrong))}="):
        OptimConfig(**wrong)


def test_b26_optimizer_state_of_a_part_of_the_weights_is_refused():
    head = random_head()
    moments = {
        f"{name}/{key}": torch.zeros_like(parameter)
        for name, parameter in head.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }
    Optimizer(head, OptimConfig()).load_moments(moments, 3)
    del moments["norm.weight/exp_avg"], moments["norm.weight/exp_avg_sq"]
    with pytest.raises(Refused, match=r"no optimizer state for norm\.weight"):
        Optimizer(head, OptimConfig()).load_moments(moments, 3)
