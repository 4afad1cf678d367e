"""Checkpoints of a run: complete or ignored, newest found by number, best kept by simulated AL.

A checkpoint is one directory, written under another name and renamed when everything in it is on disk:
the head in fp32, the optimizer's tensors, and state.json with counters and the identity of the run. What
determines the data (seed, epoch, step) is in the plan, so there is no random state to carry along.
"""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from models.artefact import read_json, replacing_directory, write_json, write_tensors
from models.checkpoint import load_head, save_head
from models.eagle3 import Eagle3Head
from models.errors import Refused
from train.optimizer import Optimizer

log = logging.getLogger(__name__)


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


def save(root: Path, head: Eagle3Head, optimizer: Optimizer, progress: Progress, target: Any) -> Path:
    """Write one checkpoint; it appears whole or not at all."""
    path = root / name_of(progress.step)
    with replacing_directory(path) as temporary:
        save_head(temporary, head, target)
        write_tensors(temporary / "optimizer.safetensors", optimizer.state())
        write_json(temporary / "state.json", asdict(progress))
    return path


def prune(root: Path, keep: int, progress: Progress) -> None:
    """Delete all but the newest `keep` checkpoints and the best one, and what a killed run left half written."""
    good = [directory for directory in checkpoints(root) if step_of(directory) <= progress.step]
    kept = {*good[-keep:], *(directory for directory in good if step_of(directory) == progress.best_step)}
    for directory in [*root.glob("step-*"), *root.glob(".step-*.tmp")]:
        if directory not in kept:
            shutil.rmtree(directory, ignore_errors=True)


def restore(root: Path, head: Eagle3Head, optimizer: Optimizer, identity: str) -> Progress | None:
    """Load the newest complete checkpoint into head and optimizer; None when there is none at all.

    A torn checkpoint is passed over with a warning for the one before it.

    Raises:
        Refused: there are checkpoints but none is readable, or they belong to other settings or data.
    """
    candidates = [d for d in root.glob("step-*") if step_of(d) >= 0] if root.exists() else []
    for directory in sorted(candidates, key=step_of, reverse=True):
        try:
            progress = Progress(**read_json(directory / "state.json"))
            saved, _ = load_head(directory)
            tensors = load_file(directory / "optimizer.safetensors")
        except (OSError, Refused, SafetensorError, TypeError) as error:
            log.warning("checkpoint %s is not complete (%s); trying the one before", directory, error)
            continue
        if progress.identity != identity:
            raise Refused(
                f"{root} was trained with other settings or data; choose another name=..., or delete {root.parent}"
            )
        head.load_state_dict(saved.state_dict())
        optimizer.load(tensors)
        return progress
    if candidates:
        raise Refused(f"no checkpoint under {root} is complete; restore one or delete {root.parent} to start again")
    return None
