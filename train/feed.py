"""Training from a spool: which shards each optimizer step needs, and when they are done with.

Both follow from the plan, so extraction and training agree on them without a word, and a run that is resumed
knows where it stands. All processes wait for the shards of a step before any of them begins it: nobody sits in a
collective, whose patience is short, while another waits for data.

Legend: E steps of an epoch, S shards of an epoch by their turn, D documents of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from featurize.spooled import SpoolStore
from models.errors import Refused
from train.plan import Layout, Plan


def require_mixing(mixing: int | None) -> None:
    """Raise Refused where documents mix over all shards (trainer.shuffle_shards=null): no spool holds them at once."""
    if mixing is None:
        raise Refused("a spool holds few shards at a time; set trainer.shuffle_shards to how many documents mix over")


@dataclass(frozen=True)
class Needs:
    """How many of an epoch's shards, by their turn, are needed up to each step, and are done with after it."""

    needed_E: np.ndarray
    done_E: np.ndarray

    @classmethod
    def of(cls, layout: Layout, turn_D: np.ndarray, shards: int) -> Needs:
        """What the steps of a layout need, given the turn of the shard of each of its documents."""
        step_D = np.repeat(np.arange(len(layout)), np.diff(np.asarray(layout.pack_ends)[np.asarray(layout.step_ends)]))
        needed_E = np.zeros(len(layout), np.int64)
        np.maximum.at(needed_E, step_D, turn_D + 1)
        last_S = np.full(shards, -1)
        np.maximum.at(last_S, turn_D, step_D)
        done_E = np.searchsorted(np.maximum.accumulate(last_S), np.arange(len(layout)), side="right")
        return cls(np.maximum.accumulate(needed_E), done_E)


class Feed:
    """What a plan asks of a spool, and the waiting for it."""

    def __init__(self, store: SpoolStore, plan: Plan, process: int, processes: int) -> None:
        """Look through all epochs.

        Raises:
            Refused: documents mix over all shards, or over more than the spool holds with what the steps need.
        """
        self.store, self.plan, self.process, self.processes = store, plan, process, processes
        require_mixing(plan.mixing)
        self._there, self._shards, most = 0, len(plan.firsts), 0
        self._needs: list[Needs] = []
        for epoch in range(plan.epochs):
            layout = plan.epoch(epoch)
            turn_D = plan.turns(epoch, np.asarray(layout.documents))
            self._needs.append(Needs.of(layout, turn_D, self._shards))
            most = max(most, self._most(epoch))
        bound = store.spool.bound
        if most > bound:
            raise Refused(
                f"spool.gigabytes={bound / 1e9:g} is too small: up to {most / 1e9:.4g} GB of shards are in use at a "
                f"time with trainer.shuffle_shards={plan.mixing} and trainer.packs_per_step={plan.packs_per_step}; "
                "raise it, or lower trainer.shuffle_shards or featurize.shard_tokens"
            )

    def _most(self, epoch: int) -> int:
        """Most bytes that an epoch has in use at a time."""
        needs = self._needs[epoch]
        ends_S = np.concatenate(([0], np.array(self.store.sizes(epoch)).cumsum()))
        begins_E = ends_S[np.concatenate(([0], needs.done_E[:-1]))]
        opening = ends_S[self.plan.opening()[1]] if epoch == 0 else 0
        return int(max((ends_S[needs.needed_E] - begins_E).max(), opening))

    def needed(self, step: int) -> int:
        """How many shards, numbered over all epochs, are needed up to this step, and to begin with."""
        if step == 0:
            return self.plan.opening()[1]
        epoch, within = self.plan.locate(step)
        return epoch * self._shards + int(self._needs[epoch].needed_E[within])

    def done(self, steps: int) -> int:
        """How many are done with after so many steps."""
        if steps == 0:
            return 0
        epoch, within = self.plan.locate(steps - 1)
        return epoch * self._shards + int(self._needs[epoch].done_E[within])

    def ask(self, steps: int) -> None:
        """Ask for all that is needed after so many steps; on one process, before any waits."""
        self.store.ask(self.done(steps))

    def free(self, steps: int) -> None:
        """Give back what is done with after so many steps, when all processes have made them; on one process."""
        self.store.free(self.done(steps))

    def wait(self, step: int, leave: Callable[[], bool]) -> str | None:
        """Wait until the shards of a step are there, or until `leave()`; returns what is wrong, None if nothing."""
        needed = self.needed(step)
        numbers = range(max(self._there, self.done(step)), needed)
        self._there = needed
        return self.store.wait(numbers, self.process, self.processes, leave)
