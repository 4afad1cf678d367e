"""Runs of the train stage on a tiny target: in this process, or as several processes of one job.

Processes are started by hand: each has an exit code, a log and a process id of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

import conf
import train.__main__ as train_stage
from train.measure import Journal

ROOT = Path(__file__).parents[2]


def overrides(target: Path, conversations: Path, root: Path) -> list[str]:
    return [
        "name=run",
        f"root={root}",
        f"target.path={target}",
        "target.dtype=float32",
        "target.aux_layers=[2,4,5]",
        f"data.conversations=[{conversations}]",
        "data.validation_share=0.15",
        "draft.vocab_size=128",
        "objective.unroll_steps=3",
        "objective.row_share=0.8",
        "optim.lr=1e-3",
        "optim.muon_lr=1e-3",
        "optim.warmup_steps=2",
        "trainer.epochs=2",
        "trainer.pack_tokens=128",
        "trainer.packs_per_step=2",
        "trainer.precision=fp32",
        "trainer.validate_every=8",
        "trainer.checkpoint_every=4",
        "trainer.log_every=1",
        "trainer.keep_checkpoints=2",
    ]


def train_here(arguments: list[str]) -> bool:
    """The train stage in this process, with one thread as in the others: sums must not depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train_stage.main(conf.load(arguments))
    finally:
        torch.set_num_threads(threads)


def place(features: tuple[Path, list[str]], root: Path) -> list[str]:
    """Arguments of a new run that has these features already."""
    shutil.copytree(features[0], root / "run" / "features")
    return [argument if not argument.startswith("root=") else f"root={root}" for argument in features[1]]


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
    """Wait until all have ended well; returns what each said. What hangs is asked to end, and torchrun ends its own."""
    try:
        said = [process.communicate(timeout=seconds)[1] for process in processes]
    finally:
        for process in processes:
            process.terminate()
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text[-3000:]
    return said


def final_head(train: Path) -> dict[str, torch.Tensor]:
    manifest = json.loads((train / "manifest.json").read_text())
    return load_file(train / manifest["checkpoints"]["last"] / "head.safetensors")


def losses(train: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in Journal.read(train / "metrics.jsonl") if "loss" in line}


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "it was over before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.01)
