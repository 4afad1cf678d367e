"""Rotary embedding of the draft head, equal to the target's unless overridden.

The frequencies come from transformers itself. What is ours is the refusal: a rope type that the engines'
draft classes do not compute in the same way, or a partial rotation, stops here instead of decaying
acceptance at long context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.errors import Refused

SUPPORTED = ("default", "linear", "llama3", "yarn")


def standardised(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Rope parameters as a plain dict with `rope_type` and `rope_theta`.

    Raises:
        Refused: the type is unknown, differs per layer, or rotates only part of a head.
    """
    values = dict(parameters or {})
    kind = values.get("rope_type")
    if kind not in SUPPORTED or "rope_theta" not in values:
        raise Refused(
            f"rope parameters {values} are not of a supported type ({', '.join(SUPPORTED)} with a rope_theta); "
            "set draft.rope_parameters"
        )
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise Refused(f"partial_rotary_factor={values['partial_rotary_factor']} is not supported by the engines' heads")
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
