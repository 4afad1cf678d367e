"""The servers that are measured: of one target, alike in everything but the speculation."""

from __future__ import annotations

import contextlib
import json
import os
from contextlib import AbstractContextManager
from pathlib import Path

from models.artefact import read_json
from models.config import EngineConfig
from models.errors import Refused
from models.servers import Server, running


def describe_machine() -> str:
    """Processor, usable cores, memory and accelerators of this machine, in words."""
    model = "unknown processor"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = " ".join(line.partition(":")[2].split())
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    told = f"{model}, {cores} cores, {memory:.0f} GiB"
    return told + "".join(f", {gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))


def check_head(head: Path) -> None:
    """Raise Refused unless `head` is an exported EAGLE-3 head: another one would draft nothing that is accepted."""
    config_file = head / "config.json"
    if not config_file.exists():
        raise Refused(f"no exported head at {head} (it has no config.json); run `python -m models.export` first")
    config = read_json(config_file)
    names = [*config.get("architectures", ()), config.get("speculators_model_type", "")]
    if not any("eagle3" in str(name).lower() for name in names):
        raise Refused(f"{head} is no EAGLE-3 head: its config.json names {names}")


def speculation(method: str, head: Path | None, k: int) -> list[str]:
    """The arguments in which the server of a method differs from the others.

    Args:
        method: "none" or "eagle3".
        head: directory of the exported head (method eagle3).
        k: tokens drafted per step.
    """
    if method == "none":
        return []
    if method != "eagle3":
        raise Refused(f"method {method!r} is not one of none, eagle3")
    assert head is not None
    settings = {"method": "eagle3", "model": str(head.absolute()), "num_speculative_tokens": k}
    return ["--speculative-config", json.dumps(settings, separators=(",", ":"))]


def serving(
    engine: EngineConfig, target_path: str, *, method: str, head: Path | None, k: int, directory: Path
) -> AbstractContextManager[Server]:
    """A running server for a method, as `models.servers.running` gives it; its log is `server-<method>.log`."""
    return running(engine, target_path, name=method, directory=directory, purpose=speculation(method, head, k))
