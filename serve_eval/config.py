"""Typed settings of evaluation (`eval`, `gateway`, `monitor`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

FOUND_AGAIN = (2, 4)
"""Least and most tokens that prompt lookup finds again, unless told otherwise."""
POOLED = "all"
"""The route that pools all others: in figures; in eval.sampling, of those that are not named; in a policy, of requests
whose label it does not know."""
HEAD = "head"
"""In eval.methods: the exported head, of whichever kind it is."""
SERVED = ("none", "eagle3", "mtp", "draft_model", "ngram", "suffix")
"""Methods that a server can be started with."""
METHODS = {"vllm": SERVED, "sglang": ("none", "eagle3", "mtp", "draft_model", "ngram")}
"""Those that each engine can be started with here."""


@dataclass
class DraftingConfig:
    """What drafts in the reference decoder, in which shape, and how tokens are drawn.

    Attributes:
        method: "eagle3" (the exported head, MTP or other), "ngram" (prompt lookup) or "draft_model".
        model: local directory of the draft model; it must have the target's tokenizer.
        tree: "chain" of eval.k tokens, "static" (see `paths`) or "dynamic" (EAGLE-2: of eval.k levels that each
            read `width` nodes and draft `width` children of each, the likeliest `nodes` are verified).
        paths: the nodes of a static tree as paths of ranks, as in [[0], [1], [0, 0]]: the best child of the root, its
            second best, the best child of the best.
        temperature: of the target's tokens; 0 is greedy. top_p, top_k: they leave out unlikely tokens; 1 and 0 none.
        draft_sample_method: "greedy" drafts the best tokens, "probabilistic" draws them at the same temperature,
            top_p and top_k; words and default are vLLM's. The output's distribution is the target's with both.
        seed: of all that is drawn.
        lookup_min, lookup_max: tokens that prompt lookup must and may find again.
    """

    method: str = "eagle3"
    model: str | None = None
    tree: str = "chain"
    paths: list[list[int]] = field(default_factory=list)
    width: int | None = None
    nodes: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    draft_sample_method: str = "greedy"
    seed: int = 0
    lookup_min: int = FOUND_AGAIN[0]
    lookup_max: int = FOUND_AGAIN[1]

    def __post_init__(self) -> None:
        choices = {
            "method": ("eagle3", "ngram", "draft_model"),
            "tree": ("chain", "static", "dynamic"),
            "draft_sample_method": ("greedy", "probabilistic"),
        }
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"eval.drafting.{key}={getattr(self, key)} is not one of {', '.join(allowed)}")
        bounds = {
            "temperature": self.temperature >= 0,
            "top_p": 0 < self.top_p <= 1,
            "top_k": self.top_k >= 0,
            "width": self.width is None or self.width >= 1,
            "nodes": self.nodes is None or self.nodes >= 1,
            "lookup_min": self.lookup_min >= 1,
            "lookup_max": self.lookup_max >= self.lookup_min,
        }
        for key, fits in bounds.items():
            if not fits:
                raise ValueError(f"eval.drafting.{key}={getattr(self, key)} is out of range")
        if (self.method == "draft_model") != (self.model is not None):
            raise ValueError("eval.drafting.model names the draft model of method=draft_model, and of no other")
        if (self.tree == "static") != bool(self.paths):
            raise ValueError("eval.drafting.paths are the nodes of tree=static, and of no other")
        dynamic = self.tree == "dynamic"
        if dynamic != (self.width is not None) or dynamic != (self.nodes is not None):
            raise ValueError("eval.drafting.width and eval.drafting.nodes shape tree=dynamic, and no other")
        if self.method == "ngram" and self.tree != "chain":
            raise ValueError("eval.drafting.method=ngram drafts tree=chain only")
        for path in self.paths:
            older = [path[:-1], [*path[:-1], path[-1] - 1]] if path else []
            wanted = [each for each in older if each and each[-1] >= 0]
            if not path or path[-1] < 0 or self.paths.count(path) > 1 or any(each not in self.paths for each in wanted):
                raise ValueError(
                    f"eval.drafting.paths: {path} must be there once, with its parent and with its sibling before it"
                )
        if self.draft_sample_method == "probabilistic":
            if dynamic:
                raise ValueError(
                    "eval.drafting.tree=dynamic chooses nodes by what was drafted, so that they are no draws from the "
                    "head's distribution; it goes with draft_sample_method=greedy, which is exact too"
                )
            if self.method == "ngram" or self.temperature == 0:
                raise ValueError(
                    "eval.drafting.draft_sample_method=probabilistic needs a temperature above 0 and a method with "
                    "probabilities"
                )


@dataclass
class MethodConfig:
    """One way of serving the target in the sweep.

    Attributes:
        method: "none", "head" (the exported one: "eagle3" or "mtp", which can be named too), "draft_model", "ngram"
            (prompt lookup) or "suffix" (of vLLM, with the package arctic-inference in its environment).
        k: drafted tokens per step; null takes eval.served_k, and without it the k that the reference decoder chose.
        model: the draft model of method=draft_model: a local directory, or a name that the engine can resolve.
        lookup_min, lookup_max: tokens that prompt lookup must and may find again.
        url: a server of this method that runs already, by whatever hand; null starts one. Its counters are global: let
            nobody else use it meanwhile.
    """

    method: str = HEAD
    k: int | None = None
    model: str | None = None
    lookup_min: int = FOUND_AGAIN[0]
    lookup_max: int = FOUND_AGAIN[1]
    url: str | None = None

    def __post_init__(self) -> None:
        if self.method not in (HEAD, *SERVED):
            raise ValueError(f"eval.methods: method={self.method} is not one of {', '.join((HEAD, *SERVED))}")
        if self.k is not None and (self.k < 1 or self.method == "none"):
            raise ValueError(f"eval.methods: method={self.method} with k={self.k}; k is at least 1, and none has none")
        if (self.method == "draft_model") != (self.model is not None) and self.url is None:
            raise ValueError("eval.methods: model names the draft model of method=draft_model, and of no other")
        if not 1 <= self.lookup_min <= self.lookup_max:
            raise ValueError(
                f"eval.methods: lookup_min={self.lookup_min} must be from 1 to lookup_max={self.lookup_max}"
            )
        if self.url is not None:
            check_url(self.url, "eval.methods")


def check_url(url: str, key: str) -> None:
    """Raise ValueError unless `url` is a plain http(s) address."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # no address in its brackets, or no number for its port
        known = False
    if not known or parts.username or parts.query:
        raise ValueError(f"{key}: url must be http(s)://host[:port], without credentials or a query")


@dataclass
class SamplingConfig:
    """How a route's tokens are drawn in the served sweep; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"eval.sampling: temperature={self.temperature} must not be negative, top_p={self.top_p} from 0 to 1"
            )


@dataclass
class EvalConfig:
    """What is measured.

    Attributes:
        prompts: JSON-lines files of evaluation conversations (id, route, messages ending with a user).
        datasets: common sets by name (`serve_eval.workloads.SETS`) -> local file or folder, or null for the hub.
        dataset_rows: prompts taken of each of them, the first.
        reference: measure acceptance with the reference decoder, too, which holds the target in fp32 on one device. Of
            a larger target leave it out: acceptance is then what the server's counters say.
        k: drafted tokens per step in the reference decoder: the length of a chain, the depth of a tree.
        drafting: what the reference decoder drafts with, and how tokens are drawn.
        served_k: drafted tokens in the server; null takes the k that the reference's own measurement
            of costs and acceptance says is fastest at concurrency 1, or without a reference `k`.
        max_new_tokens: tokens per answer.
        served_new_tokens: tokens per answer in the served sweep; null for as many.
        batch_size: requests decoded together by the reference decoder.
        methods: what the served sweep compares with the server alone (method none, which is always measured first);
            empty for the exported head. Either all of them run already, none included, or none does.
        side_by_side: keep the servers of all methods running and measure each window on one after the other, so that
            a drifting machine does not decide the ratio; they must fit into memory together. Otherwise one server
            at a time, and the report says that drift is not excluded. Servers that run already are side by side.
        repeats: how often each window is measured; from 3 on, they give the gain's confidence interval.
        concurrencies: closed-loop client counts of the served sweep.
        rates: further open-loop loads, in requests per second (Poisson arrivals).
        input_lengths: further routes of prompts of exactly so many tokens, in the served sweep only.
        requests_per_route: fixed prompts per route in each cell of the sweep.
        warmup_requests: short requests to each server before it is measured.
        request_timeout_s: after which a request counts as failed.
        sampling: route -> temperature and top_p in the served sweep; "all" for the routes that are not named.
        ignore_eos: answers of exactly `served_new_tokens` tokens instead of natural stops.
        seed: of arrivals and samples.
        price_per_hour: of the machine; gives the cost of a million tokens.
        device: device of the reference decoder.
        part: with several engines, the one that `python -m serve_eval.apart` measures.
        compare_with: other runs, evaluated on the same prompts with the same k, whose acceptance is shown beside.
    """

    prompts: list[str] = field(default_factory=list)
    datasets: dict[str, str | None] = field(default_factory=dict)
    dataset_rows: int = 80
    reference: bool = True
    k: int = 4
    drafting: DraftingConfig = field(default_factory=DraftingConfig)
    served_k: int | None = None
    max_new_tokens: int = 96
    served_new_tokens: int | None = None
    batch_size: int = 16
    methods: list[MethodConfig] = field(default_factory=list)
    side_by_side: bool = False
    repeats: int = 1
    concurrencies: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    rates: list[float] = field(default_factory=list)
    input_lengths: list[int] = field(default_factory=list)
    requests_per_route: int = 2
    warmup_requests: int = 2
    request_timeout_s: float = 300
    sampling: dict[str, SamplingConfig] = field(default_factory=dict)
    ignore_eos: bool = False
    seed: int = 0
    price_per_hour: float | None = None
    device: str = "auto"
    part: str | None = None
    compare_with: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        counts = ("k", "served_k", "max_new_tokens", "served_new_tokens", "batch_size", "requests_per_route", "repeats")
        for key in (*counts, "dataset_rows"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"eval.{key}={value} must be at least 1")
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise ValueError(f"eval.concurrencies={self.concurrencies} must name at least one positive number")
        if self.compare_with and not self.reference:
            raise ValueError(
                f"eval.compare_with={self.compare_with} compares what the reference decoder measures: set "
                "eval.reference=true"
            )
        if self.warmup_requests < 0:
            raise ValueError(f"eval.warmup_requests={self.warmup_requests} must not be negative")
        if self.request_timeout_s <= 0:
            raise ValueError(f"eval.request_timeout_s={self.request_timeout_s} must be positive")
        for key in ("rates", "input_lengths"):
            if min(getattr(self, key), default=1) <= 0:
                raise ValueError(f"eval.{key}={getattr(self, key)} must be positive")
        if self.price_per_hour is not None and self.price_per_hour <= 0:
            raise ValueError(f"eval.price_per_hour={self.price_per_hour} must be positive")
        if len({method.url is None for method in self.methods}) > 1:
            raise ValueError(
                "eval.methods: name a url for every method, or for none: a ratio needs servers of one kind"
            )
        if self.methods and self.methods[0].url and "none" not in {method.method for method in self.methods}:
            raise ValueError("eval.methods: name the url of a server without speculation too, as method none")
        drafting, k = self.drafting, self.k
        if drafting.tree == "static" and (depth := max(map(len, drafting.paths))) != k:
            raise ValueError(f"eval.k={k} must be the depth of eval.drafting.paths, {depth}")
        if drafting.width is not None and drafting.nodes is not None:
            if drafting.nodes > (most := drafting.width + (k - 1) * drafting.width**2):
                raise ValueError(f"eval.drafting.nodes={drafting.nodes}: {k} levels have {most} candidates at most")


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
        check_url(self.url, "gateway.backends")
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
        if not 0 <= self.port <= 65535:
            raise ValueError(f"gateway.port={self.port} is not a port, which is from 0 to 65535")
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
        if not 0 <= self.port <= 65535:
            raise ValueError(f"monitor.port={self.port} is not a port, which is from 0 to 65535")
        if self.readings is not None and self.readings < 1:
            raise ValueError(f"monitor.readings={self.readings} must be at least 1; null goes on without end")
        for url in self.servers.values():
            check_url(url, "monitor.servers")
