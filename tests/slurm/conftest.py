"""Stubs of Slurm's commands, and a run that is submitted to them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import conf
from serve_eval.parts import parts_of
from slurm.chain import chain

ROOT = Path(__file__).resolve().parents[2]
STAGES = ["extract", "train", "export", "evaluate"]
APART = [
    "+engine@engines.a=vllm",
    "+engine@engines.b=sglang",
    "eval.methods=[{method: eagle3, k: 3}, {method: ngram, k: 4}]",
]
PARTS = ["a-eagle3-k3", "a-ngram-k4", "b-eagle3-k3", "b-ngram-k4"]
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
        """(id, stage, state) of what is in the queue; an id like 7_3 is that of a task of an array.

        What we have submitted has its comment, what we have not the run's folder only.
        """
        used = {"RUNNING": "1:02:03"}
        rows = []
        for id, stage, state in jobs:
            base = re.split("[_+]", id)[0]
            comment = option(self.submitted().get(int(base), []), "comment") or run
            rows.append(f"{base}|{id}|{state}|Dependency|{used.get(state, '0:00')}|{run.name}:{stage}|{comment}")
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
    data, prompts = tmp_path / "a b.jsonl", tmp_path / "prompts.jsonl"
    data.touch()
    prompts.touch()
    files = [f"data.conversations=[{data}]", f"eval.prompts=[{prompts}]"]
    return ["name=mine", f"root={tmp_path}/runs", "target.path=somewhere", *files]


def option(words: list[str], name: str) -> str | None:
    return next((word.partition("=")[2] for word in words if word.startswith(f"--{name}=")), None)


def finish(run: Path, overrides: list[str], *stages: str) -> None:
    """Leave what these stages leave when they are done."""
    values = conf.resolved(conf.load(overrides))
    for stage in chain(values, run):
        if stage.name in stages:
            stage.last.parent.mkdir(parents=True, exist_ok=True)
            stage.last.write_text('{"totals": {"tokens": 1, "bytes": 1}, "files": [1], "best_al": 2.0, "best_step": 1}')
            (run / "config").mkdir(exist_ok=True)
            OmegaConf.save(OmegaConf.create(values), run / "config" / f"{stage.record}.yaml")


def measure(overrides: list[str], run: Path, *names: str) -> None:
    """Leave what these parts leave when they are measured."""
    found = parts_of(conf.resolved(conf.load(overrides)))
    for name in names:
        folder = run / "eval/parts" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").write_text(json.dumps({"made_by": found[name].made_by}))


def stages_of(stub: Slurm) -> list[str]:
    return [(option(words, "job-name") or "").split(":")[1] for words in stub.submitted().values()]
