"""How much of the answers stands in the prompts already, which is what prompt lookup lives on.

BLEU-4 (Papineni et al., ACL 2002) of an answer against its prompt: the geometric mean of the shares of its 1-, 2-, 3-
and 4-grams that the prompt has, each counted no more often than the prompt has it, summed over a route's answers. Two
things differ from the scores of translations: tokens are the target's own, and there is no brevity penalty, because
an answer is not too short for being shorter than its prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

THRESHOLD = 0.6
"""Above about this overlap prompt lookup was faster than EAGLE at every batch size, below it slower."""

ORDER = 4


def _grams(ids: Sequence[int], length: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(ids[start : start + length]) for start in range(len(ids) - length + 1))


def overlap(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> float | None:
    """BLEU-4 of answers against their prompts, from (prompt's ids, answer's ids); None when no answer has a 4-gram."""
    shared, total = [0] * ORDER, [0] * ORDER
    for prompt, answer in pairs:
        for order in range(ORDER):
            ours = _grams(answer, order + 1)
            shared[order] += (ours & _grams(prompt, order + 1)).total()
            total[order] += ours.total()
    if not total[-1]:
        return None
    if not all(shared):
        return 0.0
    return math.exp(sum(math.log(mine / all_) for mine, all_ in zip(shared, total, strict=True)) / ORDER)
