"""What several rooms' tests need: a tiny random target that behaves like a real checkpoint, and conversations.

The target is as untidy as real ones where that has hidden faults before: heads wider than hidden / heads, a
rope base of its own, a final norm that is not all ones, an end-of-turn token that differs from the padding.
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# A shell starts background jobs with SIGINT ignored, and so would be all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORDS = (
    "the small draft head proposes several tokens and the frozen target accepts or rejects them in one forward "
    "pass while a loaded server answers many users who ask about code mathematics summaries and json objects"
).split()


def sentence(rng: random.Random, words: int) -> str:
    """A line of the test language."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def save_tiny_target(directory: Path, **changes: Any) -> Path:
    """Write a random Llama (hidden 64, 8 layers) with its tokenizer to `directory`; `changes` go into its config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    backend.train_from_iterator(
        (sentence(rng, 12) for _ in range(200)),
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**(settings | changes)))
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5, generator=generator)
    model.to(torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def make_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes another tiny target; its keyword arguments change the config."""
    return lambda **changes: save_tiny_target(tmp_path_factory.mktemp("targets") / "target", **changes)


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint directory of the tiny target (fp32 safetensors, tokenizer, ChatML template). Read only."""
    return save_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def tiny_conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 conversations in two routes, some of two turns."""
    rng = random.Random(1)
    rows = []
    for index in range(48):
        messages = []
        for _ in range(1 + index % 2):
            messages.append({"role": "user", "content": sentence(rng, rng.randint(3, 12))})
            messages.append({"role": "assistant", "content": sentence(rng, rng.randint(4, 20))})
        rows.append({"id": f"c{index:03d}", "route": ("chat", "json")[index % 2], "messages": messages})
    return write_lines(tmp_path_factory.mktemp("data") / "conversations.jsonl", rows)


@pytest.fixture(scope="session")
def tiny_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six evaluation prompts in two routes, none of them in `tiny_conversations`."""
    rng = random.Random(2)
    rows = [
        {
            "id": f"p{index}",
            "route": ("chat", "json")[index % 2],
            "messages": [{"role": "user", "content": sentence(rng, 5 + index)}],
        }
        for index in range(6)
    ]
    return write_lines(tmp_path_factory.mktemp("data") / "prompts.jsonl", rows)
