"""A head on disk: fp32 weights in safetensors under the export's names, and what they mean in head.json."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from models.artefact import read_json, write_json, write_tensors
from models.drafts import DraftHead, HeadConfig, make_head
from models.eagle3 import Eagle3Config, Eagle3Head
from models.errors import Refused
from models.mtp import MtpConfig
from models.target import Target
from models.vocabulary import ids_from_offsets, maps

OPTIONS = {
    "use_aux_hidden_state": "draft.use_aux_hidden_state",
    "aux_layers": "target.aux_layers",
    "draft_vocab_size": "draft.vocab_size",
    **{
        key: f"draft.{key}"
        for key in (
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "norm_output",
            "norm_before_fc",
            "fc_norm",
            "rope_parameters",
        )
    },
}
"""What of a head a run's options decide, the rest being the target's."""


def describe(target: Target) -> dict[str, str]:
    """What ties a head to its target: hashes of the configuration and of a sample of the weights."""
    return {"config_hash": target.config_hash, "weights_hash": target.weights_hash}


def save_head(
    directory: Path, head: DraftHead, target: dict[str, str], weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write head.safetensors and head.json into an existing directory.

    Args:
        weights: by parameter name, where they are not the head's own (a sharded head, say).
    """
    tensors = dict(head.state_dict()) | dict(weights or {})  # buffers are the head's own: training leaves them alone
    if head.reduced:
        tensors["d2t"], _ = maps(head.ids_D.cpu(), head.config.vocab_size)
    write_tensors(directory / "head.safetensors", tensors)
    algorithm = "eagle3" if isinstance(head, Eagle3Head) else "mtp"
    write_json(directory / "head.json", {"algorithm": algorithm, "config": head.config.to_dict(), "target": target})


def load_head(directory: Path) -> tuple[DraftHead, dict[str, Any]]:
    """Read a head and the description of its target.

    Raises:
        Refused: files are missing or torn, or their tensors are not those of the configuration.
    """
    try:
        meta = read_json(directory / "head.json")
        tensors = load_file(directory / "head.safetensors")
    except (FileNotFoundError, SafetensorError) as error:
        raise Refused(f"{directory} holds no complete head ({error})") from None
    kinds: dict[str, type[Eagle3Config | MtpConfig]] = {"eagle3": Eagle3Config, "mtp": MtpConfig}
    if meta["algorithm"] not in kinds:
        raise Refused(f"{directory} holds a head of algorithm {meta['algorithm']}, which is not one of eagle3, mtp")
    config = kinds[meta["algorithm"]].from_dict(meta["config"])
    offsets = tensors.pop("d2t", None)
    head = make_head(config, None if offsets is None else ids_from_offsets(offsets))
    wanted, found = set(head.state_dict()), set(tensors)
    if wanted != found:
        raise Refused(f"{directory}: missing {sorted(wanted - found)}, unexpected {sorted(found - wanted)}")
    head.load_state_dict({name: tensor.to(torch.float32) for name, tensor in tensors.items()})
    return head, meta["target"]


def _algorithm(config: HeadConfig) -> str:
    return "eagle3" if isinstance(config, Eagle3Config) else "mtp_native" if config.native else "mtp"


def differing_options(asked: HeadConfig, wanted: HeadConfig) -> list[str]:
    """Overrides, for a shell, under which a run that asks for one head gets another for the same target instead."""
    if _algorithm(asked) != _algorithm(wanted):
        return [f"draft.algorithm={_algorithm(wanted)}"]
    if not isinstance(wanted, Eagle3Config):
        return []  # its shape is the target's
    keys = [key for key in OPTIONS if getattr(asked, key) != getattr(wanted, key)]
    if not wanted.aux_layers:  # whatever the features hold
        keys = [key for key in keys if key != "aux_layers"]
    words = [f"{OPTIONS[key]}={_override(getattr(wanted, key))}" for key in keys]
    return [shlex.quote(word) if "{" in word else word for word in words]  # bash would expand the braces


def _override(value: Any) -> str:
    """A value as Hydra reads it on a command line."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_override(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_override, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
