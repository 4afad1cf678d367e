"""Conversations from JSON-lines files: one shape inside, every refused row counted with its reason.

A row is `{"id", "messages": [{"role", "content", "tool_calls"?, "finish_reason"?}], "tools"?, "route"?,
"chat_template_kwargs"?}`; ShareGPT's keys (`conversations`, `from`, `value`) are turned into it at the
door and known nowhere else. A file that is missing or is not JSON lines stops the run, since it is not
what its owner thinks it is; a row that cannot be used is refused with its number and a reason, counted,
and the rest goes on. Rows are streamed: only the ids seen so far are held.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.artefact import fingerprint
from models.errors import Refused

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

MESSAGE_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content")
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
    content = message.get("content", message.get("value"))
    if not isinstance(content, str) and not (content is None and role == "assistant" and message.get("tool_calls")):
        raise Unusable(f"content of a {role} message is {type(content).__name__}, not text")
    kept = {key: message[key] for key in MESSAGE_KEYS if message.get(key) is not None}
    return {"role": role, "content": content, **kept}, role == "assistant" and message.get("finish_reason") == "length"


def parse_row(row: Any) -> Conversation:
    """The conversation in one decoded row (without its source).

    Raises:
        Unusable: with the reason.
    """
    if not isinstance(row, dict):
        raise Unusable("the row is not an object")
    rows = row.get("messages", row.get("conversations"))
    if not isinstance(rows, list) or not rows:
        raise Unusable("no messages (nor conversations)")
    messages: list[dict[str, Any]] = []
    cut = None
    for index, message in enumerate(rows):
        parsed, was_cut = parse_message(message)
        messages.append(parsed)
        if was_cut:
            cut = index
            break
    if not any(message["role"] == "assistant" for message in messages):
        raise Unusable("no assistant message")
    route, identity = row.get("route") or "", row.get("id")
    if not isinstance(route, str):
        raise Unusable("route is not text")
    if identity is not None and (not isinstance(identity, str | int) or isinstance(identity, bool) or identity == ""):
        raise Unusable("id is neither text nor a whole number")
    tools, arguments = row.get("tools"), row.get("chat_template_kwargs") or {}
    if (tools is not None and not isinstance(tools, list)) or not isinstance(arguments, dict):
        raise Unusable("tools is not a list, or chat_template_kwargs not an object")
    if identity is None:
        identity = "content-" + fingerprint([messages, cut, tools, arguments, route])
    return Conversation(str(identity), messages, route, cut, tools, arguments)


def read_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Number (from 1) and decoded value of every row of a .jsonl or .jsonl.gz file; blank lines are skipped.

    Raises:
        Refused: the file is missing, damaged, not UTF-8, or a row is not JSON.
    """
    if not file.is_file():
        raise Refused(f"no such file: {file} (data.conversations; relative paths start at the current folder)")
    number = 0
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    yield number, json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Refused(
            f"{file}:{number} is not JSON ({error}); data.conversations wants one JSON object a line"
        ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise Refused(f"{file} is damaged after row {number} ({error}); copy it again") from None


def read_conversations(files: Sequence[str], refusals: Refusals) -> Iterator[Conversation]:
    """Every usable conversation of the files, in order; the others are counted in `refusals`.

    Raises:
        Refused: no file is named, a file cannot be read, or not one of its rows is usable.
    """
    if not files:
        raise Refused("data.conversations names no file; choose a data set (data=jsonl) and name its files")
    seen: set[str] = set()
    for name in files:
        file = Path(name).expanduser()
        usable, reason = 0, "it is empty"
        for number, row in read_rows(file):
            place = f"{file}:{number}"
            try:
                conversation = parse_row(row)
                if conversation.id in seen:
                    raise Unusable("duplicate id")
            except Unusable as error:
                reason = f"row {number}: {error}"
                refusals.add(str(error), place)
                continue
            seen.add(conversation.id)
            usable += 1
            yield Conversation(**{**vars(conversation), "source": place})
        if not usable:
            raise Refused(f"{file} has no usable conversation ({reason})")
