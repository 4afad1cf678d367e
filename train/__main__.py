"""`python -m train`: feature store -> trained head. With `spool.gigabytes`, `python -m featurize` runs beside it."""

from __future__ import annotations

from conf import Run, resolved, stage


def main(run: Run) -> bool:
    """Open the features, train, leave checkpoints, metrics and curves in runs/<name>/train."""
    from featurize.spooled import SpoolStore
    from featurize.store import FeatureStore
    from models.eagle3 import Eagle3Config
    from models.target import aux_layers, describe_target
    from train.loop import Trainer

    target = describe_target(run.target)
    layers = aux_layers(target, run.target.aux_layers)
    if run.spool.gigabytes is None:
        store = FeatureStore.open(run.directory / "features")
    else:
        store = SpoolStore.attach(run.spool, run.trainer.seed, run.trainer.epochs)
    store.require(target, layers)
    trainer = Trainer(
        store=store,
        target=target,
        config=Eagle3Config.for_target(target, layers, run.draft),
        objective=run.objective,
        optim=run.optim,
        trainer=run.trainer,
        validation_share=run.data.validation_share,
        directory=run.directory / "train",
        name=run.name,
        resolved=resolved(run),
    )
    if trainer.finished():
        return False
    trainer.run()
    return True


if __name__ == "__main__":
    stage("train", main)
