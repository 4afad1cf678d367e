"""Arrays whose tasks are each told what to do: the runs of a sweep, and the parts of a served sweep.

What the task of an index runs lies in a file of that name: first the pattern of the files by which it is seen to go on,
then a word in each line. job.sh reads it when the task begins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from models.artefact import write_bytes
from models.errors import Refused
from serve_eval.parts import folder, measured, parts_of
from slurm.chain import TABLE, Stage, Values, is_finished


@dataclass(frozen=True)
class Task:
    """A task of such an array.

    Attributes:
        progress: pattern of the files that become more, or longer, as it goes on.
        words: what it runs.
        finished: whether it need not be run again.
    """

    name: str
    progress: str
    words: list[str]
    finished: bool


def tasks_of(
    stage: Stage, values: Values, directory: Path, overrides: Sequence[str], sweep: Mapping[str, Sequence[str]]
) -> list[Task]:
    """The tasks of a stage, in the order of their indices; none where it is one job, or an array that shares its work.

    Args:
        values, directory, overrides: of the run.
        sweep: the runs of a sweep by name, with the overrides of each; empty without one.

    Raises:
        Refused: parts of the served sweep that are not possible.
    """
    if stage.name == "train":
        return [
            Task(
                name,
                str(directory.with_name(name) / "train/checkpoints/step-*"),
                list(words),
                is_trained(directory, name),
            )
            for name, words in sweep.items()
        ]
    if stage.name == "measure":
        place = directory / "eval"
        return [
            Task(
                part.name,
                str(folder(place, part) / "*.json*"),
                [stage.module, *overrides, f"eval.part={part.name}"],
                measured(place, part),
            )
            for part in parts_of(values).values()
        ]
    return []


def is_trained(directory: Path, name: str) -> bool:
    """Whether a run of the sweep over the run in `directory` has been trained to its end."""
    return (directory.with_name(name) / "train/manifest.json").exists()


def is_done(stage: Stage, values: Values, directory: Path, sweep: Collection[str]) -> bool:
    """Whether a stage need not be run again: all its tasks, where each is told what to do; a sweep's table with them.

    Args:
        values, directory: of the run.
        sweep: names of the runs of a sweep; empty without one.
    """
    if sweep and stage.name in ("train", TABLE.name):
        return all(is_trained(directory, name) for name in sweep)
    if tasks := tasks_of(stage, values, directory, (), {}):
        return all(task.finished for task in tasks)
    return is_finished(stage, values, directory)


def tasks_folder(directory: Path, stage: Stage) -> Path:
    """Where the words of a stage's tasks lie."""
    return directory / "slurm" / f"{stage.name}.tasks"


def write_tasks(directory: Path, stage: Stage, tasks: Sequence[Task]) -> None:
    """Write what each task runs.

    Raises:
        Refused: an override has several lines.
    """
    for index, task in enumerate(tasks):
        lines = [task.progress, *task.words]
        if any("\n" in line for line in lines):
            raise Refused(f"{stage.name}: an override of {task.name} has several lines")
        write_bytes(tasks_folder(directory, stage) / str(index), ("\n".join(lines) + "\n").encode())
