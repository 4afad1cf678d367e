"""`python -m slurm.submit experiment=NAME cluster=NAME`: a run's stages as jobs, each begun when that before is done.

    python -m slurm.submit experiment=demo cluster=cpu
    python -m slurm.submit experiment=demo cluster=gpu cluster.train.nodes=4 cluster.extract.tasks=16 dry_run=true
    python -m slurm.submit --multirun experiment=demo cluster=gpu optim.lr=1e-3,3e-4
    python -m slurm.submit experiment=demo cluster=gpu spool=bounded cluster.scratch=/scratch cluster.extract.tasks=4
    python -m slurm.submit experiment=demo cluster=gpu +engine@engines.a=vllm +engine@engines.b=sglang eval.served_k=3

Run it again at any time: what is finished or in the queue is not submitted again. A mistake in the overrides is told
before anything is submitted. With --multirun the chain ends with training, as an array with a task for each
combination, and a table of them. With a spool, extraction and training are one heterogeneous job. With several engines
each of them measures each method in a task of its own, and the evaluation joins them. The scripts are slurm/*.sbatch;
here are only their options, variables and order.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from models.artefact import fingerprint, read_json, write_json
from models.config import masked_variables
from models.errors import Refused
from slurm import scheduler
from slurm.chain import TABLE, Stage, Values, chain, made_of, spool
from slurm.config import ClusterConfig, JobConfig
from slurm.possible import require_possible
from slurm.tasks import Task, is_done, tasks_folder, tasks_of, write_tasks

SCRIPTS = Path(__file__).resolve().parent

NOT_TOLD = re.compile(r"dry_run=|[+~]*cluster\.environment\b")
"""Overrides that no job is told: sbatch sets its variables, while words lie in files and are shown by Slurm."""


@dataclass(frozen=True)
class Order:
    """A run as it is to be submitted.

    Attributes:
        directory: the run's folder, absolute.
        values: its resolved configuration, credentials masked.
        overrides: for the stages' command lines.
        sweep: runs of a sweep, by name: the overrides of each; empty without one.
    """

    directory: Path
    values: Values
    overrides: Sequence[str]
    cluster: ClusterConfig
    sweep: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Submission:
    """One call of sbatch, but for what it depends on.

    Attributes:
        after: whether the job before it must have succeeded ("afterok"), or only ended ("afterany").
        size: what it asks for, in words.
        others: options of the other groups of a heterogeneous job; `options` are those of the first.
    """

    stage: str
    options: list[str]
    script: Path
    words: list[str]
    variables: dict[str, str]
    size: str
    after: str = "afterok"
    others: tuple[list[str], ...] = ()

    def command(self, before: str | None) -> list[str]:
        """The words of sbatch, after a job of that id."""
        depends = [f"--dependency={self.after}:{before}", "--kill-on-invalid-dep=yes"] if before else []
        others = [word for group in self.others for word in (":", *group)]
        return ["sbatch", "--parsable", *self.options, *depends, *others, str(self.script), *self.words]


def variables(order: Order, stage: Stage, job: JobConfig) -> dict[str, str]:
    """The environment of a stage's job, beyond what it inherits."""
    cluster, container = order.cluster, order.cluster.container
    folder = spool(order.values) if stage.beside else None
    told = {
        "ROOT": str(SCRIPTS.parent),
        "PYTHON": cluster.python or sys.executable,
        "RUN": str(order.directory),
        "STAGE": stage.name,
        "MODULES": " ".join(cluster.modules),
        "CONTAINER": container.kind if container.image else "",
        "IMAGE": container.image or "",
        "MOUNTS": ",".join(container.mounts),
        "PROGRESS": str(Path(stage.progress).absolute()) if stage.progress else "",
        "REQUEUES": str(cluster.requeues) if stage.progress else "",
        "SIGNAL": str(cluster.signal_s) if stage.progress else "",
        "PROCESSES": str(job.processes_per_node) if stage.name == "train" else "",
        "BESIDE": stage.beside or "",
        "SPOOL": str(folder.absolute()) if folder else "",
    }
    return dict(cluster.environment) | {f"DRAFTSMITH_{name}": value for name, value in told.items() if value}


def options(order: Order, stage: Stage, job: JobConfig, array: str | None) -> list[str]:
    """sbatch's options for a stage's job."""
    cluster = order.cluster
    log = str(order.directory / "slurm" / stage.name) + ("-%A_%a.log" if array else "-%j.log")
    asked: dict[str, Any] = {
        "job-name": scheduler.job_name(order.directory, stage.name),
        "comment": f"{order.directory} {submitted_with(order, stage)}",
        "export": "ALL",  # whatever the site's default is: the scripts are told what to do by variables
        "output": log,
        "partition": job.partition or cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "nodes": job.nodes,
        "gpus-per-node": job.gpus_per_node or None,
        "cpus-per-task": job.cpus_per_node,
        "mem": job.memory,
        "time": job.time,
        "array": array,
        "signal": f"B:USR1@{cluster.signal_s}" if stage.progress else None,
    }
    return [f"--{name}={value}" for name, value in asked.items() if value is not None] + list(cluster.options)


def submitted_with(order: Order, stage: Stage) -> str:
    """What tells a stage's job from one with other settings."""
    if order.sweep and stage.name in ("train", "table"):
        return fingerprint([made_of(stage, order.values), dict(order.sweep)])
    return made_of(stage, order.values)


def size(job: JobConfig, tasks: int) -> str:
    """What a stage asks for, in words."""
    processes = job.gpus_per_node or job.processes_per_node
    parts = [f"{tasks} x" if tasks > 1 else "", f"{job.nodes} node{'s' * (job.nodes > 1)}"]
    parts.append(f"of {job.gpus_per_node} GPU{'s' * (job.gpus_per_node > 1)}" if job.gpus_per_node else "without GPUs")
    if job.nodes * processes > 1:
        parts.append(f"({job.nodes * processes} processes)")
    parts += [f"{job.cpus_per_node} CPUs" if job.cpus_per_node else "", job.memory or "", job.time or ""]
    return " ".join(part for part in parts if part)


def submission(order: Order, stage: Stage, anew: bool) -> Submission:
    """The job of one stage, or its array: of tasks that are told what to do those that are missing, or all `anew`."""
    job: JobConfig = getattr(order.cluster, stage.asks or stage.name)
    count, array = job.tasks, f"0-{job.tasks - 1}" if job.tasks > 1 else None
    script, words = SCRIPTS / "stage.sbatch", [stage.module, *order.overrides]
    told, names = variables(order, stage, job), ""
    if stage.name == "train":
        script, words = SCRIPTS / "train.sbatch", list(order.overrides)
    if every := tasks(order, stage):
        chosen = {index: task.name for index, task in enumerate(every) if anew or not task.finished}
        count, array, words = len(chosen), ",".join(map(str, chosen)), []
        told["DRAFTSMITH_TASKS"] = str(tasks_folder(order.directory, stage))
        names = ": " + ", ".join(chosen.values())
    others: tuple[list[str], ...] = ()
    asked, told_size = options(order, stage, job, array), size(job, count) + names
    if stage.beside:
        part: JobConfig = replace(getattr(order.cluster, stage.beside), time=job.time)
        silent = replace(stage, progress=None)  # the script is signalled, and runs on the first group
        others = ([*options(order, silent, part, None), *OF_SCRIPT],) * part.tasks
        told_size += f", beside {stage.beside} on {size(part, part.tasks)}"
    after = "afterany" if stage == TABLE else "afterok"
    return Submission(stage.name, asked, script, words, told, told_size, after, others)


OF_SCRIPT = ["--ntasks-per-node=1", "--requeue", "--open-mode=append"]
"""What the script asks for of the first group of a heterogeneous job only."""


def stages(order: Order) -> list[Stage]:
    """The stages of the order."""
    return chain(order.values, order.directory, swept=bool(order.sweep))


def tasks(order: Order, stage: Stage) -> list[Task]:
    """The tasks of a stage that are each told what to do; none where they are not."""
    return tasks_of(stage, order.values, order.directory, order.overrides, order.sweep)


@dataclass(frozen=True)
class Step:
    """What is to be done about a stage.

    Attributes:
        queued: the job as which it is in the queue.
        submission: what is to be submitted, in place of `queued` if that is there; None if there is nothing to do.
    """

    stage: str
    queued: scheduler.Job | None
    submission: Submission | None


def plan(order: Order, queue: Mapping[str, scheduler.Job]) -> list[Step]:
    """What is to be done about every stage, given what is in the queue.

    What follows on a stage that is submitted is submitted, too: if it is in the queue already, it waits there for a job
    that failed. What waits there with other settings is replaced.

    Raises:
        Refused: such a stage is running, or one that is to be submitted could only fail.
    """
    steps: list[Step] = []
    again = False
    for stage in stages(order):
        job = queue.get(stage.name)
        if again and job is not None and not job.waits:
            raise Refused(f"{stage.name} is running (job {job.id}) on what must be made again; scancel {job.id} first")
        fits = job is None or job.made_of in ("", submitted_with(order, stage))
        if job is not None and not fits and not job.waits:
            sections = ", ".join(stage.sections)
            raise Refused(f"{stage.name} is running (job {job.id}) with other settings ({sections}); scancel it first")
        missing = job is None and not is_done(stage, order.values, order.directory, order.sweep)
        anew, again = again, again or not fits or missing
        if again:
            require_possible(stage, order.values, order.cluster)
        steps.append(Step(stage.name, job, submission(order, stage, anew) if again else None))
    return steps


def carry_out(order: Order, steps: Sequence[Step]) -> Iterator[tuple[str, str]]:
    """Submit what is to be submitted, and note the jobs for slurm.status; yields each stage with what was done."""
    record = order.directory / "slurm" / "jobs.json"
    known = read_json(record)["jobs"] if record.exists() else {}
    before: str | None = None
    for step in steps:
        if step.submission is None:
            before = step.queued.id if step.queued else None
            yield step.stage, f"job {step.queued.id}, {step.queued.told}" if step.queued else "finished"
            continue
        if step.queued is not None:
            scheduler.cancel(step.queued.id)
        try:
            before = scheduler.submit(step.submission.command(before), step.submission.variables)
        except Refused as error:
            raise Refused(f"{step.stage}: {error}; what comes before it stays: mend this and submit again") from None
        known[step.stage] = before
        write_json(record, {"values": order.values, "sweep": list(order.sweep), "jobs": known})
        yield step.stage, f"job {before}, submitted: {step.submission.size}"


def masked(word: str) -> str:
    """A word of a command; an override that sets a credential shows *** for it."""
    name, equals, value = word.partition("=")
    return f"{name}={masked_variables({name: value})[name]}" if equals and not word.startswith("-") else word


def show(steps: Sequence[Step]) -> None:
    """Print what would be submitted, by what is on disk: commands with their variables, the scripts, and sizes."""
    chosen = [step.submission for step in steps if step.submission is not None]
    before: str | None = None
    for step in steps:
        if step.submission is not None:
            variables = masked_variables(step.submission.variables)
            told = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
            print(f"\n{told} \\\n    {shlex.join(map(masked, step.submission.command(before)))}")
            before = f"<job of {step.stage}>"
        else:
            before = step.queued.id if step.queued else None
    for script in dict.fromkeys([*(each.script for each in chosen), *([SCRIPTS / "job.sh"] if chosen else [])]):
        print(f"\n== {script}\n{script.read_text()}", end="")
    print()
    for step in steps:
        print(f"{step.stage:10}{step.submission.size if step.submission else 'finished or in the queue'}")


def fit(folder: Path) -> Path:
    """A folder as it is, if it can be told to all that is told it: queue, logs, containers, patterns of the shell.

    Raises:
        Refused: it has a character that means something to one of them.
    """
    if found := re.search(r"[^\w./+@=~-]", str(folder)):
        raise Refused(
            f"{folder} has a {found[0]!r} in it; on a cluster, name=, root= and cluster.scratch= are made of letters, "
            "digits and . _ - + @ = ~, and so is the present folder with a container"
        )
    return folder


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Hold the run's lock of submissions, so that two at once do not submit everything twice."""
    (directory / "slurm").mkdir(parents=True, exist_ok=True)
    with (directory / "slurm" / ".lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def main(arguments: Sequence[str]) -> None:
    """The command line.

    Raises:
        Refused: a mistake in the overrides, or Slurm refuses.
    """
    import conf
    from conf.sweep import expand

    if conf.help.asks_for_help(arguments):
        conf.help.tell()
    overrides = [word for word in arguments if word != "--multirun"]
    stray = [word for word in overrides if word.startswith("-")]
    if not overrides or stray:
        raise Refused(
            f"give the run's overrides, experiment=demo say, and perhaps --multirun; not {stray or 'nothing'}"
        )
    jobs: dict[str, Sequence[str]] = {}
    if len(overrides) < len(arguments):
        sweep = expand(overrides)
        run, overrides = sweep.base, sweep.fixed
        jobs = {Path(job.name).name: [word for word in job.overrides if not NOT_TOLD.match(word)] for job in sweep.jobs}
    else:
        run = conf.load(overrides)
    directory = fit(run.directory.absolute())
    if run.spool.gigabytes is not None and jobs:
        raise Refused("--multirun: the runs of a sweep share stored features; spool.gigabytes=null stores them")
    if run.spool.gigabytes is not None and run.cluster.scratch is not None:
        overrides = [*overrides, f"spool.directory='{fit(Path(run.cluster.scratch).absolute() / run.name)}'"]
        run = conf.load(overrides)
    stage_overrides = [word for word in overrides if not NOT_TOLD.match(word)]
    if run.cluster.container.kind != "none":
        fit(Path.cwd())  # it is the folder in there, too
    order = Order(directory, conf.resolved(run), stage_overrides, run.cluster, jobs)
    if run.dry_run:
        show(plan(order, {}))
        return
    with alone(directory):
        steps = plan(order, scheduler.queued(directory, [stage.name for stage in stages(order)]))
        submitted = {step.stage for step in steps if step.submission is not None}
        if jobs and "train" in submitted:
            from train.sweep import begin

            begin(directory, list(jobs))
        for stage in stages(order):
            if stage.name in submitted:
                write_tasks(directory, stage, tasks(order, stage))
        for name, done in carry_out(order, steps):
            print(f"{name:10}{done}", flush=True)
    root = "" if run.root == "runs" else f" root={shlex.quote(run.root)}"
    print(f"\npython -m slurm.status {run.name}{root}     # how it stands\ntail -F {directory}/slurm/*.log")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as error:
        print(f"submit: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"submit: {error.strerror}: {error.filename}", file=sys.stderr)
        sys.exit(2)
