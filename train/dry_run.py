"""What `python -m train` would do with a run: told without loading weights, and before extraction if need be."""

from __future__ import annotations

import os
from pathlib import Path

from featurize.config import DataConfig, FeaturizeConfig, SpoolConfig
from featurize.dry_run import documents_of
from featurize.store import cut_units
from models.config import DraftConfig, TargetConfig
from models.eagle3 import Eagle3Config
from models.target import aux_layers, describe_target
from train.config import ObjectiveConfig, OptimConfig, TrainerConfig
from train.plan import Corpus, Costs, Plan
from train.sizes import memory, parameters
from train.stock import divide

ASSUMED = 300e12
"""FLOP/s of a GPU in bf16 for the hours that are told: a third of an H100's peak (989e12). Assumed, not measured."""


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
) -> None:
    """Print head, data, steps, memory of a GPU and arithmetic of the whole training.

    Args:
        run: the run's folder.

    Raises:
        Refused: what training would refuse before it loads anything.
    """
    target = describe_target(model, weights=False)
    head = Eagle3Config.for_target(target, aux_layers(target, model.aux_layers), draft)
    directory = Path(spool.directory) if spool.gigabytes is not None else run / "features"
    tokenised = documents_of(directory, data, featurize, model, target)
    corpus = Corpus.of(tokenised.documents, Costs.of(head, objective.row_share), objective.unroll_steps)
    training, validation = divide(tokenised.documents, corpus, data.validation_share)
    plan = Plan(
        corpus,
        training,
        budget=trainer.pack_tokens,
        packs_per_step=trainer.packs_per_step,
        seed=trainer.seed,
        epochs=trainer.epochs,
        mixing=trainer.shuffle_shards,
        firsts=[unit.first for unit in cut_units(tokenised, featurize.shard_tokens)],
    )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    tokens, rows = int(corpus.tokens_N[training].sum()), int(corpus.rows_NK[training, 0].sum())
    share = rows / tokens
    flop = 6 * float(corpus.work_N[training].sum()) * trainer.epochs  # two for a multiply-add, three passes
    taken = memory(head, objective, trainer, rows=round(share * trainer.pack_tokens), processes=processes)
    print(
        f"head: EAGLE-3, {parameters(head):,} weights, draft vocabulary {head.draft_vocab_size:,} of "
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
    print(f"memory of a GPU, an average pack: about {taken.line()}")
    print(
        f"arithmetic: {flop:.2e} FLOP; {flop / ASSUMED / processes / 3600:.2f} h if each process did "
        f"{ASSUMED / 1e12:.0f} TFLOP/s, which is an assumption"
    )
    print(f"writes: {run / 'train'}")
