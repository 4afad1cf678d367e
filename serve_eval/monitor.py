"""`python -m serve_eval.monitor experiment=demo 'monitor.servers={chat: "http://..."}'`: what servers accept, live.

Each reading is compared with the one before, so a row tells the last interval and not the server's whole life: AL and
acceptance by position from counter differences, requests that run and wait, the mean wait in the queue. Counters know
no routes; a row is a server, so a server per route gives rows by route. Of a gateway, whose own metrics know them,
every route is a row. SGLang has no counter of drafts: its AL is the gauge that the engine itself keeps (bonus token
included), and its positions are unknown.

What is not known is "n/a", and never 1.0. The same figures are served for Prometheus with `monitor.port`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

import httpx
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from rich.console import Console
from rich.live import Live
from rich.table import Table

from models.errors import Refused
from models.servers import authorities
from models.terminal import tables
from serve_eval.config import MonitorConfig
from serve_eval.counters import CounterReset, Counters, difference, judge, parse_counters, queue_wait_ms

_GATEWAY = "draftsmith_gateway"


@dataclass(frozen=True)
class Row:
    """What one interval told of a server, or of a route behind a gateway; None is unknown.

    Attributes:
        name: the server's label, with the route after it for a gateway's.
        al: acceptance length.
        positions: share of drafting steps in which the i-th draft was accepted.
        running, waiting: requests at the moment of reading.
        queue_wait_ms: mean wait of the requests that left the queue.
        note: what is wrong, if anything is.
    """

    name: str
    al: float | None = None
    positions: tuple[float, ...] | None = None
    running: int | None = None
    waiting: int | None = None
    queue_wait_ms: float | None = None
    note: str = ""


Samples = dict[tuple[str, str], float]
"""(metric, route or "") -> its sum over all other labels."""


def _samples(text: str, prefix: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith(prefix):
            for name, labels, value, *_ in family.samples:
                key = name, labels.get("route", "")
                found[key] = found.get(key, 0.0) + value
    return found


@dataclass
class Watch:
    """One server, and its last reading."""

    name: str
    url: str
    _counters: Counters | None = None
    _gateway: Samples = field(default_factory=dict)

    def look(self, client: httpx.Client) -> list[Row]:
        """Read the server's metrics and tell what happened since the last look."""
        try:
            page = client.get(f"{self.url.rstrip('/')}/metrics")
            page.raise_for_status()
            if f"{_GATEWAY}_requests" in page.text:
                return self._routes(_samples(page.text, _GATEWAY))
            if "sglang:" in page.text:
                return [self._sglang(_samples(page.text, "sglang:"))]
            return [self._vllm(parse_counters(page.text))]
        except (httpx.HTTPError, Refused, ValueError) as error:
            self._counters, self._gateway = None, {}  # the next reading has none right before it
            what = f"no metrics ({type(error).__name__})" if isinstance(error, httpx.HTTPError) else str(error)
            return [Row(self.name, note=what)]

    def _vllm(self, now: Counters) -> Row:
        before, self._counters = self._counters, now
        running, waiting = now.busy - now.waiting, now.waiting
        if before is None:
            return Row(self.name, running=running, waiting=waiting, note="first reading")
        wait = queue_wait_ms(before, now)
        try:
            window = difference(before, now)
        except CounterReset as error:
            return Row(self.name, None, None, running, waiting, wait, str(error))
        if window is None:
            return Row(self.name, None, None, running, waiting, wait, "no speculation")
        positions = None if window.positions is None else tuple(window.positions)
        note = "" if window.al is None else judge("speculation", window) or ""
        return Row(self.name, window.al, positions, running, waiting, wait, note)

    def _sglang(self, now: Samples) -> Row:
        def told(name: str) -> int | None:
            value = now.get((f"sglang:{name}", ""))
            return None if value is None else int(value)

        al = now.get(("sglang:spec_accept_length", ""))
        note = "no speculation" if al is None else "AL is the engine's own gauge"
        return Row(self.name, al or None, None, told("num_running_reqs"), told("num_queue_reqs"), None, note)

    def _routes(self, now: Samples) -> list[Row]:
        before, self._gateway = self._gateway, now
        rows = []
        for route in sorted({route for _, route in now if route}):

            def grown(name: str, route: str = route) -> float:
                key = f"{_GATEWAY}_queue_seconds_{name}", route
                return now.get(key, 0.0) - before.get(key, 0.0)

            al = now.get((f"{_GATEWAY}_al", route))
            waits = grown("count") if before else 0
            wait = 1e3 * grown("sum") / waits if waits > 0 and grown("sum") >= 0 else None
            rows.append(Row(f"{self.name}/{route}", None if al is None or al != al else al, queue_wait_ms=wait))
        waiting, running = (now.get((f"{_GATEWAY}_{name}", "")) for name in ("queue", "backend_in_flight"))
        rows.append(Row(self.name, running=int(running or 0), waiting=int(waiting or 0), note="gateway, all routes"))
        return rows


def table(rows: Iterable[Row]) -> Table:
    """The rows for a terminal."""
    shown = Table()
    for name in ("server", "AL", "by position", "running", "waiting", "queue ms", ""):
        shown.add_column(name, justify="left" if name in ("server", "") else "right")

    def text(value: float | None, digits: int = 0) -> str:
        return "n/a" if value is None else f"{value:.{digits}f}"

    for row in rows:
        positions = "n/a" if row.positions is None else " ".join(f"{share:.2f}" for share in row.positions)
        figures = text(row.al, 2), positions, text(row.running), text(row.waiting), text(row.queue_wait_ms, 1)
        shown.add_row(row.name, *figures, row.note)
    return shown


class Exported(Collector):
    """The last rows as Prometheus gauges; what is unknown is left out."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def collect(self) -> Iterator[Metric]:
        """The gauges, one sample per server."""
        for key in ("al", "running", "waiting", "queue_wait_ms"):
            family = GaugeMetricFamily(f"draftsmith_monitor_{key}", f"{key} over the last interval", labels=["server"])
            for row in self.rows:
                if (value := getattr(row, key)) is not None:
                    family.add_metric([row.name], value)
            yield family
        family = GaugeMetricFamily(
            "draftsmith_monitor_position", "Share of steps that accept this draft", labels=["server", "position"]
        )
        for row in self.rows:
            for position, share in enumerate(row.positions or ()):
                family.add_metric([row.name, str(position)], share)
        yield family


def watch(config: MonitorConfig, console: Console | None = None) -> list[Row]:
    """Show the servers until told to stop, or for so many readings; the last rows are returned.

    Raises:
        Refused: no servers are named, or the port is taken.
    """
    if not config.servers:
        raise Refused("monitor.servers is empty; name them: 'monitor.servers={chat: \"http://127.0.0.1:8000\"}'")
    servers: Mapping[str, str] = config.servers
    watches = [Watch(name, url) for name, url in servers.items()]
    shown = console or tables()
    exported, stop = Exported(), (lambda: None)
    if config.port:
        registry = CollectorRegistry()
        registry.register(exported)
        try:
            server, _ = start_http_server(config.port, config.host, registry)
        except OSError as error:
            raise Refused(f"monitor.host={config.host} monitor.port={config.port}: {error.strerror}") from None
        stop = server.shutdown
    try:
        with (
            httpx.Client(timeout=5, trust_env=False, verify=authorities(servers.values())) as client,
            Live(console=shown, auto_refresh=False) as live,
        ):
            for number in count(1):
                exported.rows = [row for each in watches for row in each.look(client)]
                live.update(table(exported.rows), refresh=True)
                if number == config.readings:
                    break
                time.sleep(config.interval_s)
    finally:
        stop()
    return exported.rows


if __name__ == "__main__":
    from conf import Run, stage

    def main(run: Run) -> None:
        """Watch."""
        watch(run.monitor)

    stage("monitor", main, shared=True)
