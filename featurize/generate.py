"""On-policy conversations from the target itself, without any data set.

The head of a user turn, as the target's own chat template writes it, is given to the target as a raw
completion: what it continues with is a user turn in its own words. An opening per route ("Extract as
JSON:", "Write a Python function that", ...) steers the kind. Turns that are too short, too long,
repetitive or already seen are discarded and sampled again; the target then answers the ones that stay.

Every conversation has a slot with an id and a seed of its own, so a run that is stopped goes on with
the slots that are missing. `pack` writes the result sorted and compressed, equal for equal contents.

    python -m featurize.generate experiment=demo generate.url=http://127.0.0.1:8000/v1

asks a running OpenAI-compatible server that serves the target under the name `generate.model`.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import logging
import os
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from featurize.config import GenerateConfig
from models.artefact import fingerprint, read_json, write_bytes, write_json
from models.config import TargetConfig
from models.errors import Refused
from models.target import describe_target

log = logging.getLogger(__name__)

ATTEMPTS = 12
"""User turns sampled for one slot before it is given up and counted as failed."""


def user_turn_head(tokenizer: Any) -> str:
    """The rendered text up to where a first user message begins, from the template's own structure.

    Raises:
        Refused: the tokenizer has no chat template, or it does not render user text as it is.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise Refused("the target's tokenizer has no chat template; give target.path one that has")
    marker = "draftsmith-user-text-begins-here"
    text = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
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
    """One conversation to be made: its id, route, opening and whether its answer is sampled."""

    id: str
    route: str
    opening: str
    sampled: bool

    def seed(self, seed: int, attempt: int) -> int:
        """Sampling seed of one attempt, from contents alone."""
        return int.from_bytes(hashlib.sha256(f"{seed}/{self.id}/{attempt}".encode()).digest()[:4], "big")


def plan_slots(config: GenerateConfig) -> list[Slot]:
    """The slots of all routes, each route with its share, openings taken in turn, routes interleaved."""
    if not config.routes:
        raise Refused("generate.routes is empty; name at least one route with its openings")
    total = sum(route.share for route in config.routes.values())
    period = max(1, round(1 / config.sampled_share)) if config.sampled_share else 0
    slots = []
    for name, route in sorted(config.routes.items()):
        count = round(config.conversations * route.share / total)
        for index in range(count):
            sampled = bool(period) and (index // len(route.openings)) % period == 0
            opening = route.openings[index % len(route.openings)]
            slots.append((index / count, Slot(f"{name}-{index:05d}", name, opening, sampled)))
    return [slot for _, slot in sorted(slots, key=lambda pair: pair[0])]


class Generator:
    """Fills slots through one server with a bounded number of requests in flight."""

    def __init__(self, config: GenerateConfig, head: str, client: httpx.AsyncClient) -> None:
        self.config, self.head, self.client = config, head, client
        self.seen: set[str] = set()
        self.discarded: Counter[str] = Counter()

    async def _post(self, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
        for attempt in range(4):
            try:
                response = await self.client.post(f"{self.config.url}/{endpoint}", json=body)
                response.raise_for_status()
                return response.json()["choices"][0]
            except (httpx.HTTPError, KeyError, ValueError) as error:
                if attempt == 3:
                    raise Refused(f"{self.config.url}/{endpoint} keeps failing: {error!r}") from None
                await asyncio.sleep(2**attempt)
        raise AssertionError("unreachable")

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

    async def fill(self, slot: Slot) -> dict[str, Any] | None:
        """The conversation of one slot, or None when every attempt was discarded."""
        config = self.config
        for attempt in range(ATTEMPTS):
            seed = slot.seed(config.seed, attempt)
            sampling = {"model": config.model, "seed": seed}
            user = await self._post(
                "completions",
                sampling
                | {"prompt": self.head + slot.opening, "max_tokens": config.max_user_tokens}
                | {"temperature": config.user_temperature, "top_p": 0.95},
            )
            text = (slot.opening + user["text"]).strip()
            reason = self.judge_user_turn(text, user["finish_reason"])
            if reason is None:
                self.seen.add(normalised(text))
                messages = [{"role": "user", "content": text}]
                temperature = config.temperature if slot.sampled else 0.0
                answer = await self._post(
                    "chat/completions",
                    sampling
                    | {"messages": messages, "max_tokens": config.max_answer_tokens, "temperature": temperature},
                )
                content = answer["message"]["content"] or ""
                reason = "answer empty" if not content.strip() else None
                reason = reason or ("answer repetitive" if repetition(content) > 0.8 else None)
                if reason is None:
                    reply = {"role": "assistant", "content": content}
                    if answer["finish_reason"] == "length":
                        reply["finish_reason"] = "length"
                    return {"id": slot.id, "route": slot.route, "messages": [*messages, reply]}
            self.discarded[reason] += 1
        return None


def read_finished(output: Path) -> list[dict[str, Any]]:
    """Conversations already in `output`; a torn last line (a killed run) is dropped from the file."""
    if not output.exists():
        return []
    lines = output.read_bytes().split(b"\n")
    if lines[-1]:
        write_bytes(output, b"\n".join([*lines[:-1], b""]))
    return [json.loads(line) for line in lines[:-1] if line]


async def generate(config: GenerateConfig, head: str) -> Counter[str]:
    """Fill every missing slot of `config.output`; returns counts of discards by reason."""
    output = Path(config.output).expanduser()
    output.parent.mkdir(parents=True, exist_ok=True)
    finished = read_finished(output)
    done = {conversation["id"] for conversation in finished}
    queue = [slot for slot in plan_slots(config) if slot.id not in done]
    total, todo = len(done) + len(queue), iter(queue)
    async with httpx.AsyncClient(timeout=600) as client:
        generator = Generator(config, head, client)
        generator.seen.update(normalised(c["messages"][0]["content"]) for c in finished)
        with output.open("ab") as handle:

            async def worker() -> None:
                for slot in todo:
                    conversation = await generator.fill(slot)
                    if conversation is None:
                        generator.discarded["slot given up"] += 1
                        continue
                    handle.write(json.dumps(conversation, ensure_ascii=False).encode() + b"\n")
                    handle.flush()
                    done.add(slot.id)
                    if len(done) % 100 == 0:
                        log.info("%d of %d conversations", len(done), total)

            await asyncio.gather(*(worker() for _ in range(config.concurrency)))
            os.fsync(handle.fileno())
    return generator.discarded


def pack(source: Path, target: Path) -> int:
    """Write `source` to the gzip file `target`; equal contents give equal bytes.

    Sorted by number, then route: however many conversations are taken from its beginning, the routes keep
    their shares.
    """
    conversations = sorted(read_finished(source), key=lambda c: (c["id"].rpartition("-")[2], c["id"]))
    lines = "".join(json.dumps(c, ensure_ascii=False) + "\n" for c in conversations)
    write_bytes(target, gzip.compress(lines.encode(), 9, mtime=0))
    return len(conversations)


def check_identity(config: GenerateConfig, target_path: str, output: Path) -> None:
    """Note beside `output` what decides its contents; conversations of two targets must not be mixed.

    Raises:
        Refused: it was begun by another target or with other settings.
    """
    target = describe_target(TargetConfig(path=target_path))
    free = ("url", "model", "output", "conversations", "concurrency")
    settings = {key: value for key, value in asdict(config).items() if key not in free}
    identity = fingerprint([target.config_hash, target.weights_hash, settings])
    record = output.with_name(output.name + ".identity.json")
    if not record.exists():
        write_json(record, {"identity": identity})
    elif read_json(record).get("identity") != identity:
        raise Refused(f"{output} was begun by another target or with other settings; choose another generate.output")


def fill_and_pack(config: GenerateConfig, target_path: str) -> bool:
    """Fill what is missing of `config.output`, then write its .gz; False when both are there already.

    Raises:
        Refused: no tokenizer or chat template in `target_path`, the server keeps failing, or the output was begun
            by another target or with other settings.
    """
    from transformers import AutoTokenizer

    output = Path(config.output).expanduser()
    check_identity(config, target_path, output)
    packed = output.with_name(output.name + ".gz")
    finished = {conversation["id"] for conversation in read_finished(output)}
    if packed.exists() and all(slot.id in finished for slot in plan_slots(config)):
        return False
    try:
        tokenizer = AutoTokenizer.from_pretrained(target_path)
    except (OSError, ValueError) as error:
        raise Refused(f"target.path={target_path} holds no usable tokenizer ({str(error).splitlines()[0]})") from None
    for reason, count in asyncio.run(generate(config, user_turn_head(tokenizer))).most_common():
        log.info("discarded: %d x %s", count, reason)
    print(f"generate: {pack(output, packed):,} conversations in {packed} ({packed.stat().st_size / 1e6:.2f} MB)")
    return True


if __name__ == "__main__":
    from conf import Run, stage

    def work(run: Run) -> bool:
        """Make the run's conversations."""
        return fill_and_pack(run.generate, run.target.path)

    stage("generate", work)
