"""Families of MTP modules: what each calls its tensors, and in what little their computation differs.

All are one idea (DeepSeek-V3, arXiv 2412.19437, section 2.2): the target's final plane of position t and the
embedding of token t+1, each normed, are joined by one projection and pass through one decoder layer of the target's
own kind and a last norm; the target's output head reads token t+2 from it. The layer, its norms and its rotation are
transformers' own classes, so that experts, latent attention and gates are not written again here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from models.errors import Refused
from models.rope import standardised
from models.target import VOLATILE_KEYS, Target

BY_LENGTH = ("dynamic", "longrope")
"""Rope types whose frequencies depend on the longest position that is rotated together with a row."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Configuration keys of a mixture of experts."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table.

    Attributes:
        package, stem: where transformers keeps its classes, and what their names begin with.
        text: what stands between the stem and "Config" or "RotaryEmbedding".
        prefix: of a module's tensors in a checkpoint; {index} counts modules.
        appended: they are counted on after the target's layers instead of from 0.
        names: what it calls the parts of an `MtpHead`; the layer's tensors may stand among them without a name.
        copies: tensors of the target ("embedding", "lm_head") that a checkpoint may repeat within the module.
        count: key of the target's configuration that says how many modules there are.
        hidden_first: the projection reads [hidden, embedding] instead of [embedding, hidden].
        zeroed: the embedding that a row at position 0 is fed is zero.
        normed_feedback: what is fed back is the output after the last norm instead of the sum before it.
    """

    package: str
    stem: str
    text: str = ""
    prefix: str
    appended: bool = False
    names: Mapping[str, str]
    copies: Mapping[str, str] = field(default_factory=dict)
    count: str
    hidden_first: bool = False
    zeroed: bool = False
    normed_feedback: bool = True

    def classes(self) -> SimpleNamespace:
        """transformers' `config`, `layer`, `norm` and `rotary` of this family.

        Raises:
            Refused: the installed transformers does not have one of them.
        """
        found = {}
        for key, module, name in (
            ("config", "configuration", f"{self.stem}{self.text}Config"),
            ("layer", "modeling", f"{self.stem}DecoderLayer"),
            ("norm", "modeling", f"{self.stem}RMSNorm"),
            ("rotary", "modeling", f"{self.stem}{self.text}RotaryEmbedding"),
        ):
            path = f"transformers.models.{self.package}.{module}_{self.package}"
            try:
                found[key] = getattr(importlib.import_module(path), name)
            except (ImportError, AttributeError):
                version = transformers.__version__
                raise Refused(f"transformers {version} has no {path}.{name}; install one that has") from None
        return SimpleNamespace(**found)

    def first(self, layers: int) -> int:
        """Index of the first module over a target of so many layers."""
        return layers if self.appended else 0

    def prefix_over(self, layers: int) -> str:
        """Prefix of the first module's tensors."""
        return self.prefix.format(index=self.first(layers))

    def owns(self, name: str, layers: int) -> bool:
        """Whether a tensor of a checkpoint belongs to a module of this family, the first or another."""
        stem, counted, _ = self.prefix.partition("{index}")
        index = name.removeprefix(stem).partition(".")[0]
        if not name.startswith(stem) or not counted:
            return name.startswith(stem)
        return index.isdecimal() and int(index) >= self.first(layers)

    def stored(self, tensors: Mapping[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
        """The tensors of an `MtpHead` as views, under the names that a checkpoint has for its first module."""
        prefix = self.prefix_over(layers)
        named: dict[str, torch.Tensor] = {}
        for own, tensor in tensors.items():
            part, _, rest = own.partition(".")
            name = prefix + ".".join(filter(None, (self.names[part], rest)))
            named.update(_experts(name, tensor) if ".mlp.experts." in own else [(name, tensor)])
        return named


def _experts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices of single experts; transformers holds all their gate_proj and up_proj in one tensor [X, 2I, H]."""
    stem, _, kind = name.rpartition(".")
    for index, matrix in enumerate(tensor):
        parts = zip(("gate", "up"), matrix.chunk(2), strict=True) if kind == "gate_up_proj" else [("down", matrix)]
        for projection, part in parts:
            yield f"{stem}.{index}.{projection}_proj.weight", part


_NEXTN: Any = {
    "prefix": "model.layers.{index}.",
    "appended": True,
    "names": {
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "input_proj": "eh_proj",
        "layer": "",
        "final_norm": "shared_head.norm",
    },
    "copies": {"embed_tokens.weight": "embedding", "shared_head.head.weight": "lm_head"},
    "count": "num_nextn_predict_layers",
    "zeroed": True,
}
_QWEN: Any = {
    "prefix": "mtp.",
    "names": {
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "input_proj": "fc",
        "layer": "layers.0",
        "final_norm": "norm",
    },
}

FAMILIES = {
    "mimo": Family(
        package="qwen2",
        stem="Qwen2",
        prefix="model.mtp_layers.{index}.",
        names={
            "embedding_norm": "token_layernorm",
            "hidden_norm": "hidden_layernorm",
            "input_proj": "input_proj",
            "layer": "",
            "final_norm": "final_layernorm",
        },
        count="num_nextn_predict_layers",
        hidden_first=True,
        zeroed=True,
    ),
    "deepseek_v3": Family(package="deepseek_v3", stem="DeepseekV3", **_NEXTN),
    "glm4_moe": Family(package="glm4_moe", stem="Glm4Moe", normed_feedback=False, **_NEXTN),
    "qwen3_next": Family(package="qwen3_next", stem="Qwen3Next", count="num_nextn_predict_layers", **_QWEN),
    "qwen3_5": Family(package="qwen3_5", stem="Qwen3_5", text="Text", count="mtp_num_hidden_layers", **_QWEN),
}
"""Under the model type of the targets that bring such modules; mimo's stand over any dense target.

What a module reads is the target's final plane after its norm, as SGLang gives it. vLLM's own MiMo target hands it out
before the norm, so that a MiMo module trained here suits that target in SGLang; over any other target it suits both.
"""


def family_of(target: Target) -> str:
    """The family of the target's own MTP module.

    Raises:
        Refused: it has none of a family that is known here, or several.
    """
    name = target.config.model_type.removesuffix("_text")
    name = name if name in FAMILIES else "mimo"
    family = FAMILIES[name]
    if not any(family.owns(each, target.num_layers) for each in target.files):
        raise Refused(
            f"draft.algorithm=mtp_native: {target.path} ({target.config.model_type}) holds no MTP module of a "
            f"known family ({', '.join(FAMILIES)}); draft.algorithm=mtp trains a new one for a dense target"
        )
    if (count := getattr(target.config, family.count, None)) not in (None, 1):
        raise Refused(
            f"draft.algorithm=mtp_native: {target.path} has {family.count}={count}; only one module is supported"
        )
    return name


def native_block(target: Target) -> dict[str, Any]:
    """Configuration of the target's own decoder layer, as its MTP module has it: with full attention.

    Raises:
        Refused: rotations depend on how long the longest text is.
    """
    values = {key: value for key, value in target.config.to_dict().items() if key not in VOLATILE_KEYS}
    kind = (values.get("rope_parameters") or {}).get("rope_type")
    if kind in BY_LENGTH:
        raise Refused(f"draft.algorithm=mtp_native: {target.path} has rope of type {kind}, which is not supported")
    if values.get("layer_types"):
        values["layer_types"] = ["full_attention"] * target.num_layers
    return values


def dense_block(target: Target) -> dict[str, Any]:
    """Configuration of a Qwen2 layer with the dimensions of a dense target: what engines build for a MiMo module.

    Raises:
        Refused: the target is not dense, or such a layer over it is not what an engine would compute.
    """
    config = target.config

    def refuse(why: str) -> Refused:
        return Refused(f"draft.algorithm=mtp over {target.path}: {why}")

    for key in (*EXPERTS, "kv_lora_rank"):
        if getattr(config, key, None):
            raise refuse(f"{key}={getattr(config, key)}, a new MTP head needs a dense target like Llama, Qwen, Mistral")
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        raise refuse("it has linear attention, a new MTP head needs a dense target like Llama, Qwen or Mistral")
    if target.nested:
        raise refuse("its config is the text part of a larger one, which vLLM would build the MTP block from")
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if activation != "silu":
        raise refuse(f"its activation is {activation}, the engines' MTP block has silu")
    for key in ("rms_norm_eps", "intermediate_size"):
        if getattr(config, key, None) is None:
            raise refuse(f"its config has no {key}")
    window = getattr(config, "sliding_window", None)
    if window and window < target.context_length:
        raise refuse(f"sliding_window={window}, which vLLM would give the MTP block and training does not")
    if getattr(config, "quantization_config", None):
        raise refuse("it is quantised, and vLLM would take the MTP block for quantised too")
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    if config.hidden_size % heads or heads % groups or config.hidden_size // heads % 2:
        raise refuse(
            f"hidden_size={config.hidden_size}, {heads} attention and {groups} key-value heads do not divide into "
            "heads of an even size, hidden_size / heads, that the engines' MTP block has"
        )
    try:
        rope = standardised(config.rope_parameters)
    except Refused as error:
        raise refuse(f"{error} (only with draft.algorithm=eagle3)") from None
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": target.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "max_position_embeddings": target.context_length,
        "vocab_size": target.vocab_size,
    }
