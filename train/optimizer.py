"""AdamW for everything, or Muon for the head's own matrices and AdamW for the rest; schedule and average.

Muon (Jordan et al. 2024, scaled as in arXiv 2502.16982 so that learning rates mean what they mean for AdamW)
orthogonalises the momentum of a matrix. The output head stays with AdamW: it starts as the target's rows
and each row is a token of its own. Learning rates are peaks, multiplied by the schedule's factor, which is a
function of the optimizer step alone: no scheduler object, nothing to save, nothing to step twice.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from models.drafts import DraftHead
from models.errors import Refused
from train.config import OptimConfig


def check_schedule(optim: OptimConfig, total: int) -> None:
    """Check that a run of `total` optimizer steps has room for warm-up and decay.

    Raises:
        Refused: they overlap.
    """
    if optim.schedule == "wsd" and optim.warmup_steps + optim.decay_share * total > total:
        raise Refused(
            f"optim.warmup_steps={optim.warmup_steps} and optim.decay_share={optim.decay_share} overlap in a run of "
            f"{total} steps; lower one of them"
        )


def schedule(optim: OptimConfig, step: int, total: int) -> float:
    """Factor on the peak learning rates at optimizer step `step` (0-based) out of `total`.

    "wsd" (warm-up, stable, decay; arXiv 2404.06395) stays at the peak until the last `decay_share` of the steps.
    """
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    done = (step - optim.warmup_steps) / max(1, total - optim.warmup_steps)
    shape = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "wsd": min(1.0, (total - step) / max(1.0, optim.decay_share * total)),
    }[optim.schedule]
    return optim.final_share + (1 - optim.final_share) * shape


class Optimizer:
    """One or two torch optimizers that step together, over whole or sharded (DTensor) parameters."""

    def __init__(self, head: DraftHead, settings: OptimConfig) -> None:
        self.names: dict[torch.Tensor, str] = {parameter: name for name, parameter in head.named_parameters()}
        body = [p for p, name in self.names.items() if p.dim() == 2 and not name.startswith("lm_head")]
        chosen = set(body) if settings.muon_lr is not None else set()
        rest = [parameter for parameter in self.names if parameter not in chosen]
        self.parts: list[tuple[float, torch.optim.Optimizer]] = [
            (
                settings.lr,
                torch.optim.AdamW(
                    rest, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
                ),
            )
        ]
        if settings.muon_lr is not None:
            muon = torch.optim.Muon(
                body, lr=settings.muon_lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            self.parts.append((settings.muon_lr, muon))

    def scale(self, factor: float) -> None:
        """Set every learning rate to its peak times `factor`."""
        for peak, optimizer in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor

    def step(self, factor: float) -> None:
        """Update with every peak learning rate times `factor`, and forget the gradients."""
        self.scale(factor)
        for _, optimizer in self.parts:
            optimizer.step()
            optimizer.zero_grad()

    def moments(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Every tensor of the state but step counts: parameter name, key, value (sharded as its parameter is)."""
        for _, optimizer in self.parts:
            for parameter, values in optimizer.state.items():
                for key, value in values.items():
                    if key != "step":
                        yield self.names[parameter], key, value

    def load_moments(self, moments: Mapping[str, torch.Tensor], step: int) -> None:
        """Set the state after `step` updates from whole tensors by "parameter/key".

        Raises:
            Refused: a parameter has none.
        """
        found: dict[str, dict[str, Any]] = {}
        for full_name, value in moments.items():
            name, _, key = full_name.rpartition("/")
            found.setdefault(name, {})[key] = value
        for _, optimizer in self.parts:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self.names[parameter]
                    if name not in found:
                        raise Refused(f"the checkpoint has no optimizer state for {name}")
                    state = {key: _like(parameter, value) for key, value in found[name].items()}
                    if isinstance(optimizer, torch.optim.AdamW):
                        state["step"] = torch.tensor(float(step), device=parameter.device)
                    optimizer.state[parameter] = state


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A whole tensor on a parameter's device, sharded as the parameter is; a copy."""
    value = value.to(parameter.device, copy=True)
    if isinstance(parameter, DTensor):
        # Without the clone the local part is a view that keeps the whole tensor alive.
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None).clone()
    return value


class Average:
    """Exponential moving average of the weights, in fp32, of the pieces that this process holds.

    The decay rises to its value with the number of updates, so that a short run is not mostly its start (as in
    TensorFlow's ExponentialMovingAverage with `num_updates`).

    Args:
        pieces: live tensors of the weights, by name.
        decay: of one optimizer step.
    """

    def __init__(self, pieces: dict[str, torch.Tensor], decay: float) -> None:
        self.pieces, self.decay = pieces, decay
        self.values = {name: piece.clone() for name, piece in pieces.items()}

    def update(self, step: int) -> None:
        """Take in the weights after optimizer step `step` (1-based)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, piece in self.pieces.items():
            self.values[name].lerp_(piece, 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the weights are the average."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, piece in self.pieces.items():
            kept = piece.clone()
            piece.copy_(self.values[name])
            self.values[name].copy_(kept)
