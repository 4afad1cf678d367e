"""Multi-token-prediction heads: the target's final plane and token embeddings through one layer of its own kind.

Row t pairs the final plane of position t with the embedding of token t+1 at position t and predicts token t+2; each
further step feeds token t+1+k, what came out of the row's last step, and position t+k, as a module that is used again
and again is served. There is no vocabulary and no output head of its own: the target's `lm_head` of the output are
the logits. Which of its steps differ between families is in models/mtp_families.py; what they share is here.

The layer is transformers' own. Its attention is handed out through transformers' interface for attention functions:
the caller's function gets the rotated queries, keys and values of the rows, and nothing else of the layer is touched.

Legend: T positions of a pack, R rows, H hidden, A = 1 plane, V vocabulary, N heads, G key-value heads, E head size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from models.config import SHAPE, DraftConfig
from models.eagle3 import MLP_SHARE, SELF_SCORE
from models.errors import Refused
from models.mtp_families import FAMILIES, dense_block, family_of, native_block
from models.planes import FINAL
from models.target import Target
from models.unroll import KeyValue, RowAttention, Step, unroll

HANDED_OUT = "handed_out"
"""Name of our attention function among those of transformers."""


def _handed_out(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    *,
    attention: RowAttention,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers ([1, N, R, E] in, [1, R, N, Ev] out) that asks the layer's caller."""
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    scale = None if scaling == query.shape[-1] ** -0.5 else scaling
    # Norms of queries and keys leave autocast's dtype, values do not.
    return attention(q.to(v.dtype), k.to(v.dtype), v, scale)[None], None


AttentionInterface.register(HANDED_OUT, _handed_out)


@functools.cache
def _precise(router: type[nn.Module]) -> type[nn.Module]:
    """A router that computes in the precision of its weights: autocast would send near-ties to other experts."""

    def forward(self: nn.Module, hidden: torch.Tensor) -> Any:
        with torch.autocast(hidden.device.type, enabled=False):
            return router.forward(self, hidden.to(self.get_parameter("weight").dtype))

    return type(router.__name__, (router,), {"forward": forward})


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """Everything that determines a head's tensors and what it computes.

    Attributes:
        family: a key of `FAMILIES`.
        native: whether it is the target's own module.
        block: configuration of its decoder layer, as transformers reads it; dimensions are the target's.
    """

    family: str
    native: bool
    block: dict[str, Any]

    @classmethod
    def for_target(cls, target: Target, draft: DraftConfig, *, native: bool = False) -> MtpConfig:
        """A new head for a dense target, or with `native` the module that the target has already.

        Raises:
            Refused: such a head cannot stand over the target, or `draft` asks for another shape than the target's.
        """
        target.check_logits()
        for key in SHAPE:
            if getattr(draft, key):
                raise Refused(f"draft.{key}={getattr(draft, key)}: an MTP head has its target's shape; leave it unset")
        if not draft.use_aux_hidden_state:
            raise Refused(
                "draft.use_aux_hidden_state=false is for EAGLE-3 heads: an MTP head reads the final plane anyway"
            )
        if draft.vocab_size not in (None, target.vocab_size):
            raise Refused(
                f"draft.vocab_size={draft.vocab_size}: an MTP head has its target's vocabulary; leave it null"
            )
        family = family_of(target) if native else "mimo"
        dense = family == "mimo"
        return cls(family=family, native=native, block=dense_block(target) if dense else native_block(target))

    @property
    def hidden_size(self) -> int:
        """Width of head and target."""
        return self.block["hidden_size"]

    @property
    def target_hidden_size(self) -> int:
        """The same."""
        return self.hidden_size

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        return self.block["vocab_size"]

    @property
    def draft_vocab_size(self) -> int:
        """The same."""
        return self.vocab_size

    @property
    def num_attention_heads(self) -> int:
        """Heads of the layer's attention."""
        return self.block["num_attention_heads"]

    @property
    def num_key_value_heads(self) -> int:
        """As many, or fewer."""
        return self.block.get("num_key_value_heads") or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Size of a head; of latent attention, of its values."""
        own = self.block.get("v_head_dim") or self.block.get("head_dim")
        return own or self.hidden_size // self.num_attention_heads

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP, or of all experts, that a token passes through."""
        experts = self.block.get("num_experts_per_tok")
        return experts * self.block["moe_intermediate_size"] if experts else self.block["intermediate_size"]

    @property
    def rms_norm_eps(self) -> float:
        """Of all norms."""
        return self.block["rms_norm_eps"]

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Aux planes: none."""
        return ()

    @property
    def planes(self) -> tuple[int, ...]:
        """The target's planes that the head reads."""
        return (FINAL,)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MtpConfig:
        """The inverse of `to_dict`."""
        return cls(**values)


class MtpHead(nn.Module):
    """The trainable module. `ids_D` are the ids that it proposes, all of them; the output head is the target's."""

    ids_D: torch.Tensor
    reduced = False
    lm_head = None

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config, self.family = config, FAMILIES[config.family]
        classes = self.family.classes()
        block = classes.config.from_dict(config.block)
        block._attn_implementation, block._experts_implementation = HANDED_OUT, "eager"
        block.attention_dropout = 0.0
        hidden, eps = config.hidden_size, block.rms_norm_eps
        self.embedding_norm, self.hidden_norm = classes.norm(hidden, eps), classes.norm(hidden, eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = classes.layer(block, self.family.first(block.num_hidden_layers))
        for module in self.layer.modules():
            if type(module).__name__.endswith("Router"):
                module.__class__ = _precise(module.__class__)
        self.final_norm = classes.norm(hidden, eps)
        self.rotary = classes.rotary(block)
        self.register_buffer("ids_D", torch.arange(config.vocab_size), persistent=False)

    def stored(self) -> dict[str, torch.Tensor]:
        """Its tensors as views, under the names that the family's checkpoints have for them."""
        return self.family.stored(self.state_dict(), self.config.block["num_hidden_layers"])

    def compile_parts(self) -> None:
        """Fuse what is elementwise and reads memory more often than it computes, as in `Eagle3Head`."""
        for module in self.modules():
            if type(module).__name__.endswith(("RMSNorm", "MLP")):
                # All norms share one function, and each width, rank and dtype is a compilation of its own.
                module.compile(dynamic=True, recompile_limit=64)

    def fuse(self, planes_TAP: torch.Tensor) -> torch.Tensor:
        """See `Drafting`: the final plane as it is."""
        return planes_TAP[:, 0]

    def ordered(self, embedded: torch.Tensor, feature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both inputs in the order in which the family's projection reads them."""
        return (feature, embedded) if self.family.hidden_first else (embedded, feature)

    def _joined(self, embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Input of the layer [1, R, H] from embeddings and hidden states of rows [..., H]."""
        if self.family.zeroed:
            embedded = embedded.masked_fill(positions[..., None] == 0, 0)
        joined = self.input_proj(torch.cat(self.ordered(self.embedding_norm(embedded), self.hidden_norm(feature)), -1))
        return joined.flatten(0, -2)[None]

    def key_value(self, embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor) -> KeyValue:
        """See `Drafting`.

        transformers' attention cannot be asked for keys alone: queries, and an output projection of zeros, are
        computed too, forward only.
        """
        found: list[torch.Tensor] = []

        def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float | None) -> torch.Tensor:
            found.extend((key, value))
            return value.new_zeros(*query.shape[:-1], value.shape[-1])

        x_1RH = self._joined(embedded, feature, positions)
        self.layer.self_attn(
            self.layer.input_layernorm(x_1RH),
            position_embeddings=self.rotary(x_1RH, positions.flatten()[None]),
            attention_mask=None,
            attention=attention,
        )
        key, value = (each.unflatten(0, positions.shape) for each in found)
        return key, value

    def advance(
        self, embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor, attention: RowAttention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Drafting`."""
        shape = positions.shape

        def of_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
            q, k, v = (each.unflatten(0, shape) for each in (query, key, value))
            return attention(q, k, v, scale).flatten(0, len(shape) - 1)

        x_1RH = self._joined(embedded, feature, positions)
        output_1RH = self.layer(
            x_1RH,
            position_embeddings=self.rotary(x_1RH, positions.flatten()[None]),
            attention_mask=None,
            attention=of_rows,
        )
        output = output_1RH[0].unflatten(0, shape)
        normed = self.final_norm(output).to(output.dtype)
        return normed if self.family.normed_feedback else output, normed

    def unroll(
        self,
        tokens_T: torch.Tensor,
        planes_T1P: torch.Tensor,
        starts_T: torch.Tensor,
        rows: Sequence[torch.Tensor],
        embedding_VH: torch.Tensor,
    ) -> list[Step]:
        """See `models.unroll.unroll`; the one plane is the target's final plane."""
        return unroll(self, tokens_T, planes_T1P, starts_T, rows, embedding_VH)


def initialise(head: MtpHead, target: Target, sample_T1P: torch.Tensor) -> None:
    """Start values of a new head that a short training need not first find; the global random state decides the rest.

    - The last norm is the target's, so that the head starts in the space that the target predicts from.
    - hidden_norm whitens the final plane by its channels' RMS on a sample: none drowns in the few huge ones.
    - The projection is random. One that passed the final plane or the embedding on as it is would start by
      repeating token t+1, surely, and have to unlearn it first.
    - Both branches of the layer start nearly silent, and every query as its group's key: a row attends to itself.

    Args:
        sample_T1P: some final planes of the target, [T, 1, P] of any float dtype, to measure the channels on.
    """
    config, attention = head.layer.self_attn.config, head.layer.self_attn
    size, hidden = attention.head_dim, head.config.hidden_size
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            elif name.endswith("bias"):
                parameter.zero_()
        sample_TP = nn.functional.rms_norm(sample_T1P[:, 0].float(), (hidden,), eps=config.rms_norm_eps)
        head.hidden_norm.weight.copy_(sample_TP.pow(2).mean(0).clamp(min=1e-12).rsqrt())
        head.final_norm.weight.copy_(target.load_final_norm())
        # Inputs are normed, so a row's score with itself is about H * std^2 * sqrt(E); others are about 0.
        nn.init.normal_(attention.k_proj.weight, std=(SELF_SCORE / (hidden * size**0.5)) ** 0.5)
        key_GEH = attention.k_proj.weight.unflatten(0, (-1, size))
        attention.q_proj.weight.copy_(key_GEH.repeat_interleave(attention.num_key_value_groups, 0).flatten(0, 1))
        for last in (attention.o_proj, head.layer.mlp.down_proj):
            nn.init.normal_(last.weight, std=min(0.01, MLP_SHARE * last.in_features**-0.5))
