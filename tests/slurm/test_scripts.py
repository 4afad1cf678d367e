"""slurm/*.sbatch: what the jobs ask srun to do, rendered with stubs (a real Slurm: tests/integration/slurm)."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

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
while [[ $1 == --* ]]; do echo "$1" >>{record}/srun; shift; done
env | grep -E '^SLURM_(CPUS|TRES)_PER_TASK=' >{record}/inherited
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
    variables: dict[str, str] = dataclasses.field(default_factory=dict)

    def render(self, *words: str, task: int = 0) -> Task:
        stubs, record = self.folder / "bin", self.folder / "record"
        shutil.rmtree(record, ignore_errors=True)
        for folder in (stubs, record, self.folder / "run/slurm"):
            folder.mkdir(parents=True, exist_ok=True)
        given = {"record": record, "task": task, "gpus": max(1, self.gpus), "last": 100 + self.nodes}
        given |= {"names": "|".join(TOLD), "ends_with": self.ends_with, "work": self.work, "signal": self.signal}
        bodies = {
            "srun": SRUN,
            "scontrol": SCONTROL,
            "python": PYTHON,
            "apptainer": 'while [[ $1 != *.sif ]]; do shift; done; shift; exec "$@"',
        }
        bodies["squeue"] = f"echo {self.state}"
        for name, body in bodies.items():
            text = body.format(**given) if name in ("srun", "scontrol", "python") else body
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
    (tmp_path / "3").write_text(f"{tmp_path}/run-lr-1\nname=run-lr-1\ndata.conversations=[a b]\n")
    sweep = {"DRAFTSMITH_SWEEP": str(tmp_path), "SLURM_ARRAY_JOB_ID": "90", "SLURM_ARRAY_TASK_ID": "3"}
    job = Job(tmp_path, "train.sbatch", ends_with=1, variables=sweep | {"DRAFTSMITH_REQUEUES": "1"})
    assert job.render().command == ["-u", "-m", "train", "name=run-lr-1", "data.conversations=[a b]"]
    (tmp_path / "run-lr-1/train/checkpoints/step-1").mkdir(parents=True)
    assert job.render().requeued == "requeue 90_3"
    assert job.render().requeued is None


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
