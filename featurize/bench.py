"""`python -m featurize.bench experiment=demo`: what extraction costs beside the target's forward, how fast planes are
read, and what each encoding keeps of them.

Works on the run's first shard, or the first BENCH_TOKENS of it, in a temporary folder. The bare forward and the
extraction take turns over the same batches, and the best of each counts, so that a change of the machine's speed hits
both. Reading is from the page cache, after every byte has been touched once: a copy of each document's planes as they
are stored, which is what a training pack takes; then decoding.

An encoding is judged by the planes it gives back (error relative to each row, per plane) and by the logits of the final
plane through the target's own head: argmax, relative error of each row, and KL from the target's distribution. Beside
them is told what share of the target's probability on the draft vocabulary so many tokens of it have that
`featurize.teacher_k` keeps instead of the final plane.

Shape suffixes: N rows, H hidden, F teacher positions, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.table import Table

from featurize.encoding import ENCODINGS, Planes, decoded, encode, joined, stored
from featurize.extract import Backend, batches, extract_unit, load_backend, pad
from featurize.shards import Unit, Widths, cut_units, map_tensors, shard_path, write_shard
from featurize.teacher import Teaching, teacher_bytes
from featurize.tokenised import TokenisedSet, load_renderer, tokenise
from featurize.vocabulary import draft_vocabulary
from models.target import aux_layers, describe_target
from models.terminal import tables

BENCH_TOKENS = 16_384
"""Tokens of the shard that is measured."""

TURNS = 3
"""Measurements of each, of which the best counts."""

LOGITS_AT_ONCE = 512
"""Rows whose logits are held at a time."""

KEPT = (16, 64, 256)
"""Tokens of a teacher, as many as the draft vocabulary has of them."""

READ_DOCUMENTS = 32
"""Documents that are read as one pack."""


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, what it left to do on the device included."""
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


@dataclass(frozen=True)
class Speed:
    """Tokens per second of a bare forward and of the extraction; bytes per second of reading, and of decoding."""

    forward: float
    extraction: float
    read: float
    decode: float


@dataclass(frozen=True)
class Loss:
    """What an encoding loses.

    Attributes:
        bytes_per_token: of the measured shard.
        plane_errors: median relative error of a row, per aux plane and for the final plane.
        argmax: share of rows whose logits have the same largest entry.
        logits_error: largest relative error of a row of logits.
        kl: mean KL from the rows' own distributions.
    """

    bytes_per_token: float
    plane_errors: tuple[float, ...]
    argmax: float
    logits_error: float
    kl: float


@dataclass(frozen=True)
class Mass:
    """What is kept of teachers: bytes per token of the measured shard, and the mean share of their probability."""

    bytes_per_token: float
    share: float


def row_errors(ours_NH: torch.Tensor, theirs_NH: torch.Tensor) -> torch.Tensor:
    """Relative error of each row, [N]."""
    theirs_NH = theirs_NH.float()
    return (ours_NH.float() - theirs_NH).norm(dim=-1) / theirs_NH.norm(dim=-1).clamp_min(1e-12)


@torch.inference_mode()
def judge(encoding: str, aux_TAH: torch.Tensor, final_FH: torch.Tensor, head_VH: torch.Tensor, size: int) -> Loss:
    """Encode planes, decode them again and compare; `size` is that of the shard in bytes."""
    rebuilt = [
        decoded(stored(encoding, {"x" + part: t for part, t in encode(encoding, planes).items()}, "x", 0, len(planes)))
        for planes in (aux_TAH, final_FH)
    ]
    errors = [float(row_errors(rebuilt[0][:, i], aux_TAH[:, i]).median()) for i in range(aux_TAH.shape[1])]
    errors.append(float(row_errors(rebuilt[1], final_FH).median()))
    head_VH, agreed, worst, kl = head_VH.float(), 0, 0.0, 0.0
    for at in range(0, len(final_FH), LOGITS_AT_ONCE):
        rows = slice(at, at + LOGITS_AT_ONCE)
        ours, theirs = (planes[rows].to(head_VH.device).float() @ head_VH.T for planes in (rebuilt[1], final_FH))
        agreed += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        worst = max(worst, float(row_errors(ours, theirs).max()))
        p, q = theirs.log_softmax(-1), ours.log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum())
    count = max(1, len(final_FH))
    return Loss(size / len(aux_TAH), tuple(errors), agreed / count, worst, kl / count)


def measure_reading(directory: Path, unit: Unit, encoding: str, lengths: list[int]) -> tuple[float, float]:
    """Bytes per second of copying documents' aux planes out of a mapped shard, and of decoding (bytes of bf16)."""
    tensors = map_tensors(shard_path(directory, unit))
    for tensor in tensors.values():
        tensor.view(torch.uint8).sum()  # every page is in the cache, and mapped
    edges = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    taken: list[Planes | torch.Tensor] = []

    def read() -> None:
        taken.clear()
        for at in range(0, len(lengths), READ_DOCUMENTS):
            ends = edges[at : at + READ_DOCUMENTS + 1]
            taken.append(joined([stored(encoding, tensors, "aux", a, b) for a, b in zip(ends, ends[1:], strict=False)]))

    cpu = torch.device("cpu")
    reading = min(seconds(read, cpu) for _ in range(TURNS))
    held = [(p.codes, p.scales) if isinstance(p, Planes) else (p,) for p in taken]
    size = sum(tensor.nbytes for tensors in held for tensor in tensors)
    decoding = seconds(lambda: [decoded(planes) for planes in taken], cpu)
    return size / reading, sum(decoded(planes).nbytes for planes in taken) / decoding


def measure(backend: Backend, tokenised: TokenisedSet, hidden_size: int, batch_tokens: int, encoding: str) -> Speed:
    """Time one unit: the forward alone, the extraction with writing, and reading what was written."""
    unit = cut_units(tokenised, BENCH_TOKENS)[0]
    lengths = [document.length for document in tokenised.documents[unit.first : unit.last]]
    padded = [pad([tokenised.ids(unit.first + i) for i in batch]) for batch in batches(lengths, batch_tokens)]

    def forward() -> None:
        with torch.inference_mode():
            for ids_BL in padded:
                backend.decoder(input_ids=ids_BL.to(backend.device), use_cache=False)

    with tempfile.TemporaryDirectory() as folder:

        def extraction() -> None:
            planes = extract_unit(backend, tokenised, unit, batch_tokens, hidden_size, lambda _tokens: None)
            write_shard(Path(folder), unit, encoding, *planes)

        forward()
        turns = [(seconds(forward, backend.device), seconds(extraction, backend.device)) for _ in range(TURNS)]
        bare, whole = (min(times) for times in zip(*turns, strict=True))
        return Speed(unit.tokens / bare, unit.tokens / whole, *measure_reading(Path(folder), unit, encoding, lengths))


def kept_mass(final_FH: torch.Tensor, head_VH: torch.Tensor, ids_D: torch.Tensor) -> dict[int, float]:
    """Mean share of the target's probability on the draft vocabulary that its likeliest tokens have, by their number.

    Args:
        head_VH: the target's, in the dtype it runs in. ids_D: target ids of the draft vocabulary.
    """
    shares = {}
    for kept in dict.fromkeys(min(each, len(ids_D)) for each in KEPT):
        top = Teaching(head_VH, ids_D, kept)(final_FH)
        p_F = top.log_p_FS.float().exp().sum(-1)
        shares[kept] = float((p_F / (p_F + top.rest_F)).mean())
    return shares


def compare(
    backend: Backend,
    tokenised: TokenisedSet,
    hidden_size: int,
    batch_tokens: int,
    encoding: str,
    head_VH: torch.Tensor,
    ids_D: torch.Tensor,
) -> tuple[dict[str, Loss], dict[int, Mass]]:
    """On the planes of one unit every encoding's loss, and what so many tokens of its teachers have, beside `encoding`.

    Args:
        head_VH: the target's, in the dtype it runs in. ids_D: target ids of the draft vocabulary.
    """
    unit = cut_units(tokenised, BENCH_TOKENS)[0]
    _, aux_TAH, final_FH = extract_unit(backend, tokenised, unit, batch_tokens, hidden_size, lambda _tokens: None)
    assert isinstance(final_FH, torch.Tensor)
    head_VH, planes = head_VH.to(backend.device), aux_TAH.shape[1]
    sizes = {name: Widths(hidden_size, planes, name).bytes([unit]) for name in ENCODINGS}
    losses = {name: judge(name, aux_TAH, final_FH, head_VH, size) for name, size in sizes.items()}
    masses = {}
    for kept, share in kept_mass(final_FH, head_VH, ids_D.to(backend.device)).items():
        size = Widths(hidden_size, planes, encoding, teacher_bytes(kept, len(ids_D))).bytes([unit])
        masses[kept] = Mass(size / unit.tokens, share)
    return losses, masses


def show(speed: Speed, losses: dict[str, Loss], masses: dict[int, Mass], encoding: str) -> None:
    """Print all tables."""
    print(
        f"extraction ({encoding}, writing included) {speed.extraction:,.0f} tokens/s, "
        f"bare forward {speed.forward:,.0f}: {speed.extraction / speed.forward:.1%}; "
        f"reading {speed.read / 1e9:.2f} GB/s, decoding {speed.decode / 1e9:.2f} GB/s"
    )
    table = Table("encoding", "bytes/token", "error per plane (aux ..., final)", "argmax", "logits error", "KL")
    for name, loss in losses.items():
        errors = " ".join(f"{error:.4f}" for error in loss.plane_errors)
        table.add_row(
            name, f"{loss.bytes_per_token:,.0f}", errors, f"{loss.argmax:.2%}", f"{loss.logits_error:.4f}",
            f"{loss.kl:.5f}",
        )  # fmt: skip
    console = tables()
    console.print(table)
    table = Table(
        "featurize.teacher_k", f"bytes/token ({encoding})", "probability on the draft vocabulary that is kept"
    )
    for kept, mass in masses.items():
        table.add_row(f"{kept}", f"{mass.bytes_per_token:,.0f}", f"{mass.share:.3%}")
    console.print(table)


if __name__ == "__main__":
    from conf import Run, stage

    def work(run: Run) -> None:
        """Measure on the run's first shard."""
        target, settings = describe_target(run.target), run.featurize
        layers = aux_layers(target, run.target.aux_layers)
        tokenised = tokenise(replace(run.data, limit=run.data.limit or 512), load_renderer(target, run.target), "")
        backend = load_backend(target, run.target, layers, settings.device)
        speed = measure(backend, tokenised, target.hidden_size, settings.batch_tokens, settings.encoding)
        head_VH, share, size = target.load_lm_head().to(target.dtype), run.data.validation_share, run.draft.vocab_size
        ids_D = draft_vocabulary(tokenised.documents, tokenised.tokens, share, target.vocab_size, size)
        losses, masses = compare(
            backend, tokenised, target.hidden_size, settings.batch_tokens, settings.encoding, head_VH, ids_D
        )
        show(speed, losses, masses, settings.encoding)

    stage("featurize.bench", work, shared=True)
