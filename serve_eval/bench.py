"""`python -m serve_eval.bench`: does the client distort what it measures, and what does the gateway cost?

Three figures, each with its bar, against a paced server (`serve_eval.pacer`) in a process of its own. Wants two cores
with nothing else on them; the processes are bound to them.

1. The client alone, on one core: 256 concurrent streams of 50 chunks/s. Its gaps between chunks are compared with
   those at which the chunks were sent: their difference is the client's doing (and the kernel's).
2. The gateway with 64 concurrent streams of 50 chunks/s on its core: TTFT through it and directly, in turns, client and
   server sharing the other core. The first answer of each client is left out, because they all start at once. The CPU
   time per chunk beside it says how far the core is from full, from where on TTFT is a queue's.
3. 10,000 requests through a gateway on the client's own event loop: what is left of them afterwards.

`python -m serve_eval.bench client`, `... gateway` or `... leaks` measures one of them.
"""

from __future__ import annotations

import asyncio
import multiprocessing.connection
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import uvicorn
import uvloop

from models.errors import Refused
from models.servers import get
from serve_eval.config import BackendConfig, GatewayConfig
from serve_eval.gateway import make_server
from serve_eval.load import Outcome, closed_loop
from serve_eval.pacer import pacing, serving_process
from serve_eval.policy import Policy, RoutePolicy
from serve_eval.prompts import Prompt

INTERVAL_S = 0.02
"""Of 50 chunks/s."""
CLIENT_STREAMS, CLIENT_CHUNKS, CLIENT_BAR_MS = 256, 500, 2.0
GATEWAY_STREAMS, GATEWAY_CHUNKS, GATEWAY_BAR_MS = 64, 100, 3.0
ROUNDS = 4
"""Answers of each client of the gateway's windows, the first of which is left out."""
TURNS = 2
"""Windows with and without the gateway."""
REQUESTS = 10_000

POLICY = Policy(routes={"all": RoutePolicy()})


def load(url: str, count: int, concurrency: int, chunks: int) -> list[Outcome]:
    """A closed loop of `count` requests; every one of them must be answered."""
    prompts = [Prompt(str(index), "bench", (index,)) for index in range(count)]
    window = uvloop.run(closed_loop(url, prompts, concurrency=concurrency, max_new_tokens=chunks, timeout_s=120))
    if failed := [outcome.failed for outcome in window.outcomes if outcome.failed]:
        raise Refused(f"{len(failed)} of {count} requests failed: {failed[0]}")
    return list(window.outcomes)


def distortion_ms(outcomes: Sequence[Outcome]) -> tuple[list[float], list[float]]:
    """(differences between seen and sent gaps, the sent gaps), both in ms."""
    differences: list[float] = []
    sent: list[float] = []
    for outcome in outcomes:
        gaps = np.diff(np.array([float(word) for word in outcome.text.split()])) * 1e3
        differences += list(np.abs(np.array(outcome.itl_ms) - gaps))
        sent += list(gaps)
    return differences, sent


def bench_client(cores: Sequence[int]) -> None:
    """Print how far the client's gaps are from the sent ones, streams spread and in step."""
    for in_step in (False, True):
        with pacing(INTERVAL_S, in_step=in_step, core=cores[1]) as url:
            os.sched_setaffinity(0, {cores[0]})
            before = os.times()
            outcomes = load(url, CLIENT_STREAMS, CLIENT_STREAMS, CLIENT_CHUNKS)
            after = os.times()
        differences, sent = distortion_ms(outcomes)
        p50, p95, p99 = np.percentile(differences, [50, 95, 99])
        cpu = after.user + after.system - before.user - before.system
        print(
            f"client: {CLIENT_STREAMS} streams {'in step' if in_step else 'spread'}, {len(sent):,} gaps, sent every "
            f"{np.median(sent):.1f} ms (p95 {np.percentile(sent, 95):.1f}): ITL off by {p50:.2f} / {p95:.2f} / "
            f"{p99:.2f} ms at p50 / p95 / p99 (bar: {CLIENT_BAR_MS} at p95), {1e6 * cpu / len(sent):.0f} us of CPU "
            "per chunk"
        )


def _serve_gateway(ready: multiprocessing.connection.Connection, backend: str, core: int) -> None:
    os.sched_setaffinity(0, {core})
    server = make_server(POLICY, GatewayConfig(backends=[BackendConfig(backend)], port=0))

    async def main() -> None:
        serving = asyncio.create_task(server.serve())
        ready.send(await port_of(server, serving))
        await serving

    uvloop.run(main())  # as uvicorn itself would, finding it there


async def port_of(server: uvicorn.Server, serving: asyncio.Task[None]) -> int:
    """The port of a server that is starting up as the task `serving`."""
    while not server.started:
        if serving.done():
            raise Refused("the gateway did not start")
        await asyncio.sleep(0.01)
    return int(server.servers[0].sockets[0].getsockname()[1])


def bench_gateway(cores: Sequence[int]) -> None:
    """Print TTFT with and without the gateway."""
    ttft: dict[str, list[float]] = {"directly": [], "through the gateway": []}
    chunks, cpu_s = 0, 0.0
    with pacing(INTERVAL_S, core=cores[0]) as backend, serving_process(_serve_gateway, backend, cores[1]) as gateway:
        os.sched_setaffinity(0, {cores[0]})
        for _ in range(TURNS):
            for way, url in zip(ttft, (backend, gateway), strict=True):
                before = _cpu_seconds(gateway)
                outcomes = load(url, ROUNDS * GATEWAY_STREAMS, GATEWAY_STREAMS, GATEWAY_CHUNKS)
                if url == gateway:
                    cpu_s += _cpu_seconds(gateway) - before
                    chunks += sum(1 + len(outcome.itl_ms) for outcome in outcomes)
                ttft[way] += [each.ttft_ms for each in outcomes[GATEWAY_STREAMS:] if each.ttft_ms is not None]
    spread = {way: np.percentile(samples, [50, 95]) for way, samples in ttft.items()}
    told = ", ".join(f"{way} {p50:.2f} / {p95:.2f}" for way, (p50, p95) in spread.items())
    added = spread["through the gateway"][0] - spread["directly"][0]
    print(
        f"gateway: {GATEWAY_STREAMS} streams, TTFT in ms at p50 / p95: {told}; it adds {added:.2f} ms at p50 "
        f"(bar: {GATEWAY_BAR_MS}) and takes {1e6 * cpu_s / chunks:.0f} us of CPU per chunk"
    )


def _cpu_seconds(gateway: str) -> float:
    """CPU time of the gateway's process so far."""
    lines = get(f"{gateway}/metrics", timeout_s=10).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("process_cpu_seconds_total"))


@dataclass(frozen=True)
class Leftovers:
    """What is more than before after so many requests: tasks, open files, connections to backends, slots taken."""

    tasks: int
    files: int
    connections: int
    slots: int


def leftovers(requests: int, concurrency: int = 64) -> Leftovers:
    """Send `requests` through a gateway on this event loop, and count what they leave behind."""
    prompts = [Prompt(str(index), "bench", (index,)) for index in range(requests)]

    async def story(backend: str) -> Leftovers:
        config = GatewayConfig(
            backends=[BackendConfig(backend, max_in_flight=concurrency * 3 // 4)], port=0, poll_s=1e4
        )
        server = make_server(POLICY, config)
        state = server.config.app.state  # type: ignore[union-attr]
        serving = asyncio.create_task(server.serve())
        url = f"http://127.0.0.1:{await port_of(server, serving)}"

        async def send(some: Sequence[Prompt]) -> None:
            window = await closed_loop(url, some, concurrency=concurrency, max_new_tokens=1, timeout_s=120)
            if failed := [outcome.failed for outcome in window.outcomes if outcome.failed]:
                raise Refused(f"{len(failed)} of {len(some)} requests failed: {failed[0]}")

        async def at_rest() -> tuple[int, int]:
            await asyncio.sleep(0.5)  # what ends with a connection ends a moment later
            return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))

        await send(prompts[:concurrency])
        before = await at_rest()
        await send(prompts)
        tasks, files = (b - a for a, b in zip(before, await at_rest(), strict=True))
        connections = len(state.transport._pool.connections)
        slots = state.router.backends[0].load + len(state.router.waiting)
        server.should_exit = True
        await serving
        return Leftovers(tasks, files, connections, slots)

    with pacing(0) as backend:
        return asyncio.run(story(backend))


def main() -> None:
    """Measure what the command line names, or all."""
    from conf import help

    if help.asks_for_help(sys.argv[1:]):
        help.tell()
    known = ["client", "gateway", "leaks"]
    asked = sys.argv[1:] or known
    if strange := [what for what in asked if what not in known]:
        raise Refused(f"{strange[0]} is not one of {', '.join(known)}")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise Refused("the benchmark wants two cores, one for the server")
    for what in asked:
        os.sched_setaffinity(0, set(cores))
        if what == "client":
            bench_client(cores)
        elif what == "gateway":
            bench_gateway(cores)
        else:
            print(f"leaks: {REQUESTS:,} requests left {leftovers(REQUESTS)}")


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)
