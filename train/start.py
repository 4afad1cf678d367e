"""Where training starts: the best linear head, found by least squares instead of by hundreds of steps.

A head as `initialise` leaves it attends to itself and its MLP is nearly silent, so unroll step k computes

    h_k = f_k + M x_k,   x_k = [norm(embedding of token t+1+k), norm(f_k)],   f_0 = fc(planes of t),  f_k = h_{k-1}

with M = o_proj v_proj of rank at most G * E. lm_head and norm are the target's, so h_k proposes exactly what the
target says when it has the direction of u_k = final[t+1+k] / (weight of the target's norm). Both parts are
therefore regressions on a sample of rows: fc (with the embedding as a second regressor, so that it need not
explain what M will) on u_0, then M on what is left over all steps together, truncated to its rank where that
costs least (reduced-rank regression, Izenman 1975), the features of later steps being those that M itself gives.
Last, one number scales norm so that the logits are as sure as they are right.

A head without fc has its feature given, and only the second regression. A new MTP head has one projection of both
inputs, h_k = W x_k with f_k = norm(h_{k-1}), and so one regression, of W on u_k over all steps.

On the demo's data this starts at a KL where plain training stands after 150 optimizer steps.

Legend: R rows, P = H hidden, W regressors, S rank of M, K steps of the fit, G groups and M heads per group of the
attention, E head size, D draft vocabulary, F teacher positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding, rms_norm

from featurize.store import FeatureStore
from models.checkpoint import differing_options, differing_target, load_head
from models.drafts import DraftHead, HeadConfig
from models.eagle3 import Attention, Eagle3Head
from models.errors import Refused
from models.mtp import MtpHead
from train.objective import Objective
from train.packs import Pack, supervised_rows
from train.plan import Corpus

STEPS = 3
"""Unroll steps that M is fitted to; later ones resemble the last."""
SWEEPS = 3
"""Each takes the features of later steps from the M before it."""
RIDGE = 0.01
"""Of each regressor's own variance: the units of a channel do not matter."""
ROWS_PER_REGRESSOR = 16
TOKENS_PER_ROW = 4
"""Tokens that may be read for each row that is wanted, where rows are rare."""
STRETCHES = 8
"""Places of the store that the sample comes from: each opens few shards, which are checked as a whole."""
ROWS_AT_ONCE = 16384
"""Most rows of a pack that are looked at; they are held in fp32, planes and all."""
SAMPLE = 64
"""Training documents whose planes set the scale of the head's start values."""
SAMPLE_POSITIONS = 512
"""Most positions of each, evenly spaced, since documents may be long."""


def load_start(directory: Path, config: HeadConfig, target: dict[str, str]) -> DraftHead:
    """The head of a checkpoint, to be trained on; its draft vocabulary and norm epsilon are its own.

    Args:
        config: the head that the run asks for. target: as `describe` tells it.

    Raises:
        Refused: there is none, or it is for another target or of another shape.
    """
    head, made_for = load_head(directory)
    if told := differing_target(made_for, target):
        raise Refused(f"trainer.init_from={directory} was trained for another target than target.path ({told})")
    if options := differing_options(config, head.config):
        raise Refused(f"trainer.init_from={directory} holds a head of another shape; give {' '.join(options)}")
    return head


def rows_wanted(config: HeadConfig) -> int:
    """How many rows the regressions should see."""
    return ROWS_PER_REGRESSOR * (len(config.planes) * config.target_hidden_size + config.hidden_size)


def sample(config: HeadConfig, corpus: Corpus, documents: Sequence[int]) -> list[int]:
    """Documents with about as many rows as the regressions should see, from a few stretches of `documents`.

    One process reads them while the others wait, so their number is bounded however few rows they have.
    """
    wanted, step = rows_wanted(config) / STRETCHES, min(STEPS, corpus.rows_NK.shape[1]) - 1
    chosen: list[int] = []
    for stretch in np.array_split(np.array(documents, dtype=np.int64), STRETCHES):
        rows, tokens = corpus.rows_NK[stretch, step].cumsum(), corpus.tokens_N[stretch].cumsum()
        before = np.searchsorted(rows, wanted), np.searchsorted(tokens, TOKENS_PER_ROW * wanted)
        chosen += stretch[: int(min(before)) + 1].tolist()
    return chosen


def sample_planes(store: FeatureStore, documents: Sequence[int]) -> torch.Tensor:
    """Planes [T, A, P], those that the head reads, of some positions of the first documents."""
    planes = (store.read(index).aux for index in documents[:SAMPLE])
    return torch.cat([aux_TAP[:: -(-len(aux_TAP) // SAMPLE_POSITIONS)] for aux_TAP in planes])


@dataclass(frozen=True)
class Rows:
    """Rows of a pack that all K steps of the fit supervise.

    Attributes:
        planes_RW: what fc reads, or the feature. embedded_KRH: normed embeddings of the fed tokens. wanted_KRH: u_k, of
            RMS 1.
    """

    planes_RW: torch.Tensor
    embedded_KRH: torch.Tensor
    wanted_KRH: torch.Tensor

    @classmethod
    def of(cls, objective: Objective, pack: Pack) -> Rows:
        """Read from a pack, in the precision of the head's weights."""
        head, steps = objective.head, min(STEPS, objective.settings.unroll_steps)
        like, rows_R = output_norm(head).weight, supervised_rows(pack.spans, steps - 1).to(pack.tokens_T.device)
        rows_R = rows_R[:: -(-len(rows_R) // ROWS_AT_ONCE) or 1]
        following_KR = torch.stack([rows_R + 1 + k for k in range(steps)])
        embedded_KRH = embedding(pack.tokens_T[following_KR], objective.embedding_VH).to(like)
        final_KRH = pack.final_FP[pack.teacher_T[following_KR]].to(like)
        # A channel that the target's norm silences says nothing of the direction before it.
        direction_KRH = torch.where(like == 0, 0, final_KRH / like)
        planes_RAP = pack.aux_TAP[rows_R].to(like)
        return cls(
            head.planes(planes_RAP) if isinstance(head, Eagle3Head) else head.fuse(planes_RAP),
            input_norm(head)(embedded_KRH),
            rms_norm(direction_KRH, direction_KRH.shape[-1:], eps=head.config.rms_norm_eps),
        )


def input_norm(head: DraftHead) -> Any:
    """The norm of the fed tokens' embeddings."""
    return head.midlayer.input_layernorm if isinstance(head, Eagle3Head) else head.embedding_norm


def output_norm(head: DraftHead) -> Any:
    """The norm before the lm_head."""
    return head.norm if isinstance(head, Eagle3Head) else head.final_norm


class Regression:
    """Ridge regression from sums over rows."""

    def __init__(self, regressors: int, outputs: int, like: torch.Tensor) -> None:
        self.gram_WW, self.cross_WH = like.new_zeros(regressors, regressors), like.new_zeros(regressors, outputs)

    def add(self, x_RW: torch.Tensor, y_RH: torch.Tensor, weight: float = 1.0) -> None:
        """Take in rows."""
        self.gram_WW.addmm_(x_RW.T, x_RW, alpha=weight)
        self.cross_WH.addmm_(x_RW.T, y_RH, alpha=weight)

    def solve(self) -> torch.Tensor:
        """The map [W, H].

        Raises:
            Refused: the rows held values that are not finite.
        """
        if not (self.gram_WW.isfinite().all() and self.cross_WH.isfinite().all()):
            raise Refused("the features that the start values are fitted to hold values that are not finite")
        scale_W = self.gram_WW.diagonal().clamp(min=torch.finfo(self.gram_WW.dtype).tiny).rsqrt()
        correlation_WW = scale_W[:, None] * self.gram_WW * scale_W
        correlation_WW.diagonal().add_(RIDGE)
        factor_WW = torch.linalg.cholesky(correlation_WW)
        return scale_W[:, None] * torch.cholesky_solve(scale_W[:, None] * self.cross_WH, factor_WW)

    def solve_truncated(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The best map of a rank at most, as [W, S] @ [S, H]: the whole one, projected on what it varies most in."""
        whole_WH = self.solve()
        energy_H, directions_HH = torch.linalg.eigh(whole_WH.T @ self.gram_WW @ whole_WH)
        rank = min(rank, len(energy_H))
        scale_S = (energy_H[-rank:] / energy_H[-1]).clamp(min=1e-6) ** 0.25  # halves between the two factors
        directions_HS = directions_HH[:, -rank:]
        return whole_WH @ (directions_HS / scale_S), (directions_HS * scale_S).T


@torch.no_grad()
def fit_start(objective: Objective, packs: Callable[[], Iterable[Pack]]) -> None:
    """Give fc, v_proj, o_proj and norm of a head that `initialise` has made their least-squares values, in place; of an
    MTP head the projection and the last norm.

    Does nothing for a head of another width than its target's, which has no output space to regress on, nor where
    no row is supervised at all steps.

    Args:
        packs: gives the same packs, on the head's device, each time: they are read once per sweep, never held.
    """
    head, config = objective.head, objective.head.config
    if config.hidden_size != config.target_hidden_size:
        return
    hidden, norm = config.hidden_size, output_norm(head)
    with_rows = next((pack for pack in packs() if len(Rows.of(objective, pack).planes_RW)), None)
    if with_rows is None:
        return
    map_WH = norm.weight.new_zeros(2 * hidden, hidden)
    if not isinstance(head, Eagle3Head):
        for sweep in range(SWEEPS):
            projection = Regression(2 * hidden, hidden, map_WH)
            for rows in (Rows.of(objective, pack) for pack in packs()):
                add_projected(projection, objective, rows, map_WH if sweep else None)
            map_WH = projection.solve()
        head.input_proj.weight.copy_(map_WH.T)
        calibrate(objective, with_rows)
        return
    if isinstance(head.fc, torch.nn.Linear):
        width = head.fc.in_features
        features = Regression(width + hidden, hidden, map_WH)
        for rows in (Rows.of(objective, pack) for pack in packs()):
            features.add(torch.cat((rows.planes_RW, rows.embedded_KRH[0]), -1), rows.wanted_KRH[0])
        whole_WH = features.solve()
        head.fc.weight.copy_(whole_WH[:width].T)
        map_WH[:hidden] = whole_WH[width:]
    for _ in range(SWEEPS):
        layer = Regression(2 * hidden, hidden, map_WH)
        for rows in (Rows.of(objective, pack) for pack in packs()):
            add_steps(layer, objective, rows, map_WH)
        value_WS, output_SH = layer.solve_truncated(config.num_key_value_heads * config.head_dim)
        map_WH = value_WS @ output_SH
    write_layer(head.midlayer.self_attn, value_WS, output_SH)
    calibrate(objective, with_rows)


def add_projected(regression: Regression, objective: Objective, rows: Rows, map_WH: torch.Tensor | None) -> None:
    """What an MTP head's projection has to explain at each step; without a present one, at the first."""
    head, feature_RH = objective.head, rows.planes_RW
    assert isinstance(head, MtpHead)
    for k, (embedded_RH, wanted_RH) in enumerate(zip(rows.embedded_KRH, rows.wanted_KRH, strict=True)):
        wide_RW = torch.cat(head.ordered(embedded_RH, head.hidden_norm(feature_RH)), -1)
        regression.add(wide_RW, wanted_RH, objective.settings.weight(k))
        if map_WH is None:
            return
        output_RH = wide_RW @ map_WH
        feature_RH = head.final_norm(output_RH) if head.family.normed_feedback else output_RH


def add_steps(regression: Regression, objective: Objective, rows: Rows, map_WH: torch.Tensor) -> None:
    """What is left to explain at each step, the features of later ones being as the present M gives them."""
    head = objective.head
    assert isinstance(head, Eagle3Head)
    feature_RH = head.fc(rows.planes_RW)
    for k, (embedded_RH, wanted_RH) in enumerate(zip(rows.embedded_KRH, rows.wanted_KRH, strict=True)):
        wide_RW = torch.cat((embedded_RH, head.midlayer.hidden_norm(feature_RH)), -1)
        regression.add(wide_RW, wanted_RH - feature_RH, objective.settings.weight(k))
        feature_RH = head.feedback(feature_RH + wide_RW @ map_WH)


def write_layer(attention: Attention, value_WS: torch.Tensor, output_SH: torch.Tensor) -> None:
    """v_proj and o_proj whose product is M when every row attends to itself; heads of a group share its value."""
    rank, size = value_WS.shape[1], attention.head_dim
    attention.v_proj.weight[:rank] = value_WS.T
    groups = attention.v_proj.out_features // size
    repeat = attention.o_proj.in_features // (groups * size)
    spread_SH = output_SH.new_zeros(groups * size, output_SH.shape[1])
    spread_SH[:rank] = output_SH / repeat
    spread_GMEH = spread_SH.unflatten(0, (groups, 1, size)).expand(-1, repeat, -1, -1)
    attention.o_proj.weight.copy_(spread_GMEH.flatten(0, 2).T)


def calibrate(objective: Objective, pack: Pack) -> None:
    """Scale norm, and with it all logits, by the number that makes the cross-entropy on a pack least."""
    norm = output_norm(objective.head)
    scales = torch.linspace(0.05, 1.5, 59, device=norm.weight.device)
    costs = torch.zeros_like(scales)
    for k, step in enumerate(objective.unroll(pack, None)):
        some_R = torch.linspace(0, len(step.rows_R) - 1, min(256, len(step.rows_R))).long().to(step.rows_R.device)
        logits_RD = (step.hidden_RH[some_R].to(objective.draft_DH) @ objective.draft_DH.T).float()
        final_RP = pack.final_FP[pack.teacher_T[step.rows_R[some_R] + 1 + k]]
        p_RD = (final_RP.to(objective.draft_DH) @ objective.teacher_DP.to(objective.draft_DH).T).float().softmax(-1)
        agreed = (p_RD * logits_RD).sum(-1).mean()
        costs += torch.stack([(logits_RD * s).logsumexp(-1).mean() - s * agreed for s in scales])
    norm.weight.mul_(scales[costs.argmin()])
