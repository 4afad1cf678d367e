"""A closed-loop client: so many requests in flight, token counts from the server's usage alone.

One stream chunk is not one token: a server that speculates sends several tokens per chunk, so counting
chunks understates throughput by about the accepted length. Tokens therefore come from the `usage` that the
server sends at the end of each stream; when it does not, the count is unknown and says so. The prompt goes
in as token ids, so client and server cannot disagree about templates.

Every request ends: in its answer, in a failure with its reason, or at its timeout. Times are taken when a
chunk is read from the socket, in this process; one event loop serves all clients. The client must not be what
it measures, so its HTTP parser is compiled (aiohttp): `python -m serve_eval.bench` shows how far 256 streams
are distorted on one core.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from serve_eval.prompts import Prompt


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


@dataclass(frozen=True)
class Window:
    """A measured stretch of load: its requests in the order of the prompts, and its length in seconds."""

    outcomes: tuple[Outcome, ...]
    seconds: float


@dataclass
class _Stream:
    """What has been read of one response so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ids_told: bool = False
    times: list[float] = field(default_factory=list)
    tokens: int | None = None
    finished: bool = False

    def take(self, event: dict[str, Any], now: float) -> None:
        """Add one server-sent event, read at `now`.

        Raises:
            ValueError: the event reports an error.
        """
        if "error" in event:
            error = event["error"]
            raise ValueError(f"the server says: {error.get('message', error) if isinstance(error, dict) else error}")
        usage = event.get("usage")
        if isinstance(usage, dict) and usage.get("completion_tokens") is not None:
            self.tokens = int(usage["completion_tokens"])
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


def _outcome(prompt: Prompt, started: float, stream: _Stream) -> Outcome:
    times = stream.times
    tpot = None
    if stream.tokens is not None and stream.tokens > 1 and times:
        tpot = 1e3 * (times[-1] - times[0]) / (stream.tokens - 1)
    return Outcome(
        prompt.id,
        prompt.route,
        ttft_ms=1e3 * (times[0] - started) if times else None,
        itl_ms=tuple(1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)),
        tpot_ms=tpot,
        tokens=stream.tokens,
        token_ids=tuple(stream.token_ids) if stream.ids_told else None,
        text="".join(stream.text),
    )


async def _read(session: aiohttp.ClientSession, url: str, body: dict[str, Any], stream: _Stream) -> None:
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            said = " ".join((await response.read()).decode(errors="replace").split())
            raise ValueError(f"HTTP {response.status}: {said[:200]}")
        rest = b""
        async for data in response.content.iter_any():
            now = time.perf_counter()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                event = line[5:].strip()
                if line.startswith(b"data:") and event != b"[DONE]":
                    stream.take(json.loads(event), now)
    if not stream.finished:
        raise ValueError("the stream ended before the answer did")


async def _request(
    session: aiohttp.ClientSession, url: str, prompt: Prompt, max_new_tokens: int, timeout_s: float
) -> Outcome:
    body = {
        "model": "target",
        "prompt": list(prompt.ids),
        "max_tokens": max_new_tokens,
        "temperature": 0.0,
        "repetition_penalty": 1.0,  # a target's generation_config may say otherwise, and greedy is then another text
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    stream, started = _Stream(), time.perf_counter()
    try:
        await asyncio.wait_for(_read(session, url, body, stream), timeout_s)
    except (asyncio.TimeoutError, TimeoutError):
        return Outcome(prompt.id, prompt.route, failed=f"timeout after {timeout_s:g} s")
    except (aiohttp.ClientError, OSError, ValueError, TypeError, AttributeError) as error:
        return Outcome(prompt.id, prompt.route, failed=str(error) or type(error).__name__)
    return _outcome(prompt, started, stream)


async def closed_loop(
    url: str, prompts: Sequence[Prompt], *, concurrency: int, max_new_tokens: int, timeout_s: float
) -> Window:
    """Send every prompt once, greedily, with `concurrency` clients that each wait for their answer.

    Args:
        url: base URL of an OpenAI-compatible server that serves the model name "target", without /v1.
        max_new_tokens: bound of each answer; a natural stop ends it earlier.
        timeout_s: bound of each request as a whole; past it the request counts as failed.

    Returns:
        The window: outcomes in the order of `prompts`, seconds from the first request to the last answer.
    """
    outcomes: dict[int, Outcome] = {}
    queue = iter(enumerate(prompts))
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s)
    # The environment's proxies (which aiohttp leaves alone by itself) are for the world outside.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def worker() -> None:
            for index, prompt in queue:
                outcomes[index] = await _request(session, url, prompt, max_new_tokens, timeout_s)

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        seconds = time.perf_counter() - started
    return Window(tuple(outcomes[index] for index in range(len(prompts))), seconds)
