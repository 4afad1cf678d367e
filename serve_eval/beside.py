"""Acceptance of this run's head beside that of other runs: the same target and prompts, drafted for in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.artefact import file_sha256, read_json
from models.errors import Refused
from models.export import weights_file
from models.target import Target
from serve_eval.config import POOLED, EvalConfig
from serve_eval.prompts import Prompt
from serve_eval.reference import head_key, measured_key


def read_others(
    runs: Path, target: Target, settings: EvalConfig, draft_model: Target | None, prompts: Sequence[Prompt]
) -> list[dict[str, Any]]:
    """What the reference decoder measured of other runs, those that `settings.compare_with` names.

    Args:
        runs: folder of all runs. The rest is this evaluation's.

    Raises:
        Refused: one was not evaluated, or differs in more than its head.
    """
    found = []
    for name in settings.compare_with:
        directory, export = runs / name / "eval", runs / name / "export"
        try:
            summary, measured = read_json(directory / "summary.json"), read_json(directory / "reference.json")
            head = head_key(export, file_sha256(weights_file(export)))
        except FileNotFoundError:
            raise Refused(
                f"eval.compare_with: run {name} is not evaluated; run `python -m serve_eval` for it first, or set "
                "eval.compare_with=[]"
            ) from None
        given = settings.max_new_tokens, settings.drafting, draft_model, settings.k, prompts
        if measured["key"] != measured_key(target, head, summary["machine"], *given):
            raise Refused(
                f"eval.compare_with: run {name} was evaluated with another target, on other prompts, with another "
                "eval.k, eval.max_new_tokens or eval.drafting, or before its last export; evaluate it again with "
                "these settings"
            )
        reference = summary["reference"]
        if reference is None:
            raise Refused(f"eval.compare_with: run {name} was evaluated with eval.reference=false; evaluate it with it")
        als = {route: each["al"] for route, each in reference["routes"].items()}
        found.append({"run": name, "kind": summary.get("kind", "EAGLE-3"), "al": reference["al"], "routes": als})
    return found


def rows(summary: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, list[float | None]]]]:
    """The table: a heading per head, this run's first, and per route (last all of them) each head's AL."""
    reference, others = summary["reference"], summary["compared"]
    heads = [summary["kind"], *(f"{each['kind']} ({each['run']})" for each in others)]
    table = [
        (route, [each["al"], *(other["routes"].get(route) for other in others)])
        for route, each in reference["routes"].items()
    ]
    return heads, [*table, (POOLED, [reference["al"], *(other["al"] for other in others)])]
