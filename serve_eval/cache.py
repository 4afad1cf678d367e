"""Keys and values of requests of different lengths, chains and trees alike, and the target that reads with them.

A slot of the cache is a position of the text as long as all is verified. A draft tree breaks that: siblings share
a position. So node j of a tree lies in slot root + j at position root + depth(j), sees what came before the root,
its ancestors and itself, and nothing else; once a path is accepted, `move` brings its keys to where a text
without drafts would have them. Rotary embeddings follow the position, so that they stay right. What lies behind
a request's end is never visible and is overwritten by the next round.

Layers with a sliding window (Gemma 3, Mistral) see the part of this that lies in the window: by position, so that a
node sees what its text would. A window is taken to be longer than a tree is deep.

Linear attention keeps one state instead of keys, from which no draft can be taken back. A target with such layers
(Qwen3-Next, Qwen3.5) reads the whole text again in each round: slower, and for chains only.

Legend: B requests, Q new tokens per request, M nodes of a tree (its root included), C cache capacity, G key-value
heads, E head size, Ev size of a value, H hidden, A aux planes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from models.errors import Refused
from models.planes import FINAL, captured, decoder_of

WINDOWED = "sliding_attention"
BY_KEYS = {"full_attention", WINDOWED}
"""Types of layers, as transformers calls them, that keep keys and values, and of which the mask is known here."""


def keeps_states(config: Any) -> bool:
    """Whether a model with this (text) configuration has layers that cannot take back what they have read."""
    return not BY_KEYS.issuperset(getattr(config, "layer_types", None) or ())


def ancestry(parents_BM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which nodes each node sees (itself and its ancestors), bool [B, M, M], and its depth, int64 [B, M].

    Args:
        parents_BM: index of each node's parent, smaller than its own; -1 for the root and for empty places.
    """
    batch, nodes = parents_BM.shape
    seen_BMM = torch.eye(nodes, dtype=torch.bool, device=parents_BM.device).repeat(batch, 1, 1)
    depth_BM = torch.zeros_like(parents_BM)
    rows_B = torch.arange(batch, device=parents_BM.device)
    for node in range(1, nodes):
        parent_B, linked_B = parents_BM[:, node].clamp(min=0), parents_BM[:, node] >= 0
        seen_BMM[:, node] |= seen_BMM[rows_B, parent_B] & linked_B[:, None]
        depth_BM[:, node] = (depth_BM[rows_B, parent_B] + 1) * linked_B
    return seen_BMM, depth_BM


@dataclass(frozen=True)
class Places:
    """Where new tokens stand.

    Attributes:
        positions_BQ: position ids. slots_BQ: where their keys are kept.
        root_B: slot of the tree's root; None where the tokens continue the text one after another.
        seen_BQM: which of the slots from the root on each token sees; None likewise.
    """

    positions_BQ: torch.Tensor
    slots_BQ: torch.Tensor
    root_B: torch.Tensor | None = None
    seen_BQM: torch.Tensor | None = None

    @classmethod
    def line(cls, positions_BQ: torch.Tensor) -> Places:
        """Tokens that continue the text, or padding behind its end."""
        return cls(positions_BQ, positions_BQ)

    @classmethod
    def branches(cls, root_B: torch.Tensor, parents_BM: torch.Tensor, newest: int) -> Places:
        """The last `newest` nodes of a tree whose root is at position `root_B`."""
        seen_BMM, depth_BM = ancestry(parents_BM)
        nodes_M = torch.arange(parents_BM.shape[1], device=root_B.device)
        return cls(
            root_B[:, None] + depth_BM[:, -newest:], root_B[:, None] + nodes_M[-newest:], root_B, seen_BMM[:, -newest:]
        )


class RaggedCache:
    """Keys [B, G, C, E] and values [B, G, C, Ev] per layer, written at each request's own slots.

    It stands in for transformers' Cache: attention layers call `update`, nothing else is used because the
    mask is given ready-made.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.slots_BQ = torch.empty(0, 0, dtype=torch.int64)
        self.extent = 0

    def place(self, places: Places) -> torch.Tensor:
        """Say where the next forward writes; returns the mask [B, 1, Q, extent] of keys it may see."""
        self.slots_BQ = places.slots_BQ
        self.extent = max(self.extent, int(places.slots_BQ.max()) + 1)
        columns_C = torch.arange(self.extent, device=places.slots_BQ.device)
        if places.root_B is None or places.seen_BQM is None:
            return columns_C <= places.slots_BQ[:, None, :, None]
        seen_BQM, first_B11 = places.seen_BQM, places.root_B[:, None, None]
        mask_BQC = (columns_C < first_B11).repeat(1, seen_BQM.shape[1], 1)
        nodes_M = torch.arange(seen_BQM.shape[2], device=seen_BQM.device)
        return mask_BQC.scatter(2, (first_B11 + nodes_M).expand_as(seen_BQM), seen_BQM)[:, None]

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys [B, G, Q, E] and values [B, G, Q, Ev] and return all up to the extent."""
        batch, groups = key.shape[:2]
        held = self.layers.get(layer_idx)
        if held is None or held[0].shape[2] < self.extent:
            grown = [part.new_zeros(batch, groups, self.extent + 64, part.shape[-1]) for part in (key, value)]
            if held is not None:
                for new, old in zip(grown, held, strict=True):
                    new[:, :, : old.shape[2]] = old
            held = self.layers[layer_idx] = (grown[0], grown[1])
        rows_B1 = torch.arange(batch, device=key.device)[:, None]
        held[0][rows_B1, :, self.slots_BQ] = key.transpose(1, 2)
        held[1][rows_B1, :, self.slots_BQ] = value.transpose(1, 2)
        return held[0][:, :, : self.extent], held[1][:, :, : self.extent]

    def move(self, source_BL: torch.Tensor, slots_BL: torch.Tensor) -> None:
        """Copy the keys and values of some slots to others, all read before any is written."""
        rows_B1 = torch.arange(len(source_BL), device=source_BL.device)[:, None]
        for layer in self.layers.values():
            for part in layer:
                part[rows_B1, :, slots_BL] = part[rows_B1, :, source_BL]

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all requests but these."""
        self.layers = {index: (key[rows], value[rows]) for index, (key, value) in self.layers.items()}

    @property
    def empty(self) -> bool:
        """Whether nothing was read yet."""
        return not self.layers


class Text:
    """In the place of keys and values the ids [B, C] themselves, for a model that reads all of them again."""

    def __init__(self) -> None:
        self.ids_BC = torch.empty(0, 0, dtype=torch.int64)

    def place(self, ids_BQ: torch.Tensor, places: Places) -> torch.Tensor:
        """Write new ids; returns all up to the last of them, behind a request's end whatever was there.

        Raises:
            Refused: they are of a tree, in which siblings stand at one position.
        """
        slots_BQ, extent = places.slots_BQ, int(places.slots_BQ.max()) + 1
        apart_BQ = places.positions_BQ != slots_BQ
        if places.root_B is not None:  # where a chain's empty places stand, behind its end
            apart_BQ &= places.positions_BQ != places.root_B[:, None]
        if apart_BQ.any():
            raise Refused("a model with linear attention reads one text at a time; set eval.drafting.tree=chain")
        held_BC = ids_BQ[:, :0] if self.empty else self.ids_BC
        grown_BC = torch.nn.functional.pad(held_BC, (0, max(0, extent - held_BC.shape[1])))
        self.ids_BC = grown_BC.scatter(1, slots_BQ, ids_BQ)
        return self.ids_BC[:, :extent]

    def move(self, source_BL: torch.Tensor, slots_BL: torch.Tensor) -> None:
        """Copy the ids of some slots to others."""
        self.ids_BC = self.ids_BC.scatter(1, slots_BL, self.ids_BC.gather(1, source_BL))

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all requests but these."""
        self.ids_BC = self.ids_BC[rows]

    @property
    def empty(self) -> bool:
        """Whether nothing was read yet."""
        return not self.ids_BC.numel()


class CachedModel:
    """A transformers causal language model with a ragged cache, or a text: new tokens in, logits and planes out."""

    def __init__(self, model: Any, aux_layers: Sequence[int] = ()) -> None:
        config = model.config.get_text_config()
        self.aux_layers, self.cache = tuple(aux_layers), Text() if keeps_states(config) else RaggedCache()
        self.decoder = decoder_of(model, config.num_hidden_layers)
        self.lm_head = model.get_output_embeddings()
        types = getattr(config, "layer_types", None) or ()
        self.mixed = WINDOWED in types
        self.window: int | None = getattr(config, "sliding_window", None) if self.mixed or not types else None
        self.adds = config._attn_implementation == "eager"  # gpt-oss has no other here, for its sinks

    def read(
        self, ids_BQ: torch.Tensor, places: Places, only_B: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, Q, V] (or [B, 1, V] at query index `only_B`) and planes [B, Q, A, H], FINAL being one of them."""
        with captured(self.decoder, [layer for layer in self.aux_layers if layer != FINAL]) as planes:
            planes[FINAL] = self._states(ids_BQ, places)
        rows_B1 = torch.arange(len(ids_BQ), device=ids_BQ.device)[:, None]
        if isinstance(self.cache, Text):
            planes = {layer: states_BCH[rows_B1, places.slots_BQ] for layer, states_BCH in planes.items()}
        out = planes[FINAL]
        aux = torch.stack([planes[layer] for layer in self.aux_layers], 2) if self.aux_layers else out[:, :, None, :0]
        if only_B is not None:
            out = out[rows_B1, only_B[:, None]]
        return self.lm_head(out), aux

    def _states(self, ids_BQ: torch.Tensor, places: Places) -> torch.Tensor:
        """The final plane: of the new tokens, or of the whole text where it is read again."""
        if isinstance(self.cache, Text):
            return self.decoder(input_ids=self.cache.place(ids_BQ, places), use_cache=False).last_hidden_state
        return self.decoder(
            input_ids=ids_BQ,
            position_ids=places.positions_BQ,
            attention_mask=self._mask(self.cache.place(places), places.positions_BQ),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state

    def _mask(self, seen_B1QC: torch.Tensor, positions_BQ: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """The keys that layers see: those of the window, or by type of layer where not all have one.

        transformers takes a mask of four dimensions as it is: it would lay no window over it, and adds it to the scores
        where attention is its own.
        """
        if self.window is None:
            return self._given(seen_B1QC)
        columns_C = torch.arange(seen_B1QC.shape[-1], device=seen_B1QC.device)
        near_B1QC = self._given(seen_B1QC & (columns_C > positions_BQ[:, None, :, None] - self.window))
        return {"full_attention": self._given(seen_B1QC), WINDOWED: near_B1QC} if self.mixed else near_B1QC

    def _given(self, seen_B1QC: torch.Tensor) -> torch.Tensor:
        """A mask as the model's attention takes it: bool, or what is added to the scores."""
        if not self.adds:
            return seen_B1QC
        dtype = self.lm_head.weight.dtype
        return torch.zeros_like(seen_B1QC, dtype=dtype).masked_fill(~seen_B1QC, torch.finfo(dtype).min)
