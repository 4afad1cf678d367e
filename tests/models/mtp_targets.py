"""Tiny random targets of every family of MTP modules, and the families' facts as the tests know them.

The facts are written down a second time here, from the engines' contract and not from models/mtp_families.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from models.config import TargetConfig
from models.mtp import MtpConfig, MtpHead
from models.mtp_families import dense_block, native_block
from models.target import Target, describe_target

ROPE = {"rope_type": "default", "rope_theta": 500.0}
SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
}


def facts(**changes: Any) -> SimpleNamespace:
    """What a family does, but for `changes` what most do."""
    usual = {"hidden_first": False, "zeroed": True, "plus_one": False, "feedback": "normed"}
    return SimpleNamespace(**(usual | changes))


FAMILIES: dict[str, SimpleNamespace] = {
    "mimo": facts(
        hidden_first=True,
        model="LlamaForCausalLM",
        layer="qwen2.modeling_qwen2.Qwen2DecoderLayer",
        rotary="qwen2.modeling_qwen2.Qwen2RotaryEmbedding",
        config={"rope_parameters": ROPE, "num_nextn_predict_layers": 1},
    ),
    "deepseek_v3": facts(
        model="DeepseekV3ForCausalLM",
        layer="deepseek_v3.modeling_deepseek_v3.DeepseekV3DecoderLayer",
        rotary="deepseek_v3.modeling_deepseek_v3.DeepseekV3RotaryEmbedding",
        config={
            **EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
    ),
    "glm4_moe": facts(
        feedback="sum",
        model="Glm4MoeForCausalLM",
        layer="glm4_moe.modeling_glm4_moe.Glm4MoeDecoderLayer",
        rotary="glm4_moe.modeling_glm4_moe.Glm4MoeRotaryEmbedding",
        config={
            **EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "head_dim": 12,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_next": facts(
        zeroed=False,
        plus_one=True,
        model="Qwen3NextForCausalLM",
        layer="qwen3_next.modeling_qwen3_next.Qwen3NextDecoderLayer",
        rotary="qwen3_next.modeling_qwen3_next.Qwen3NextRotaryEmbedding",
        config={
            **EXPERTS,
            **HYBRID,
            "num_experts": 4,
            "shared_expert_intermediate_size": 12,
            "num_nextn_predict_layers": 1,
        },
    ),
    "qwen3_5": facts(
        zeroed=False,
        plus_one=True,
        model="Qwen3_5ForCausalLM",
        layer="qwen3_5.modeling_qwen3_5.Qwen3_5DecoderLayer",
        rotary="qwen3_5.modeling_qwen3_5.Qwen3_5TextRotaryEmbedding",
        config=HYBRID | {"mtp_num_hidden_layers": 1},
    ),
}


def save_plain(family: str, directory: Path, **changes: Any) -> Path:
    """Write a random target of a family, without an MTP module, as transformers writes it."""
    model_class = getattr(transformers, FAMILIES[family].model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**(SHAPE | FAMILIES[family].config | changes)))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def described(directory: Path) -> Target:
    """What `models.target` makes of it."""
    return describe_target(TargetConfig(path=str(directory), dtype="float32"))


def random_head(config: MtpConfig, seed: int = 0) -> MtpHead:
    """A head in which no two tensors are alike, no norm is at one and no bias at zero."""
    head = MtpHead(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in head.state_dict().values():
            tensor.normal_(generator=generator)
            tensor.mul_(1.5 * tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.2)
            if tensor.dim() == 1:
                tensor.add_(0.5)
    return head


def config_for(family: str, directory: Path) -> MtpConfig:
    """The configuration of a head over such a target, as if its module were there."""

    target = described(directory)
    block = dense_block(target) if family == "mimo" else native_block(target)
    return MtpConfig(family=family, native=family != "mimo", block=block)


def native_names(family: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the module's tensors in a checkpoint (engine contract, section 4.2), without copies."""
    mlp = {"gate": (40, 32), "up": (40, 32), "down": (32, 40)}
    expert = {"gate": (12, 32), "up": (12, 32), "down": (32, 12)}
    attention = {
        "mimo": {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32)},
        "glm4_moe": {"q": (48, 32), "k": (24, 32), "v": (24, 32), "o": (32, 48)},
        "deepseek_v3": {"q_a": (12, 32), "q_b": (48, 12), "kv_b": (56, 16), "o": (32, 24)},
    }.get(family, {"q": (128, 32), "k": (32, 32), "v": (32, 32), "o": (32, 64)})
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
    layer |= {"input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,)}
    if family in ("mimo", "glm4_moe"):
        layer |= {f"self_attn.{name}_proj.bias": attention[name][:1] for name in "qkv"}
    if family == "deepseek_v3":
        layer |= {"self_attn.kv_a_proj_with_mqa.weight": (20, 32)}
        layer |= {"self_attn.q_a_layernorm.weight": (12,), "self_attn.kv_a_layernorm.weight": (16,)}
    elif family != "mimo":
        size = 12 if family == "glm4_moe" else 16
        layer |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    if family in ("mimo", "qwen3_5"):
        layer |= {f"mlp.{name}_proj.weight": shape for name, shape in mlp.items()}
    else:
        shared = "shared_expert" if family == "qwen3_next" else "shared_experts"
        for one in ("experts.0", "experts.1", "experts.2", "experts.3", shared):
            layer |= {f"mlp.{one}.{name}_proj.weight": shape for name, shape in expert.items()}
        layer["mlp.gate.weight"] = (4, 32)
        if family == "qwen3_next":
            layer["mlp.shared_expert_gate.weight"] = (1, 32)
        else:
            layer["mlp.gate.e_score_correction_bias"] = (4,)
    if family == "mimo":
        norms = "token_layernorm", "hidden_layernorm", "final_layernorm"
        return _prefixed("model.mtp_layers.0.", layer, norms, "input_proj")
    if family in ("deepseek_v3", "glm4_moe"):
        return _prefixed("model.layers.2.", layer, ("enorm", "hnorm", "shared_head.norm"), "eh_proj")
    layer = {f"layers.0.{name}": shape for name, shape in layer.items()}
    return _prefixed("mtp.", layer, ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "fc")


def _prefixed(prefix: str, layer: dict, norms: tuple[str, ...], projection: str) -> dict[str, tuple[int, ...]]:
    own = {f"{name}.weight": (32,) for name in norms} | {f"{projection}.weight": (32, 64)}
    return {prefix + name: shape for name, shape in (own | layer).items()}


def save_native(
    family: str, directory: Path, *, sharded: bool = False, layer_of_target: bool = False, **changes: Any
) -> Path:
    """Write a target with a random MTP module in its files, in bf16 but for the routers' biases.

    Args:
        sharded: in two shards, the module in the second with some of the target.
        layer_of_target: the module's layer is the target's last one.
    """
    save_plain(family, directory, **changes)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    prefix = "mtp.layers.0." if family.startswith("qwen") else "model.layers.2."
    for name, shape in native_names(family).items():
        dtype = torch.float32 if "e_score" in name else torch.bfloat16
        tensors[name] = (0.3 * torch.randn(shape, generator=generator)).to(dtype)
        twin = name.replace(prefix, "model.layers.1.")
        if layer_of_target and twin in tensors:
            tensors[name] = tensors[twin].clone()
    if family in ("deepseek_v3", "glm4_moe"):
        tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    if not sharded:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return directory
    (directory / "model.safetensors").unlink()
    first = {name for name in tensors if name.startswith("model.layers.0.")}
    index: dict[str, Any] = {"metadata": {"total_size": 1}, "weight_map": {}}
    for number, names in enumerate((first, tensors.keys() - first), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, directory / file, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(sorted(names), file)
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
