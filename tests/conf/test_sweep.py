"""--multirun: which runs a command line with lists of values stands for."""

from __future__ import annotations

import pytest

import conf
from conf.sweep import expand
from models.errors import Refused

BASE = ["name=mine", "target.path=somewhere", "data.conversations=['a b.jsonl', c.jsonl]"]


def test_every_combination_is_a_run_named_after_its_values() -> None:
    sweep = expand([*BASE, "optim.lr=1e-3,3e-4", "trainer=single,ddp", "trainer.epochs=2"])
    assert sweep.base.name == "mine"
    names = ["mine-lr-0.001-trainer-single", "mine-lr-0.001-trainer-ddp"]
    names += ["mine-lr-0.0003-trainer-single", "mine-lr-0.0003-trainer-ddp"]
    assert [job.name for job in sweep.jobs] == names
    runs = [conf.load(job.overrides) for job in sweep.jobs]
    assert [run.name for run in runs] == names
    assert [run.optim.lr for run in runs] == [1e-3, 1e-3, 3e-4, 3e-4]
    assert [run.trainer.pack_tokens for run in runs] == [runs[0].trainer.pack_tokens, runs[1].trainer.pack_tokens] * 2
    assert all(run.data.conversations == ["a b.jsonl", "c.jsonl"] for run in runs)
    assert all(run.trainer.epochs == 2 for run in runs)


def test_a_run_keeps_its_name_when_the_sweep_gets_more_values() -> None:
    few, many = ({job.name for job in expand([*BASE, f"optim.lr={lr}"]).jobs} for lr in ("1e-3,3e-4", "1e-4,3e-4,1e-3"))
    assert few < many


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], "at least one key with several values"),
        (["data.max_tokens=100,200"], "data.max_tokens.*share features"),
        (["target.aux_layers=[1,2,3],[2,3,4]"], "target.aux_layers.*share features"),
        (["name=a,b"], "name.*share features"),
        (["experiment=demo,demo"], "experiment.*share features"),
        (["optim.lr=range(1,3)"], None),
        (["optim.lr=interval(0,1)"], "optim.lr.*list the values"),
        (["optim.lrr=1,2"], "lrr"),
        (["optim.lr=1,-1"], "optim.lr=-1"),
        (["optim.lr=1,1.0,1"], "called alike"),
    ],
)
def test_b43_what_cannot_be_swept_is_refused(overrides: list[str], told: str | None) -> None:
    if told is None:
        assert len(expand([*BASE, *overrides]).jobs) == 2
        return
    with pytest.raises(Refused, match=told):
        expand([*BASE, *overrides])
