"""Prompts beyond a project's own files: the common evaluation sets by name, and prompts of a given length.

A common set is one row of `SETS`: its name on the hub, subset and split, and how a row becomes messages and a route.
Where it is on disk already (a clone of the hub's repository, a folder of data files, what `datasets` saved, or a
single file), it is read from there, without a network. Of conversations with several turns the first is asked, because
the later ones would need the target's own answers before them.

Prompts of a given length are the run's own with others of them as context before, so that the text is natural and what
is asked for comes last: random tokens would say nothing about acceptance.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featurize.config import SourceConfig
from featurize.sources import arrow_rows, folder_rows, json_rows, locate
from featurize.spans import Renderer
from models.errors import Refused
from serve_eval.config import EvalConfig
from serve_eval.prompts import Prompt, load_prompts, render_row


@dataclass(frozen=True)
class Set:
    """One common set.

    Attributes:
        hub: its name there; None for one that is not on it.
        text: a row's prompt, the user's only message.
        subset, split: of the hub's.
        route: a row's label, after the set's name; None where the set is one route.
    """

    hub: str | None
    text: Callable[[dict[str, Any]], str]
    subset: str | None = None
    split: str = "train"
    route: Callable[[dict[str, Any]], str] | None = None


def _alpaca(row: dict[str, Any]) -> str:
    return f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]


def _spec_bench(row: dict[str, Any]) -> str:
    """Its subtasks; the eight categories of MT-Bench, ten questions each, are one."""
    others = ("translation", "summarization", "qa", "math_reasoning", "rag")
    return row["category"] if row["category"] in others else "mt_bench"


def _speed_bench(row: dict[str, Any]) -> str:
    """Its first turn; texts of others' data sets are placeholders on the hub until NVIDIA's script has filled them."""
    if row["turns"][0].startswith("FULL BENCHMARK DATA SHOULD BE FETCHED"):
        raise Refused("eval.datasets: speed_bench holds placeholders; fill it with its own script, and name that")
    return row["turns"][0]


SETS = {
    "mt_bench": Set("HuggingFaceH4/mt_bench_prompts", lambda row: row["prompt"][0]),
    "gsm8k": Set("openai/gsm8k", lambda row: row["question"], subset="main", split="test"),
    "humaneval": Set(
        "openai/openai_humaneval",
        lambda row: f"Complete this Python function.\n\n```python\n{row['prompt']}```",
        split="test",
    ),
    "alpaca": Set("tatsu-lab/alpaca", _alpaca),
    "cnn_dm": Set(
        "abisee/cnn_dailymail", lambda row: f"Summarize this article.\n\n{row['article']}", subset="3.0.0", split="test"
    ),
    "spec_bench": Set(None, lambda row: row["turns"][0], route=_spec_bench),  # question.jsonl of hemingkx/Spec-Bench
    "speed_bench": Set(
        "nvidia/SPEED-Bench", _speed_bench, subset="qualitative", split="test", route=lambda row: row["category"]
    ),
}


def load_set(
    name: str, place: str | None, count: int, renderer: Renderer, arguments: Mapping[str, Any] = {}
) -> list[Prompt]:
    """The first `count` prompts of each route of a common set.

    Args:
        place: file or folder where it is; None takes the hub's.
        arguments: for the chat template.

    Raises:
        Refused: no such set, nothing there, or rows of another kind.
    """
    if name not in SETS:
        raise Refused(f"eval.datasets: {name} is not one of {', '.join(SETS)}")
    known = SETS[name]
    if place is None and known.hub is None:
        raise Refused(f"eval.datasets: {name} is not on the hub; name the file or folder where it is")
    path = locate(place or str(known.hub), "eval.datasets")
    if path.is_file():
        rows = (arrow_rows if path.suffix in (".parquet", ".arrow") else json_rows)(path)
    else:
        rows = folder_rows(path, SourceConfig([str(path)], subset=_subset(path, known), split=known.split))
    prompts: list[Prompt] = []
    taken: Counter[str] = Counter()
    for number, row in rows:
        try:
            text = known.text(row)
            route = name if known.route is None else f"{name}/{known.route(row)}"
        except (KeyError, IndexError, TypeError):
            keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise Refused(f"eval.datasets: {path}, row {number}, is none of {name}: it has {keys}") from None
        if taken[route] < count:
            taken[route] += 1
            asked = {"id": f"{name}-{number}", "route": route, "messages": [{"role": "user", "content": text}]}
            prompts.append(render_row(asked, renderer, f"{path}, row {number}", arguments))
        elif known.route is None:
            break
    if not prompts:
        raise Refused(f"eval.datasets: {path} holds no row")
    return prompts


def load_workload(settings: EvalConfig, renderer: Renderer, arguments: Mapping[str, Any]) -> list[Prompt]:
    """All prompts of eval.prompts and eval.datasets.

    Args:
        arguments: for the chat template, as of the training data (data.chat_template_kwargs); a row's own come first.

    Raises:
        Refused: none is named, one cannot be read, or an id comes twice.
    """
    files = settings.prompts or not settings.datasets
    prompts = load_prompts(settings.prompts, renderer, arguments) if files else []
    for name, place in settings.datasets.items():
        prompts += load_set(name, place, settings.dataset_rows, renderer, arguments)
    often = Counter(prompt.id for prompt in prompts)
    if twice := [name for name, count in often.items() if count > 1]:
        raise Refused(f"eval.prompts: the id {twice[0]!r} is that of a row of eval.datasets; call it otherwise")
    return prompts


def _subset(folder: Path, known: Set) -> str | None:
    """The set's subset, where the folder has subsets at all."""
    card = folder / "README.md"
    return known.subset if card.is_file() and f"config_name: {known.subset}" in card.read_text("utf-8") else None


def lengthened(prompts: Sequence[Prompt], lengths: Sequence[int], count: int) -> list[Prompt]:
    """`count` prompts of exactly so many tokens for each length, on the route "input <length>".

    Each is another prompt of the run, no longer than that, after as much of the others' text as fits; the others begin
    at another one each time, so that no two contexts begin alike.

    Raises:
        Refused: fewer than `count` prompts are short enough, or the run has such a route itself.
    """
    found = []
    for length in sorted(set(lengths)):
        route = f"input {length}"
        if any(prompt.route == route for prompt in prompts):
            raise Refused(f"eval.prompts: the route {route!r} is that of eval.input_lengths")
        short = [prompt for prompt in prompts if len(prompt.ids) <= length]
        if len(short) < count:
            raise Refused(
                f"eval.input_lengths: {len(short)} prompts have at most {length} tokens, but a window takes {count}"
            )
        # Spread over the list, so that the routes of the run are in it alike.
        for index in range(count):
            place = index * len(short) // count
            own, missing = short[place], length - len(short[place].ids)
            context: list[int] = []
            others = itertools.cycle([*short[place + 1 :], *short[:place]] or [own])
            while len(context) < missing:
                context += next(others).ids
            ids = (*context[:missing], *own.ids)
            found.append(Prompt(f"{own.id}@{length}", route, ids, input_length=length))
    return found
