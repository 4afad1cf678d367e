"""Arrays whose tasks are each told what to do: the runs of a sweep, and the parts of a served sweep.

What the task of an index runs lies in a file of that name: first the pattern of the files by which it is seen to go on,
then a word in each line. job.sh reads it when the task begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from models.artefact import write_bytes
from models.errors import Refused
from serve_eval.parts import folder, measured, parts_of
from slurm.chain import Stage, Values


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
        runs = {name: directory.with_name(name) / "train" for name in sweep}
        return [
            Task(name, str(runs[name] / "checkpoints/step-*"), list(words), (runs[name] / "manifest.json").exists())
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
