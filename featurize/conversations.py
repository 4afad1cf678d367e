"""One shape of conversation inside; every row that cannot be brought into it is counted with its reason.

A row is `{"id", "messages": [{"role", "content", "tool_calls"?, "finish_reason"?}], "tools"?, "route"?,
"chat_template_kwargs"?}`; ShareGPT's keys (`conversations`, `from`, `value`) are turned into it at the
door and known nowhere else. What engines do to a request before they render it is done here too: the arguments
of a tool call become an object, and a message that only calls tools has empty text, not the word "None". A row
that cannot be used is refused with its place and a reason, counted, and the rest goes on.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from models.artefact import fingerprint

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Roles as people write them, and ours."""

MESSAGE_KEYS = ("tool_call_id", "name")
"""Further keys of a message that are handed to the chat template as they are."""


@dataclass(frozen=True)
class Conversation:
    """One conversation, ready for a chat template.

    Attributes:
        id: unique in the set; taken from the contents where the row has none.
        messages: as `tokenizer.apply_chat_template` takes them.
        cut: index of the assistant message whose answer was cut by a length limit, or None. It is
            then the last message: what the target would have said next is unknown.
        route: free label by which evaluation reports; "" if none.
        source: `file:row`, for messages.
    """

    id: str
    messages: list[dict[str, Any]]
    route: str = ""
    cut: int | None = None
    tools: list[Any] | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def answers(self) -> list[int]:
        """Indices of the assistant's messages; one that leads is no answer: no server makes it out of nothing."""
        return [at for at, message in enumerate(self.messages) if at and message["role"] == "assistant"]


class Unusable(Exception):
    """A row that cannot be used; the message is the reason, without its place."""


@dataclass
class Refusals:
    """What was left out, by reason, with the first places of each."""

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, place: str) -> None:
        """Count one refused row."""
        self.counts[reason] += 1
        first = self.places.setdefault(reason, [])
        if len(first) < 3:
            first.append(place)

    def lines(self) -> list[str]:
        """One line per reason, most frequent first, with the first places."""
        return [f"{count} x {reason} ({', '.join(self.places[reason])})" for reason, count in self.counts.most_common()]


def parse_calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects (they come as JSON text or objects; the list too, as text).

    Raises:
        Unusable: they are neither.
    """
    try:
        calls = json.loads(calls) if isinstance(calls, str) else calls
        parsed = []
        for call in calls:
            function = dict(call["function"] if "function" in call else call)
            arguments = function.get("arguments") or {}
            function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(function["name"], str) or not isinstance(function["arguments"], dict):
                raise TypeError
            parsed.append({**(call if "function" in call else {}), "type": "function", "function": function})
    except (TypeError, KeyError, ValueError):
        raise Unusable(
            "tool calls are not a list of {function: {name, arguments}} with an object as arguments"
        ) from None
    return parsed


def parse_message(message: Any) -> tuple[dict[str, Any], bool]:
    """A message in our shape, and whether a length limit cut it.

    Raises:
        Unusable: no known role, or no text where there must be some.
    """
    if not isinstance(message, dict):
        raise Unusable("a message is not an object")
    told = message.get("role", message.get("from"))
    role = ROLES.get(told) if isinstance(told, str) else None
    if role is None:
        raise Unusable(f"unknown role {told!r}")
    parsed: dict[str, Any] = {key: message[key] for key in MESSAGE_KEYS if message.get(key) is not None}
    content = message.get("content", message.get("value"))
    if role == "assistant":
        calls = parse_calls(message["tool_calls"]) if message.get("tool_calls") else []
        if calls:
            parsed["tool_calls"] = calls
            content = "" if content is None else content
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning is not None:
            if not isinstance(reasoning, str):
                raise Unusable(f"reasoning of an assistant message is {type(reasoning).__name__}, not text")
            parsed["reasoning_content"] = reasoning
        ids = message.get("token_ids")
        if ids is not None:
            if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
                raise Unusable("token_ids of an assistant message is not a list of token ids")
            parsed["token_ids"] = ids
    if not isinstance(content, str):
        article = "an" if role == "assistant" else "a"
        raise Unusable(f"content of {article} {role} message is {type(content).__name__}, not text")
    return {"role": role, "content": content, **parsed}, (
        role == "assistant" and message.get("finish_reason") == "length"
    )


def parse_row(row: Any, *, prompts: bool = False) -> Conversation:
    """The conversation in one decoded row (without its source).

    Args:
        row: the decoded row.
        prompts: it will be answered: a user's message is asked for, an answer is not.

    Raises:
        Unusable: with the reason.
    """
    if not isinstance(row, dict):
        raise Unusable("the row is not an object")
    rows = row.get("messages")
    rows = row.get("conversations") if rows is None else rows
    if not isinstance(rows, list) or not rows:
        raise Unusable("no messages (nor conversations)")
    messages: list[dict[str, Any]] = []
    cut = None
    for index, message in enumerate(rows):
        parsed, was_cut = parse_message(message)
        messages.append(parsed)
        if was_cut and not prompts:
            cut = index
            break
    roles = [message["role"] for message in messages]
    needed = "user" if prompts else "assistant"
    if needed not in roles:
        raise Unusable(f"no {needed} message")
    if not prompts and "assistant" not in roles[1:]:
        raise Unusable("its only assistant message answers nothing")
    route, identity = row.get("route") or "", row.get("id")
    if not isinstance(route, str):
        raise Unusable("route is not text")
    if identity is not None and (not isinstance(identity, str | int) or isinstance(identity, bool) or identity == ""):
        raise Unusable("id is neither text nor a whole number")
    tools, arguments = row.get("tools"), row.get("chat_template_kwargs") or {}
    if isinstance(tools, str):  # columnar files keep schemas of different shapes as text
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise Unusable("tools is text that is not JSON") from None
    if (tools is not None and not isinstance(tools, list)) or not isinstance(arguments, dict):
        raise Unusable("tools is not a list, or chat_template_kwargs not an object")
    if identity is None:
        identity = "content-" + fingerprint([messages, cut, tools, arguments, route])
    return Conversation(str(identity), messages, route, cut, tools or None, arguments)
