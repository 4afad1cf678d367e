"""The stages of a run as a cluster sees them: what each runs, what it makes, and when it is finished.

A stage is finished when what it writes last is there and the configuration that was saved with it agrees with today's
in every section that the stage reads. If it does not agree, the stage is run again and judges for itself: it does
nothing, goes on, or refuses.

With `engines` the served sweep is an array before the evaluation, which joins its parts (serve_eval/parts.py). With a
spool (`spool.gigabytes`) extraction is no stage of its own: it runs beside training, in the same job.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from models.artefact import fingerprint

Values = Mapping[str, Any]
"""A resolved configuration as plain values, as it is saved with every output."""


@dataclass(frozen=True)
class Stage:
    """One stage of a run.

    Attributes:
        name: what it is called in the queue.
        module: what is run, with the overrides of the whole run.
        sections: what it reads of the configuration.
        record: name of the configuration that it saves when it is done.
        last: what it writes last.
        progress: files that become more, or longer, as it goes on; None for a stage that is not requeued when it fails.
        asks: its key in `cluster`; empty for its name.
        beside: what runs beside it on nodes of its own, for as long as it does: a key in `cluster`.
    """

    name: str
    module: str
    sections: tuple[str, ...]
    record: str
    last: Path
    progress: str | None = None
    beside: str | None = None
    asks: str = ""


TABLE = Stage("table", "train.sweep", (), "", Path(), asks="export")
"""What follows on the training of a sweep; it wants what the export of a head wants."""


def chain(values: Values, directory: Path, *, swept: bool = False) -> list[Stage]:
    """The stages of a run, in order; preparation, generation and extraction only where they are the run's own.

    Args:
        swept: it is the base of a sweep, which ends with training and its table.
    """
    output, packed = generated(values)
    stages = []
    if values["target"]["package"] is not None:
        target = Path(values["target"]["path"]).expanduser()
        stages.append(Stage("prepare", "models.packaged", ("target",), "prepare", target / "config.json"))
    if {output, packed} & {Path(path).expanduser() for path in sources(values)}:
        sections = ("target", "generate")
        written = glob.escape(str(output))
        stages.append(Stage("generate", "slurm.generate", sections, "generate", packed, written))
    shards, checkpoints = directory / "features/shards/*.json", directory / "train/checkpoints/step-*"
    features, train = directory / "features/manifest.json", directory / "train/manifest.json"
    summary, measured = directory / "eval/summary.json", directory / "eval/*.json*"
    trained_by = ("target", "data", "draft", "objective", "optim", "trainer")
    if spool(values) is None:
        if values["features_of"] is None:
            made_by: tuple[str, ...] = ("target", "data", "featurize")
            if values["featurize"]["teacher_k"] is not None:  # then extraction chooses the draft vocabulary
                made_by += ("draft",)
            stages.append(Stage("extract", "featurize", made_by, "featurize", features, str(shards)))
        stages.append(Stage("train", "train", trained_by, "train", train, str(checkpoints)))
    else:
        both = (*trained_by, "featurize")
        stages.append(Stage("train", "train", both, "train", train, str(checkpoints), beside="extract"))
    if swept:
        return [*stages, TABLE]
    stages.append(Stage("export", "models.export", ("target", "export"), "export", directory / "export/export.json"))
    if values.get("engines"):
        parts = directory / "eval/parts"
        measured_by, windows = ("target", "engines", "eval"), str(parts / "*/*.json*")
        stages.append(Stage("measure", "serve_eval.apart", measured_by, "", parts, windows, asks="evaluate"))
    served_by = ("target", "engine", "engines", "eval")
    return [*stages, Stage("evaluate", "serve_eval", served_by, "serve_eval", summary, str(measured))]


def spool(values: Values) -> Path | None:
    """The folder through which features are streamed from extraction to training; None when they are stored."""
    return Path(values["spool"]["directory"]) if values["spool"]["gigabytes"] is not None else None


def sources(values: Values) -> list[str]:
    """The files, folders and names of data sets that are featurized."""
    mixture = values["data"]["mixture"].values()
    return [*values["data"]["conversations"], *(path for source in mixture for path in source["paths"])]


def generated(values: Values) -> tuple[Path, Path]:
    """The file that generation fills, and the one that it packs in the end."""
    output = Path(values["generate"]["output"]).expanduser()
    return output, output.with_name(output.name + ".gz")


def made_of(stage: Stage, values: Values) -> str:
    """A fingerprint of all that a stage reads of the configuration."""
    return fingerprint([stage.name, *(values.get(section) for section in stage.sections)])


def is_finished(stage: Stage, values: Values, directory: Path) -> bool:
    """Whether a stage need not be run again for this configuration."""
    if not stage.last.exists():
        return False
    record = directory / "config" / f"{stage.record}.yaml"
    if not record.exists():  # a target that another run prepared, features that were copied
        return True
    saved = OmegaConf.to_container(OmegaConf.load(record))
    assert isinstance(saved, dict)
    return all(saved.get(section) == values.get(section) for section in stage.sections)
