"""Typed settings of evaluation (`eval`)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EvalConfig:
    """What is measured.

    Attributes:
        prompts: JSON-lines files of evaluation conversations (id, route, messages ending with a user).
        k: drafted tokens per step in the reference decoder.
        served_k: drafted tokens in the server; null takes the k that the reference's own measurement
            of costs and acceptance says is fastest at concurrency 1.
        max_new_tokens: tokens per answer.
        served_new_tokens: tokens per answer in the served sweep; null for as many.
        batch_size: requests decoded together by the reference decoder.
        concurrencies: closed-loop client counts of the served sweep.
        requests_per_route: fixed prompts per route in each cell of the sweep.
        device: device of the reference decoder.
    """

    prompts: list[str] = field(default_factory=list)
    k: int = 4
    served_k: int | None = None
    max_new_tokens: int = 96
    served_new_tokens: int | None = None
    batch_size: int = 16
    concurrencies: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    requests_per_route: int = 2
    warmup_requests: int = 2
    request_timeout_s: float = 300
    device: str = "auto"

    def __post_init__(self) -> None:
        for key in ("k", "served_k", "max_new_tokens", "served_new_tokens", "batch_size", "requests_per_route"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"eval.{key}={value} must be at least 1")
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise ValueError(f"eval.concurrencies={self.concurrencies} must name at least one positive number")
