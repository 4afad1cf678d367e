"""The client counts tokens as the server does, times what carries tokens, and always ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator

import pytest

from serve_eval.load import Window, closed_loop
from serve_eval.prompts import Prompt
from tests.serve_eval.stub import Behaviour, running


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{index}", "chat", (index, 1, 2)) for index in range(count)]


def load(url: str, count: int = 4, concurrency: int = 2, timeout_s: float = 20, max_new_tokens: int = 64) -> Window:
    return asyncio.run(
        closed_loop(url, prompts(count), concurrency=concurrency, max_new_tokens=max_new_tokens, timeout_s=timeout_s)
    )


@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_b40_tokens_come_from_usage_and_not_from_chunks(concurrency: int) -> None:
    with running(Behaviour(tokens=24, tokens_per_chunk=4, chunk_ms=100)) as (url, stub):
        window = load(url, count=2 * concurrency, concurrency=concurrency)
    assert [outcome.tokens for outcome in window.outcomes] == [24] * (2 * concurrency)
    assert stub.most_in_flight == concurrency
    rate = 2 * concurrency * 24 / window.seconds  # six chunks of at least 100 ms per request
    assert rate <= concurrency * 24 / 0.6


def test_b40_time_per_token_divides_by_tokens_after_the_first() -> None:
    with running(Behaviour(tokens=21, tokens_per_chunk=4, chunk_ms=30)) as (url, _):
        (outcome,) = load(url, count=1).outcomes
    assert len(outcome.itl_ms) == 5  # gaps between six chunks, whatever they hold
    assert outcome.ttft_ms is not None and outcome.ttft_ms + sum(outcome.itl_ms) > 150  # however late the reader is
    assert outcome.tpot_ms == pytest.approx(sum(outcome.itl_ms) / 20, rel=1e-6)


def test_b40_without_usage_the_count_is_unknown_rather_than_the_number_of_chunks() -> None:
    with running(Behaviour(usage=False)) as (url, _):
        (outcome,) = load(url, count=1).outcomes
    assert outcome.failed is None
    assert outcome.tokens is None
    assert outcome.tpot_ms is None
    assert outcome.ttft_ms is not None


@pytest.mark.parametrize("ids", [True, False])
def test_b40_an_empty_first_delta_is_not_the_first_token(ids: bool) -> None:
    with running(Behaviour(empty_first_delta=True, empty_delay_ms=80, ids=ids)) as (url, _):
        (outcome,) = load(url, count=1).outcomes
    assert outcome.ttft_ms is not None
    assert outcome.ttft_ms >= 80
    assert len(outcome.itl_ms) == 2


@pytest.mark.parametrize(
    ("mishap", "reason"),
    [
        ("http500", "HTTP 500.*out of order"),
        ("error event", "the engine fell over"),
        ("cut", "the stream ended before the answer did"),
        ("hang", "timeout after 1 s"),
        ("page", "the stream ended before the answer did; it began with: <html>.*come back later"),
    ],
)
def test_b40_a_failing_request_fails_alone_and_with_its_reason(mishap: str, reason: str) -> None:
    with running(Behaviour(mishap={"1": mishap})) as (url, _):
        started = time.monotonic()
        window = load(url, count=4, timeout_s=1)
    assert time.monotonic() - started < 10
    assert [outcome.failed is not None for outcome in window.outcomes] == [False, True, False, False]
    failed = window.outcomes[1]
    assert failed.failed is not None
    assert re.search(reason, failed.failed)
    assert failed.tokens is None


@contextlib.contextmanager
def bytes_server(*pieces: bytes, endless: bytes = b"") -> Iterator[str]:
    """A server that answers anything with these pieces of a stream, one after the other, and `endless` for ever."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for piece in itertools.chain(pieces, itertools.repeat(endless) if endless else ()):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def test_a_stream_may_have_comments_any_line_ends_and_be_cut_anywhere() -> None:
    events = [
        {"choices": [{"text": "é", "token_ids": [1, 2], "finish_reason": None}]},
        {"choices": [{"text": "€", "token_ids": [3], "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
    ]
    said = [f"data:{json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode() for event in events]
    stream = b": ping\r\n\r\nevent: x\r\nretry: 3\r\n" + said[0] + b":\n\n" + said[1] + said[2] + b"data: [DONE]\n\n"
    for size in (1, 7, len(stream)):
        with bytes_server(*(stream[start : start + size] for start in range(0, len(stream), size))) as url:
            (outcome,) = load(url, count=1).outcomes
        assert (outcome.failed, outcome.text, outcome.tokens, outcome.token_ids) == (None, "é€", 3, (1, 2, 3))


def test_a_stream_that_only_pings_ends_at_its_timeout() -> None:
    with bytes_server(endless=b": ping\n\n") as url:
        (outcome,) = load(url, count=1, timeout_s=1).outcomes
    assert outcome.failed == "timeout after 1 s"


def test_nobody_listening_is_a_failure_and_no_hang() -> None:
    window = load("http://127.0.0.1:9", count=2)
    assert all(outcome.failed for outcome in window.outcomes)


def test_outcomes_keep_the_order_of_the_prompts_and_the_answers_ids() -> None:
    with running(Behaviour(tokens=5)) as (url, _):
        window = load(url, count=6, concurrency=3)
    assert [outcome.id for outcome in window.outcomes] == [f"p{index}" for index in range(6)]
    assert window.outcomes[2].token_ids == tuple(range(1005, 1010))


def test_requests_are_greedy_bounded_streams_of_the_prompts_ids() -> None:
    with running(Behaviour()) as (url, stub):
        load(url, count=1, max_new_tokens=3)
    (body,) = stub.bodies
    assert body["prompt"] == [0, 1, 2]
    assert body["max_tokens"] == 3
    assert body["temperature"] == 0
    assert body["stream_options"] == {"include_usage": True}
