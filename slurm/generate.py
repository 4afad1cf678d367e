"""`python -m slurm.generate`: generation on a node of a cluster, which serves the target to itself.

A task of the array starts the run's engine without speculation, on a port that no other job has, asks it for what is
still missing, and stops it. With engine=none it is `python -m featurize.generate`, which asks `generate.urls`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from featurize.config import GenerateConfig
from featurize.generate import fill_and_pack
from models.config import EngineConfig, TargetConfig
from serve_eval.servers import serving


def generate(config: GenerateConfig, target: TargetConfig, engine: EngineConfig, logs: Path) -> bool:
    """Fill what is missing with a server of this job; False when nothing is.

    Args:
        logs: folder in which every task of the array gets one of its own for its server.

    Raises:
        Refused: as `fill_and_pack`, or the server does not start.
    """
    if engine.kind == "none":
        return fill_and_pack(config, target)

    @contextlib.contextmanager
    def server() -> Iterator[list[str]]:
        place = logs / f"server-{os.environ.get('SLURM_ARRAY_TASK_ID', '0')}"
        with serving(engine, target.path, method="none", head=None, k=0, directory=place) as started:
            yield [f"{started.url}/v1"]

    return fill_and_pack(replace(config, model="target"), target, server)


if __name__ == "__main__":
    from conf import Run, stage

    def work(run: Run) -> bool:
        """Make the run's conversations."""
        return generate(run.generate, run.target, run.engine, run.directory / "slurm")

    stage("generate", work, shared=True)
