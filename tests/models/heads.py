"""A head as training leaves it, for the tests of export: no two of its tensors alike, no norm at one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from models.checkpoint import describe, save_head
from models.config import DraftConfig, TargetConfig
from models.eagle3 import Eagle3Config, Eagle3Head, initialise
from models.target import Target, aux_layers, describe_target


def save_trained(
    target_dir: Path, checkpoint: Path, *, vocab: int | None = 100, layers: Sequence[int] | None = None, **draft
) -> tuple[Target, Eagle3Head]:
    """Write a training checkpoint of a random head for a target; its draft vocabulary is every third token."""
    target = describe_target(TargetConfig(path=str(target_dir), dtype="float32"))
    config = Eagle3Config.for_target(target, aux_layers(target, layers), DraftConfig(vocab_size=vocab, **draft))
    torch.manual_seed(0)
    head = Eagle3Head(config, torch.arange(1, 3 * vocab + 1, 3) if vocab else None)
    initialise(head, target, torch.randn(50, len(config.planes), config.target_hidden_size))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 1.5))
    checkpoint.mkdir(parents=True, exist_ok=True)
    save_head(checkpoint, head, describe(target))
    return target, head
