"""Typed settings of training (`objective`, `optim`, `trainer`)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class ObjectiveConfig:
    """The loss.

    Attributes:
        unroll_steps: K, drafted tokens per row that are trained (training-time test).
        decay: weight of unroll step k is decay ** k.
        step_weights: the weights themselves instead, one per step: [0.51, 0.31, 0.18] is what FastMTP used (arXiv
            2509.18362). They set how much a step counts beside the others; their sum scales the loss.
        row_share: rows that go on from one unroll step to the next are this share of those that could
            (a seeded sample); their loss is scaled so that its expectation does not change.
        loss: against the target's distribution on the draft vocabulary: "kl" (soft cross-entropy), "ce"
            (cross-entropy with its argmax), "nla" (negative log acceptance) or "lk_hybrid" (KL and total
            variation; both LK losses of arXiv 2602.23881 aim at acceptance under sampling).
        out_of_vocabulary: rows whose next token is outside the draft vocabulary: "renormalise" trains them
            like all others, on the target's distribution restricted to the draft vocabulary; "skip" leaves
            them out of the loss, which is divided by all supervised rows all the same: it is then lower by the
            share of rows that is left out. They are misses in every accuracy and acceptance figure either way.
    """

    unroll_steps: int = 7
    decay: float = 0.8
    step_weights: list[float] | None = None
    row_share: float = 1.0
    loss: str = "kl"
    out_of_vocabulary: str = "renormalise"

    def __post_init__(self) -> None:
        if self.unroll_steps < 1:
            raise ValueError(f"objective.unroll_steps={self.unroll_steps} must be at least 1")
        if not 1e-3 <= self.decay <= 1:
            raise ValueError(f"objective.decay={self.decay} is not between 0.001 and 1")
        weights = self.step_weights
        if weights is not None and (len(weights) != self.unroll_steps or not all(0 < w < math.inf for w in weights)):
            raise ValueError(
                f"objective.step_weights={list(weights)} are not unroll_steps={self.unroll_steps} numbers above 0"
            )
        for key, allowed in {
            "loss": ("kl", "ce", "nla", "lk_hybrid"),
            "out_of_vocabulary": ("renormalise", "skip"),
        }.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"objective.{key}={getattr(self, key)} is not one of {', '.join(allowed)}")
        if not 0 < self.row_share <= 1:
            raise ValueError(f"objective.row_share={self.row_share} is not in (0, 1]")

    def weight(self, step: int) -> float:
        """Of an unroll step."""
        return self.decay**step if self.step_weights is None else self.step_weights[step]

    def identity(self) -> dict[str, Any]:
        """All that decides the weights; an option that was added later only where it is used, so that runs go on."""
        return {key: value for key, value in asdict(self).items() if (key, value) != ("step_weights", None)}


@dataclass
class OptimConfig:
    """Optimizer and schedule; the learning rate depends on the optimizer step alone.

    Attributes:
        lr: peak learning rate of AdamW.
        muon_lr: peak learning rate of Muon for the matrices of fc and the layer; null trains all with AdamW.
        betas: of AdamW's two moments.
        weight_decay: decoupled, of AdamW and Muon.
        schedule: "cosine", "linear", "constant" or "wsd" (at the peak until the last `decay_share` of the
            steps, then linear), after the warm-up, down to `final_share` of the peak.
        final_share: share of the peak that the learning rates end at.
        decay_share: with "wsd" the share of the steps that the way down takes.
        warmup_steps: optimizer steps of linear warm-up.
        max_grad_norm: clip by global norm; 0 switches it off.
        ema_decay: per optimizer step, of an average of the weights that is then what is validated, chosen and
            exported; null trains without one.
    """

    lr: float = 1e-4
    muon_lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    schedule: str = "cosine"
    final_share: float = 0.0
    decay_share: float = 0.2
    warmup_steps: int = 100
    max_grad_norm: float = 0.5
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        for key, peak in {"lr": self.lr, "muon_lr": self.muon_lr}.items():
            if peak is not None and not 0 < peak < math.inf:
                raise ValueError(f"optim.{key}={peak} must be above 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas={self.betas} are not two numbers in [0, 1)")
        # A negative limit would turn the gradients round.
        for key in ("max_grad_norm", "weight_decay"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"optim.{key}={getattr(self, key)} must not be negative; 0 switches it off")
        if not 0 <= self.final_share <= 1:
            raise ValueError(f"optim.final_share={self.final_share} is not in [0, 1]")
        if self.warmup_steps < 0:
            raise ValueError(f"optim.warmup_steps={self.warmup_steps} must not be negative")
        if self.schedule not in ("cosine", "linear", "constant", "wsd"):
            raise ValueError(f"optim.schedule={self.schedule} is not one of cosine, linear, constant, wsd")
        if not 0 < self.decay_share <= 1:
            raise ValueError(f"optim.decay_share={self.decay_share} is not in (0, 1]")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"optim.ema_decay={self.ema_decay} is not between 0 and 1; null switches it off")


@dataclass
class TrainerConfig:
    """The loop around objective and optimizer.

    Attributes:
        epochs: passes over the training documents.
        pack_tokens: documents are laid end to end up to this many tokens.
        packs_per_step: packs of one optimizer step, over all processes.
        shuffle_shards: shards are taken in random order, and documents mix over so many neighbours in it, so that
            few shards are in use at a time; null mixes all documents. Streaming needs it.
        strategy: how processes share the step: "ddp" (every one holds all weights; also for one process),
            "fsdp2", or DeepSpeed's "zero1", "zero2", "zero3". A run may go on with another.
        read_ahead: packs that each process reads ahead of the one in use, each in a thread and in memory.
        precision: "bf16" (autocast, fp32 master weights) or "fp32".
        device: "auto", "cpu" or "cuda".
        compile: fuse the head's norms and MLP with torch.compile; worth it on GPUs.
        seed: of a fresh head's start values, the order of the data and the sample of `objective.row_share`.
        validate_every, checkpoint_every: in optimizer steps; both also happen at the end.
        keep_checkpoints: newest ones kept; the best by simulated acceptance length is always kept.
        init_from: a checkpoint directory (of a run of ours, or from `python -m models.importer`) whose head is
            trained on, instead of a fresh one; its draft vocabulary and norm epsilon stay. null starts afresh.
        resume: "auto" continues from the newest complete checkpoint; "never" refuses to touch one.
        wandb: "disabled", "offline" or "online".
        wandb_project: what the run is filed under there.
        log_every: optimizer steps between log lines.
    """

    epochs: int = 1
    pack_tokens: int = 4096
    packs_per_step: int = 1
    shuffle_shards: int | None = None
    strategy: str = "ddp"
    read_ahead: int = 2
    precision: str = "bf16"
    device: str = "auto"
    compile: bool = False
    seed: int = 0
    validate_every: int = 500
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    init_from: str | None = None
    resume: str = "auto"
    wandb: str = "disabled"
    wandb_project: str = "draftsmith"
    log_every: int = 10

    def __post_init__(self) -> None:
        for key, allowed in {
            "strategy": ("ddp", "fsdp2", "zero1", "zero2", "zero3"),
            "precision": ("bf16", "fp32"),
            "device": ("auto", "cpu", "cuda"),
            "resume": ("auto", "never"),
            "wandb": ("disabled", "offline", "online"),
        }.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"trainer.{key}={getattr(self, key)} is not one of {', '.join(allowed)}")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"trainer.seed={self.seed} is not between 0 and 4294967295")
        for key in (
            "epochs",
            "pack_tokens",
            "packs_per_step",
            "read_ahead",
            "validate_every",
            "checkpoint_every",
            "keep_checkpoints",
            "log_every",
        ):
            if getattr(self, key) < 1:
                raise ValueError(f"trainer.{key}={getattr(self, key)} must be at least 1")
        if self.shuffle_shards is not None and self.shuffle_shards < 1:
            raise ValueError(f"trainer.shuffle_shards={self.shuffle_shards} must be at least 1; null mixes everything")
