"""What drafting rounds say: acceptance length by position, request and route, and what less drafting would give.

One pass with k drafts, or with a tree, tells what every smaller k and tree is worth: a round that accepted a path
would have accepted its part within the smaller draft, for a node is accepted or not whatever comes after it. These
are estimates, since with other drafts the rounds would have begun at other tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from serve_eval.decoder import Answer, Round
from serve_eval.prompts import by_route
from serve_eval.trees import Shape, StaticTree


def acceptance(rounds: Iterable[int | None], k: int) -> dict[str, Any]:
    """AL and unconditional per-position acceptance of drafting rounds, given the accepted drafts of each.

    A round without drafts (None) is none, as in the servers. AL is None without a round: nothing was measured.
    """
    counts = [accepted for accepted in rounds if accepted is not None]
    if not counts:
        return {"al": None, "per_position": [], "rounds": 0}
    per_position = [sum(accepted > i for accepted in counts) / len(counts) for i in range(k)]
    return {"al": 1 + sum(counts) / len(counts), "per_position": per_position, "rounds": len(counts)}


def rounds_within(accepted: Sequence[int | None], max_new_tokens: int) -> list[int | None]:
    """The rounds of an answer cut at `max_new_tokens`, given those of a longer one."""
    tokens, kept = 1, []  # the first token comes from reading the prompt
    for count in accepted:
        if tokens >= max_new_tokens:
            break
        kept.append(count)
        tokens += (count or 0) + 1
    return kept


def best_k(per_position: Sequence[float], verify_ms: Sequence[float], draft_ms: Sequence[float]) -> int:
    """The k with most tokens per second for one user: (1 + sum of acceptances) / (verification + drafting).

    Args:
        per_position: a_1 .. a_K. verify_ms: of 1 .. K + 1 tokens. draft_ms: of 1 .. K tokens.
    """
    if not per_position:
        return 1
    rates = [(1 + sum(per_position[:k])) / (verify_ms[k] + draft_ms[k - 1]) for k in range(1, len(per_position) + 1)]
    return 1 + rates.index(max(rates))


def growing(shares: Sequence[float], shape: Shape) -> list[int]:
    """The nodes of a shape from the most worth having on; the first n of them are a tree of n nodes.

    Args:
        shares: of the rounds whose accepted path holds node 1, 2, ...
    """
    if not isinstance(shape, StaticTree):
        return list(range(1, len(shares) + 1))  # numbered by likelihood
    chosen: list[int] = []
    before = {}  # what must be there before a node is: the sibling of the rank above, or the parent
    for node, parent in enumerate(shape.parents, 1):
        older = [sibling for sibling in shape.children(parent) if sibling < node]
        before[node] = older[-1] if older else parent
    while len(chosen) < len(before):
        free = [node for node, needed in before.items() if node not in chosen and needed in (0, *chosen)]
        chosen.append(max(free, key=lambda node: shares[node - 1]))
    return chosen


def _within(rounds: Sequence[Round], shape: Shape) -> dict[str, Any]:
    """AL of every smaller tree of a shape."""
    shares = [sum(node in each.path for each in rounds) / len(rounds) for node in range(1, shape.nodes + 1)]
    order = growing(shares, shape)
    als = [1 + sum(shares[node - 1] for node in order[:size]) for size in range(1, shape.nodes + 1)]
    names = {"tree": [list(shape.path(node)) for node in order]} if isinstance(shape, StaticTree) else {}
    return {"al_by_nodes": als} | names


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Extremes and deciles (nearest rank) of some values; None of none."""
    ordered = sorted(values)
    places = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
    return {name: ordered[round(share * (len(ordered) - 1))] for name, share in places.items()} if ordered else None


def _figures(answers: Sequence[Answer], k: int, shape: Shape | None) -> dict[str, Any]:
    rounds = [each for answer in answers for each in answer.rounds if each is not None]
    entropies = [entropy for answer in answers for entropy in answer.entropies]
    als = [acceptance(answer.accepted, k)["al"] for answer in answers]
    straight = acceptance((each.straight for each in rounds), k)["per_position"]
    return {
        **acceptance((len(each.path) for each in rounds), k),
        "tokens": sum(len(answer.ids) for answer in answers),
        "entropy": sum(entropies) / len(entropies) if entropies else None,
        "al_by_request": _spread([al for al in als if al is not None]),
        "al_by_k": [1 + sum(straight[: each + 1]) for each in range(len(straight))],
        **(_within(rounds, shape) if shape is not None and rounds else {}),
    }


def figures(answers: Sequence[Answer], k: int, shape: Shape | None = None) -> dict[str, Any]:
    """Everything about some answers, pooled and by route.

    Args:
        k: length of the chain, or depth of the tree. shape: of the tree; None for a chain.

    Returns:
        `al`, `per_position`, `rounds`; `tokens`; `entropy` of the target's distribution, mean over tokens, in nats;
        `al_by_request` (min, p10, p50, p90, max); `al_by_k`, the AL of chains of 1 .. k drafts; of a tree,
        `al_by_nodes`, the AL of trees of 1, 2, ... drafts, and of a static one `tree`, the paths in the order in which
        those trees take them. And `routes`: all of it by route.
    """
    by_name: dict[str, list[Answer]] = {route: [] for route in by_route([answer.prompt for answer in answers])}
    for answer in answers:
        by_name[answer.prompt.route].append(answer)
    routes = {route: _figures(group, k, shape) for route, group in by_name.items()}
    return _figures(answers, k, shape) | {"routes": routes}
