"""Several processes of one job, started by hand: each has an exit code, a log and a process id of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(*commands: list[str], **variables: str) -> list[subprocess.Popen[str]]:
    """`python -m *command` for each: one job of so many processes, each on a node of its own (local rank 0)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | variables
    job = {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    started = []
    for rank, command in enumerate(commands):
        environment = common | job | {"RANK": str(rank)} if len(commands) > 1 else common
        program = [sys.executable, "-m", *command]
        started.append(subprocess.Popen(program, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    return started


def finish(processes: list[subprocess.Popen[str]], seconds: float = 240) -> list[str]:
    """Wait until all have ended well; returns what each said."""
    said = [process.communicate(timeout=seconds)[1] for process in processes]
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text[-3000:]
    return said
