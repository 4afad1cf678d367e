"""A server that streams by the clock: the load of benchmarks, whose every chunk tells when it was sent.

It answers POST /v1/completions with one-token chunks, `interval_s` apart; the text of a chunk is the time at which
it was written (seconds of CLOCK_MONOTONIC, which all processes of a machine share). What a reader saw can so be
compared with what was sent, whatever the pace really was. The first chunk is sent at once and the others are spread
over the interval, or all streams are in step, as an engine's are that finishes all its requests' tokens together.
Answers have between half of `max_tokens` and all of them, so that a closed loop of clients does not fall into step.

It speaks just enough HTTP for that, because a server on a framework would be slower than what it is to measure.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from models.errors import Refused

_PAGE = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 0\r\n\r\n"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_GOLDEN = 0.6180339887498949


class Pacer(asyncio.Protocol):
    """One connection; requests on it come one after the other.

    Args:
        interval_s: time between chunks; 0 sends the whole answer at once.
        in_step: chunks of all streams fall due together.
    """

    streams = 0

    def __init__(self, interval_s: float, in_step: bool) -> None:
        self.interval_s, self.in_step = interval_s, in_step
        self.received = b""
        self.timer: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """Nobody reads any more."""
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer once the whole request is there."""
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        if not found or len(body) < int(fields.get(b"content-length", 0)):
            return
        self.received = b""
        if not head.startswith(b"POST"):
            self.transport.write(_PAGE)
            return
        self.transport.write(_HEAD)
        Pacer.streams += 1
        spread = Pacer.streams * _GOLDEN % 1
        tokens = math.ceil(json.loads(body)["max_tokens"] * (1 + spread) / 2)
        loop = asyncio.get_running_loop()
        if not self.interval_s:
            self._chunk(1)
            self._end(1)
            return
        tick = (loop.time() // self.interval_s + 1) * self.interval_s
        if self.in_step:
            self._pace(loop, tick, tokens, tokens)
        else:
            self._chunk(tokens)
            self._pace(loop, tick + spread * self.interval_s, tokens - 1, tokens)

    def _pace(self, loop: asyncio.AbstractEventLoop, due: float, left: int, tokens: int) -> None:
        if left:
            self.timer = loop.call_at(due, self._tick, loop, due, left, tokens)
        else:
            self._end(tokens)

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float, left: int, tokens: int) -> None:
        self._chunk(left)
        self._pace(loop, due + self.interval_s, left - 1, tokens)

    def _chunk(self, left: int) -> None:
        reason = b"null" if left > 1 else b'"length"'
        told = b'{"id":"cmpl-0123456789abcdef","object":"text_completion","created":1,"model":"target",'
        choice = b'"choices":[{"index":0,"text":"%.6f ","finish_reason":%s}]}' % (time.perf_counter(), reason)
        self._event(told + choice)

    def _end(self, tokens: int) -> None:
        self._event(b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}' % tokens)
        self._event(b"[DONE]")
        self.transport.write(b"0\r\n\r\n")

    def _event(self, data: bytes) -> None:
        self.transport.write(b"%x\r\ndata: %s\n\n\r\n" % (len(data) + 8, data))


def _serve(ready: multiprocessing.connection.Connection, interval_s: float, in_step: bool, core: int | None) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Pacer(interval_s, in_step), "127.0.0.1", 0, backlog=1024)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    if core is not None:
        os.sched_setaffinity(0, {core})
    asyncio.run(main())


@contextmanager
def serving_process(serve: Callable[..., None], *arguments: Any) -> Iterator[str]:
    """The base URL of `serve(ready, *arguments)` in a process of its own; it sends its port to `ready`.

    Raises:
        Refused: it ended before it did.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()  # so that the process alone holds its end, and our wait ends with it
    try:
        try:
            port = ours.recv()
        except EOFError:
            raise Refused("a server of the benchmark ended before it listened; what it said is above") from None
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.join()


def pacing(interval_s: float, *, in_step: bool = False, core: int | None = None) -> AbstractContextManager[str]:
    """The base URL of such a server in a process of its own, bound to `core` if one is given."""
    return serving_process(_serve, interval_s, in_step, core)
