"""Evaluation prompts: conversations that end with a user's turn, as the token ids that a server is given.

Acceptance is a property of the traffic, so a prompt carries its route. It is rendered by the renderer that
made the training documents, with the target's own chat template and generation prompt, here and once: the
reference decoder and every server get the same ids, and no second template (a server's, with other
defaults) can slip in between. What the template is told, the thinking mode say, is what it was told for training,
unless a row says otherwise. Given up: a server's own chat route is not exercised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featurize.conversations import Unusable
from featurize.spans import Renderer
from models.errors import Refused
from serve_eval.config import POOLED


@dataclass(frozen=True)
class Prompt:
    """One evaluation prompt.

    Attributes:
        id: unique over all files.
        route: label under which its figures are reported.
        ids: token ids, rendered with the target's chat template and generation prompt.
        input_length: their number, where it is what the route is about.
    """

    id: str
    route: str
    ids: tuple[int, ...]
    input_length: int | None = None


def _check_row(row: Any) -> str | None:
    """What is wrong with a prompt row, or None."""
    if not isinstance(row, dict):
        return "is not a JSON object"
    for key in ("id", "route"):
        if not isinstance(row.get(key), str) or not row[key]:
            return f"has no {key} (a non-empty string)"
    if row["route"] == POOLED:
        return f"has the route {POOLED!r}, which is the name of the pooled figures"
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return "has no messages (a list of {role, content})"
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"has a message without a role: {message!r:.60}"
        if not isinstance(message.get("content"), str):
            return f"has a message whose content is no string: {message!r:.60}"
    if not isinstance(row.get("chat_template_kwargs") or {}, dict):
        return "has chat_template_kwargs that are no object"
    if messages[-1]["role"] not in ("user", "tool"):
        return f"ends with role {messages[-1]['role']!r}; the last message must be the user's"
    if not messages[-1]["content"].strip():
        return "ends with an empty message"
    return None


def render_row(row: dict[str, Any], renderer: Renderer, where: str, arguments: Mapping[str, Any] = {}) -> Prompt:
    """The prompt of a row {id, route, messages, tools?, chat_template_kwargs?}.

    Args:
        arguments: for the chat template; the row's own come first.

    Raises:
        Refused: it cannot be rendered; the message names `where` it stands.
    """
    told = {**arguments, **(row.get("chat_template_kwargs") or {})}
    try:
        text = renderer.text(row["messages"], generation=True, tools=row.get("tools"), arguments=told)
        return Prompt(row["id"], row["route"], tuple(renderer.ids(text)))
    except Unusable as error:
        raise Refused(f"{where} cannot be rendered: {error}") from None


def load_prompts(files: Sequence[str | Path], renderer: Renderer, arguments: Mapping[str, Any] = {}) -> list[Prompt]:
    """Read JSON-lines files of `{"id", "route", "messages", "tools"?, "chat_template_kwargs"?}`, in order.

    Args:
        arguments: for the chat template; a row's own come first.

    Raises:
        Refused: no file is named, a file is missing or empty, or a row is malformed, repeats an id, or
            cannot be rendered; the message names file and row.
    """
    if not files:
        raise Refused("eval.prompts names no file; give it JSON lines of {id, route, messages}")
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for file in map(Path, files):
        try:
            lines = file.read_text(encoding="utf-8").split("\n")  # other line ends may stand in a JSON string
        except FileNotFoundError:
            raise Refused(f"eval.prompts: no file {file}; the path is relative to {Path.cwd()}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"eval.prompts: cannot read {file} ({error})") from None
        before = len(prompts)
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise Refused(f"{where} is not JSON ({error.msg})") from None
            if (problem := _check_row(row)) is not None:
                raise Refused(f"{where} {problem}")
            if row["id"] in seen:
                raise Refused(f"{where} repeats the id {row['id']!r} of {seen[row['id']]}")
            seen[row["id"]] = where
            prompts.append(render_row(row, renderer, where, arguments))
        if len(prompts) == before:
            raise Refused(f"eval.prompts: {file} holds no prompt")
    return prompts


def contents(prompts: Sequence[Prompt]) -> list[list[Any]]:
    """What prompts hold, as plain values, for fingerprints."""
    return [[prompt.id, prompt.route, list(prompt.ids)] for prompt in prompts]


def by_route(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Prompts grouped by route, routes and prompts in order of first appearance."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.route, []).append(prompt)
    return groups
