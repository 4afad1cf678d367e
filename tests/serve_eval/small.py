"""A random target of twelve tokens and what drafts for it, so small that every continuation can be enumerated.

With so few tokens even random drafts are often right, in every place of a tree.
"""

from __future__ import annotations

import copy
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.eagle3 import Eagle3Config, Eagle3Head
from serve_eval.prompts import Prompt

VOCABULARY = 12
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


@cache
def small_parts(kind: str = "eagle3") -> SimpleNamespace:
    """`model`, `head` (draft vocabulary of 8 of the 12 tokens) and `draft_model` (the target, blurred).

    Args:
        kind: of the head: "eagle3", or "no fc", which reads the final plane.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rope_parameters=ROPE,
            tie_word_embeddings=False,
            initializer_range=0.25,
        )
        model = LlamaForCausalLM(config).eval()
        draft_model = copy.deepcopy(model)
        shape = Eagle3Config(
            hidden_size=32,
            target_hidden_size=32,
            vocab_size=VOCABULARY,
            draft_vocab_size=8,
            aux_layers=(1, 2) if kind == "eagle3" else (),
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=1e-6,
            max_position_embeddings=512,
            rope_parameters=ROPE,
        )
        head = Eagle3Head(shape, torch.tensor([0, 1, 3, 4, 6, 7, 9, 11]))
        with torch.no_grad():
            for parameter in draft_model.parameters():
                parameter += 0.1 * parameter.std() * torch.randn_like(parameter) if parameter.dim() > 1 else 0
            for parameter in head.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn_like(parameter) * 1.5 * parameter.shape[1] ** -0.5)
    for part in (model, draft_model, head):
        part.requires_grad_(False)
    return SimpleNamespace(model=model, head=head.eval(), draft_model=draft_model)


def small_prompts(lengths: list[int]) -> list[Prompt]:
    """Random prompts of these lengths, in two routes."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(f"p{i}", ("chat", "code")[i % 2], tuple(each)) for i, each in enumerate(ids)]


def greedy_by_hand(model: Any, ids: tuple[int, ...], count: int) -> list[int]:
    """The target's own tokens, each from a forward over all of the text before it."""
    found = list(ids)
    for _ in range(count):
        found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(ids) :]
