"""Which drafts the target accepts, so that what is emitted has the target's distribution, whatever was drafted.

One round (Leviathan et al., arXiv 2211.17192). Let p be the target's distribution of the next token and let x be
drawn from q. Accept x with probability min(1, p(x) / q(x)); otherwise draw from the rest r = norm(max(p - q, 0)).
Token v is emitted with probability

    q(v) min(1, p(v) / q(v)) + (1 - sum_u min(p(u), q(u))) r(v) = min(p(v), q(v)) + max(p(v) - q(v), 0) = p(v),

because the total of max(p - q, 0) is 1 - sum_u min(p(u), q(u)). This needs q to be the distribution that x was
drawn from, and nothing else of q: a reduced draft vocabulary is a q that is zero elsewhere.

A tree (SpecInfer, arXiv 2305.09781; without replacement, EAGLE, arXiv 2401.15077). The children x1, x2, ... of a
node are drawn one after another without replacement: x_i from q_i, which is q without x1 .. x_{i-1}, normalised.
Try them in this order with p_1 = p. Round i emits p_i by the lemma above: it accepts x_i, or hands on p_{i+1} =
norm(max(p_i - q_i, 0)). That the round hands on depends on x_i, but p_{i+1} does not; and given x1 .. x_i, the
next child is drawn from q_{i+1} and tested against p_{i+1}, so the same lemma makes the later rounds emit p_{i+1},
for every x_i. By induction from the last round, which draws from what is left, round 1 emits p. An accepted
child's own children were drawn without looking at any of this, so the argument starts again at the child.

Drafts that are a function of the text alone (the head's best tokens, a tree chosen by confidence, prompt lookup)
are this with q_i all on x_i: accept with probability p_i(x_i), else take x_i out of p_i. Greedy decoding is this
with p all on the target's best token: a draft is accepted if and only if it is that token. So there is one rule.
A selection among drawn children by what was drawn would break it, and the configuration refuses that.

Legend: B requests, M nodes of a draft tree, V / D full and draft vocabulary, R some of the requests, L tokens
emitted by the longest path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How a next token is drawn from logits: temperature, then top-k, then top-p, as engines do; 0 is greedy.

    Attributes:
        top_p: the smallest set of likeliest tokens with at least this mass. top_k: so many likeliest; 0 for all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def distribution(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Probabilities [R, V]; all on the first of the best tokens when greedy."""
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        if self.temperature == 0:
            best_R1 = logits_RV.argmax(-1, keepdim=True)
            return torch.zeros_like(logits_RV).scatter_(1, best_R1, 1.0)
        no_ids = torch.empty(0, dtype=torch.int64)
        logits_RV = TemperatureLogitsWarper(self.temperature)(no_ids, logits_RV)
        if self.top_k:
            logits_RV = TopKLogitsWarper(self.top_k)(no_ids, logits_RV)
        if self.top_p < 1:
            logits_RV = TopPLogitsWarper(self.top_p)(no_ids, logits_RV)
        return logits_RV.softmax(-1)

    def draw(self, p_RV: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """One token [R] from each distribution."""
        return p_RV.argmax(-1) if self.temperature == 0 else torch.multinomial(p_RV, 1, generator=generator)[:, 0]


GREEDY = Sampling()


@dataclass(frozen=True)
class Draft:
    """Trees of drafted tokens, one per request.

    Nodes come after their parents, and a node's children in the order in which they were drawn (or from the
    best on). Node 0 is the request's newest token, which the target has not read yet.

    Attributes:
        tokens_BM: target ids. parents_BM: index of each node's parent; -1 for node 0 and for empty places.
        q_BMD: the distribution that each node's children were drawn from, without replacement; None when the
            drafts are a function of the text.
        ids_D: target ids of the columns of q; there where q is.
    """

    tokens_BM: torch.Tensor
    parents_BM: torch.Tensor
    q_BMD: torch.Tensor | None = None
    ids_D: torch.Tensor | None = None

    @classmethod
    def nothing(cls, newest_B: torch.Tensor) -> Draft:
        """Only the newest tokens."""
        return cls(newest_B[:, None], torch.full_like(newest_B[:, None], -1))


@dataclass(frozen=True)
class Verdict:
    """What the target made of a draft.

    Attributes:
        accepted_B: number of accepted drafts. straight_B: how many of them, from the first on, were the first
            child of their parent: what a chain would have had accepted.
        path_BL: nodes that were passed, from node 0 to the last accepted one; padding behind it.
        emitted_BL: accepted drafts and the target's own next token; padding behind it.
        entropy_BL: entropy in nats of the target's distribution (at temperature 1, no token excluded) that each
            of them is from.
    """

    accepted_B: torch.Tensor
    straight_B: torch.Tensor
    path_BL: torch.Tensor
    emitted_BL: torch.Tensor
    entropy_BL: torch.Tensor


def accepts(p_R: torch.Tensor, q_R: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """Whether a draft of probability q is accepted where the target gives it p: with probability min(1, p / q)."""
    return uniform_R * q_R < p_R


def rest(p_RV: torch.Tensor, q_RV: torch.Tensor) -> torch.Tensor:
    """max(p - q, 0), not normalised [R, V]: what a rejection leaves to be emitted."""
    return (p_RV - q_RV).clamp(min=0)


def normalised(weights_RV: torch.Tensor) -> torch.Tensor:
    """Weights as probabilities; all zero where they are all zero."""
    return weights_RV / weights_RV.sum(-1, keepdim=True).clamp(min=torch.finfo(weights_RV.dtype).tiny)


def verify(draft: Draft, logits_BMV: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> Verdict:
    """Walk from the root to the last accepted draft of each request, and draw one token more there.

    One pass over the nodes is enough: a node's children and its later siblings all come after it.

    Args:
        logits_BMV: the target's at every node.
    """
    tokens_BM, parents_BM, device = draft.tokens_BM, draft.parents_BM, logits_BMV.device
    batch, nodes, vocabulary = logits_BMV.shape
    at_B, accepted_B, straight_B, tried_B = (torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(4))
    path_BM = torch.arange(nodes, device=device).repeat(batch, 1)
    entropy_BM = logits_BMV.new_zeros(batch, nodes)
    p_BV = logits_BMV.new_empty(batch, vocabulary)
    q_BV = torch.zeros_like(p_BV) if draft.q_BMD is not None else None

    def arrive(rows_R: torch.Tensor, node: int) -> None:
        logits_RV = logits_BMV[rows_R, node]
        p_BV[rows_R] = sampling.distribution(logits_RV)
        entropy_BM[rows_R, accepted_B[rows_R]] = torch.special.entr(logits_RV.softmax(-1)).sum(-1)
        if q_BV is not None and draft.q_BMD is not None and draft.ids_D is not None:
            q_RD = draft.q_BMD[rows_R, node]
            q_BV[rows_R] = q_BV.new_zeros(len(rows_R), vocabulary).index_copy_(1, draft.ids_D, q_RD)
        at_B[rows_R], tried_B[rows_R] = node, 0

    arrive(torch.arange(batch, device=device), 0)
    for node in range(1, nodes):
        rows_R = (parents_BM[:, node] == at_B).nonzero()[:, 0]
        if not len(rows_R):
            continue
        p_RV, token_R1 = p_BV[rows_R], tokens_BM[rows_R, node, None]
        q_RV = torch.zeros_like(p_RV).scatter_(1, token_R1, 1.0) if q_BV is None else q_BV[rows_R]
        left_RV = rest(p_RV, q_RV)
        uniform_R = torch.rand(len(rows_R), device=device, generator=generator)
        accepted_R = accepts(p_RV.gather(1, token_R1)[:, 0], q_RV.gather(1, token_R1)[:, 0], uniform_R)
        # Nothing is left only where p = q, up to rounding: then every draft is accepted.
        accepted_R |= left_RV.sum(-1) == 0
        stayed_R, moved_R = rows_R[~accepted_R], rows_R[accepted_R]
        p_BV[stayed_R] = normalised(left_RV[~accepted_R])
        if q_BV is not None:
            q_BV[stayed_R] = normalised(q_RV[~accepted_R].scatter(1, token_R1[~accepted_R], 0.0))
        straight_B[moved_R] += (straight_B[moved_R] == accepted_B[moved_R]) & (tried_B[moved_R] == 0)
        accepted_B[moved_R] += 1
        path_BM[moved_R, accepted_B[moved_R]] = node
        tried_B[stayed_R] += 1
        if len(moved_R):
            arrive(moved_R, node)

    longest = int(accepted_B.max()) + 1
    path_BL = path_BM[:, :longest]
    next_B1 = sampling.draw(p_BV, generator)[:, None]
    emitted_BL = tokens_BM.gather(1, path_BL).roll(-1, 1).scatter(1, accepted_B[:, None], next_B1)
    return Verdict(accepted_B, straight_B, path_BL, emitted_BL, entropy_BM[:, :longest])
