"""Planes on disk in fewer bytes: integers of 8 or 4 bits, scaled per channel and per group of channels.

A residual stream has a few channels that are huge for every token, so whatever shares a scale with one of them is
rounded away. They are always the same channels: a shard therefore keeps one table of channel sizes (mean magnitude to
the power 0.75, the form of AWQ's scales, arXiv 2306.00978), planes are divided by it, and what remains is even enough
for integers with a bf16 scale per group. The extreme of a group is its scale times -128 (-8), so that the whole range
is used.

Measured on SmolLM2-135M's planes (4,096 tokens): KL of rebuilt logits 0.0031 for fp8 e4m3 with a scale per token,
0.0009 for int8 in groups of 64, 0.00015 with the table; for int4 in groups of 32 it is 0.099 and 0.028.

Decoding happens where the planes are used, after the transfer, in fp32, a bounded number of values at a time.

Shape suffixes: N rows (tokens or teacher positions), H hidden, G groups. Between N and H there may be more
dimensions (the aux planes), written as `...`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from featurize.config import ENCODING_NAMES
from models.errors import Refused

POWER = 0.75
"""Of a channel's mean magnitude. 1 spreads the error evenly over channels, relative to each; 0 over their values."""

CHUNK = 1 << 20
"""Values that are encoded or decoded at a time; in fp32 they fit a processor's cache or a corner of a GPU."""


@dataclass(frozen=True)
class Integers:
    """An encoding: `bits` per value, and a bf16 scale for every `group` channels."""

    bits: int
    group: int


ENCODINGS: dict[str, Integers | None] = dict(zip(ENCODING_NAMES, (None, Integers(8, 64), Integers(4, 32)), strict=True))
"""How planes can be stored, by the name that the contract carries; None is as they are."""


def require_encoding(name: str, hidden_size: int) -> None:
    """Check that planes of this width can be stored so.

    Raises:
        Refused: no such encoding, or the width is not a multiple of its group.
    """
    if name not in ENCODINGS:
        raise Refused(f"featurize.encoding={name} is none of {', '.join(ENCODINGS)}")
    integers = ENCODINGS[name]
    if integers is not None and hidden_size % integers.group:
        raise Refused(
            f"featurize.encoding={name} needs a hidden size that is a multiple of {integers.group}, "
            f"the target's is {hidden_size}; choose another encoding"
        )


def row_bytes(name: str, hidden_size: int) -> int:
    """Bytes of one row of one plane."""
    integers = ENCODINGS[name]
    if integers is None:
        return 2 * hidden_size
    return hidden_size * integers.bits // 8 + 2 * (hidden_size // integers.group)


def table_bytes(name: str, hidden_size: int) -> int:
    """Bytes of one plane's table of channel sizes, once per shard."""
    return 0 if ENCODINGS[name] is None else 2 * hidden_size


def _chunks(like: torch.Tensor, channels: int) -> list[slice]:
    """Slices of the rows of `like` with about CHUNK values each, `channels` of them in a row."""
    rows = max(1, CHUNK // channels)
    return [slice(at, at + rows) for at in range(0, len(like), rows)]


def channel_sizes(planes_NH: torch.Tensor) -> torch.Tensor:
    """bf16 [..., H]: mean magnitude of every channel to the power POWER; 1 where a channel is always zero."""
    total_H = torch.zeros(planes_NH.shape[1:], dtype=torch.float64, device=planes_NH.device)
    for rows in _chunks(planes_NH, math.prod(planes_NH.shape[1:])):
        # In fp64, so that the order of summation does not show after rounding.
        total_H += planes_NH[rows].abs().sum(0, dtype=torch.float64)
    sizes_H = (total_H / max(1, len(planes_NH))).pow(POWER).to(torch.bfloat16)
    return torch.where(sizes_H > 0, sizes_H, 1)


def encode(name: str, planes_NH: torch.Tensor) -> dict[str, torch.Tensor]:
    """Planes [N, ..., H] as the tensors of a shard.

    Returns:
        {"": bf16 planes}, or codes ("": int8 [N, ..., H], or uint8 [N, ..., H/2] for 4 bits), ".scales" bf16
        [N, ..., G] and ".channels" bf16 [..., H]; on the device of the planes.
    """
    integers = ENCODINGS[name]
    if integers is None:
        return {"": planes_NH}
    *outer, hidden = planes_NH.shape
    groups, extreme = hidden // integers.group, 2 ** (integers.bits - 1)
    channels_H = channel_sizes(planes_NH)
    packed = integers.bits == 4
    width, dtype = (hidden // 2, torch.uint8) if packed else (hidden, torch.int8)
    codes = torch.empty(*outer, width, dtype=dtype, device=planes_NH.device)
    scales = torch.empty(*outer, groups, dtype=torch.bfloat16, device=planes_NH.device)
    for rows in _chunks(planes_NH, math.prod(planes_NH.shape[1:])):
        even = (planes_NH[rows].float() / channels_H.float()).unflatten(-1, (groups, integers.group))
        largest = even.gather(-1, even.abs().argmax(-1, keepdim=True))
        scale = (largest / -extreme).to(torch.bfloat16)
        scale = torch.where(scale == 0, 1, scale)
        values = (even / scale.float()).round_().clamp_(-extreme, extreme - 1)
        if packed:
            low, high = (values + extreme).to(torch.uint8).chunk(2, -1)
            codes[rows] = (low | high << 4).flatten(-2)
        else:
            codes[rows] = values.to(torch.int8).flatten(-2)
        scales[rows] = scale[..., 0]
    return {"": codes, ".scales": scales, ".channels": channels_H}


@dataclass(frozen=True)
class Planes:
    """Encoded rows, as they lie in shards.

    Attributes:
        integers: the encoding.
        codes, scales: as from `encode`, [N, ...].
        channels: bf16 [S, ..., H], the channel sizes of every segment's shard.
        segments: rows of each segment, S numbers with the sum N.
    """

    integers: Integers
    codes: torch.Tensor
    scales: torch.Tensor
    channels: torch.Tensor
    segments: tuple[int, ...]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Planes:
        """The same planes with every tensor changed: moved, say."""
        codes, scales, channels = change(self.codes), change(self.scales), change(self.channels)
        return replace(self, codes=codes, scales=scales, channels=channels)

    def decode(self) -> torch.Tensor:
        """bf16 [N, ..., H], on the device where the codes are."""
        groups, group = self.scales.shape[-1], self.integers.group
        planes_NH = torch.empty(*self.codes.shape[:-1], groups * group, dtype=torch.bfloat16, device=self.codes.device)
        begin = 0
        for channels_H, length in zip(self.channels.float(), self.segments, strict=True):
            for rows in _chunks(self.codes[begin : begin + length], math.prod(planes_NH.shape[1:])):
                rows = slice(begin + rows.start, begin + min(rows.stop, length))
                codes = self.codes[rows].unflatten(-1, (groups, -1))
                if self.integers.bits == 4:
                    values = torch.cat((codes & 15, codes >> 4), -1).float().sub_(8)
                else:
                    values = codes.float()
                planes_NH[rows] = values.mul_(self.scales[rows].float()[..., None]).flatten(-2).mul_(channels_H)
            begin += length
        return planes_NH


Stored = torch.Tensor | Planes
"""Planes as a shard holds them: plain, or encoded."""


def stored(name: str, tensors: dict[str, torch.Tensor], plane: str, first: int, last: int) -> Stored:
    """Rows [first, last) of "aux" or "final" among a shard's tensors; views, nothing is copied."""
    integers = ENCODINGS[name]
    if integers is None:
        return tensors[plane][first:last]
    codes, scales = tensors[plane][first:last], tensors[f"{plane}.scales"][first:last]
    return Planes(integers, codes, scales, tensors[f"{plane}.channels"][None], (last - first,))


def decoded(planes: Stored) -> torch.Tensor:
    """The planes themselves [N, ..., H]; what is plain comes back as it is."""
    return planes.decode() if isinstance(planes, Planes) else planes


def joined(pieces: Sequence[Stored]) -> Stored:
    """Pieces of one encoding end to end, still encoded."""
    coded = [piece for piece in pieces if isinstance(piece, Planes)]
    if not coded:
        return torch.cat([piece for piece in pieces if isinstance(piece, torch.Tensor)])
    if len(coded) < len(pieces) or len({piece.integers for piece in coded}) > 1:
        raise ValueError("planes of several encodings cannot be joined")
    codes, scales, channels = (
        torch.cat([getattr(piece, name) for piece in coded]) for name in ("codes", "scales", "channels")
    )
    return Planes(coded[0].integers, codes, scales, channels, sum((piece.segments for piece in coded), ()))


def picked(planes: Stored, rows: torch.Tensor) -> Stored:
    """Some rows of one document's planes, as they are stored; a copy."""
    if isinstance(planes, Planes):
        return replace(planes, codes=planes.codes[rows], scales=planes.scales[rows], segments=(len(rows),))
    return planes[rows]


def as_planes(plane: Stored) -> Stored:
    """One plane [N, H] as planes [N, 1, H]; a view."""
    if isinstance(plane, Planes):
        return plane.map(lambda tensor: tensor[:, None])
    return plane[:, None]
