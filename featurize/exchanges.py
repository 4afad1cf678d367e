"""One conversation: user turns in the target's own words, or taken from a source, and the target's answers to them.

A user turn is made up so: its head, as the target's own chat template writes it, is given to the target, and what it
continues with is a user turn in its own words. An opening ("Extract as JSON:", "Write a Python function that", ...)
steers the kind. Turns that are too short, too long, repetitive or already seen are discarded and sampled again; the
target then answers the ones that stay.

Prompts are rendered here and sent as token ids, so that no second template (a server's, with other defaults) can slip
in; the ids that a server returns are kept.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from featurize.config import GenerateConfig, RouteConfig
from featurize.conversations import Conversation, Unusable
from featurize.spans import Renderer
from featurize.speakers import Speaker, Unanswered, Unfilled
from models.errors import Refused

ATTEMPTS = 12
"""User turns sampled for one turn before it is given up."""


def user_turn_head(renderer: Renderer, messages: Sequence[dict[str, Any]] = (), **arguments: Any) -> str:
    """The rendered text up to where the user message behind `messages` begins, from the template's own structure.

    Raises:
        Refused: the template does not render user text as it is.
    """
    marker = "draftsmith-user-text-begins-here"
    text = renderer.text([*messages, {"role": "user", "content": marker}], arguments=arguments)
    if text.count(marker) != 1:
        raise Refused("the target's chat template does not render a user message as it is")
    return text[: text.index(marker)]


def repetition(text: str) -> float:
    """Share of the text's word 4-grams that already occurred earlier in it (0 = none, near 1 = a loop)."""
    words = text.split()
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def normalised(text: str) -> str:
    """Text for comparing user turns: lower case, words and digits only."""
    return " ".join(re.findall(r"\w+", text.lower()))


@dataclass(frozen=True)
class Slot:
    """One conversation to be made: its id, route, whether its answers are sampled, and what it begins with.

    Attributes:
        opening: of the first user turn, if the target makes the user turns up.
        prompt: the conversation whose users' messages are answered, otherwise.
    """

    id: str
    route: str
    sampled: bool
    opening: str = ""
    prompt: Conversation | None = None

    def seed(self, seed: int, attempt: int) -> int:
        """Sampling seed of one attempt, from contents alone."""
        return int.from_bytes(hashlib.sha256(f"{seed}/{self.id}/{attempt}".encode()).digest()[:4], "big")


class Generator:
    """Fills slots."""

    def __init__(self, config: GenerateConfig, renderer: Renderer, speaker: Speaker) -> None:
        self.config, self.renderer, self.speaker = config, renderer, speaker
        self.seen: set[str] = set()
        self.discarded: Counter[str] = Counter()

    def judge_user_turn(self, text: str, finish_reason: str) -> str | None:
        """Why a user turn is discarded, or None if it stays."""
        if finish_reason != "stop":
            return "user turn too long"
        if len(normalised(text)) < 12:
            return "user turn empty or short"
        if repetition(text) > 0.3:
            return "user turn repetitive"
        if normalised(text) in self.seen:
            return "user turn seen before"
        return None

    async def answer(
        self, slot: Slot, messages: Sequence[dict[str, Any]], seed: int
    ) -> tuple[dict[str, Any] | None, str]:
        """The target's answer to `messages` as a message, or None and why it is discarded.

        Raises:
            Unfilled: the request keeps failing, or the chat template refuses the messages.
        """
        route, tools = self._route(slot), slot.prompt.tools if slot.prompt else None
        temperature = self.config.temperature if route.temperature is None else route.temperature
        said = await self.speaker.complete(
            self._ids(
                lambda: self.renderer.text(messages, generation=True, tools=tools, arguments=self._arguments(slot))
            ),
            max_tokens=self.config.max_answer_tokens,
            temperature=temperature if slot.sampled else 0.0,
            top_p=route.top_p if slot.sampled else 1.0,
            seed=seed,
        )
        if not said.text.strip():
            return None, "answer empty"
        if repetition(said.text) > 0.8:
            return None, "answer repetitive"
        message: dict[str, Any] = {"role": "assistant", "content": said.text}
        cut = said.finish_reason == "length"
        # Ids that end in no end-of-turn token are kept of a cut answer only: its end must be in what is trained.
        if said.ids and (cut or said.ids[-1] in self.renderer.end_of_turn):
            message["token_ids"] = said.ids
        return (message | {"finish_reason": "length"} if cut else message), ""

    async def exchange(self, slot: Slot, history: Sequence[dict[str, Any]], turn: int) -> list[dict[str, Any]]:
        """A user turn in the target's own words behind `history` and its answer.

        Raises:
            Unfilled: all were discarded, a request keeps failing, or the chat template refuses the messages.
        """
        opening = slot.opening if turn == 0 else ""
        head = self._ids(lambda: user_turn_head(self.renderer, history, **self._arguments(slot)) + opening)
        for attempt in range(ATTEMPTS):
            seed = slot.seed(self.config.seed, turn * ATTEMPTS + attempt)
            user = await self.speaker.complete(
                head,
                max_tokens=self.config.max_user_tokens,
                temperature=self.config.user_temperature,
                top_p=0.95,
                seed=seed,
            )
            text = (opening + user.text).strip()
            reason = self.judge_user_turn(text, user.finish_reason)
            if reason is None:
                self.seen.add(normalised(text))
                message = {"role": "user", "content": text}
                reply, reason = await self.answer(slot, [*history, message], seed)
                if reply:
                    return [message, reply]
            self.discarded[reason] += 1
        raise Unfilled("every user turn or its answer was discarded")

    async def fill(self, slot: Slot) -> dict[str, Any]:
        """The conversation of one slot. An answer that is cut or cannot be had ends it; what comes before it stays.

        Raises:
            Unfilled: there is not one answer, or nobody answers any more.
        """
        messages: list[dict[str, Any]] = []
        try:
            async for exchange in self._made_up(slot) if slot.prompt is None else self._answered(slot, slot.prompt):
                messages += exchange
                if "finish_reason" in exchange[-1]:
                    break
        except Unfilled as error:
            if isinstance(error, Unanswered) or not messages:
                raise
        row = {"id": slot.id, "route": slot.route, "messages": messages}
        extra = {"tools": slot.prompt and slot.prompt.tools, "chat_template_kwargs": self._arguments(slot)}
        return row | {key: value for key, value in extra.items() if value}

    async def _made_up(self, slot: Slot) -> AsyncIterator[list[dict[str, Any]]]:
        """As many exchanges as the slot's route has turns, each behind those before it."""
        history: list[dict[str, Any]] = []
        for turn in range(self._route(slot).turns):
            exchange = await self.exchange(slot, history, turn)
            yield exchange
            history += exchange

    async def _answered(self, slot: Slot, prompt: Conversation) -> AsyncIterator[list[dict[str, Any]]]:
        """The prompt's messages up to each place of an answer, with the target's own there.

        It ends before a tool's result, since that answers a call which the target may never have made.
        """
        history: list[dict[str, Any]] = []
        pending: list[dict[str, Any]] = []
        last = max(at for at, message in enumerate(prompt.messages) if message["role"] == "user")
        for at, message in enumerate(prompt.messages[: last + 1]):
            if message["role"] == "tool":
                raise Unfilled("a tool's result comes before the first answer")
            if message["role"] != "assistant":
                pending.append(message)
            follows = prompt.messages[at + 1]["role"] if at < last else "assistant"
            if message["role"] == "user" and follows != "user":
                reply, reason = await self.answer(slot, [*history, *pending], slot.seed(self.config.seed, at))
                if reply is None:
                    raise Unfilled(reason)
                yield [*pending, reply]
                history, pending = [*history, *pending, reply], []

    def _ids(self, text: Callable[[], str]) -> list[int]:
        """Ids of what the chat template makes; Unfilled where it refuses."""
        try:
            return self.renderer.ids(text())
        except Unusable as error:
            raise Unfilled(str(error)) from None

    def _route(self, slot: Slot) -> RouteConfig:
        return self.config.routes.get(slot.route, RouteConfig())

    def _arguments(self, slot: Slot) -> dict[str, Any]:
        own = slot.prompt.template_arguments if slot.prompt else {}
        return {**self.config.chat_template_kwargs, **self._route(slot).chat_template_kwargs, **own}
