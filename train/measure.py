"""Figures of a run: JSON lines always, wandb when asked for; progress on the terminal."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TaskID, TextColumn

from models.artefact import read_json_lines, write_bytes
from models.errors import Refused
from train.config import TrainerConfig
from train.resume import Progress as ProgressState

log = logging.getLogger(__name__)

LINE_SECONDS = 15
"""Between two progress lines where there is no terminal."""


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process has held so far: of the GPU's memory, or of the machine's on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would tell the parent's peak, where that is larger: it survives exec
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass
class Window:
    """Work since the last line of the journal."""

    started: float = field(default_factory=time.monotonic)
    tokens: int = 0
    rows: float = 0
    waited: float = 0

    def rates(self) -> dict[str, float]:
        """Tokens and supervised rows per second over all processes, and the share of time spent on data."""
        seconds = time.monotonic() - self.started
        return {
            "tokens_per_s": self.tokens / seconds,
            "rows_per_s": self.rows / seconds,
            "data_wait": self.waited / seconds,
        }


class Progress:
    """A bar on a terminal; one plain line per interval where there is none."""

    def __init__(self, total: int, done: int, *, shown: bool) -> None:
        self.total, self.told, self.bar, self.shown = total, time.monotonic(), None, shown
        if shown and sys.stderr.isatty():
            self.bar = Bar(*Bar.get_default_columns(), TextColumn("{task.fields[said]}"), console=Console(stderr=True))
            self.bar.add_task("steps", total=total, completed=done, said="")

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def advance(self, step: int, line: dict[str, Any] | None) -> None:
        """Note that a step is done, and what the journal's line for it says, if there is one."""
        said: dict[str, Any] = {}
        if line is not None:
            accuracy = " ".join("-" if share is None else f"{share:.2f}" for share in line["accuracy"])
            said["said"] = f"loss {line['loss']:.3f}  accuracy {accuracy}  {line['tokens_per_s']:.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(TaskID(0), completed=step, **said)
        elif self.shown and said and (time.monotonic() - self.told >= LINE_SECONDS or step == self.total):
            self.told = time.monotonic()
            log.info("step %d of %d  %s", step, self.total, said["said"])


class Journal:
    """Appends one JSON object per line to metrics.jsonl and mirrors it to wandb.

    Lines after the step that a resumed run starts from are dropped first: they will be written again. The
    wandb run goes on in the one that `progress` remembers, and is remembered there.
    """

    def __init__(self, path: Path, settings: TrainerConfig, run: str, progress: ProgressState) -> None:
        self.path = path
        kept = [line for line in self.read(path) if line["step"] <= progress.step]
        write_bytes(path, b"".join(json.dumps(line).encode() + b"\n" for line in kept))
        self.handle = path.open("a")
        self.wandb: Any = None
        if settings.wandb != "disabled":
            try:
                import wandb
            except ImportError:
                raise Refused(
                    f"trainer.wandb={settings.wandb}, but wandb is not installed; pip install wandb, "
                    "or use trainer.wandb=disabled"
                ) from None

            os.environ.setdefault("WANDB_SILENT", "true")
            try:
                self.wandb = wandb.init(
                    project=settings.wandb_project,
                    name=run,
                    id=progress.run_id,
                    resume="allow" if progress.run_id else None,
                    mode="online" if settings.wandb == "online" else "offline",
                    dir=str(path.parent),
                )
            except wandb.errors.Error as error:
                reason = str(error).splitlines()[0]
                raise Refused(f"trainer.wandb={settings.wandb}: {reason}; try trainer.wandb=offline") from None
            progress.run_id = self.wandb.id
            # wandb's own step only grows; a resumed run goes back, so the charts hang on ours.
            self.wandb.define_metric("step")
            self.wandb.define_metric("*", step_metric="step")

    def write(self, values: dict[str, Any]) -> None:
        """Append one line."""
        self.handle.write(json.dumps(values) + "\n")
        self.handle.flush()
        if self.wandb is not None:
            flat = {key: value for key, value in values.items() if not isinstance(value, list)}
            for key, value in values.items():
                if isinstance(value, list):
                    flat |= {f"{key}/{k}": each for k, each in enumerate(value) if each is not None}
            self.wandb.log(flat)

    def close(self) -> None:
        """Flush everything."""
        self.handle.close()
        if self.wandb is not None:
            self.wandb.finish()

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """All complete lines so far. A torn last one is left out; others that are no JSON are, with a warning."""
        return read_json_lines(path)
