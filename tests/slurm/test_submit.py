"""slurm.submit and slurm.status with stubs for Slurm's commands: what is submitted, after what, with which options."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import conf
import slurm.status
import slurm.submit
from models.errors import Refused
from slurm.chain import chain

ROOT = Path(__file__).resolve().parents[2]
STAGES = ["extract", "train", "export", "evaluate"]
SBATCH = """
count=$(cat {folder}/count 2>/dev/null || echo 100)
echo $((count + 1)) >{folder}/count
printf '%s\\n' "$@" >{folder}/sbatch-$((count + 1))
env >{folder}/env-$((count + 1))
echo "$((count + 1));cluster"
"""


class Slurm:
    """Stubs of Slurm's commands on the PATH: sbatch counts from 101, squeue shows `queue`."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        self.say("sbatch", SBATCH.format(folder=folder))
        self.say("scancel", f'echo "$1" >>{folder}/cancelled')
        self.say("squeue", f"cat {folder}/queue 2>/dev/null || true")
        patch.setenv("PATH", str(folder), prepend=":")

    def say(self, command: str, body: str) -> None:
        (self.folder / command).write_text(f"#!/bin/bash\n{body}\n")
        (self.folder / command).chmod(0o755)

    def queue(self, *jobs: tuple[str, str, str], run: Path) -> None:
        """(id, stage, state) of what is in the queue; an id like 7_[0-3] are the tasks of an array."""
        rows = [f"{id.split('_')[0]}|{id}|{state}|Dependency|{run.name}:{stage}|{run}" for id, stage, state in jobs]
        (self.folder / "queue").write_text("".join(row + "\n" for row in rows))

    def submitted(self) -> dict[int, list[str]]:
        return {int(f.name.split("-")[1]): f.read_text().splitlines() for f in sorted(self.folder.glob("sbatch-*"))}

    def environment(self, job: int) -> dict[str, str]:
        return dict(line.split("=", 1) for line in (self.folder / f"env-{job}").read_text().splitlines() if "=" in line)

    @property
    def cancelled(self) -> list[str]:
        record = self.folder / "cancelled"
        return record.read_text().split() if record.exists() else []


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "mine"


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    return ["name=mine", f"root={tmp_path}/runs", "target.path=somewhere", "data.conversations=[a b.jsonl]"]


def option(words: list[str], name: str) -> str | None:
    return next((word.partition("=")[2] for word in words if word.startswith(f"--{name}=")), None)


def finish(run: Path, overrides: list[str], *stages: str) -> None:
    """Leave what these stages leave when they are done."""
    values = conf.resolved(conf.load(overrides))
    for stage in chain(values, run):
        if stage.name in stages:
            stage.last.parent.mkdir(parents=True, exist_ok=True)
            stage.last.write_text('{"totals": {"tokens": 1, "bytes": 1}, "best_al": 2.0, "best_step": 1}')
            (run / "config").mkdir(exist_ok=True)
            OmegaConf.save(OmegaConf.create(values), run / "config" / f"{stage.record}.yaml")


def stages_of(stub: Slurm) -> list[str]:
    return [(option(words, "job-name") or "").split(":")[1] for words in stub.submitted().values()]


def test_every_stage_waits_for_the_one_before_it(stub: Slurm, overrides: list[str], run: Path) -> None:
    slurm.submit.main(overrides)
    assert stages_of(stub) == STAGES
    jobs = stub.submitted()
    assert [option(words, "dependency") for words in jobs.values()] == [
        None,
        "afterok:101",
        "afterok:102",
        "afterok:103",
    ]
    assert all("--kill-on-invalid-dep=yes" in words for words in list(jobs.values())[1:])
    assert jobs[101][-5:] == ["featurize", *overrides]
    assert jobs[102][-4:] == overrides
    assert Path(jobs[102][-5]).name == "train.sbatch"
    assert all(option(words, "comment") == str(run) for words in jobs.values())
    assert json.loads((run / "slurm/jobs.json").read_text())["jobs"] == dict(zip(STAGES, map(str, jobs), strict=True))


def test_a_packaged_target_is_prepared_and_data_of_its_own_is_generated_first(
    stub: Slurm, overrides: list[str], tmp_path: Path
) -> None:
    own = f"data.conversations=[{tmp_path}/runs/mine/conversations.jsonl.gz]"
    slurm.submit.main([*overrides, "target=smollm2-135m", own])
    assert stages_of(stub) == ["prepare", "generate", *STAGES]


def test_the_cluster_says_what_each_job_asks_for(stub: Slurm, overrides: list[str], monkeypatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "7")
    monkeypatch.setenv("RANK", "3")
    slurm.submit.main(
        [*overrides, "cluster=gpu", "cluster.train.nodes=16", "cluster.partition=fast", "cluster.export.partition=slow"]
        + ["cluster.account=us", "cluster.qos=high", "cluster.constraint=h200", "cluster.options=['--exclude=n1']"]
        + ["cluster.modules=[cuda/13, gcc]", "+cluster.environment.NCCL_SOCKET_IFNAME=ib0", "cluster.requeues=9"]
    )
    extract, train, export, evaluate = stub.submitted().values()
    wanted = {"nodes": "16", "gpus-per-node": "8", "partition": "fast", "account": "us", "qos": "high"}
    wanted |= {"constraint": "h200", "exclude": "n1", "time": "24:00:00", "mem": "768G", "cpus-per-task": "96"}
    assert {name: option(train, name) for name in wanted} == wanted
    assert option(train, "signal") == option(extract, "signal") == "B:USR1@120"
    assert option(evaluate, "signal") is None
    assert (option(extract, "array"), option(train, "array")) == ("0-7", None)
    assert (option(export, "partition"), option(export, "gpus-per-node")) == ("slow", None)
    told = stub.environment(102)
    assert told["NCCL_SOCKET_IFNAME"] == "ib0"
    assert told["DRAFTSMITH_MODULES"] == "cuda/13 gcc"
    assert told["DRAFTSMITH_REQUEUES"] == "9"
    assert not {"SLURM_NTASKS", "RANK"} & told.keys(), "the job that we are in ourselves is none of its business"


def test_a_second_submission_submits_what_is_missing(stub: Slurm, overrides: list[str], run: Path, capsys) -> None:
    finish(run, overrides, "extract")
    stub.queue(("7", "train", "RUNNING"), ("8", "export", "PENDING"), run=run)
    slurm.submit.main(overrides)
    assert stages_of(stub) == ["evaluate"]
    assert option(stub.submitted()[101], "dependency") == "afterok:8"
    told = capsys.readouterr().out
    assert re.search(r"extract +finished\ntrain +job 7, RUNNING\nexport +job 8, PENDING \(Dependency\)\n", told)


def test_what_waits_for_a_job_that_failed_is_submitted_again(stub: Slurm, overrides: list[str], run: Path) -> None:
    finish(run, overrides, "extract", "evaluate")
    stub.queue(("8", "export", "PENDING"), run=run)
    slurm.submit.main(overrides)
    assert stub.cancelled == ["8"]
    assert stages_of(stub) == ["train", "export", "evaluate"]


def test_what_runs_on_something_that_must_be_made_again_is_not_touched(stub: Slurm, overrides, run: Path) -> None:
    stub.queue(("8", "export", "RUNNING"), run=run)
    with pytest.raises(Refused, match="export is running .job 8.*scancel 8"):
        slurm.submit.main(overrides)
    assert (stub.submitted(), stub.cancelled) == ({}, [])


def test_a_run_of_the_same_name_elsewhere_is_another_run(stub: Slurm, overrides: list[str], tmp_path: Path) -> None:
    stub.queue(("8", "extract", "RUNNING"), run=tmp_path / "others" / "mine")
    slurm.submit.main(overrides)
    assert stages_of(stub) == STAGES


def test_b42_a_run_is_one_folder_whenever_it_is_submitted_and_jobs_start_where_it_was(
    stub: Slurm, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = ["root=runs" if word.startswith("root=") else word for word in overrides]
    slurm.submit.main(relative)
    slurm.submit.main(relative)
    jobs = stub.submitted()
    assert {stub.environment(job)["DRAFTSMITH_RUN"] for job in jobs} == {str(tmp_path / "runs/mine")}
    assert {stub.environment(job)["PWD"] for job in jobs} == {str(tmp_path)}
    for words in jobs.values():
        assert option(words, "chdir") is None, "relative paths of data are from here"
        assert words[-len(relative) :] == relative
    first, second = ([word for word in jobs[job] if not word.startswith("--dep")] for job in (102, 106))
    assert first == second, "nothing in a job's words or paths is of the moment"


def test_other_settings_make_a_stage_and_all_after_it_run_again(stub: Slurm, overrides: list[str], run: Path) -> None:
    finish(run, overrides, *STAGES)
    slurm.submit.main([*overrides, "eval.k=3", "cluster=gpu"])
    assert stages_of(stub) == ["evaluate"]
    slurm.submit.main([*overrides, "optim.lr=3e-4"])
    assert stages_of(stub)[1:] == ["train", "export", "evaluate"]


def test_a_submission_that_slurm_refuses_halfway_is_completed_by_the_next(stub: Slurm, overrides, run: Path) -> None:
    stub.say(
        "sbatch",
        f"[[ -e {stub.folder}/sbatch-102 ]] && {{ echo no such account >&2; exit 1; }}"
        + SBATCH.format(folder=stub.folder),
    )
    with pytest.raises(Refused, match="sbatch: no such account"):
        slurm.submit.main(overrides)
    stub.say("sbatch", SBATCH.format(folder=stub.folder))
    stub.queue(
        ("101_[0-1]", "extract", "PENDING"), ("101_2", "extract", "RUNNING"), ("102", "train", "PENDING"), run=run
    )
    slurm.submit.main(overrides)
    assert stages_of(stub) == STAGES


MISTAKES = ["cluster.trainn.nodes=2", "cluster.train.nodes=0", "cluster.extract.nodes=2", "cluster=nowhere"]
MISTAKES += ["cluster.export.tasks=2", "cluster.container.kind=docker"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_b43_a_mistake_is_told_before_any_job_is_submitted(stub: Slurm, overrides: list[str], mistake: str) -> None:
    with pytest.raises(Refused, match=re.escape(mistake.partition("=")[0].split(".")[-1])):
        slurm.submit.main([*overrides, mistake])
    assert stub.submitted() == {}


def test_a_dry_run_shows_sizes_commands_and_scripts_and_submits_nothing(
    overrides: list[str], run: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    slurm.submit.main([*overrides, "cluster=gpu", "cluster.train.nodes=3", "dry_run=true"])
    told = capsys.readouterr().out
    assert re.search(r"^train +3 nodes of 8 GPUs \(24 processes\) 96 CPUs 768G 24:00:00$", told, re.MULTILINE)
    assert "'--dependency=afterok:<job of extract>'" in told
    for script in ("stage.sbatch", "train.sbatch", "job.sh"):
        assert (ROOT / "slurm" / script).read_text() in told
    assert not run.exists()


def test_a_dry_run_shows_no_credentials(overrides: list[str], capsys) -> None:
    slurm.submit.main([*overrides, "+cluster.environment.WANDB_API_KEY=very-secret", "dry_run=true"])
    told = capsys.readouterr().out
    assert "WANDB_API_KEY='***'" in told
    assert "cluster.environment.WANDB_API_KEY=***" in told
    assert "very-secret" not in told


SWEEP = ["--multirun", "optim.lr=1e-3,3e-4", "objective.loss=kl,nla"]


def test_a_sweep_is_an_array_with_a_run_of_its_own_for_every_task(
    stub: Slurm, overrides: list[str], run: Path, capsys
) -> None:
    finish(run, overrides, "extract")
    slurm.submit.main([*SWEEP, *overrides])
    train, table = stub.submitted().values()
    assert (option(train, "array"), option(table, "dependency")) == ("0,1,2,3", "afterany:101")
    assert table[-5:] == ["train.sweep", *overrides]
    folder = Path(stub.environment(101)["DRAFTSMITH_SWEEP"])
    names = ["mine-lr-0.001-loss-kl", "mine-lr-0.001-loss-nla", "mine-lr-0.0003-loss-kl", "mine-lr-0.0003-loss-nla"]
    for index, name in enumerate(names):
        place, *words = (folder / str(index)).read_text().splitlines()
        assert place == str(run.parent / name)
        task = conf.load(words)
        assert (task.name, task.directory) == (name, run.parent / name)
        assert f"{name}" == f"mine-lr-{task.optim.lr}-loss-{task.objective.loss}"
        assert (run.parent / name / "features").resolve() == (run / "features").resolve()

    (run.parent / names[1] / "train").mkdir()
    (run.parent / names[1] / "train/manifest.json").write_text('{"best_al": 1.5, "best_step": 3}')
    slurm.submit.main([*SWEEP, *overrides])
    assert option(stub.submitted()[103], "array") == "0,2,3", "only what is missing"


def test_status_tells_progress_by_what_is_on_disk(stub: Slurm, overrides: list[str], run: Path, capsys) -> None:
    slurm.submit.main(overrides)
    (run / "features/shards").mkdir(parents=True)
    for index in range(3):
        (run / f"features/shards/{index}.json").touch()
    stub.queue(
        ("101_[3-7]", "extract", "PENDING"), ("101_1", "extract", "RUNNING"), ("102", "train", "PENDING"), run=run
    )
    stub.say("sacct", "echo CANCELLED by 0")
    capsys.readouterr()
    assert slurm.status.main(["mine", f"root={run.parent}"]) == 1
    told = capsys.readouterr().out
    assert re.search(r"^extract +5 PENDING \+ RUNNING +101 +3 shards$", told, re.MULTILINE)
    assert re.search(r"^train +PENDING \(Dependency\) +102$", told, re.MULTILINE)
    assert re.search(r"^export +CANCELLED +103$", told, re.MULTILINE)
    assert "export: job 103 CANCELLED\n    it never began" in told


def test_status_shows_the_end_of_the_log_of_what_failed(stub: Slurm, overrides: list[str], run: Path, capsys) -> None:
    slurm.submit.main(overrides)
    (run / "slurm/extract-101.log").write_text("".join(f"line {index}\n" for index in range(30)))
    stub.say("sacct", "echo FAILED")
    capsys.readouterr()
    assert slurm.status.main(["mine", f"root={run.parent}"]) == 1
    told = capsys.readouterr().out
    assert f"{run}/slurm/extract-101.log\n    line 22\n" in told
    assert "line 29" in told


def test_status_of_what_was_never_submitted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="was not submitted"):
        slurm.status.main(["mine", f"root={tmp_path}"])


def commands() -> list[str]:
    """Every call of slurm.submit in the documents."""
    texts = [(ROOT / name).read_text() for name in ("README.md", "slurm/submit.py")]
    return [
        match[1]
        for text in texts
        for match in re.finditer(r"^    python -m slurm\.submit ([^#\n]*)", text, re.MULTILINE)
    ]


@pytest.mark.parametrize("command", commands())
def test_b43_every_submission_in_the_documents_composes_and_renders(command: str, tmp_path: Path, capsys) -> None:
    slurm.submit.main([*shlex.split(command), f"root={tmp_path}", "dry_run=true"])  # nothing is finished there
    assert "sbatch --parsable" in capsys.readouterr().out


def test_there_are_submissions_in_the_documents() -> None:
    assert len(commands()) >= 3
