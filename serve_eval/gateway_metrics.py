"""What the gateway tells Prometheus of itself: requests, waits and AL by route, its backends, its CPU and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from serve_eval.router import Backend, RecentAcceptance, Router

_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """The gateway's Prometheus metrics; a route is one that the policy knows, so that clients cannot invent any."""

    def __init__(self, router: Router) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        name = "draftsmith_gateway"
        self.requests = Counter(
            f"{name}_requests", "Requests sent on", ["route", "method", "reason"], registry=registry
        )
        self.failures = Counter(
            f"{name}_failures", "Requests not answered in full", ["route", "why"], registry=registry
        )
        self.retries = Counter(f"{name}_retries", "Requests sent once more", ["route"], registry=registry)
        self.first_byte = Histogram(
            f"{name}_first_byte_seconds", "To the first byte", ["route", "method"], registry=registry, buckets=_BUCKETS
        )
        self.queue_seconds = Histogram(
            f"{name}_queue_seconds", "Wait for a slot", ["route"], registry=registry, buckets=(0.001, *_BUCKETS)
        )
        queue = Gauge(f"{name}_queue", "Requests that wait for a slot", registry=registry)
        queue.set_function(lambda: len(router.waiting))
        al = Gauge(f"{name}_al", "Acceptance length over the window; NaN when unknown", ["route"], registry=registry)
        for route, window in router.acceptance.items():
            al.labels(route).set_function(partial(_al, window))
        gauges: dict[str, tuple[str, Callable[[Backend], float]]] = {
            "in_flight": ("Requests in flight at the backend", lambda each: each.load),
            "up": ("Whether the backend is up", lambda each: each.up),
            "queue_wait_ms": ("Mean wait in the engine's queue", lambda each: each.queue_wait_ms or 0.0),
        }
        for key, (about, value) in gauges.items():
            gauge = Gauge(f"{name}_backend_{key}", about, ["backend", "method"], registry=registry)
            for backend in router.backends:
                gauge.labels(backend.config.url, backend.config.method).set_function(partial(value, backend))


def _al(window: RecentAcceptance) -> float:
    return math.nan if window.al is None else window.al
