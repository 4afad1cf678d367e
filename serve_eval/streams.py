"""What one streamed answer says, in the two dialects of servers: OpenAI's completions, and SGLang's own.

vLLM is asked at /v1/completions; SGLang at /generate, because only there its stream tells the answer's ids and each
request's own acceptance. Chunks of SGLang repeat all of the text so far (unless the server streams increments, which
shows in their ids); how many tokens there are by then is in their `meta_info`, the server's usage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_eval.counters import Acceptance
from serve_eval.prompts import Prompt


@dataclass(frozen=True)
class Ask:
    """How a request is asked for.

    Attributes:
        temperature, top_p: 0 is greedy.
        ignore_eos: go on to the last token that is asked for.
        seed: of the samples; SGLang has none per request.
        model: the name under which the server serves the target.
        kind: the server's, "vllm" (any OpenAI-compatible server) or "sglang".
    """

    temperature: float = 0.0
    top_p: float = 1.0
    ignore_eos: bool = False
    seed: int = 0
    model: str = "target"
    kind: str = "vllm"

    def request(self, prompt: Prompt, max_new_tokens: int) -> tuple[str, dict[str, Any]]:
        """The path and body of a request; the prompt goes in as ids, so that nobody renders it again."""
        sampling: dict[str, Any] = {"temperature": self.temperature}
        if self.top_p < 1:
            sampling["top_p"] = self.top_p
        if self.ignore_eos:
            sampling["ignore_eos"] = True
        sampling["repetition_penalty"] = 1.0  # a target's generation_config may say otherwise, another text when greedy
        if self.kind == "sglang":
            sampling["max_new_tokens"] = max_new_tokens
            return "/generate", {"input_ids": list(prompt.ids), "sampling_params": sampling, "stream": True}
        if self.temperature > 0:
            sampling["seed"] = self.seed
        return "/v1/completions", {
            "model": self.model,
            "prompt": list(prompt.ids),
            "max_tokens": max_new_tokens,
            **sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }

    def stream(self) -> Stream:
        """A reader of one answer."""
        return Generated() if self.kind == "sglang" else Stream()


@dataclass(frozen=True)
class Outcome:
    """What one request gave.

    Attributes:
        id, route: of its prompt.
        ttft_ms: from sending the request to the first chunk that carries a token (an empty delta does not).
        itl_ms: gaps between consecutive chunks that carry tokens. Under speculation such a chunk holds
            several tokens: this is how long a reader waits between updates, not the time per token.
        tpot_ms: time per output token after the first, (last - first) / (tokens - 1), over the whole answer;
            None when there is one token or their number is unknown.
        tokens: completion tokens from the server's usage; None when it sent none.
        token_ids: the answer's ids, if the server returns them.
        text: the answer's text.
        failed: the reason, or None.
        e2e_ms: from sending the request to the last chunk that carries a token.
        acceptance: the request's own counts of drafting, where the server tells them.
    """

    id: str
    route: str
    ttft_ms: float | None = None
    itl_ms: tuple[float, ...] = ()
    tpot_ms: float | None = None
    tokens: int | None = None
    token_ids: tuple[int, ...] | None = None
    text: str = ""
    failed: str | None = None
    e2e_ms: float | None = None
    acceptance: Acceptance | None = None


@dataclass
class Stream:
    """What has been read of one response so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ids_told: bool = False
    times: list[float] = field(default_factory=list)
    tokens: int | None = None
    finished: bool = False
    acceptance: Acceptance | None = None

    def take(self, event: dict[str, Any], now: float) -> None:
        """Add one server-sent event, read at `now`.

        Raises:
            ValueError: the event reports an error.
        """
        _check(event)
        usage = event.get("usage")
        if isinstance(usage, dict) and usage.get("completion_tokens") is not None:
            self.tokens = int(usage["completion_tokens"])
        own = (event.get("metrics") or {}).get("speculative_decoding")
        if own is not None:
            counts = (own["num_spec_steps"], own["num_draft_tokens"], own["num_accepted_draft_tokens"])
            self.acceptance = _acceptance(*counts, own["acceptance_histogram"])
        for choice in event.get("choices") or ():
            text, ids = choice.get("text") or "", choice.get("token_ids")
            if ids is not None:
                self.ids_told = True
                self.token_ids.extend(ids)
            # Ids decide where they are told: a token may have no text of its own yet (half a character).
            if ids or (ids is None and text):
                self.times.append(now)
            self.text.append(text)
            self.finished = self.finished or choice.get("finish_reason") is not None

    def outcome(self, prompt: Prompt, started: float) -> Outcome:
        """What the whole answer gave, its request sent at `started`."""
        times, tpot = self.times, None
        if self.tokens is not None and self.tokens > 1 and times:
            tpot = 1e3 * (times[-1] - times[0]) / (self.tokens - 1)
        return Outcome(
            prompt.id,
            prompt.route,
            ttft_ms=1e3 * (times[0] - started) if times else None,
            itl_ms=tuple(1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)),
            tpot_ms=tpot,
            tokens=self.tokens,
            token_ids=tuple(self.token_ids) if self.ids_told else None,
            text="".join(self.text),
            e2e_ms=1e3 * (times[-1] - started) if times else None,
            acceptance=self.acceptance,
        )


@dataclass
class Generated(Stream):
    """What has been read of one answer of SGLang's /generate so far."""

    def take(self, event: dict[str, Any], now: float) -> None:
        """Add one server-sent event, read at `now`.

        Raises:
            ValueError: the event reports an error, or that the request was aborted.
        """
        _check(event)
        text, ids, meta = event.get("text") or "", event.get("output_ids"), event["meta_info"]
        before, self.tokens = self.tokens or 0, meta.get("completion_tokens")
        if self.tokens > before if self.tokens is not None else (ids or text):
            self.times.append(now)
        whole = ids is None or self.tokens is None or len(ids) == self.tokens
        if ids is not None:
            self.ids_told = True
            self.token_ids = list(ids) if whole else self.token_ids + list(ids)
        self.text = [text] if whole else [*self.text, text]
        reason = meta.get("finish_reason")
        if reason is not None:
            if isinstance(reason, dict) and reason.get("type") == "abort":
                raise ValueError(f"the server says: {reason.get('message', 'aborted')}")
            self.finished = True
        if "spec_num_correct_drafts" in meta:
            counts = (meta["spec_verify_ct"], meta["spec_num_proposed_drafts"], meta["spec_num_correct_drafts"])
            self.acceptance = _acceptance(*counts, meta["spec_correct_drafts_histogram"])


def _check(event: dict[str, Any]) -> None:
    if "error" in event:
        error = event["error"]
        raise ValueError(f"the server says: {error.get('message', error) if isinstance(error, dict) else error}")


def _acceptance(steps: int, drafted: int, accepted: int, histogram: Sequence[int]) -> Acceptance:
    """From the counts of a request; histogram[j] is the number of steps that accepted exactly j drafts."""
    per_position = tuple(sum(histogram[j:]) for j in range(1, len(histogram)))
    return Acceptance(steps, drafted, accepted, per_position)
