"""What `python -m train` would do with a run: told without loading weights, and before extraction if need be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from featurize.config import DataConfig, FeaturizeConfig, SpoolConfig
from featurize.contract import require_planes
from featurize.dry_run import documents_of
from featurize.shards import cut_units
from featurize.store import FeatureStore
from featurize.tokenised import Document
from featurize.vocabulary import divide
from models.config import DraftConfig, TargetConfig
from models.drafts import head_config, kind
from models.eagle3 import Eagle3Config
from models.planes import FINAL
from models.target import Target, aux_layers, describe_target
from train.config import ObjectiveConfig, OptimConfig, TrainerConfig
from train.feed import require_mixing
from train.optimizer import check_schedule
from train.plan import Corpus, Costs, Plan
from train.sizes import frozen, memory, parameters, state

ASSUMED = 300e12
"""FLOP/s of a GPU in bf16 for the hours that are told: a third of an H100's peak (989e12). Assumed, not measured."""


def _documents(
    features: Path,
    data: DataConfig,
    featurize: FeaturizeConfig,
    model: TargetConfig,
    draft: DraftConfig,
    target: Target,
    *,
    final: bool,
    streaming: bool,
) -> tuple[Sequence[Document], list[int]]:
    """Documents and the first of each shard: of the store if it is complete, else rendered now."""
    if not streaming and (features / "manifest.json").is_file():
        store = FeatureStore.open(features)
        store.require(target, aux_layers(target, model.aux_layers), final=final)
        return store.documents, store.firsts
    tokenised = documents_of(features, data, featurize, model, target, draft)
    return tokenised.documents, [unit.first for unit in cut_units(tokenised, featurize.shard_tokens)]


def tell(
    run: Path,
    data: DataConfig,
    featurize: FeaturizeConfig,
    spool: SpoolConfig,
    model: TargetConfig,
    draft: DraftConfig,
    objective: ObjectiveConfig,
    optim: OptimConfig,
    trainer: TrainerConfig,
    *,
    features_of: str | None = None,
) -> None:
    """Print head, data, steps, memory of a GPU and arithmetic of the whole training.

    Args:
        run: the run's folder.
        features_of: the run beside it whose features it trains on; None for its own.

    Raises:
        Refused: what training would refuse before it loads anything.
    """
    target = describe_target(model, weights=False)
    head = head_config(target, aux_layers(target, model.aux_layers), draft)
    final, streaming = head.planes == (FINAL,), spool.gigabytes is not None
    if features_of is None:
        require_planes(draft, featurize)
    features = Path(spool.directory) if streaming else run.with_name(features_of or run.name) / "features"
    documents, firsts = _documents(features, data, featurize, model, draft, target, final=final, streaming=streaming)
    corpus = Corpus.of(documents, Costs.of(head, objective.row_share), objective.unroll_steps)
    training, validation = divide(documents, data.validation_share)
    plan = Plan.of(corpus, training, trainer, firsts)
    check_schedule(optim, len(plan))
    if streaming:
        require_mixing(plan.mixing)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    tokens, rows = int(corpus.tokens_N[training].sum()), int(corpus.rows_NK[training, 0].sum())
    share = rows / tokens
    print(
        f"head: {kind(head)}, {parameters(head):,} weights, draft vocabulary {head.draft_vocab_size:,} of "
        f"{head.vocab_size:,}, {objective.unroll_steps} unroll steps"
    )
    print(
        f"data: {len(training):,} documents ({len(validation):,} held out), {tokens:,} tokens, {rows:,} supervised "
        f"rows ({share:.0%})"
    )
    print(
        f"steps: {len(plan):,} in {trainer.epochs} epochs, each of up to {trainer.packs_per_step} packs of "
        f"{trainer.pack_tokens:,} tokens, over {processes} processes ({trainer.strategy}); warm-up {optim.warmup_steps}"
    )
    if isinstance(head, Eagle3Config):
        taken = memory(head, objective, trainer, rows=round(share * trainer.pack_tokens), processes=processes)
        print(f"memory of a GPU, an average pack: about {taken.line()}")
    else:
        print(
            f"memory of a GPU: weights, gradients, AdamW {state(head, trainer, processes) / 1e9:.1f} GB, the target's "
            f"embedding and head {frozen(head, trainer) / 1e9:.1f} GB; what a pack takes is not estimated for MTP heads"
        )
    if head.native:  # gates, latent attention and experts are not in `Costs`, which only has to weigh packs
        print("arithmetic: not estimated for a module of the target's own")
    else:
        flop = 6 * float(corpus.work_N[training].sum()) * trainer.epochs  # two for a multiply-add, three passes
        print(
            f"arithmetic: {flop:.2e} FLOP; {flop / ASSUMED / processes / 3600:.2f} h if each process did "
            f"{ASSUMED / 1e12:.0f} TFLOP/s, which is an assumption"
        )
    print(f"features: {features}" + ("" if (features / "manifest.json").is_file() else " (not complete yet)"))
    print(f"writes: {run / 'train'}")
