"""`python -m slurm.generate`: generation on a node of a cluster, which serves the target to itself.

A task of the array starts the run's engine without speculation, on a port that no other task has, asks it for what is
still missing, and stops it. With engine=none it is `python -m featurize.generate`, which asks `generate.urls`.
"""

from __future__ import annotations

import os


def main() -> None:
    """The command line."""
    from conf import Run, stage
    from featurize.generate import fill_and_pack
    from serve_eval.servers import serving

    def work(run: Run) -> bool:
        if run.engine.kind == "none":
            return fill_and_pack(run.generate, run.target)
        task = os.environ.get("SLURM_ARRAY_TASK_ID", "0")
        place = run.directory / "slurm" / f"server-{task}"
        with serving(run.engine, run.target.path, method="none", head=None, k=0, directory=place) as server:
            run.generate.urls, run.generate.model = [f"{server.url}/v1"], "target"
            return fill_and_pack(run.generate, run.target)

    stage("generate", work, shared=True)


if __name__ == "__main__":
    main()
