"""slurm/*: what the scripts ask srun to do, rendered with stubs (a real Slurm: tests/integration)."""

from __future__ import annotations

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


def render(tmp_path: Path, *, stage: str, nodes: int, job: int, node: int, gpus: int = 0) -> list[str]:
    """The command line that a node's task would run; srun runs only that task, python is echoed."""
    stubs = tmp_path / "bin"
    stubs.mkdir(exist_ok=True)
    srun = 'while [[ $1 == --* ]]; do shift; done; SLURM_NODEID=$STUB_NODE exec "$@"'
    for name, body in {
        "srun": srun,
        "scontrol": "printf 'node%d\\n' 7 8 9",
        "python": 'printf "%s\\n" "$@"',
    }.items():
        (stubs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (stubs / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "node[7-9]",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "STUB_NODE": str(node),
        "DRAFTSMITH_PYTHON": str(stubs / "python"),
    } | ({"SLURM_GPUS_ON_NODE": str(gpus)} if gpus else {})
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")} | slurm
    environment["PATH"] = f"{stubs}:{environment['PATH']}"
    result = subprocess.run(
        ["bash", str(ROOT / "slurm/stage.sbatch"), stage, "experiment=demo", "name=two words"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.splitlines()


def option(command: list[str], name: str) -> str:
    return command[command.index(f"--{name}") + 1]


@pytest.mark.parametrize("nodes", [1, 3])
def test_b45_processes_meet_at_the_first_host_of_the_allocation(tmp_path: Path, nodes: int) -> None:
    for node in range(nodes):
        command = render(tmp_path, stage="train", nodes=nodes, job=101, node=node, gpus=4)
        assert option(command, "master_addr") == "node7"
        assert option(command, "nnodes") == str(nodes)
        assert option(command, "node_rank") == str(node)
        assert option(command, "nproc_per_node") == "4"
        assert command[-4:] == ["-m", "train", "experiment=demo", "name=two words"]


def test_b45_jobs_that_share_a_node_do_not_share_a_port(tmp_path: Path) -> None:
    ports = {option(render(tmp_path, stage="train", nodes=1, job=job, node=0), "master_port") for job in (101, 102)}
    assert len(ports) == 2
    assert all(1024 < int(port) < 65536 for port in ports)


def test_training_starts_a_process_per_gpu_and_one_where_there_is_none(tmp_path: Path) -> None:
    assert option(render(tmp_path, stage="train", nodes=2, job=5, node=0), "nproc_per_node") == "1"
    assert option(render(tmp_path, stage="train", nodes=2, job=5, node=0, gpus=8), "nproc_per_node") == "8"


def test_other_stages_are_one_process(tmp_path: Path) -> None:
    command = render(tmp_path, stage="models.export", nodes=1, job=5, node=0)
    assert command == ["-u", "-m", "models.export", "experiment=demo", "name=two words"]


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
