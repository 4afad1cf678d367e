"""`python -m train`: feature store -> trained head; `--multirun optim.lr=1e-3,3e-4`: several, and a table of them.

With `spool.gigabytes`, `python -m featurize` runs beside it.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from conf import Run, load, resolved, stage
from train.signals import PREEMPTED, StopRequest


def main(run: Run) -> bool:
    """Open the features, train, leave checkpoints, metrics and curves in runs/<name>/train."""
    stop = StopRequest()  # before the imports and all that takes long: a preemption may come at any time
    from featurize.spooled import SpoolStore
    from featurize.store import FeatureStore, link_features
    from models.drafts import head_config
    from models.planes import FINAL
    from models.target import aux_layers, describe_target
    from train.loop import Trainer

    target = describe_target(run.target)
    layers = aux_layers(target, run.target.aux_layers)
    config = head_config(target, layers, run.draft)
    over_final = config.planes == (FINAL,)
    if run.features_of is not None:
        link_features(run.directory, run.features_of)
    if run.spool.gigabytes is None:
        store: FeatureStore = FeatureStore.open(run.directory / "features")
    else:
        attached = SpoolStore.attach(run.spool, run.trainer.seed, run.trainer.epochs, lambda: stop.asked)
        if attached is None:
            sys.exit(PREEMPTED)
        store = attached
    store.require(target, layers, final=over_final)
    trainer = Trainer(
        store=store.over_final() if over_final else store,
        target=target,
        config=config,
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
    tell(run.directory, *sections, features_of=run.features_of)


def sweep(overrides: list[str]) -> int:
    """The runs of a --multirun, one after the other, and their table."""
    from conf.sweep import expand
    from featurize.contract import require_planes
    from featurize.store import link_features
    from train.sweep import begin, render_table, run_all

    sweep = expand(overrides)
    if sweep.base.dry_run:
        for job in sweep.jobs:
            run = load(job.overrides)
            print(f"== {run.name}")
            if run.features_of is None:
                require_planes(run.draft, run.featurize)
            dry_run(replace(run, features_of=run.features_of or sweep.base.name))
        return 0
    if sweep.base.features_of is not None:
        link_features(sweep.base.directory, sweep.base.features_of)
    begin(sweep.base.directory, [job.name for job in sweep.jobs])
    code = run_all([job.overrides for job in sweep.jobs])
    render_table(sweep.base.directory)
    return code


if __name__ == "__main__":
    stage("train", main, sweep=sweep, dry_run=dry_run)
