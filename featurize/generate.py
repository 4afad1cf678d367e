"""On-policy conversations: the target's own answers, to prompts from any source or of its own making.

Without `generate.prompts` no data set is needed: the head of a user turn, as the target's own chat template writes
it, is given to the target, and what it continues with is a user turn in its own words. An opening per route
("Extract as JSON:", "Write a Python function that", ...) steers the kind. Turns that are too short, too long,
repetitive or already seen are discarded and sampled again; the target then answers the ones that stay.

Prompts are rendered here and sent as token ids, so that no second template (a server's, with other defaults) can slip
in; the ids that a server returns are kept. Every conversation is a slot with an id and a seed of its own. What is
finished is appended to `generate.output`; a slot that cannot be filled (every attempt discarded, its request refused
again and again) is appended to `*.failed.jsonl` with the reason and not asked for again until that file is removed. So
a run that is stopped goes on with the slots that are in neither. `pack` writes the result in the order of the plan,
compressed, equal for equal contents. Servers that answer nobody stop the run, and nothing is recorded as failed.

Run many times at once, on any machines that see the folder, the processes share the slots: each is claimed while it is
filled, and all see one another's rows. Each process returns when all slots are done.

    python -m featurize.generate experiment=demo 'generate.urls=[http://127.0.0.1:8000/v1]'

asks running OpenAI-compatible servers that serve the target under the name `generate.model`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import logging
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from featurize.claims import Claims
from featurize.config import DataConfig, GenerateConfig, RouteConfig
from featurize.conversations import Conversation, Refusals, Unusable
from featurize.rows import Rows, append, mend
from featurize.sources import describe_sources, read_conversations
from featurize.spans import Renderer
from featurize.speakers import InProcess, Servers, Speaker, Unanswered, Unfilled
from featurize.tokenised import load_renderer
from models.artefact import fingerprint, read_json, write_bytes, write_json
from models.config import TargetConfig
from models.errors import Refused
from models.target import Target, describe_target

log = logging.getLogger(__name__)

Start = Callable[[], AbstractContextManager[Sequence[str]]]
"""Starts servers; the context has their base URLs, and stops them when it is left."""

ATTEMPTS = 12
"""User turns sampled for one turn before it is given up."""
FAILURES = 8
"""Slots failing one after another, none filled between them, after which the servers are taken to be at fault."""


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


def plan_slots(config: GenerateConfig) -> list[Slot]:
    """The slots in their order: those of `prompts`, or of all routes, each with its share, interleaved.

    Raises:
        Refused: there are neither prompts nor routes, or the prompts cannot be read.
    """

    def sampled(index: int) -> bool:
        """Whether the conversation of this number is: the first, and from then on whenever the share falls behind."""
        before, after = (math.ceil(config.sampled_share * count - 1e-9) for count in (index, index + 1))
        return before < after

    if config.prompts:
        refusals = Refusals()
        read = islice(read_conversations(DataConfig(config.prompts), refusals, prompts=True), config.conversations)
        slots = [Slot(c.id, c.route, sampled(i), prompt=c) for i, c in enumerate(read)]
        for line in refusals.lines():
            log.warning("left out: %s", line)
        return slots
    if not config.routes:
        raise Refused("generate.routes is empty; name at least one route with its openings, or generate.prompts")
    total = sum(route.share for route in config.routes.values())
    placed = []
    for name, route in sorted(config.routes.items()):
        count = round(config.conversations * route.share / total)
        for index in range(count):
            each, opening = divmod(index, len(route.openings))  # every opening has its share of both
            slot = Slot(f"{name}-{index:05d}", name, sampled(each), route.openings[opening])
            placed.append((index / count, slot))
    return [slot for _, slot in sorted(placed, key=lambda pair: pair[0])]


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
        return {**self._route(slot).chat_template_kwargs, **own}


def failed_file(output: Path) -> Path:
    """Where slots that could not be filled are recorded."""
    return output.with_name(output.stem + ".failed.jsonl")


async def generate(
    config: GenerateConfig, renderer: Renderer, target: Target, slots: Sequence[Slot], claims: Claims
) -> Counter[str]:
    """Fill every slot that is missing in `config.output`; returns counts of discards and failures by reason.

    First come the slots that no other process is at. Then we wait for those, and fill them if that process has died.

    Raises:
        Refused: slot after slot fails; what was filled stays, and none of these is recorded as failed.
    """
    output = Path(config.output).expanduser()
    finished, failed, done = Rows(output), Rows(failed_file(output)), set[str]()
    limits = httpx.Limits(max_connections=config.concurrency)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        speaker = Servers(config, client) if config.urls else InProcess(target, renderer)
        generator = Generator(config, renderer, speaker)
        filled = 0
        unrecorded: list[dict[str, Any]] = []

        def look() -> None:
            rows = finished.new()
            done.update(row["id"] for row in [*rows, *failed.new()])
            users = (m for row in rows for m in row["messages"] if m["role"] == "user")
            generator.seen.update(normalised(message["content"]) for message in users)

        def record_failures() -> None:
            while unrecorded:
                append(failed_file(output), unrecorded.pop(0), claims)

        async def fill(slot: Slot) -> None:
            nonlocal filled
            try:
                row = await generator.fill(slot)
            except Unfilled as error:
                generator.discarded["slot given up"] += 1
                done.add(slot.id)
                unrecorded.append({"id": slot.id, "route": slot.route, "reason": str(error)})
                if not isinstance(error, Unanswered):
                    record_failures()
                elif len(unrecorded) >= FAILURES:
                    raise Refused(f"slot after slot fails, the last one: {error}") from None
                return
            append(output, row, claims)
            record_failures()
            filled += 1
            if filled % 100 == 0:
                look()
                log.info("%d of %d conversations", len(done), len(slots))

        async def worker(todo: Iterator[int]) -> None:
            for index in todo:
                if slots[index].id in done:
                    continue
                with claims.unit(index, wait=False) as mine:
                    if mine:
                        look()  # another process may have filled it meanwhile
                    if mine and slots[index].id not in done:
                        await fill(slots[index])

        look()
        while missing := [index for index, slot in enumerate(slots) if slot.id not in done]:
            todo = iter(missing)
            workers = [asyncio.create_task(worker(todo)) for _ in range(config.concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for task in workers:
                    task.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
            look()
            if elsewhere := [index for index in missing if slots[index].id not in done]:
                with claims.unit(elsewhere[0], wait=True):
                    look()
        if unrecorded and not filled:
            raise Refused(f"no slot could be filled, the last one: {unrecorded[-1]['reason']}")
        record_failures()
    return generator.discarded


def in_order(source: Path, slots: Sequence[Slot]) -> Iterator[dict[str, Any]]:
    """The rows of `source` in the order of the plan: however many are taken from its beginning, routes keep shares."""
    rows = {row["id"]: row for row in Rows(source).new()}
    yield from (rows[slot.id] for slot in slots if slot.id in rows)


def pack(source: Path, target: Path, slots: Sequence[Slot]) -> int:
    """Write `source` in order to the gzip file `target`; equal contents give equal bytes."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in in_order(source, slots)]
    write_bytes(target, gzip.compress("".join(lines).encode(), 9, mtime=0))
    return len(lines)


def check_identity(config: GenerateConfig, target: Target, output: Path) -> None:
    """Note beside `output` what decides its contents; conversations of two targets must not be mixed.

    Raises:
        Refused: it was begun by another target or with other settings.
    """
    free = ("urls", "model", "output", "conversations", "concurrency", "prompts")
    settings = {key: value for key, value in asdict(config).items() if key not in free}
    prompts = describe_sources(DataConfig(config.prompts)) if config.prompts else []
    identity = fingerprint([target.config_hash, target.weights_hash, settings, prompts])
    record = output.with_name(output.name + ".identity.json")
    if not record.exists():
        write_json(record, {"identity": identity})
    elif read_json(record).get("identity") != identity:
        raise Refused(f"{output} was begun by another target or with other settings; choose another generate.output")


def fill_and_pack(config: GenerateConfig, settings: TargetConfig, servers: Start | None = None) -> bool:
    """Fill what is missing of `config.output`, then write its .gz; False when both are there already.

    Args:
        servers: starts servers to ask in place of `config.urls`; called when there is something to ask.

    Raises:
        Refused: no tokenizer or chat template in the target, servers that keep failing, or an output that was begun
            by another target or with other settings.
    """
    output, target = Path(config.output).expanduser(), describe_target(settings)
    claims = Claims(output.with_name(f".{output.name}.claims"))
    packed, slots = output.with_name(output.name + ".gz"), plan_slots(config)

    def is_packed() -> bool:
        written = output.stat().st_mtime_ns if output.exists() else 0
        return packed.exists() and packed.stat().st_mtime_ns >= written

    with claims.common():
        check_identity(config, target, output)
        mend(output)
        mend(failed_file(output))
        done = {row["id"] for path in (output, failed_file(output)) for row in Rows(path).new()}
        if all(slot.id in done for slot in slots) and is_packed():
            return False
    renderer = load_renderer(target, settings)
    with contextlib.nullcontext(config.urls) if servers is None else servers() as urls:
        discarded = asyncio.run(generate(replace(config, urls=list(urls)), renderer, target, slots, claims))
    for reason, count in discarded.most_common():
        log.info("discarded: %d x %s", count, reason)
    with claims.common():
        if not is_packed():  # another process has done that, otherwise
            count = pack(output, packed, slots)
            size = packed.stat().st_size / 1e6
            print(f"generate: {count:,} of {len(slots):,} conversations in {packed} ({size:.2f} MB)")
    return True


if __name__ == "__main__":
    from conf import Run, stage

    def work(run: Run) -> bool:
        """Make the run's conversations."""
        return fill_and_pack(run.generate, run.target)

    stage("generate", work, shared=True)
