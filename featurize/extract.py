"""Hidden states with transformers: the target's decoder alone, hooks on the layers that are needed.

The unit of work is a shard (shards.py). Its documents are sorted by length and laid into batches of about
`featurize.batch_tokens` tokens, padded on the right to the longest of the batch. No attention mask is
passed: a causal model never looks to the right, so padding behind a document cannot reach it, and
without a mask attention takes its fast path. Neighbours in length differ by little, so padding is under
a few percent, and short documents need not be packed behind a block mask, which on a CPU would cost
more than the padding. The output head is never computed; planes go straight into the shard's tensors.

Batches depend on the unit alone, so a shard is the same, byte for byte, whoever computes it and how often.

Everything after the planes (units, progress, shards) is the same for the other backend, `vllm_extract`.

Shape suffixes: B documents of a batch, L longest of the batch, T tokens of a shard, F kept rows of the final
plane of a shard, A aux planes, H hidden.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TaskID, TextColumn
from torch import nn

from featurize.claims import Claims
from featurize.shards import Unit, is_finished, kept_finals, remove_leftovers, teacher_positions, write_shard
from featurize.teacher import Teaching, TopK
from featurize.tokenised import TokenisedSet
from models.config import TargetConfig
from models.errors import Refused
from models.planes import captured, decoder_of
from models.target import Target

PROGRESS_SECONDS = 20
"""Between two progress lines where there is no terminal."""


class PlaneSource(Protocol):
    """What yields planes: a target loaded here, or a server.

    Attributes:
        aux_layers: planes that it yields; plane i = residual stream after i decoder layers.
        device: where they are encoded.
        name, version, quantization: for the contract.
    """

    @property
    def aux_layers(self) -> tuple[int, ...]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def quantization(self) -> str: ...

    def documents(
        self, documents: Sequence[tuple[str, torch.Tensor]], batch_tokens: int
    ) -> Iterator[tuple[int, list[torch.Tensor], torch.Tensor]]:
        """For every document (its id for messages, ids [T]), in any order: its index, aux planes, final plane [T, H].

        Raises:
            Refused: the planes of a document cannot be had.
        """
        ...


@dataclass(frozen=True)
class Backend:
    """A target loaded with transformers.

    Attributes:
        model: the causal language model, in evaluation mode.
        decoder: the decoder inside it.
        aux_layers: planes to take; plane i = residual stream after i decoder layers.
    """

    model: Any
    decoder: Any
    aux_layers: tuple[int, ...]
    device: torch.device

    name = "transformers"

    @property
    def version(self) -> str:
        """Of transformers."""
        import transformers

        return transformers.__version__

    @property
    def quantization(self) -> str:
        """How the loaded weights are quantised, "none" if they are not."""
        settings = getattr(self.model.config, "quantization_config", None)
        method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
        return "none" if method is None else str(getattr(method, "value", method))

    def documents(
        self, documents: Sequence[tuple[str, torch.Tensor]], batch_tokens: int
    ) -> Iterator[tuple[int, list[torch.Tensor], torch.Tensor]]:
        """See `PlaneSource`; in batches of at most `batch_tokens` padded tokens."""
        lengths = [len(ids_T) for _, ids_T in documents]
        for batch in batches(lengths, batch_tokens):
            aux, final_BLH = self.planes(pad([documents[i][1] for i in batch]))
            for row, i in enumerate(batch):
                yield i, [states[row, : lengths[i]] for states in aux], final_BLH[row, : lengths[i]]

    def planes(self, ids_BL: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Aux planes (A tensors [B, L, H]) and the final plane [B, L, H] of right-padded ids, on the device."""
        with captured(self.decoder, self.aux_layers) as taken, torch.inference_mode():
            final_BLH = self.decoder(input_ids=ids_BL.to(self.device), use_cache=False).last_hidden_state
        return [taken[layer] for layer in self.aux_layers], final_BLH


def choose_device(requested: str, key: str = "featurize.device") -> torch.device:
    """The torch device that setting `key` asks for; "auto" takes a GPU when there is one.

    Raises:
        Refused: the name is no device, or the device is not there.
    """
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(requested)
    except RuntimeError:  # it lists all that torch was ever built for
        raise Refused(f"{key}={requested} is no device of torch; say auto, cpu, cuda or cuda:1") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise Refused(f"{key}={requested} cannot be used ({str(error).splitlines()[0]})") from None
    return device


def load_backend(target: Target, settings: TargetConfig, aux_layers: Sequence[int], device: str) -> Backend:
    """Load the target in its dtype, ready for extraction.

    Raises:
        Refused: the weights cannot be loaded, or the model's decoder layers cannot be found.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    place = choose_device(device)
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            target.path, dtype=target.dtype, trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise Refused(f"target.path={target.path} cannot be loaded ({str(error).splitlines()[0]})") from None
    model.eval().to(place)
    return Backend(model, decoder_of(model, target.num_layers), tuple(aux_layers), place)


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of `lengths`, longest first, in batches of at most `batch_tokens` padded tokens (at least one each)."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    begin = 0
    while begin < len(order):
        size = max(1, batch_tokens // lengths[order[begin]])
        yield order[begin : begin + size]
        begin += size


def pad(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of ids as one int64 [B, L], padded on the right with 0 (any id will do: nobody attends to it)."""
    return nn.utils.rnn.pad_sequence([row.long() for row in rows], batch_first=True)


def check_rows(plane: torch.Tensor, name: str, document: str) -> None:
    """Refuse a plane [T, H] that holds non-finite values or rows of zeros only.

    Raises:
        Refused: naming plane, count and document.
    """
    largest = plane.abs().amax(-1).float()
    # A NaN compares false with everything, so it is caught as "not in (0, inf)".
    bad = int((~((largest > 0) & (largest < torch.inf))).sum())
    if bad:
        raise Refused(
            f"{name} of document {document} has {bad} of {len(largest)} rows that are zero or not finite; "
            "the target cannot be run like this (try target.dtype=float32 or bfloat16)"
        )


def extract_unit(
    backend: PlaneSource,
    tokenised: TokenisedSet,
    unit: Unit,
    batch_tokens: int,
    hidden_size: int,
    advance: Callable[[int], None],
    teaching: Teaching | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | TopK]:
    """Planes of one unit: tokens int32 [T], aux bf16 [T, A, H], final bf16 [F, H]; the planes on the device.

    Args:
        advance: called with the number of tokens of every document that is done.
        teaching: what the final plane is turned into, if it is not to be kept.

    Raises:
        Refused: a plane cannot be had, or holds rows that are zero or not finite.
    """
    documents = tokenised.documents[unit.first : unit.last]
    tokens_T = torch.cat([tokenised.ids(unit.first + i) for i in range(len(documents))])
    aux_TAH = torch.empty(
        unit.tokens, len(backend.aux_layers), hidden_size, dtype=torch.bfloat16, device=backend.device
    )
    final_FH = torch.empty(unit.finals, hidden_size, dtype=torch.bfloat16, device=backend.device)
    begins = []
    token = final = 0
    for document in documents:
        begins.append((token, final))
        token, final = token + document.length, final + kept_finals(document, unit.everywhere)
    rows = [(document.id, tokenised.ids(unit.first + i)) for i, document in enumerate(documents)]
    for i, aux, final_TH in backend.documents(rows, batch_tokens):
        document, (token, final) = documents[i], begins[i]
        for plane, (layer, states_TH) in enumerate(zip(backend.aux_layers, aux, strict=True)):
            rows_TH = aux_TAH[token : token + document.length, plane]
            rows_TH.copy_(states_TH)
            check_rows(rows_TH, f"plane {layer}", document.id)
        rows_FH = final_FH[final : final + kept_finals(document, unit.everywhere)]
        kept_TH = final_TH if unit.everywhere else final_TH[teacher_positions(document).to(final_TH.device)]
        rows_FH.copy_(kept_TH)
        check_rows(rows_FH, "the final plane", document.id)
        advance(document.length)
    return tokens_T, aux_TAH, final_FH if teaching is None else teaching(final_FH)


class Progress:
    """Tokens done and tokens per second: a bar on a terminal, otherwise one plain line per interval."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.started = self.told = time.monotonic()
        self.estimated = False
        self.bar: Bar | None = None

    @contextmanager
    def shown(self) -> Iterator[Progress]:
        """Show the bar while the block runs, and one line at the end."""
        if sys.stderr.isatty():
            columns = (*Bar.get_default_columns(), TextColumn("{task.fields[rate]:,.0f} tokens/s"))
            with Bar(*columns, console=Console(stderr=True)) as self.bar:
                self.bar.add_task("features", total=self.total, rate=0.0)
                yield self
        else:
            yield self
        self._tell()

    @property
    def rate(self) -> float:
        """Tokens per second so far."""
        return self.done / max(time.monotonic() - self.started, 1e-9)

    def _tell(self) -> None:
        print(f"features: {self.done:,} of {self.total:,} tokens, {self.rate:,.0f} tokens/s", flush=True)

    def advance(self, tokens: int) -> None:
        """Count finished tokens."""
        self.done += tokens
        if self.bar is not None:
            self.bar.update(TaskID(0), completed=self.done, rate=self.rate)
        elif time.monotonic() - self.told >= PROGRESS_SECONDS:
            self.told = time.monotonic()
            self._tell()

    def finished_one(self) -> None:
        """After the first shard, writing included, say how long the rest takes."""
        if not self.estimated and self.done < self.total:
            minutes = (self.total - self.done) / self.rate / 60
            print(f"features: about {minutes:,.1f} minutes to go, if this process goes on alone", flush=True)
        self.estimated = True


def extract(
    backend: PlaneSource,
    directory: Path,
    tokenised: TokenisedSet,
    todo: Sequence[Unit],
    batch_tokens: int,
    hidden_size: int,
    encoding: str,
    claims: Claims,
    teaching: Teaching | None = None,
) -> None:
    """Compute the given units, each as soon as it is done on disk, until none is left; others may be at it as well.

    First come the units that nobody is at. Then we wait for each of the others, and do it if its process died.

    Raises:
        Refused: a plane cannot be had, or holds rows that are zero or not finite.
    """
    progress = Progress(sum(unit.tokens for unit in todo))
    with progress.shown():
        for wait in (False, True):
            for unit in todo:
                with claims.unit(unit.index, wait=wait) as mine:
                    if not mine or is_finished(directory, unit):
                        continue
                    remove_leftovers(directory, unit)
                    made = extract_unit(backend, tokenised, unit, batch_tokens, hidden_size, progress.advance, teaching)
                    write_shard(directory, unit, encoding, *made)
                    progress.finished_one()
