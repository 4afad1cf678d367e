"""slurm/*: what the scripts ask srun to do, rendered with stubs (a real Slurm: tests/integration)."""

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
def test_every_script_parses(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--shell=bash", str(script)], check=True)


RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")


@dataclasses.dataclass
class Task:
    """What one task of a job was started as, and what the job did after it."""

    command: list[str]
    environment: dict[str, str]
    srun: list[str]
    requeued: bool
    status: int


def render(
    tmp_path: Path,
    *,
    stage: str,
    nodes: int,
    job: int,
    task: int = 0,
    gpus: int = 0,
    ends_with: int = 0,
    state: str = "RUNNING",
) -> Task:
    """Run the script with stubs: srun runs one of its tasks only, which tells its command line and its ranks."""
    stubs = tmp_path / "bin"
    stubs.mkdir(exist_ok=True)
    srun = (
        f'while [[ $1 == --* ]]; do echo "$1" >>{tmp_path}/srun; shift; done\n'
        f'SLURM_PROCID={task} SLURM_LOCALID=$(({task} % {max(1, gpus)})) exec "$@"'
    )
    scontrol = f"[[ $1 == show ]] && printf 'node%d\\n' 7 8 9 || echo \"$@\" >>{tmp_path}/requeued"
    python = f'printf "%s\\n" "$@"; env | grep -E "^({"|".join(RENDEZVOUS)})="; exit {ends_with}'
    stub = {"srun": srun, "scontrol": scontrol, "squeue": f"echo {state}", "python": python}
    for name, body in stub.items():
        (stubs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (stubs / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "node[7-9]",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "DRAFTSMITH_PYTHON": str(stubs / "python"),
    } | ({"SLURM_GPUS_ON_NODE": str(gpus)} if gpus else {})
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("SLURM") and key not in RENDEZVOUS
    } | slurm
    environment["PATH"] = f"{stubs}:{environment['PATH']}"
    for record in ("srun", "requeued"):
        (tmp_path / record).unlink(missing_ok=True)
    result = subprocess.run(
        ["bash", str(ROOT / "slurm/stage.sbatch"), stage, "experiment=demo", "name=two words"],
        env=environment,
        capture_output=True,
        text=True,
    )
    lines = result.stdout.splitlines()
    told = dict(line.split("=", 1) for line in lines if line.split("=", 1)[0] in RENDEZVOUS)
    command = [line for line in lines if line.split("=", 1)[0] not in RENDEZVOUS]
    options = (tmp_path / "srun").read_text().splitlines()
    return Task(command, told, options, (tmp_path / "requeued").exists(), result.returncode)


@pytest.mark.parametrize("nodes", [1, 3])
def test_b45_processes_meet_at_the_first_host_of_the_allocation(tmp_path: Path, nodes: int) -> None:
    for task in range(4 * nodes):
        started = render(tmp_path, stage="train", nodes=nodes, job=101, task=task, gpus=4)
        assert started.command == ["-u", "-m", "train", "experiment=demo", "name=two words"]
        assert started.environment["MASTER_ADDR"] == "node7"
        ranks = {key: started.environment[key] for key in RENDEZVOUS[2:]}
        expected = (4 * nodes, 4, task, task % 4)
        assert ranks == dict(zip(RENDEZVOUS[2:], map(str, expected), strict=True))
        assert {f"--ntasks={4 * nodes}", "--ntasks-per-node=4"} <= set(started.srun)


def test_b45_jobs_that_share_a_node_do_not_share_a_port(tmp_path: Path) -> None:
    jobs = [render(tmp_path, stage="train", nodes=1, job=job) for job in (101, 102)]
    ports = {job.environment["MASTER_PORT"] for job in jobs}
    assert len(ports) == 2
    assert all(1024 < int(port) < 65536 for port in ports)


def test_training_starts_a_process_per_gpu_and_one_where_there_is_none(tmp_path: Path) -> None:
    assert render(tmp_path, stage="train", nodes=2, job=5).environment["LOCAL_WORLD_SIZE"] == "1"
    assert render(tmp_path, stage="train", nodes=2, job=5, gpus=8).environment["LOCAL_WORLD_SIZE"] == "8"


@pytest.mark.parametrize(("status", "requeued"), [(75, True), (0, False), (2, False), (1, False)])
def test_only_training_that_saved_and_left_is_requeued(tmp_path: Path, status: int, requeued: bool) -> None:
    ended = render(tmp_path, stage="train", nodes=1, job=5, ends_with=status)
    assert (ended.status, ended.requeued) == (status, requeued)


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "TIMEOUT"])
def test_training_that_was_cancelled_is_not_requeued(tmp_path: Path, state: str) -> None:
    assert not render(tmp_path, stage="train", nodes=1, job=5, ends_with=75, state=state).requeued


def test_other_stages_are_one_process(tmp_path: Path) -> None:
    started = render(tmp_path, stage="models.export", nodes=1, job=5)
    assert started.command == ["-u", "-m", "models.export", "experiment=demo", "name=two words"]


def test_a_mistake_in_the_overrides_is_told_before_any_job_is_submitted(tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho submitted >>{tmp_path}/log\necho 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    result = subprocess.run(
        [str(ROOT / "slurm/pipeline.sh"), "experiment=demo", "trainer.epoch=2"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DRAFTSMITH_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "epoch" in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert not (tmp_path / "log").exists()
