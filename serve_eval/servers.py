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
from models.engines import HEADS, check_mtp_path, sglang_options, vllm_options
from models.errors import Refused
from models.servers import Server, find_interpreter, local, running
from serve_eval.config import FOUND_AGAIN, METHODS


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
    if holds_target(head):  # whose configuration need not name its module, or names it further inside
        return "mtp"
    config = read_json(config_file)
    names = [*config.get("architectures", ()), config.get("speculators_model_type", "")]
    if any("eagle3" in str(name).lower() for name in names):
        return "eagle3"
    if config.get("num_nextn_predict_layers"):
        return "mtp"
    raise Refused(f"{head} is neither an EAGLE-3 nor an MTP head: its config.json names {names}")


def speculation(
    method: str,
    head: Path | str | None,
    k: int,
    *,
    engine: str = "vllm",
    lookup: tuple[int, int] = FOUND_AGAIN,
) -> list[str]:
    """The arguments in which the server of a method differs from the others; k means the same in both engines.

    Args:
        method: one of METHODS.
        head: what drafts: the exported head (eagle3, mtp), which may be inside the target that is served; or the
            draft model (draft_model).
        k: tokens drafted per step.
        lookup: least and most tokens that prompt lookup finds again; SGLang's has a window of its own.

    Raises:
        Refused: the engine has no such method, or a path under which vLLM would not take an MTP head for one.
    """
    if method not in METHODS[engine]:
        raise Refused(f"method {method!r} is not one of {', '.join(METHODS[engine])}, those of {engine}")
    if method == "none":
        return []
    inside = head is None or (method in HEADS and holds_target(Path(head)))
    model = None if inside else str(head)
    if engine == "sglang":
        if method in HEADS:
            return [word for option in sglang_options(method, model, k).items() for word in option]
        tokens = ["--speculative-num-draft-tokens", str(k + 1)]  # the root token counts
        if method == "ngram":
            return ["--speculative-algorithm", "NGRAM", *tokens]
        return [
            *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(model)),
            *("--speculative-num-steps", str(k), "--speculative-eagle-topk", "1", *tokens),
        ]
    if method == "mtp" and model is not None:
        check_mtp_path(model, "name or root")
    options = vllm_options(method, model, k)
    if method == "ngram":
        options["--speculative-config"] |= {"prompt_lookup_min": lookup[0], "prompt_lookup_max": lookup[1]}
    told = [word for name, each in options.items() for word in (name, json.dumps(each, separators=(",", ":")))]
    return [*told, "--per-request-spec-decode-metrics", "summary"]


def check_method(engine: EngineConfig, method: str) -> None:
    """Raise Refused unless a server of this engine can be started with the method, as far as can be known before."""
    speculation(method, None, 1, engine=engine.kind)
    packages = find_interpreter(engine).parent.parent.glob("lib/python*/site-packages/arctic_inference")
    if method == "suffix" and not any(packages):
        raise Refused(
            "eval.methods: method=suffix needs the package arctic-inference in the environment of "
            f"engine.python={engine.python}"
        )


def serving(
    engine: EngineConfig,
    target_path: str,
    *,
    method: str,
    head: Path | str | None,
    k: int,
    directory: Path,
    lookup: tuple[int, int] = FOUND_AGAIN,
    name: str | None = None,
) -> AbstractContextManager[Server]:
    """A running server for a method, as `models.servers.running` gives it; its log is `server-<name or method>.log`."""
    if method in HEADS and head is not None and holds_target(Path(head)):
        target_path = str(head)
    purpose = speculation(method, None if head is None else local(str(head)), k, engine=engine.kind, lookup=lookup)
    return running(engine, target_path, name=name or method, directory=directory, purpose=purpose)
