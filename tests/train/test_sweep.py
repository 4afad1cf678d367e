"""A sweep in this place: one run after the other on the features of one, and a table that ranks them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from models.errors import Refused
from tests.train.runs import ROOT, place
from train.__main__ import sweep
from train.signals import PREEMPTED
from train.sweep import begin, over_seeds, ranking, render_table, run_all, swept


def trained(run: Path, al: float | None) -> None:
    (run / "train").mkdir(parents=True, exist_ok=True)
    (run / "train/manifest.json").write_text(json.dumps({"best_al": al, "best_step": 7}))


def test_multirun_trains_every_combination_and_ends_with_the_table(features, tmp_path: Path) -> None:
    arguments = [*place(features, tmp_path), "trainer.epochs=1", "trainer.wandb=disabled"]
    command = [sys.executable, "-m", "train", "--multirun", *arguments, "optim.warmup_steps=1,100"]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    names = ["run-warmup_steps-1", "run-warmup_steps-100"]
    best = {name: json.loads((tmp_path / name / "train/manifest.json").read_text())["best_al"] for name in names}
    table = re.findall(r"(run-warmup_steps-\d+) .*?(\d\.\d{3}).*finished", ended.stdout)
    assert table == [(name, f"{best[name]:.3f}") for name in sorted(names, key=lambda name: (-best[name], name))]
    assert not (tmp_path / "run/train").exists(), "the run that has the features is not trained"


def test_a_dry_run_of_a_sweep_tells_of_every_run_and_writes_nothing(features, tmp_path: Path, capsys) -> None:
    arguments = [*place(features, tmp_path), "trainer.wandb=disabled", "dry_run=true"]
    before = sorted(tmp_path.rglob("*"))
    assert sweep([*arguments, "trainer.epochs=1,2"]) == 0
    told = capsys.readouterr().out
    assert re.findall(r"== (\S+)|steps: [\d,]+ in (\d) epochs", told) == [
        ("run-epochs-1", ""),
        ("", "1"),
        ("run-epochs-2", ""),
        ("", "2"),
    ]
    assert told.count(f"features: {tmp_path}/run/features\n") == 2, "those of the run that has them"
    with pytest.raises(Refused, match="featurize.final_everywhere=true"):
        sweep([*arguments, "draft.vocab_size=null", "draft.algorithm=eagle3,mtp"])
    assert sorted(tmp_path.rglob("*")) == before


def test_runs_are_ranked_by_simulated_al_and_those_without_one_come_last(tmp_path: Path, capsys) -> None:
    begin(tmp_path / "base", ["base-a", "base-b", "base-c", "base-d"])
    trained(tmp_path / "base-a", 1.5)
    trained(tmp_path / "base-c", 2.5)
    trained(tmp_path / "base-d", None)
    journal = tmp_path / "base-b/train/metrics.jsonl"
    journal.parent.mkdir(parents=True)
    lines = [{"step": 5, "val_al": 1.9}, {"step": 10, "val_al": 1.7}, {"step": 12, "loss": 1.0}]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [name for name, _ in ranking(tmp_path / "base")] == ["base-c", "base-b", "base-a", "base-d"]
    assert dict(ranking(tmp_path / "base"))["base-b"] == {"al": 1.9, "step": 5, "state": "at step 12"}
    render_table(tmp_path / "base")
    told = capsys.readouterr().out
    assert re.search(r"base-c .* 2\.500 .*finished", told)
    assert re.search(r"base-d .* n/a .*finished", told)


def test_seeds_of_one_setting_are_told_together_with_their_spread(tmp_path: Path, capsys) -> None:
    names = [f"base-lr-{lr}-seed-{seed}" for lr in ("1e-3", "3e-4") for seed in (0, 1, 12)]
    begin(tmp_path / "base", [*names, "base-lr-0.1-seed-0"])
    for name, al in zip(names, (2.0, 2.3, 2.15, 1.5, 1.7, None), strict=True):
        trained(tmp_path / name, al)
    trained(tmp_path / "base-lr-0.1-seed-0", 1.0)
    assert over_seeds(tmp_path / "base") == {"base-lr-1e-3": [2.0, 2.15, 2.3], "base-lr-3e-4": [1.5, 1.7]}
    render_table(tmp_path / "base")
    told = capsys.readouterr().out
    assert "base-lr-1e-3: mean AL 2.150 of 3 seeds, from 2.000 to 2.300" in told
    assert "base-lr-3e-4: mean AL 1.600 of 2 seeds, from 1.500 to 1.700" in told


def test_a_table_in_a_log_is_not_cut_where_terminals_end(tmp_path: Path, capsys) -> None:
    name = "base-" + "a" * 70
    begin(tmp_path / "base", [name])
    trained(tmp_path / name, 2.0)
    render_table(tmp_path / "base")
    assert f"{name} │             2.000 │" in capsys.readouterr().out


def test_a_sweep_that_goes_on_keeps_its_earlier_runs(tmp_path: Path) -> None:
    begin(tmp_path / "base", ["base-a"])
    begin(tmp_path / "base", ["base-b", "base-a"])
    assert swept(tmp_path / "base") == ["base-a", "base-b"]


def test_features_that_are_a_runs_own_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "base-a/features").mkdir(parents=True)
    with pytest.raises(Refused, match="base-a/features is a folder of its own"):
        begin(tmp_path / "base", ["base-a"])


def test_several_processes_of_one_job_would_all_train_everything(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Refused, match="slurm.submit --multirun"):
        run_all([["name=a"]])


@pytest.mark.parametrize("last_words", ["exit 1", "exit 0", "kill -9 $$"])
def test_a_signal_ends_the_sweep_however_the_run_in_progress_takes_it(
    last_words: str, tmp_path: Path, monkeypatch
) -> None:
    stub = tmp_path / "python"
    stub.write_text(
        f'#!/bin/sh\necho "$3" >>{tmp_path}/begun\ntrap "{last_words}" TERM\n'
        "i=0; while [ $i -lt 600 ]; do kill -TERM $PPID; sleep 0.1; i=$((i+1)); done\n"
    )
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    assert run_all([["name=a"], ["name=b"]]) == (1 if last_words == "exit 1" else PREEMPTED)
    assert (tmp_path / "begun").read_text().split() == ["name=a"]


def test_a_run_that_fails_does_not_keep_the_next_from_training(tmp_path: Path, monkeypatch) -> None:
    stub = tmp_path / "python"
    stub.write_text(
        f'#!/bin/sh\necho "$3" >>{tmp_path}/begun\n[ "$3" != name=a ] || exit 2\n[ "$3" != name=c ] || exit 75\n'
    )
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    assert run_all([["name=a"], ["name=b"]]) == 2
    assert run_all([["name=b"], ["name=c"], ["name=d"]]) == 75, "asked to stop: the rest is for the next time"
    assert (tmp_path / "begun").read_text().split() == ["name=a", "name=b", "name=b", "name=c"]
