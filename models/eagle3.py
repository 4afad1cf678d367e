"""The EAGLE-3 draft head (arXiv 2503.01840): fused target planes and token embeddings through one decoder layer.

Row t pairs the fused feature g_t = fc(aux planes of t) with the embedding of token t+1 at position t and
predicts token t+2. Each further step k feeds token t+1+k, the row's own previous output and position t+k.
The layer's attention reads [input_layernorm(embedding), hidden_norm(feature)], its residual is the feature.
The pre-norm sum is fed back (post-norm with `norm_output`, EAGLE-3.1), and `lm_head(norm(sum))` proposes.
Without aux planes (`draft.use_aux_hidden_state=false`) there is no fc: the feature is the target's final plane itself.

Parameter names are those of the export, so that saving is not a translation. The target's embedding
belongs to the target: it is passed in, never stored.

Legend: T positions of a pack, R rows, H head hidden, P target hidden, A planes, N heads, G key-value
heads, E head size, D draft vocabulary, S own steps so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from models.config import DraftConfig
from models.errors import Refused
from models.planes import FINAL
from models.rope import Rope, reach, rotate, standardised
from models.target import Target
from models.unroll import KeyValue, RowAttention, Step, unroll

SELF_SCORE = 8.0
"""Attention score of a row with itself at the start: e**8 outweighs a thousand positions of its past."""

MLP_SHARE = 0.4
"""About twice the RMS, at most, of what the MLP adds to a feature of RMS 1 at the start, however wide it is."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Everything that determines a head's tensors and what it computes; no aux layers means no fc."""

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False

    @classmethod
    def for_target(cls, target: Target, aux_layers: Sequence[int], draft: DraftConfig) -> Eagle3Config:
        """The head's shape for a target: its own dimensions unless `draft` says otherwise.

        Raises:
            Refused: heads that do not divide, an unknown rope type, a vocabulary larger than the target's, or a
                target whose logits are not `lm_head(final plane)`.
        """
        config = target.config
        if getattr(config, "rms_norm_eps", None) is None:
            raise Refused(f"{target.path}: its config has no rms_norm_eps; such targets are not supported")
        target.check_logits()
        heads = draft.num_attention_heads or config.num_attention_heads
        key_value_heads = draft.num_key_value_heads or getattr(config, "num_key_value_heads", None) or heads
        if heads % key_value_heads:
            raise Refused(f"draft: {heads} attention heads do not divide into {key_value_heads} key-value heads")
        head_dim = draft.head_dim or getattr(config, "head_dim", None) or config.hidden_size // heads
        if head_dim % 2:
            raise Refused(f"draft: a head of {head_dim} cannot be rotated; set draft.head_dim to an even number")
        own = draft.rope_parameters
        rope = standardised(own, strict=True) if own else standardised(config.rope_parameters)
        if own and reach(rope) < target.context_length:
            raise Refused(
                f"draft.rope_parameters reach {reach(rope):g} positions (original_max_position_embeddings * factor), "
                f"the target {target.context_length}: engines would read past the head's table; raise the factor"
            )
        vocab = draft.vocab_size or target.vocab_size
        if not 0 < vocab <= target.vocab_size:
            raise Refused(f"draft.vocab_size={vocab} must be between 1 and the target's {target.vocab_size}")
        return cls(
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=vocab,
            aux_layers=tuple(aux_layers) if draft.use_aux_hidden_state else (),
            intermediate_size=draft.intermediate_size or target.mlp_width,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=target.positions_for(rope),
            rope_parameters=rope,
            norm_output=draft.norm_output,
            norm_before_fc=draft.norm_before_fc,
            fc_norm=draft.fc_norm,
        )

    native = False
    """Whether it is the target's own module: no target brings one."""

    @property
    def use_aux_hidden_state(self) -> bool:
        """Whether fc fuses aux planes; without, the final plane is the feature."""
        return bool(self.aux_layers)

    @property
    def planes(self) -> tuple[int, ...]:
        """The target's planes that the head reads."""
        return self.aux_layers or (FINAL,)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; `from_dict` reads it back."""
        return asdict(self) | {"aux_layers": list(self.aux_layers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Eagle3Config:
        """The inverse of `to_dict`."""
        return cls(**values | {"aux_layers": tuple(values["aux_layers"])})


class RMSNorm(nn.RMSNorm):
    """RMSNorm (arXiv 1910.07467) in its weight's precision, whatever the input's: under autocast, in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H], in the input's dtype."""
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Attention(nn.Module):
    """Projections of the head's one attention: input is [embedding, feature], hence twice as wide."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        wide, size = 2 * config.hidden_size, config.head_dim
        self.head_dim = size
        self.q_proj = nn.Linear(wide, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(wide, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(wide, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, config.hidden_size, bias=False)

    def query(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotated queries [R, N, E] of the wide input [R, 2H]."""
        return rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), *rope)

    def key_value(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values [R, G, E] of the wide input [R, 2H]."""
        key, value = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        return rotate(key, *rope), value


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, H]."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The head's decoder layer, cut at the attention so that training and serving share its two halves."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(config)

    def wide(self, embedding: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        """Input of the attention [R, 2H] from token embeddings and features [R, H]."""
        return torch.cat((self.input_layernorm(embedding), self.hidden_norm(feature)), -1)

    def finish(self, feature: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Pre-norm output [R, H] from the residual feature [R, H] and the attention's output [R, N, E]."""
        residual = feature + self.self_attn.o_proj(attended.flatten(-2))
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle3Head(nn.Module):
    """The trainable module. `ids_D` are the target ids of the draft vocabulary (all ids when it is full)."""

    ids_D: torch.Tensor

    def __init__(self, config: Eagle3Config, ids_D: torch.Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        width = len(config.planes) * config.target_hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=False) if config.aux_layers else nn.Identity()
        if config.norm_before_fc:
            self.input_norm = RMSNorm(width, config.rms_norm_eps)
        if config.fc_norm:
            norms = [RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.aux_layers]
            self.fc_norm = nn.ModuleList(norms)
        self.midlayer = Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rope = Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)
        ids = torch.arange(config.vocab_size) if ids_D is None else ids_D
        if ids.numel() != config.draft_vocab_size:
            raise Refused(f"a head of {config.draft_vocab_size} draft tokens needs as many ids, got {ids.numel()}")
        self.register_buffer("ids_D", ids, persistent=False)

    @property
    def reduced(self) -> bool:
        """Whether the draft vocabulary is smaller than the target's."""
        return self.config.draft_vocab_size < self.config.vocab_size

    def fuse(self, aux_TAP: torch.Tensor) -> torch.Tensor:
        """Features g [T, H] of the planes that the head reads, [T, A, P] (ascending layers)."""
        return self.fc(self.planes(aux_TAP))

    def planes(self, aux_TAP: torch.Tensor) -> torch.Tensor:
        """What fc reads [T, A * P]: the planes side by side, normed where the head norms them, all before each."""
        if self.config.norm_before_fc:
            aux_TAP = self.input_norm(aux_TAP.flatten(-2)).view_as(aux_TAP)
        if self.config.fc_norm:
            aux_TAP = torch.stack([norm(aux_TAP[:, index]) for index, norm in enumerate(self.fc_norm)], 1)
        return aux_TAP.flatten(-2)

    def compile_parts(self) -> None:
        """Fuse what is elementwise and reads memory more often than it computes: the norms and the gated MLP.

        The rest is large products and an attention of its own. Row counts change with every pack, so shapes are
        symbolic. Parameter names stay as they are.
        """
        for module in self.modules():
            if isinstance(module, RMSNorm | MLP):
                module.compile(dynamic=True)

    def feedback(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """What the next step takes as its feature, from this step's pre-norm output."""
        return self.norm(hidden_RH) if self.config.norm_output else hidden_RH

    def rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [..., 1, E] of positions [...]."""
        cos, sin = self.rope.table(positions.flatten(), dtype)
        return cos.unflatten(0, positions.shape), sin.unflatten(0, positions.shape)

    def key_value(self, embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor) -> KeyValue:
        """See `Drafting`."""
        wide = self.midlayer.wide(embedded, feature)
        return self.midlayer.self_attn.key_value(wide, self.rotation(positions, wide.dtype))

    def advance(
        self, embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor, attention: RowAttention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Drafting`."""
        layer = self.midlayer
        wide = layer.wide(embedded, feature)
        rope = self.rotation(positions, wide.dtype)
        key, value = layer.self_attn.key_value(wide, rope)
        output = layer.finish(feature, attention(layer.self_attn.query(wide, rope), key, value))
        return self.feedback(output), self.norm(output)

    def unroll(
        self,
        tokens_T: torch.Tensor,
        aux_TAP: torch.Tensor,
        starts_T: torch.Tensor,
        rows: Sequence[torch.Tensor],
        embedding_VH: torch.Tensor,
    ) -> list[Step]:
        """See `models.unroll.unroll`; the planes are those that the head reads."""
        return unroll(self, tokens_T, aux_TAP, starts_T, rows, embedding_VH)


def initialise(head: Eagle3Head, target: Target, sample_TAP: torch.Tensor) -> None:
    """Start values that a short training need not first find; the global random state decides the rest.

    - lm_head and norm are the target's, so the head starts in the space that the target predicts from.
    - Channels of residual streams differ by orders of magnitude. Planes are whitened by their channels' RMS on
      a sample, in fc_norm where the head has it and in fc's columns where it has not, so that all channels
      reach the features at one scale and none drowns in the few huge ones. Where the final plane is the feature,
      hidden_norm does it for the attention.
    - Every query starts as its group's key: a row begins by attending to itself, the one place where the
      embedding of the token it continues from can enter, rather than to the average of its past.

    Args:
        sample_TAP: some of the target's planes that the head reads, [T, A, P] of any float dtype, to measure the
            channels on.
    """
    config, attention = head.config, head.midlayer.self_attn
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        sample = sample_TAP.float()
        if config.fc_norm or config.norm_before_fc or not config.aux_layers:
            dims = (-1,) if config.fc_norm else (-2, -1)
            sample = sample * (sample.pow(2).mean(dims, keepdim=True) + config.rms_norm_eps).rsqrt()
        scale_AP = sample.pow(2).mean(0).clamp(min=1e-12).rsqrt()
        if not config.aux_layers:
            head.midlayer.hidden_norm.weight.copy_(scale_AP[0])
        elif config.fc_norm:
            for index, scale_P in enumerate(scale_AP):
                head.get_parameter(f"fc_norm.{index}.weight").copy_(scale_P)
        elif config.norm_before_fc:
            head.input_norm.weight.copy_(scale_AP.flatten())
        else:
            head.get_parameter("fc.weight").mul_(scale_AP.flatten().to(head.norm.weight.device))
        # Inputs are normed, so a row's score with itself is about 2H * std^2 * sqrt(E); others are about 0.
        variance = SELF_SCORE / (2 * config.hidden_size * config.head_dim**0.5)
        nn.init.normal_(attention.k_proj.weight, std=variance**0.5)
        key_GEW = attention.k_proj.weight.unflatten(0, (config.num_key_value_heads, config.head_dim))
        repeat = config.num_attention_heads // config.num_key_value_heads
        attention.q_proj.weight.copy_(key_GEW.repeat_interleave(repeat, 0).flatten(0, 1))
        nn.init.normal_(head.midlayer.mlp.down_proj.weight, std=min(0.01, MLP_SHARE * config.intermediate_size**-0.5))
        if config.hidden_size == target.hidden_size:
            head.lm_head.weight.copy_(target.load_lm_head()[head.ids_D.cpu()].float())
            head.norm.weight.copy_(target.load_final_norm())
