"""An EAGLE-3 head rebuilt from its directory alone, as an engine would: the oracle of the exporter.

Written from the contract of the engines, in float64, with formulas of its own; it shares no code with the
exporter or the trainer. What the engines read differently is spelled out in `Served.planes` and `inverse_frequencies`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file

ENGINES = ("vllm-v1", "vllm-v2", "sglang")


def inverse_frequencies(config: dict, engine: str) -> tuple[torch.Tensor, float]:
    """Frequencies [E / 2] and the factor on cosine and sine."""
    size, base = config["head_dim"], config["rope_theta"]
    plain = torch.tensor([base ** (-i / size) for i in range(0, size, 2)], dtype=torch.float64)
    scaling = config["rope_scaling"]
    if scaling is None:
        return plain, 1.0
    kind, factor = scaling["rope_type"], scaling["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        original = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        out = []
        for each in plain.tolist():
            turns = original * each / (2 * math.pi)
            if turns < low:
                out.append(each / factor)
            elif turns > high:
                out.append(each)
            else:
                smooth = (turns - low) / (high - low)
                out.append((1 - smooth) * each / factor + smooth * each)
        return torch.tensor(out, dtype=torch.float64), 1.0
    assert kind == "yarn", kind
    original = scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.get("beta_fast", 32)), dimension(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = ((torch.arange(size // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    usual = 0.1 * math.log(factor) + 1
    if engine == "sglang":
        attention = usual * scaling.get("attn_factor", 1.0)
    else:
        attention = scaling.get("attention_factor", usual)
    assert "mscale" not in scaling, "older servers do not read it"
    return plain / factor * ramp + plain * (1 - ramp), attention


def flattened(config: dict) -> dict:
    """What vLLM makes of a config in the speculators dialect: the layer's keys, and only these of the outer ones."""
    outer = ("draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm", "norm_output")
    layer = dict(config["transformer_layer_config"])
    assert layer.pop("model_type") == "llama" and config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
    rope = dict(layer.pop("rope_parameters"))
    layer |= {key: config[key] for key in (*outer, "eagle_aux_hidden_state_layer_ids")}
    layer["norm_before_residual"] = config.get("norm_before_residual", True)
    layer["rope_theta"] = rope.pop("rope_theta")
    layer["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return layer | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}


def turned(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, factor: float) -> torch.Tensor:
    """Heads [R, N, E] of rows, rotated."""
    angles = (positions.double()[:, None] * frequencies)[:, None]
    cos, sin = angles.cos() * factor, angles.sin() * factor
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attended(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention [R, N, E] of the newest rows over all keys up to their own, a row and a head at a time."""
    (rows, heads, size), out = q.shape, torch.zeros_like(q)
    for row in range(rows):
        seen = len(keys) - rows + row + 1
        for head in range(heads):
            group = head * keys.shape[1] // heads
            scores = keys[:seen, group] @ q[row, head] / math.sqrt(size)
            out[row, head] = scores.softmax(0) @ values[:seen, group]
    return out


class Served:
    """A head in one engine's reading, with a key-value cache of one request."""

    def __init__(self, directory: Path, engine: str, embedding: torch.Tensor) -> None:
        config = json.loads((directory / "config.json").read_text())
        if "speculators_model_type" in config and engine != "sglang":
            config = flattened(config)
        self.config, self.engine = config, engine
        self.weights = {
            name.replace("layers.0.", "midlayer."): tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in load_file(directory / "model.safetensors").items()
        }
        self.used: set[str] = {"t2d"}  # both engines skip it
        self.embedding = embedding.double()
        assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
        assert config["hidden_act"] == "silu" and config["num_hidden_layers"] == 1
        assert not config["norm_before_residual"] and not config["attention_bias"] and not config["mlp_bias"]
        assert "bias" not in config
        if engine == "sglang":
            assert config["tie_word_embeddings"] is False and config["torch_dtype"]
        self.nested = config.get("eagle_config", {})
        self.fused = self.nested.get("use_aux_hidden_state", True)
        if self.fused:
            self.count = config.get("num_aux_hidden_states") or len(self.nested["eagle_aux_hidden_state_layer_ids"])
        self.frequencies, self.attention_factor = inverse_frequencies(config, engine)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def planes(self, layers: int) -> list[int]:
        """Which residual streams (after i layers of the target) the engine captures, as it concatenates them.

        -1 is the state after the final norm, which comes by itself.
        """
        if not self.fused:
            return [-1]
        nested = self.nested.get("eagle_aux_hidden_state_layer_ids")
        default = [2, layers // 2, layers - 3]
        if self.engine == "sglang":
            return [layer + 1 for layer in nested] if nested else default
        top = self.config.get("eagle_aux_hidden_state_layer_ids")
        second = self.nested.get("layer_ids") if self.engine == "vllm-v2" else nested
        return sorted(set(top or second or default))

    def take(self, name: str) -> torch.Tensor:
        self.used.add(name)
        return self.weights[name]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * self.take(name)

    def project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.take(name)
        assert weight.shape[1] == x.shape[1], f"{name} {tuple(weight.shape)} does not take {x.shape[1]}"
        return x @ weight.T

    def fuse(self, wide: torch.Tensor) -> torch.Tensor:
        """Concatenated planes [T, A * P] -> features [T, H]."""
        if not self.fused:
            return wide
        assert wide.shape[1] == self.count * self.config["target_hidden_size"]
        if self.engine == "sglang" and wide.shape[1] == self.embedding.shape[1]:
            return wide
        if self.config["norm_before_fc"]:
            wide = self.norm(wide, "input_norm.weight")
        if self.config["fc_norm"]:
            chunks = wide.chunk(self.count, -1)
            wide = torch.cat([self.norm(chunk, f"fc_norm.{i}.weight") for i, chunk in enumerate(chunks)], -1)
        return self.project(wide, "fc.weight")

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return turned(x, positions, self.frequencies, self.attention_factor)

    def forward(
        self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows at consecutive positions after those in the cache -> full-width logits and what is fed back."""
        c, rows = self.config, len(ids)
        embedded = self.norm(self.embedding[ids], "midlayer.input_layernorm.weight")
        x = torch.cat((embedded, self.norm(hidden, "midlayer.hidden_norm.weight")), -1)
        heads, groups, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        q, k, v = (
            self.project(x, f"midlayer.self_attn.{name}_proj.weight").view(rows, count, size)
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        self.keys += list(self.turn(k, positions))
        self.values += list(v)
        q, keys, values = self.turn(q, positions), torch.stack(self.keys), torch.stack(self.values)
        residual = hidden + self.project(attended(q, keys, values).flatten(1), "midlayer.self_attn.o_proj.weight")
        y = self.norm(residual, "midlayer.post_attention_layernorm.weight")
        gate, up = (self.project(y, f"midlayer.mlp.{name}_proj.weight") for name in ("gate", "up"))
        hidden = residual + self.project(gate * gate.sigmoid() * up, "midlayer.mlp.down_proj.weight")
        normed = self.norm(hidden, "norm.weight")
        draft = self.project(normed, "lm_head.weight")
        assert draft.shape[1] == c["draft_vocab_size"]
        full = torch.full((rows, c["vocab_size"]), -math.inf, dtype=torch.float64)
        ids = torch.arange(draft.shape[1])
        if "d2t" in self.weights:
            assert c["draft_vocab_size"] != c["vocab_size"], "vLLM has no such parameter then"
            ids = ids + self.take("d2t")
        full[:, ids] = draft
        return full, normed if c["norm_output"] else hidden

    def forget(self, rows: int) -> None:
        """Drop the newest rows of the cache."""
        del self.keys[-rows:], self.values[-rows:]
