"""slurm/*.sbatch: what the jobs ask srun to do, rendered with stubs (a real Slurm: tests/integration/slurm)."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*(ROOT / "slurm").glob("*.sh"), *(ROOT / "slurm").glob("*.sbatch"), ROOT / ".ci/run"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_parses_and_is_clean(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    shellcheck = shutil.which(
        "shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    assert shellcheck, "shellcheck is not installed; the extra dev has it"
    subprocess.run([shellcheck, "-x", "--shell=bash", str(script)], check=True, cwd=ROOT)


RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
TOLD = (*RENDEZVOUS, "OMP_NUM_THREADS")
SRUN = """
group=$(printf '%s\\n' "$@" | sed -n 's/^--het-group=//p')
while [[ $1 == --* ]]; do echo "$1" >>{record}/srun$group; shift; done
env | grep -E '^SLURM_(CPUS|TRES)_PER_TASK=' >{record}/inherited
if [[ $group ]]; then {beside}; exec "$@"; fi
{signal}
SLURM_PROCID={task} SLURM_LOCALID=$(({task} % {gpus})) exec "$@"
"""
SCONTROL = """
[[ $1 == show ]] || {{ echo "$@" >>{record}/requeued; exit; }}
[[ $2 == hostnames && $3 == 'node[101-{last}]' ]] || exit 1
seq --format=node%g 101 {last}
"""
PYTHON = """
trap 'echo asked >>{record}/asked; exit 75' USR1
for word in "$@"; do printf 'word %s\\n' "$word"; done
env | grep -E '^({names})='
{work}
exit {ends_with}
"""


@dataclasses.dataclass
class Task:
    """What one task of a job was started as, and what the job did after it."""

    command: list[str]
    environment: dict[str, str]
    srun: list[str]
    requeued: str | None
    status: int
    said: str


@dataclasses.dataclass
class Job:
    """A job of a script, with stubs for what it calls; `render` runs it as one of its tasks only."""

    folder: Path
    script: str
    nodes: int = 1
    gpus: int = 0
    id: int = 101
    state: str = "RUNNING"
    ends_with: int = 0
    work: str = ""
    signal: str = ""
    beside: str = ""
    away: str = ""
    variables: dict[str, str] = dataclasses.field(default_factory=dict)

    def render(self, *words: str, task: int = 0) -> Task:
        stubs, record = self.folder / "bin", self.folder / "record"
        shutil.rmtree(record, ignore_errors=True)
        for folder in (stubs, record, self.folder / "run/slurm"):
            folder.mkdir(parents=True, exist_ok=True)
        given = {"record": record, "task": task, "gpus": max(1, self.gpus), "last": 100 + self.nodes}
        given |= {"names": "|".join(TOLD), "ends_with": self.ends_with, "work": self.work, "signal": self.signal}
        given |= {"beside": self.beside or ":"}
        bodies = {
            "srun": SRUN,
            "scontrol": SCONTROL,
            "python": PYTHON,
            "apptainer": 'while [[ $1 != *.sif ]]; do shift; done; shift; exec "$@"',
        }
        bodies["squeue"] = f"echo {self.state}"
        if self.away:
            (stubs / "sleep").write_text("#!/bin/sh\n")  # so long does nobody wait here
            (stubs / "sleep").chmod(0o755)
        fails = f"[[ $1 == show ]] || (($(wc -l <{record}/tries) >= 5)) || {{ echo once >>{record}/tries; exit 1; }}\n"
        (record / "tries").touch()
        for name, body in bodies.items():
            text = body.format(**given) if name in ("srun", "scontrol", "python") else body
            text = fails + text if name == self.away else text
            (stubs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (stubs / name).chmod(0o755)
        ours = {
            "SLURM_JOB_NUM_NODES": str(self.nodes),
            "SLURM_JOB_ID": str(self.id),
            "SLURM_JOB_NODELIST": f"node[101-{100 + self.nodes}]",
            "DRAFTSMITH_ROOT": str(ROOT),
            "DRAFTSMITH_PYTHON": str(stubs / "python"),
            "DRAFTSMITH_RUN": str(self.folder / "run"),
            "DRAFTSMITH_STAGE": "train",
            "DRAFTSMITH_PROGRESS": str(self.folder / "run/train/checkpoints/step-*"),
            "DRAFTSMITH_REQUEUES": "2",
            "DRAFTSMITH_PROCESSES": "1",
        } | ({"SLURM_GPUS_ON_NODE": str(self.gpus)} if self.gpus else {})
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM", "DRAFTSMITH")) and n not in TOLD}
        environment = inherited | {"PATH": f"{stubs}:{inherited['PATH']}"} | ours | self.variables
        result = subprocess.run(
            ["bash", str(ROOT / "slurm" / self.script), *words],
            env=environment, cwd=self.folder, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        lines = result.stdout.splitlines()
        told = dict(line.split("=", 1) for line in lines if line.split("=", 1)[0] in TOLD)
        command = [line.removeprefix("word ") for line in lines if line.startswith("word ")]
        options = (record / "srun").read_text().splitlines() if (record / "srun").exists() else []
        requeued = (record / "requeued").read_text().strip() if (record / "requeued").exists() else None
        return Task(command, told, options, requeued, result.returncode, result.stdout + result.stderr)

    def checkpoint(self, step: int) -> None:
        (self.folder / f"run/train/checkpoints/step-{step}").mkdir(parents=True)


@pytest.mark.parametrize("nodes", [1, 3, 16])
def test_b45_processes_meet_at_the_first_host_of_the_allocation(tmp_path: Path, nodes: int) -> None:
    job = Job(tmp_path, "train.sbatch", nodes=nodes, gpus=8)
    for task in sorted({0, 5, 8 * nodes - 8, 8 * nodes - 1}):
        started = job.render("experiment=demo", "name=two words", task=task)
        assert started.command == ["-u", "-m", "train", "experiment=demo", "name=two words"], started.said
        assert started.environment == {
            "MASTER_ADDR": "node101",
            "MASTER_PORT": "10101",
            "WORLD_SIZE": str(8 * nodes),
            "LOCAL_WORLD_SIZE": "8",
            "RANK": str(task),
            "LOCAL_RANK": str(task % 8),
            "OMP_NUM_THREADS": "1",
        }
        assert {f"--nodes={nodes}", f"--ntasks={8 * nodes}", "--ntasks-per-node=8"} <= set(started.srun)


def test_b45_jobs_that_share_a_node_do_not_share_a_port(tmp_path: Path) -> None:
    ids = (101, 102, 19_999, 20_000, 67_000_001)
    ports = {int(Job(tmp_path, "train.sbatch", id=id).render().environment["MASTER_PORT"]) for id in ids}
    assert len(ports) == len(ids)
    assert all(10_000 <= port < 30_000 for port in ports), "where no system gives out ports by itself"


def test_b45_hosts_that_are_not_as_many_as_nodes_stop_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path, "train.sbatch", nodes=3, variables={"SLURM_JOB_NUM_NODES": "4"})
    ended = job.render()
    assert (ended.status, ended.command, ended.requeued) == (2, [], None)
    assert "4 nodes, but scontrol names 3 hosts" in ended.said


def test_training_starts_a_process_per_gpu_and_what_the_cluster_says_where_there_is_none(tmp_path: Path) -> None:
    assert Job(tmp_path, "train.sbatch", gpus=4).render().environment["LOCAL_WORLD_SIZE"] == "4"
    job = Job(tmp_path, "train.sbatch", nodes=2, variables={"DRAFTSMITH_PROCESSES": "3"})
    assert job.render().environment["WORLD_SIZE"] == "6"


@pytest.mark.parametrize("script", ["train.sbatch", "stage.sbatch"])
def test_the_tasks_of_a_node_share_all_its_cpus(tmp_path: Path, script: str) -> None:
    job = Job(tmp_path, script, gpus=8, variables={"SLURM_CPUS_PER_TASK": "96", "SLURM_TRES_PER_TASK": "cpu=96"})
    started = job.render("train")
    assert "--cpu-bind=none" in started.srun
    assert (tmp_path / "record/inherited").read_text() == "", "of 8 tasks each would ask for all"
    assert started.environment["OMP_NUM_THREADS"] == ("12" if script == "train.sbatch" else "96")


@pytest.mark.parametrize("status", [75, 1, 138])
def test_what_stopped_or_failed_is_requeued_while_it_makes_progress_and_then_so_often(
    tmp_path: Path, status: int
) -> None:
    job = Job(tmp_path, "train.sbatch", ends_with=status)
    for step in range(5):
        job.checkpoint(step)
        ended = job.render()
        assert (ended.status, ended.requeued) == (status, "requeue 101")
    assert job.render().requeued, "the second time without progress"
    given_up = job.render()
    assert (given_up.status, given_up.requeued) == (status, None)
    assert "given up after 2 requeues without progress" in given_up.said


def test_a_file_that_vanishes_while_it_is_looked_at_does_not_keep_a_job_from_being_requeued(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/stat").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin/stat").chmod(0o755)
    job = Job(tmp_path, "train.sbatch", ends_with=75)
    job.checkpoint(1)
    assert job.render().requeued == "requeue 101"


@pytest.mark.parametrize("status", [0, 2])
def test_what_is_done_or_refused_is_not_requeued(tmp_path: Path, status: int) -> None:
    ended = Job(tmp_path, "train.sbatch", ends_with=status).render()
    assert (ended.status, ended.requeued) == (status, None)


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "TIMEOUT"])
def test_training_that_was_cancelled_is_not_requeued(tmp_path: Path, state: str) -> None:
    assert Job(tmp_path, "train.sbatch", ends_with=75, state=state).render().requeued is None


def test_usr1_to_the_script_reaches_its_step_and_the_script_outlives_it(tmp_path: Path) -> None:
    # The stub of srun becomes the task, as srun hands the signal on to every task.
    asks = "script=$PPID; (sleep 1; kill -USR1 $script) &"
    ended = Job(tmp_path, "train.sbatch", signal=asks, work="sleep 20 >/dev/null 2>&1 & wait").render()
    assert (ended.status, ended.requeued) == (75, "requeue 101"), ended.said
    assert (tmp_path / "record/asked").read_text() == "asked\n"


def test_a_task_of_an_array_is_requeued_alone(tmp_path: Path) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "90", "SLURM_ARRAY_TASK_ID": "7", "DRAFTSMITH_STAGE": "extract"}
    ended = Job(tmp_path, "stage.sbatch", ends_with=1, variables=array).render("featurize", "experiment=demo")
    assert ended.command == ["-u", "-m", "featurize", "experiment=demo"]
    assert ended.requeued == "requeue 90_7"
    assert {"--nodes=1", "--ntasks=1"} <= set(ended.srun)


def test_a_stage_that_goes_on_nowhere_is_not_requeued(tmp_path: Path) -> None:
    job = Job(tmp_path, "stage.sbatch", ends_with=1, variables={"DRAFTSMITH_PROGRESS": ""})
    assert job.render("models.export").requeued is None


def test_a_task_of_a_sweep_reads_its_own_overrides_and_progress(tmp_path: Path) -> None:
    told = f"{tmp_path}/run-lr-1/train/checkpoints/step-*\nname=run-lr-1\ndata.conversations=[a b]\n"
    (tmp_path / "3").write_text(told)
    sweep = {"DRAFTSMITH_TASKS": str(tmp_path), "SLURM_ARRAY_JOB_ID": "90", "SLURM_ARRAY_TASK_ID": "3"}
    job = Job(tmp_path, "train.sbatch", ends_with=1, variables=sweep | {"DRAFTSMITH_REQUEUES": "1"})
    assert job.render().command == ["-u", "-m", "train", "name=run-lr-1", "data.conversations=[a b]"]
    (tmp_path / "run-lr-1/train/checkpoints/step-1").mkdir(parents=True)
    assert job.render().requeued == "requeue 90_3"
    assert job.render().requeued is None


def test_a_part_of_the_evaluation_is_requeued_by_what_it_has_measured_itself(tmp_path: Path) -> None:
    (tmp_path / "1").write_text(f"{tmp_path}/parts/b/*.json*\nserve_eval.apart\nname=two words\neval.part=b\n")
    array = {"DRAFTSMITH_TASKS": str(tmp_path), "SLURM_ARRAY_JOB_ID": "90", "SLURM_ARRAY_TASK_ID": "1"}
    array |= {"DRAFTSMITH_PROGRESS": f"{tmp_path}/parts/*/*.json*", "DRAFTSMITH_REQUEUES": "1"}
    job = Job(tmp_path, "stage.sbatch", ends_with=1, variables=array)
    assert job.render().command == ["-u", "-m", "serve_eval.apart", "name=two words", "eval.part=b"]
    (tmp_path / "parts/a").mkdir(parents=True)
    (tmp_path / "parts/a/cells.jsonl").write_text("the other task goes on")
    assert job.render().requeued is None, "what others add does not keep it alive"


def streaming(tmp_path: Path, **how: Any) -> Job:
    """Training on a node of eight GPUs, and two nodes that extract beside it."""
    told = {"SLURM_HET_SIZE": "3", "DRAFTSMITH_BESIDE": "extract", "DRAFTSMITH_SPOOL": str(tmp_path / "spool")}
    told |= {"SLURM_CPUS_PER_TASK_HET_GROUP_0": "96", "SLURM_CPUS_PER_TASK_HET_GROUP_1": "12"}
    return Job(tmp_path, "train.sbatch", gpus=8, variables=told, **how)


def test_streaming_trains_on_the_first_group_and_extracts_on_each_of_the_others(tmp_path: Path) -> None:
    job = streaming(tmp_path, work="[[ $3 == featurize ]] && exec sleep 60; sleep 1")
    started = job.render("experiment=demo", "spool.gigabytes=64")
    assert started.command == ["-u", "-m", "train", "experiment=demo", "spool.gigabytes=64"], started.said
    assert (started.environment["WORLD_SIZE"], started.environment["OMP_NUM_THREADS"]) == ("8", "12")
    assert {"--nodes=1", "--ntasks=8", "--ntasks-per-node=8"} <= set(started.srun)
    assert not any(word.startswith("--het-group") for word in started.srun)
    for group in (1, 2):
        assert (tmp_path / f"record/srun{group}").read_text().split()[-3:] == [
            f"--het-group={group}",
            "--nodes=1",
            "--ntasks=1",
        ]
        told = (tmp_path / f"run/slurm/extract-101_{group}.log").read_text().splitlines()
        assert [line[5:] for line in told if line.startswith("word")] == ["-u", "-m", "featurize", *started.command[3:]]
        assert not any(line.startswith(("WORLD_SIZE=", "RANK=")) for line in told), "it is no process of training"
    assert "OMP_NUM_THREADS=12" in (tmp_path / "run/slurm/extract-101_1.log").read_text()
    assert (tmp_path / "spool").is_dir()
    assert (started.status, started.requeued) == (0, None)


@pytest.mark.parametrize(("code", "requeued"), [(1, "requeue 101"), (2, None)])
def test_extraction_that_dies_stops_training_and_decides_whether_both_are_requeued(
    tmp_path: Path, code: int, requeued: str | None
) -> None:
    work = f"if [[ $3 == featurize ]]; then sleep 1; echo no planes; exit {code}; fi; sleep 60 >/dev/null 2>&1 & wait"
    ended = streaming(tmp_path, work=work).render()
    assert (tmp_path / "record/asked").read_text() == "asked\n"
    assert (ended.status, ended.requeued) == (code, requeued), ended.said
    assert f"job 101: extract ended with exit code {code} (log: {tmp_path}/run/slurm/extract-101_" in ended.said
    assert "no planes" in ended.said


def test_training_that_dies_stops_extraction_and_both_are_requeued(tmp_path: Path) -> None:
    ended = streaming(
        tmp_path,
        work="if [[ $3 == featurize ]]; then exec sleep 60; fi; sleep 1; exit 1",
        beside=f"echo $$ >>{tmp_path}/extracting",
    ).render()
    assert (ended.status, ended.requeued) == (1, "requeue 101"), ended.said
    pids = [int(pid) for pid in (tmp_path / "extracting").read_text().split()]
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_extraction_that_found_nothing_to_do_looks_again_while_training_runs(tmp_path: Path) -> None:
    stub = tmp_path / "bin/sleep"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\n[ "$1" = 10 ] && set -- 0.2; exec /bin/sleep "$@"\n')
    stub.chmod(0o755)
    work = (
        "if [[ $3 == featurize ]]; then exit 0; fi; until [[ $(grep -c het {record}/srun1) > 2 ]]; do sleep 0.1; done"
    )
    job = streaming(tmp_path, work=work.replace("{record}", str(tmp_path / "record")))
    assert job.render().status == 0


def test_what_does_not_stop_when_it_is_asked_is_killed_in_time_to_be_requeued(tmp_path: Path) -> None:
    asks = "script=$PPID; (sleep 1; kill -USR1 $script) &"
    deaf = "trap '' USR1; exec sleep 60 >/dev/null 2>&1"
    job = Job(tmp_path, "train.sbatch", signal=asks, work=deaf, variables={"DRAFTSMITH_SIGNAL": "4"})
    ended = job.render()
    assert (ended.status, ended.requeued) == (143, "requeue 101"), ended.said
    assert "job 101: it does not stop, and is killed" in ended.said


@pytest.mark.parametrize("command", ["squeue", "scontrol"])
def test_a_job_that_ends_while_the_controller_is_away_waits_for_it(tmp_path: Path, command: str) -> None:
    job = Job(tmp_path, "train.sbatch", ends_with=1, away=command)
    assert job.render().requeued == "requeue 101"


@pytest.mark.parametrize("gpus", [0, 8])
def test_in_a_container_the_same_command_runs_with_the_same_ranks(tmp_path: Path, gpus: int) -> None:
    inside = {"DRAFTSMITH_MOUNTS": "/models:/models", "DRAFTSMITH_CONTAINER": "pyxis", "DRAFTSMITH_IMAGE": "x.sqsh"}
    pyxis = Job(tmp_path, "train.sbatch", gpus=gpus, variables=inside).render("a=1", task=1)
    folders = f"{tmp_path},{tmp_path}/run,/models:/models"
    assert {"--container-image=x.sqsh", f"--container-mounts={folders}"} <= set(pyxis.srun)
    inside |= {"DRAFTSMITH_CONTAINER": "apptainer", "DRAFTSMITH_IMAGE": "x.sif"}
    apptainer = Job(tmp_path, "train.sbatch", gpus=gpus, variables=inside).render("a=1", task=1)
    assert apptainer.command == pyxis.command == ["-u", "-m", "train", "a=1"]
    assert apptainer.environment == pyxis.environment
    assert apptainer.environment["RANK"] == "1"
