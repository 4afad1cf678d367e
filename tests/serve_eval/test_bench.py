"""The benchmark of client and gateway: what it counts, what it refuses, and that it waits for no dead process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models.errors import Refused
from serve_eval.bench import Leftovers, leftovers
from serve_eval.pacer import serving_process

ROOT = Path(__file__).resolve().parents[2]


def test_many_requests_leave_no_connection_and_no_task_behind() -> None:
    assert leftovers(1000) == Leftovers(tasks=0, files=0, connections=0, slots=0)  # serve_eval.bench sends 10,000


def dies(ready: Any) -> None:
    sys.exit(3)


def test_a_benchmarks_server_that_dies_is_told_and_not_waited_for() -> None:
    with pytest.raises(Refused, match="ended before it listened"), serving_process(dies):
        pytest.fail("it listens")


def test_what_a_benchmark_does_not_know_is_refused_before_anything_is_measured() -> None:
    words = [sys.executable, "-m", "serve_eval.bench", "leaks", "leeks"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "bench: leeks is not one of client, gateway, leaks\n"
