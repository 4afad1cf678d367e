"""The draft vocabulary: the subset of the target's vocabulary that the head can propose.

`d2t` holds offsets, as both engines read it: target id = draft id + d2t[draft id]. `t2d` marks the
chosen target ids. A head over the full vocabulary has no map at all.
"""

from __future__ import annotations

import torch

from models.errors import Refused


def choose_draft_vocabulary(counts_V: torch.Tensor, size: int | None) -> torch.Tensor | None:
    """The `size` most frequent target ids, ascending, int64 [D]; None when the vocabulary is not reduced.

    Ties go to the lowest id, and ids that never occurred pad the set, lowest first, to its exact size.

    Args:
        counts_V: int64, how often each target id occurs.
        size: D; null, or the target's own size, does not reduce.

    Raises:
        Refused: `size` is larger than the vocabulary or not positive.
    """
    vocab_size = counts_V.numel()
    if size is None or size == vocab_size:
        return None
    if not 0 < size < vocab_size:
        raise Refused(f"draft.vocab_size={size} must be between 1 and the target's vocabulary of {vocab_size}")
    order = torch.sort(counts_V, descending=True, stable=True).indices
    return order[:size].sort().values


def maps(ids_D: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`d2t` (int64 offsets, [D]) and `t2d` (bool, [V]) of a draft vocabulary, int64 ids [D] in ascending order."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids_D] = True
    return ids_D - torch.arange(ids_D.numel()), t2d


def ids_from_offsets(d2t_D: torch.Tensor) -> torch.Tensor:
    """Target ids [D] of a draft vocabulary from its offsets [D], int64 both."""
    return d2t_D + torch.arange(d2t_D.numel(), device=d2t_D.device)
