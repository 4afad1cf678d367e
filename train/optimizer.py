"""AdamW for everything, or Muon for the head's own matrices and AdamW for the rest.

Muon (Jordan et al. 2024, scaled as in arXiv 2502.16982 so that learning rates mean what they mean for AdamW)
orthogonalises the momentum of a matrix. The output head stays with AdamW: it starts as the target's rows
and each row is a token of its own. Learning rates are peaks, multiplied by the schedule's factor.
"""

from __future__ import annotations

from typing import Any

import torch

from models.eagle3 import Eagle3Head
from train.config import OptimConfig


class Optimizer:
    """One or two torch optimizers that step together."""

    def __init__(self, head: Eagle3Head, settings: OptimConfig) -> None:
        body = [p for name, p in head.named_parameters() if p.dim() == 2 and not name.startswith("lm_head")]
        chosen = {id(parameter) for parameter in body} if settings.muon_lr is not None else set()
        rest = [parameter for parameter in head.parameters() if id(parameter) not in chosen]
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

    def step(self, factor: float) -> None:
        """Update with every peak learning rate times `factor`, and forget the gradients."""
        for peak, optimizer in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state, on the CPU, by a name that says where it belongs."""
        return {
            f"{part}.{index}.{key}": torch.as_tensor(value).detach().cpu()
            for part, (_, optimizer) in enumerate(self.parts)
            for index, values in optimizer.state_dict()["state"].items()
            for key, value in values.items()
        }

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take back what `state` gave."""
        for part, (_, optimizer) in enumerate(self.parts):
            restored: dict[int, dict[str, Any]] = {}
            for name, value in tensors.items():
                which, index, key = name.split(".", 2)
                if int(which) == part:
                    restored.setdefault(int(index), {})[key] = value
            optimizer.load_state_dict({"state": restored, "param_groups": optimizer.state_dict()["param_groups"]})
