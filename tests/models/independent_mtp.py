"""An MTP head rebuilt from its directory and its target's, as an engine would: the oracle of the exporter.

Written from the contract of the engines, in float64. vLLM builds the module from the target's configuration, SGLang
from the head's own.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.models.independent import attended, inverse_frequencies, turned

PREFIX = "model.mtp_layers.0."


class ServedMtp:
    """A head in one engine's reading, with a key-value cache of one request."""

    def __init__(self, directory: Path, target: Path, engine: str, embedding: torch.Tensor, lm_head: torch.Tensor):
        own = json.loads((directory / "config.json").read_text())
        assert own["architectures"] == ["MiMoForCausalLM"] and own["model_type"] == "qwen2"
        assert own["num_nextn_predict_layers"] == 1 and own["tie_word_embeddings"] is False and own["torch_dtype"]
        whole = json.loads((target / "config.json").read_text())
        assert own["vocab_size"] == whole["vocab_size"] and own["num_hidden_layers"] == whole["num_hidden_layers"]
        assert own["max_position_embeddings"] >= whole["max_position_embeddings"]
        if engine == "sglang":
            self.config, size = own, own["head_dim"]
        else:
            rope = dict(whole["rope_parameters"])
            scaled = None if rope["rope_type"] == "default" else rope
            self.config = whole | {"rope_theta": rope["rope_theta"], "rope_scaling": scaled}
            size = whole["hidden_size"] // whole["num_attention_heads"]
        self.config = self.config | {"head_dim": size}
        self.frequencies, self.factor = inverse_frequencies(self.config, engine)
        tensors = load_file(directory / "model.safetensors")
        assert all(name.startswith(PREFIX) for name in tensors)
        self.weights = {name.removeprefix(PREFIX): tensor.double() for name, tensor in tensors.items()}
        self.embedding, self.lm_head = embedding.double(), lm_head.double()
        self.used: set[str] = set()
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def take(self, name: str) -> torch.Tensor:
        self.used.add(name)
        return self.weights[name]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * self.take(f"{name}.weight")

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return turned(x, positions, self.frequencies, self.factor)

    def forward(
        self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows at consecutive positions after those in the cache -> logits and what is fed back."""
        c, rows = self.config, len(ids)
        embedded = torch.where(positions[:, None] == 0, 0, self.embedding[ids])
        both = torch.cat((self.norm(hidden, "hidden_layernorm"), self.norm(embedded, "token_layernorm")), -1)
        residual = both @ self.take("input_proj.weight").T
        x = self.norm(residual, "input_layernorm")
        heads, groups, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        q, k, v = (
            (x @ self.take(f"self_attn.{name}_proj.weight").T + self.take(f"self_attn.{name}_proj.bias")).view(
                rows, count, size
            )
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        self.keys += list(self.turn(k, positions))
        self.values += list(v)
        q, keys, values = self.turn(q, positions), torch.stack(self.keys), torch.stack(self.values)
        residual = residual + attended(q, keys, values).flatten(1) @ self.take("self_attn.o_proj.weight").T
        y = self.norm(residual, "post_attention_layernorm")
        gate, up = (y @ self.take(f"mlp.{name}_proj.weight").T for name in ("gate", "up"))
        output = residual + (gate * gate.sigmoid() * up) @ self.take("mlp.down_proj.weight").T
        fed = self.norm(output, "final_layernorm")
        return fed @ self.lm_head.T, fed

    def forget(self, rows: int) -> None:
        """Drop the newest rows of the cache."""
        del self.keys[-rows:], self.values[-rows:]
