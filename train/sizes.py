"""What training takes, told before it begins: weights, bytes on one GPU.

Memory is the peak while a pack's gradients are formed. What a pack keeps was counted on tensors without storage
(tests/train/test_memory.py), and the coefficients here were fitted to those counts at the shapes of an 8B target:
tests/train/test_sizes.py holds them to within 10 % there and at other shapes. Fragmentation and what CUDA itself takes
(1 to 2 GB) come on top. How bytes are shared among processes is arithmetic, not a measurement.

Legend: H head hidden, P target hidden, A aux planes, I MLP width, N heads, G key-value heads, E head size, V / D full
and draft vocabulary, K unroll steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from models.drafts import HeadConfig
from models.eagle3 import Eagle3Config
from models.engines import expected_tensors
from models.mtp import MtpHead
from models.unroll import ROWS
from train.config import ObjectiveConfig, TrainerConfig
from train.losses import SIZES

SHARDED = {"ddp": 0, "zero1": 8, "zero2": 12, "zero3": 16, "fsdp2": 16}
"""Of the 16 bytes of a weight in fp32 with its gradient and AdamW's two moments, those that a strategy shares out."""

WIDTH = {"bf16": 2, "fp32": 4}
"""Bytes of a value in the large products."""


def parameters(head: HeadConfig) -> int:
    """Trained weights of a head."""
    if isinstance(head, Eagle3Config):
        return sum(prod(shape) for name, shape in expected_tensors(head).items() if name not in ("d2t", "t2d"))
    with torch.device("meta"):
        return sum(each.numel() for each in MtpHead(head).parameters())


def state(head: HeadConfig, trainer: TrainerConfig, processes: int = 1) -> int:
    """Bytes of weights in fp32, gradients and AdamW's moments, as far as one process holds them."""
    shared = SHARDED[trainer.strategy]
    return round(parameters(head) * (16 - shared + shared / processes))


def frozen(head: HeadConfig, trainer: TrainerConfig) -> int:
    """Bytes of the target's embedding and output head, which is also cut to a reduced draft vocabulary."""
    reduced = head.draft_vocab_size if head.draft_vocab_size < head.vocab_size else 0
    return (2 * head.vocab_size + reduced) * head.target_hidden_size * WIDTH[trainer.precision]


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the peak of a pack.

    Attributes:
        state: weights in fp32, gradients and moments, as far as this process holds them.
        target: the target's embedding and output head, the latter also cut to the draft vocabulary.
        working: weights in the dtype of the products with their gradients, and chunks of the loss.
        positions: planes, features, keys and values of all positions of the pack.
        rows: what supervised rows keep for backward, over all unroll steps.
    """

    state: int
    target: int
    working: int
    positions: int
    rows: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.target + self.working + self.positions + self.rows

    def line(self) -> str:
        """All of it in words."""
        parts = {
            "weights, gradients, AdamW": self.state,
            "the target's embedding and heads": self.target,
            "working copies and loss": self.working,
            "positions": self.positions,
            "supervised rows": self.rows,
        }
        return f"{self.total / 1e9:.1f} GB: " + ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())


def memory(
    head: Eagle3Config, objective: ObjectiveConfig, trainer: TrainerConfig, *, rows: int, processes: int = 1
) -> Memory:
    """What a pack of `trainer.pack_tokens` tokens takes on a GPU, `rows` of which are supervised at the first step."""
    hidden, planes, steps = head.hidden_size, len(head.planes), objective.unroll_steps
    query, key = head.num_attention_heads * head.head_dim, head.num_key_value_heads * head.head_dim
    draft, count, width = head.draft_vocab_size, parameters(head), WIDTH[trainer.precision]
    size = SIZES["cuda"]
    full = (8.5 * head.intermediate_size + 37 * hidden + 6 * query + 10 * key) * width / 2
    kept = (6.3 * hidden + 12 * key) * width / 2
    unrolled = sum(objective.row_share**step for step in range(steps))
    return Memory(
        state=state(head, trainer, processes),
        target=frozen(head, trainer),
        working=2 * width * (count - hidden * draft)
        + draft * (hidden * (4 + width) + size.chunk * 5 * 4 + size.pending * width)
        + rows * head.target_hidden_size * width,
        positions=width * trainer.pack_tokens * (planes * head.target_hidden_size + hidden + 4 * key),
        # Steps of more than ROWS rows keep little and are computed again, a chunk at a time (models.unroll).
        rows=round(rows * unrolled * full if rows <= ROWS else rows * unrolled * kept + ROWS * full),
    )
