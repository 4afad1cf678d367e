"""The check before hours are spent: a few documents, our way against the plainest way there is.

The plain way is transformers' own: one document at a time, `output_hidden_states=True`, no hooks, no
padding. For every plane we compare each token's relative error and ask which of the target's planes ours
is nearest to: residual streams change little from layer to layer and hold a few huge channels, so that a
small error alone would not prove the index right. A plane with fewer rows than tokens, or one that is zero,
constant or not finite, is refused whatever it is compared with. The final plane goes through the output head, whose
argmax must agree with the model's own logits. The report becomes part of the manifest.

Shape suffixes: T tokens of a document, P planes of the target (0 .. L, the last one post-norm), H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from featurize.extract import Backend, pad
from featurize.tokenised import TokenisedSet
from models.errors import Refused

TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 0.01}
"""Largest median relative error of a plane, by the dtype the target runs in; planes are stored in bf16, whose
rounding alone is 0.002."""

AGREEMENT = {torch.bfloat16: 0.9, torch.float16: 0.97, torch.float32: 0.98}
"""Smallest share of positions with the model's own argmax: what rounding to bf16 leaves, with a margin."""


@dataclass(frozen=True)
class PlainForward:
    """What transformers itself says about one document, in fp32.

    Attributes:
        planes_PTH: all hidden states; the last one is after the final norm.
        argmax_T: the model's own next tokens.
    """

    planes_PTH: torch.Tensor
    argmax_T: torch.Tensor


def plain_forward(model: Any, ids_T: torch.Tensor) -> PlainForward:
    """One document through the whole model, without any of our machinery."""
    with torch.inference_mode():
        output = model(
            input_ids=ids_T.long()[None].to(model.device), output_hidden_states=True, use_cache=False, logits_to_keep=0
        )
    planes = torch.stack([states[0] for states in output.hidden_states]).float().cpu()
    return PlainForward(planes, output.logits[0].argmax(-1).cpu())


def choose_documents(tokenised: TokenisedSet, count: int) -> list[int]:
    """Indices of `count` documents spread evenly over the lengths, shortest and longest included."""
    order = sorted(range(len(tokenised.documents)), key=lambda index: (tokenised.documents[index].length, index))
    count = min(count, len(order))
    return [order[round(i * (len(order) - 1) / max(count - 1, 1))] for i in range(count)]


def relative_errors(ours_TH: torch.Tensor, planes_PTH: torch.Tensor) -> torch.Tensor:
    """Relative error of every token against every plane, [P, T]."""
    return (planes_PTH - ours_TH).norm(dim=-1) / planes_PTH.norm(dim=-1).clamp_min(1e-12)


def check_plane(name: str, expected: int, errors_PT: torch.Tensor, tolerance: float) -> dict[str, float]:
    """Judge one of our planes by its errors against all of the target's.

    Raises:
        Refused: it is another plane, or too far from its own; with the number.
    """
    medians = errors_PT.median(dim=-1).values
    own, nearest = float(medians[expected]), int(medians.argmin())
    if not own <= tolerance:
        other = (
            f"; the target's plane {nearest} is nearer ({float(medians[nearest]):.2g})" if nearest != expected else ""
        )
        raise Refused(f"canary: {name} differs from a plain forward by {own:.2g} (allowed {tolerance:.2g}){other}")
    if nearest != expected and float(medians[nearest]) < own:
        raise Refused(
            f"canary: {name} is the target's plane {nearest} (error {float(medians[nearest]):.2g} against {own:.2g})"
        )
    return {"median_relative_error": own, "largest_relative_error": float(errors_PT[expected].max())}


def check_varies(name: str, states_TH: torch.Tensor) -> None:
    """Refuse a plane that is not finite, zero, or the same row for all tokens, whatever it is compared with.

    Raises:
        Refused: naming the plane and what it is.
    """
    if not bool(states_TH.isfinite().all()):
        raise Refused(f"canary: {name} has values that are not finite")
    if not bool(states_TH.any()):
        raise Refused(f"canary: {name} is zero")
    if len(states_TH) > 1 and bool((states_TH == states_TH[0]).all()):
        raise Refused(f"canary: {name} has the same values for all {len(states_TH)} tokens of a document")


def run_canary(backend: Backend, tokenised: TokenisedSet, count: int) -> dict[str, Any]:
    """Compare `count` documents, computed as one padded batch, with the plain forward; returns the report.

    Raises:
        Refused: a plane or the argmax disagrees; the message names the plane and the number.
    """
    chosen = choose_documents(tokenised, count)
    if not chosen:
        return {"documents": 0}
    dtype = next(backend.model.parameters()).dtype
    rows = [tokenised.ids(index) for index in chosen]
    aux, final_BLH = backend.planes(pad(rows))
    head = backend.model.get_output_embeddings()
    errors: dict[str, list[torch.Tensor]] = {}
    agreed = positions = 0
    for row, ids_T in enumerate(rows):
        plain = plain_forward(backend.model, ids_T)
        names = [f"plane {layer}" for layer in backend.aux_layers] + ["the final plane"]
        for name, states in zip(names, [*aux, final_BLH], strict=True):
            # As it will be stored: rounded to bf16.
            ours_TH = states[row, : len(ids_T)].to(torch.bfloat16).float().cpu()
            if len(ours_TH) != len(ids_T):
                raise Refused(f"canary: {name} has {len(ours_TH)} rows for {len(ids_T)} tokens")
            check_varies(name, ours_TH)
            errors.setdefault(name, []).append(relative_errors(ours_TH, plain.planes_PTH))
        with torch.inference_mode():
            argmax_T = head(final_BLH[row, : len(ids_T)].to(torch.bfloat16).to(dtype)).argmax(-1).cpu()
        agreed += int((argmax_T == plain.argmax_T).sum())
        positions += len(ids_T)
    report: dict[str, Any] = {
        "documents": [tokenised.documents[index].id for index in chosen],
        "lengths": [len(ids_T) for ids_T in rows],
        "planes": {},
        "argmax_agreement": agreed / positions,
    }
    expected: Sequence[int] = [*backend.aux_layers, len(plain.planes_PTH) - 1]
    for (name, pieces), plane in zip(errors.items(), expected, strict=True):
        report["planes"][name] = check_plane(name, plane, torch.cat(pieces, dim=-1), TOLERANCE[dtype])
    if report["argmax_agreement"] < AGREEMENT[dtype]:
        raise Refused(
            f"canary: lm_head(final plane) has the model's own argmax at {report['argmax_agreement']:.1%} of "
            f"{positions} positions, at least {AGREEMENT[dtype]:.0%} are needed"
        )
    return report
