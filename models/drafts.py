"""The heads there are, EAGLE-3 and MTP: how one is made. Once made they are stepped alike (models/unroll.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models import eagle3, mtp
from models.config import DraftConfig
from models.eagle3 import Eagle3Config, Eagle3Head
from models.mtp import MtpConfig, MtpHead
from models.target import Target

DraftHead = Eagle3Head | MtpHead
HeadConfig = Eagle3Config | MtpConfig


def head_config(target: Target, aux_layers: Sequence[int], draft: DraftConfig) -> HeadConfig:
    """The head that the settings ask for.

    Args:
        aux_layers: planes that the features hold; a head reads them or the final plane, as its `planes` say.

    Raises:
        Refused: it cannot stand over this target.
    """
    if draft.algorithm == "eagle3":
        return Eagle3Config.for_target(target, aux_layers, draft)
    return MtpConfig.for_target(target, draft, native=draft.algorithm == "mtp_native")


def kind(config: HeadConfig) -> str:
    """What the head is called in tables."""
    if isinstance(config, Eagle3Config):
        return "EAGLE-3" if config.use_aux_hidden_state else "EAGLE-3 without fc"
    return "MTP, the target's own" if config.native else "MTP"


def make_head(config: HeadConfig, ids_D: torch.Tensor | None = None) -> DraftHead:
    """An untrained head in fp32; `ids_D` are the int64 target ids of a reduced draft vocabulary.

    Raises:
        Refused: their number is not the configuration's, or transformers does not know the head's family.
    """
    return Eagle3Head(config, ids_D) if isinstance(config, Eagle3Config) else MtpHead(config)


def initialise(head: DraftHead, target: Target, sample_TAP: torch.Tensor) -> None:
    """Give a new head its start values.

    Args:
        sample_TAP: some of the target's planes that the head reads, [T, A, P], of any float dtype.
    """
    if isinstance(head, Eagle3Head):
        eagle3.initialise(head, target, sample_TAP)
    else:
        mtp.initialise(head, target, sample_TAP)
