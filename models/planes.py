"""Planes of a running transformers decoder: plane i is the residual stream after i decoder layers, FINAL the last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from models.errors import Refused

FINAL = -1
"""Stands for the final plane, after the target's final norm, among plane numbers."""


def decoder_of(model: Any, num_layers: int) -> Any:
    """The decoder inside a transformers causal language model, with its `layers`.

    Raises:
        Refused: its decoder layers are not where transformers puts them.
    """
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != num_layers:
        raise Refused(f"{type(model).__name__}: its {num_layers} decoder layers are not where transformers puts them")
    return decoder


@contextmanager
def captured(decoder: Any, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Within the block, every forward of `decoder` leaves the wanted planes [B, L, H] in the yielded dict.

    Args:
        layers: planes 1 .. L, the last before the final norm; plane 0 and FINAL leave no layer.
    """
    taken: dict[int, torch.Tensor] = {}

    def taker(layer: int) -> Any:
        def hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
            taken[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    with ExitStack() as stack:
        for layer in layers:
            # Plane i leaves layer i - 1 (counted from 0).
            stack.callback(decoder.layers[layer - 1].register_forward_hook(taker(layer)).remove)
        yield taken
