"""`python -m slurm.status NAME [root=runs] [--json]`: how far a submitted run is, stage by stage, and what failed.

What is finished says the disk, what waits or runs the queue, and how far a stage is its own files (slurm/pace.py). The
last line is about the whole chain. Exits with 1 when a stage has ended without being finished.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from models.artefact import read_json
from models.errors import Refused
from slurm import scheduler
from slurm.chain import TABLE, chain
from slurm.pace import NOTHING, Pace, count_lines, pace
from slurm.tasks import Task, is_done, tasks_of
from train.sweep import ranking, render_table

LINES = 8
"""Of the log of a job that failed."""


@dataclass(frozen=True)
class OneTask:
    """A task of an array that is told what to do: what it is called, its state, and how much there is of it."""

    name: str
    state: str
    told: str


@dataclass(frozen=True)
class Standing:
    """A stage's state.

    Attributes:
        state: "finished", as in the queue, as it ended, or "not begun".
        job: the last one that was submitted for it.
        failed: whether it ended without being finished.
        elapsed_s: of the job that runs since its present start, or of the last launch of what is finished.
        pace: how far it is.
        log: of a job that failed: its path and its last lines, or only a remark.
        tasks: of the served sweep in parts.
    """

    stage: str
    state: str
    job: str
    failed: bool
    elapsed_s: int | None
    pace: Pace
    log: list[str]
    tasks: Sequence[OneTask] = ()


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
    timings = read_json(directory / "timings.json") if (directory / "timings.json").exists() else {}
    stages = chain(values, directory, swept=bool(sweep))
    queue = scheduler.queued(directory, [stage.name for stage in stages])
    told: list[Standing] = []
    done = True  # so far: what follows on an unfinished stage is to be made again
    for stage in stages:
        job, queued = jobs.get(stage.name, ""), queue.get(stage.name)
        each = tasks_of(stage, values, directory, (), dict.fromkeys(sweep, ()))
        done = done and is_done(stage, values, directory, sweep)
        elapsed, failed, far, log = None, False, NOTHING, []
        if queued is not None:
            state, job, elapsed = queued.told, queued.id, queued.elapsed_s or None
        elif done:
            state, elapsed = "finished", round(timings[stage.record]) if stage.record in timings else None
        elif job:
            state = scheduler.how_it_ended(job)
            failed = state != "COMPLETED"
            state = state if failed else "to be made again"
            unfinished = [index for index, task in enumerate(each) if not task.finished]
            log = last_words(directory, stage.name, job, unfinished) if failed else []
        else:
            state = "not begun"
        if stage != TABLE:
            far = pace(stage, values, directory, sweep, elapsed if queued is not None else None)
        tasks = [one_task(task, index, job, queued) for index, task in enumerate(() if sweep else each)]
        told.append(Standing(stage.name, state, job, failed, elapsed, far, log, tasks))
    return told


def one_task(task: Task, index: int, job: str, queued: scheduler.Job | None) -> OneTask:
    """The state of one task of an array: of the queue, of the disk, or as it ended."""
    cells = Path(task.progress).parent / "cells.jsonl"
    told = f"{count_lines(cells)} windows measured" if cells.exists() else ""
    if queued is not None and index in queued.tasks:
        return OneTask(task.name, queued.tasks[index], told)
    if task.finished:
        return OneTask(task.name, "finished", told)
    return OneTask(task.name, scheduler.how_it_ended(f"{job}_{index}") if job else "not begun", told)


def last_words(directory: Path, stage: str, job: str, unfinished: Sequence[int]) -> list[str]:
    """The end of the log of a job that wrote last, after the log's path; only a remark if it never began.

    Args:
        unfinished: of tasks that are each told what to do, those whose logs are looked at.
    """
    found = (directory / "slurm").glob(f"{stage}-{job}[._]*log")
    names = [f"{stage}-{job}_{index}.log" for index in unfinished]
    logs = sorted((path for path in found if path.name in names or not names), key=lambda path: path.stat().st_mtime)
    if not logs:
        return ["it never began"]
    return [str(logs[-1]), *logs[-1].read_text(errors="replace").splitlines()[-LINES:]]


def clock(seconds: float | None) -> str:
    """A time in words; empty for one that is not known."""
    return "" if seconds is None else str(timedelta(seconds=round(seconds)))


def summary(told: Sequence[Standing]) -> str:
    """The whole chain in a line."""
    finished = sum(stage.state == "finished" for stage in told)
    parts = [f"{finished} of {len(told)} stages finished"]
    for stage in told:
        left = stage.pace.left_s
        if stage.failed:
            parts.append(f"{stage.stage} failed ({stage.state})")
        elif stage.elapsed_s is not None and stage.state != "finished":
            parts.append(f"{stage.stage} runs" + ("" if left is None else f", about {clock(left)} left of it"))
    spent = sum(stage.elapsed_s or 0 for stage in told)
    return "chain: " + "; ".join([*parts, f"{clock(spent)} so far"] if spent else parts)


def show(told: Sequence[Standing]) -> None:
    """Print a line for each stage, one for the chain, and what became of what failed."""
    for stage in told:
        times = clock(stage.elapsed_s) + ("" if stage.pace.left_s is None else f" (left {clock(stage.pace.left_s)})")
        print(f"{stage.stage:10}{stage.state:28}{stage.job:>8}  {times:28}{stage.pace.told}".rstrip())
        for task in stage.tasks:
            print(f"  {task.name:28}{task.state:18}{task.told}".rstrip())
    print(summary(told))
    for stage in told:
        if stage.failed:
            print(f"\n{stage.stage}: job {stage.job} {stage.state}")
            print("\n".join(f"    {line}" for line in stage.log))


def main(arguments: Sequence[str]) -> int:
    """The command line.

    Raises:
        Refused: no such run, or Slurm does not answer.
    """
    from conf import help

    if help.asks_for_help(arguments):
        help.tell()
    words = [word for word in arguments if word != "--json"]
    names = [word for word in words if "=" not in word]
    roots = [word.removeprefix("root=") for word in words if word.startswith("root=")]
    if len(names) != 1 or len(names) + len(roots) != len(words) or len(roots) > 1 or names[0].startswith("-"):
        raise Refused("usage: python -m slurm.status NAME [root=runs] [--json]")
    directory = (Path((roots or ["runs"])[0]).expanduser() / names[0]).absolute()
    told = standings(directory)
    ranked = ranking(directory) if (directory / "sweep.json").exists() else []
    if len(words) < len(arguments):
        sweep = [{"run": name, **found} for name, found in ranked]
        print(
            json.dumps({"run": str(directory), "stages": [asdict(stage) for stage in told], "sweep": sweep}, indent=2)
        )
    else:
        show(told)
        if ranked:
            print()
            render_table(directory)
    return int(any(stage.failed for stage in told))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (Refused, OSError) as error:
        print(f"status: {error}", file=sys.stderr)
        sys.exit(2)
