"""The check before hours are spent: a few documents, our way against the plainest way there is.

The plain way is transformers' own: one document at a time, `output_hidden_states=True`, no hooks, no
padding. For every plane we compare each token's relative error and ask which of the target's planes ours
is nearest to: residual streams change little from layer to layer and hold a few huge channels, so that a
small error alone would not prove the index right. A plane with fewer rows than tokens, or one that is zero,
constant or not finite, is refused whatever it is compared with. The final plane goes through the output head, whose
argmax must agree with the model's own logits. The report becomes part of the manifest.

A target that a server runs, and that is too large to be loaded a second time, is checked against what the server
itself says comes next: that proves the final plane and its norm, and of the others only that they have content.

Shape suffixes: T tokens of a document, P planes of the target (0 .. L, the last one post-norm), H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from featurize.extract import PlaneSource
from featurize.tokenised import TokenisedSet
from models.errors import Refused

TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 0.01}
"""Largest median relative error of a plane, by the dtype the target runs in; planes are stored in bf16, whose
rounding alone is 0.002."""

AGREEMENT = {torch.bfloat16: 0.9, torch.float16: 0.97, torch.float32: 0.98}
"""Smallest share of positions with the model's own argmax: what rounding to bf16 leaves, with a margin."""


@dataclass(frozen=True)
class PlainForward:
    """What the target says about one document when it is asked plainly.

    Attributes:
        argmax_T: its own next tokens.
        planes_PTH: all its hidden states, the last one after the final norm; None where only a server runs it.
    """

    argmax_T: torch.Tensor
    planes_PTH: torch.Tensor | None


@dataclass(frozen=True)
class Reference:
    """What planes are compared with.

    Attributes:
        forward: the plain forward of a document, by its index and ids [T].
        head: the output head, a module, planes [T, H] of `dtype` -> logits [T, V].
        dtype: the target runs in.
    """

    forward: Callable[[int, torch.Tensor], PlainForward]
    head: nn.Module
    dtype: torch.dtype


def plain_forward(model: Any, ids_T: torch.Tensor) -> PlainForward:
    """One document through the whole model, without any of our machinery."""
    with torch.inference_mode():
        output = model(
            input_ids=ids_T.long()[None].to(model.device), output_hidden_states=True, use_cache=False, logits_to_keep=0
        )
    planes_PTH = torch.stack([states[0] for states in output.hidden_states]).cpu()
    return PlainForward(output.logits[0].argmax(-1).cpu(), planes_PTH)


def reference(model: Any) -> Reference:
    """A model of transformers as the reference."""
    dtype = next(model.parameters()).dtype
    return Reference(lambda _index, ids_T: plain_forward(model, ids_T), model.get_output_embeddings(), dtype)


def computed(reference: Reference, tokenised: TokenisedSet, count: int) -> Reference:
    """A reference that has seen the documents of the canary already, so that all of its model but the head can go."""
    known = {index: reference.forward(index, tokenised.ids(index)) for index in choose_documents(tokenised, count)}
    return Reference(lambda index, _ids_T: known[index], reference.head.cpu(), reference.dtype)


def choose_documents(tokenised: TokenisedSet, count: int) -> list[int]:
    """Indices of `count` documents spread evenly over the lengths, shortest and longest included."""
    order = sorted(range(len(tokenised.documents)), key=lambda index: (tokenised.documents[index].length, index))
    count = min(count, len(order))
    return [order[round(i * (len(order) - 1) / max(count - 1, 1))] for i in range(count)]


def relative_errors(ours_TH: torch.Tensor, planes_PTH: torch.Tensor) -> torch.Tensor:
    """Relative error in fp32 of every token against every plane, [P, T]."""
    return torch.stack([(plane - ours_TH).norm(dim=-1) / plane.norm(dim=-1).clamp_min(1e-12) for plane in planes_PTH])


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


def run_canary(
    backend: PlaneSource, tokenised: TokenisedSet, count: int, against: Reference, batch_tokens: int
) -> dict[str, Any]:
    """Compare `count` documents, asked for as the extraction will, with what the reference says; returns the report.

    Raises:
        Refused: a plane or the argmax disagrees; the message names the plane and the number.
    """
    chosen = choose_documents(tokenised, count)
    if not chosen:
        return {"documents": 0}
    rows = [(tokenised.documents[index].id, tokenised.ids(index)) for index in chosen]
    names = [f"plane {layer}" for layer in backend.aux_layers] + ["the final plane"]
    errors: dict[str, list[torch.Tensor]] = {}
    agreed = positions = depth = 0
    for row, aux, final_TH in backend.documents(rows, batch_tokens):
        ids_T = rows[row][1]
        plain = against.forward(chosen[row], ids_T)
        for name, states in zip(names, [*aux, final_TH], strict=True):
            # As it will be stored: rounded to bf16.
            ours_TH = states.to(torch.bfloat16).float().cpu()
            if len(ours_TH) != len(ids_T):
                raise Refused(f"canary: {name} has {len(ours_TH)} rows for {len(ids_T)} tokens")
            check_varies(name, ours_TH)
            if plain.planes_PTH is not None:
                depth = len(plain.planes_PTH) - 1
                errors.setdefault(name, []).append(relative_errors(ours_TH, plain.planes_PTH.float()))
        with torch.inference_mode():
            argmax_T = against.head(final_TH.to(torch.bfloat16).to(against.dtype)).argmax(-1).cpu()
        agreed += int((argmax_T == plain.argmax_T).sum())
        positions += len(ids_T)
    report: dict[str, Any] = {
        "documents": [name for name, _ in rows],
        "lengths": [len(ids_T) for _, ids_T in rows],
        "planes": {},
        "argmax_agreement": agreed / positions,
    }
    expected: Sequence[int] = [*backend.aux_layers, depth]
    for (name, pieces), plane in zip(errors.items(), expected, strict=False):  # no errors: nothing to compare with
        report["planes"][name] = check_plane(name, plane, torch.cat(pieces, dim=-1), TOLERANCE[against.dtype])
    if report["argmax_agreement"] < AGREEMENT[against.dtype]:
        raise Refused(
            f"canary: lm_head(final plane) has the model's own argmax at {report['argmax_agreement']:.1%} of "
            f"{positions} positions, at least {AGREEMENT[against.dtype]:.0%} are needed"
        )
    return report
