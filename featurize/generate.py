"""On-policy conversations: the target's own answers, to prompts from any source or of its own making (exchanges.py).

Without `generate.prompts` no data set is needed: each route names openings of user turns, which the target continues.

Every conversation is a slot with an id and a seed of its own. What is finished is appended to `generate.output`; a slot
that cannot be filled (every attempt discarded, its request refused again and again) is appended to `*.failed.jsonl`
with the reason and not asked for again until that file is removed. So a run that is stopped goes on with the slots that
are in neither. `pack` writes the result in the order of the plan, compressed, equal for equal contents. Servers that
answer nobody stop the run, and nothing is recorded as failed.

Run many times at once, on any machines that see the folder, the processes share the slots: each is claimed while it is
filled, and all see one another's rows. Each process returns when all slots are done.

    python -m featurize.generate experiment=demo 'generate.urls=[http://127.0.0.1:8000/v1]'

asks running OpenAI-compatible servers that serve the target under the name `generate.model`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import httpx

from featurize.claims import Claims
from featurize.config import DataConfig, GenerateConfig
from featurize.conversations import Refusals
from featurize.exchanges import Generator, Slot, normalised
from featurize.rows import Rows, append, mend
from featurize.sources import describe_sources, read_conversations
from featurize.spans import Renderer
from featurize.speakers import InProcess, Servers, Unanswered, Unfilled
from featurize.tokenised import load_renderer
from models.artefact import differences, read_json, write_bytes, write_json
from models.config import TargetConfig
from models.errors import Refused
from models.target import Target, describe_target

log = logging.getLogger(__name__)

Start = Callable[[], AbstractContextManager[Sequence[str]]]
"""Starts servers; the context has their base URLs, and stops them when it is left."""

FAILURES = 8
"""Slots failing one after another, none filled between them, after which the servers are taken to be at fault."""


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
        if len(slots) == config.conversations:
            log.info("generate.conversations=%d: no prompt is read after so many; null takes all", len(slots))
        for line in refusals.lines():
            log.warning("left out: %s", line)
        return slots
    if not config.routes:
        raise Refused(
            "there is nothing to ask: name files of users' messages in generate.prompts, or openings in "
            "generate.routes (generate=demo has some)"
        )
    if config.conversations is None:
        raise Refused("generate.conversations is null; say how many generate.routes are to have")
    names = sorted(config.routes)
    shares = list(accumulate((config.routes[name].share for name in names), initial=0.0))
    ends = [round(config.conversations * share / shares[-1]) for share in shares]  # so that counts add up to the whole
    placed = []
    for name, begin, end in zip(names, ends, ends[1:], strict=False):
        route, count = config.routes[name], end - begin
        for index in range(count):
            each, opening = divmod(index, len(route.openings))  # every opening has its share of both
            slot = Slot(f"{name}-{index:05d}", name, sampled(each), route.openings[opening])
            placed.append((index / count, slot))
    return [slot for _, slot in sorted(placed, key=lambda pair: pair[0])]


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
    prompts = describe_sources(DataConfig(config.prompts), prompts=True) if config.prompts else []
    made_of = {
        "target configuration": target.config_hash,
        "target weights": target.weights_hash,
        "generate": settings,
        "generate.prompts (contents)": prompts,
    }
    record = output.with_name(output.name + ".identity.json")
    if not record.exists():
        write_json(record, made_of)
        return
    told = [
        f"{key} (was {was}, is {now})" if key.startswith("generate.") and "contents" not in key else key
        for key, was, now in differences(read_json(record), made_of)
    ]
    if told:
        raise Refused(f"{output} was begun with other inputs: {', '.join(told)}; choose another generate.output")


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
