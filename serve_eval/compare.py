"""Acceptance of this run's head beside that of other runs: the same prompts, the same number of drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.artefact import read_json
from models.errors import Refused
from serve_eval.prompts import Prompt


def read_others(runs: Path, names: Sequence[str], prompts: Sequence[Prompt], k: int) -> list[dict[str, Any]]:
    """What other runs' reference decoder measured.

    Args:
        runs: folder of all runs. names: of those to compare with (`eval.compare_with`).
        prompts, k: this evaluation's.

    Raises:
        Refused: one was not evaluated, or on other prompts or with another k.
    """
    found = []
    for name in names:
        directory = runs / name / "eval"
        try:
            summary, measured = read_json(directory / "summary.json"), read_json(directory / "reference.json")
        except FileNotFoundError:
            raise Refused(
                f"eval.compare_with: run {name} is not evaluated; run `python -m serve_eval` for it first, or set "
                "eval.compare_with=[]"
            ) from None
        if measured["rounds"].keys() != {prompt.id for prompt in prompts} or summary["k"] != k:
            raise Refused(f"eval.compare_with: run {name} was evaluated on other prompts or with another eval.k")
        reference = summary["reference"]
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
    return heads, [*table, ("all", [reference["al"], *(other["al"] for other in others)])]
