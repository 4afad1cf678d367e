"""The training side of a spool (spool.py): a store whose training documents are there for a while only.

Every process of training reads; one asks and gives back. A shard is mapped for one document at a time, since a file
that stays mapped keeps its room when it is removed. Each process compares the checksums of its share of the shards,
and all wait for the shards of a step before they begin it, so that what one finds damaged trains nobody.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from featurize.claims import EXTRACTING, TRAINING, Claims
from featurize.config import SpoolConfig
from featurize.contract import FeatureContract
from featurize.shards import Widths, cut_units, is_finished, map_tensors, shard_path
from featurize.spool import POLL_S, SHARE, Absence, Demand, Spool, documents_held_out, epoch_order
from featurize.store import DocumentFeatures, FeatureStore, open_manifest
from featurize.tokenised import TokenisedSet
from models.artefact import file_sha256, read_json
from models.errors import Refused


class SpoolStore(FeatureStore):
    """`read` gives documents held out; `in_epoch(e).read` those of training, and waits until their shard is there."""

    def __init__(
        self, spool: Spool, claims: Claims, opened: tuple[dict[str, Any], TokenisedSet], demand: Demand
    ) -> None:
        super().__init__(spool.directory, *opened)
        self.spool, self.claims, self._demand = spool, claims, demand
        self.firsts = [unit.first for unit in spool.units]
        self._closed = threading.Event()
        self._places: dict[int, int] | None = None
        self._first_number = 0
        kept = spool.directory / "kept"
        self._kept = FeatureStore.open(kept) if kept.is_dir() else None
        share = self._kept.manifest["inputs"][SHARE] if self._kept else 0.0
        self._kept_index = {index: i for i, index in enumerate(documents_held_out(self.documents, share))}

    @classmethod
    def attach(
        cls, settings: SpoolConfig, seed: int, epochs: int, leave: Callable[[], bool] = lambda: False
    ) -> SpoolStore | None:
        """Attend on the training side, and wait until extraction has prepared the folder, or until `leave()`: None.

        Raises:
            Refused: no process of extraction was there for too long, or the bound is too small.
        """
        directory = Path(settings.directory)
        claims = Claims(directory)
        claims.attend(TRAINING)
        absence = Absence(settings.patience_s)
        while not (directory / "manifest.json").is_file():
            if leave():
                return None
            if absence.too_long(claims.anyone(EXTRACTING)):
                raise Refused(_missing(directory, settings.patience_s))
            time.sleep(POLL_S)
        manifest, tokenised = open_manifest(directory)
        contract = FeatureContract.from_json(manifest["contract"])
        units = cut_units(tokenised, manifest["inputs"]["featurize.shard_tokens"], contract.final_everywhere)
        spool = Spool(directory, settings, units, Widths.of(contract))
        return cls(spool, claims, (manifest, tokenised), Demand(seed, epochs, spool.bound))

    def require_kept(self, documents: Sequence[int]) -> None:
        """Check that the documents held out are there.

        Raises:
            Refused: extraction held out others.
        """
        if not self._kept_index.keys() >= set(documents):
            raise Refused(f"{self.directory} keeps other documents; give both stages the same data.validation_share")

    def sizes(self, epoch: int) -> list[int]:
        """Bytes of an epoch's shards, in its order."""
        return [self.spool.sizes[unit] for unit in epoch_order(len(self.spool.units), self._demand.seed, epoch)]

    def ask(self, done: int) -> None:
        """Ask for all shards but the first `done`; by one process, before any of them is read."""
        self._demand = replace(self._demand, done=done, freed=done)
        self.spool.ask(self.claims, self._demand)

    def free(self, done: int) -> None:
        """Remove all shards before number `done`; by the process that asked, when no process reads them any more."""
        begin = self._demand.done
        if done > begin:
            self.spool.tell(replace(self._demand, done=done))  # first, so that nobody makes them again
            self.spool.remove(range(begin, done))
            self._demand = replace(self._demand, done=done, freed=done)
            self.spool.tell(self._demand)

    def wait(self, numbers: range, process: int, processes: int, leave: Callable[[], bool]) -> str | None:
        """Wait until these shards are there, or until `leave()`; returns what is wrong, None if nothing.

        Every process must wait for the same shards before they are used: each compares the checksums of its share. One
        that finds damage waits for all the same, since the others do before they hear of it.
        """
        absence, damage = Absence(self.spool.patience_s), None
        for number in numbers:
            while not self.spool.has(self._demand, number):
                if leave():
                    return None
                if absence.too_long(self.claims.anyone(EXTRACTING)):
                    return _missing(self.directory, self.spool.patience_s, number, self.spool.total(self._demand))
                time.sleep(POLL_S)
            if number % processes == process:
                damage = damage or self._damage(number)
        return damage

    def _damage(self, number: int) -> str | None:
        path = shard_path(self.directory, self.spool.unit(self._demand, number))
        if file_sha256(path) == read_json(path.with_suffix(".json"))["sha256"]:
            return None
        path.with_suffix(".json").unlink()
        return f"{path} was damaged (its SHA-256 differs); it will be made again: start `python -m train` again"

    def close(self) -> None:
        """Let no thread wait for a shard any longer."""
        self._closed.set()

    def in_epoch(self, epoch: int) -> FeatureStore:
        """The training documents, from the shards that are made for this epoch."""
        view = copy.copy(self)
        view._first_number = epoch * len(self.spool.units)
        order = epoch_order(len(self.spool.units), self._demand.seed, epoch)
        view._places = {unit: place for place, unit in enumerate(order)}
        return view

    def over_final(self) -> FeatureStore:
        """See `FeatureStore.over_final`; the view takes this one's place."""
        view = copy.copy(self)
        view._over_final = True
        view._kept = self._kept.over_final() if self._kept is not None else None
        return view

    def read(self, index: int) -> DocumentFeatures:
        """Features of one document, held out or of the epoch."""
        if self._places is not None:
            return super().read(index)
        assert self._kept is not None
        return self._kept.read(self._kept_index[index])

    def _map(self, shard: int) -> dict[str, torch.Tensor]:
        """A shard's tensors, mapped for this one use: a file that stays mapped would keep its room."""
        assert self._places is not None
        unit = self.spool.unit(self._demand, self._first_number + self._places[shard])
        while not is_finished(self.directory, unit):
            if self._closed.wait(POLL_S):
                raise Refused(f"{shard_path(self.directory, unit)} is not waited for any longer")
        return map_tensors(shard_path(self.directory, unit))


def _missing(directory: Path, patience_s: float, number: int | None = None, total: int = 0) -> str:
    what = "nothing is there yet" if number is None else f"shard {number} of {total} is not there"
    return (
        f"nobody has been extracting into {directory} for {patience_s:g} s and {what}; "
        "start `python -m featurize`, then this again"
    )
