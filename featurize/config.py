"""Typed settings of conversations, features and on-policy generation (`data`, `featurize`, `spool`, `generate`,
`inspect`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import II

TURNS = ("all", "split", "last")


@dataclass
class SourceConfig:
    """One part of a mixture.

    Attributes:
        paths: files, folders or hub names, as in `data.conversations`.
        weight: relative number of conversations.
        route: label of rows that name none.
        split, subset: of a folder or hub name that `datasets` reads.
    """

    paths: list[str] = field(default_factory=list)
    weight: float = 1.0
    route: str = ""
    split: str = "train"
    subset: str | None = None


ENCODING_NAMES = ("bf16", "int8", "int4")


@dataclass
class DataConfig:
    """Which conversations are featurized, and how they become documents.

    Attributes:
        conversations: files (.jsonl, .jsonl.gz, .parquet, .arrow), folders or hub names of data sets, read in order.
        mixture: instead of `conversations`: sources by name, interleaved by weight until the first one ends.
        chat_template_kwargs: handed to the chat template (`enable_thinking: false`, say), of evaluation prompts, too;
            a row's own come first.
        turns: "all" makes one document of a conversation; "split" one of every answer, with the history as the
            template renders it there (for templates that rewrite it: thinking stripped from earlier turns);
            "last" supervises the last answer alone.
        max_tokens: documents are cut here; what fits of an answer stays supervised.
        validation_share: share of documents held out for validation, chosen by a hash of their conversation's id.
        limit: use only the first documents; null for all.
        route_limits: of the routes named here, use only so many documents: {chat: 200, math: 500}.
    """

    conversations: list[str] = field(default_factory=list)
    mixture: dict[str, SourceConfig] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    turns: str = "all"
    max_tokens: int = 2048
    validation_share: float = 0.02
    limit: int | None = None
    route_limits: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for route, most in self.route_limits.items():
            if most < 0:
                raise ValueError(f"data.route_limits.{route}={most} must not be negative")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"data.limit={self.limit} must be at least 1; null takes all documents")
        if self.max_tokens < 4:
            raise ValueError(f"data.max_tokens={self.max_tokens} leaves no room for a prompt and an answer")
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"data.validation_share={self.validation_share} is not in [0, 1)")
        if self.turns not in TURNS:
            raise ValueError(f"data.turns={self.turns} is not one of {', '.join(TURNS)}")
        if self.conversations and self.mixture:
            raise ValueError("data.conversations and data.mixture exclude each other; name the files in data.mixture")
        for name, source in self.mixture.items():
            if source.weight <= 0 or not source.paths:
                raise ValueError(f"data.mixture.{name} needs paths and a weight above 0 (it is {source.weight})")


@dataclass
class InspectConfig:
    """What `python -m featurize.inspect` shows.

    Attributes:
        documents: how many, from the first on.
        id: this document (or conversation) alone.
    """

    documents: int = 3
    id: str | None = None

    def __post_init__(self) -> None:
        if self.documents < 1:
            raise ValueError(f"inspect.documents={self.documents} shows nothing; it must be at least 1")


BACKENDS = ("transformers", "vllm")


@dataclass
class FeaturizeConfig:
    """How hidden states are extracted.

    Attributes:
        backend: what runs the target: "transformers", in this process, or "vllm", a server.
        device: torch device that transformers runs the target on ("auto" takes a GPU when there is one).
        batch_tokens: tokens of one forward; documents of like length share a batch.
        shard_tokens: tokens of one shard file, the unit of work and of resumption.
        canary_documents: documents compared with a plain forward before the first shard; 0 skips it.
        canary_against: with vllm: "transformers" runs these documents first, here; "engine" asks the server for its own
            next tokens, for targets too large to be loaded twice or quantised in a way transformers cannot read.
        encoding: how planes are stored: "bf16", "int8" (about a byte per value) or "int4" (half a byte).
        final_everywhere: keep the final plane at every position, not only where a row learns from it: heads of
            draft.algorithm=mtp or draft.use_aux_hidden_state=false read it. It costs a plane where prompts are.
        teacher_k: instead of the final plane keep, of the target's distribution there, this many likeliest tokens of
            the draft vocabulary (featurize/teacher.py): a few hundred bytes instead of a plane. Extraction then chooses
            the draft vocabulary (draft.vocab_size), and training must have the same; start values are not fitted. null
            keeps the plane; heads that read it need it. With vllm, logits are computed on `device`, if that is auto on
            the CPU.
        url: with vllm: a server that runs already, http://host:port; null starts one as the section `engine` says.
        planes_directory: with vllm: where the server leaves each document's planes, for an instant; null takes the
            system's temporary folder. /dev/shm is fastest.
        in_flight: with vllm: documents asked for at once, and the most whose planes are on that disk.
        timeout_s: with vllm: how long one document's answer may take.
    """

    backend: str = "transformers"
    device: str = "auto"
    batch_tokens: int = 2048
    shard_tokens: int = 65536
    canary_documents: int = 4
    canary_against: str = "transformers"
    encoding: str = "bf16"
    final_everywhere: bool = False
    teacher_k: int | None = None
    url: str | None = None
    planes_directory: str | None = None
    in_flight: int = 64
    timeout_s: float = 600

    def __post_init__(self) -> None:
        for key in ("batch_tokens", "shard_tokens", "in_flight"):
            if getattr(self, key) < 1:
                raise ValueError(f"featurize.{key}={getattr(self, key)} must be at least 1")
        if self.canary_documents < 0:
            raise ValueError(f"featurize.canary_documents={self.canary_documents} must not be negative; 0 skips it")
        if self.encoding not in ENCODING_NAMES:
            raise ValueError(f"featurize.encoding={self.encoding} is none of {', '.join(ENCODING_NAMES)}")
        if self.teacher_k is not None and self.teacher_k < 1:
            raise ValueError(f"featurize.teacher_k={self.teacher_k} must be at least 1; null keeps the final plane")
        if self.teacher_k is not None and self.final_everywhere:
            raise ValueError("featurize.final_everywhere keeps the final plane, which featurize.teacher_k does without")
        if self.backend not in BACKENDS:
            raise ValueError(f"featurize.backend={self.backend} is none of {', '.join(BACKENDS)}")
        if self.canary_against not in ("transformers", "engine"):
            raise ValueError(f"featurize.canary_against={self.canary_against} is none of transformers, engine")
        if self.backend == "transformers" and (self.canary_against == "engine" or self.url is not None):
            raise ValueError("featurize.canary_against=engine and featurize.url need featurize.backend=vllm")
        if self.url is not None and not (self.url.startswith("http://") and self.planes_directory):
            raise ValueError(
                f"featurize.url={self.url} must begin with http:// and needs featurize.planes_directory, the folder "
                "where that server leaves its files"
            )
        if not self.timeout_s > 0:
            raise ValueError(f"featurize.timeout_s={self.timeout_s} must be above 0")


@dataclass
class SpoolConfig:
    """Streaming: features pass through a folder of bounded size; `featurize` and `train` run at the same time.

    Attributes:
        gigabytes: most that shards take up at any time (1 GB = 10**9 bytes), beside the documents held out, which
            stay; null keeps the whole store in the run's folder instead.
        directory: on a disk, a tmpfs or a shared file system with locks, that all processes of both stages see.
        patience_s: how long one stage waits for the other when no process of that one is alive.
    """

    gigabytes: float | None = None
    directory: str = "${root}/${name}/spool"
    patience_s: float = 300.0

    def __post_init__(self) -> None:
        if self.gigabytes is not None and self.gigabytes <= 0:
            raise ValueError(f"spool.gigabytes={self.gigabytes} must be above 0; null switches streaming off")
        if self.patience_s <= 0:
            raise ValueError(f"spool.patience_s={self.patience_s} must be above 0")


@dataclass
class RouteConfig:
    """One kind of conversation to generate.

    Attributes:
        openings: first words of a user turn that the target continues; "" leaves it entirely free.
        share: relative number of conversations of this route.
        turns: exchanges of a conversation; each answer conditions the next user turn.
        temperature, top_p: of its sampled answers; null takes generate.temperature.
        chat_template_kwargs: for the chat template, the thinking mode say; kept with the conversation.
    """

    openings: list[str] = field(default_factory=lambda: [""])
    share: float = 1.0
    turns: int = 1
    temperature: float | None = None
    top_p: float = 1.0
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.turns < 1 or not self.openings:
            raise ValueError(f"generate.routes: a route needs openings and at least 1 turn (turns={self.turns})")
        if not 0 < self.share < math.inf:
            raise ValueError(f"generate.routes: share={self.share} of a route must be above 0")


@dataclass
class GenerateConfig:
    """On-policy conversations: answers by the target, to prompts of its own or from any source.

    Attributes:
        urls: base URLs of OpenAI-compatible servers, each ending in /v1; none runs the target in this process, one
            request at a time, which is for small targets.
        model: name the servers give the target.
        output: JSON-lines file that grows; a .gz of it is what `pack` writes.
        prompts: sources (as in data.conversations) whose users' messages are answered; none lets the target make
            them up.
        conversations: how many to make, which `routes` need; with `prompts`, only so many of them are answered, and
            null answers all.
        routes: openings and settings per route; a route of `prompts` that is not named here has the defaults.
        chat_template_kwargs: for the chat template, by default those of `data`; what a route or a prompt says comes
            first.
        user_temperature: user turns are sampled at this temperature, top-p 0.95.
        temperature: answers are sampled at this temperature (0 = greedy) ...
        sampled_share: ... for this share of conversations; the others are answered greedily.
        max_user_tokens, max_answer_tokens: bounds; a user turn that reaches its bound is discarded, an
            answer that reaches it is kept, marked `finish_reason: length`.
        concurrency: requests in flight.
        seed: of all sampling; each request has one that follows from it and its conversation's id.
    """

    urls: list[str] = field(default_factory=lambda: ["http://127.0.0.1:8000/v1"])
    model: str = "target"
    output: str = "${root}/${name}/conversations.jsonl"
    prompts: list[str] = field(default_factory=list)
    conversations: int | None = None
    routes: dict[str, RouteConfig] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = II("data.chat_template_kwargs")
    user_temperature: float = 1.0
    temperature: float = 0.8
    sampled_share: float = 0.25
    max_user_tokens: int = 160
    max_answer_tokens: int = 2048
    concurrency: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("conversations", "max_user_tokens", "max_answer_tokens", "concurrency"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(f"generate.{key}={getattr(self, key)} must be at least 1")
        for key in ("user_temperature", "temperature"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"generate.{key}={getattr(self, key)} must not be negative")
        if not 0 <= self.sampled_share <= 1:
            raise ValueError(f"generate.sampled_share={self.sampled_share} is not in [0, 1]")
