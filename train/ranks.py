"""How the processes of a run share one optimizer step: alone, DDP, FSDP2, or DeepSpeed's ZeRO.

The loss of a pack is its share of the step's global loss already, so gradients are sums over processes and
packs. Libraries average over processes and accumulation steps; here that is undone, and nothing else depends
on the strategy: weights, gradients and optimizer state are fp32, gradients are clipped by their global norm,
and a checkpoint holds whole tensors by parameter name, so that any strategy on any number of processes can go
on from it. A head is small and its unroll uses every weight in each of its steps, so the whole objective is
one unit: its weights are gathered once for a forward, and what is sharded is the memory in between.

accelerate shards on accelerators only, so FSDP2 is torch's `fully_shard` itself, the same on the CPU; DeepSpeed goes
through accelerate. How the processes were started is told by launch.py.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from models.errors import Refused
from train.config import OptimConfig
from train.objective import Objective, Outcome
from train.optimizer import Average, Optimizer
from train.packs import Pack
from train.resume import Checkpoint, Progress


class Unit(nn.Module):
    """What is wrapped: the objective behind a forward whose output is the plain tensor that hooks look for."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective
        self.outcome: Outcome | None = None

    def forward(self, anchor: torch.Tensor, pack: Pack | None, counts: Sequence[float], seed: int) -> torch.Tensor:
        """Loss of a pack; `anchor` is a scalar that requires a gradient, so that backward hooks see an input."""
        self.outcome = self.objective(pack, counts, seed)
        return self.outcome.loss + 0 * anchor


class _AtOnce(torch.autograd.Function):
    """A loss whose gradients are formed in forward and reach all parameters from one node, in their order."""

    @staticmethod
    def forward(ctx: Any, loss: Callable[[], torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            value = loss()
        ctx.save_for_backward(*torch.autograd.grad(value, parameters))
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *(gradient * grads[0] for gradient in ctx.saved_tensors)


class _OrderedUnit(Unit):
    """A unit whose gradients arrive in the same order whatever the pack.

    ZeRO-2 and ZeRO-3 put gradients into buckets as they arrive and add buckets up over processes. A process whose
    pack supervises nothing has another graph, hence another order: sizes would differ, or sums would be wrong.
    """

    def forward(self, anchor: torch.Tensor, pack: Pack | None, counts: Sequence[float], seed: int) -> torch.Tensor:
        def loss() -> torch.Tensor:
            self.outcome = self.objective(pack, counts, seed)
            return self.outcome.loss

        return _AtOnce.apply(loss, *self.objective.head.parameters()) + 0 * anchor


class Ranks:
    """One process, or DDP: every process holds all weights. The base of the strategies that shard them.

    Attributes:
        average: moving average of the weights, None without `optim.ema_decay`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        strategy: str,
        objective: Objective,
        optim: OptimConfig,
        saved: Checkpoint | None = None,
    ) -> None:
        """Share an objective, whose head has its start values, or go on from a checkpoint.

        Args:
            saved: replaces the head's values, whatever strategy and number of processes wrote it.

        Raises:
            Refused: the checkpoint lacks the optimizer's state of a parameter.
        """
        self.accelerator, self.strategy, self.objective, self.optim = accelerator, strategy, objective, optim
        self.world = accelerator.num_processes
        self.unit = self._unit(objective)
        self.model: Any = self.unit
        if saved is not None:
            objective.head.load_state_dict({**saved.weights, **(saved.trained or {})})
        self._wrap()
        self.average = None if optim.ema_decay is None else Average(self._pieces(), optim.ema_decay)
        if saved is None:
            return
        self._load_moments(saved.moments, saved.progress.step)
        if self.average is not None:
            for name, value in self.average.values.items():
                value.copy_(self._cut(name, saved.weights[name]))

    _unit: type[Unit] = Unit

    def _wrap(self) -> None:
        self.optimizer = Optimizer(self.objective.head, self.optim)
        if self.world > 1:
            device = [self.accelerator.device.index] if self.accelerator.device.type == "cuda" else None
            self.model = nn.parallel.DistributedDataParallel(self.unit, device, forward_sync_buffers=False)

    @property
    def parameters(self) -> dict[str, Any]:
        """The head's parameters by name: whole inside `whole`, otherwise as this process holds them."""
        return dict(self.objective.head.named_parameters())

    def backward(self, pack: Pack | None, counts: Sequence[float], seed: int, *, last: bool) -> Outcome:
        """Add the gradients of a pack to those of its step; `last` is the step's last one on this process.

        Every process must call it equally often; a pack of None adds nothing.
        """
        with contextlib.nullcontext() if last or self.world == 1 else self.model.no_sync():
            loss = self._forward(pack, counts, seed)
            (loss * self.world).backward()  # DDP averages over processes
        return self._outcome()

    def _forward(self, pack: Pack | None, counts: Sequence[float], seed: int) -> torch.Tensor:
        return self.model(torch.zeros((), device=self.accelerator.device, requires_grad=True), pack, counts, seed)

    def _outcome(self) -> Outcome:
        outcome, self.unit.outcome = self.unit.outcome, None
        assert outcome is not None
        return outcome

    def update(self, factor: float, step: int) -> float:
        """Clip, then make optimizer step `step` (1-based) with peak learning rates times `factor`.

        Returns:
            The global norm of the gradients before clipping.

        Raises:
            Refused: it is not finite.
        """
        norm = self._step(factor)
        if not math.isfinite(norm):
            raise Refused(
                f"gradients of step {step} are not finite; if the loss had grown, go on from the last checkpoint in "
                "another run: name=... trainer.init_from=... with a lower optim.lr"
            )
        if self.average is not None:
            self.average.update(step)
        return norm

    def _step(self, factor: float) -> float:
        limit = self.optim.max_grad_norm or math.inf
        norm = nn.utils.clip_grad_norm_(self.objective.head.parameters(), limit)
        total = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if math.isfinite(total):
            self.optimizer.step(factor)
        return total

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within it every process has all of the head's weights as plain tensors, to be read."""
        yield

    @contextlib.contextmanager
    def judged(self) -> Iterator[None]:
        """Like `whole`, with the weights that are validated, chosen and exported: the average, if there is one."""
        with contextlib.nullcontext() if self.average is None else self.average.applied(), self.whole():
            yield

    def checkpoint(self, progress: Progress) -> Checkpoint:
        """All there is to go on from, its tensors on the main process only. Every process must call it."""
        trained = None
        with self.judged():
            weights = self._copied(self.parameters.items())
        if self.average is not None:
            with self.whole():
                trained = self._copied(self.parameters.items())
        moments = self._copied(self._moments())
        return Checkpoint(progress, weights, trained, moments, self.world, self.strategy)

    def close(self) -> None:
        """Leave the process group, when all is written on all processes. Every process must call it.

        DDP's reducer must not outlive the group: freed last, it would free the group while it holds the
        interpreter's lock, and gloo's threads, which may want that lock to end, would never be joined.
        """
        self.accelerator.wait_for_everyone()
        self.model = None
        gc.collect()
        self.accelerator.end_training()

    def _copied(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        kept = {}
        for name, value in tensors:
            if self.accelerator.is_main_process:
                kept[name] = value.detach().to("cpu", copy=True)
        return kept

    def _pieces(self) -> dict[str, torch.Tensor]:
        """What this process keeps of each parameter between steps, as tensors that may be changed in place."""
        return {name: parameter.data for name, parameter in self.parameters.items()}

    def _cut(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor that goes with this process's piece of a parameter."""
        return value

    def _moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors of the optimizer's state by "parameter/key"; step counts are the run's."""
        for name, key, value in self.optimizer.moments():
            yield f"{name}/{key}", value.full_tensor() if isinstance(value, DTensor) else value

    def _load_moments(self, moments: Mapping[str, torch.Tensor], step: int) -> None:
        self.optimizer.load_moments(moments, step)


class _Fsdp2(Ranks):
    """Weights, gradients and optimizer state are sharded along their first dimension."""

    def _wrap(self) -> None:
        mesh = init_device_mesh(self.accelerator.device.type, (self.world,))
        self.model = fully_shard(self.unit, mesh=mesh)
        self.model.set_gradient_divide_factor(1.0)
        self.model.set_force_sum_reduction_for_comms(True)
        self.optimizer = Optimizer(self.objective.head, self.optim)

    def backward(self, pack: Pack | None, counts: Sequence[float], seed: int, *, last: bool) -> Outcome:
        self.model.set_requires_gradient_sync(last)
        self._forward(pack, counts, seed).backward()
        return self._outcome()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        self.model.unshard()
        try:
            yield
        finally:
            self.model.reshard()

    def _pieces(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data.to_local() for name, parameter in self.parameters.items()}

    def _cut(self, name: str, value: torch.Tensor) -> torch.Tensor:
        like, value = self.parameters[name], value.to(self.accelerator.device)
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).to_local()


class _Zero(Ranks):
    """DeepSpeed: ZeRO-1 shards the optimizer's state, ZeRO-2 gradients too, ZeRO-3 the weights as well."""

    _unit = _OrderedUnit

    def _wrap(self) -> None:
        import deepspeed

        plugin = self.accelerator.state.deepspeed_plugin
        largest = max(parameter.numel() for parameter in self.parameters.values())
        plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = largest
        deepspeed.utils.logger.setLevel("WARNING")
        deepspeed.utils.set_z3_leaf_module(self.unit, True)
        self.optimizer = Optimizer(self.objective.head, self.optim)
        ((_, base),) = self.optimizer.parts
        self.model, _ = self.accelerator.prepare(self.unit, base)
        self.stage: int = plugin.zero_stage

    def backward(self, pack: Pack | None, counts: Sequence[float], seed: int, *, last: bool) -> Outcome:
        loss = self._forward(pack, counts, seed)
        self.model.backward(loss * self.world, scale_wrt_gas=False)  # DeepSpeed averages over processes
        return self._outcome()

    def _step(self, factor: float) -> float:
        self.optimizer.scale(factor)
        self.model.step()
        norm = float(self.model.get_global_grad_norm())
        return norm if norm >= 0 else math.nan  # -1 stands for a norm that is not finite

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.parameters.values()), enabled=self.stage == 3):
            yield

    def _pieces(self) -> dict[str, torch.Tensor]:
        if self.stage < 3:
            return super()._pieces()
        return {name: parameter.ds_tensor.data for name, parameter in self.parameters.items()}

    def _cut(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if self.stage < 3:
            return value
        size = self.parameters[name].ds_tensor.numel()
        flat = value.flatten()[self.accelerator.process_index * size :][:size]
        return nn.functional.pad(flat, (0, size - flat.numel()))

    def _moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        for name, parameter in self.parameters.items():
            for key in ("exp_avg", "exp_avg_sq"):
                yield f"{name}/{key}", safe_get_full_optimizer_state(parameter, key)

    def _load_moments(self, moments: Mapping[str, torch.Tensor], step: int) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        keys, zero = ("exp_avg", "exp_avg_sq"), self.model.optimizer
        # DeepSpeed makes the state at the first step; here there must be one to load into.
        for flat in zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups:
            count = torch.tensor(float(step), device=flat.device)
            zero.optimizer.state[flat] = {"step": count, **{key: torch.zeros_like(flat) for key in keys}}
        if self.stage < 3:
            zero._lazy_init_hp_params_optimizer_state()
        put = safe_set_local_optimizer_state if self.stage == 3 else safe_set_full_optimizer_state
        for name, parameter in self.parameters.items():
            for key in keys:
                value = moments.get(f"{name}/{key}")
                if value is None:
                    raise Refused(f"the checkpoint has no optimizer state for {name}")
                put(parameter, self._cut(name, value).to(parameter.device), key)


def share(
    accelerator: Accelerator,
    strategy: str,
    objective: Objective,
    optim: OptimConfig,
    saved: Checkpoint | None = None,
) -> Ranks:
    """The `Ranks` of a strategy; see its constructor."""
    kind = _Zero if strategy.startswith("zero") else _Fsdp2 if strategy == "fsdp2" else Ranks
    return kind(accelerator, strategy, objective, optim, saved)
