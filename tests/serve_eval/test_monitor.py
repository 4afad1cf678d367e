"""The monitor tells the last interval of each server, says n/a where nothing is known, and exports the same."""

from __future__ import annotations

import io
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from models.errors import Refused
from models.servers import PLAIN
from serve_eval.config import MonitorConfig
from serve_eval.monitor import Exported, Row, Watch, table, watch
from tests.serve_eval.stub import Behaviour, running


def client() -> httpx.Client:
    return httpx.Client(trust_env=False, verify=PLAIN)


def post(url: str) -> None:
    httpx.post(f"{url}/v1/completions", json={"prompt": [1], "max_tokens": 8}, verify=PLAIN)


def page(text: str) -> tuple[str, HTTPServer]:
    """A server of one metrics page."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}", server


def test_a_row_tells_the_interval_and_not_the_servers_life() -> None:
    with running(Behaviour(accepted_per_draft=1, waiting=3)) as (url, stub), client() as http:
        watched, stub.queue_s = Watch("chat", url), 4.0
        (first,) = watched.look(http)
        assert (first.al, first.note) == (None, "first reading"), "100 drafts and waits of before are nobody's"
        post(url)
        stub.queue_s += 0.5
        (row,) = watched.look(http)
        assert (row.al, row.running, row.waiting, row.queue_wait_ms) == (2.0, 0, 3, 500.0)
        assert row.positions == (1.0, 0.0, 0.0, 0.0)
        (idle,) = watched.look(http)
        assert (idle.al, idle.positions, idle.queue_wait_ms) == (None, None, None)


def test_b38_a_reset_between_readings_is_said() -> None:
    with running(Behaviour(reset_after=1)) as (url, _), client() as http:
        watched = Watch("chat", url)
        watched.look(http)
        post(url)
        (row,) = watched.look(http)
        assert row.al is None
        assert "went backwards" in row.note


def test_b41_a_method_that_accepts_nothing_is_said() -> None:
    with running(Behaviour(accepted_per_draft=0)) as (url, _), client() as http:
        watched = Watch("chat", url)
        watched.look(http)
        post(url)
        (row,) = watched.look(http)
        assert row.al == 1.0
        assert "practically nothing is accepted" in row.note


def test_a_server_without_speculation_or_without_metrics_has_no_al() -> None:
    with running(Behaviour(drafts=False)) as (url, _), client() as http:
        watched = Watch("plain", url)
        watched.look(http)
        (row,) = watched.look(http)
        assert (row.al, row.note) == (None, "no speculation")
        (dead,) = Watch("dead", "http://127.0.0.1:9").look(http)
        assert "no metrics (ConnectError)" in dead.note


def test_sglangs_own_gauge_is_named_as_such() -> None:
    url, server = page(
        "# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length 2.5\n"
        "# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs 4.0\n"
        "# TYPE sglang:num_queue_reqs gauge\nsglang:num_queue_reqs 1.0\n"
    )
    with client() as http:
        (row,) = Watch("sg", url).look(http)
    server.shutdown()
    assert row == Row("sg", 2.5, None, 4, 1, None, "AL is the engine's own gauge")


def test_a_gateway_has_a_row_for_every_route() -> None:
    name = "draftsmith_gateway"
    url, server = page(
        f'# TYPE {name}_requests counter\n{name}_requests_total{{route="chat",method="none",reason="off"}} 3.0\n'
        f'# TYPE {name}_al gauge\n{name}_al{{route="chat"}} 1.75\n{name}_al{{route="all"}} NaN\n'
        f"# TYPE {name}_queue gauge\n{name}_queue 2.0\n"
        f'# TYPE {name}_backend_in_flight gauge\n{name}_backend_in_flight{{backend="a",method="none"}} 3.0\n'
        f'{name}_backend_in_flight{{backend="b",method="eagle3"}} 4.0\n'
    )
    with client() as http:
        rows = {row.name: row for row in Watch("g", url).look(http)}
    server.shutdown()
    assert (rows["g/chat"].al, rows["g/all"].al) == (1.75, None)
    assert (rows["g"].running, rows["g"].waiting) == (7, 2)


def test_a_gateways_row_tells_nothing_of_the_time_in_which_it_could_not_be_read() -> None:
    watched, name = Watch("g", "http://g"), "draftsmith_gateway"
    waits, told = [0, 4, None, 8], []
    for count in waits:
        text = f'# TYPE {name}_requests counter\n{name}_requests_total{{route="chat"}} 3\n'
        text += (
            f'{name}_queue_seconds_count{{route="chat"}} {count}\n{name}_queue_seconds_sum{{route="chat"}} {count}\n'
        )
        answer = httpx.Response(503 if count is None else 200, text=text, request=httpx.Request("GET", "http://g"))
        with httpx.Client(transport=httpx.MockTransport(lambda _, answer=answer: answer)) as http:
            told.append(watched.look(http)[0].queue_wait_ms)
    assert told == [None, 1000.0, None, None]


def test_a_certificate_is_checked_where_a_server_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[object] = []

    class Client(httpx.Client):
        def __init__(self, **settings: Any) -> None:
            checks.append(settings["verify"])
            super().__init__(**settings)

    monkeypatch.setattr(httpx, "Client", Client)
    for url in ("http://127.0.0.1:9", "https://127.0.0.1:9"):
        watch(MonitorConfig({"chat": url}, readings=1), Console(file=io.StringIO()))
    assert checks == [PLAIN, True]


def test_what_is_unknown_is_shown_as_such_and_not_exported() -> None:
    rows = [Row("chat", 1.755, (0.5, 0.25), 3, 0, 12.34), Row("dead", note="no metrics")]
    shown = io.StringIO()
    Console(file=shown, width=120).print(table(rows))
    assert "1.75" in shown.getvalue() or "1.76" in shown.getvalue()
    assert shown.getvalue().count("n/a") == 5
    exported, registry = Exported(), CollectorRegistry()
    exported.rows = rows
    registry.register(exported)
    text = generate_latest(registry).decode()
    assert 'draftsmith_monitor_al{server="chat"} 1.755' in text
    assert 'draftsmith_monitor_position{position="1",server="chat"} 0.25' in text
    assert 'server="dead"' not in text


def test_it_watches_for_so_many_readings_and_serves_them_meanwhile() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with running(Behaviour()) as (url, stub):
        config = MonitorConfig({"chat": url}, port=port, interval_s=0.05, readings=2)
        (row,) = watch(config, Console(file=io.StringIO()))
        assert row.name == "chat"
        with pytest.raises(Refused, match=f"monitor.port={port}"), socket.create_server(("127.0.0.1", port)):
            watch(config, Console(file=io.StringIO()))
    with pytest.raises(Refused, match="monitor.servers is empty"):
        watch(MonitorConfig())


def test_a_servers_name_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with running(Behaviour()) as (url, _):
        watch(MonitorConfig({"[/x]": url}, readings=1))
    assert "[/x]" in capsys.readouterr().out


def test_a_server_that_vanishes_or_shows_something_else_is_told() -> None:
    with running(Behaviour()) as (url, _), client() as http:
        watched = Watch("chat", url)
        watched.look(http)
    with client() as http:  # the first one's connection outlives the stub
        assert watched.look(http) == [Row("chat", note="no metrics (ConnectError)")]
        url, server = page("<html>starting</html>")
        watched.url = url
        assert "not in Prometheus" in watched.look(http)[0].note
        server.shutdown()


def test_an_address_that_is_none_is_refused_before_anything_is_watched() -> None:
    for url in ("127.0.0.1:8000", "http://[bad", "http://host:port", "ftp://host", "http://me:key@host"):
        with pytest.raises(ValueError, match="monitor.servers: url must be"):
            MonitorConfig({"chat": url})
