"""A head on disk: fp32 weights in safetensors under the export's names, and what they mean in head.json."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file

from models.artefact import read_json, write_json, write_tensors
from models.config import SHAPE
from models.drafts import DraftHead, HeadConfig, make_head
from models.eagle3 import Eagle3Config, Eagle3Head
from models.errors import Refused
from models.mtp import MtpConfig
from models.target import Target
from models.vocabulary import ids_from_offsets, maps

KINDS: dict[str, type[Eagle3Config | MtpConfig]] = {"eagle3": Eagle3Config, "mtp": MtpConfig}

OPTIONS = {
    "use_aux_hidden_state": "draft.use_aux_hidden_state",
    "aux_layers": "target.aux_layers",
    "draft_vocab_size": "draft.vocab_size",
    **{key: f"draft.{key}" for key in SHAPE},
}
"""What of a head a run's options decide, the rest being the target's."""


def describe(target: Target) -> dict[str, str]:
    """What ties a head to its target: hashes of the configuration and of a sample of the weights."""
    return {"config_hash": target.config_hash, "weights_hash": target.weights_hash}


def differing_target(made_for: Mapping[str, str], its: Mapping[str, str]) -> str:
    """In which hash two descriptions of a target differ, with both; empty when it is one target."""
    names = {"config_hash": "configuration", "weights_hash": "weights"}
    told = [f"{names[key]} {made_for.get(key)}, here {its[key]}" for key in names if made_for.get(key) != its[key]]
    return "; ".join(told)


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


def read_config(directory: Path) -> tuple[HeadConfig, dict[str, Any]]:
    """What a head is, and the description of its target, from head.json alone.

    Raises:
        Refused: it is missing, or describes no head.
    """
    try:
        meta = read_json(directory / "head.json")
        if meta["algorithm"] not in KINDS:
            raise Refused(
                f"{directory} holds a head of algorithm {meta['algorithm']}, which is not one of {', '.join(KINDS)}"
            )
        return KINDS[meta["algorithm"]].from_dict(meta["config"]), dict(meta["target"])
    except FileNotFoundError as error:
        raise Refused(f"{directory} holds no complete head ({error})") from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _no_head(directory, error) from None


def _no_head(directory: Path, error: Exception) -> Refused:
    reason = " ".join(str(error).split()) or repr(error)
    return Refused(f"{directory}/head.json describes no draft head ({reason}); copy the checkpoint again")


def load_head(directory: Path) -> tuple[DraftHead, dict[str, Any]]:
    """Read a head and the description of its target.

    Raises:
        Refused: files are missing or torn, or their tensors are not those of the configuration.
    """
    config, made_for = read_config(directory)
    try:
        tensors = load_file(directory / "head.safetensors")
    except (FileNotFoundError, SafetensorError) as error:
        raise Refused(f"{directory} holds no complete head ({error})") from None
    offsets = tensors.pop("d2t", None)
    try:
        ids_D = None if offsets is None else ids_from_offsets(offsets)
        head = make_head(config, ids_D)
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise _no_head(directory, error) from None
    if ids_D is not None and (ids_D[0] < 0 or ids_D[-1] >= config.vocab_size or not (ids_D.diff() > 0).all()):
        raise Refused(
            f"{directory}: d2t is no ascending map into 0..{config.vocab_size - 1}; copy the checkpoint again"
        )
    wanted, found = head.state_dict(), tensors
    if wanted.keys() != found.keys():
        missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
        raise Refused(f"{directory}: missing {missing}, unexpected {extra}")
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            shapes = f"{tuple(tensor.shape)}, head.json says {tuple(wanted[name].shape)}"
            raise Refused(f"{directory}: {name} has shape {shapes}; copy the checkpoint again")
    head.load_state_dict({name: tensor.to(torch.float32) for name, tensor in found.items()})
    return head, made_for


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
