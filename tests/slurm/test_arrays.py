"""Arrays whose tasks are each told what to do, with stubs for Slurm's commands: sweeps, and evaluations in parts."""

from __future__ import annotations

from pathlib import Path

import pytest

import conf
import slurm.submit
from models.errors import Refused
from tests.slurm.conftest import APART, PARTS, STAGES, Slurm, finish, measure, option, stages_of

SWEEP = ["--multirun", "optim.lr=1e-3,3e-4", "objective.loss=kl,nla"]


def test_a_sweep_is_not_streamed(stub: Slurm, overrides: list[str]) -> None:
    with pytest.raises(Refused, match="--multirun: the runs of a sweep share stored features; spool.gigabytes=null"):
        slurm.submit.main([*SWEEP, *overrides, "spool=bounded"])


def test_a_sweep_is_an_array_with_a_run_of_its_own_for_every_task(
    stub: Slurm, overrides: list[str], run: Path, capsys
) -> None:
    finish(run, overrides, "extract")
    slurm.submit.main([*SWEEP, *overrides])
    train, table = stub.submitted().values()
    assert (option(train, "array"), option(table, "dependency")) == ("0,1,2,3", "afterany:101")
    assert table[-6:] == ["train.sweep", *overrides]
    folder = Path(stub.environment(101)["DRAFTSMITH_TASKS"])
    names = ["mine-lr-0.001-loss-kl", "mine-lr-0.001-loss-nla", "mine-lr-0.0003-loss-kl", "mine-lr-0.0003-loss-nla"]
    for index, name in enumerate(names):
        place, *words = (folder / str(index)).read_text().splitlines()
        assert place == f"{run.parent / name}/train/checkpoints/step-*"
        task = conf.load(words)
        assert (task.name, task.directory) == (name, run.parent / name)
        assert f"{name}" == f"mine-lr-{task.optim.lr}-loss-{task.objective.loss}"
        assert (run.parent / name / "features").resolve() == (run / "features").resolve()

    (run.parent / names[1] / "train").mkdir()
    (run.parent / names[1] / "train/manifest.json").write_text('{"best_al": 1.5, "best_step": 3}')
    slurm.submit.main([*SWEEP, *overrides])
    assert option(stub.submitted()[103], "array") == "0,2,3", "only what is missing"
    stub.queue(("103_0", "train", "RUNNING"), run=run)
    slurm.submit.main([*SWEEP, *overrides])
    assert stages_of(stub)[4:] == ["table"] and option(stub.submitted()[105], "dependency") == "afterany:103"


def test_with_engines_every_method_on_every_engine_is_a_task_and_the_evaluation_joins_them(
    stub: Slurm, overrides: list[str], run: Path, capsys
) -> None:
    finish(run, overrides, *STAGES[:3])
    slurm.submit.main([*overrides, *APART, "cluster=gpu"])
    assert stages_of(stub) == ["measure", "evaluate"]
    array, joined = stub.submitted().values()
    assert (option(array, "array"), option(array, "signal")) == ("0,1,2,3", "B:USR1@120")
    assert {option(words, "gpus-per-node") for words in (array, joined)} == {"1"}
    assert option(joined, "dependency") == "afterok:101"
    assert joined[-len(overrides) - 5 :] == ["serve_eval", *overrides, *APART, "cluster=gpu"]
    folder = Path(stub.environment(101)["DRAFTSMITH_TASKS"])
    for index, name in enumerate(PARTS):
        progress, module, *words = (folder / str(index)).read_text().splitlines()
        assert (progress, module) == (f"{run}/eval/parts/{name}/*.json*", "serve_eval.apart")
        assert words == [*overrides, *APART, "cluster=gpu", f"eval.part={name}"]
        assert conf.load(words).eval.part == name
    assert f"4 x 1 node of 1 GPU 12 CPUs 96G 08:00:00: {', '.join(PARTS)}" in capsys.readouterr().out


def test_only_parts_that_are_missing_or_of_other_settings_are_submitted(
    stub: Slurm, overrides: list[str], run: Path
) -> None:
    words = [*overrides, *APART]
    finish(run, words, *STAGES)
    measure(words, run, *PARTS)
    slurm.submit.main(words)
    assert stub.submitted() == {}
    slurm.submit.main([*words, "engines.b.max_model_len=900"])
    assert option(stub.submitted()[101], "array") == "2,3"
    (run / "eval/parts" / PARTS[1] / "summary.json").unlink()
    slurm.submit.main(words)
    assert option(stub.submitted()[103], "array") == "1"
    assert stages_of(stub) == ["measure", "evaluate"] * 2


def test_what_is_made_again_is_measured_and_swept_again_as_a_whole(
    stub: Slurm, overrides: list[str], run: Path
) -> None:
    words = [*overrides, *APART]
    finish(run, words, "extract", "train", "evaluate")
    measure(words, run, *PARTS)
    slurm.submit.main(words)
    assert stages_of(stub) == ["export", "measure", "evaluate"]
    assert option(stub.submitted()[102], "array") == "0,1,2,3", "of another head"
    for name in ("mine-lr-0.001", "mine-lr-0.0003"):
        (run.parent / name / "train").mkdir(parents=True)
        (run.parent / name / "train/manifest.json").write_text('{"best_al": 1.5, "best_step": 3}')
    (run / "features/manifest.json").unlink()
    slurm.submit.main([*SWEEP[:2], *overrides])
    assert option(stub.submitted()[105], "array") == "0,1", "on other features"


def test_parts_that_are_not_possible_are_told_before_any_job_is_submitted(stub: Slurm, overrides: list[str]) -> None:
    with pytest.raises(Refused, match="engines.b: sglang has no method suffix"):
        slurm.submit.main([*overrides, *APART, "eval.methods=[{method: suffix, k: 3}]"])
    assert stub.submitted() == {}


def test_a_dry_run_shows_the_parts(overrides: list[str], run: Path, capsys) -> None:
    slurm.submit.main([*overrides, *APART, "dry_run=true"])
    told = capsys.readouterr().out
    assert f"measure   4 x 1 node without GPUs: {', '.join(PARTS)}\n" in told
    assert f"DRAFTSMITH_TASKS={run}/slurm/measure.tasks" in told and "--array=0,1,2,3" in told
    assert not run.exists()


def test_variables_of_the_jobs_are_in_their_environment_and_in_no_word_or_file(
    stub: Slurm, overrides: list[str], run: Path
) -> None:
    finish(run, overrides, "extract", "export")
    slurm.submit.main([*SWEEP, *overrides, "+cluster.environment.WANDB_API_KEY=very-secret"])
    slurm.submit.main([*overrides, *APART, "++cluster.environment.WANDB_API_KEY=very-secret"])
    for job, words in stub.submitted().items():
        assert stub.environment(job)["WANDB_API_KEY"] == "very-secret"
        assert "very-secret" not in " ".join(words), "Slurm shows a job's words to everybody"
    files = [path for path in run.rglob("*") if path.is_file()]
    assert run / "slurm/measure.tasks/0" in files and run / "slurm/train.tasks/0" in files
    assert not [path for path in files if "very-secret" in path.read_text()]
