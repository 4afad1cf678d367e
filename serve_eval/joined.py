"""The parts of a served sweep as one: a table of all, each method beside its own server alone, and one in full."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.artefact import read_json
from models.card import method_of_head
from models.errors import Refused
from serve_eval.axes import Summary, measured_concurrencies, pooled_cells
from serve_eval.methods import PLAIN
from serve_eval.parts import Part, folder, measured


def read_parts(directory: Path, parts: Mapping[str, Part], weights: str) -> dict[str, Any]:
    """The summaries of all parts, by name.

    Args:
        directory: the run's eval folder.
        weights: SHA-256 of the head's tensors.

    Raises:
        Refused: one is not measured, or was measured with other settings or another head.
    """
    found = {}
    for part in parts.values():
        told = f"run `python -m serve_eval.apart` with eval.part={part.name}"
        if not measured(directory, part):
            raise Refused(f"{folder(directory, part)} is not measured, or with other settings; {told}")
        found[part.name] = read_json(folder(directory, part) / "summary.json")
        if found[part.name]["weights"] != weights:
            raise Refused(f"{folder(directory, part)} was measured with another head; {told}")
    return found


def rows(name: str, summary: Summary) -> list[dict[str, Any]]:
    """A part's figures, a row per closed-loop load, all routes pooled: the method beside the same server alone."""
    served = summary["served"]
    head, cells = served["head"], pooled_cells(served)
    found = []
    for concurrency in measured_concurrencies(served):
        alone, ours = cells[PLAIN, concurrency], cells[head, concurrency]
        row = {"part": name, "engine": served["engine"], "version": served["version"], "machine": summary["machine"]}
        row |= {"dtype": served["dtype"], "method": served["methods"][head]["method"], "k": served["k"]}
        row |= {"concurrency": concurrency, "al": ours["al"], "failed": alone["failed"] + ours["failed"]}
        row |= {"alone_tokens_per_s": alone["output_tokens_per_s"], "tokens_per_s": ours["output_tokens_per_s"]}
        row |= {"speedup": served["speedup"][str(concurrency)], "interval": served["interval"][str(concurrency)]}
        found.append(row)
    return found


def join(parts: Mapping[str, Any]) -> dict[str, Any]:
    """What a summary of the whole says of its parts.

    `parts` are the rows of all. `served` and `lossless` are those of one, `part`: the first that drafts with the
    exported head, or the first; its windows are in the file `cells`.
    """
    chosen = next(
        (name for name, each in parts.items() if method_of_head(each["served"]) is not None), next(iter(parts))
    )
    served = parts[chosen]["served"]
    others = {name: each["served"]["warnings"] for name, each in parts.items() if name != chosen}
    warnings = [*served["warnings"], *(f"{name}: {each}" for name, told in others.items() for each in told)]
    return {
        "part": chosen,
        "parts": [row for name, summary in parts.items() for row in rows(name, summary)],
        "served": served | {"warnings": warnings},
        "lossless": parts[chosen]["lossless"],
        "cells": f"parts/{chosen}/cells.jsonl",
    }
