"""The processes of a run: how they were started, held to what was asked for, learn of one another, and leave.

accelerate knows what torchrun or accelerate launch started. Where a launch and `trainer.strategy` do not go together it
says nothing, and each process would train alone on all of the data: so both are checked here before anything is loaded.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

from models.errors import Refused
from train.config import OptimConfig, TrainerConfig
from train.signals import PREEMPTED

SILENCE = timedelta(minutes=10)
"""A process that says nothing for so long is dead, and the others stop; gloo notices a lost peer at once."""

EXPECTED = {
    "ddp": ("NO", "MULTI_CPU", "MULTI_GPU"),
    "fsdp2": ("MULTI_CPU", "MULTI_GPU", "FSDP"),
    "zero": ("DEEPSPEED",),
}
"""Distributed types of accelerate that go with a strategy."""

T = TypeVar("T")


def start(trainer: TrainerConfig, optim: OptimConfig) -> Accelerator:
    """accelerate's view of the processes that torchrun or accelerate launch started; CPU means gloo.

    Raises:
        Refused: a device or package that is not there, or a launch that does not go with `trainer.strategy`
            or whose processes do not know of one another (each would train alone on all of the data).
    """
    strategy, cuda = trainer.strategy, torch.cuda.is_available()
    zero = strategy.startswith("zero")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if trainer.device == "cuda" and not cuda:
        raise Refused("trainer.device=cuda, but there is no CUDA device here; use trainer.device=auto")
    if "WORLD_SIZE" not in os.environ and tasks > 1:
        raise Refused(f"srun started {tasks} tasks that do not know of one another; give each a torchrun of its own")
    if strategy != "ddp" and processes == 1:
        raise Refused(
            f"trainer.strategy={strategy} shares the weights among processes, and this is the only one; start it with "
            "torchrun --nproc_per_node=N or accelerate launch --num_processes N, or use trainer.strategy=ddp"
        )
    if strategy != "ddp" and optim.muon_lr is not None:
        raise Refused(
            f"optim.muon_lr={optim.muon_lr} works on whole matrices, which trainer.strategy={strategy} cuts up; "
            "use trainer.strategy=ddp or optim.muon_lr=null"
        )
    if strategy != "ddp" and trainer.device == "cpu" and cuda:
        raise Refused(f"trainer.device=cpu with trainer.strategy={strategy}: hide the GPUs, CUDA_VISIBLE_DEVICES=''")
    launched = _launched_for()
    if launched is not None and launched != strategy and not (launched == "fsdp" and strategy == "fsdp2"):
        raise Refused(f"accelerate launch was asked for {launched}, but trainer.strategy={strategy}; let them agree")
    if zero and _flag("ACCELERATE_USE_CPU"):
        raise Refused(f"accelerate launch --cpu excludes trainer.strategy={strategy}; leave --cpu out")
    if zero and importlib.util.find_spec("deepspeed") is None:
        raise Refused(f"trainer.strategy={strategy} needs DeepSpeed; pip install deepspeed, or use fsdp2")
    cpu = trainer.device == "cpu" or not cuda
    if zero:
        _quiet_deepspeed(cpu)
    accelerator = Accelerator(
        cpu=cpu and not zero,  # with cpu=True accelerate trains with DDP and says nothing
        mixed_precision="no",  # the objective's own autocast; masters stay fp32
        deepspeed_plugin=_deepspeed(int(strategy[-1]), optim) if zero else None,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo" if cpu and processes > 1 else None, timeout=SILENCE)],
    )
    if accelerator.num_processes != processes:
        raise Refused(f"{processes} processes were started, but accelerate sees {accelerator.num_processes}")
    found = accelerator.distributed_type.value
    if found not in EXPECTED["zero" if zero else strategy]:
        raise Refused(f"trainer.strategy={strategy}, but accelerate started as {found}; let its launch options agree")
    return accelerator


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() == "true"


def _launched_for() -> str | None:
    """The strategy that the options of accelerate launch ask for, None if they leave it open."""
    if _flag("ACCELERATE_USE_DEEPSPEED"):
        return f"zero{os.environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
    return "fsdp" if _flag("ACCELERATE_USE_FSDP") else None


def _quiet_deepspeed(cpu: bool) -> None:
    """Import DeepSpeed so that it neither talks nor compiles."""
    if cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.filterwarnings("ignore", r".*is deprecated", FutureWarning, r"torch\.distributed|deepspeed")
    import deepspeed.ops

    if cpu:
        # It would take minutes and a compiler to build an all-reduce that only its inference uses.
        vars(deepspeed.ops)["__compatible_ops__"] = {}


def _deepspeed(stage: int, optim: OptimConfig) -> DeepSpeedPlugin:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        # The last step of an epoch may have fewer packs: the loop says when a step is full, not a counter.
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": optim.max_grad_norm,
        "zero_optimization": {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0},
    }
    return DeepSpeedPlugin(
        hf_ds_config=config,
        zero3_init_flag=False,
        gradient_accumulation_steps=1,
        gradient_clipping=optim.max_grad_norm,
        zero_stage=stage,
        offload_optimizer_device="none",
        offload_param_device="none",
    )


def lost_peer(error: RuntimeError) -> bool:
    """Whether the collective library says that another process is gone."""
    told = str(error).lower()
    return isinstance(error, torch.distributed.DistError) or any(
        word in told for word in ("gloo", "connection closed by peer", "connection reset by peer", "nccl")
    )


def first(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """What the main process gets from `work`, on every process. If it fails there, the others leave quietly.

    Raises:
        SystemExit: with 2, on the other processes, when the main one failed; its error is the one to read.
    """
    told: list[Any] = [None, False]
    error: Exception | None = None
    if accelerator.is_main_process:
        try:
            told = [work(), False]
        except Exception as failed:
            error, told = failed, [None, True]
    if accelerator.num_processes > 1:
        torch.distributed.broadcast_object_list(told, src=0, device=accelerator.device)
    if error is not None:
        raise error
    if told[1]:
        sys.exit(2)
    return told[0]


def agree(accelerator: Accelerator, asked: bool, trouble: str | None) -> tuple[bool, str | None]:
    """Whether any process has to stop, since it was asked to or by what is wrong; and the first one's trouble.

    Every process must call it.
    """
    stop = asked or trouble is not None
    if accelerator.num_processes == 1:
        return stop, trouble
    flag = torch.tensor(float(stop), device=accelerator.device)
    if not accelerator.reduce(flag, "sum").item():
        return False, None
    troubles: list[str | None] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(troubles, trouble)
    return True, next((each for each in troubles if each is not None), None)


def leave(accelerator: Accelerator, trouble: str | None) -> NoReturn:
    """End this process, when all have agreed to stop and all is saved.

    Raises:
        SystemExit: with PREEMPTED where it was asked to; with 2 on the others where there is trouble.
        Refused: on the main process, which tells the trouble.
    """
    if trouble is None:
        sys.exit(PREEMPTED)
    if accelerator.is_main_process:
        raise Refused(trouble)
    sys.exit(2)
