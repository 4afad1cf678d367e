"""What is asked of Slurm's commands: submit, look into the queue, cancel, and how a job ended.

A job belongs to a run by its comment, the run's folder, and to a stage by its name; a fingerprint behind the folder
tells with which settings. So the queue itself says what has been submitted, and there is no record that could be wrong
after a submission that was itself interrupted.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from models.errors import Refused
from models.servers import RANKS

OVERRIDING = ("SBATCH_ARRAY_INX", "SBATCH_NO_REQUEUE", "SBATCH_OPEN_MODE", "SBATCH_WAIT")
"""Variables that say otherwise than the scripts and their order do."""
SETTLING_S = 30
"""How long to wait for a job that is just ending before it is taken for one that goes on."""


@dataclass(frozen=True)
class Job:
    """A job, or an array of them, in the queue.

    Attributes:
        id: to depend on, or to cancel.
        states: of its parts, "PENDING" say, with how many are in it.
        tasks: of an array, the state of each that is in the queue, by index.
        reason: why it waits, in Slurm's word.
        made_of: fingerprint of what it was submitted with.
        elapsed_s: since its present start; of an array, since that of the task that runs longest.
    """

    id: str
    states: Mapping[str, int]
    reason: str
    elapsed_s: int
    tasks: Mapping[int, str] = field(default_factory=dict)
    made_of: str = ""

    @property
    def waits(self) -> bool:
        """Whether no part of it has begun."""
        return set(self.states) == {"PENDING"}

    @property
    def told(self) -> str:
        """Its state in words."""
        states = [state if count == 1 else f"{count} {state}" for state, count in self.states.items()]
        return " + ".join(states) + (f" ({self.reason})" if self.waits else "")


def run(*words: str, environment: Mapping[str, str] | None = None) -> str:
    """What a command of Slurm prints.

    Raises:
        Refused: it is not there, or fails; with what it says.
    """
    if shutil.which(words[0]) is None:
        raise Refused(f"{words[0]} is not there; submit on a machine that can talk to Slurm, or use dry_run=true")
    result = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines() or [f"exit code {result.returncode}"]
        said = dict.fromkeys(re.sub(rf"^{words[0]}: (error: )?", "", line.strip()) for line in lines)
        raise Refused(f"{words[0]}: {'; '.join(said)}")
    return result.stdout


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment to submit from: without the job that we may be in ourselves, whose size would be inherited."""
    return {
        name: value
        for name, value in environment.items()
        if name == "SLURM_CONF" or not (name.startswith(("SLURM_", "DRAFTSMITH_")) or name in (*RANKS, *OVERRIDING))
    }


def job_name(directory: Path, stage: str) -> str:
    """Name of a stage's job in the queue."""
    return f"{directory.name}:{stage}"


OTHER_GROUP = re.compile(r"\+[1-9]")
"""In the id of a heterogeneous job's part: not its first, by whose id the whole job goes."""


def seconds(used: str) -> int:
    """A time as Slurm tells it, [days-]hours:minutes:seconds or minutes:seconds; 0 for one that it does not know."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", used)
    if match is None:
        return 0
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def queued(directory: Path, stages: Sequence[str]) -> dict[str, Job]:
    """The jobs of a run that are in the queue, by stage; those that are just ending have been waited for.

    Raises:
        Refused: Slurm does not answer, or a stage is in the queue twice.
    """
    names = {job_name(directory, stage): stage for stage in stages}
    # A row for each task of an array: in one row Slurm shortens the list of those that wait.
    asked = ("squeue", "--noheader", "--array", f"--name={','.join(names)}", "--format=%F|%i|%T|%r|%M|%j|%k")
    deadline = time.monotonic() + SETTLING_S
    while True:
        rows = [line.split("|", 6) for line in run(*asked).splitlines()]
        rows = [row for row in rows if len(row) == 7 and row[6].split(" ")[0] == str(directory)]
        rows = [row for row in rows if not OTHER_GROUP.search(row[1])]
        if time.monotonic() > deadline or not any(row[2] == "COMPLETING" for row in rows):
            break
        time.sleep(1)
    jobs: dict[str, Job] = {}
    for base, task, state, reason, used, name, comment in rows:
        stage = names[name]
        known = jobs.get(stage, Job(base, {}, reason, 0))
        if known.id != base:
            raise Refused(f"{stage} is in the queue twice, as jobs {known.id} and {base}; scancel one of them")
        states = {**known.states, state: known.states.get(state, 0) + 1}
        index = re.search(r"_(\d+)$", task)
        tasks = {**known.tasks, int(index[1]): state} if index else known.tasks
        jobs[stage] = Job(base, states, reason, max(known.elapsed_s, seconds(used)), tasks, comment.partition(" ")[2])
    return jobs


def submit(words: Sequence[str], variables: Mapping[str, str]) -> str:
    """Submit a job; returns its id.

    Raises:
        Refused: sbatch does.
    """
    return run(*words, environment=clean(os.environ) | dict(variables)).strip().partition(";")[0]


def cancel(job: str) -> None:
    """Cancel a job."""
    run("scancel", job)


def how_it_ended(job: str) -> str:
    """The state in which a job that is no longer in the queue ended, as far as Slurm remembers."""
    try:  # without accounting there is only the controller's memory, of some minutes
        states = run("sacct", "--noheader", "--allocations", f"--jobs={job}", "--format=State%30").split("\n")
    except Refused:
        try:
            states = re.findall(r"JobState=(\w+)", run("scontrol", "show", "job", job))
        except Refused:
            states = []
    found = [state.split()[0] for state in states if state.split()]
    bad = [state for state in found if state != "COMPLETED"]
    return (bad or found or ["ENDED"])[0]
