"""The unrolled objective: what a pack costs, and how well the head would draft on it.

The head is unrolled as it drafts, on its own outputs (training-time test, EAGLE-3, arXiv 2503.01840). Per unroll step
k the loss is the sum over supervised rows of a divergence (train/losses.py) of the head from the target on the draft
vocabulary, divided by the global number of such rows and weighted by step. The counts come from
the plan, so no process has to ask another.

Legend: T positions of a pack, F teacher positions, R rows of a step, H head hidden, P target hidden, D draft
vocabulary, V target vocabulary, K unroll steps, C positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from featurize.teacher import TopK
from models.drafts import DraftHead
from models.errors import Refused
from models.target import Target
from models.unroll import Step
from train.config import ObjectiveConfig
from train.losses import ChunkedLoss, sizes
from train.packs import Pack, supervised_rows


@dataclass(frozen=True)
class Outcome:
    """What a pack gave: the scaled loss (a scalar), the unscaled sums per step [K], and the rows behind them.

    Steps that supervise no row of the pack are missing in `steps`, and 0 in `sums_K`.
    """

    loss: torch.Tensor
    sums_K: torch.Tensor
    steps: list[Step]


class Objective(nn.Module):
    """A head with the frozen tensors of its target and the loss; what DDP wraps."""

    embedding_VH: torch.Tensor
    own_VP: torch.Tensor | None
    reduced_DP: torch.Tensor | None
    drafted_V: torch.Tensor

    def __init__(self, head: DraftHead, target: Target, settings: ObjectiveConfig, precision: str) -> None:
        super().__init__()
        self.head, self.settings = head, settings
        self.dtype = torch.bfloat16 if precision == "bf16" else None
        frozen = torch.float32 if precision == "fp32" else torch.bfloat16
        embedding_VH, teacher_VP = target.load_embedding(), target.load_lm_head()
        own_VP = None if torch.equal(embedding_VH, teacher_VP) else teacher_VP.to(frozen)  # tied: one tensor is both
        self.register_buffer("embedding_VH", embedding_VH.to(frozen), persistent=False)
        self.register_buffer("own_VP", own_VP, persistent=False)
        self.register_buffer("reduced_DP", self.teacher_VP[head.ids_D] if head.reduced else None, persistent=False)
        drafted_V = torch.zeros(len(self.teacher_VP), dtype=torch.bool).index_fill(0, head.ids_D.cpu(), True)
        self.register_buffer("drafted_V", drafted_V, persistent=False)

    @property
    def teacher_VP(self) -> torch.Tensor:
        """The target's lm_head."""
        return self.embedding_VH if self.own_VP is None else self.own_VP

    @property
    def teacher_DP(self) -> torch.Tensor:
        """Rows of the target's lm_head that belong to the draft vocabulary."""
        return self.teacher_VP if self.reduced_DP is None else self.reduced_DP

    @property
    def draft_DH(self) -> torch.Tensor:
        """The head's lm_head: its own, or the target's, which stays as it is."""
        return self.teacher_VP if self.head.lm_head is None else self.head.lm_head.weight

    @property
    def working(self) -> torch.dtype:
        """The dtype of the large products."""
        return self.dtype or next(self.head.parameters()).dtype

    def rows(self, pack: Pack, seed: int | None) -> list[torch.Tensor]:
        """Rows per step, int64 [R] ascending; with a seed, step k keeps about row_share ** k of them (nested)."""
        rows = [supervised_rows(pack.spans, step) for step in range(self.settings.unroll_steps)]
        if seed is not None and self.settings.row_share < 1:
            lottery_T = torch.rand(pack.tokens_T.numel(), generator=torch.Generator().manual_seed(seed))
            share = self.settings.row_share
            rows = [rows_R[lottery_T[rows_R] < share**step] for step, rows_R in enumerate(rows)]
        return [rows_R.to(pack.tokens_T.device) for rows_R in rows]

    def weights(self, pack: Pack, rows_R: torch.Tensor, step: int) -> torch.Tensor:
        """Weight of each row's loss at a step, float [R], before the division by the global row count."""
        settings, dtype = self.settings, next(self.head.parameters()).dtype
        weight = settings.weight(step) / settings.row_share**step
        weights_R = torch.full(rows_R.shape, weight, dtype=dtype, device=rows_R.device)
        if settings.out_of_vocabulary == "skip" and self.head.reduced:
            weights_R *= self.drafted_V[pack.tokens_T[rows_R + 2 + step]]
        return weights_R

    def unroll(self, pack: Pack, seed: int | None) -> list[Step]:
        """The head's steps over a pack, under autocast when training in bf16."""
        with torch.autocast(pack.tokens_T.device.type, torch.bfloat16, enabled=self.dtype is not None):
            planes = pack.aux_TAP.to(self.working)
            return self.head.unroll(pack.tokens_T, planes, pack.starts_T, self.rows(pack, seed), self.embedding_VH)

    def forward(self, pack: Pack | None, counts: Sequence[float], seed: int) -> Outcome:
        """Loss of one pack, given the global row counts of its optimizer step.

        A pack of None, or one without a supervised row, gives a zero that still reaches every parameter:
        every process runs the same number of backward passes, whatever its data.

        Args:
            counts: supervised rows per unroll step, over all packs of the optimizer step.
            seed: for `row_share`; a function of the pack's place in the plan, not of the process.
        """
        steps = self.unroll(pack, seed) if pack is not None else []
        if pack is None or not steps:
            zero = sum((parameter.sum() * 0 for parameter in self.parameters()), torch.zeros(()))
            return Outcome(zero, torch.zeros(self.settings.unroll_steps), [])
        loss, sums = ChunkedLoss.apply(
            self.draft_DH,
            self.teacher_DP if pack.top is None else None,
            pack.teachers,
            self.settings.loss,
            self.working,
            [pack.teacher_T[step.rows_R + 1 + k] for k, step in enumerate(steps)],
            [self.weights(pack, step.rows_R, k) / counts[k] for k, step in enumerate(steps)],
            *(step.hidden_RH for step in steps),
        )
        return Outcome(loss, nn.functional.pad(sums, (0, self.settings.unroll_steps - sums.numel())), steps)


@torch.no_grad()
def judge(objective: Objective, pack: Pack, steps: Sequence[Step]) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy hits and expected acceptances of unrolled rows, against the target's full vocabulary.

    A row that a step no longer supervises counts as not accepted there; a target token outside the draft
    vocabulary is a miss (docs/concepts.md). Of teachers that are kept as their likeliest draft tokens
    (featurize.teacher_k) hits are as exact, since the target's argmax is kept, too; acceptances count those tokens
    alone and are lower bounds, short of the whole by no more than the target's probability of the other draft tokens.

    Raises:
        Refused: a supervised row's acceptance is not a number: its features are not finite, or the head is not.

    Returns:
        hits_RK (1.0 where head and target have the same argmax) and accept_RK (sum over the vocabulary of
        min(p, q) at temperature 1); NaN where the row is not supervised. R are the rows of step 0.
    """
    head, dtype, device = objective.head, objective.working, pack.tokens_T.device
    teachers, chunk = pack.teachers, sizes(device).chunk
    shape = (steps[0].rows_R.numel(), len(steps))
    hits_RK, accept_RK = (torch.full(shape, torch.nan, device=device) for _ in range(2))
    for first in range(0, len(teachers), chunk):
        some = teachers[first : first + chunk]
        if isinstance(some, TopK):
            best_C, p_C, index_CS = some.best_F, some.log_p_FS.float().exp(), some.index_FS.long()
        else:
            logits_CV = (some.to(dtype) @ objective.teacher_VP.to(dtype).T).float()
            best_C, index_CS = logits_CV.argmax(-1), None
            p_C = (logits_CV - logits_CV.logsumexp(-1, keepdim=True))[:, head.ids_D].exp()
        for k, step in enumerate(steps):
            index_R = pack.teacher_T[step.rows_R + 1 + k]
            within = ((index_R >= first) & (index_R < first + chunk)).nonzero()[:, 0]
            if not within.numel():
                continue
            local = index_R[within] - first
            q_RD = (step.hidden_RH[within].to(dtype) @ objective.draft_DH.to(dtype).T).float()
            place = torch.searchsorted(steps[0].rows_R, step.rows_R[within])
            hits_RK[place, k] = (head.ids_D[q_RD.argmax(-1)] == best_C[local]).float()
            q_R = q_RD.softmax(-1) if index_CS is None else q_RD.softmax(-1).gather(-1, index_CS[local])
            accept_RK[place, k] = torch.minimum(p_C[local], q_R).sum(-1)
    hits_RK, accept_RK = hits_RK.cpu(), accept_RK.cpu()
    if (~accept_RK.isnan()).sum() != sum(step.rows_R.numel() for step in steps):
        raise Refused(
            f"documents {pack.documents} of the features, or the head on them, give values that are not finite"
        )
    return hits_RK, accept_RK


def simulated_al(accept_RK: torch.Tensor) -> float:
    """1 + mean over rows of sum_k prod_{j<=k} of hits or acceptances; unsupervised steps end a row's run."""
    return 1 + accept_RK.nan_to_num(0.0).cumprod(-1).sum(-1).mean().item()
