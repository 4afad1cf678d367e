"""Rotary embedding of the draft head, equal to the target's unless overridden.

The frequencies come from transformers itself. What is ours is the refusal: a rope type that the engines'
draft classes do not compute in the same way, or a partial rotation, stops here instead of decaying
acceptance at long context. Only keys that change the rotation are kept, and yarn's attention factor stands
under one name, so that nothing is left for an engine to derive in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.errors import Refused

REQUIRED: dict[str, tuple[str, ...]] = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("rope_theta", "factor", "original_max_position_embeddings"),
}
OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
}
BY_LAYER = "full_attention"
"""Of targets whose layers rotate differently (Gemma 3), the head takes the layers that see everything, as it does."""


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """What yarn multiplies cosines and sines by (arXiv 2309.00071, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def reach(parameters: Mapping[str, Any]) -> float:
    """Positions that both engines tabulate of a yarn rotation, whatever the context; other kinds follow the context."""
    if parameters.get("rope_type") != "yarn":
        return math.inf
    return float(parameters["original_max_position_embeddings"] * parameters["factor"])


def standardised(parameters: Mapping[str, Any] | None, *, strict: bool = False) -> dict[str, Any]:
    """Rope parameters as a plain dict with `rope_type`, `rope_theta` and what else the type reads.

    Args:
        parameters: in the layout of transformers 5, of one kind or by type of layer.
        strict: refuse keys that the type does not read instead of leaving them behind.

    Raises:
        Refused: the type is unknown or lacks a key, or only part of a head is rotated.
    """
    values = {key: value for key, value in (parameters or {}).items() if value is not None}
    if isinstance(values.get(BY_LAYER), Mapping):
        values = {key: value for key, value in values[BY_LAYER].items() if value is not None}
    if values.pop("partial_rotary_factor", 1.0) != 1.0:
        raise Refused(
            f"rope parameters {parameters}: a partial_rotary_factor is not supported by the engines' heads; set "
            "draft.rope_parameters to a rotation of their own, {rope_type: default, rope_theta: 10000.0} say"
        )
    kind = values.get("rope_type")
    if kind not in REQUIRED:
        known = ", ".join(REQUIRED)
        raise Refused(f"rope parameters {parameters} are not of a supported type ({known}); set draft.rope_parameters")
    if missing := [key for key in REQUIRED[kind] if key not in values]:
        raise Refused(f"rope parameters {parameters} have no {', '.join(missing)}; set draft.rope_parameters")
    read = {"rope_type", *REQUIRED[kind], *OPTIONAL.get(kind, ())}
    if strict and (unknown := sorted(values.keys() - read)):
        raise Refused(f"rope parameters of type {kind} do not know {', '.join(unknown)}; correct draft.rope_parameters")
    # vLLM takes an integer factor of linear scaling for a list of them.
    numbers = {key: float(value) if key == "factor" else value for key, value in values.items() if key in read}
    return _one_attention_factor(numbers)


def attention_scales(values: Mapping[str, Any]) -> tuple[float, float]:
    """What cosines and sines are multiplied by, as transformers and vLLM read rope parameters, and as SGLang does.

    attention_factor is theirs, attn_factor SGLang's, and a factor on what it takes otherwise; 1 for all but yarn.
    """
    if values.get("rope_type") != "yarn":
        return 1.0, 1.0
    factor, mscale, all_dim = values["factor"], values.get("mscale"), values.get("mscale_all_dim")
    usual = yarn_scale(factor)
    pair = None if mscale is None or all_dim is None else yarn_scale(factor, mscale) / yarn_scale(factor, all_dim)
    own = values.get("attention_factor")
    if own is None:
        own = pair if pair is not None and mscale and all_dim else usual
    added = values.get("attn_factor")
    return own, (usual if pair is None else pair) * (1.0 if added is None else added)


def _one_attention_factor(values: dict[str, Any]) -> dict[str, Any]:
    """Yarn's attention factor explicit where it is not the default, instead of mscale and mscale_all_dim."""
    own, _ = attention_scales(values)
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        values.pop(key, None)
    if values["rope_type"] == "yarn" and own != yarn_scale(values["factor"]):
        values["attention_factor"] = own
    return values


class Rope(torch.nn.Module):
    """Rotates queries and keys [R, heads, E] at integer positions [R]."""

    def __init__(self, parameters: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> None:
        super().__init__()
        config = LlamaConfig(
            head_dim=head_dim,
            rope_parameters=standardised(parameters),
            max_position_embeddings=max_position_embeddings,
        )
        self.rotary = LlamaRotaryEmbedding(config)

    def table(self, positions_R: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [R, 1, E] for these positions."""
        like = torch.empty(0, dtype=dtype, device=positions_R.device)
        cos_1RE, sin_1RE = self.rotary(like, positions_R[None])
        return cos_1RE[0, :, None], sin_1RE[0, :, None]


def rotate(x_RNE: torch.Tensor, cos_R1E: torch.Tensor, sin_R1E: torch.Tensor) -> torch.Tensor:
    """Apply the rotation (RoFormer, arXiv 2104.09864, in the half-split layout of Llama)."""
    left, right = x_RNE.chunk(2, -1)
    return x_RNE * cos_R1E + torch.cat((-right, left), -1) * sin_R1E
