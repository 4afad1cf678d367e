"""`python -m slurm.status NAME [root=runs]`: how far a submitted run is, stage by stage, and what failed.

What is finished says the disk, what waits or runs the queue, and how far a stage is its own files. Exits with 1 when a
stage has ended without being finished.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.artefact import read_json
from models.errors import Refused
from slurm import scheduler
from slurm.chain import Stage, chain, is_finished
from slurm.submit import TABLE
from train.sweep import ranking, render_table, standing

LINES = 8
"""Of the log of a job that failed."""


@dataclass(frozen=True)
class Standing:
    """A stage's state.

    Attributes:
        state: "finished", as in the queue, as it ended, or "not begun".
        job: the last one that was submitted for it.
        progress: how far it is, in words.
        failed: whether it ended without being finished.
    """

    stage: str
    state: str
    job: str
    progress: str
    failed: bool


def progress(stage: Stage, directory: Path, sweep: Sequence[str]) -> str:
    """How far a stage is, by what it has written."""
    if stage.name == "train" and sweep:
        done = sum(standing(directory.with_name(name))["state"] == "finished" for name in sweep)
        return f"{done} of {len(sweep)} runs"
    if stage.name == "train":
        found = standing(directory)
        best = "" if found["al"] is None else f", simulated AL {found['al']:.3f} at step {found['step']:,}"
        return "" if found["state"] == "not begun" else found["state"].removeprefix("finished, ") + best
    if stage.name == "extract":
        return extracted(directory / "features")
    if stage.name == "generate" and stage.progress and Path(stage.progress).exists():
        with Path(stage.progress).open("rb") as handle:
            return f"{sum(1 for _ in handle):,} conversations"
    if stage.name == "evaluate" and (directory / "eval/cells.jsonl").exists():
        with (directory / "eval/cells.jsonl").open("rb") as handle:
            return f"{sum(1 for _ in handle)} windows measured"
    return ""


def extracted(features: Path) -> str:
    """How much of a feature store is there."""
    manifest, shards = features / "manifest.json", len(list(features.glob("shards/*.json")))
    if manifest.exists():
        totals = read_json(manifest)["totals"]
        return f"{totals['tokens']:,} tokens, {totals['bytes'] / 1e9:.2f} GB"
    return f"{shards} shards" if shards else ""


def standings(directory: Path) -> list[Standing]:
    """The state of every stage of a run.

    Raises:
        Refused: the run was not submitted, or Slurm does not answer.
    """
    record = directory / "slurm" / "jobs.json"
    if not record.exists():
        raise Refused(f"{directory} was not submitted; python -m slurm.submit does that")
    found: dict[str, Any] = read_json(record)
    values, jobs, sweep = found["values"], found["jobs"], found["sweep"]
    stages = chain(values, directory)
    if sweep:
        stages = [*stages[: [stage.name for stage in stages].index("train") + 1], TABLE]
    queue = scheduler.queued(directory, [stage.name for stage in stages])
    told: list[Standing] = []
    done = True  # so far: what follows on an unfinished stage is to be made again
    for stage in stages:
        job, queued = jobs.get(stage.name, ""), queue.get(stage.name)
        if sweep and stage.name in ("train", "table"):
            done = done and all(standing(directory.with_name(name))["state"] == "finished" for name in sweep)
        else:
            done = done and is_finished(stage, values, directory)
        if queued is not None:
            state, failed, job = queued.told, False, queued.id
        elif done:
            state, failed = "finished", False
        elif job:
            state = scheduler.how_it_ended(job)
            failed = state != "COMPLETED"
            state = state if failed else "to be made again"
        else:
            state, failed = "not begun", False
        told.append(Standing(stage.name, state, job, progress(stage, directory, sweep), failed))
    return told


def last_words(directory: Path, stage: Standing) -> list[str]:
    """The end of the log of a stage's job that wrote last, after the log's path; only a remark if it never began."""
    logs = sorted((directory / "slurm").glob(f"{stage.stage}-{stage.job}*.log"), key=lambda path: path.stat().st_mtime)
    if not logs:
        return ["it never began"]
    lines = logs[-1].read_text(errors="replace").splitlines()
    return [str(logs[-1]), *lines[-LINES:]]


def main(arguments: Sequence[str]) -> int:
    """The command line.

    Raises:
        Refused: no such run, or Slurm does not answer.
    """
    from conf import help

    if help.asks_for_help(arguments):
        help.tell()
    names = [word for word in arguments if "=" not in word]
    roots = [word.removeprefix("root=") for word in arguments if word.startswith("root=")]
    if len(names) != 1 or len(names) + len(roots) != len(arguments) or len(roots) > 1:
        raise Refused("usage: python -m slurm.status NAME [root=runs]")
    directory = (Path((roots or ["runs"])[0]).expanduser() / names[0]).absolute()
    told = standings(directory)
    for stage in told:
        print(f"{stage.stage:10}{stage.state:28}{stage.job:>8}  {stage.progress}".rstrip())
    for stage in told:
        if stage.failed:
            print(f"\n{stage.stage}: job {stage.job} {stage.state}")
            print("\n".join(f"    {line}" for line in last_words(directory, stage)))
    if (directory / "sweep.json").exists() and ranking(directory):
        print()
        render_table(directory)
    return int(any(stage.failed for stage in told))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refused as error:
        print(f"status: {error}", file=sys.stderr)
        sys.exit(2)
