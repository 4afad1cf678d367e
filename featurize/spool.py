"""Streaming: the shards of a store pass through a folder of bounded size, for those who cannot afford the disk.

    inputs.json, tokenised.*, manifest.json    as in a store; the manifest lists no shard
    kept/                                      a small store of the documents held out, which stay
    demand.json                                what training asks for; written by training alone
    shards/00017.{safetensors,json}            shard 17 of all that training asks for

The shards are those of the whole store, byte for byte. Training takes all of them once an epoch, in an order that
follows from (seed, epoch) alone, so the shards of a run can be numbered through. Training says how many it is `done`
with, and how many of those it has removed (`freed`); extraction makes a shard exactly if training is not done with
it, and if it fits into the bound together with all from `freed` up to it. So nobody has to count what lies there:
any number of processes, on any machines that see the folder, keep to the bound; and whoever is killed and started
again goes on from what he finds. Training that goes on from a checkpoint asks again for what it needs from there on.

Which side is there is told by locks that its processes hold while they live (claims.py). A side that misses the
other waits for `spool.patience_s`, then stops; one that is there is waited for as long as it takes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from featurize.claims import TRAINING, Claims
from featurize.config import SpoolConfig
from featurize.contract import FeatureContract
from featurize.extract import PROGRESS_SECONDS
from featurize.shards import Unit, Widths, free_bytes, is_finished, remove_leftovers, write_shard
from featurize.store import write_manifest
from featurize.teacher import TopK
from featurize.tokenised import Document, TokenisedSet, held_out
from models.artefact import fingerprint, read_json, write_json
from models.errors import Refused

POLL_S = 0.2
"""Between two looks at the folder."""

SHARE = "data.validation_share"
"""What the documents held out depend on beside the inputs of all."""

OVERHEAD = 12_288
"""Bytes that a shard may take beside its tensors: its header, its record, and what a file system rounds up."""


def epoch_random(seed: int, epoch: int) -> torch.Generator:
    """What decides the order of an epoch's data."""
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch)


def shard_order(count: int, random: torch.Generator) -> list[int]:
    """A random order of shards, the first that is drawn from `random`."""
    return torch.randperm(count, generator=random).tolist()


@functools.lru_cache(maxsize=4)
def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """Shards in the order in which an epoch takes them; not to be changed."""
    return shard_order(count, epoch_random(seed, epoch))


@dataclass(frozen=True)
class Demand:
    """What training asks for.

    Attributes:
        seed: of the order. epochs: how often it takes every shard.
        bound: bytes that shards may take up; training's counts, since it knows what it has in use at a time.
        done: so many shards, numbered over all epochs, it does not need any more.
        freed: so many of these are removed, and their room is free.
    """

    seed: int
    epochs: int
    bound: int
    done: int = 0
    freed: int = 0


class Absence:
    """For how long the other side has not been there, by this process's own clock: since the first look that missed it.

    What this process does between two looks may take longer than its patience, and is nobody's absence.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: float | None = None

    def too_long(self, there: bool) -> bool:
        """Note whether it is there now; whether patience has run out."""
        now = time.monotonic()
        if there:
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since > self._patience_s


def documents_held_out(documents: Sequence[Document], share: float) -> list[int]:
    """Indices of the documents that stay in the folder."""
    return [index for index, document in enumerate(documents) if held_out(document.conversation, share)]


def kept_part(tokenised: TokenisedSet, inputs: dict[str, Any], share: float) -> tuple[TokenisedSet, dict[str, Any]]:
    """The documents held out, as a set of their own, and what it is made of."""
    inputs = {**inputs, SHARE: share}
    return tokenised.part(documents_held_out(tokenised.documents, share), fingerprint(inputs)), inputs


def publish(
    directory: Path, contract: FeatureContract, inputs: dict[str, Any], tokenised: TokenisedSet, canary: dict[str, Any]
) -> None:
    """Tell training that it may begin: what features will pass through, and that those held out are there.

    Raises:
        Refused: it was told so of other features.
    """
    manifest = directory / "manifest.json"
    if not manifest.is_file():
        write_manifest(directory, contract, inputs, tokenised, [], canary)
    elif (found := read_json(manifest)["contract"]) != contract.to_json():
        different = [name for name, value in contract.to_json().items() if found.get(name) != value]
        raise Refused(f"{directory} was begun with another {', '.join(different)}; delete that folder to begin again")


class Spool:
    """The folder and what both sides know of it."""

    def __init__(self, directory: Path, settings: SpoolConfig, units: Sequence[Unit], widths: Widths) -> None:
        """Refer to a spool; nothing is read or written.

        Raises:
            Refused: the bound does not hold the largest shard.
        """
        assert settings.gigabytes is not None
        self.directory, self.units, self.widths = directory, units, widths
        self.bound, self.patience_s = int(settings.gigabytes * 1e9), settings.patience_s
        self.sizes = [widths.bytes([unit]) + OVERHEAD for unit in units]
        if self.bound < max(self.sizes):
            raise Refused(
                f"spool.gigabytes={settings.gigabytes} is less than a shard of {max(self.sizes) / 1e9:.3f} GB; "
                "raise it, or lower featurize.shard_tokens"
            )

    def which(self, demand: Demand, number: int) -> int:
        """The unit that the shard of this number is."""
        epoch, place = divmod(number, len(self.units))
        return epoch_order(len(self.units), demand.seed, epoch)[place]

    def unit(self, demand: Demand, number: int) -> Unit:
        """The unit of a shard, with the shard's number as its index."""
        return replace(self.units[self.which(demand, number)], index=number)

    def total(self, demand: Demand) -> int:
        """Shards of all epochs."""
        return demand.epochs * len(self.units)

    def wanted(self, demand: Demand) -> range:
        """Numbers of the shards that may be there: not done with, and within the bound."""
        end, room = demand.freed, demand.bound
        while end < self.total(demand):
            room -= self.sizes[self.which(demand, end)]
            if room < 0:
                break
            end += 1
        return range(demand.done, max(end, demand.done))

    def has(self, demand: Demand, number: int) -> bool:
        """Whether a shard is there."""
        return is_finished(self.directory, self.unit(demand, number))

    def finished(self) -> bool:
        """Whether training asks for nothing any more."""
        demand = self.demand()
        return demand is not None and demand.done == self.total(demand)

    def check_space(self, kept: Sequence[Unit]) -> None:
        """Print what will pass through and what will stay, against what is free.

        Raises:
            Refused: it does not fit.
        """
        taken = sum(path.stat().st_size for path in self.directory.glob("**/shards/*.safetensors"))
        free, stays = free_bytes(self.directory) + taken, self.widths.bytes(kept)
        print(
            f"features: {len(self.units)} shards, {sum(self.sizes) / 1e9:.2f} GB ({self.widths.encoding}), pass "
            f"through {self.directory}, at most {self.bound / 1e9:g} GB at a time; documents held out, "
            f"{stays / 1e9:.2f} GB, stay; {free / 1e9:.1f} GB free",
            flush=True,
        )
        if self.bound + stays > free:
            raise Refused(
                f"{self.directory} has {free / 1e9:.1f} GB free; lower spool.gigabytes={self.bound / 1e9:g}, free "
                "some, or name a larger disk in spool.directory"
            )

    def demand(self) -> Demand | None:
        """What training asks for at the moment; None before it came."""
        path = self.directory / "demand.json"
        return Demand(**read_json(path)) if path.is_file() else None

    def tell(self, demand: Demand) -> None:
        """Say what training asks for."""
        write_json(self.directory / "demand.json", asdict(demand))

    def ask(self, claims: Claims, demand: Demand) -> None:
        """Ask for something else than before: what lies there and is of no use for it is removed.

        Raises:
            Refused: another process does so.
        """
        if not claims.sole():
            raise Refused(f"another training takes from {self.directory}; give each a spool.directory of its own")
        with claims.gate(alone=True):  # nobody is writing a shard that was asked for before
            self.tell(demand)
            kept = {f"{number:05d}" for number in self.wanted(demand) if self.has(demand, number)}
            for path in self.directory.glob("shards/*"):
                if path.name.split(".")[0] not in kept:
                    path.unlink()
            remove_leftovers(self.directory)

    def remove(self, numbers: range) -> None:
        """Remove shards, that nobody reads any more."""
        for number in numbers:
            path = self.directory / "shards" / f"{number:05d}.safetensors"
            for file in (path.with_suffix(".json"), path):
                file.unlink(missing_ok=True)


Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor | TopK]
"""Tokens, aux and final planes (or teachers) of a unit, as `extract_unit` gives them."""


class Pace:
    """What this process has made, told now and then."""

    def __init__(self) -> None:
        self.tokens, self.seconds, self.told = 0, 0.0, time.monotonic()

    def tell(self, demand: Demand, total: int, *, now: bool = False) -> None:
        """A line, if one is due."""
        if now or time.monotonic() - self.told >= PROGRESS_SECONDS:
            self.told, rate = time.monotonic(), self.tokens / max(self.seconds, 1e-9)
            print(
                f"features: training is done with {demand.done} of {total} shards; {self.tokens:,} tokens extracted "
                f"here, {rate:,.0f} tokens/s without waiting",
                flush=True,
            )


def fill(spool: Spool, claims: Claims, make: Callable[[Unit], Made]) -> None:
    """Make what training asks for, as it asks for it, until it is done; others may be at it as well.

    Raises:
        Refused: no process of training was there for too long.
    """
    absence, pace = Absence(spool.patience_s), Pace()
    while True:
        demand, gone = spool.demand(), absence.too_long(claims.anyone(TRAINING))
        if demand is not None:
            finished = demand.done == spool.total(demand)
            pace.tell(demand, spool.total(demand), now=finished)
            if finished:
                return
            if make_next(spool, claims, demand, make, pace):
                continue
        if gone:
            stage = "it never came" if demand is None else f"done with {demand.done} of {spool.total(demand)} shards"
            raise Refused(
                f"nobody has been training from {spool.directory} for {spool.patience_s:g} s ({stage}); "
                "start `python -m train`, then this again"
            )
        time.sleep(POLL_S)


def make_next(spool: Spool, claims: Claims, demand: Demand, make: Callable[[Unit], Made], pace: Pace) -> bool:
    """Make the first shard that is asked for and that nobody is at; False when there is none."""
    for number in spool.wanted(demand):
        if spool.has(demand, number):
            continue
        unit = spool.unit(demand, number)
        with claims.unit(number, wait=False) as mine:
            if not mine or spool.has(demand, number):
                continue
            started = time.monotonic()
            tensors = make(unit)
            with claims.gate(alone=False):
                now = spool.demand()
                if now is not None and number in spool.wanted(now) and spool.unit(now, number) == unit:
                    remove_leftovers(spool.directory, unit)
                    spool.remove(range(number, number + 1))  # a process may have died between shard and record
                    write_shard(spool.directory, unit, spool.widths.encoding, *tensors)
            pace.tokens += unit.tokens
            pace.seconds += time.monotonic() - started
        return True
    return False
