"""Typed settings of evaluation (`engine`, `eval`)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EngineConfig:
    """A server that we start, or one that is already running.

    Attributes:
        kind: "vllm", or "none" to evaluate in process only.
        python: interpreter of the environment that holds the engine.
        dtype: dtype of the served target and head.
        max_model_len: context length of the server.
        arguments: further command-line arguments, as they are.
        environment: further environment variables.
        host: address to bind; loopback unless told otherwise.
        startup_timeout_s: how long to wait until the server is healthy.
    """

    kind: str = "vllm"
    python: str = "python"
    dtype: str = "bfloat16"
    max_model_len: int = 4096
    tensor_parallel_size: int = 1
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    startup_timeout_s: float = 900

    def __post_init__(self) -> None:
        if self.kind not in ("vllm", "none"):
            raise ValueError(f"engine.kind={self.kind} is not one of vllm, none")


@dataclass
class EvalConfig:
    """What is measured.

    Attributes:
        prompts: JSON-lines files of evaluation conversations (id, route, messages ending with a user).
        k: drafted tokens per step in the reference decoder.
        served_k: drafted tokens in the server; null takes the k that the reference's own measurement
            of costs and acceptance says is fastest at concurrency 1.
        max_new_tokens: tokens per answer.
        batch_size: requests decoded together by the reference decoder.
        concurrencies: closed-loop client counts of the served sweep.
        requests_per_route: fixed prompts per route in each cell of the sweep.
        device: device of the reference decoder.
    """

    prompts: list[str] = field(default_factory=list)
    k: int = 4
    served_k: int | None = None
    max_new_tokens: int = 96
    batch_size: int = 16
    concurrencies: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    requests_per_route: int = 2
    warmup_requests: int = 2
    request_timeout_s: float = 300
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"eval.k={self.k} must be at least 1")
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise ValueError(f"eval.concurrencies={self.concurrencies} must name at least one positive number")
