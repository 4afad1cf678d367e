"""A sweep: runs that differ in how a head is trained, on the features of one run, ranked by simulated AL.

runs/<name>/sweep.json names the runs; each lies beside runs/<name>, as a run of its own whose `features` is a link to
the first one's, so that every other stage works on it as on any run. Here they are trained one after the other, each
in a process of its own: what one leaves behind in memory, or how it fails, is nothing to the next. On a cluster they
are the tasks of an array (slurm/submit.py).

    python -m train.sweep name=mine     # the table of a sweep, at any time

A difference between two settings means something only beside what chance alone does. So where `trainer.seed` is swept,
the table ends with the mean and the range of each setting's seeds.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.table import Table

from featurize.store import link_features
from models.artefact import read_json, write_json
from models.errors import Refused
from models.terminal import tables
from train.measure import Journal
from train.signals import PREEMPTED

STOPPED = (PREEMPTED, 130, -signal.SIGINT)
"""Ends of a run after which the next one is not begun, whoever asked it to stop."""


def begin(base: Path, names: Sequence[str]) -> None:
    """Note the runs of the sweep of `base`, with those of earlier calls, and give each the features of `base`.

    Raises:
        Refused: a run of that name has features of its own.
    """
    names = [Path(name).name for name in names]
    for name in names:
        link_features(base.parent / name, base.name)
    write_json(base / "sweep.json", {"runs": list(dict.fromkeys([*swept(base), *names]))})


def swept(base: Path) -> list[str]:
    """The names of the runs in the sweep of `base`, in the order of their appearance."""
    record = base / "sweep.json"
    return list(read_json(record)["runs"]) if record.exists() else []


def run_all(jobs: Sequence[list[str]]) -> int:
    """Train one after the other, each with its overrides; one that fails does not keep the next from it.

    Returns:
        0, or the exit code of the last one that failed; a signal goes to the run in progress and ends the sweep, with
        PREEMPTED where the run could not say so itself.

    Raises:
        Refused: these are several processes of one job, which would all train everything.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise Refused("--multirun trains in one process; for several, python -m slurm.submit --multirun makes an array")
    code, asked = 0, 0
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = number
        if process is not None:
            process.send_signal(number)

    earlier = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        for overrides in jobs:
            process = subprocess.Popen([sys.executable, "-m", "train", *overrides])
            if asked:  # before there was anybody to hand it to
                process.send_signal(asked)
            try:
                ended = process.wait()
            except KeyboardInterrupt:  # it has had the Ctrl-C, too
                process.wait()
                ended = 130
            if ended in STOPPED:
                return ended if ended > 0 else 130
            if asked:  # it ended all the same, or before it could listen
                return ended if ended > 0 else PREEMPTED
            code = ended or code
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    return code if code >= 0 else 1


def standing(run: Path) -> dict[str, Any]:
    """Where a run stands: `al` and `step` of its best validation (None before the first), and its `state` in words."""
    manifest = run / "train" / "manifest.json"
    if manifest.exists():
        found = read_json(manifest)
        return {"al": found["best_al"], "step": found["best_step"], "state": "finished"}
    lines = Journal.read(run / "train" / "metrics.jsonl")
    best = max((line for line in lines if "val_al" in line), key=lambda line: line["val_al"], default=None)
    at = max((line["step"] for line in lines), default=None)
    state = "not begun" if at is None else f"at step {at:,}"
    return {"al": best and best["val_al"], "step": best and best["step"], "state": state}


def ranking(base: Path) -> list[tuple[str, dict[str, Any]]]:
    """The runs of the sweep of `base` with their standing, the best simulated AL first, runs without one last."""
    runs = [(name, standing(base.parent / name)) for name in swept(base)]
    return sorted(runs, key=lambda run: (-(run[1]["al"] or 0), run[0]))


def over_seeds(base: Path) -> dict[str, list[float]]:
    """Simulated AL by setting: those of its finished runs, ascending, that differ in nothing but `trainer.seed`.

    Settings with a single such run are left out: one run has no spread.
    """
    found: dict[str, list[float]] = {}
    for name, standing_of in ranking(base):
        setting, seeds = re.subn(r"-seed-\d+", "", name)
        if seeds and standing_of["state"] == "finished" and standing_of["al"] is not None:
            found.setdefault(setting, []).append(standing_of["al"])
    return {setting: sorted(als) for setting, als in found.items() if len(als) > 1}


def render_table(base: Path) -> None:
    """Print the ranking, then the mean and range over seeds of settings that have several.

    Raises:
        Refused: there is no sweep of that run.
    """
    if not (runs := ranking(base)):
        raise Refused(f"{base} has no sweep; python -m train --multirun begins one")
    table = Table(title=f"sweep of {base.name}", title_justify="left")
    table.add_column("run", overflow="fold")
    for column in ("best simulated AL", "at step"):
        table.add_column(column, justify="right")
    table.add_column("state")
    for name, found in runs:
        al = "n/a" if found["al"] is None else f"{found['al']:.3f}"
        step = "n/a" if found["step"] is None else f"{found['step']:,}"
        table.add_row(name, al, step, found["state"])
    console = tables()
    console.print(table)
    for setting, als in over_seeds(base).items():
        told = f"{setting}: mean AL {statistics.fmean(als):.3f} of {len(als)} seeds, from {als[0]:.3f} to {als[-1]:.3f}"
        console.print(told, soft_wrap=True)


if __name__ == "__main__":
    from conf import Run, stage

    def work(run: Run) -> None:
        """Print the sweep's table."""
        render_table(run.directory)

    stage("sweep", work, shared=True)
