"""Tiny random targets of every family of MTP modules, and the families' facts as the tests know them.

The facts are written down a second time here, from the engines' contract and not from models/families.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from models.config import TargetConfig
from models.families import dense_block, native_block
from models.mtp import MtpConfig, MtpHead
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
