"""The served sweep in parts: one for each of several `engines` and each of eval.methods, each a job of its own.

A part measures its method and the server alone, both on the machine that it has, so that its speedup is one machine's.
It has a folder of its own below eval/parts and shares no file with the others: parts may run at once, on one node or on
many. `python -m serve_eval.apart` measures one (apart.py); `python -m serve_eval` of such a run starts no server, but
joins them (joined.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.artefact import read_json
from models.errors import Refused
from serve_eval.config import HEAD, METHODS, EvalConfig

Values = Mapping[str, Any]
"""A resolved configuration as plain values."""

OF_THE_WHOLE = ("part", "reference", "k", "drafting", "batch_size", "device", "compare_with")
"""Of `eval`: what no part reads, but the reference decoder and the report."""


@dataclass(frozen=True)
class Part:
    """A part of the served sweep.

    Attributes:
        engine: its key in `engines`.
        method: its place in eval.methods; None for the exported head, where that is empty.
        made_by: what it reads of the configuration, as plain values, its own method and engine alone.
    """

    name: str
    engine: str
    method: int | None
    made_by: Values

    def settings(self, whole: EvalConfig) -> EvalConfig:
        """What this part measures."""
        methods = [] if self.method is None else [whole.methods[self.method]]
        return replace(whole, methods=methods)


def parts_of(values: Values) -> dict[str, Part]:
    """The parts of a run by name; none where its one engine measures everything.

    Raises:
        Refused: an engine that serves nothing, a method that an engine has not, that names no k or a server that runs
            already, one named twice.
    """
    parts: dict[str, Part] = {}
    settings = values["eval"]
    asked: list[tuple[int | None, Values]] = [
        (i, each) for i, each in enumerate(settings["methods"]) if each["method"] != "none"
    ]
    if values["engines"] and settings["methods"] and not asked:
        raise Refused("eval.methods names nothing but none: there is nothing to compare it with")
    for engine, served in values["engines"].items():
        if not re.fullmatch(r"[\w.-]+", str(engine)) or served["kind"] == "none":
            raise Refused(f"engines: {engine!r} (kind={served['kind']}) must be a plain name, and serve something")
        for index, method in asked or [(None, {"method": HEAD, "k": None, "url": None})]:
            name = f"{engine}-{method['method']}" + (f"-k{method['k']}" if method["k"] else "")
            if method["method"] not in (HEAD, *METHODS[served["kind"]]):
                raise Refused(f"engines.{engine}: {served['kind']} has no method {method['method']} (eval.methods)")
            if method["url"] is not None:
                raise Refused("eval.methods: leave engines out where servers run already (url)")
            if not (method["k"] or settings["served_k"]):
                raise Refused(
                    f"eval.served_k must be given, or k with method {method['method']}: with engines, the servers do "
                    "not wait for the reference decoder's best k"
                )
            if name in parts:
                raise Refused(f"eval.methods names {method['method']} twice with the same k")
            mine = {key: value for key, value in settings.items() if key not in OF_THE_WHOLE}
            mine["methods"] = [] if index is None else [method]
            made_by = {
                "target": values["target"],
                "engine": served,
                "eval": mine,
                "chat_template_kwargs": values["data"]["chat_template_kwargs"],
            }
            parts[name] = Part(name, str(engine), index, made_by)
    return parts


def folder(directory: Path, part: Part) -> Path:
    """Where a part is measured.

    Args:
        directory: the run's eval folder.
    """
    return directory / "parts" / part.name


def measured(directory: Path, part: Part) -> bool:
    """Whether a part is finished, for this configuration."""
    path = folder(directory, part) / "summary.json"
    return path.exists() and read_json(path).get("made_by") == part.made_by


def part_asked(values: Values) -> Part:
    """The part that `eval.part` names.

    Raises:
        Refused: there is none of that name.
    """
    parts, name = parts_of(values), values["eval"]["part"]
    if name not in parts:
        raise Refused(f"eval.part={name} is not one of: {', '.join(parts) or 'none, engines is empty'}")
    return parts[name]
