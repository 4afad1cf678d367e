"""The EAGLE-3 draft head (arXiv 2503.01840): fused target planes and token embeddings through one decoder layer.

Row t pairs the fused feature g_t = fc(aux planes of t) with the embedding of token t+1 at position t and
predicts token t+2. Each further step k feeds token t+1+k, the row's own previous output and position t+k.
The layer's attention reads [input_layernorm(embedding), hidden_norm(feature)], its residual is the feature.
The pre-norm sum is fed back (post-norm with `norm_output`, EAGLE-3.1), and `lm_head(norm(sum))` proposes.

Parameter names are those of the export, so that saving is not a translation. The target's embedding
belongs to the target: it is passed in, never stored.

Legend: T positions of a pack, R rows, H head hidden, P target hidden, A aux planes, N heads, G key-value
heads, E head size, D draft vocabulary, S own steps so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models.attention import attend, laid_out
from models.config import DraftConfig
from models.errors import Refused
from models.rope import Rope, reach, rotate, standardised
from models.target import Target

SELF_SCORE = 8.0
"""Attention score of a row with itself at the start: e**8 outweighs a thousand positions of its past."""

MLP_SHARE = 0.4
"""About twice the RMS, at most, of what the MLP adds to a feature of RMS 1 at the start, however wide it is."""


POSITIONS, ROWS = 4096, 16384
"""Positions of step 0, and rows of an unroll step, that are worked on at once."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Everything that determines a head's tensors and what it computes."""

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
            aux_layers=tuple(aux_layers),
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


@dataclass(frozen=True)
class Step:
    """One unroll step: the rows it supervises, and what the head makes of them.

    Attributes:
        rows_R: pack positions, int64, ascending.
        hidden_RH: post-norm outputs; `lm_head` of them are the draft logits.
    """

    rows_R: torch.Tensor
    hidden_RH: torch.Tensor


class Eagle3Head(nn.Module):
    """The trainable module. `ids_D` are the target ids of the draft vocabulary (all ids when it is full)."""

    ids_D: torch.Tensor

    def __init__(self, config: Eagle3Config, ids_D: torch.Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        width = len(config.aux_layers) * config.target_hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
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
        """Features g [T, H] of aux planes [T, A, P] (ascending layers)."""
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

    def unroll(
        self,
        tokens_T: torch.Tensor,
        aux_TAP: torch.Tensor,
        starts_T: torch.Tensor,
        rows: Sequence[torch.Tensor],
        embedding_VH: torch.Tensor,
    ) -> list[Step]:
        """Draft a step for each of `rows` that is not empty, with the true tokens fed in (training-time test).

        Step 0 computes keys and values for every position of the pack and all else only for its rows;
        rows of step k + 1 must be a subset of those of step k (design, definitions 2 to 5).

        Args:
            tokens_T: int64 token ids of the pack, documents end to end.
            aux_TAP: aux planes, cast to the parameters' or the autocast dtype.
            starts_T: for each position where its document begins; positions restart there.
            rows: per step int64 pack positions, ascending.
            embedding_VH: the target's frozen embedding.
        """
        rows = [rows_R for rows_R in rows if rows_R.numel()]
        if not rows:
            return []
        following_T = tokens_T.roll(-1)  # a document's last position sees a stranger; no row attends to it
        places_T = torch.arange(tokens_T.numel(), device=tokens_T.device) - starts_T
        feature_TH, *prefix = _in_chunks(POSITIONS, self._prefix, (embedding_VH,), (following_T, aux_TAP, places_T))
        shared = [laid_out(each) for each in prefix]
        rows_R, feature_RH = rows[0], feature_TH[rows[0]]
        own_k, own_v = (each.new_empty(rows_R.numel(), 0, *each.shape[1:]) for each in prefix)
        steps = []
        for step, now_R in enumerate(rows):
            if now_R.numel() != rows_R.numel():
                kept = torch.searchsorted(rows_R, now_R)
                rows_R, feature_RH, own_k, own_v = now_R, feature_RH[kept], own_k[kept], own_v[kept]
            each_row = (rows_R, starts_T[rows_R], tokens_T[rows_R + 1 + step], feature_RH, own_k, own_v)
            feature_RH, hidden_RH, own_k, own_v = _in_chunks(ROWS, self._step, (step, embedding_VH, *shared), each_row)
            steps.append(Step(rows_R, hidden_RH))
        return steps

    def _prefix(
        self, embedding_VH: torch.Tensor, following_T: torch.Tensor, aux_TAP: torch.Tensor, places_T: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Features [T, H], step-0 keys and values [T, G, E] of some positions, `places_T` within their documents."""
        feature_TH = self.fuse(aux_TAP)
        embedded_TH = nn.functional.embedding(following_T, embedding_VH).to(feature_TH.dtype)
        wide_T = self.midlayer.wide(embedded_TH, feature_TH)
        return feature_TH, *self.midlayer.self_attn.key_value(wide_T, self.rope.table(places_T, wide_T.dtype))

    def _step(
        self,
        step: int,
        embedding_VH: torch.Tensor,
        k_TGE: torch.Tensor,
        v_TGE: torch.Tensor,
        rows_R: torch.Tensor,
        starts_R: torch.Tensor,
        fed_R: torch.Tensor,
        feature_RH: torch.Tensor,
        own_k: torch.Tensor,
        own_v: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Some rows at a step: their next features, post-norm outputs [R, H], and own keys and values so far."""
        layer = self.midlayer
        wide_R = layer.wide(nn.functional.embedding(fed_R, embedding_VH).to(feature_RH.dtype), feature_RH)
        rope = self.rope.table(rows_R - starts_R + step, wide_R.dtype)
        if step > 0:  # at step 0 they are among those of all positions
            key, value = layer.self_attn.key_value(wide_R, rope)
            own_k, own_v = torch.cat((own_k, key[:, None]), 1), torch.cat((own_v, value[:, None]), 1)
        query = layer.self_attn.query(wide_R, rope)
        attended = attend(query, k_TGE, v_TGE, own_k, own_v, rows_R, starts_R)
        output_RH = layer.finish(feature_RH, attended)
        return self.feedback(output_RH), self.norm(output_RH), own_k, own_v


def _in_chunks(
    most: int,
    function: Callable[..., tuple[torch.Tensor, ...]],
    shared: tuple[Any, ...],
    each_row: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, ...]:
    """`function(*shared, *each_row)`, whose rows do not depend on one another, at most so many rows at a time.

    One chunk is stored for backward as usual. Of several, each is computed again when backward comes to it, so
    that a pack far longer than usual takes more time instead of memory that is not there.
    """
    chunks = list(zip(*(tensor.split(most) for tensor in each_row), strict=True))
    if len(chunks) == 1:
        return function(*shared, *each_row)
    done = [checkpoint(function, *shared, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return tuple(torch.cat(parts) for parts in zip(*done, strict=True))


def initialise(head: Eagle3Head, target: Target, sample_TAP: torch.Tensor) -> None:
    """Start values that a short training need not first find; the global random state decides the rest.

    - lm_head and norm are the target's, so the head starts in the space that the target predicts from.
    - Channels of residual streams differ by orders of magnitude. Planes are whitened by their channels' RMS on
      a sample, in fc_norm where the head has it and in fc's columns where it has not, so that all channels
      reach the features at one scale and none drowns in the few huge ones.
    - Every query starts as its group's key: a row begins by attending to itself, the one place where the
      embedding of the token it continues from can enter, rather than to the average of its past.

    Args:
        sample_TAP: some aux planes of the target, [T, A, P], to measure the channels on.
    """
    config, attention = head.config, head.midlayer.self_attn
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        sample = sample_TAP.float()
        if config.fc_norm or config.norm_before_fc:
            dims = (-1,) if config.fc_norm else (-2, -1)
            sample = sample * (sample.pow(2).mean(dims, keepdim=True) + config.rms_norm_eps).rsqrt()
        scale_AP = sample.pow(2).mean(0).clamp(min=1e-12).rsqrt()
        if config.fc_norm:
            for index, scale_P in enumerate(scale_AP):
                head.get_parameter(f"fc_norm.{index}.weight").copy_(scale_P)
        elif config.norm_before_fc:
            head.input_norm.weight.copy_(scale_AP.flatten())
        else:
            head.fc.weight.mul_(scale_AP.flatten().to(head.fc.weight.device))
        # Inputs are normed, so a row's score with itself is about 2H * std^2 * sqrt(E); others are about 0.
        variance = SELF_SCORE / (2 * config.hidden_size * config.head_dim**0.5)
        nn.init.normal_(attention.k_proj.weight, std=variance**0.5)
        key_GEW = attention.k_proj.weight.unflatten(0, (config.num_key_value_heads, config.head_dim))
        repeat = config.num_attention_heads // config.num_key_value_heads
        attention.q_proj.weight.copy_(key_GEW.repeat_interleave(repeat, 0).flatten(0, 1))
        nn.init.normal_(head.midlayer.mlp.down_proj.weight, std=min(0.01, MLP_SHARE * config.intermediate_size**-0.5))
        if config.hidden_size == target.hidden_size:
            head.lm_head.weight.copy_(target.load_lm_head()[head.ids_D.cpu()].float())
            head.norm.weight.copy_(target.load_final_norm().float())
