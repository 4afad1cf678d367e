"""`python -m featurize.bench experiment=demo`: what extraction costs beside the target's forward, how fast planes are
read, and what each encoding keeps of them.

Works on the run's first shard, or the first BENCH_TOKENS of it, in a temporary folder. The bare forward and the
extraction take turns over the same batches, and the best of each counts, so that a change of the machine's speed hits
both. Reading is from the page cache, after every byte has been touched once: a copy of each document's planes as they
are stored, which is what a training pack takes; then decoding.

An encoding is judged by the planes it gives back (error relative to each row, per plane) and by the logits of the final
plane through the target's own head: argmax, relative error of each row, and KL from the target's distribution.

Shape suffixes: N rows, H hidden, F teacher positions, V vocabulary.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from featurize.encoding import ENCODINGS, Planes, decoded, encode, joined, stored
from featurize.extract import Backend, Widths, batches, extract_unit, pad
from featurize.store import Unit, cut_units, map_tensors, shard_path, write_shard
from featurize.tokenised import TokenisedSet
from models.errors import Refused

BENCH_TOKENS = 16_384
"""Tokens of the shard that is measured."""

TURNS = 3
"""Measurements of each, of which the best counts."""

LOGITS_AT_ONCE = 512
"""Rows whose logits are held at a time."""

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


def compare(
    backend: Backend, tokenised: TokenisedSet, hidden_size: int, batch_tokens: int, head_VH: torch.Tensor
) -> dict[str, Loss]:
    """Every encoding's loss on the planes of one unit."""
    unit = cut_units(tokenised, BENCH_TOKENS)[0]
    _, aux_TAH, final_FH = extract_unit(backend, tokenised, unit, batch_tokens, hidden_size, lambda _tokens: None)
    head_VH = head_VH.to(backend.device)
    sizes = {name: Widths(hidden_size, aux_TAH.shape[1], name).bytes([unit]) for name in ENCODINGS}
    return {name: judge(name, aux_TAH, final_FH, head_VH, size) for name, size in sizes.items()}


def show(speed: Speed, losses: dict[str, Loss], encoding: str) -> None:
    """Print both tables."""
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
    Console(width=120).print(table)


def main() -> None:
    """Measure on the run that the command line names."""
    import conf
    from featurize.extract import load_backend
    from featurize.tokenised import load_renderer, tokenise
    from models.target import aux_layers, describe_target

    if conf.help.asks_for_help(sys.argv[1:]):
        conf.help.tell()
    try:
        run = conf.load(sys.argv[1:])
        target, settings = describe_target(run.target), run.featurize
        layers = aux_layers(target, run.target.aux_layers)
        tokenised = tokenise(replace(run.data, limit=run.data.limit or 512), load_renderer(target, run.target), "")
        backend = load_backend(target, run.target, layers, settings.device)
        speed = measure(backend, tokenised, target.hidden_size, settings.batch_tokens, settings.encoding)
        head_VH = target.load_lm_head()
        losses = compare(backend, tokenised, target.hidden_size, settings.batch_tokens, head_VH)
        show(speed, losses, settings.encoding)
    except Refused as error:
        print(f"featurize.bench: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
