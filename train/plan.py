"""The order of training: which documents make up a pack, which packs an optimizer step, and who computes them.

Everything but the last is a function of (seed, epoch) and the documents, for the whole job: a run that is
stopped and resumed, on any number of processes, sees the same documents in the same packs of the same
steps. The documents of an epoch are shuffled; a step takes the next ones, nearly as many tokens as its packs
hold, and lays them out heaviest first, each into the pack with the least work so far that has room for it
(longest processing time first, Graham 1969). What finds no room waits, and is the first to be laid in the next step. So
the packs of a step weigh about the same, and the last part, dealing them to the processes by the same rule,
lets all processes finish a step at nearly the same time.

What it gives, with the head of an 8B target, eight processes and packs of 8,192 tokens, against packs that
are closed at the first document that does not fit and dealt in turn (tests/train/test_plan.py): on chats of
20 to 4,096 tokens, about half supervised, the slowest process has 1.04 (8 packs per step) or 1.01 (32) times
the mean work instead of 1.34 or 1.16, and packs are 95 % full instead of 91 %; where long prompts with
short answers meet short chats, 1.10 or 1.03 instead of 1.92 or 1.42, and 86 % instead of 77 %. There is no
padding, so room left in a pack costs no more than a smaller matrix product. A million documents take 1 to 4 s
an epoch, 44 bytes each to describe and 18 to lay out.

With `mixing` (trainer.shuffle_shards) an epoch goes through the shards in random order and needs few at a time: a
document of its p-th shard is drawn at the time p + u, u uniform in [0, mixing). So it meets the documents of that many
shards on either side, and after the time p + mixing the shard is done with.

Legend: N documents of the store, D documents of an epoch, K unroll steps, S spans.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from featurize.spool import epoch_random, shard_order
from featurize.tokenised import Document
from models.drafts import HeadConfig
from models.mtp import MtpConfig
from train.config import TrainerConfig

DRAWN = 0.95
"""Share of a step's room that is drawn for it: the rest is what balance needs."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Multiply-adds of a head's forward pass; backward is about twice that throughout, so it changes no ratio.

    Attributes:
        token: fc (or an MTP head's projection), key and value of one position.
        row: query, output, MLP, own key and value, and draft logits of one row at one step; the projection again.
        key: score and value of one row and one key of its past.
        teacher: the target's draft logits of one position; a third, since they have no backward.
        row_share: share of the rows that each step hands to the next.
    """

    token: float
    row: float
    key: float
    teacher: float
    row_share: float

    @classmethod
    def of(cls, head: HeadConfig, row_share: float) -> Costs:
        """Costs of a head of this shape."""
        hidden, wide = head.hidden_size, head.num_attention_heads * head.head_dim
        mtp = isinstance(head, MtpConfig)  # one projection joins both inputs, at every row
        fused = (2 if mtp else len(head.aux_layers)) * head.target_hidden_size * hidden
        inputs = hidden if mtp else 2 * hidden  # of the attention
        key_value = 2 * inputs * head.num_key_value_heads * head.head_dim
        body = inputs * wide + wide * hidden + 3 * hidden * head.intermediate_size
        return cls(
            token=fused + key_value,
            row=body + key_value + hidden * head.draft_vocab_size + (fused if mtp else 0),
            key=2 * wide,
            teacher=head.target_hidden_size * head.draft_vocab_size / 3,
            row_share=row_share,
        )


@dataclass(frozen=True)
class Corpus:
    """What a plan needs to know of the documents of a store.

    Attributes:
        tokens_N: int64 lengths. rows_NK: int32 supervised rows per unroll step.
        work_N: float64 estimated work in multiply-adds.
    """

    tokens_N: np.ndarray
    rows_NK: np.ndarray
    work_N: np.ndarray

    @classmethod
    def of(cls, documents: Sequence[Document], costs: Costs, unroll_steps: int) -> Corpus:
        """Count rows (docs/concepts.md) and work of every document."""
        count = len(documents)
        tokens_N = np.fromiter((document.length for document in documents), np.int64, count)
        spans_N = np.fromiter((len(document.spans) for document in documents), np.int64, count)
        edges = (edge for document in documents for span in document.spans for edge in span)
        start_S, end_S = np.fromiter(edges, np.int64, 2 * spans_N.sum()).reshape(-1, 2).T
        owner_S = np.repeat(np.arange(count), spans_N)
        teachers_N = np.bincount(owner_S, end_S - start_S - 1, count)
        work_N = costs.token * tokens_N + costs.teacher * teachers_N
        rows_NK = np.zeros((count, unroll_steps), np.int32)
        first_S = np.maximum(start_S, 1) - 1
        for step in range(unroll_steps):
            rows_S = np.maximum(0, end_S - 2 - step - first_S)
            rows_NK[:, step] = np.bincount(owner_S, rows_S, count)
            keys_S = rows_S * (first_S + 1) + rows_S * (rows_S - 1) // 2
            work_S = costs.row * rows_S + costs.key * (keys_S + step * rows_S)
            work_N += costs.row_share**step * np.bincount(owner_S, work_S, count)
        return cls(tokens_N, rows_NK, work_N)


@dataclass(frozen=True)
class PackPlan:
    """A pack before it is read.

    Attributes:
        place: its number in the run, whoever computes it; its sample of rows is drawn from that.
        documents: indices in the store. work: estimated, in multiply-adds.
    """

    place: int
    documents: list[int]
    work: float


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step of the whole job: its packs, their tokens, and their supervised rows per unroll step."""

    packs: list[PackPlan]
    tokens: int
    rows_K: list[int]

    def deal(self, processes: int) -> list[list[PackPlan | None]]:
        """Packs of each process, equal in number: None where a process has fewer, then the heavier the later.

        Every process must run as many passes as the others, since sharded parameters are gathered in each; in
        this order the passes that run side by side are alike, and gradients are summed behind the longest one.
        """
        each = -(-len(self.packs) // processes)
        hands: list[list[PackPlan | None]] = [[] for _ in range(processes)]
        loads = [0.0] * processes
        for pack in sorted(self.packs, key=lambda pack: -pack.work):
            process = min((p for p in range(processes) if len(hands[p]) < each), key=loads.__getitem__)
            hands[process].append(pack)
            loads[process] += pack.work
        return [[*[None] * (each - len(hand)), *hand[::-1]] for hand in hands]


class Layout:
    """Packs of consecutive steps, in three flat arrays: `documents`, and where packs and steps end in them."""

    def __init__(self) -> None:
        self.documents, self.pack_ends, self.step_ends = array("i"), array("q", [0]), array("q", [0])

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.step_ends) - 1

    def append(self, packs: Sequence[Sequence[int]]) -> None:
        """Add a step."""
        for pack in packs:
            self.documents.extend(pack)
            self.pack_ends.append(len(self.documents))
        self.step_ends.append(len(self.pack_ends) - 1)

    def __getitem__(self, step: int) -> list[list[int]]:
        """Packs of a step: lists of document indices."""
        packs = range(self.step_ends[step], self.step_ends[step + 1])
        return [self.documents[self.pack_ends[p] : self.pack_ends[p + 1]].tolist() for p in packs]


def _fill(
    candidates: list[int], needs: list[int], works: list[float], budget: int, count: int
) -> tuple[list[list[int]], list[int]]:
    """Lay documents, in this order, into `count` packs: the least loaded with room. Returns packs and who waits."""
    packs: list[list[int]] = [[] for _ in range(count)]
    rooms, loads = [budget] * count, [(0.0, pack) for pack in range(count)]
    waiting, refused = [], budget + 1
    for document, need, work in zip(candidates, needs, works, strict=True):
        chosen = None
        if need < refused:  # rooms only shrink: what is as long as one that found none will find none
            chosen = next((at for at, (_, pack) in enumerate(loads) if rooms[pack] >= need), None)
        if chosen is None:
            waiting.append(document)
            refused = min(refused, need)
            continue
        load, pack = loads.pop(chosen)
        insort(loads, (load + work, pack))
        packs[pack].append(document)
        rooms[pack] -= need
    return [pack for pack in packs if pack], waiting


def lay_out(corpus: Corpus, order: np.ndarray, budget: int, packs_per_step: int) -> Layout:
    """Lay documents, in the order given, into steps of `packs_per_step` packs of at most `budget` tokens.

    A document that is longer than `budget` is alone in its pack. Every document is in exactly one.
    """
    needs_N = np.minimum(corpus.tokens_N, budget)
    drawn_N = np.concatenate(([0], needs_N[order].cumsum()))
    layout, at = Layout(), 0
    waiting: list[int] = []
    while waiting or at < len(order):
        missing = max(1, int(DRAWN * packs_per_step * budget)) - int(needs_N[waiting].sum())
        upto = at + int(np.searchsorted(drawn_N[at:], drawn_N[at] + max(0, missing)))
        fresh = order[at:upto]
        fresh = fresh[np.argsort(-corpus.work_N[fresh], kind="stable")]
        candidates = np.concatenate((np.array(waiting, dtype=order.dtype), fresh))
        packs, waiting = _fill(
            candidates.tolist(),
            needs_N[candidates].tolist(),
            corpus.work_N[candidates].tolist(),
            budget,
            packs_per_step,
        )
        layout.append(packs)
        at = min(upto, len(order))
    return layout


def plan_packs(corpus: Corpus, documents: Sequence[int], budget: int) -> list[list[int]]:
    """Packs of at most `budget` tokens that hold these documents nearly in this order."""
    layout = lay_out(corpus, np.array(documents, dtype=np.int64), budget, 1)
    return [pack for step in range(len(layout)) for pack in layout[step]]


class Plan:
    """The optimizer steps of a run: `len(plan)` of them, each `plan[step]`.

    Epochs are laid out when they are needed, and only the two last ones are kept: one that is read ahead
    may already be in the next epoch. All are counted at the start, since the schedule must know the last step.
    """

    def __init__(
        self,
        corpus: Corpus,
        documents: Sequence[int],
        *,
        budget: int,
        packs_per_step: int,
        seed: int,
        epochs: int,
        mixing: int | None = None,
        firsts: Sequence[int] = (0,),
    ) -> None:
        """Count the steps of all epochs.

        Args:
            mixing: documents mix over so many shards; None mixes all.
            firsts: the first document of every shard of the store.
        """
        self.corpus, self.documents = corpus, np.array(documents, dtype=np.int64)
        self.budget, self.packs_per_step, self.seed, self.epochs = budget, packs_per_step, seed, epochs
        self.mixing, self.firsts = mixing, np.array(firsts, dtype=np.int64)
        self._layouts: dict[int, Layout] = {}
        counts = [len(self.epoch(epoch)) for epoch in reversed(range(epochs))]  # ends with the one that is used first
        self._begins = np.concatenate(([0], np.cumsum(counts[::-1]))).tolist()

    @classmethod
    def of(cls, corpus: Corpus, documents: Sequence[int], trainer: TrainerConfig, firsts: Sequence[int]) -> Plan:
        """The plan of a run with these settings; `firsts` as in the constructor."""
        return cls(
            corpus,
            documents,
            budget=trainer.pack_tokens,
            packs_per_step=trainer.packs_per_step,
            seed=trainer.seed,
            epochs=trainer.epochs,
            mixing=trainer.shuffle_shards,
            firsts=firsts,
        )

    def epoch(self, epoch: int) -> Layout:
        """The layout of one epoch."""
        if epoch not in self._layouts:
            random = epoch_random(self.seed, epoch)
            if self.mixing is None:
                order_D = torch.randperm(len(self.documents), generator=random).numpy()
            else:
                turn_D = self._turns(self.documents, shard_order(len(self.firsts), random))
                drawn_D = torch.rand(len(self.documents), generator=random, dtype=torch.float64).numpy()
                order_D = np.argsort(turn_D + self.mixing * drawn_D, kind="stable")
            while len(self._layouts) > 1:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[epoch] = lay_out(self.corpus, self.documents[order_D], self.budget, self.packs_per_step)
        return self._layouts[epoch]

    def _turns(self, documents_D: np.ndarray, order: Sequence[int]) -> np.ndarray:
        return np.argsort(order)[np.searchsorted(self.firsts, documents_D, side="right") - 1]

    def turns(self, epoch: int, documents_D: np.ndarray) -> np.ndarray:
        """The turn of each document's shard in an epoch, int64 [D]."""
        return self._turns(documents_D, shard_order(len(self.firsts), epoch_random(self.seed, epoch)))

    def opening(self) -> tuple[list[int], int]:
        """Documents to look at before the first step, and of how many of the first shards they are all."""
        if self.mixing is None:
            return self.documents.tolist(), len(self.firsts)
        first_step = np.array([document for pack in self.epoch(0)[0] for document in pack])
        turn_D = self.turns(0, self.documents)
        count = max(min(self.mixing, len(self.firsts)), 1 + int(self.turns(0, first_step).max()))
        return self.documents[turn_D < count].tolist(), count

    def locate(self, step: int) -> tuple[int, int]:
        """The epoch of an optimizer step, and its number there."""
        epoch = bisect_right(self._begins, step) - 1
        return epoch, step - self._begins[epoch]

    def by_epoch(self, first: int) -> Iterator[tuple[int, range]]:
        """The steps from one on, epoch by epoch."""
        for epoch, (begin, end) in enumerate(zip(self._begins, self._begins[1:], strict=False)):
            if end > first:
                yield epoch, range(max(begin, first), end)

    def __len__(self) -> int:
        """Optimizer steps of all epochs."""
        return self._begins[-1]

    def __getitem__(self, step: int) -> StepPlan:
        """The optimizer step with this number, counted over all epochs from 0."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of a plan of {len(self)}")
        epoch, within = self.locate(step)
        packs = self.epoch(epoch)[within]
        everything = [document for pack in packs for document in pack]
        return StepPlan(
            [
                PackPlan(step * self.packs_per_step + index, pack, float(self.corpus.work_N[pack].sum()))
                for index, pack in enumerate(packs)
            ],
            int(self.corpus.tokens_N[everything].sum()),
            self.corpus.rows_NK[everything].sum(0).tolist(),
        )
