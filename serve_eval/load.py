"""Clients that load a server, in a closed or an open loop, and measure its answers.

Closed: so many clients that each wait for their answer. Open: requests come at a given rate whether answers come or
not, which is how users come; a server that cannot keep up shows it in its queue.

One stream chunk is not one token: a server that speculates sends several tokens per chunk, so counting
chunks understates throughput by about the accepted length. Tokens therefore come from the `usage` that the
server sends; when it does not, the count is unknown and says so.

Every request ends: in its answer, in a failure with its reason, or at its timeout. Times are taken when a
chunk is read from the socket, in this process; one event loop serves all clients. The client must not be what
it measures: its HTTP parser and event loop are compiled (aiohttp, uvloop), and what chunks say is read when the
window is over, since the chunks of all other streams wait meanwhile. `python -m serve_eval.bench` shows how far
256 streams are distorted on one core.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import numpy as np

from serve_eval.prompts import Prompt
from serve_eval.streams import Ask, Outcome, Stream

GREEDY = Ask()


@dataclass(frozen=True)
class Window:
    """A measured stretch of load: its requests in the order of the prompts, and its length in seconds."""

    outcomes: tuple[Outcome, ...]
    seconds: float


@dataclass
class Received:
    """What came in answer to a request.

    Attributes:
        started: when it was sent.
        pieces: of the answer's body, each with the time at which it was read.
        failed: why there is no whole answer.
    """

    prompt: Prompt
    started: float
    pieces: list[tuple[float, bytes]]
    failed: str | None = None

    def outcome(self, stream: Stream) -> Outcome:
        """Read the pieces."""
        try:
            self._tell(stream)
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            return Outcome(self.prompt.id, self.prompt.route, failed=str(error) or type(error).__name__)
        if self.failed is not None:
            return Outcome(self.prompt.id, self.prompt.route, failed=self.failed)
        if not stream.finished:
            first = self.pieces[0][1] if self.pieces else b""
            said = "" if b"data:" in first else f"; it began with: {_one_line(first)}"
            told = f"the stream ended before the answer did{said}"
            return Outcome(self.prompt.id, self.prompt.route, failed=told)
        return stream.outcome(self.prompt, self.started)

    def _tell(self, stream: Stream) -> None:
        rest = b""
        for now, data in self.pieces:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                event = line[5:].strip()
                if line.startswith(b"data:") and event != b"[DONE]":
                    stream.take(json.loads(event), now)


def _one_line(said: bytes) -> str:
    return " ".join(said.decode(errors="replace").split())[:200]


async def _read(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], pieces: list[tuple[float, bytes]]
) -> None:
    async with session.post(url, json=body) as response:
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {_one_line(await response.read())}")
        async for data in response.content.iter_any():
            pieces.append((time.perf_counter(), data))


async def _request(
    session: aiohttp.ClientSession, url: str, prompt: Prompt, ask: Ask, max_new_tokens: int, timeout_s: float
) -> Received:
    path, body = ask.request(prompt, max_new_tokens)
    received = Received(prompt, time.perf_counter(), [])
    try:
        await asyncio.wait_for(_read(session, f"{url}{path}", body, received.pieces), timeout_s)
    except (asyncio.TimeoutError, TimeoutError):
        received.failed = f"timeout after {timeout_s:g} s"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        received.failed = str(error) or type(error).__name__
    return received


def _session(timeout_s: float) -> aiohttp.ClientSession:
    # The environment's proxies (which aiohttp leaves alone by itself) are for the world outside.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def closed_loop(
    url: str,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    max_new_tokens: int,
    timeout_s: float,
    ask: Ask = GREEDY,
) -> Window:
    """Send every prompt once, with `concurrency` clients that each wait for their answer.

    Args:
        url: base URL of the server, without /v1.
        max_new_tokens: bound of each answer; a natural stop ends it earlier.
        timeout_s: bound of each request as a whole; past it the request counts as failed.
        ask: how tokens are drawn, and in which dialect the server is asked; each prompt has a seed of its own.

    Returns:
        The window: outcomes in the order of `prompts`, seconds from the first request to the last answer.
    """
    received: dict[int, Received] = {}
    queue = iter(enumerate(prompts))
    async with _session(timeout_s) as session:

        async def worker() -> None:
            for index, prompt in queue:
                asked = replace(ask, seed=ask.seed + index)
                received[index] = await _request(session, url, prompt, asked, max_new_tokens, timeout_s)

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        seconds = time.perf_counter() - started
    return Window(tuple(received[index].outcome(ask.stream()) for index in range(len(prompts))), seconds)


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Times, in seconds, of `count` Poisson arrivals at `rate` per second.

    Given how many arrive within a time, they are spread over it independently and evenly; so the rate of a short
    window is the one that was asked for, and not what few exponential gaps happen to add up to.
    """
    return sorted(float(time) for time in np.random.default_rng(seed).uniform(0, count / rate, count))


async def open_loop(
    url: str,
    prompts: Sequence[Prompt],
    *,
    rate: float,
    max_new_tokens: int,
    timeout_s: float,
    ask: Ask = GREEDY,
) -> Window:
    """Send every prompt once, at Poisson arrivals of `rate` per second; the same seed of `ask` gives the same.

    Returns:
        As `closed_loop`.
    """
    async with _session(timeout_s) as session:
        started = time.perf_counter()

        async def send(index: int, prompt: Prompt, due: float) -> Received:
            await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
            asked = replace(ask, seed=ask.seed + index)
            return await _request(session, url, prompt, asked, max_new_tokens, timeout_s)

        times = arrivals(len(prompts), rate, ask.seed)
        sent = [send(index, prompt, due) for index, (prompt, due) in enumerate(zip(prompts, times, strict=True))]
        received = await asyncio.gather(*sent)
        seconds = time.perf_counter() - started
    return Window(tuple(each.outcome(ask.stream()) for each in received), seconds)
