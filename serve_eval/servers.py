"""The servers that are measured: of one target, alike in everything but the speculation."""

from __future__ import annotations

import contextlib
import json
import os
from contextlib import AbstractContextManager
from pathlib import Path

from models.artefact import read_json
from models.card import holds_target
from models.config import EngineConfig
from models.engines import check_mtp_path, vllm_options
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


def method_of(head: Path) -> str:
    """The method that drafts with the exported head, "eagle3" or "mtp": another would draft nothing that is accepted.

    Raises:
        Refused: it is no head of either kind.
    """
    config_file = head / "config.json"
    if not config_file.exists():
        raise Refused(f"no exported head at {head} (it has no config.json); run `python -m models.export` first")
    config = read_json(config_file)
    names = [*config.get("architectures", ()), config.get("speculators_model_type", "")]
    if any("eagle3" in str(name).lower() for name in names):
        return "eagle3"
    if any(config.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers")):
        return "mtp"
    raise Refused(f"{head} is neither an EAGLE-3 nor an MTP head: its config.json names {names}")


def speculation(method: str, head: Path | None, k: int) -> list[str]:
    """The arguments in which the server of a method differs from the others.

    Args:
        method: "none", "eagle3" or "mtp".
        head: directory of the exported head, but for method none.
        k: tokens drafted per step.

    Raises:
        Refused: another method, or a path under which vLLM would not take an MTP head for one.
    """
    if method == "none":
        return []
    if method not in ("eagle3", "mtp"):
        raise Refused(f"method {method!r} is not one of none, eagle3, mtp")
    assert head is not None
    path = str(head.absolute())
    if method == "mtp":
        check_mtp_path(path, "name or root")
    options = vllm_options(method, None if holds_target(head) else path, k)
    return [word for name, value in options.items() for word in (name, json.dumps(value, separators=(",", ":")))]


def serving(
    engine: EngineConfig, target_path: str, *, method: str, head: Path | None, k: int, directory: Path
) -> AbstractContextManager[Server]:
    """A running server for a method, as `models.servers.running` gives it; its log is `server-<method>.log`."""
    if method != "none" and head is not None and holds_target(head):
        target_path = str(head)
    return running(engine, target_path, name=method, directory=directory, purpose=speculation(method, head, k))
