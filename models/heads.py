"""A draft head as it lies in a directory, whoever made it: one view of the layouts that the engines read.

Plain EAGLE-3 (midlayer.* or layers.0.*; legacy, SpecForge's and ours) and the speculators format, in one file or in
shards. Names become those of our export, keys those of the plain format, and keys that are missing have the values
that the engines take for them, since they parse config.json with transformers as we do. Only headers are read until
a tensor is asked for. Pickles are refused: reading one can run code.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import LlamaConfig

from models.artefact import read_json
from models.eagle3 import Eagle3Config
from models.engines import planes_of_sglang
from models.errors import Refused
from models.rope import Rope

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
MOST, MOST_PLANES = 1 << 24, 1 << 10
"""No size of a head exceeds these: a file from outside may not make us compute for hours or fill the memory."""
IDS = "eagle_aux_hidden_state_layer_ids"
ROTARY_CACHE = re.compile(r"rotary_(pos_)?emb\.(inv_freq|(cos|sin)_cached)$")
"""Buffers that some frameworks save and both engines skip."""
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of configurations with an MTP module."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
SPECULATORS_CLASSES = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: its name and header there. `dtype` is None for one that no head is kept in."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(frozen=True)
class HeadFiles:
    """A head on disk.

    Attributes:
        directory: where it lies.
        layout: "plain" or "speculators".
        given: the keys of config.json, flat, as vLLM sees them.
        config: the same with transformers' values for missing keys; its rope is in the layout of transformers 5.
        tensors: by the name that our export gives them.
    """

    directory: Path
    layout: str
    given: dict[str, Any]
    config: Any
    tensors: dict[str, Stored]

    @classmethod
    def open(cls, directory: Path) -> HeadFiles:
        """Read configuration and headers.

        Raises:
            Refused: there is no EAGLE-3 head in safetensors there, or its files are torn or contradict one another.
        """
        if (directory / "head.json").exists():
            raise Refused(f"{directory} is a training checkpoint; export it first (export.checkpoint={directory})")
        try:
            layout, given = flat(read_json(directory / "config.json"), directory)
        except (FileNotFoundError, NotADirectoryError):
            raise Refused(f"{directory} holds no config.json") from None
        tensors: dict[str, Stored] = {}
        for stored in _headers(directory):
            if ROTARY_CACHE.search(stored.name):
                continue
            name = _export_name(stored.name)
            if name in tensors:
                raise Refused(f"{directory} holds both {tensors[name].name} and {stored.name}, which mean the same")
            tensors[name] = stored
        if not tensors.keys() & {"fc.weight", "midlayer.hidden_norm.weight"}:
            nested = given.get("text_config")
            keys = [*given, *(nested if isinstance(nested, dict) else ())]
            mtp = next((f"it is an MTP one ({key} in config.json)" for key in MTP_KEYS if key in keys), None)
            lacking = "it has neither fc.weight nor midlayer.hidden_norm.weight"
            raise Refused(f"{directory} holds no EAGLE-3 head, the only kind that is read here: {mtp or lacking}")
        if given.get("quantization_config"):
            raise Refused(f"{directory} is quantised; give the head that it was made from")
        return cls(directory, layout, given, parsed(given, directory), tensors)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in the dtype of the file."""
        stored = self.tensors[name]
        with safe_open(stored.file, framework="pt") as handle:
            return handle.get_tensor(stored.name)

    @property
    def eagle(self) -> dict[str, Any]:
        """The nested eagle_config, from which SGLang and vLLM's V1 runner read."""
        return self.given.get("eagle_config") or {}

    @property
    def fused(self) -> bool:
        """Whether fc fuses aux planes; without, the target's last hidden state is the feature."""
        return bool(self.eagle.get("use_aux_hidden_state", True))

    @property
    def norm_before_fc(self) -> bool:
        """Whether one norm runs over all planes; the nested key goes before the other, as in vLLM."""
        return bool(self.eagle.get("norm_before_fc", self.given.get("norm_before_fc", False)))

    @property
    def fc_norm(self) -> bool:
        """Whether a norm runs over each plane (SGLang also knows the key's older name)."""
        return bool(self.given.get("fc_norm") or self.given.get("use_aux_norm"))

    @property
    def draft_vocab_size(self) -> int:
        """D."""
        size = self.given.get("draft_vocab_size")
        return self.config.vocab_size if size is None else size

    @property
    def target_hidden_size(self) -> int:
        """Width of a plane."""
        return self.given.get("target_hidden_size") or self.config.hidden_size

    @property
    def architecture(self) -> str:
        """The first class that config.json names."""
        names = self.given.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else ""

    @property
    def num_planes(self) -> int:
        """Planes that fc is made for, as both engines count them."""
        lists = [self.eagle.get(IDS)]
        if "Qwen3" in self.architecture:  # that class of vLLM's alone looks at the outer list
            lists.append(self.given.get(IDS))
        return self.given.get("num_aux_hidden_states") or next((len(ids) for ids in lists if ids), 3)

    @cached_property
    def vllm_planes(self) -> tuple[int, ...] | None:
        """Planes that vLLM (V2 runner) is told to capture, in our counting; None: its default."""
        ids = self.given.get(IDS) or self.eagle.get("layer_ids")
        return tuple(ids) if ids else None

    def sglang_planes(self, model_type: str | None) -> tuple[int, ...] | None:
        """Planes of a target of this type that SGLang is told to capture, in our counting; None: its default."""
        ids = self.eagle.get(IDS)
        return planes_of_sglang(ids, model_type) if ids else None

    def eagle3_config(self, aux_layers: Sequence[int]) -> Eagle3Config:
        """Ours, of the same shape, for these planes."""
        config = self.config
        return Eagle3Config(
            hidden_size=config.hidden_size,
            target_hidden_size=self.target_hidden_size,
            vocab_size=config.vocab_size,
            draft_vocab_size=self.draft_vocab_size,
            aux_layers=tuple(aux_layers),
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
            norm_output=bool(self.given.get("norm_output", False)),
            norm_before_fc=self.norm_before_fc and bool(aux_layers),
            fc_norm=self.fc_norm and bool(aux_layers),
        )


def flat(values: Any, directory: Path) -> tuple[str, dict[str, Any]]:
    """Layout and flat keys of a config.json; the speculators format as vLLM flattens it.

    Args:
        directory: where it lies, for messages.

    Raises:
        Refused: it is none of an EAGLE-3 head, or a list or size in it is none.
    """
    if not isinstance(values, dict):
        raise Refused(f"{directory}/config.json is not a JSON object")
    kind, layer = values.get("speculators_model_type"), values.get("transformer_layer_config")
    if kind is None or "model_type" in values:  # with a model_type, vLLM reads it as the plain format too
        layout, keys = "plain", values
    elif kind == "eagle3" and isinstance(layer, dict):
        layout, keys = "speculators", _flat_speculators(values, layer)
    else:
        raise Refused(f"{directory} is a speculators head of type {kind}, or has no transformer_layer_config")
    eagle = keys.get("eagle_config") or {}
    if not isinstance(eagle, dict):
        raise Refused(f"{directory}/config.json: eagle_config is not an object")
    for ids in (keys.get(IDS), eagle.get(IDS), eagle.get("layer_ids")):
        if ids is not None and not (isinstance(ids, list) and all(type(layer) is int for layer in ids)):
            raise Refused(f"{directory}/config.json: {ids} is no list of layer ids")
    for key, most in {
        "draft_vocab_size": MOST,
        "target_hidden_size": MOST,
        "num_aux_hidden_states": MOST_PLANES,
    }.items():
        if keys.get(key) is not None and not (type(keys[key]) is int and 1 <= keys[key] <= most):
            raise Refused(f"{directory}/config.json: {key}={keys[key]} is not an integer in 1..{most}")
    return layout, keys


def _flat_speculators(values: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    """The keys that vLLM takes over from the speculators format, and its defaults."""
    copied = {"draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm", "norm_output", IDS}
    copied |= {"dtype", "torch_dtype", "quantization_config"}
    return {
        **layer,
        **{key: values[key] for key in copied & values.keys() if values[key] is not None},
        "norm_before_residual": values.get("norm_before_residual", True),
        "architectures": [SPECULATORS_CLASSES.get(layer.get("model_type", "llama"), "")],
    }


def parsed(given: dict[str, Any], directory: Path) -> Any:
    """transformers' view of flat keys, with its values for missing ones.

    Raises:
        Refused: it cannot read them, or a size is out of bounds.
    """
    values = {key: value for key, value in given.items() if key not in ("dtype", "torch_dtype", "model_type")}
    try:
        config = LlamaConfig.from_dict(copy.deepcopy(values))
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())
        raise Refused(
            f"{directory}/config.json is none that transformers and the engines can read ({reason})"
        ) from None
    for key in SIZES:
        if not 1 <= getattr(config, key) <= MOST:
            raise Refused(f"{directory}/config.json: {key}={getattr(config, key)} is not an integer in 1..{MOST}")
    return config


def _headers(directory: Path) -> Iterator[Stored]:
    """Headers of all tensors, in one file or in shards."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        found_there = read_json(index)
        named = found_there.get("weight_map") if isinstance(found_there, dict) else None
        if not isinstance(named, dict):
            raise Refused(f"{index} is no index of shards; copy the head again")
        if any(not isinstance(file, str) or Path(file).name != file for file in named.values()):
            raise Refused(f"{index} names files that are not beside it")
        files = {directory / file for file in named.values()}
    else:
        named, files = None, set(directory.glob("*.safetensors"))
    if not files:
        pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
        if pickles:
            raise Refused(
                f"{directory} keeps its weights in {pickles[0]}, a pickle, which can run any code when it is read; "
                "ask its maker for safetensors, or convert it where there is nothing to lose"
            )
        raise Refused(f"{directory} holds no *.safetensors")
    found = set()
    for path in sorted(files):
        try:
            with safe_open(path, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118, it is no dict
                    if named is None or named.get(name) == path.name:
                        part = handle.get_slice(name)
                        found.add(name)
                        yield Stored(name, path, tuple(part.get_shape()), DTYPES.get(part.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise Refused(f"{path} cannot be read as safetensors ({error}); copy it again") from None
    if named is not None and (lost := sorted(named.keys() - found)):
        raise Refused(f"{index} promises {lost[0]}, which {named[lost[0]]} does not hold; copy the head again")


def _export_name(name: str) -> str:
    """The name that our export gives a tensor, from those of other layouts."""
    name = re.sub(r"^layers\.0\.", "midlayer.", name.removeprefix("model."))
    for index, place in enumerate(("low", "mid", "high")):  # SGLang's older names
        name = re.sub(rf"^aux_norm_{place}\.", f"fc_norm.{index}.", name)
    return name


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same, up to rounding to the coarser of their dtypes."""
    coarse = min((a.dtype, b.dtype), key=lambda dtype: dtype.itemsize)
    return torch.equal(a.to(coarse), b.to(coarse))


def same_rotation(a: tuple[Mapping[str, Any], int], b: tuple[Mapping[str, Any], int], head_dim: int) -> bool:
    """Whether two (rope parameters, max_position_embeddings) rotate alike, however they are written down.

    Raises:
        Refused: one of them is of a type that is not supported, or lacks a value.
    """
    rotations = []
    for parameters, context in (a, b):
        try:
            rotations.append(Rope(parameters, head_dim, context).rotary)
        except (StrictDataclassError, TypeError, ValueError, KeyError, ArithmeticError, RuntimeError) as error:
            raise Refused(f"rope parameters {dict(parameters)} cannot be computed ({error!r})") from None
    one, other = rotations
    alike = one.inv_freq.shape == other.inv_freq.shape and torch.allclose(
        one.inv_freq, other.inv_freq, rtol=1e-5, atol=0
    )
    return alike and math.isclose(one.attention_scaling, other.attention_scaling, rel_tol=1e-5)
