"""The training loop: plan, unroll, step, validate, save. One process or many, started or resumed.

Everything that decides the weights is a function of the settings and the optimizer step: the order of the
packs, the learning rate, the rows that are sampled. Processes share the packs of a step among them; the
loss is already divided by the step's global row counts, so gradients add up to the same whatever the split.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from featurize.store import FeatureStore
from models.artefact import fingerprint, read_json, write_json
from models.checkpoint import describe
from models.eagle3 import Eagle3Config, Eagle3Head, initialise
from models.errors import Refused
from models.target import Target
from models.vocabulary import choose_draft_vocabulary
from train import resume
from train.config import ObjectiveConfig, OptimConfig, TrainerConfig
from train.measure import Journal, Progress, draw_curves
from train.objective import Objective, Outcome, judge
from train.optimizer import Optimizer
from train.packs import Pack, build_pack, held_out, plan_epoch, plan_packs, read_ahead, row_count
from train.signals import PREEMPTED, StopRequest
from train.start import STEPS, fit_start, rows_wanted
from train.validate import validate

log = logging.getLogger(__name__)

SAMPLE = 64
"""Training documents whose planes decide the head's start values."""

StepPacks = list[list[int]]
"""Packs of one optimizer step, over all processes: lists of document indices."""


def schedule(optim: OptimConfig, step: int, total: int) -> float:
    """Factor on the peak learning rates at optimizer step `step` (0-based) out of `total`."""
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    done = (step - optim.warmup_steps) / max(1, total - optim.warmup_steps)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[optim.schedule]
    return optim.final_share + (1 - optim.final_share) * shape


def count_supervised(store: FeatureStore, indices: Sequence[int], vocab_size: int) -> torch.Tensor:
    """How often each target id is a supervised token of these documents, int64 [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for index in indices:
        tokens = store.read(index).tokens.long()
        for start, end in store.documents[index].spans:
            counts += torch.bincount(tokens[start:end], minlength=vocab_size)
    return counts


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


def start_accelerator(device: str) -> Accelerator:
    """accelerate's view of the processes; CPU means gloo, on every machine.

    Raises:
        Refused: a device that is not there, a backend that this trainer does not drive, or a launcher whose
            processes do not know of one another (each would train alone on all of the data).
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise Refused("trainer.device=cuda, but there is no CUDA device here; use trainer.device=auto")
    accelerator = Accelerator(cpu=device == "cpu" or not torch.cuda.is_available())
    if accelerator.distributed_type.value not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise Refused(f"launched as {accelerator.distributed_type.value}; this trainer runs as one process or with DDP")
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        raise Refused(f"{started} processes were started, but accelerate sees {accelerator.num_processes}")
    return accelerator


class Trainer:
    """One run of training over a feature store."""

    def __init__(
        self,
        *,
        store: FeatureStore,
        target: Target,
        config: Eagle3Config,
        objective: ObjectiveConfig,
        optim: OptimConfig,
        trainer: TrainerConfig,
        validation_share: float,
        directory: Path,
        name: str,
    ) -> None:
        self.store, self.optim, self.settings, self.directory, self.name = store, optim, trainer, directory, name
        self.tied_to = describe(target)
        self.accelerator = start_accelerator(trainer.device)
        everything = range(len(store.documents))
        self.validation = [i for i in everything if held_out(store.documents[i].id, validation_share)]
        self.training = sorted(set(everything) - set(self.validation))
        if not self.training:
            raise Refused(f"all {len(store.documents)} documents are held out; lower data.validation_share")
        self.plan = [packs for epoch in range(trainer.epochs) for packs in self._epoch(epoch)]

        counts = count_supervised(store, self.training, config.vocab_size)
        ids = choose_draft_vocabulary(counts, config.draft_vocab_size)
        self.coverage = 1.0 if ids is None else counts[ids].sum().item() / max(1, counts.sum().item())
        torch.manual_seed(trainer.seed)
        self.head = Eagle3Head(config, ids)
        initialise(self.head, target, torch.cat([store.read(i).aux for i in self.training[:SAMPLE]]))
        self.objective = Objective(self.head, target, objective, trainer.precision).to(self.accelerator.device)
        if not resume.checkpoints(self.checkpoints):
            fit_start(self.objective, self._first_packs)
        self.optimizer = Optimizer(self.head, optim)
        self.model: Any = self.objective
        if self.accelerator.num_processes > 1:
            device_ids = [self.accelerator.local_process_index] if self.accelerator.device.type == "cuda" else None
            self.model = torch.nn.parallel.DistributedDataParallel(self.objective, device_ids, broadcast_buffers=False)
        self.identity = fingerprint(
            {
                "objective": asdict(objective),
                "optim": asdict(optim),
                "head": config.to_dict(),
                "target": self.tied_to,
                "features": store.fingerprint,
                "validation_share": validation_share,
                "trainer": [getattr(trainer, key) for key in ("epochs", "pack_tokens", "packs_per_step", "seed")],
                "precision": trainer.precision,
            }
        )

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.directory / "checkpoints"

    def _first_packs(self) -> Iterator[Pack]:
        """The first packs of training, as many as the start values are fitted to."""
        wanted = rows_wanted(self.head.config)
        for indices in (pack for packs in self.plan for pack in packs):
            if wanted <= 0:
                return
            pack = build_pack(self.store, indices)
            wanted -= row_count(pack.spans, STEPS - 1)
            yield pack.to(self.accelerator.device)

    def _epoch(self, epoch: int) -> list[StepPacks]:
        return plan_epoch(
            self.store.documents,
            self.training,
            budget=self.settings.pack_tokens,
            packs_per_step=self.settings.packs_per_step,
            seed=self.settings.seed,
            epoch=epoch,
        )

    def finished(self) -> bool:
        """Whether this run has been trained to its end already.

        Raises:
            Refused: it has, but with other settings or data.
        """
        manifest = self.directory / "manifest.json"
        if not manifest.exists():
            return False
        found = read_json(manifest)
        if found.get("identity") != self.identity:
            raise Refused(f"{self.directory} was trained with other settings or data; delete it or choose another name")
        return all((self.directory / path / "state.json").exists() for path in found["checkpoints"].values())

    def run(self) -> None:
        """Train to the end, from the newest checkpoint if there is one.

        Raises:
            Refused: checkpoints of other settings, none that is complete, or gradients that are not finite.
            SystemExit: with PREEMPTED after a signal, when everything is saved.
        """
        stop = StopRequest()
        progress = self._start()
        total = len(self.plan)
        journal = None
        if self.accelerator.is_main_process:
            journal = Journal(self.directory / "metrics.jsonl", self.settings, self.name, progress)
            log.info(
                "training on %d documents (%d held out) in %d steps; draft vocabulary covers %.2f %% of their tokens%s",
                len(self.training), len(self.validation), total, 100 * self.coverage,
                f"; going on after step {progress.step}" if progress.step else "",
            )  # fmt: skip
        with Progress(total, progress.step, shown=self.accelerator.is_main_process) as bar:
            for line in self._steps(progress.step):
                progress.step += 1
                last, leave = progress.step == total, self._agree(stop.asked)
                bar.advance(progress.step, line)
                if journal is not None and line is not None:
                    journal.write(line)
                if last or progress.step % self.settings.validate_every == 0:
                    self._validate(progress, journal)
                elif leave or progress.step % self.settings.checkpoint_every == 0:
                    self._save(progress)
                if leave and not last:
                    if journal is not None:
                        journal.close()
                        log.info("asked to stop: step %d is saved; run again to go on", progress.step)
                    sys.exit(PREEMPTED)
        if journal is not None:
            journal.close()
            draw_curves(journal.path, self.directory / "curves.png")
            last_name, best_name = resume.name_of(total), resume.name_of(progress.best_step or total)
            summary = {
                "identity": self.identity,
                "steps": total,
                "best_al": progress.best_al,
                "best_step": progress.best_step,
                "coverage": self.coverage,
                "documents": {"training": len(self.training), "validation": len(self.validation)},
                "checkpoints": {"best": f"checkpoints/{best_name}", "last": f"checkpoints/{last_name}"},
            }
            write_json(self.directory / "manifest.json", summary)
        self.accelerator.wait_for_everyone()

    def _start(self) -> resume.Progress:
        if self.settings.resume == "never" and resume.checkpoints(self.checkpoints):
            raise Refused(f"{self.checkpoints} has checkpoints; set trainer.resume=auto to go on, or another name=...")
        found = resume.restore(self.checkpoints, self.head, self.optimizer, self.identity)
        return found or resume.Progress(identity=self.identity)

    def _agree(self, asked: bool) -> bool:
        """Whether any process was asked to stop."""
        if self.accelerator.num_processes == 1:
            return asked
        flag = torch.tensor(float(asked), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum").item())

    def _mine(self, packs: StepPacks) -> list[list[int] | None]:
        """This process's packs of one optimizer step, padded so that every process runs as many."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        mine: list[list[int] | None] = list(packs[rank::world])
        return mine + [None] * (math.ceil(len(packs) / world) - len(mine))

    def _counts(self, packs: StepPacks) -> list[float]:
        """Supervised rows per unroll step over all processes, at least 1: an empty step must not divide by 0."""
        spans = [span for pack in packs for index in pack for span in self.store.documents[index].spans]
        return [max(1, row_count(spans, k)) for k in range(self.objective.settings.unroll_steps)]

    def _steps(self, done: int) -> Iterator[dict[str, Any] | None]:
        """Run the optimizer steps from `done` on; yields a line for the journal when one is due, else None."""
        stream = read_ahead(self.store, [pack for packs in self.plan[done:] for pack in self._mine(packs)])
        window = Window()
        for step, packs in enumerate(self.plan[done:], start=done):
            counts, mine = self._counts(packs), len(self._mine(packs))
            sums_K = torch.zeros(self.objective.settings.unroll_steps)
            for index in range(mine):
                started = time.monotonic()
                pack = next(stream)
                window.waited += time.monotonic() - started
                pack = pack.to(self.accelerator.device) if pack is not None else None
                outcome = self._backward(step, index, pack, counts, synchronise=index + 1 == mine)
                sums_K += outcome.sums_K.detach().cpu()
            due = (step + 1) % self.settings.log_every == 0 or step + 1 == len(self.plan)
            accuracy = self._accuracy(pack, outcome) if due else []  # before the weights change
            lr, norm = self._update(step)
            window.tokens += sum(self.store.documents[index].length for pack in packs for index in pack)
            window.rows += counts[0]
            line = None
            if due:
                line = {"step": step + 1, **self._losses(sums_K, counts), "accuracy": accuracy}
                line |= {"lr": lr, "grad_norm": norm, **window.rates()}
                window = Window()
            yield line

    def _backward(
        self, step: int, index: int, pack: Pack | None, counts: Sequence[float], *, synchronise: bool
    ) -> Outcome:
        world = self.accelerator.num_processes
        with contextlib.nullcontext() if synchronise or world == 1 else self.model.no_sync():
            place = step * self.settings.packs_per_step + index * world + self.accelerator.process_index
            outcome = self.model(pack, counts, self.settings.seed * 7_919 + place)
            # DDP averages over processes; the loss is already a share of the global sum.
            (outcome.loss * world).backward()
        return outcome

    def _update(self, step: int) -> tuple[float, float]:
        """Clip, then step; returns the learning rate and the gradient norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.optim.max_grad_norm or math.inf).item()
        if not math.isfinite(norm):
            raise Refused(f"gradients of step {step + 1} are not finite; lower optim.lr or check the features")
        factor = schedule(self.optim, step, len(self.plan))
        self.optimizer.step(factor)
        return self.optim.lr * factor, norm

    def _losses(self, sums_K: torch.Tensor, counts: Sequence[float]) -> dict[str, Any]:
        """Loss of an optimizer step, whole and per unroll step, over all processes."""
        if self.accelerator.num_processes > 1:
            sums_K = self.accelerator.reduce(sums_K.to(self.accelerator.device), "sum").cpu()
        settings = self.objective.settings
        per_step = [total / settings.row_share**k / counts[k] for k, total in enumerate(sums_K.tolist())]
        return {"loss": sum(loss * settings.decay**k for k, loss in enumerate(per_step)), "loss_per_step": per_step}

    def _accuracy(self, pack: Pack | None, outcome: Outcome) -> list[float | None]:
        """Greedy hits per unroll step on this process's last pack; None where it supervises no row."""
        unknown: list[float | None] = [None] * self.objective.settings.unroll_steps
        if pack is None or not outcome.steps:
            return unknown
        hits_RK, _ = judge(self.objective, pack, outcome.steps)
        known = [None if math.isnan(share) else share for share in hits_RK.nanmean(0).tolist()]
        return known + unknown[len(known) :]

    def _validate(self, progress: resume.Progress, journal: Journal | None) -> None:
        """Validate, and save: the best checkpoint so far must exist."""
        if self.validation:
            packs = plan_packs(self.store.documents, self.validation, self.settings.pack_tokens)
            verdict = validate(self.objective, self.store, packs, self.accelerator)
            if progress.best_al is None or verdict.greedy > progress.best_al:
                progress.best_al, progress.best_step = verdict.greedy, progress.step
            if journal is not None:
                line = {"step": progress.step, "val_al": verdict.greedy, "val_al_sampled": verdict.sampled}
                journal.write(line | {"val_accuracy": verdict.accuracy})
                log.info(
                    "validation at step %d: simulated AL %.3f greedy, %.3f sampled; accuracy %s",
                    progress.step, verdict.greedy, verdict.sampled, " ".join(f"{a:.3f}" for a in verdict.accuracy),
                )  # fmt: skip
        self._save(progress)

    def _save(self, progress: resume.Progress) -> None:
        if self.accelerator.is_main_process:
            resume.save(self.checkpoints, self.head, self.optimizer, progress, self.tied_to)
            resume.prune(self.checkpoints, self.settings.keep_checkpoints, progress)
        self.accelerator.wait_for_everyone()
