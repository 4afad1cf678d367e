"""The training loop: plan, unroll, step, validate, save. One process or many, started or resumed.

Everything that decides the weights is a function of the settings and the optimizer step: the order of the
packs, the learning rate, the rows that are sampled. Processes share the packs of a step among them; the
loss is already divided by the step's global row counts, so gradients add up to the same whatever the split.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from featurize.spooled import SpoolStore
from featurize.store import FeatureStore
from featurize.vocabulary import count_supervised, divide
from models.artefact import file_sha256, fingerprint, read_json, write_json
from models.checkpoint import describe
from models.drafts import DraftHead, HeadConfig, initialise, make_head
from models.errors import Refused
from models.mtp import MtpConfig
from models.native import load_native
from models.target import Target
from models.vocabulary import choose_draft_vocabulary
from train import launch, ranks, resume
from train.config import ObjectiveConfig, OptimConfig, TrainerConfig
from train.curves import draw_curves
from train.feed import Feed
from train.measure import Journal, Progress, Window, peak_memory
from train.objective import Objective, Outcome, judge
from train.optimizer import check_schedule, schedule
from train.packs import Pack, build_pack, read_ahead
from train.plan import Corpus, Costs, PackPlan, Plan, plan_packs
from train.signals import StopRequest
from train.start import fit_start, load_start, rows_wanted, sample, sample_planes
from train.stock import Stock
from train.validate import validate

log = logging.getLogger(__name__)


class Trainer:
    """One run of training over a feature store."""

    def __init__(
        self,
        *,
        store: FeatureStore,
        target: Target,
        config: HeadConfig,
        objective: ObjectiveConfig,
        optim: OptimConfig,
        trainer: TrainerConfig,
        validation_share: float,
        directory: Path,
        name: str,
        resolved: dict[str, Any],
    ) -> None:
        self.store, self.optim, self.settings, self.directory, self.name = store, optim, trainer, directory, name
        self.target, self.tied_to = target, describe(target)
        self.about = {"features": store.contract.to_json(), "config": resolved}
        self.window = Window()
        self.accelerator = launch.start(trainer, optim)
        self.corpus = Corpus.of(store.documents, Costs.of(config, objective.row_share), objective.unroll_steps)
        self.training, self.validation = divide(store.documents, validation_share)
        self.stock = Stock.take(store, self.corpus, self.training, self.validation)
        self.plan = Plan.of(self.corpus, self.training, trainer, store.firsts)
        self.feed: Feed | None = None
        if isinstance(store, SpoolStore):
            store.require_kept(self.validation)
            self.feed = Feed(store, self.plan, self.accelerator.process_index, self.accelerator.num_processes)

        check_schedule(optim, len(self.plan))
        counts = count_supervised(store.documents, store.tokens_T, self.training, config.vocab_size)
        torch.manual_seed(trainer.seed)
        origin: dict[str, str] = {}
        self.fresh = trainer.init_from is None and not config.native
        self.head: DraftHead
        if self.fresh:  # its start values come with `_fit`: features may have yet to arrive
            self.head = make_head(config, choose_draft_vocabulary(counts, config.draft_vocab_size))
        elif trainer.init_from is None:
            assert isinstance(config, MtpConfig)
            self.head = load_native(target, config)
        else:
            self.head = load_start(Path(trainer.init_from), config, self.tied_to)
            origin = {"init_from": file_sha256(Path(trainer.init_from) / "head.safetensors")}
        store.require_vocabulary(self.head.ids_D)
        self.coverage = counts[self.head.ids_D].sum().item() / max(1, counts.sum().item())
        self.objective = Objective(self.head, target, objective, trainer.precision)
        if trainer.compile:
            self.head.compile_parts()
        self.identity = fingerprint(
            {
                "objective": objective.identity(),
                "optim": asdict(optim),
                "head": self.head.config.to_dict(),
                "target": self.tied_to,
                "features": store.fingerprint,
                "validation_share": validation_share,
                "trainer": [getattr(trainer, key) for key in ("epochs", "pack_tokens", "packs_per_step", "seed")],
                "precision": trainer.precision,
                **origin,
                # One more key for those who set it; it would orphan the checkpoints of all others.
                **({} if trainer.shuffle_shards is None else {"shuffle_shards": trainer.shuffle_shards}),
            }
        )

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.directory / "checkpoints"

    def _fit(self) -> None:
        """Find the start values on the main process, for all."""
        documents, _ = self.plan.opening()
        store = self.store.in_epoch(0)

        def packs() -> Iterator[Pack]:
            sampled = sample(self.head.config, self.corpus, documents)
            for pack in plan_packs(self.corpus, sampled, self.settings.pack_tokens):
                yield build_pack(store, pack).to(self.accelerator.device)

        with_planes = not self.store.contract.teacher_k
        if self.accelerator.is_main_process and with_planes:
            log.info("fitting the start values on up to %d rows", rows_wanted(self.head.config))
        elif self.accelerator.is_main_process:
            log.info("start values are not fitted: that takes final planes, which featurize.teacher_k does without")
        launch.first(self.accelerator, lambda: initialise(self.head, self.target, sample_planes(store, documents)))
        self.objective.to(self.accelerator.device)
        if with_planes:
            launch.first(self.accelerator, lambda: fit_start(self.objective, packs))
        if self.accelerator.num_processes > 1:
            for parameter in self.head.parameters():
                torch.distributed.broadcast(parameter.data, 0)

    def finished(self) -> bool:
        """Whether this run has been trained to its end already: what the main process finds, on all of them.

        Raises:
            Refused: it has, but with other settings or data.
        """
        done = launch.first(self.accelerator, self._finished)
        if done:
            self.accelerator.end_training()
        return done

    def _finished(self) -> bool:
        manifest = self.directory / "manifest.json"
        if not manifest.exists():
            return False
        found = read_json(manifest)
        if found.get("identity") != self.identity:
            last = self.directory / found["checkpoints"]["last"]
            raise Refused(resume.other_settings(last, self.about["config"]))
        return all(resume.complete(self.directory / path) for path in found["checkpoints"].values())

    def run(self, stop: StopRequest) -> None:
        """Train to the end, from the newest checkpoint if there is one, or until a stop is asked for.

        Raises:
            Refused: checkpoints of other settings, none that is complete, values that are not finite, another
                process that is gone, or features that nobody extracts; what was trained until then is saved.
            SystemExit: with PREEMPTED after a signal, when everything is saved.
        """
        try:
            self._run(stop)
        except RuntimeError as error:
            if self.accelerator.num_processes > 1 and launch.lost_peer(error):
                told = str(error).splitlines()[0]
                raise Refused(f"another process of this job is gone ({told}); start the job again to go on") from None
            raise
        finally:
            if isinstance(self.store, SpoolStore):
                self.store.close()

    def _run(self, stop: StopRequest) -> None:
        progress = self._start(stop)
        total = len(self.plan)
        journal = self._open_journal(progress)
        if journal is not None:
            log.info(self.stock.line())
            if not self.validation:
                log.warning(
                    "no document is held out: AL is not simulated, and the last checkpoint counts as the best; raise "
                    "data.validation_share"
                )
            if self.settings.packs_per_step < self.accelerator.num_processes:
                log.warning(
                    "trainer.packs_per_step=%d gives %d of %d processes nothing to do; raise it to a multiple of them",
                    self.settings.packs_per_step,
                    self.accelerator.num_processes - self.settings.packs_per_step,
                    self.accelerator.num_processes,
                )
            if self.optim.warmup_steps >= total:
                log.warning(
                    "optim.warmup_steps=%d in a run of %d steps: it ends before the learning rate is at its peak",
                    self.optim.warmup_steps, total,
                )  # fmt: skip
            log.info(
                "training in %d steps; draft vocabulary covers %.2f %% of the supervised tokens%s",
                total, 100 * self.coverage, f"; going on after step {progress.step}" if progress.step else "",
            )  # fmt: skip
        # Held by name, so that it outlives the loop: it waits for its threads, which may wait for shards until `run`
        # has closed the store.
        steps = self._steps(progress.step)
        with Progress(total, progress.step, shown=self.accelerator.is_main_process) as bar:
            for line in steps:
                progress.step += 1
                last = progress.step == total
                trouble = None if last else self._features(progress.step, stop)
                leave, trouble = launch.agree(self.accelerator, stop.asked, trouble)
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
                        why = "asked to stop" if trouble is None else "no features"
                        log.info("%s: step %d is saved; run again to go on", why, progress.step)
                    if trouble is None:
                        self.ranks.close()
                    launch.leave(self.accelerator, trouble)
        self._free(total)
        if journal is not None:
            journal.close()
            draw_curves(journal.path, self.directory / "curves.png", progress.best_step)
            last_name, best_name = resume.name_of(total), resume.name_of(progress.best_step or total)
            if not resume.complete(self.checkpoints / best_name):
                log.warning("the best checkpoint, %s, is gone; the last one stands for it", best_name)
                best_name = last_name
            summary = {
                "identity": self.identity,
                "steps": total,
                "best_al": progress.best_al,
                "best_step": progress.best_step,
                "coverage": self.coverage,
                "data": asdict(self.stock),
                "checkpoints": {"best": f"checkpoints/{best_name}", "last": f"checkpoints/{last_name}"},
            }
            write_json(self.directory / "manifest.json", summary)
        self.ranks.close()

    def _start(self, stop: StopRequest) -> resume.Progress:
        """Load the newest checkpoint, if there is one, and share the head among the processes."""
        found = launch.first(self.accelerator, self._find)
        saved = resume.read(found) if found is not None else None
        if self.feed is not None:
            done, feed = saved.progress.step if saved is not None else 0, self.feed
            launch.first(self.accelerator, lambda: feed.ask(done))
            trouble = self._features(done, stop) if done < len(self.plan) else None
            leave, trouble = launch.agree(self.accelerator, stop.asked, trouble)
            if leave:
                launch.leave(self.accelerator, trouble)
        if saved is None and self.fresh:
            self._fit()
        self.objective.to(self.accelerator.device)
        self.ranks = ranks.share(self.accelerator, self.settings.strategy, self.objective, self.optim, saved)
        if saved is None:
            return resume.Progress(identity=self.identity)
        here = (self.accelerator.num_processes, self.settings.strategy)
        if self.accelerator.is_main_process and (saved.processes, saved.strategy) != here:
            log.info("the checkpoint of %d processes (%s) goes on with %d (%s)", saved.processes, saved.strategy, *here)
        return saved.progress

    def _find(self) -> Path | None:
        if self.settings.resume == "never" and resume.checkpoints(self.checkpoints):
            raise Refused(f"{self.checkpoints} has checkpoints; set trainer.resume=auto to go on, or another name=...")
        return resume.newest(self.checkpoints, self.identity, self.about["config"])

    def _open_journal(self, progress: resume.Progress) -> Journal | None:
        """The journal on the main process, None on the others; if it cannot be opened, all processes stop."""
        opened: list[Journal] = []
        path = self.directory / "metrics.jsonl"
        launch.first(self.accelerator, lambda: opened.append(Journal(path, self.settings, self.name, progress)))
        return opened[0] if opened else None

    def _features(self, step: int, stop: StopRequest) -> str | None:
        """Wait until the features of a step are there, or a stop was asked for; returns what is wrong with them."""
        if self.feed is None:
            return None
        started = time.monotonic()
        self._free(step)
        trouble = self.feed.wait(step, lambda: stop.asked)
        self.window.waited += time.monotonic() - started
        return trouble

    def _free(self, steps: int) -> None:
        """Give back the features that nobody needs after so many steps."""
        if self.feed is not None and self.accelerator.is_main_process:
            self.feed.free(steps)

    def _mine(self, step: int) -> list[PackPlan | None]:
        """This process's packs of one optimizer step, padded so that every process runs as many."""
        return self.plan[step].deal(self.accelerator.num_processes)[self.accelerator.process_index]

    def _counts(self, step: int) -> list[float]:
        """Supervised rows per unroll step over all processes, at least 1: an empty step must not divide by 0."""
        return [max(1, rows) for rows in self.plan[step].rows_K]

    def _packs(self, done: int) -> Iterator[Pack | None]:
        """This process's packs from an optimizer step on, read ahead within each epoch."""
        pin = self.accelerator.device.type == "cuda"
        for epoch, steps in self.plan.by_epoch(done):
            planned = (pack for step in steps for pack in self._mine(step))
            coming = (pack.documents if pack is not None else None for pack in planned)
            yield from read_ahead(self.store.in_epoch(epoch), coming, self.settings.read_ahead, pin=pin)

    def _steps(self, done: int) -> Iterator[dict[str, Any] | None]:
        """Run the optimizer steps from `done` on; yields a line for the journal when one is due, else None."""
        stream = self._packs(done)
        self.window = Window()
        for step in range(done, len(self.plan)):
            counts, mine = self._counts(step), self._mine(step)
            sums_K = torch.zeros(self.objective.settings.unroll_steps)
            for index, planned in enumerate(mine):
                started = time.monotonic()
                pack = next(stream)
                self.window.waited += time.monotonic() - started
                pack = pack.to(self.accelerator.device) if pack is not None else None
                place = planned.place if planned is not None else 0
                seed = self.settings.seed * 7_919 + place
                outcome = self.ranks.backward(pack, counts, seed, last=index + 1 == len(mine))
                sums_K += outcome.sums_K.detach().cpu()
            due = (step + 1) % self.settings.log_every == 0 or step + 1 == len(self.plan)
            figures = self._figures(step, sums_K, pack, outcome) if due else None  # before the weights change
            lr, norm = self._update(step)
            self.window.tokens += self.plan[step].tokens
            self.window.rows += counts[0]
            line = None
            if figures is not None:
                line = {
                    "step": step + 1,
                    "of": len(self.plan),
                    **figures,
                    "lr": lr,
                    "grad_norm": norm,
                    **self.window.rates(),
                }
                self.window = Window()
            paused = time.monotonic()
            yield line
            self.window.started += time.monotonic() - paused  # validation and checkpoints are no training

    def _update(self, step: int) -> tuple[float, float]:
        """Clip, then step; returns the learning rate and the gradient norm before clipping."""
        factor = schedule(self.optim, step, len(self.plan))
        return self.optim.lr * factor, self.ranks.update(factor, step + 1)

    def _figures(self, step: int, sums_K: torch.Tensor, pack: Pack | None, outcome: Outcome) -> dict[str, Any]:
        """An optimizer step over all processes: losses, and greedy hits on each one's last pack.

        Loss and accuracy are None where no row is supervised; memory is the largest of any process, in bytes.
        """
        settings = self.objective.settings
        hits_K, rows_K = torch.zeros(2, settings.unroll_steps)
        with self.ranks.whole():  # by every process, whether it has rows or not
            if pack is not None and outcome.steps:
                hits_RK, _ = judge(self.objective, pack, outcome.steps)
                hits_K[: len(outcome.steps)] = hits_RK.nansum(0)
                rows_K[: len(outcome.steps)] = (~hits_RK.isnan()).sum(0)
        memory = torch.tensor([float(peak_memory(self.accelerator.device))])
        if self.accelerator.num_processes > 1:
            mine = torch.cat((sums_K, hits_K, rows_K, memory))[None].to(self.accelerator.device)
            sums, hits, rows, memory = self.accelerator.gather(mine).cpu().split([*[settings.unroll_steps] * 3, 1], 1)
            sums_K, hits_K, rows_K = sums.sum(0), hits.sum(0), rows.sum(0)
        losses = [
            total / settings.row_share**k / count if count else None
            for k, (total, count) in enumerate(zip(sums_K.tolist(), self.plan[step].rows_K, strict=True))
        ]
        return {
            "loss": sum(loss * settings.weight(k) for k, loss in enumerate(losses) if loss is not None),
            "loss_per_step": losses,
            "accuracy": [hit / n if n else None for hit, n in zip(hits_K.tolist(), rows_K.tolist(), strict=True)],
            "memory": int(memory.max().item()),
        }

    def _validate(self, progress: resume.Progress, journal: Journal | None) -> None:
        """Validate, and save: the best checkpoint so far must exist."""
        if self.validation:
            packs = plan_packs(self.corpus, self.validation, self.settings.pack_tokens)
            with self.ranks.judged():
                verdict = validate(self.objective, self.store, packs, self.accelerator)
            if progress.best_al is None or verdict.greedy > progress.best_al:
                progress.best_al, progress.best_step = verdict.greedy, progress.step
            if journal is not None:
                line = {"step": progress.step, "val_al": verdict.greedy, "val_al_sampled": verdict.sampled}
                journal.write(line | {"val_accuracy": verdict.accuracy})
                accuracy = " ".join("-" if share is None else f"{share:.3f}" for share in verdict.accuracy)
                log.info(
                    "validation at step %d: simulated AL %.3f greedy, %.3f sampled; accuracy %s",
                    progress.step, verdict.greedy, verdict.sampled, accuracy,
                )  # fmt: skip
        self._save(progress)

    def _save(self, progress: resume.Progress) -> None:
        checkpoint = self.ranks.checkpoint(progress)

        def write() -> None:
            resume.save(self.checkpoints, checkpoint, self.head, self.tied_to, self.about)
            resume.prune(self.checkpoints, self.settings.keep_checkpoints, progress)

        launch.first(self.accelerator, write)
