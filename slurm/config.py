"""Typed settings of the cluster (`cluster`): what is the same for every job, and what each stage asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

OURS = r"-[JadoD]|--(job-name|comment|array|dependency|output|chdir|export|parsable|no-requeue|open-mode|wrap)\b"
"""Options of sbatch by which jobs are known, follow one another and go on."""
CONTAINERS = ("none", "pyxis", "apptainer")


@dataclass
class JobConfig:
    """What the job of one stage asks for; null leaves it to the cluster's own defaults.

    Attributes:
        nodes: of one job; only training spans several.
        tasks: jobs of an array that share the work, each on `nodes`; generation and extraction only. With a spool,
            so many parts of extraction run beside training instead, each with what one of those jobs asks for.
        gpus_per_node: also the number of training's processes on a node.
        processes_per_node: the same where there are no GPUs.
        cpus_per_node: of one node's processes together.
        memory: of a node, as sbatch understands it ("64G").
        time: limit as sbatch understands it ("24:00:00"); training, arrays and the evaluation go on after it.
        partition: another one than `cluster.partition`.
    """

    nodes: int = 1
    tasks: int = 1
    gpus_per_node: int = 0
    processes_per_node: int = 1
    cpus_per_node: int | None = None
    memory: str | None = None
    time: str | None = None
    partition: str | None = None


@dataclass
class ContainerConfig:
    """The container in which the stages run.

    Attributes:
        kind: "none", "pyxis" (srun's --container-image, by enroot) or "apptainer".
        image: what that kind takes as an image: a file, or a name in a registry.
        mounts: folders of the nodes, "FOLDER" or "FOLDER:INSIDE"; the current folder and the run's are among them
            in any case.
    """

    kind: str = "none"
    image: str | None = None
    mounts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.kind not in CONTAINERS:
            raise ValueError(f"cluster.container.kind={self.kind} is not one of {', '.join(CONTAINERS)}")
        if (self.kind == "none") != (self.image is None):
            raise ValueError(f"cluster.container.image={self.image} does not go with kind={self.kind}")
        for mount in self.mounts:
            if "," in mount:
                raise ValueError(f"cluster.container.mounts: {mount!r} holds a comma")


@dataclass
class ClusterConfig:
    """Where and how the stages run as Slurm jobs.

    Attributes:
        partition, account, qos, constraint: of every job; null leaves them to Slurm.
        options: further options of sbatch, as they are.
        modules: environment modules to load.
        environment: variables of every job, NCCL's settings among them.
        container: in which the stages run.
        python: interpreter on the nodes (in the container, if there is one); null takes the one that submits.
        scratch: folder that all nodes see, on a file system with locks, in which a run's spool lies under its name;
            null leaves it to `spool.directory`.
        signal_s: seconds before the time limit at which training is asked to save and is requeued; so are arrays and
            the evaluation, which keep what they have as it is.
        evaluate: with several `engines`, also each part of the served sweep (serve_eval/parts.py).
        requeues: how often such a job may be requeued without progress in between.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    options: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    python: str | None = None
    scratch: str | None = None
    signal_s: int = 120
    requeues: int = 3
    prepare: JobConfig = field(default_factory=JobConfig)
    generate: JobConfig = field(default_factory=JobConfig)
    extract: JobConfig = field(default_factory=JobConfig)
    train: JobConfig = field(default_factory=JobConfig)
    export: JobConfig = field(default_factory=JobConfig)
    evaluate: JobConfig = field(default_factory=JobConfig)

    def __post_init__(self) -> None:
        for stage in ("prepare", "generate", "extract", "train", "export", "evaluate"):
            job: JobConfig = getattr(self, stage)
            for key in ("nodes", "tasks", "processes_per_node", "cpus_per_node"):
                if getattr(job, key) is not None and getattr(job, key) < 1:
                    raise ValueError(f"cluster.{stage}.{key}={getattr(job, key)} must be at least 1")
            if job.gpus_per_node < 0:
                raise ValueError(f"cluster.{stage}.gpus_per_node={job.gpus_per_node} must not be negative")
            if job.nodes > 1 and stage != "train":
                raise ValueError(f"cluster.{stage}.nodes={job.nodes}: only training is one job on several nodes")
            if job.tasks > 1 and stage not in ("generate", "extract"):
                raise ValueError(f"cluster.{stage}.tasks={job.tasks}: only generation and extraction are arrays")
        if self.signal_s < 1 or self.requeues < 0:
            raise ValueError(
                f"cluster.signal_s={self.signal_s} must be at least 1, cluster.requeues={self.requeues} at least 0"
            )
        for option in self.options:
            if re.match(OURS, option):
                raise ValueError(f"cluster.options: {option!r} is what slurm.submit itself tells sbatch")
        for module in self.modules:
            if not re.fullmatch(r"\S+", module):
                raise ValueError(f"cluster.modules: {module!r} is not a module's name")
