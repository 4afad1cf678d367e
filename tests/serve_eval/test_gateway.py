"""The gateway changes nothing, loses nothing that had not begun, leaks nothing, and leaves in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from models.servers import PLAIN
from serve_eval.config import BackendConfig, GatewayConfig
from serve_eval.gateway import end_to_end, make_server, own_figures, poll
from serve_eval.policy import Level, Policy, RoutePolicy, write_policy
from serve_eval.router import Backend, Router
from tests.serve_eval.stub import Behaviour, Stub, running

ROOT = Path(__file__).resolve().parents[2]
STUB = Path(__file__).with_name("stub.py")
ROUTE = "x-draftsmith-route"


def on_up_to(load: int, **more: Any) -> Policy:
    """Chat speculates up to a load; requests without a label do not."""
    chat = RoutePolicy(levels=[Level(up_to=load, method="eagle3", k=3, min_al=1.5)])
    return Policy(window_drafts=20, routes={"all": RoutePolicy(), "chat": chat}, **more)


NOWHERE = Policy(routes={"all": RoutePolicy()})


@dataclass
class Gateway:
    url: str
    server: uvicorn.Server
    loop: asyncio.AbstractEventLoop

    @property
    def router(self) -> Router:
        return self.server.config.app.state.router  # type: ignore[union-attr]

    def connections(self) -> int:
        """Open connections to backends, but for those of a poll."""
        return len(self.server.config.app.state.transport._pool.connections)  # type: ignore[union-attr]

    def metric(self, line: str) -> float | None:
        text = httpx.get(f"{self.url}/metrics", verify=PLAIN).text
        return next((float(each.split()[-1]) for each in text.splitlines() if each.startswith(line)), None)


@contextlib.contextmanager
def gateway(policy: Policy, *backends: BackendConfig, **settings: Any) -> Iterator[Gateway]:
    """The gateway in a thread of its own."""
    config = GatewayConfig(backends=list(backends), port=0, **({"poll_s": 0.05} | settings))
    server = make_server(policy, config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Gateway(f"http://127.0.0.1:{port}", server, loops[0])
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the gateway does not end"


def wait_for(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@contextlib.contextmanager
def pair(
    plain: Behaviour | None = None, eagle: Behaviour | None = None, policy: Policy | None = None, **settings: Any
) -> Iterator[tuple[Gateway, Stub, Stub]]:
    """A gateway before two stubs, the first without speculation and the second with."""
    with running(plain or Behaviour()) as (url_a, a), running(eagle or Behaviour()) as (url_b, b):
        backends = BackendConfig(url_a), BackendConfig(url_b, "eagle3", 3)
        with gateway(policy or on_up_to(100), *backends, **settings) as made:
            yield made, a, b


def body(prompt: int = 1, tokens: int = 64) -> dict[str, Any]:
    return {"prompt": [prompt], "max_tokens": tokens, "stream": True}


def post(url: str, *, route: str | None = "chat", headers: dict[str, str] | None = None) -> httpx.Response:
    sent = ({ROUTE: route} if route else {}) | (headers or {})
    return httpx.post(f"{url}/v1/completions", json=body(), headers=sent, timeout=30, verify=PLAIN)


def test_requests_go_by_their_label() -> None:
    with pair() as (made, plain, eagle):
        for route in ("chat", "chat", "other", None):
            assert post(made.url, route=route).status_code == 200
        assert (len(plain.bodies), len(eagle.bodies)) == (2, 2)
        assert made.metric('draftsmith_gateway_requests_total{method="eagle3",reason="policy",route="chat"}') == 2
        assert made.metric('draftsmith_gateway_requests_total{method="none",reason="off",route="all"}') == 2


def test_a_response_is_the_backends_byte_for_byte_and_header_for_header() -> None:
    headers = {"Set-Cookie": "a=b", "X-Request-Id": "7", "Keep-Alive": "timeout=5", "Server": "stub/1"}
    with running(Behaviour(headers=headers)) as (url, stub), gateway(NOWHERE, BackendConfig(url)) as made:
        direct, through = (post(each, route=None) for each in (url, made.url))
        assert through.content == direct.content
        told = {pair for pair in direct.headers.multi_items() if pair[0] not in ("keep-alive", "date")}
        assert {pair for pair in through.headers.multi_items() if pair[0] != "date"} == told
        post(made.url, route=None)
        assert "cookie" not in stub.heard[-1], "one user's cookie is not sent for another"


def test_a_request_reaches_the_backend_as_it_is() -> None:
    with pair() as (made, _, eagle):
        post(made.url, headers={"authorization": "Bearer sk-1", "connection": "x-hop", "x-hop": "1", "x-end": "2"})
        heard = eagle.heard[0]
        assert eagle.bodies == [body()]
        assert heard["authorization"] == "Bearer sk-1"
        assert heard["x-end"] == "2"
        assert "x-hop" not in heard
        assert httpx.get(f"{made.url}/v1/a%2Fb?x=%20y", verify=PLAIN).json() == {"path": "/v1/a%2Fb?x=%20y"}


def test_an_error_of_the_backend_is_passed_on() -> None:
    with running(Behaviour(mishap={"any": "http500"})) as (url, _), gateway(NOWHERE, BackendConfig(url)) as made:
        policy_free = post(made.url, route=None)
        assert (policy_free.status_code, policy_free.json()) == (500, post(url).json())


def test_chunks_arrive_while_the_answer_is_still_being_made() -> None:
    with pair(eagle=Behaviour(tokens=12, tokens_per_chunk=4, chunk_ms=300)) as (made, _, _):
        times = []
        headers = {ROUTE: "chat"}
        stream = httpx.stream("POST", f"{made.url}/v1/completions", json=body(), headers=headers, verify=PLAIN)
        with stream as response:
            for data in response.iter_raw():
                times += [time.monotonic()] * data.count(b'"text"')
        assert len(times) == 3
        assert times[1] - times[0] > 0.15 and times[2] - times[1] > 0.15


@pytest.mark.parametrize("mishap", ["http500", "mute", "hang"])
def test_what_fails_before_the_first_byte_is_sent_once_more_elsewhere(mishap: str) -> None:
    with pair(eagle=Behaviour(mishap={"any": mishap}), stall_s=0.5) as (made, plain, eagle):
        answer = post(made.url)
        assert (answer.status_code, "[DONE]" in answer.text) == (200, True)
        assert (len(eagle.bodies), len(plain.bodies)) == (1, 1)
        assert made.metric('draftsmith_gateway_retries_total{route="chat"}') == 1
        wait_for(lambda: not made.connections())


def test_what_fails_everywhere_is_told_after_one_more_try() -> None:
    mute = Behaviour(mishap={"any": "mute"})
    with pair(plain=mute, eagle=mute) as (made, plain, eagle):
        answer = post(made.url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "no_answer")
        assert len(plain.bodies) + len(eagle.bodies) == 2
        assert made.metric('draftsmith_gateway_failures_total{route="chat",why="no_answer"}') == 1


def test_a_stream_that_breaks_after_its_first_byte_is_broken_off_and_not_sent_again() -> None:
    with (
        running(Behaviour()) as (url, plain),
        dying_backend() as dying,
        gateway(on_up_to(9), BackendConfig(url), BackendConfig(dying, "eagle3", 3)) as made,
    ):
        wait_for(lambda: all(backend.up for backend in made.router.backends))
        with pytest.raises(httpx.RemoteProtocolError):
            post(made.url)
        assert not plain.bodies
        assert made.metric('draftsmith_gateway_failures_total{route="chat",why="broken_off"}') == 1


@contextlib.contextmanager
def dying_backend() -> Iterator[str]:
    """Healthy, but every answer ends in the middle of its first line."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                if connection.recv(65536).startswith(b"GET"):
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                else:
                    connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\ndata\r\n")
                    time.sleep(0.1)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def stub_process(port: int, **behaviour: Any) -> subprocess.Popen[bytes]:
    environment = os.environ | {"STUB_BEHAVIOUR": json.dumps(behaviour)}
    process = subprocess.Popen(
        [sys.executable, STUB, "--port", str(port)], env=environment, stdout=subprocess.DEVNULL, cwd=ROOT
    )
    wait_for(lambda: answers(f"http://127.0.0.1:{port}/health"))
    return process


def answers(url: str) -> bool:
    try:
        return httpx.get(url, verify=PLAIN).status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def ask_many(url: str, count: int, meanwhile: Any) -> list[tuple[bool, bool]]:
    """(began, ended) of `count` requests at once; `meanwhile` is called as soon as some have begun and some not."""
    begun: set[int] = set()

    async def ask(client: httpx.AsyncClient, index: int) -> tuple[bool, bool]:
        text = b""
        try:
            request = client.stream("POST", "/v1/completions", json=body(index), headers={ROUTE: "chat"})
            async with request as response:
                async for data in response.aiter_raw():
                    begun.add(index)
                    text += data
        except httpx.TransportError:
            pass
        return index in begun, b"[DONE]" in text

    async with httpx.AsyncClient(base_url=url, timeout=60, verify=PLAIN) as client:
        tasks = [asyncio.create_task(ask(client, index)) for index in range(count)]
        while len(begun) < count // 4:
            await asyncio.sleep(0.01)
        meanwhile()
        return await asyncio.gather(*tasks)


def test_killing_a_backend_in_mid_load_loses_no_request_that_had_not_begun_to_stream() -> None:
    ports = free_port(), free_port()
    processes = []
    # 12 at a time at each, so that of 48 some stream, some wait for their first byte, and some are queued
    late = {str(index): "slow" for index in range(1, 48, 2)}
    for port in ports:
        processes.append(stub_process(port, chunk_ms=100, tokens=24, mishap=late))
    try:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        backends = BackendConfig(urls[0], max_in_flight=12), BackendConfig(urls[1], "eagle3", 3, max_in_flight=12)
        with gateway(on_up_to(100), *backends) as made:
            results = asyncio.run(ask_many(made.url, 48, processes[1].kill))
            assert made.router.backends[1].up is False
            assert made.metric('draftsmith_gateway_retries_total{route="chat"}')
        assert [ended for began, ended in results if not began] == []
        broken = sum(not ended for _, ended in results)
        assert 0 < broken <= 12, "it was killed while it streamed, and only those are lost"
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_backend_that_comes_back_is_used_again() -> None:
    with pair() as (made, plain, eagle):
        eagle.healthy = False
        wait_for(lambda: not made.router.backends[1].up)
        post(made.url)
        assert len(plain.bodies) == 1
        eagle.healthy = True
        wait_for(lambda: made.router.backends[1].up)
        post(made.url)
        assert len(eagle.bodies) == 1


def test_a_backend_that_answers_late_is_up_and_one_that_never_does_is_down() -> None:
    router = Router(NOWHERE, [BackendConfig("http://a")], 0)
    answers = [True, False, False, True, False, False, False, True]

    def health(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health" and not answers[0]:
            raise httpx.ReadTimeout("")
        return httpx.Response(200 if request.url.path == "/health" else 404)

    async def look() -> list[bool]:
        seen = []
        async with httpx.AsyncClient(transport=httpx.MockTransport(health)) as client:
            while answers:
                await poll(router, client, router.backends[0])
                seen.append(router.backends[0].up)
                del answers[0]
        return seen

    assert asyncio.run(look()) == [True, True, True, True, True, True, False, True]


def test_a_backend_that_hangs_delays_no_look_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: Counter[str] = Counter()

    async def look(router: Router, client: httpx.AsyncClient, backend: Backend) -> None:
        url = backend.config.url
        looks[url] += 1
        if looks["http://hangs"] > 1 and url == "http://hangs":
            await asyncio.Event().wait()

    monkeypatch.setattr("serve_eval.gateway.poll", look)
    with gateway(NOWHERE, BackendConfig("http://hangs"), BackendConfig("http://other")):
        wait_for(lambda: looks["http://other"] > looks["http://hangs"] + 2)


def test_acceptance_that_responses_tell_falls_below_the_threshold_and_the_route_falls_back() -> None:
    with pair(eagle=Behaviour(own_figures=True, accepted_per_draft=0, drafts=False)) as (made, plain, eagle):
        post(made.url)
        wait_for(lambda: made.metric('draftsmith_gateway_al{route="chat"}') == 1.0)
        post(made.url)
        assert (len(eagle.bodies), len(plain.bodies)) == (1, 1)
        assert made.metric('draftsmith_gateway_requests_total{method="none",reason="acceptance",route="chat"}') == 1


def test_acceptance_is_taken_from_counters_where_responses_do_not_tell() -> None:
    with pair(eagle=Behaviour(accepted_per_draft=2)) as (made, _, _):
        post(made.url)
        wait_for(lambda: made.metric('draftsmith_gateway_al{route="chat"}') == 3.0)


def test_figures_are_read_from_what_the_engine_tells_and_not_from_what_the_model_says() -> None:
    told = b'{"choices":[],"metrics":{"speculative_decoding":{"num_spec_steps":9,"num_accepted_draft_tokens":4}}}'
    assert own_figures(b"data: " + told + b"\n\ndata: [DONE]\n\n") == (9, 4)
    said = json.dumps({"text": told.decode()}).encode()
    assert own_figures(said) is None
    assert own_figures(b'"speculative_decoding": {"other": 1}') is None


def test_the_queue_is_bounded_and_who_waits_is_served() -> None:
    late = Behaviour(mishap={"any": "late"})
    with (
        running(late) as (url, stub),
        gateway(NOWHERE, BackendConfig(url, max_in_flight=1), max_queue=1) as made,
    ):
        got: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda: got.append(post(made.url, route=None))) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(made.router.waiting) == 1)
        refused = post(made.url, route=None)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        stub.go.set()
        for thread in threads:
            thread.join()
        assert [each.status_code for each in got] == [200, 200]
        assert stub.most_in_flight == 1


def test_without_a_backend_the_answer_and_the_health_page_say_so() -> None:
    with gateway(NOWHERE, BackendConfig(f"http://127.0.0.1:{free_port()}")) as made:
        assert post(made.url, route=None).status_code == 503
        assert httpx.get(f"{made.url}/health", verify=PLAIN).status_code == 503


@pytest.mark.parametrize("when", ["before the first byte", "in the stream", "in the queue"])
def test_a_client_that_leaves_takes_its_request_along(when: str) -> None:
    behaviour = Behaviour(tokens=400, chunk_ms=50, mishap={} if when == "in the stream" else {"any": "late"})
    with running(behaviour) as (url, stub), gateway(NOWHERE, BackendConfig(url, max_in_flight=1)) as made:
        with contextlib.ExitStack() as stack:
            if when == "in the queue":
                blocker = socket.create_connection(("127.0.0.1", int(made.url.rsplit(":", 1)[1])))
                stack.callback(blocker.close)
                blocker.sendall(raw_request())
                wait_for(lambda: stub.in_flight == 1)
            client = socket.create_connection(("127.0.0.1", int(made.url.rsplit(":", 1)[1])))
            client.sendall(raw_request())
            if when == "in the stream":
                assert client.recv(10)
            elif when == "in the queue":
                wait_for(lambda: len(made.router.waiting) == 1)
            else:
                wait_for(lambda: stub.in_flight == 1)
            client.close()
            if when == "in the queue":
                wait_for(lambda: not made.router.waiting)
                assert made.router.backends[0].load == 1
        wait_for(lambda: made.router.backends[0].load == 0)
        wait_for(lambda: not made.connections())
        stub.go.set()
        wait_for(lambda: stub.in_flight == 0)


def raw_request() -> bytes:
    data = json.dumps(body(tokens=400)).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)


def test_only_v1_is_passed_on_and_no_path_leads_out_of_it() -> None:
    with pair() as (made, plain, eagle):
        port = int(made.url.rsplit(":", 1)[1])
        for path in (b"/reset_prefix_cache", b"/v1/../reset", b"/v1/%2e%2e/reset", b"/version"):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n" % path)
                assert client.recv(100).startswith(b"HTTP/1.1 404"), path
        assert not plain.bodies and not eagle.bodies


def test_a_body_that_is_too_large_is_refused_and_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_eval.gateway.MAX_BODY", 10)
    with running(Behaviour()) as (url, stub), gateway(NOWHERE, BackendConfig(url)) as made:
        assert (post(made.url).status_code, stub.bodies) == (413, [])


def test_keys_are_logged_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="serve_eval")
    caplog.set_level(logging.INFO)
    mute = Behaviour(mishap={"any": "mute"})
    with pair(plain=mute, eagle=mute) as (made, _, _):
        post(made.url, headers={"authorization": "Bearer sk-secret"})
    assert "gave no answer" in caplog.text
    assert "sk-secret" not in caplog.text


def test_headers_of_one_connection_are_not_passed_to_another() -> None:
    sent = [(b"Connection", b"close, X-Mine"), (b"X-Mine", b"1"), (b"TE", b"trailers"), (b"Accept", b"*/*")]
    assert end_to_end(sent) == [(b"accept", b"*/*")]


def test_on_sigterm_what_is_in_ends_as_usual_and_the_process_leaves_with_zero(tmp_path: Path) -> None:
    write_policy(on_up_to(9), tmp_path / "policy.yaml")
    with running(Behaviour(tokens=40, chunk_ms=100)) as (url, stub), running(Behaviour()) as (eagle, _):
        port = free_port()
        overrides = [
            "name=x",
            "target.path=x",
            f"root={tmp_path}",
            f"gateway.policy={tmp_path}/policy.yaml",
            f"gateway.port={port}",
            f"gateway.backends=[{{url: '{url}'}}, {{url: '{eagle}', method: eagle3, k: 3}}]",
        ]
        command = [sys.executable, "-m", "serve_eval.gateway", *overrides]
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            wait_for(lambda: process.poll() is not None or answers(f"http://127.0.0.1:{port}/health"), 120)
            got: list[httpx.Response] = []
            thread = threading.Thread(target=lambda: got.append(post(f"http://127.0.0.1:{port}", route=None)))
            thread.start()
            wait_for(lambda: stub.in_flight == 1)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)  # an impatient supervisor
            wait_for(lambda: not answers(f"http://127.0.0.1:{port}/health"))
            assert process.poll() is None, "it waits for the stream"
            thread.join(30)
            assert "[DONE]" in got[0].text
            assert process.wait(30) == 0
            with socket.create_server(("127.0.0.1", port)):
                taken = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
            assert taken.returncode == 2
            assert f"cannot listen at gateway.host=127.0.0.1 gateway.port={port}" in taken.stderr
        finally:
            process.kill()
            process.wait()
