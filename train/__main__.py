"""`python -m train`: feature store -> trained head."""

from __future__ import annotations

from conf import Run, resolved, stage


def main(run: Run) -> bool:
    """Open the features, train, leave checkpoints, metrics and curves in runs/<name>/train."""
    from featurize.store import FeatureStore
    from models.eagle3 import Eagle3Config
    from models.target import aux_layers, describe_target
    from train.loop import Trainer

    target = describe_target(run.target)
    layers = aux_layers(target, run.target.aux_layers)
    store = FeatureStore.open(run.directory / "features")
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
