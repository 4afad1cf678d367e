"""Conventions of vLLM and SGLang for a draft head: the one place where ours are converted to theirs.

Ours: plane i is the residual stream after i decoder layers. vLLM takes such ids raw, from the top level of
config.json. SGLang takes the 0-based number of the layer whose output is meant, one less, from the nested
eagle_config (over DeepSeek not always). Both are always written, with their count and every norm flag, so that
neither engine guesses.
Both stay silent about missing tensors, so `expected_tensors` says what a file must hold.

A config.json comes in two dialects. "plain" is what both engines read. "speculators" is the layout of that
library, which vLLM reads too: the decoder layer described apart from the algorithm, layers.0 for midlayer.

A new MTP head is written as a module of MiMo's, the one dense family that both engines lay over any dense target.
vLLM builds it from the target's configuration, to which its module count is added at serving; SGLang from ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from models.eagle3 import Eagle3Config
from models.errors import Refused
from models.mtp import MtpConfig
from models.rope import yarn_scale
from models.serving import remarks_on


def vllm_layer_ids(aux_layers: Sequence[int]) -> list[int]:
    """Our plane numbers as vLLM counts them: unchanged."""
    return list(aux_layers)


def sglang_layer_ids(aux_layers: Sequence[int], model_type: str) -> list[int]:
    """Our plane numbers as SGLang counts them: the 0-based layer whose output the plane is.

    Over a target of a type that it shifts only from 1, any list but (2, ...) is left as it is; `aux_layers` lets no
    list through that such a target would take for another one.
    """
    if remarks_on(model_type).sglang_shifts_from_1 and aux_layers[0] != 2:
        return list(aux_layers)
    return [layer - 1 for layer in aux_layers]


def planes_of_sglang(layer_ids: Sequence[int], model_type: str | None) -> tuple[int, ...]:
    """The inverse of `sglang_layer_ids`; of a target of unknown type (None), as for most."""
    if remarks_on(model_type).sglang_shifts_from_1 and layer_ids[0] != 1:
        return tuple(layer_ids)
    return tuple(layer + 1 for layer in layer_ids)


def expected_tensors(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of everything in model.safetensors, and nothing else."""
    hidden, wide, size = config.hidden_size, 2 * config.hidden_size, config.head_dim
    inputs = len(config.aux_layers) * config.target_hidden_size  # no planes, no fc
    query, key = config.num_attention_heads * size, config.num_key_value_heads * size
    shapes: dict[str, tuple[int, ...]] = {
        **({"fc.weight": (hidden, inputs)} if inputs else {}),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (query, wide),
        "midlayer.self_attn.k_proj.weight": (key, wide),
        "midlayer.self_attn.v_proj.weight": (key, wide),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (config.intermediate_size, hidden),
        "midlayer.mlp.up_proj.weight": (config.intermediate_size, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, config.intermediate_size),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (inputs,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(len(config.aux_layers))}
    if config.draft_vocab_size < config.vocab_size:
        shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    return shapes


def tensor_name(name: str, dialect: str) -> str:
    """A tensor's name in this dialect, from its plain one."""
    return name.replace("midlayer.", "layers.0.") if dialect == "speculators" else name


def plain_name(name: str) -> str:
    """The inverse of `tensor_name`, whatever the dialect."""
    return name.replace("layers.0.", "midlayer.")


SHARED_KEYS = (
    "hidden_size",
    "target_hidden_size",
    "vocab_size",
    "draft_vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "norm_output",
    "norm_before_fc",
    "fc_norm",
)
"""What is called in config.json as it is here."""


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    """The legacy `rope_scaling`, which both engines read; None when nothing is scaled."""
    if rope["rope_type"] == "default":
        return None
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if "attention_factor" in rope:  # SGLang does not read it, and multiplies the default by attn_factor
        scaling["attn_factor"] = rope["attention_factor"] / yarn_scale(rope["factor"])
    return scaling


def _planes(aux_layers: Sequence[int], model_type: str) -> dict[str, Any]:
    """The keys that say which planes are captured; without any, both engines give the final plane as it is."""
    if not aux_layers:
        return {"eagle_config": {"use_aux_hidden_state": False}}
    return {
        "num_aux_hidden_states": len(aux_layers),
        "eagle_aux_hidden_state_layer_ids": vllm_layer_ids(aux_layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": sglang_layer_ids(aux_layers, model_type),
        },
    }


def eagle3_config_json(
    config: Eagle3Config, dtype: torch.dtype, special: dict[str, Any], model_type: str
) -> dict[str, Any]:
    """config.json of a head that vLLM and SGLang both load.

    Args:
        dtype: of the float tensors; SGLang runs the head in what this says.
        special: bos_token_id and eos_token_id of the target, where it has them.
        model_type: of the target; SGLang counts the planes of some otherwise.
    """
    shared = {key: getattr(config, key) for key in SHARED_KEYS}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": str(dtype).removeprefix("torch."),
        **shared,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": _rope_scaling(config.rope_parameters),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **_planes(config.aux_layers, model_type),
        "norm_before_residual": False,
        **special,
    }


def speculators_config_json(plain: dict[str, Any], k: int, verifier: dict[str, Any]) -> dict[str, Any]:
    """config.json in the speculators dialect, from the plain one.

    Args:
        k: tokens to draft per round.
        verifier: name_or_path and architectures of the target.
    """
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "tie_word_embeddings")
    outside = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", *flags)
    unread = ("architectures", "eagle_config", "rope_theta", "rope_scaling", "torch_dtype")
    layer = {key: value for key, value in plain.items() if key not in (*outside, *unread)}
    layer["rope_parameters"] = {
        "rope_type": "default",
        **(plain["rope_scaling"] or {}),
        "rope_theta": plain["rope_theta"],
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k}],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
        "torch_dtype": plain["torch_dtype"],
        **{key: plain[key] for key in outside},
        "transformer_layer_config": layer,
    }


def eagle3_config_from_json(values: dict[str, Any]) -> Eagle3Config:
    """The inverse of both, for exports of ours.

    Raises:
        KeyError: a key that an export of ours always has is missing.
    """
    if layer := values.get("transformer_layer_config"):
        rope, values = dict(layer["rope_parameters"]), {**layer, **values}
    else:
        rope = {"rope_type": "default", **(values["rope_scaling"] or {}), "rope_theta": values["rope_theta"]}
    rope.pop("attn_factor", None)
    fused = values.get("eagle_config", {}).get("use_aux_hidden_state", True)
    return Eagle3Config(
        aux_layers=tuple(values["eagle_aux_hidden_state_layer_ids"]) if fused else (),
        rope_parameters=rope,
        **{key: values[key] for key in SHARED_KEYS},
    )


HEADS = ("eagle3", "mtp")
"""The methods that draft with an exported head."""


def vllm_options(method: str, model: str | None, k: int) -> dict[str, dict[str, Any]]:
    """Options of `vllm serve`, by name, that make it draft.

    Args:
        method: "eagle3" or "mtp". model: where the head lies; None when it is in the target's own files.
        k: tokens to draft per round.
    """
    own = {} if model is None else {"model": model}
    overrides = {"--hf-overrides": MTP_OVERRIDES} if method == "mtp" and model is not None else {}
    return {**overrides, "--speculative-config": {"method": method, **own, "num_speculative_tokens": k}}


def sglang_options(method: str, model: str | None, k: int) -> dict[str, str]:
    """The same for SGLang, whose count of tokens includes the root."""
    return {
        "--speculative-algorithm": {"eagle3": "EAGLE3", "mtp": "NEXTN"}[method],
        **({} if model is None else {"--speculative-draft-model-path": model}),
        "--speculative-num-steps": str(k),
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": str(k + 1),
    }


MTP_OVERRIDES = {"num_nextn_predict_layers": 1}
"""What vLLM must find in the target's configuration to lay a new MTP module over it."""

MISTAKEN = ("eagle-", "eagle3", "dflash", "dspark")
"""vLLM takes a draft for another kind of head, whatever the method, when its path holds one of these."""


def check_mtp_path(path: str, key: str) -> None:
    """Check that vLLM will take the head at a path for an MTP head.

    Args:
        key: the setting that the path comes from.

    Raises:
        Refused: it would not.
    """
    if word := next((word for word in MISTAKEN if word in path.lower()), None):
        raise Refused(f"vLLM takes an MTP head at {path} for another kind, since its path holds {word!r}; change {key}")


def expected_mtp_tensors(config: MtpConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of everything in model.safetensors of a new MTP head, and nothing else."""
    hidden, wide = config.hidden_size, config.intermediate_size
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_layernorm.weight": (hidden,),
        "hidden_layernorm.weight": (hidden,),
        "input_proj.weight": (hidden, 2 * hidden),
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.q_proj.bias": (query,),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.k_proj.bias": (key,),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.v_proj.bias": (key,),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "final_layernorm.weight": (hidden,),
    }
    return {f"model.mtp_layers.0.{name}": shape for name, shape in shapes.items()}


def mtp_config_json(config: MtpConfig, dtype: torch.dtype, special: dict[str, Any]) -> dict[str, Any]:
    """config.json of a new MTP head that vLLM and SGLang both load; its dimensions are the target's.

    Args:
        dtype: of the tensors. special: as for `eagle3_config_json`.
    """
    rope = config.block["rope_parameters"]
    own = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        **{key: getattr(config, key) for key in own},
        "num_hidden_layers": config.block["num_hidden_layers"],
        **MTP_OVERRIDES,
        "hidden_act": "silu",
        "max_position_embeddings": config.block["max_position_embeddings"],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": _rope_scaling(rope),
        "attention_bias": True,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        **special,
    }
