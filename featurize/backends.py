"""Where the planes come from: the backend that is configured, opened and checked before hours are spent on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from featurize.canary import Reference, computed, reference, run_canary
from featurize.config import FeaturizeConfig
from featurize.extract import PlaneSource, load_backend
from featurize.tokenised import TokenisedSet
from featurize.vllm_extract import served_planes
from models.config import EngineConfig, TargetConfig
from models.errors import Refused
from models.target import Target


def _plain_reference(
    target: Target, model: TargetConfig, settings: FeaturizeConfig, tokenised: TokenisedSet
) -> Reference:
    """What transformers says about the canary's documents; the model is gone afterwards."""
    try:
        model_here = load_backend(target, model, (), settings.device).model
    except Refused as refusal:
        raise Refused(f"canary: {refusal}; featurize.canary_against=engine does without transformers") from None
    known = computed(reference(model_here), tokenised, settings.canary_documents)
    del model_here
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return known


@contextmanager
def checked_backend(
    target: Target,
    aux_layers: tuple[int, ...],
    tokenised: TokenisedSet,
    settings: FeaturizeConfig,
    model: TargetConfig,
    engine: EngineConfig,
    directory: Path,
) -> Iterator[tuple[PlaneSource, dict[str, Any]]]:
    """The configured source of planes, ready, and the canary's report on it.

    Args:
        directory: the run's.

    Raises:
        Refused: it cannot be had, or the canary finds fault with it.
    """
    count, size = settings.canary_documents, settings.batch_tokens
    if settings.backend == "transformers":
        backend = load_backend(target, model, aux_layers, settings.device)
        yield backend, run_canary(backend, tokenised, count, reference(backend.model), size)
        return
    plain = None
    if count and settings.canary_against == "transformers":  # before the server, which takes the whole accelerator
        plain = _plain_reference(target, model, settings, tokenised)
    lengths = [document.length for document in tokenised.documents]
    with served_planes(target, aux_layers, lengths, settings, engine, directory / "extraction") as served:
        report = run_canary(served, tokenised, count, plain or served.reference(), size) if count else {"documents": 0}
        yield served, report
