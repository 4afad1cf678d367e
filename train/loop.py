"""The training loop: plan, unroll, step, validate, save. One process or many, started or resumed.

Everything that decides the weights is a function of the settings and the optimizer step: the order of the
packs, the learning rate, the rows that are sampled. Processes share the packs of a step among them; the
loss is already divided by the step's global row counts, so gradients add up to the same whatever the split.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

from featurize.store import FeatureStore
from models.artefact import fingerprint, read_json, write_json
from models.checkpoint import describe
from models.eagle3 import Eagle3Config, Eagle3Head, initialise
from models.errors import Refused
from models.target import Target
from models.vocabulary import choose_draft_vocabulary
from train import resume
from train.config import ObjectiveConfig, OptimConfig, TrainerConfig
from train.measure import Journal, draw_curves
from train.objective import Objective, judge, simulated_al
from train.packs import held_out, plan_epoch, plan_packs, read_ahead, row_count
from train.signals import PREEMPTED, StopRequest

log = logging.getLogger(__name__)


def learning_rate(optim: OptimConfig, step: int, total: int) -> float:
    """Learning rate of optimizer step `step` (0-based) out of `total`."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    done = (step - optim.warmup_steps) / max(1, total - optim.warmup_steps)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[optim.schedule]
    return optim.lr * (optim.final_share + (1 - optim.final_share) * shape)


def count_supervised(store: FeatureStore, indices: Sequence[int], vocab_size: int) -> torch.Tensor:
    """How often each target id is a supervised token of these documents, int64 [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for index in indices:
        tokens = store.read(index).tokens.long()
        for start, end in store.documents[index].spans:
            counts += torch.bincount(tokens[start:end], minlength=vocab_size)
    return counts


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
        self.store, self.target, self.optim, self.settings = store, target, optim, trainer
        self.directory, self.name, self.unroll_steps = directory, name, objective.unroll_steps
        self.accelerator = Accelerator(
            cpu=trainer.device == "cpu", dataloader_config=DataLoaderConfiguration(even_batches=False)
        )
        everything = range(len(store.documents))
        self.validation = [i for i in everything if held_out(store.documents[i].id, validation_share)]
        self.training = sorted(set(everything) - set(self.validation))
        if not self.training:
            raise Refused(f"all {len(store.documents)} documents are held out; lower data.validation_share")
        self.epochs = [self._plan(epoch) for epoch in range(trainer.epochs)]
        self.total = sum(len(epoch) for epoch in self.epochs)
        ids = None
        if config.draft_vocab_size < config.vocab_size:
            counts = count_supervised(store, self.training, config.vocab_size)
            ids = choose_draft_vocabulary(counts, config.draft_vocab_size)
            self.coverage = counts[ids].sum().item() / max(1, counts.sum().item())
        else:
            self.coverage = 1.0
        torch.manual_seed(trainer.seed)
        self.head = Eagle3Head(config, ids)
        initialise(self.head, target)
        wrapped = Objective(self.head, target, objective, trainer.precision).to(self.accelerator.device)
        self.objective = wrapped
        parameters = list(self.head.parameters())
        self.optimizer = torch.optim.AdamW(
            parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )
        decisive = [asdict(objective), asdict(optim), config.to_dict(), describe(target), store.fingerprint]
        decisive += [trainer.epochs, trainer.pack_tokens, trainer.packs_per_step, trainer.precision, trainer.seed]
        self.identity = fingerprint([*decisive, validation_share])
        self.model: Any = wrapped
        if self.accelerator.num_processes > 1:
            device_ids = [self.accelerator.local_process_index] if self.accelerator.device.type == "cuda" else None
            self.model = torch.nn.parallel.DistributedDataParallel(wrapped, device_ids, broadcast_buffers=False)

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.directory / "checkpoints"

    def _plan(self, epoch: int) -> list[list[list[int]]]:
        return plan_epoch(
            self.store.documents,
            self.training,
            budget=self.settings.pack_tokens,
            packs_per_step=self.settings.packs_per_step,
            seed=self.settings.seed,
            epoch=epoch,
        )

    def _mine(self, packs: list[list[int]]) -> list[list[int] | None]:
        """This process's packs of one optimizer step, padded so that every process runs as many."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        mine: list[list[int] | None] = list(packs[rank::world])
        return mine + [None] * (math.ceil(len(packs) / world) - len(mine))

    def _counts(self, packs: list[list[int]]) -> list[float]:
        documents = self.store.documents
        spans = [span for pack in packs for index in pack for span in documents[index].spans]
        return [max(1, row_count(spans, k)) for k in range(self.unroll_steps)]

    def finished(self) -> bool:
        """Whether this run has been trained to its end already.

        Raises:
            Refused: it has, but with other settings or data.
        """
        manifest = self.directory / "manifest.json"
        if not manifest.exists():
            return False
        if read_json(manifest)["identity"] != self.identity:
            raise Refused(f"{self.directory} was trained with other settings or data; choose another name=..., or delete it")
        return True

    def run(self) -> None:
        """Train to the end, from the newest checkpoint if there is one."""
        stop = StopRequest()
        progress = resume.Progress(identity=self.identity)
        if self.settings.resume == "auto":
            progress = resume.restore(self.checkpoints, self.head, self.optimizer, self.identity) or progress
        elif resume.checkpoints(self.checkpoints):
            raise Refused(f"{self.checkpoints} has checkpoints; set trainer.resume=auto to go on, or another name=...")
        journal = None
        if self.accelerator.is_main_process:
            self.directory.mkdir(parents=True, exist_ok=True)
            journal_path = self.directory / "metrics.jsonl"
            journal = Journal(
                journal_path, self.settings, run=self.name, run_id=progress.run_id, step=progress.step
            )
            progress.run_id = journal.run_id
            log.info(
                "training %s documents (%s held out), %s steps, draft vocabulary covers %.2f %% of supervised tokens%s",
                len(self.training), len(self.validation), self.total, 100 * self.coverage,
                f"; going on after step {progress.step}" if progress.step else "",
            )  # fmt: skip
        for step, packs, outcome in self._steps(progress.step):
            progress.step = step + 1
            last = progress.step == self.total
            if journal is not None and outcome is not None:
                journal.write(outcome)
            leave = self._agree(stop.asked)
            if last or leave or progress.step % self.settings.validate_every == 0:
                if not leave or last:
                    self._validate(progress, journal)
            if last or leave or progress.step % self.settings.checkpoint_every == 0:
                if journal is not None:
                    resume.save(self.checkpoints, self.head, self.optimizer, progress, describe(self.target))
                    resume.prune(self.checkpoints, self.settings.keep_checkpoints, progress.best_step)
                self.accelerator.wait_for_everyone()
            if leave and not last:
                if journal is not None:
                    journal.close()
                    log.info("asked to stop: saved step %d; run again to go on", progress.step)
                sys.exit(PREEMPTED)
        if journal is not None:
            journal.close()
            draw_curves(journal.path, self.directory / "curves.png")
            summary = {"steps": self.total, "best_al": progress.best_al, "best_step": progress.best_step}
            documents = {"training": len(self.training), "validation": len(self.validation)}
            last = resume.name_of(self.total)
            best = resume.name_of(progress.best_step) if progress.best_step else last
            write_json(
                self.directory / "manifest.json",
                summary | {"identity": self.identity, "coverage": self.coverage, "documents": documents}
                | {"checkpoints": {"best": f"checkpoints/{best}", "last": f"checkpoints/{last}"}},
            )
        self.accelerator.wait_for_everyone()

    def _agree(self, asked: bool) -> bool:
        """Whether any process was asked to stop."""
        if self.accelerator.num_processes == 1:
            return asked
        flag = torch.tensor(float(asked), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum").item())

    def _steps(self, done: int) -> Iterator[tuple[int, list[list[int]], dict[str, Any] | None]]:
        """Optimizer steps from `done` on, each with its packs and, when it is due, a line for the journal."""
        flat = [packs for epoch in self.epochs for packs in epoch][done:]
        stream = read_ahead(self.store, [pack for packs in flat for pack in self._mine(packs)])
        world = self.accelerator.num_processes
        window = {"started": time.monotonic(), "tokens": 0.0, "rows": 0.0, "wait": 0.0}
        for step, packs in enumerate(flat, start=done):
            counts = self._counts(packs)
            sums = torch.zeros(self.unroll_steps)
            due = (step + 1) % self.settings.log_every == 0 or step + 1 == self.total
            accuracy: list[float] = []
            mine = self._mine(packs)
            for index in range(len(mine)):
                waited = time.monotonic()
                pack = next(stream)
                window["wait"] += time.monotonic() - waited
                pack = pack.to(self.accelerator.device) if pack is not None else None
                final = index + 1 == len(mine)
                with contextlib.nullcontext() if final or world == 1 else self.model.no_sync():
                    place = step * self.settings.packs_per_step + index * world + self.accelerator.process_index
                    outcome = self.model(pack, counts, self.settings.seed * 7_919 + place)
                    # DDP averages over processes; the loss is already a share of the global sum.
                    (outcome.loss * world).backward()
                sums += outcome.sums_K.detach().cpu()
                if due and final and outcome.steps and pack is not None:
                    hits, _ = judge(self.objective, pack, outcome.steps)
                    accuracy = hits.nanmean(0).tolist()
                    accuracy += [math.nan] * (self.unroll_steps - len(accuracy))
            lr = learning_rate(self.optim, step, self.total)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            limit = self.optim.max_grad_norm or math.inf
            norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), limit).item()
            if not math.isfinite(norm):
                raise Refused(f"gradients of step {step + 1} are not finite; lower optim.lr or check the features")
            self.optimizer.step()
            self.optimizer.zero_grad()
            window["tokens"] += sum(self.store.documents[i].length for pack in packs for i in pack)
            window["rows"] += counts[0]
            line = None
            if due:
                share = self.objective.settings.row_share
                if world > 1:
                    sums = self.accelerator.reduce(sums.to(self.accelerator.device), "sum").cpu()
                per_step = [total / share**k / counts[k] for k, total in enumerate(sums.tolist())]
                seconds = time.monotonic() - window["started"]
                line = {
                    "step": step + 1,
                    "loss": sum(value * self.objective.settings.decay**k for k, value in enumerate(per_step)),
                    "loss_per_step": per_step,
                    "accuracy": accuracy or [math.nan] * self.unroll_steps,
                    "lr": lr,
                    "grad_norm": norm,
                    "tokens_per_s": window["tokens"] / seconds,
                    "rows_per_s": window["rows"] / seconds,
                    "data_wait": window["wait"] / seconds,
                }
                window = {"started": time.monotonic(), "tokens": 0.0, "rows": 0.0, "wait": 0.0}
                if self.accelerator.is_main_process:
                    log.info(
                        "step %d/%d  loss %.3f  acc %s  %.0f tokens/s",
                        step + 1, self.total, line["loss"], " ".join(f"{a:.2f}" for a in line["accuracy"]),
                        line["tokens_per_s"],
                    )  # fmt: skip
            yield step, packs, line

    @torch.no_grad()
    def _validate(self, progress: resume.Progress, journal: Journal | None) -> None:
        """Simulated AL on the held-out documents, shared among the processes."""
        if not self.validation:
            return
        packs = plan_packs(self.store.documents, self.validation, self.settings.pack_tokens)
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        # Per step: sums of hits and of supervised rows; then sums of the two run lengths, and rows.
        totals = torch.zeros(2 * self.unroll_steps + 3, dtype=torch.float64)
        self.objective.eval()
        for pack in read_ahead(self.store, packs[rank::world]):
            assert pack is not None
            pack = pack.to(self.accelerator.device)
            steps = [step for step in self.objective.unroll(pack, None) if step.rows_R.numel()]
            if not steps:
                continue
            hits, accept = judge(self.objective, pack, steps)
            rows = hits.shape[0]
            k = len(steps)
            totals[:k] += hits.nansum(0)
            totals[self.unroll_steps : self.unroll_steps + k] += (~hits.isnan()).sum(0)
            runs = [(simulated_al(values) - 1) * rows for values in (hits, accept)]
            totals[-3:] += torch.tensor([*runs, rows], dtype=torch.float64)
        self.objective.train()
        if world > 1:
            totals = self.accelerator.reduce(totals.to(self.accelerator.device), "sum").cpu()
        accuracy = (totals[: self.unroll_steps] / totals[self.unroll_steps : -3]).tolist()
        greedy, sampled = (1 + totals[-3:-1] / totals[-1].clamp(min=1)).tolist()
        if progress.best_al is None or greedy > progress.best_al:
            progress.best_al, progress.best_step = greedy, progress.step
            # The best checkpoint must exist even when no periodic one falls on this step.
            if journal is not None and progress.step % self.settings.checkpoint_every and progress.step != self.total:
                resume.save(self.checkpoints, self.head, self.optimizer, progress, describe(self.target))
        if journal is not None:
            line = {"step": progress.step, "val_al": greedy, "val_al_sampled": sampled, "val_accuracy": accuracy}
            journal.write(line)
            log.info(
                "validation at step %d: simulated AL %.3f greedy, %.3f sampled; accuracy %s",
                progress.step, greedy, sampled, " ".join(f"{a:.3f}" for a in accuracy),
            )  # fmt: skip
