"""A program for test_ranks.py: six optimizer steps with every strategy, by two processes or by one.

Packs are dealt unevenly: the second process has packs without supervision, and none at all in some steps.
After three steps a checkpoint is written; the strategy itself goes on, and then another one does from the file.

    python -m tests.train.shared_steps OUTPUT STRATEGY...     (with RANK, WORLD_SIZE, ... set)
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import save_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from models.errors import Refused
from tests.train.test_objective import make_objective, random_head, random_pack
from train import launch, ranks, resume
from train.config import OptimConfig, TrainerConfig
from train.optimizer import schedule
from train.packs import Pack, row_count

STEPS, SAVED = 6, 3
OPTIM = OptimConfig(lr=1e-2, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.05, ema_decay=0.9)
MUON = dataclasses.replace(OPTIM, muon_lr=1e-2)
RATES: list[float] = []
"""Learning rates that a torch optimizer had when it updated, since the last file."""
# Per step, turn and process a pack: its documents as (length, spans).
DEALT: list[list[list[Any]]] = [
    [[[(9, [(3, 9)]), (12, [(0, 3), (5, 11)])], [(4, [(2, 4)])]]],
    [[[(9, [(3, 9)])], [(6, [])]], [[(7, [(2, 7)])], None]],
    [[[(15, [(1, 14)])], [(5, [(3, 4)])]]],
    [[[(6, [])], [(11, [(4, 10)])]], [[(8, [(1, 8)])], [(9, [(6, 9)])]], [[(9, [(2, 5)])], None]],
    [[[(6, [(1, 5)])], None]],
    [[[(9, [(3, 9)])], [(9, [(3, 9)])]]],
]


def packs_of(step: int) -> tuple[list[list[Pack | None]], list[float]]:
    """Packs of a step, [turn][process], and the global row counts."""
    torch.manual_seed(100 + step)
    turns = [[None if documents is None else random_pack(documents) for documents in turn] for turn in DEALT[step]]
    spans = [span for turn in turns for pack in turn if pack is not None for span in pack.spans]
    return turns, [max(1, row_count(spans, k)) for k in range(4)]


def objective_of(head_seed: int) -> Any:
    """The same random objective in every process, in fp32; another seed changes the head's start values alone."""
    torch.manual_seed(head_seed)
    head = random_head()
    torch.manual_seed(7)
    return make_objective(head).float()


def go_on(shared: ranks.Ranks, first: int, last: int) -> list[float]:
    """Optimizer steps [first, last); returns their gradient norms."""
    norms = []
    for step in range(first, last):
        turns, counts = packs_of(step)
        mine = [turn[shared.accelerator.process_index] for turn in turns]
        if shared.world == 1:
            mine = [pack for turn in turns for pack in turn]
        for index, pack in enumerate(mine):
            shared.backward(pack, counts, 0, last=index + 1 == len(mine))
        norms.append(shared.update(schedule(OPTIM, step, STEPS), step + 1))
    return norms


def start(strategy: str, optim: OptimConfig, seed: int, saved: resume.Checkpoint | None = None) -> ranks.Ranks:
    """One more strategy in this process."""
    AcceleratorState._reset_state(True)
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_ZERO_STAGE"):
        os.environ.pop(name, None)
    accelerator = launch.start(TrainerConfig(strategy=strategy), optim)
    return ranks.share(accelerator, strategy, objective_of(seed), optim, saved)


def held(shared: ranks.Ranks) -> list[int]:
    """How many numbers this process keeps of weights and of optimizer state."""
    weights: Any = shared.optimizer.names if shared.strategy == "fsdp2" else shared.parameters.values()
    states = [value for _, base in shared.optimizer.parts for state in base.state.values() for value in state.values()]
    local = [[getattr(each, "_local_tensor", each) for each in group] for group in (weights, states)]
    return [sum(each.numel() for each in group) for group in local]


def write(shared: ranks.Ranks, norms: list[float], path: Path) -> None:
    """What the test compares: every process's own view of the weights, and the main one's checkpoint."""
    tensors = {"norms": torch.tensor(norms), "held": torch.tensor(held(shared)), "rates": torch.tensor(RATES)}
    RATES.clear()
    with shared.whole():
        tensors |= {f"seen/{name}": value.detach().clone() for name, value in shared.parameters.items()}
    checkpoint = shared.checkpoint(resume.Progress(step=STEPS))
    tensors |= {f"average/{name}": value for name, value in checkpoint.weights.items()}
    tensors |= {f"trained/{name}": value for name, value in (checkpoint.trained or {}).items()}
    tensors |= {f"moments/{name}": value for name, value in checkpoint.moments.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path.with_suffix(f".{shared.accelerator.process_index}.safetensors"))


def main(output: Path, strategies: list[str]) -> None:
    """Train with every strategy, then with every one from the checkpoint of the one before it."""
    register_optimizer_step_pre_hook(lambda optimizer, *_: RATES.append(optimizer.param_groups[0]["lr"]))
    for strategy in strategies:
        shared = start(strategy, OPTIM, 1)
        norms = go_on(shared, 0, SAVED)
        checkpoint = shared.checkpoint(resume.Progress(step=SAVED))
        if shared.accelerator.is_main_process:
            resume.save(output / strategy, checkpoint, objective_of(1).head, {}, {})
        write(shared, norms + go_on(shared, SAVED, STEPS), output / strategy)
    for before, strategy in zip(strategies, strategies[1:] + strategies[:1], strict=True):
        shared = start(strategy, OPTIM, 2, resume.read(output / before / resume.name_of(SAVED)))
        write(shared, go_on(shared, SAVED, STEPS), output / f"{before}-{strategy}")
    shared = start("ddp", MUON, 1)
    write(shared, go_on(shared, 0, STEPS), output / "muon")
    save_file({"left": torch.tensor(fail(shared))}, output / f"failed.{shared.accelerator.process_index}.safetensors")
    shared.close()


def fail(shared: ranks.Ranks) -> int:
    """How this process leaves when the main one fails: 1 by the error itself, otherwise the exit code."""

    def work() -> None:
        raise Refused("no space")

    try:
        launch.first(shared.accelerator, work)
    except Refused:
        return 1
    except SystemExit as left:
        assert isinstance(left.code, int)
        return left.code
    return 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
