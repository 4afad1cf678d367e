"""The loss of drafted rows against their teachers, and its gradients, without ever holding all logits.

Four losses of a row, with p the target's distribution on the draft vocabulary, q the head's, and
alpha = sum_v min(p_v, q_v) the chance that a sampled draft is accepted:

- kl: KL(p || q), the soft cross-entropy of EAGLE-3 up to the entropy of p.
- ce: -log q at the target's argmax.
- nla: -log alpha, and lk_hybrid: lambda * KL + (1 - lambda) * (1 - alpha) with lambda = exp(-3 alpha), the
  two LK losses (arXiv 2602.23881). lambda is a number of each row and not differentiated: an average over
  a batch would make the loss depend on packing.

Of a teacher that is kept as its S likeliest tokens (featurize/teacher.py) p is known on the partition {token, ...,
token, all others} of the draft vocabulary, r being what is left for the others:

- kl: the KL of that partition, sum_S p_v log(p_v / q_v) + r log(r / q_R) with q_R the head's sum over the others. It
  is never above the whole KL (data processing) and 0 only where the head has all S and their sum right. Its gradient
  is q - p', p' being p on the S tokens and r q_v / q_R on the others: the teacher's rest in the head's own shape, which
  is also the completion of the teacher that is nearest to the head. Within the rest nothing is taught.
- ce: as before, since the likeliest draft token is known.
- nla, lk_hybrid: alpha counts the S tokens alone and so is a lower bound of the acceptance, hence nla an upper bound
  of the loss; lk_hybrid has the KL from above in it.

With S = D all of them are the losses of the whole teacher.

Teacher and draft logits exist for one chunk of positions at a time. A chunk's teacher is computed once and
serves every unroll step that predicts from it; the gradients are formed at once, so nothing of size [rows,
vocabulary] outlives its chunk but a buffer of gradients waiting for one large product with the weight.

Legend: F teacher positions, R rows of a step, n rows of a chunk, H head hidden, P target hidden, D draft
vocabulary, S kept tokens of a teacher, K unroll steps, C positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from featurize.teacher import TopK


@dataclass(frozen=True)
class Sizes:
    """How the work is cut on a kind of device.

    Attributes:
        chunk: positions whose logits are held at once.
        strip: rows whose probabilities are: on a CPU what stays in its cache, where all but the products is done.
        pending: rows of gradients [n, D] that wait for one product with the hidden states.
    """

    chunk: int
    strip: int
    pending: int


SIZES = {"cpu": Sizes(256, 32, 2048), "cuda": Sizes(2048, 2048, 16384)}


def sizes(device: torch.device) -> Sizes:
    """The sizes for a device."""
    return SIZES.get(device.type, SIZES["cuda"])


@dataclass(frozen=True)
class Teacher:
    """What a chunk of positions teaches.

    Attributes:
        best_C: the target's argmax, for ce.
        p_CD, entropy_C: its probabilities on the draft vocabulary and their entropy in nats, for the others.
        index_CS, p_CS, rest_C: instead of p_CD, tokens with their probabilities, and what is left for all others.
    """

    best_C: torch.Tensor | None = None
    p_CD: torch.Tensor | None = None
    entropy_C: torch.Tensor | None = None
    index_CS: torch.Tensor | None = None
    p_CS: torch.Tensor | None = None
    rest_C: torch.Tensor | None = None

    @classmethod
    def of(cls, logits_CD: torch.Tensor, kind: str, dtype: torch.dtype, strip: int) -> Teacher:
        """From the target's logits on the draft vocabulary; probabilities in `dtype`."""
        if kind == "ce":
            return cls(best_C=logits_CD.argmax(-1))
        p_CD, entropies = torch.empty_like(logits_CD, dtype=dtype), []
        for logits, p in zip(logits_CD.split(strip), p_CD.split(strip), strict=True):
            log_p = logits.to(dtype).log_softmax(-1)
            torch.exp(log_p, out=p)
            entropies.append(-torch.linalg.vecdot(p, log_p))
        return cls(p_CD=p_CD, entropy_C=torch.cat(entropies))

    @classmethod
    def kept(cls, top: TopK, kind: str, dtype: torch.dtype) -> Teacher:
        """From what a store kept of the target's distribution; probabilities in `dtype`."""
        index_CS = top.index_FS.long()
        if kind == "ce":
            return cls(best_C=index_CS[:, 0])
        # From logarithms: where the target is sure of a token that cannot be drafted, fp32 has nothing left to norm.
        parts = torch.cat((top.log_p_FS.to(dtype), top.rest_F.to(dtype).log()[:, None]), -1).softmax(-1)  # [C, S + 1]
        entropy_C = -torch.xlogy(parts, parts).sum(-1)
        return cls(entropy_C=entropy_C, index_CS=index_CS, p_CS=parts[:, :-1], rest_C=parts[:, -1])

    def rows(self, local_n: torch.Tensor) -> Teacher:
        """The teachers of some rows, given by ascending places in the chunk."""
        chosen: Any = local_n
        if local_n.device.type == "cpu" and int(local_n[-1] - local_n[0]) == len(local_n) - 1:
            chosen = slice(int(local_n[0]), int(local_n[-1]) + 1)  # consecutive (nearly always): no copy
        return Teacher(*(None if each is None else each[chosen] for each in vars(self).values()))

    def against(self, log_q_nD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """KL [n] from rows' log-probabilities, p [n, D] as far as it is known, and p' [n, D] of the KL's gradient."""
        assert self.entropy_C is not None
        if self.p_CD is not None:
            return -torch.linalg.vecdot(self.p_CD, log_q_nD) - self.entropy_C, self.p_CD, self.p_CD
        index_nS, p_nS, rest_n = self.index_CS, self.p_CS, self.rest_C
        assert index_nS is not None and p_nS is not None and rest_n is not None
        kl_n = -torch.linalg.vecdot(p_nS, log_q_nD.gather(-1, index_nS)) - self.entropy_C
        p_nD = torch.zeros_like(log_q_nD).scatter_(-1, index_nS, p_nS)
        if p_nS.shape[-1] == p_nD.shape[-1]:
            return kl_n, p_nD, p_nD
        others_nD = log_q_nD.scatter(-1, index_nS, -torch.inf)
        log_others_n = others_nD.logsumexp(-1)  # not log(1 - sum_S q), which rounds away where the head is sure
        completed_nD = others_nD.sub_(log_others_n[:, None]).exp_().mul_(rest_n[:, None]).add_(p_nD)
        return kl_n - rest_n * log_others_n, p_nD, completed_nD


def divergence(kind: str, teacher: Teacher, logits_nD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss [n] of rows and its gradient by their logits [n, D].

    With s = sum_v q_v 1[q_v < p_v], d alpha / d z_v = q_v (1[q_v < p_v] - s).
    """
    log_q_nD = logits_nD.log_softmax(-1)
    if teacher.best_C is not None:
        best_n1 = teacher.best_C[:, None]
        loss_n = -log_q_nD.gather(-1, best_n1)[:, 0]
        q_nD = log_q_nD.exp_()
        return loss_n, q_nD.scatter_add_(-1, best_n1, q_nD.new_full(best_n1.shape, -1.0))
    kl_n, p_nD, completed_nD = teacher.against(log_q_nD)
    if kind == "kl":
        return kl_n, log_q_nD.exp_().sub_(completed_nD)
    q_nD = log_q_nD.exp_()
    alpha_n = torch.minimum(p_nD, q_nD).sum(-1).clamp(min=torch.finfo(q_nD.dtype).tiny)
    below_nD = q_nD < p_nD
    s_n1 = (q_nD * below_nD).sum(-1, keepdim=True)
    tv_gradient_nD = q_nD * (s_n1 - below_nD.to(q_nD.dtype))
    if kind == "nla":
        return -alpha_n.log(), tv_gradient_nD / alpha_n[:, None]
    lambda_n = (-3 * alpha_n).exp()
    gradient_nD = tv_gradient_nD.mul_(1 - lambda_n[:, None]).addcmul_(q_nD.sub_(completed_nD), lambda_n[:, None])
    return lambda_n * kl_n + (1 - lambda_n) * (1 - alpha_n), gradient_nD


@dataclass(frozen=True)
class _Piece:
    """Rows [a, b) of a step, whose teachers lie in one chunk of positions."""

    step: int
    a: int
    b: int

    def of(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """This piece of a value per step and row."""
        return values[self.step][self.a : self.b]


def _cut(indices: Sequence[torch.Tensor], positions: int, chunk: int) -> list[list[_Piece]]:
    """For each chunk of teacher positions the rows that learn from it (one transfer from the device)."""
    edges = torch.arange(0, positions + chunk, chunk, device=indices[0].device)
    cuts = torch.stack([torch.searchsorted(index_R, edges) for index_R in indices]).tolist()
    return [
        [_Piece(k, cut[number], cut[number + 1]) for k, cut in enumerate(cuts) if cut[number] < cut[number + 1]]
        for number in range(len(edges) - 1)
    ]


class ChunkedLoss(torch.autograd.Function):
    """Sum over steps and rows of weight * loss, and per step the sum of the losses that have a weight.

    `apply` takes weight_DH, teacher_weight_DP, final_FP (or a TopK, with which teacher_weight_DP may be None), the kind
    of loss, the dtype of the products, per step the places of the rows' teachers in final_FP (int64 [R], ascending)
    and their weights [R], then the hidden states [R, H] of each step. Gradients reach the hidden states, and weight_DH
    where it is trained.
    """

    @staticmethod
    def forward(ctx: Any, weight_DH, teacher_weight_DP, final_FP, kind, dtype, indices, weights, *hidden):  # type: ignore[no-untyped-def]
        total, device = torch.promote_types(weight_DH.dtype, torch.float32), weight_DH.device
        size = sizes(device)
        weight, top = weight_DH.to(dtype), isinstance(final_FP, TopK)
        teacher_weight = None if top else teacher_weight_DP.to(dtype)
        loss, sums_K = torch.zeros((), dtype=total, device=device), torch.zeros(len(hidden), dtype=total, device=device)
        trained, d_hidden = ctx.needs_input_grad[0], [torch.zeros_like(h) for h in hidden]
        # A frozen weight, which is the whole vocabulary, has no product that would be worth waiting for.
        most = max(size.pending, size.chunk) if trained else size.chunk
        gradients_BD = torch.empty(most, len(weight), dtype=dtype, device=device)
        d_weight = torch.zeros_like(weight_DH, dtype=total) if trained else None
        product_DH = torch.empty_like(weight) if trained else None  # once: fresh memory costs as much as some products
        waiting: list[_Piece] = []
        filled = 0

        def settle() -> None:
            # The rows' weights are put on the hidden states: the narrow side of both products.
            scale_n1 = torch.cat([piece.of(weights) for piece in waiting])[:, None]
            h_nH = torch.cat([piece.of(hidden) for piece in waiting])
            if d_weight is not None and product_DH is not None:
                torch.mm(gradients_BD[:filled].T, (h_nH * scale_n1).to(dtype), out=product_DH)
                d_weight.add_(product_DH)
            d_h_nH = (gradients_BD[:filled] @ weight) * scale_n1
            for piece, part in zip(waiting, d_h_nH.split([piece.b - piece.a for piece in waiting]), strict=True):
                piece.of(d_hidden).copy_(part)

        for number, pieces in enumerate(_cut(indices, len(final_FP), size.chunk)):
            if not pieces:
                continue
            first = number * size.chunk
            chunk = final_FP[first : first + size.chunk]
            if teacher_weight is None:
                teacher = Teacher.kept(chunk, kind, total)
            else:
                teacher = Teacher.of(chunk.to(dtype) @ teacher_weight.T, kind, total, size.strip)
            for piece in pieces:
                count = piece.b - piece.a
                if filled + count > len(gradients_BD):
                    settle()
                    waiting, filled = [], 0
                logits_nD = piece.of(hidden).to(dtype) @ weight.T
                rows = zip(
                    logits_nD.split(size.strip),
                    (piece.of(indices) - first).split(size.strip),
                    gradients_BD[filled : filled + count].split(size.strip),
                    strict=True,
                )
                losses = []
                for logits, local, gradient in rows:
                    loss_n, exact = divergence(kind, teacher.rows(local), logits.to(total))
                    gradient.copy_(exact)
                    losses.append(loss_n)
                loss_n, weight_n = torch.cat(losses), piece.of(weights)
                loss += (loss_n * weight_n).sum()
                sums_K[piece.step] += (loss_n * (weight_n != 0)).sum()
                waiting.append(piece)
                filled += count
        if waiting:
            settle()
        ctx.save_for_backward(*([d_weight] if trained else []), *d_hidden)
        ctx.trained = trained
        ctx.mark_non_differentiable(sums_K)
        return loss, sums_K

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # In place: they are large.
        found = [each.mul_(grads[0].to(each.dtype)) for each in ctx.saved_tensors]
        d_weight = found.pop(0) if ctx.trained else None
        return d_weight, *(None,) * 6, *found
