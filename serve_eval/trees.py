"""Shapes of a draft: a chain, a fixed tree, or a tree that follows the head's confidence (EAGLE-2, arXiv 2406.16858).

A shape decides which nodes exist; a stepper says what may come next at a node. A fixed tree takes a fixed number
of children at each node, the best of them or drawn without replacement, and so may be sampled (verification.py). A
tree by confidence compares what it drew, so its children are always the best ones: a function of the text.

Legend: B requests, M nodes of a tree (its root included), Q nodes of one level, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from serve_eval.verification import Draft, Sampling


@dataclass(frozen=True)
class Verified:
    """Tokens that the target has just read and that belong to the text, and the token that follows each.

    Attributes:
        tokens_BQ, positions_BQ: target ids, consecutive positions. following_BQ: the token after each.
        aux_BQAH: the target's planes of these positions, of the layers that the drafter asked for.
        last_B: query index of each request's last one; what lies behind it is padding.
    """

    tokens_BQ: torch.Tensor
    following_BQ: torch.Tensor
    positions_BQ: torch.Tensor
    aux_BQAH: torch.Tensor
    last_B: torch.Tensor

    @property
    def newest_B(self) -> torch.Tensor:
        """Each request's newest token, which the target has not read yet."""
        return self.following_BQ.gather(1, self.last_B[:, None])[:, 0]

    @property
    def root_B(self) -> torch.Tensor:
        """Its position."""
        return self.positions_BQ.gather(1, self.last_B[:, None])[:, 0] + 1

    def keep(self, rows: torch.Tensor) -> Verified:
        """Only these requests."""
        parts = (self.tokens_BQ, self.following_BQ, self.positions_BQ, self.aux_BQAH, self.last_B)
        return Verified(*(part[rows] for part in parts))


class Stepper(Protocol):
    """A model that says what may follow: an EAGLE-3 head, a small language model. It serves one batch.

    Attributes:
        ids_D: target ids of what it can propose. aux_layers: planes of the target that it reads.
    """

    ids_D: torch.Tensor
    aux_layers: tuple[int, ...]

    def absorb(self, verified: Verified) -> torch.Tensor:
        """Take in verified tokens; logits [B, D] of the token after each request's newest, the root."""

    def extend(self, tokens_BQ: torch.Tensor, parents_BQ: torch.Tensor) -> torch.Tensor:
        """Read drafted nodes; logits [B, Q, D] of what follows each.

        Args:
            parents_BQ: their parents, as numbers among the nodes read since `absorb`; 0 is the root.
        """

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all requests but these."""


class Shape(Protocol):
    """Which nodes a draft has: how many, and how many children one may have."""

    @property
    def nodes(self) -> int:
        """Number of drafts."""

    @property
    def widest(self) -> int:
        """Most children of one node."""

    def grow(
        self, stepper: Stepper, verified: Verified, sampling: Sampling | None, generator: torch.Generator
    ) -> Draft:
        """Draft after the newest tokens: children drawn as `sampling` says, or the best ones when it is None."""


def draw(
    scores_BQD: torch.Tensor, count: int, sampling: Sampling | None, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`count` different draft ids [B, Q, count] for each node, from its logits.

    Dividing probabilities by independent exponentials and sorting is drawing without replacement, in order.

    Returns:
        the ids; which of them exist, for q may have fewer tokens; q [B, Q, D], or None without sampling.
    """
    if sampling is None:
        best = scores_BQD.topk(count).indices
        return best, torch.ones_like(best, dtype=torch.bool), None
    q_BQD = sampling.distribution(scores_BQD.flatten(0, 1)).view_as(scores_BQD)
    drawn = (q_BQD / torch.empty_like(q_BQD).exponential_(generator=generator)).topk(count)
    return drawn.indices, drawn.values > 0, q_BQD


@dataclass(frozen=True)
class StaticTree:
    """A fixed tree. `parents` are those of nodes 1, 2, ..., level by level, children of a node side by side."""

    parents: tuple[int, ...]

    @classmethod
    def chain(cls, k: int) -> StaticTree:
        """k tokens, one after another."""
        return cls(tuple(range(k)))

    @classmethod
    def of_paths(cls, paths: Sequence[Sequence[int]]) -> StaticTree:
        """The tree whose nodes are reached by these paths of ranks: [0] is the best child of the root."""
        ordered = sorted(map(tuple, paths), key=lambda path: (len(path), path))
        numbers = {path: number for number, path in enumerate([(), *ordered])}
        return cls(tuple(numbers[path[:-1]] for path in ordered))

    def children(self, node: int) -> list[int]:
        """The node's children, in order of rank."""
        return [number for number, parent in enumerate(self.parents, 1) if parent == node]

    def path(self, node: int) -> tuple[int, ...]:
        """The ranks that lead from the root to a node."""
        if node == 0:
            return ()
        parent = self.parents[node - 1]
        return (*self.path(parent), self.children(parent).index(node))

    @property
    def nodes(self) -> int:
        """Number of drafts."""
        return len(self.parents)

    @property
    def widest(self) -> int:
        """Most children of one node."""
        return max(self.parents.count(node) for node in self.parents)

    def grow(
        self, stepper: Stepper, verified: Verified, sampling: Sampling | None, generator: torch.Generator
    ) -> Draft:
        """See `Shape`."""
        scores_BQD = stepper.absorb(verified)[:, None]
        nodes, newest_B = 1 + len(self.parents), verified.newest_B
        tokens_BM = newest_B[:, None].repeat(1, nodes)
        parents_BM = torch.full_like(tokens_BM, -1)
        q_BMD = None if sampling is None else scores_BQD.new_zeros(len(newest_B), nodes, scores_BQD.shape[2])
        level, numbers = [0], {0: 0}  # nodes whose children are next; the stepper's number of each node it has read
        while True:
            widest = max(len(self.children(node)) for node in level)
            drawn_BQm, exists_BQm, q_BQD = draw(scores_BQD, widest, sampling, generator)
            below = []
            for place, node in enumerate(level):
                for rank, child in enumerate(self.children(node)):
                    tokens_BM[:, child] = stepper.ids_D[drawn_BQm[:, place, rank]]
                    parents_BM[:, child] = exists_BQm[:, place, rank] * (node + 1) - 1
                    below.append(child)
                if q_BMD is not None and q_BQD is not None:
                    q_BMD[:, node] = q_BQD[:, place]
            level = [node for node in below if self.children(node)]
            if not level:
                return Draft(tokens_BM, parents_BM, q_BMD, stepper.ids_D)
            of_Q = torch.tensor([numbers[self.parents[node - 1]] for node in level], device=newest_B.device)
            scores_BQD = stepper.extend(tokens_BM[:, level], of_Q.expand(len(newest_B), -1))
            numbers |= {node: len(numbers) + index for index, node in enumerate(level)}


@dataclass(frozen=True)
class DynamicTree:
    """The `nodes` drafts that are likeliest by the head's own account, found level by level.

    Each of `depth` levels takes the `width` best children of the `width` best nodes of the level above; of all
    that were looked at, the `nodes` with the highest product of probabilities along their path stay. A path is
    never likelier than its beginning, so they are a tree, and its nodes are numbered by their likelihood: the
    first n of them are the tree of n nodes.
    """

    depth: int
    width: int
    nodes: int

    @property
    def widest(self) -> int:
        """Most children of one node."""
        return self.width

    def grow(
        self, stepper: Stepper, verified: Verified, sampling: Sampling | None, generator: torch.Generator
    ) -> Draft:
        """See `Shape`; `sampling` must be None."""
        assert sampling is None, "children that are chosen by what was drawn are not drawn from q"
        width = self.width
        best = stepper.absorb(verified).log_softmax(-1).topk(width)
        value_BQ, token_BQ = best.values, stepper.ids_D[best.indices]
        batch, device = len(token_BQ), token_BQ.device
        number_BQ = torch.arange(1, width + 1, device=device).expand(batch, -1)  # of the level, in `pool`
        read_BQ = torch.zeros_like(token_BQ)  # the stepper's numbers of the level's parents
        pool = [(value_BQ, token_BQ, torch.zeros_like(token_BQ))]
        for level in range(1, self.depth):
            scores_BQD = stepper.extend(token_BQ, read_BQ).log_softmax(-1)
            best = scores_BQD.topk(width)
            values_BC = (value_BQ[:, :, None] + best.values).flatten(1)
            tokens_BC = stepper.ids_D[best.indices].flatten(1)
            pool.append((values_BC, tokens_BC, number_BQ.repeat_interleave(width, 1)))
            # Of a level's width * width candidates the best are read next.
            value_BQ, chosen_BQ = values_BC.topk(width)
            token_BQ = tokens_BC.gather(1, chosen_BQ)
            number_BQ = 1 + width + (level - 1) * width * width + chosen_BQ
            read_BQ = 1 + (level - 1) * width + chosen_BQ // width
        values_BP, tokens_BP, parents_BP = (torch.cat(parts, 1) for parts in zip(*pool, strict=True))
        # Stable: of a parent and a child that is certain, the parent stays in front.
        order_BP = values_BP.sort(dim=1, descending=True, stable=True).indices
        rank_BP = 1 + order_BP.argsort(1)
        rank_BP = torch.cat((torch.zeros_like(rank_BP[:, :1]), rank_BP), 1)  # the root is number 0 in both
        kept_BM = order_BP[:, : self.nodes]
        parents_BM = rank_BP.gather(1, parents_BP.gather(1, kept_BM))
        root_B1 = verified.newest_B[:, None]
        return Draft(
            torch.cat((root_B1, tokens_BP.gather(1, kept_BM)), 1),
            torch.cat((torch.full_like(root_B1, -1), parents_BM), 1),
        )
