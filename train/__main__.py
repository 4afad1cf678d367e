"""`python -m train`: feature store -> trained head; `--multirun optim.lr=1e-3,3e-4`: several, and a table of them.

With `spool.gigabytes`, `python -m featurize` runs beside it.
"""

from __future__ import annotations

from conf import Run, resolved, stage
from train.signals import StopRequest


def main(run: Run) -> bool:
    """Open the features, train, leave checkpoints, metrics and curves in runs/<name>/train."""
    stop = StopRequest()  # before the imports and all that takes long: a preemption may come at any time
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
    trainer.run(stop)
    return True


def dry_run(run: Run) -> None:
    """Tell what `main` would do."""
    from train.dry_run import tell

    sections = (run.data, run.featurize, run.spool, run.target, run.draft, run.objective, run.optim, run.trainer)
    tell(run.directory, *sections)


def sweep(overrides: list[str]) -> int:
    """The runs of a --multirun, one after the other, and their table."""
    from conf.sweep import expand
    from train.sweep import begin, render_table, run_all

    sweep = expand(overrides)
    begin(sweep.base.directory, [job.name for job in sweep.jobs])
    code = run_all([job.overrides for job in sweep.jobs])
    render_table(sweep.base.directory)
    return code


if __name__ == "__main__":
    stage("train", main, sweep=sweep, dry_run=dry_run)
