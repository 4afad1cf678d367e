"""Checkpoints of a run: complete or ignored, newest found by number, best kept by simulated AL.

A checkpoint is one directory, written under another name and renamed when everything in it is on disk:
the head in fp32 (the average, where there is one), the optimizer's tensors by parameter name, and state.json
with counters, the identity of the run, what wrote it and its resolved configuration. Tensors are whole, so the
number of processes and the strategy that go on from it are free. What determines the data (seed, epoch, step)
is in the plan and every other random number has a seed of its own, so there is no random state to carry along.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from models.artefact import differences, read_json, replacing_directory, write_json, write_tensors
from models.checkpoint import load_head, save_head
from models.drafts import DraftHead
from models.errors import Refused

log = logging.getLogger(__name__)

TRAINED = "weight"
"""Key of a parameter's own weight among the optimizer's tensors, when the head on disk is the average."""


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        step: optimizer steps done. best_al, best_step: best validation so far.
        identity: fingerprint of the settings and data that decide the weights.
        run_id: of wandb, so that a resumed run goes on in the same one.
    """

    step: int = 0
    best_al: float | None = None
    best_step: int | None = None
    identity: str = ""
    run_id: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, tensors by parameter name and whole.

    Attributes:
        weights: fp32 weights of the head that was judged. trained: those that the optimizer moves, where
            `weights` are their average; None without one.
        moments: optimizer state by "parameter/key".
        processes, strategy: what wrote it.
    """

    progress: Progress
    weights: Mapping[str, torch.Tensor]
    trained: Mapping[str, torch.Tensor] | None
    moments: Mapping[str, torch.Tensor]
    processes: int
    strategy: str


def name_of(step: int) -> str:
    """Directory name of the checkpoint at an optimizer step."""
    return f"step-{step:07d}"


def step_of(directory: Path) -> int:
    """The optimizer step in a checkpoint's name, -1 for anything else."""
    match = re.fullmatch(r"step-(\d+)", directory.name)
    return int(match.group(1)) if match else -1


def checkpoints(root: Path) -> list[Path]:
    """Complete-looking checkpoints under `root`, in numeric order."""
    found = [d for d in root.glob("step-*") if step_of(d) >= 0 and (d / "state.json").exists()]
    return sorted(found, key=step_of)


def save(root: Path, checkpoint: Checkpoint, head: DraftHead, target: dict[str, str], about: dict[str, Any]) -> None:
    """Write one checkpoint; it appears whole or not at all.

    Args:
        head: for its configuration and draft vocabulary; the weights are the checkpoint's.
        about: to be kept with it for people: feature contract, resolved configuration.
    """
    trained = {f"{name}/{TRAINED}": value for name, value in (checkpoint.trained or {}).items()}
    with replacing_directory(root / name_of(checkpoint.progress.step)) as temporary:
        save_head(temporary, head, target, checkpoint.weights)
        write_tensors(temporary / "optimizer.safetensors", {**checkpoint.moments, **trained})
        written = {"processes": checkpoint.processes, "strategy": checkpoint.strategy}
        write_json(temporary / "state.json", {"progress": asdict(checkpoint.progress), **written, **about})


def prune(root: Path, keep: int, progress: Progress) -> None:
    """Delete all but the newest `keep` checkpoints and the best one, and what a killed run left half written."""
    good = [directory for directory in checkpoints(root) if step_of(directory) <= progress.step]
    kept = {*good[-keep:], *(directory for directory in good if step_of(directory) == progress.best_step)}
    own = [directory for directory in root.glob("step-*") if step_of(directory) >= 0]  # others' stay, whatever they are
    for directory in [*own, *root.glob(".step-*.tmp")]:
        if directory not in kept:
            shutil.rmtree(directory, ignore_errors=True)


def read(directory: Path) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        Refused: something in it is missing or torn.
        OSError: it cannot be read just now, which says nothing about what is in it.
    """
    try:
        state = read_json(directory / "state.json")
        progress, processes, strategy = Progress(**state["progress"]), state["processes"], state["strategy"]
        head, _ = load_head(directory)
        tensors = load_file(directory / "optimizer.safetensors")
    except (
        FileNotFoundError,
        NotADirectoryError,
        Refused,
        SafetensorError,
        TypeError,
        KeyError,
        RuntimeError,
    ) as error:
        raise Refused(f"{directory} is not complete ({error})") from None
    own = f"/{TRAINED}"
    trained = {name.removesuffix(own): tensors.pop(name) for name in list(tensors) if name.endswith(own)}
    return Checkpoint(progress, head.state_dict(), trained or None, tensors, processes, strategy)


def complete(directory: Path) -> bool:
    """Whether a checkpoint's files are there, none of them cut short; their contents are not looked at."""
    if not (directory / "state.json").exists():
        return False
    try:
        for name in ("head", "optimizer"):
            with safe_open(directory / f"{name}.safetensors", "pt"):
                pass
    except (FileNotFoundError, NotADirectoryError, SafetensorError):
        return False
    return True


DECIDING = re.compile(
    r"(data|draft|objective|optim|target)\."
    r"|featurize\.(backend|encoding|final_everywhere|teacher_k)$"
    r"|trainer\.(epochs|init_from|pack_tokens|packs_per_step|precision|seed|shuffle_shards)$"
)
"""Options that may decide weights; the others are free to change between a checkpoint and what goes on from it."""


def other_settings(checkpoint: Path, settings: Mapping[str, Any]) -> str:
    """Why a checkpoint of another identity is not gone on from, with the options that were others then.

    Args:
        settings: the resolved configuration now.
    """
    try:
        then = read_json(checkpoint / "state.json")["config"]
    except (FileNotFoundError, Refused, KeyError):
        then = {}
    changed = differences(then, dict(settings)) if then else ()
    told = "; ".join(f"{key} was {was}, is {now}" for key, was, now in changed if DECIDING.match(key))
    return (
        f"{checkpoint.parent.parent} was trained with other settings or data{f' ({told})' if told else ''}; "
        "set them back, choose another name=..., or delete that folder"
    )


def newest(root: Path, identity: str, settings: Mapping[str, Any]) -> Path | None:
    """The newest complete checkpoint, by number; None when there is none at all.

    A torn checkpoint is passed over with a warning for the one before it.

    Args:
        identity: of the run. settings: its resolved configuration, to tell what differs.

    Raises:
        Refused: there are checkpoints but none is readable, or they belong to other settings or data.
    """
    candidates = [d for d in root.glob("step-*") if step_of(d) >= 0] if root.exists() else []
    for directory in sorted(candidates, key=step_of, reverse=True):
        try:
            found = read(directory)
        except Refused as error:
            log.warning("checkpoint %s; trying the one before", error)
            continue
        if found.progress.identity != identity:
            raise Refused(other_settings(directory, settings))
        return directory
    if candidates:
        raise Refused(f"no checkpoint under {root} is complete; restore one or delete {root.parent} to start again")
    return None
