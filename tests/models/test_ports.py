"""A port is one job's, from before its server listens until the job is gone."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from models import ports
from models.errors import Refused

CLAIM = "from models.ports import claim_port; print(claim_port('127.0.0.1'), flush=True); input()"


def elsewhere() -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", CLAIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_b45_jobs_on_one_node_get_different_ports_before_anybody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    process, port = elsewhere()
    monkeypatch.setattr(ports, "PORTS", range(port, port + 2))
    assert ports.claim_port("127.0.0.1") == port + 1
    with pytest.raises(Refused, match="no port of 127.0.0.1 is free"):
        ports.claim_port("127.0.0.1")
    process.communicate("")


def test_a_port_is_free_again_when_its_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    process, port = elsewhere()
    process.kill()
    process.communicate()
    monkeypatch.setattr(ports, "PORTS", range(port, port + 1))
    assert ports.claim_port("127.0.0.1") == port


def test_a_port_that_somebody_else_listens_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        monkeypatch.setattr(ports, "PORTS", range(taken, taken + 1))
        with pytest.raises(Refused):
            ports.claim_port("127.0.0.1")


def test_ports_of_servers_are_neither_handed_out_by_the_system_nor_used_by_training() -> None:
    assert ports.PORTS[0] >= 30_000
    assert ports.PORTS[-1] < 32_768
