"""Typed settings of training (`objective`, `optim`, `trainer`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ObjectiveConfig:
    """The loss.

    Attributes:
        unroll_steps: K, drafted tokens per row that are trained (training-time test).
        decay: weight of unroll step k is decay ** k.
        row_share: rows that go on from one unroll step to the next are this share of those that could
            (a seeded sample); their loss is scaled so that its expectation does not change.
        loss: against the target's distribution on the draft vocabulary: "kl" (soft cross-entropy), "ce"
            (cross-entropy with its argmax), "nla" (negative log acceptance) or "lk_hybrid" (KL and total
            variation; both LK losses of arXiv 2602.23881 aim at acceptance under sampling).
        out_of_vocabulary: rows whose next token is outside the draft vocabulary: "renormalise" trains them
            like all others, on the target's distribution restricted to the draft vocabulary; "skip" leaves
            them out of the loss. They are misses in every accuracy and acceptance figure either way.
    """

    unroll_steps: int = 7
    decay: float = 0.8
    row_share: float = 1.0
    loss: str = "kl"
    out_of_vocabulary: str = "renormalise"

    def __post_init__(self) -> None:
        if self.unroll_steps < 1:
            raise ValueError(f"objective.unroll_steps={self.unroll_steps} must be at least 1")
        for key, allowed in {
            "loss": ("kl", "ce", "nla", "lk_hybrid"),
            "out_of_vocabulary": ("renormalise", "skip"),
        }.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"objective.{key}={getattr(self, key)} is not one of {', '.join(allowed)}")
        if not 0 < self.row_share <= 1:
            raise ValueError(f"objective.row_share={self.row_share} is not in (0, 1]")


@dataclass
class OptimConfig:
    """Optimizer and schedule; the learning rate depends on the optimizer step alone.

    Attributes:
        lr: peak learning rate of AdamW.
        muon_lr: peak learning rate of Muon for the matrices of fc and the layer; null trains all with AdamW.
        schedule: "cosine", "linear" or "constant", after the warm-up, down to `final_share` of the peak.
        warmup_steps: optimizer steps of linear warm-up.
        max_grad_norm: clip by global norm; 0 switches it off.
    """

    lr: float = 1e-4
    muon_lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    schedule: str = "cosine"
    final_share: float = 0.0
    warmup_steps: int = 100
    max_grad_norm: float = 0.5

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"optim.warmup_steps={self.warmup_steps} must not be negative")
        if self.schedule not in ("cosine", "linear", "constant"):
            raise ValueError(f"optim.schedule={self.schedule} is not one of cosine, linear, constant")


@dataclass
class TrainerConfig:
    """The loop around objective and optimizer.

    Attributes:
        epochs: passes over the training documents.
        pack_tokens: documents are laid end to end up to this many tokens.
        packs_per_step: packs of one optimizer step, over all processes.
        precision: "bf16" (autocast, fp32 master weights) or "fp32".
        device: "auto", "cpu" or "cuda".
        validate_every, checkpoint_every: in optimizer steps; both also happen at the end.
        keep_checkpoints: newest ones kept; the best by simulated acceptance length is always kept.
        resume: "auto" continues from the newest complete checkpoint; "never" refuses to touch one.
        wandb: "disabled", "offline" or "online".
        log_every: optimizer steps between log lines.
    """

    epochs: int = 1
    pack_tokens: int = 4096
    packs_per_step: int = 1
    precision: str = "bf16"
    device: str = "auto"
    seed: int = 0
    validate_every: int = 500
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    resume: str = "auto"
    wandb: str = "disabled"
    wandb_project: str = "draftsmith"
    log_every: int = 10

    def __post_init__(self) -> None:
        for key, allowed in {
            "precision": ("bf16", "fp32"),
            "device": ("auto", "cpu", "cuda"),
            "resume": ("auto", "never"),
            "wandb": ("disabled", "offline", "online"),
        }.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"trainer.{key}={getattr(self, key)} is not one of {', '.join(allowed)}")
        for key in (
            "epochs",
            "pack_tokens",
            "packs_per_step",
            "validate_every",
            "checkpoint_every",
            "keep_checkpoints",
            "log_every",
        ):
            if getattr(self, key) < 1:
                raise ValueError(f"trainer.{key}={getattr(self, key)} must be at least 1")
