"""Typed settings of evaluation (`engine`, `eval`, `gateway`, `monitor`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

SECRET = re.compile(r"TOKEN(?!S|IZ)|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
"""Names of environment variables and options whose values appear in no log and no saved configuration."""


def masked_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with the values of those that look like credentials replaced by ***."""
    return {name: "***" if SECRET.search(name) else value for name, value in variables.items()}


def masked_arguments(words: Sequence[str]) -> list[str]:
    """A command line in which `--some-key VALUE` and `--some-key=VALUE` show *** for the value."""
    told: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = word.startswith("--") and SECRET.search(name) is not None
        told.append("***" if hide and not word.startswith("--") else f"{name}=***" if secret and equals else word)
        hide = secret and not equals
    return told


@dataclass
class EngineConfig:
    """A server that we start.

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


@dataclass
class BackendConfig:
    """A running OpenAI-compatible server behind the gateway.

    Attributes:
        url: base URL, without /v1.
        method: how it speculates, as the policy names it (eagle3, mtp, ngram, ...); "none" for no speculation.
        k: tokens it drafts per step; 0 without speculation.
        max_in_flight: requests that it is given at a time; what is beyond waits in the gateway's queue.
    """

    url: str = "???"
    method: str = "none"
    k: int = 0
    max_in_flight: int = 256

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ValueError("gateway.backends: url must be http(s)://host[:port], without credentials or a query")
        if (self.method == "none") != (self.k == 0) or self.k < 0:
            raise ValueError(f"gateway.backends: method={self.method} with k={self.k}; k is 0 exactly for method none")
        if self.max_in_flight < 1:
            raise ValueError(f"gateway.backends: max_in_flight={self.max_in_flight} must be at least 1")


@dataclass
class GatewayConfig:
    """The proxy that applies a policy.

    Attributes:
        backends: the servers behind it, of one target; they serve it under one name.
        policy: the policy's file; null for policy.yaml in the run's eval folder.
        host, port: address to bind; loopback unless told otherwise.
        route_header: request header that holds the route's label.
        max_queue: requests that wait while every backend is full; one more is answered with 429.
        poll_s: time between two looks at the backends' health and metrics.
        stall_s: silence of a backend after which a request is given up there.
    """

    backends: list[BackendConfig] = field(default_factory=list)
    policy: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    route_header: str = "x-draftsmith-route"
    max_queue: int = 1024
    poll_s: float = 1.0
    stall_s: float = 600

    def __post_init__(self) -> None:
        for key in ("poll_s", "stall_s"):
            if getattr(self, key) <= 0:
                raise ValueError(f"gateway.{key}={getattr(self, key)} must be positive")
        if self.max_queue < 0:
            raise ValueError(f"gateway.max_queue={self.max_queue} must not be negative")
        if len({backend.url for backend in self.backends}) < len(self.backends):
            raise ValueError("gateway.backends names a url twice")


@dataclass
class MonitorConfig:
    """What `serve_eval.monitor` watches.

    Attributes:
        servers: label (a route, a machine) -> base URL of a vLLM, SGLang or gateway, without /v1.
        host, port: where its Prometheus metrics are served; port 0 for nowhere.
        interval_s: time between two readings.
        readings: how many readings until it ends; null for no end.
    """

    servers: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 0
    interval_s: float = 2.0
    readings: int | None = None

    def __post_init__(self) -> None:
        if self.interval_s <= 0:
            raise ValueError(f"monitor.interval_s={self.interval_s} must be positive")
