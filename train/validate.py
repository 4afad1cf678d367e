"""Simulated acceptance length on held-out conversations (docs/concepts.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from featurize.store import FeatureStore
from train.objective import Objective, judge, simulated_al
from train.packs import read_ahead


@dataclass(frozen=True)
class Verdict:
    """What a head would do on held-out rows.

    Attributes:
        greedy, sampled: simulated AL by argmax hits, and by expected acceptance at temperature 1.
        accuracy: share of greedy hits per unroll step, over the rows that the step supervises; None without any.
    """

    greedy: float
    sampled: float
    accuracy: list[float | None]


@torch.no_grad()
def validate(objective: Objective, store: FeatureStore, packs: list[list[int]], accelerator: Any) -> Verdict:
    """Judge the head on `packs`, shared among the processes; every process must call it, and gets the whole verdict.

    Args:
        packs: document indices of each.

    Raises:
        Refused: features, or the head on them, are not finite.
    """
    steps_K = objective.settings.unroll_steps
    hit_sums, row_sums = torch.zeros(steps_K, dtype=torch.float64), torch.zeros(steps_K, dtype=torch.float64)
    runs = torch.zeros(2, dtype=torch.float64)
    for pack in read_ahead(store, packs[accelerator.process_index :: accelerator.num_processes]):
        assert pack is not None
        on_device = pack.to(accelerator.device)
        steps = objective.unroll(on_device, None)
        if not steps:
            continue
        hits_RK, accept_RK = judge(objective, on_device, steps)
        hit_sums[: len(steps)] += hits_RK.nansum(0)
        row_sums[: len(steps)] += (~hits_RK.isnan()).sum(0)
        lengths = [(simulated_al(each) - 1) * len(hits_RK) for each in (hits_RK, accept_RK)]
        runs += torch.tensor(lengths, dtype=torch.float64)
    if accelerator.num_processes > 1:
        # float64 sums do not exist on every device; float32 counts are exact to 16 million rows.
        whole = torch.cat((hit_sums, row_sums, runs)).float().to(accelerator.device)
        whole = accelerator.reduce(whole, "sum").double().cpu()
        hit_sums, row_sums, runs = whole[:steps_K], whole[steps_K:-2], whole[-2:]
    greedy, sampled = (1 + runs / row_sums[0].clamp(min=1)).tolist()
    accuracy = [hits / n if n else None for hits, n in zip(hit_sums.tolist(), row_sums.tolist(), strict=True)]
    return Verdict(greedy, sampled, accuracy)
