"""`python -m train.bench`: what work on supervised rows alone is worth, on this machine, in one run.

Two methods train the same head on the same packs of synthetic features, and give the same loss:

- supervised_rows: this trainer.
- all_rows: every position is a row in every unroll step and the loss is masked afterwards, as other trainers
  do it. It runs on this trainer's own kernels, so that the ratio shows the idea and not slower code.

Whole training steps are timed (unroll, loss, backward, clipping, optimizer), the methods in turn within each
round, with the machine's matmul peak measured beside them: a machine that drifts moves all three. Peak memory
is that of a fresh process, above what it held before head, target and pack were made. matmul_efficiency
counts the products that the method needs (scores that backward computes again are not counted twice).
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.table import Table

from models.artefact import write_json
from models.eagle3 import Eagle3Config, Eagle3Head
from models.errors import Refused
from models.terminal import tables
from train.config import ObjectiveConfig, OptimConfig
from train.measure import peak_memory
from train.objective import Objective
from train.optimizer import Optimizer
from train.packs import Pack, row_count, supervised_rows

log = logging.getLogger(__name__)

METHODS = ("supervised_rows", "all_rows")
ROUNDS = 3
Cell = tuple[int, int, float]
"""Tokens of a pack, tokens of each of its documents, supervised share."""


@dataclass(frozen=True)
class Shapes:
    """A target's dimensions, the draft vocabulary and the unroll; the cells that are measured on them.

    Attributes:
        tied: whether the target's embedding is its lm_head.
        cells: what both methods are timed on, in turn.
        long: what each method does once in a process of its own, for its memory.
        only_supervised: where all_rows would take too long or too much.
    """

    hidden: int
    heads: int
    key_value_heads: int
    intermediate: int
    vocabulary: int
    draft_vocabulary: int
    steps: int
    tied: bool
    cells: tuple[Cell, ...]
    long: tuple[Cell, ...]
    only_supervised: tuple[Cell, ...]

    def head(self) -> Eagle3Config:
        """An EAGLE-3 head of these shapes."""
        return Eagle3Config(
            hidden_size=self.hidden,
            target_hidden_size=self.hidden,
            vocab_size=self.vocabulary,
            draft_vocab_size=self.draft_vocabulary,
            aux_layers=(2, 4, 6),
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.hidden // self.heads,
            rms_norm_eps=1e-5,
            max_position_embeddings=1 << 17,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        )


SHAPES = {
    "smollm2": Shapes(
        576, 9, 3, 1536, 49152, 16384, 5, True,
        cells=((2048, 512, 1.0), (2048, 512, 0.5), (2048, 512, 0.1)),
        long=((16384, 16384, 0.1), (32768, 32768, 1 / 64)),
        only_supervised=((32768, 32768, 1 / 64),),
    ),
    "8b": Shapes(
        4096, 32, 8, 14336, 128256, 32000, 7, False,
        cells=((8192, 2048, 1.0), (8192, 2048, 0.5), (8192, 2048, 0.1)),
        long=((131072, 131072, 1 / 64),),
        only_supervised=((131072, 131072, 1 / 64),),
    ),
}  # fmt: skip


def synthetic_pack(shapes: Shapes, cell: Cell, everywhere: bool) -> Pack:
    """A pack of equal documents, each ending in one answer; `everywhere` keeps a teacher for every position."""
    tokens, length, share = cell
    answer = round(length * share)
    spans = [(end - answer + (answer == length), end) for end in range(length, tokens + 1, length)]
    needed_T = torch.zeros(tokens, dtype=torch.bool)
    for start, end in spans:
        needed_T[start : end - 1] = True
    if everywhere:
        needed_T[:] = True
    return Pack(
        tokens_T=torch.randint(0, shapes.vocabulary, (tokens,)),
        starts_T=torch.arange(tokens) // length * length,
        aux_TAP=torch.randn(tokens, 3, shapes.hidden, dtype=torch.bfloat16),
        final_FP=torch.randn(tokens, shapes.hidden, dtype=torch.bfloat16)[needed_T],
        teacher_T=torch.where(needed_T, needed_T.cumsum(0) - 1, -1),
        spans=spans,
        documents=[],
    )


class AllRows(Objective):
    """Every position of every document is a row at every step; rows that are not supervised weigh nothing."""

    def rows(self, pack: Pack, seed: int | None) -> list[torch.Tensor]:
        """All positions whose tokens up to t + 2 + k lie in their document."""
        starts = [*pack.starts_T.unique().tolist(), pack.tokens_T.numel()]
        documents = list(zip(starts[:-1], starts[1:], strict=True))
        steps = range(self.settings.unroll_steps)
        everything = [torch.cat([torch.arange(s, max(s, e - 2 - k)) for s, e in documents]) for k in steps]
        return [rows_R.to(pack.tokens_T.device) for rows_R in everything]

    def weights(self, pack: Pack, rows_R: torch.Tensor, step: int) -> torch.Tensor:
        """As for supervised rows, and 0 for the others."""
        supervised = supervised_rows(pack.spans, step).to(rows_R.device)
        return super().weights(pack, rows_R, step) * torch.isin(rows_R, supervised)


class Bench:
    """One method on one cell, ready to take training steps."""

    def __init__(self, shapes: Shapes, cell: Cell, method: str, precision: str, device: str) -> None:
        torch.manual_seed(0)
        self.pack = synthetic_pack(shapes, cell, method == "all_rows").to(torch.device(device))
        kind = AllRows if method == "all_rows" else Objective
        settings = ObjectiveConfig(unroll_steps=shapes.steps)
        with torch.device(device):
            head = Eagle3Head(shapes.head(), torch.arange(shapes.draft_vocabulary))
            lm_head = torch.randn(shapes.vocabulary, shapes.hidden, dtype=torch.bfloat16) * shapes.hidden**-0.5
            embedding = lm_head if shapes.tied else torch.randn_like(lm_head)
        target: Any = SimpleNamespace(load_embedding=lambda: embedding, load_lm_head=lambda: lm_head)
        self.objective = kind(head, target, settings, precision).to(device)
        self.optimizer = Optimizer(head, OptimConfig())
        self.counts = [max(1, row_count(self.pack.spans, k)) for k in range(shapes.steps)]
        self.device = device

    def step(self) -> float:
        """One training step; returns its seconds."""
        self._wait()
        started = time.perf_counter()
        outcome = self.objective(self.pack, self.counts, 0)
        outcome.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.objective.head.parameters(), 0.5)
        self.optimizer.step(1e-6)
        self._wait()
        return time.perf_counter() - started

    def loss(self) -> float:
        """The loss, without a step."""
        with torch.no_grad():
            return self.objective(self.pack, self.counts, 0).loss.item()

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def flops(self) -> float:
        """Floating-point operations of the products that a step needs, forward and backward."""
        config, objective = self.objective.head.config, self.objective
        assert isinstance(config, Eagle3Config)
        rows = objective.rows(self.pack, None)
        tokens, hidden = self.pack.tokens_T.numel(), config.hidden_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        fuse = tokens * len(config.aux_layers) * config.target_hidden_size * hidden
        total = 2.0 * fuse  # aux planes need no gradient
        key_value = 2 * hidden * 2 * keys
        layer = 2 * hidden * queries + queries * hidden + 3 * hidden * config.intermediate_size
        total += 3 * tokens * key_value
        for k, rows_R in enumerate(rows):
            seen = (rows_R - self.pack.starts_T[rows_R] + 1).sum().item() + k * rows_R.numel()
            own = (
                key_value if k else key_value / 3
            )  # at step 0 a row's own are computed again, and nobody learns from them
            total += rows_R.numel() * 3 * (layer + config.draft_vocab_size * hidden + own)
            total += 3 * seen * 2 * queries
        total += self.pack.final_FP.numel() * config.draft_vocab_size
        return 2 * total


def matmul_peak(precision: str, device: str) -> float:
    """Floating-point operations per second of the better of two large products, now."""
    dtype, size = (torch.bfloat16 if precision == "bf16" else torch.float32), 8192 if device == "cuda" else 2048
    best = 0.0
    for shape in ((size, size, size), (size, size // 4, size * 4)):
        a, b = torch.randn(shape[0], shape[1], device=device), torch.randn(shape[1], shape[2], device=device)
        a, b = a.to(dtype), b.to(dtype)
        for _ in range(2):
            if device == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            a @ b
            if device == "cuda":
                torch.cuda.synchronize()
            best = max(best, 2 * shape[0] * shape[1] * shape[2] / (time.perf_counter() - started))
    return best


@dataclass
class Measured:
    """One line of the table, and one object of the JSON list."""

    method: str
    precision: str
    tokens: int
    supervised_share: float
    tokens_per_s: float
    rows_per_s: float
    peak_bytes: int
    matmul_efficiency: float


def measured(
    bench: Bench, method: str, precision: str, share: float, times: list[tuple[float, float]], peak: int
) -> Measured:
    """From (seconds of a step, matmul peak beside it) of each round."""
    seconds = statistics.median(second for second, _ in times)
    efficiency = statistics.median(bench.flops() / second / matmul for second, matmul in times)
    tokens = bench.pack.tokens_T.numel()
    return Measured(method, precision, tokens, share, tokens / seconds, bench.counts[0] / seconds, peak, efficiency)


def in_its_own_process(arguments: list[str]) -> Measured:
    """One method on one cell in a fresh process: the only way to see its peak memory."""
    done = subprocess.run(
        [sys.executable, "-m", "train.bench", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise Refused(f"a measuring process ended with {done.returncode}: {last}")
    return Measured(**json.loads(done.stdout))


def measure_alone(shapes: Shapes, cell: Cell, method: str, precision: str, device: str) -> Measured:
    """What `in_its_own_process` runs: one step, timed; peak memory above what there was before."""
    torch.randn(64, 64) @ torch.randn(64, 64)
    before = peak_memory(torch.device(device))
    bench = Bench(shapes, cell, method, precision, device)
    bench.objective(None, bench.counts, 0).loss.backward()
    bench.optimizer.step(0)  # its state is there, as in every step but the first
    seconds = bench.step()
    peak = peak_memory(torch.device(device)) - before
    return measured(bench, method, precision, cell[2], [(seconds, matmul_peak(precision, device))], peak)


def measure_together(shapes: Shapes, cell: Cell, precision: str, device: str) -> dict[str, Measured]:
    """Both methods on one cell, step by step in turn."""
    benches = {method: Bench(shapes, cell, method, precision, device) for method in METHODS}
    losses = {method: bench.loss() for method, bench in benches.items()}
    if not math.isclose(*losses.values(), rel_tol=1e-2 if precision == "bf16" else 1e-4):
        raise Refused(f"the methods disagree about the loss: {losses}")
    times: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
    for bench in benches.values():
        bench.step()
    for _ in range(ROUNDS):
        for method, bench in benches.items():
            times[method].append((bench.step(), matmul_peak(precision, device)))
    return {m: measured(bench, m, precision, cell[2], times[m], 0) for m, bench in benches.items()}


def run(name: str, device: str, precisions: list[str]) -> list[Measured]:
    """Measure everything there is for these shapes."""
    shapes, found = SHAPES[name], []
    for precision in precisions:
        for cell in (*shapes.cells, *shapes.long):
            together = measure_together(shapes, cell, precision, device) if cell in shapes.cells else {}
            for method in METHODS:
                if method == "all_rows" and cell in shapes.only_supervised:
                    continue
                if device == "cuda":  # its allocator tells the peak, and a process would take long to start
                    gc.collect()
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                    alone = measure_alone(shapes, cell, method, precision, device)
                else:
                    place = [str(each) for each in (name, *cell, method, precision, device)]
                    alone = in_its_own_process(["--alone", *place])
                found.append(replace(together.get(method, alone), peak_bytes=alone.peak_bytes))
                log.info(
                    "%s, %s, %d tokens, %.1f %% supervised: %.0f tokens/s, peak %.0f MB, MFU %.2f",
                    method, precision, cell[0], 100 * cell[2], found[-1].tokens_per_s,
                    found[-1].peak_bytes / 1e6, found[-1].matmul_efficiency,
                )  # fmt: skip
    return found


def show(found: list[Measured]) -> None:
    """The table, with each method's ratio to all_rows of the same cell."""
    caption = "MFU: of the machine's matmul peak, measured beside each step. x: tokens/s by those of all_rows."
    table = Table(
        caption=caption, title=f"{platform.node()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    for heading in ("precision", "tokens", "supervised", "method", "tokens/s", "rows/s", "peak MB", "MFU", "x"):
        table.add_column(heading, justify="left" if heading in ("method", "precision") else "right")
    speed = {(m.precision, m.tokens, m.supervised_share): m.tokens_per_s for m in found if m.method == "all_rows"}
    for m in found:
        other = speed.get((m.precision, m.tokens, m.supervised_share))
        table.add_row(
            m.precision, f"{m.tokens:,}", f"{m.supervised_share:.1%}", m.method, f"{m.tokens_per_s:,.0f}",
            f"{m.rows_per_s:,.0f}", f"{m.peak_bytes / 1e6:,.0f}", f"{m.matmul_efficiency:.0%}",
            "" if other is None else f"{m.tokens_per_s / other:.2f}",
        )  # fmt: skip
    tables().print(table)


def main() -> None:
    """Parse, measure, tell."""
    from conf.help import Parser, described

    parser = Parser("python -m train.bench", **described("train.bench"))
    parser.add_argument("--shapes", choices=SHAPES, default="smollm2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("bf16", "fp32"), nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements as a JSON list")
    parser.add_argument("--alone", nargs=7, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        if asked.device == "cuda" and not torch.cuda.is_available():
            raise Refused("there is no CUDA device here; use --device cpu")
        if asked.alone:
            name, tokens, length, share, method, precision, device = asked.alone
            cell = (int(tokens), int(length), float(share))
            print(json.dumps(asdict(measure_alone(SHAPES[name], cell, method, precision, device))))
            return
        found = run(asked.shapes, asked.device, asked.precision)
        show(found)
        if asked.json:
            write_json(asked.json, [asdict(each) for each in found])
    except Refused as error:
        print(f"train.bench: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
