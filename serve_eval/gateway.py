"""`python -m serve_eval.gateway experiment=demo 'gateway.backends=[...]'`: the policy at work, as a streaming proxy.

One ASGI endpoint passes /v1/* through to the backend that the router chose. Nothing is added to a response, taken
from it or written anew: status, end-to-end headers and body bytes are the backend's. A response is begun only when
the first byte of its body is there, because an engine sends its headers long before its first token; until then, a
backend that dies or answers 5xx costs the client nothing but time: the request is sent once more, elsewhere. After it,
a stream that breaks is broken off towards the client as well, and never mended.

A client that leaves takes its request along: the backend's connection is closed, so the engine stops working on it.
On SIGTERM no new connection is taken, every request that is in ends as usual, and the process leaves with 0.

Keys in requests are passed on and neither kept nor logged. Only /v1/* is passed, because engines have further paths
that reset and reload things. /metrics (Prometheus) and /health are the gateway's own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import httpx
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from models.errors import Refused
from models.servers import authorities
from serve_eval.config import GatewayConfig
from serve_eval.counters import Counters, counter_lines, parse_counters
from serve_eval.gateway_metrics import Metrics
from serve_eval.policy import Policy
from serve_eval.router import Backend, Choice, NoBackend, QueueFull, Router

log = logging.getLogger(__name__)

MAX_BODY = 64 << 20
"""Bytes of a request, which is kept until its answer begins."""
SILENT = 3
"""Health checks in a row without an answer after which a backend is taken for hung."""

_HOP_BY_HOP = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
    *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
}
_OWN_FIGURES = re.compile(rb'"speculative_decoding"\s*:\s*(\{[^{}]*\})')

Headers = list[tuple[bytes, bytes]]


def end_to_end(headers: Iterable[tuple[bytes, bytes]], *, without: frozenset[bytes] = frozenset()) -> Headers:
    """Headers but for those that belong to one connection, which the Connection header may add to."""
    pairs = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in pairs if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in pairs if name not in _HOP_BY_HOP | named | without]


def own_figures(tail: bytes) -> tuple[int, int] | None:
    """(drafting steps, accepted drafts) that the end of a vLLM response tells about itself, or None.

    The key cannot stand in generated text: there its quotation marks are escaped.
    """
    found = _OWN_FIGURES.findall(tail)
    try:
        told = json.loads(found[-1])
        return int(told["num_spec_steps"]), int(told["num_accepted_draft_tokens"])
    except (IndexError, ValueError, KeyError, TypeError):
        return None


@dataclass
class Opened:
    """A response of which the first piece of the body is there (empty: the body is)."""

    choice: Choice
    response: httpx.Response
    stream: httpx.AsyncByteStream
    pieces: AsyncIterator[bytes]
    first: bytes


class Unanswered(Exception):
    """No backend answered; the message and status are for the client."""

    def __init__(self, status: int, why: str, message: str) -> None:
        super().__init__(message)
        self.status, self.why = status, why


def refusal(error: Unanswered) -> Response:
    """An error in the form of OpenAI's."""
    body = {"error": {"message": str(error), "type": "gateway_error", "param": None, "code": error.why}}
    return JSONResponse(body, error.status, {"Retry-After": "1"} if error.status in (429, 503) else None)


class Proxy:
    """The ASGI endpoint of /v1/*.

    It speaks to backends through httpx's transport, not its client, which keeps cookies (of one user, for the next),
    follows redirects and adds headers.
    """

    def __init__(self, router: Router, transport: httpx.AsyncHTTPTransport, metrics: Metrics, config: GatewayConfig):
        self.router, self.transport, self.metrics, self.route_header = router, transport, metrics, config.route_header
        self.extensions = {"timeout": httpx.Timeout(config.stall_s, connect=5, pool=None).as_dict()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on. A watcher sees the client leave and cancels what is being done for it."""
        request = Request(scope, receive)
        if {".", ".."} & set(request.scope["path"].split("/")):  # would lead out of /v1/
            await Response(status_code=404)(scope, receive, send)
            return
        route = self.router.policy.route(request.headers.get(self.route_header))
        try:
            body = await self._body(request)
        except ClientDisconnect:
            return
        except Unanswered as error:
            await refusal(error)(scope, receive, send)
            return
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch, receive, group.cancel_scope)
            try:
                opened = await self._open(request, route, body)
            except Unanswered as error:
                self.metrics.failures.labels(route, error.why).inc()
                await refusal(error)(scope, receive, send)
            else:
                await self._pass_on(opened, send)
            group.cancel_scope.cancel()

    @staticmethod
    async def _watch(receive: Receive, cancel: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        cancel.cancel()

    @staticmethod
    async def _body(request: Request) -> bytes:
        pieces, size = [], 0
        async for piece in request.stream():
            size += len(piece)
            if size > MAX_BODY:
                raise Unanswered(413, "too_large", f"the request is larger than {MAX_BODY >> 20} MiB")
            pieces.append(piece)
        return b"".join(pieces)

    async def _open(self, request: Request, route: str, body: bytes) -> Opened:
        """A response whose body has begun, from the backend of choice or, once, from another."""
        first_error = ""
        exclude: Backend | None = None
        while True:
            started = time.perf_counter()
            try:
                choice = await self.router.enter(route, exclude)
            except QueueFull:
                raise Unanswered(429, "queue_full", "every backend is busy and the queue is full") from None
            except NoBackend:
                raise Unanswered(502 if exclude else 503, "no_backend", first_error or "no backend is up") from None
            self.metrics.queue_seconds.labels(route).observe(time.perf_counter() - started)
            method = choice.backend.config.method
            self.metrics.requests.labels(route, method, choice.reason).inc()
            try:
                opened = await self._try(choice, request, body)
            except httpx.TransportError as error:
                self.router.leave(choice)
                first_error = f"the backend gave no answer ({type(error).__name__})"
                log.warning("%s gave no answer to a request of route %s: %r", choice.backend.config.url, route, error)
                if isinstance(error, httpx.ConnectError):
                    self.router.failed(choice.backend)
                if exclude is not None:
                    raise Unanswered(502, "no_answer", first_error) from None
            except BaseException:
                self.router.leave(choice)
                raise
            else:
                self.metrics.first_byte.labels(route, method).observe(time.perf_counter() - started)
                other = any(each.up and each is not choice.backend for each in self.router.backends)
                if opened.response.status_code < 500 or exclude is not None or not other:
                    return opened
                await self._close(opened)
            exclude = choice.backend
            self.metrics.retries.labels(route).inc()

    async def _try(self, choice: Choice, request: Request, body: bytes) -> Opened:
        url = choice.backend.config.url.rstrip("/") + request.scope["raw_path"].decode("ascii")
        if query := request.scope["query_string"]:
            url += f"?{query.decode('ascii')}"
        headers = end_to_end(request.headers.raw, without=frozenset({b"host", b"content-length"}))
        response = await self.transport.handle_async_request(
            httpx.Request(request.method, url, headers=headers, content=body, extensions=self.extensions)
        )
        stream = response.stream
        assert isinstance(stream, httpx.AsyncByteStream)
        try:
            pieces = aiter(stream)
            return Opened(choice, response, stream, pieces, await anext(pieces, b""))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await stream.aclose()
            raise

    async def _pass_on(self, opened: Opened, send: Send) -> None:
        choice, response = opened.choice, opened.response
        headers = end_to_end(response.headers.raw)
        tail = (b"", b"", opened.first)
        try:
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            if opened.first:
                await send({"type": "http.response.body", "body": opened.first, "more_body": True})
            async for piece in opened.pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                tail = (tail[1], tail[2], piece)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.TransportError as error:
            # Returning without the last message makes the server break the client's connection off.
            self.metrics.failures.labels(choice.route, "broken_off").inc()
            log.warning("%s broke a stream of route %s off: %r", choice.backend.config.url, choice.route, error)
        else:
            if choice.backend.speculates and (figures := own_figures(b"".join(tail))):
                self.router.told(choice, *figures)
        finally:
            await self._close(opened)

    async def _close(self, opened: Opened) -> None:
        self.router.leave(opened.choice)
        with anyio.CancelScope(shield=True):
            await opened.stream.aclose()


async def poll(router: Router, client: httpx.AsyncClient, backend: Backend) -> None:
    """Look at one backend's health and counters; a backend without readable metrics can be up all the same."""
    reading: Counters | None = None
    base = backend.config.url.rstrip("/")
    up: bool | None = None
    try:
        up = (await client.get(f"{base}/health", timeout=5)).status_code == 200
        if up:
            page = await client.get(f"{base}/metrics", timeout=5)
            if page.status_code == 200:
                # an engine's page has thousands of lines, and parsing them all would hold every stream up
                reading = parse_counters(counter_lines(page.text))
    except httpx.ReadTimeout:
        pass
    except httpx.HTTPError:
        up = up or False
    except Refused as error:
        log.warning("%s: %s", backend.config.url, error)
    backend.silent = backend.silent + 1 if up is None else 0
    if up is None:  # slow is not down: a busy server answers late, but it does answer
        up = backend.up and backend.silent < SILENT
    if up != backend.up:
        log.info("%s (%s) is %s", backend.config.url, backend.config.method, "up" if up else "down")
    router.polled(backend, up, reading)


def make_app(policy: Policy, config: GatewayConfig) -> Starlette:
    """The gateway as an ASGI application; `app.state` has its `router` and `transport`.

    Raises:
        Refused: the policy and the backends do not fit (see `Router`).
    """
    router = Router(policy, config.backends, config.max_queue)
    metrics = Metrics(router)
    # A connection for each request: one that is kept may be closed by the server in the moment in which it is used
    # again, which would look like a dead backend, and httpx's pool takes a time per request that grows with the
    # square of the idle connections (1 ms at 64).
    transport = httpx.AsyncHTTPTransport(
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,
        verify=authorities(each.url for each in config.backends),
    )
    client = httpx.AsyncClient(transport=transport)

    async def keep_polling(backend: Backend) -> None:
        while True:
            await asyncio.sleep(config.poll_s)
            await poll(router, client, backend)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await asyncio.gather(*(poll(router, client, backend) for backend in router.backends))
        pollers = [asyncio.create_task(keep_polling(backend)) for backend in router.backends]
        yield
        for poller in pollers:
            poller.cancel()
        await asyncio.gather(*pollers, return_exceptions=True)
        await client.aclose()

    async def health(request: Request) -> Response:
        up = sum(backend.up for backend in router.backends)
        return JSONResponse({"up": up, "backends": len(router.backends)}, 200 if up else 503)

    async def show_metrics(request: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", show_metrics),
            Route("/v1/{path:path}", Proxy(router, transport, metrics, config)),
        ],
        lifespan=lifespan,
    )
    app.state.router, app.state.transport = router, transport
    return app


def make_server(policy: Policy, config: GatewayConfig) -> uvicorn.Server:
    """The gateway's HTTP server: it adds no headers, logs no request, and drains when it is told to leave."""
    return uvicorn.Server(
        uvicorn.Config(
            make_app(policy, config),
            host=config.host,
            port=config.port,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
        )
    )


if __name__ == "__main__":
    from pathlib import Path

    from conf import Run, stage
    from serve_eval.policy import read_policy

    def main(run: Run) -> None:
        """Serve until told to leave."""
        chosen = run.gateway.policy
        policy = read_policy(Path(chosen).expanduser() if chosen else run.directory / "eval" / "policy.yaml")
        server = make_server(policy, run.gateway)
        # uvicorn raises the signal again once it has drained; by then there is nothing left to stop
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        try:
            server.run()
        except SystemExit:
            where = f"gateway.host={run.gateway.host} gateway.port={run.gateway.port}"
            raise Refused(f"the gateway cannot listen at {where}; is the port taken?") from None

    stage("gateway", main, shared=True)
