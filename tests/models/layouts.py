"""Heads on disk for the tests of what reads them: one as training leaves it, and the layouts that others write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models.checkpoint import describe, save_head
from models.config import DraftConfig, ExportConfig
from models.eagle3 import Eagle3Config, Eagle3Head
from models.export import export_head
from models.target import Target

Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]

TARGET = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 50_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}
"""Changes to the tiny target that make losing its rope visible."""


def trained(target: Target, vocab: int | None = 100, layers=(2, 4, 5), **draft: Any) -> Eagle3Head:
    """A head whose matrices have a direction that stands out and whose norms have moved."""
    generator = torch.Generator().manual_seed(0)
    config = Eagle3Config.for_target(target, layers, DraftConfig(vocab_size=vocab, **draft))
    ids = torch.randperm(target.vocab_size, generator=generator)[:vocab].sort().values if vocab else None
    head = Eagle3Head(config, ids)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.1 * noise)
            else:
                rows, columns = (torch.randn(size, generator=generator) for size in parameter.shape)
                parameter.copy_((noise + torch.outer(rows, columns)) * parameter.shape[1] ** -0.5)
    return head


def exported(target: Target, directory: Path, dtype: str = "bfloat16", **shape: Any) -> Eagle3Head:
    """Export such a head to `directory` by way of a checkpoint beside it."""
    head, checkpoint = trained(target, **shape), directory.with_name(directory.name + "-checkpoint")
    checkpoint.mkdir()
    save_head(checkpoint, head, describe(target))
    export_head(checkpoint, directory, target, ExportConfig(dtype=dtype))
    return head


def changed(source: Path, directory: Path, edit: Edit, *, own: bool = False) -> Path:
    """A copy of an export with `edit` applied to its configuration and tensors; of our `own`, it keeps export.json."""
    shutil.copytree(source, directory)
    if not own:
        (directory / "export.json").unlink()
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    edit(config, tensors)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def as_layers(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """The other spelling of the layer's names."""
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)


def rope_of_transformers_5(config: dict[str, Any], _: Any) -> None:
    """Rope in one dictionary."""
    rope = {"rope_type": "default", **(config.pop("rope_scaling") or {}), "rope_theta": config.pop("rope_theta")}
    config["rope_parameters"] = rope


def as_legacy(config: dict[str, Any], _: Any) -> None:
    """What the authors of EAGLE-3 publish: the default planes, few keys, a short context."""
    for key in (
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config",
        "num_aux_hidden_states",
        "target_hidden_size",
        "norm_before_residual",
        "norm_before_fc",
        "attention_bias",
        "mlp_bias",
    ):
        del config[key]
    config["max_position_embeddings"] = 512


def as_specforge(config: dict[str, Any], _: Any) -> None:
    """SpecForge: planes in eagle_config alone, in SGLang's counting; flags only where they are on."""
    for key in ("eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "target_hidden_size"):
        del config[key]
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if not config[key]:
            del config[key]
    config["dtype"] = config.pop("torch_dtype")


def as_speculators(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """speculators: the layer's configuration nested, planes outside in vLLM's counting, the other layer names."""
    as_layers(config, tensors)
    outer: dict[str, Any] = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
    outer["speculators_config"] = {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}}
    for key in (
        "draft_vocab_size",
        "target_hidden_size",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "eagle_aux_hidden_state_layer_ids",
        "torch_dtype",
    ):
        outer[key] = config.pop(key)
    for key in ("architectures", "eagle_config", "num_aux_hidden_states"):
        del config[key]
    rope_of_transformers_5(config, tensors)
    inner = dict(config)
    config.clear()
    config.update(outer, transformer_layer_config=inner)


def sharded(directory: Path) -> Path:
    """Split the one file of a head in two, with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
