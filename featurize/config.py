"""Typed settings of conversations, features and on-policy generation (`data`, `featurize`, `generate`)."""

from __future__ import annotations

from dataclasses import dataclass, field

ENCODING_NAMES = ("bf16", "int8", "int4")


@dataclass
class DataConfig:
    """Which conversations are featurized, and how they become documents.

    Attributes:
        conversations: JSON-lines files (.jsonl, .jsonl.gz), read in order.
        max_tokens: documents are cut here; what fits of an answer stays supervised.
        validation_share: share of documents held out for validation, chosen by a hash of their id.
        limit: use only the first documents; null for all.
    """

    conversations: list[str] = field(default_factory=list)
    max_tokens: int = 2048
    validation_share: float = 0.02
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 4:
            raise ValueError(f"data.max_tokens={self.max_tokens} leaves no room for a prompt and an answer")
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"data.validation_share={self.validation_share} is not in [0, 1)")


@dataclass
class FeaturizeConfig:
    """How hidden states are extracted.

    Attributes:
        device: torch device the target runs on ("auto" takes a GPU when there is one).
        batch_tokens: tokens of one forward; documents of like length share a batch.
        shard_tokens: tokens of one shard file, the unit of work and of resumption.
        canary_documents: documents compared with a plain forward before the first shard; 0 skips it.
        encoding: how planes are stored: "bf16", "int8" (about a byte per value) or "int4" (half a byte).
    """

    device: str = "auto"
    batch_tokens: int = 2048
    shard_tokens: int = 65536
    canary_documents: int = 4
    encoding: str = "bf16"

    def __post_init__(self) -> None:
        if self.batch_tokens < 1 or self.shard_tokens < 1:
            raise ValueError("featurize.batch_tokens and featurize.shard_tokens must be at least 1")
        if self.encoding not in ENCODING_NAMES:
            raise ValueError(f"featurize.encoding={self.encoding} is none of {', '.join(ENCODING_NAMES)}")


@dataclass
class RouteConfig:
    """One kind of conversation to generate.

    Attributes:
        openings: first words of a user turn that the target continues; "" leaves it entirely free.
        share: relative number of conversations of this route.
    """

    openings: list[str] = field(default_factory=lambda: [""])
    share: float = 1.0


@dataclass
class GenerateConfig:
    """On-policy conversations from the target alone, through an OpenAI-compatible server.

    Attributes:
        url: base URL of the server, ending in /v1.
        model: name the server gives the target.
        output: JSON-lines file that grows; a .gz of it is what `pack` writes.
        conversations: how many to make.
        routes: openings per route.
        user_temperature: user turns are sampled at this temperature, top-p 0.95.
        temperature: answers are sampled at this temperature (0 = greedy) ...
        sampled_share: ... for this share of conversations; the others are answered greedily.
        max_user_tokens, max_answer_tokens: bounds; a user turn that reaches its bound is discarded, an
            answer that reaches it is kept, marked `finish_reason: length`.
        concurrency: requests in flight.
    """

    url: str = "http://127.0.0.1:8000/v1"
    model: str = "target"
    output: str = "${root}/${name}/conversations.jsonl"
    conversations: int = 1000
    routes: dict[str, RouteConfig] = field(default_factory=dict)
    user_temperature: float = 1.0
    temperature: float = 0.8
    sampled_share: float = 0.25
    max_user_tokens: int = 160
    max_answer_tokens: int = 192
    concurrency: int = 32
    seed: int = 0
