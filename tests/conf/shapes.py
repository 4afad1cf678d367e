"""Shapes of published targets, as their config.json gives them: what the arithmetic in conf/target is held to.

Copied from configurations that are published with the models or with copies of them; only what sizes follow from.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig

from models.target import Target

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GPT_OSS = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131_072,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def default(theta: float) -> dict[str, Any]:
    """Rope parameters without scaling."""
    return {"rope_type": "default", "rope_theta": theta}


def attention(
    layers: int, hidden: int, mlp: int, heads: int, groups: int, size: int, vocabulary: int
) -> dict[str, Any]:
    """The shape of a decoder of equal layers."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131_072,
    }


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": ("llama", attention(32, 4096, 14_336, 32, 8, 128, 128_256) | {"rope_parameters": LLAMA3}),
    "llama-3.3-70b": ("llama", attention(80, 8192, 28_672, 64, 8, 128, 128_256) | {"rope_parameters": LLAMA3}),
    "qwen3-8b": ("qwen3", attention(36, 4096, 12_288, 32, 8, 128, 151_936) | {"rope_parameters": default(1e6)}),
    "qwen3-32b": ("qwen3", attention(64, 5120, 25_600, 64, 8, 128, 151_936) | {"rope_parameters": default(1e6)}),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        attention(48, 2048, 6144, 32, 4, 128, 151_936)
        | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "rope_parameters": default(1e6)},
    ),
    "qwen3.5-9b": (
        "qwen3_5_text",
        attention(32, 4096, 12_288, 16, 4, 256, 248_320)
        | {"rope_parameters": default(1e7) | {"partial_rotary_factor": 0.25}},
    ),
    "mistral-small-24b": (
        "mistral",
        attention(40, 5120, 32_768, 32, 8, 128, 131_072) | {"rope_parameters": default(1e8)},
    ),
    "gemma-3-27b": (
        "gemma3_text",
        attention(62, 5376, 21_504, 32, 16, 128, 262_208) | {"rope_parameters": GEMMA3_ROPE},
    ),
    "gpt-oss-20b": ("gpt_oss", GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": ("gpt_oss", GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}),
    "deepseek-v3": (
        "deepseek_v3",
        {
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "intermediate_size": 18_432,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "vocab_size": 129_280,
            "max_position_embeddings": 163_840,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 40.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}


def described(name: str) -> Target:
    """A target of a published shape, without files."""
    kind, values = SHAPES[name]
    return Target(name, AutoConfig.for_model(kind, **values), False, torch.bfloat16)
