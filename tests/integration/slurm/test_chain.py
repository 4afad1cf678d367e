"""The chain of jobs on a real Slurm: in order, to the end, and no further than the first failure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.slurm.conftest import Cluster

ROOT = Path(__file__).resolve().parents[3]
STAGES = ["featurize", "train", "models.export", "serve_eval"]

pytestmark = pytest.mark.slurm


@pytest.fixture
def overrides(tiny_target_dir: Path, tiny_conversations: Path, tiny_prompts: Path, tmp_path: Path) -> list[str]:
    return [
        "name=chain",
        f"root={tmp_path}",
        f"target.path={tiny_target_dir}",
        "target.dtype=float32",
        f"data.conversations=[{tiny_conversations}]",
        "data.validation_share=0.2",
        "draft.vocab_size=128",
        "objective.unroll_steps=3",
        "trainer.precision=fp32",
        "trainer.pack_tokens=256",
        "engine=none",
        f"eval.prompts=[{tiny_prompts}]",
        "eval.k=3",
        "eval.max_new_tokens=16",
    ]


def submit(cluster: Cluster, overrides: list[str]) -> dict[str, str]:
    """Stage -> job id, as slurm/pipeline.sh prints them."""
    environment = cluster.environment | {"DRAFTSMITH_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [str(ROOT / "slurm/pipeline.sh"), *overrides], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    jobs = dict(line.split() for line in result.stdout.splitlines())
    assert list(jobs) == STAGES
    return jobs


def said(directory: Path) -> str:
    return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(directory.glob("slurm/*.out")))


def test_the_chain_runs_to_the_end_and_a_second_one_does_nothing(
    cluster: Cluster, overrides: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "chain"
    jobs = submit(cluster, overrides)
    states = {stage: cluster.wait(job, 240) for stage, job in jobs.items()}
    assert states == dict.fromkeys(STAGES, "COMPLETED"), said(run)
    summary = json.loads((run / "eval/summary.json").read_text())
    assert summary["lossless"]["reference"]["identical"] == 6

    again = submit(cluster, overrides)
    for stage, job in again.items():
        assert cluster.wait(job, 240) == "COMPLETED", said(run)
        assert "nothing to do" in (run / f"slurm/{stage}-{job}.out").read_text()


def test_what_comes_after_a_failed_stage_is_cancelled(cluster: Cluster, overrides: list[str], tmp_path: Path) -> None:
    jobs = submit(cluster, [*overrides, "data.conversations=[nowhere.jsonl]"])
    states = {stage: cluster.wait(job, 120) for stage, job in jobs.items()}
    assert states == {"featurize": "FAILED"} | dict.fromkeys(STAGES[1:], "CANCELLED")
    assert "nowhere.jsonl" in said(tmp_path / "chain")
