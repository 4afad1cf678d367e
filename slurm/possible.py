"""What a stage would refuse when its job begins, perhaps hours after it was submitted: told before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featurize.sources import local
from models.errors import Refused
from slurm.chain import Stage, Values, generated, sources
from slurm.config import ClusterConfig


def require_possible(stage: Stage, values: Values, cluster: ClusterConfig) -> None:
    """Look at what a stage's job will need, as far as it can be seen from here.

    Raises:
        Refused: no data are named, a file is not there, or a server is given fewer GPUs than it spans.
    """
    for key, engine in servers(stage, values).items():
        asked = "evaluate" if stage.name == "measure" else stage.beside or stage.name
        gpus, wanted = getattr(cluster, asked).gpus_per_node, engine["tensor_parallel_size"]
        if wanted > max(gpus, 1):  # a server on CPUs has no GPU
            raise Refused(
                f"cluster.{asked}.gpus_per_node={gpus} is less than {key}.tensor_parallel_size={wanted}: the server of "
                f"stage {stage.name} would not start; set cluster.{asked}.gpus_per_node={wanted}"
            )
    files = {}
    if stage.name == "generate":
        files["generate.prompts"] = values["generate"]["prompts"]
        if not files["generate.prompts"] and not values["generate"]["routes"]:
            raise Refused(
                "generate.prompts and generate.routes are empty; name prompts to answer, or routes with openings, or "
                "in data.conversations conversations that you have"
            )
    if "extract" in (stage.name, stage.beside):
        files["data.conversations"] = [
            name for name in sources(values) if Path(name).expanduser() not in generated(values)
        ]
        if not sources(values):
            raise Refused("data.conversations names no file; name files, folders or data sets on the hub")
    if stage.name in ("measure", "evaluate"):
        files["eval.datasets"] = [place for place in values["eval"]["datasets"].values() if place is not None]
        if not values["eval"]["prompts"] and not values["eval"]["datasets"]:
            raise Refused("eval.prompts names no file; give it JSON lines of {id, route, messages}")
        for name in values["eval"]["prompts"]:
            if not Path(name).exists() and not inside(name, cluster):
                raise Refused(f"eval.prompts: no file {name}; relative paths start at the current folder")
    for key, names in files.items():
        for name in names:
            if not inside(name, cluster):
                local(name, key)


def servers(stage: Stage, values: Values) -> dict[str, Mapping[str, Any]]:
    """The engines of which a stage's job starts servers, each by its key in the configuration."""
    own, engines = {"engine": values["engine"]}, values["engines"]
    if stage.name == "generate" and values["engine"]["kind"] != "none":
        return own
    featurize = values["featurize"]
    if "extract" in (stage.name, stage.beside) and featurize["backend"] == "vllm" and featurize["url"] is None:
        return own
    if stage.name == "measure":
        return {f"engines.{name}": engine for name, engine in engines.items()}
    running = any(method["url"] for method in values["eval"]["methods"])
    if stage.name == "evaluate" and values["engine"]["kind"] != "none" and not engines and not running:
        return own
    return {}


def inside(name: str, cluster: ClusterConfig) -> bool:
    """Whether a path is one of the jobs' containers, where a folder is mounted elsewhere than here."""
    places = [mount.split(":")[1] for mount in cluster.container.mounts if ":" in mount]
    return any(Path(name).is_relative_to(place) for place in places)
