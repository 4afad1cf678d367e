"""How far a stage is: what is done of all there is to do, and how long the rest takes at the pace of its present start.

All of it is read from the files of the stages. What a stage does not write down before its end is not guessed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from featurize.shards import shard_ends
from models.artefact import read_json
from slurm.chain import Stage, Values
from slurm.tasks import tasks_of
from train.measure import Journal
from train.sweep import standing


@dataclass(frozen=True)
class Pace:
    """How far a stage is.

    Attributes:
        done, of: in units of the stage, and all of them; None where it is not known (yet).
        left_s: until all are done; an estimate, None where there is nothing to go by.
        told: the same in words, with what else is worth knowing.
    """

    done: int | None = None
    of: int | None = None
    left_s: float | None = None
    told: str = ""


NOTHING = Pace()


def pace(stage: Stage, values: Values, directory: Path, sweep: Sequence[str], running_s: int | None) -> Pace:
    """How far a stage is, by what it has written.

    Args:
        sweep: names of its runs, if it is the training of a sweep.
        running_s: since when its job runs; None when it does not.
    """
    since = None if running_s is None else time.time() - running_s
    if stage.name == "train" and sweep:
        done = sum(standing(directory.with_name(name))["state"] == "finished" for name in sweep)
        return Pace(done, len(sweep), told=f"{done} of {len(sweep)} runs")
    if stage.name == "train":
        return trained(directory / "train", standing(directory), since)
    if stage.name == "extract":
        return extracted(directory / "features", since)
    if stage.name == "generate" and stage.progress:
        return generated(Path(values["generate"]["output"]).expanduser(), values)
    if stage.name == "measure":
        parts = tasks_of(stage, values, directory, (), {})
        done = sum(part.finished for part in parts)
        return Pace(done, len(parts), told=in_words(done, len(parts), "parts"))
    if stage.name == "evaluate" and (directory / "eval/cells.jsonl").exists():
        done = count_lines(directory / "eval/cells.jsonl")
        return Pace(done, told=f"{done} windows measured")
    return NOTHING


def count_lines(path: Path) -> int:
    """Lines of a file."""
    with path.open("rb") as handle:
        return sum(1 for _ in handle)


def written_at(paths: Iterable[Path]) -> dict[Path, float]:
    """When each was last written, of those that are still there: the stage goes on and may remove what it has seen."""
    found = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found[path] = path.stat().st_mtime
    return found


def in_words(done: int, of: int | None, units: str) -> str:
    """So many of so many."""
    return f"{done:,} of {of:,} {units}" if of else f"{done:,} {units}"


def rest(done: int, of: int | None, before: int, seconds: float) -> float | None:
    """Seconds until `of` are done, when `before` were so long ago; None without a pace."""
    if of is None or done <= before or seconds <= 0:
        return None
    return (of - done) * seconds / (done - before)


def generated(output: Path, values: Values) -> Pace:
    """Conversations that are there. How many prompts there are is known once they have been read."""
    if not output.exists():
        return NOTHING
    settings, done = values["generate"], count_lines(output)
    of = None if settings["prompts"] else settings["conversations"]
    return Pace(done, of, told=in_words(done, of, "conversations"))


def extracted(features: Path, since: float | None) -> Pace:
    """Shards, of those that the tokenised set is cut into."""
    if (features / "manifest.json").exists():
        manifest = read_json(features / "manifest.json")
        totals, done = manifest["totals"], len(manifest["files"])
        return Pace(done, done, told=f"{totals['tokens']:,} tokens, {totals['bytes'] / 1e9:.2f} GB")
    written = list(written_at(features.glob("shards/*.json")).values())
    if not written:
        return NOTHING
    of = None
    if (features / "tokenised.json").exists() and (features / "inputs.json").exists():
        size = read_json(features / "inputs.json")["featurize.shard_tokens"]
        of = len(shard_ends([length for _, _, length in read_json(features / "tokenised.json")["documents"]], size))
    left = None
    if since is not None:
        left = rest(len(written), of, sum(each < since for each in written), time.time() - since)
    return Pace(len(written), of, left, in_words(len(written), of, "shards"))


def trained(train: Path, found: dict[str, object], since: float | None) -> Pace:
    """Steps, of all that the journal names. Its pace is that since the oldest checkpoint of the present start."""
    if found["state"] == "not begun":
        return NOTHING
    best = "" if found["al"] is None else f", simulated AL {found['al']:.3f} at step {found['step']:,}"
    if (train / "manifest.json").exists():
        of = read_json(train / "manifest.json").get("steps")
        return Pace(of, of, told=best.removeprefix(", "))
    lines = Journal.read(train / "metrics.jsonl")
    done, of = lines[-1]["step"], next((line["of"] for line in reversed(lines) if "of" in line), None)
    left = None
    if since is not None:
        found_at = written_at(train.glob("checkpoints/step-*[0-9]"))
        saved = [(int(path.name.split("-")[1]), at) for path, at in found_at.items()]
        here = [each for each in saved if each[1] >= since and each[0] < done]
        first, when = min(here) if here else (max((step for step, at in saved if at < since), default=0), since)
        left = rest(done, of, first, (train / "metrics.jsonl").stat().st_mtime - when)
    return Pace(done, of, left, in_words(done, of, "steps") + best)
