"""A byte-level tokenizer with the special tokens of several model families, so that ids can be read by eye.

The tiny target, as the extraction is given it, and features of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import conf
import featurize.__main__ as stage
from featurize.store import FeatureStore
from models.config import TargetConfig
from models.target import Target, describe_target

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<turn>", "<end_turn>"]
SPECIAL += ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<bos>", "<eos>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<|User|>", "<|Assistant|>"]
SPECIAL += ["<think>", "</think>", "<tool_call>", "</tool_call>"]


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """A function (template, eos="</s>", bos=None, add_bos=False) -> tokenizer, one token per byte of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def make(template: str | None, *, eos: str = "</s>", bos: str | None = None, add_bos: bool = False) -> Any:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
        backend = Tokenizer(models.BPE(vocabulary, []))
        backend.add_special_tokens(SPECIAL)
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        if add_bos:
            backend.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, vocabulary[str(bos)])])
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=eos, bos_token=bos, pad_token="</s>", chat_template=template
        )

    return make


@pytest.fixture(scope="session")
def settings(tiny_target_dir: Path) -> TargetConfig:
    return TargetConfig(path=str(tiny_target_dir), dtype="float32")


@pytest.fixture(scope="session")
def target(settings: TargetConfig) -> Target:
    return describe_target(settings)


@pytest.fixture
def extracted(tmp_path: Path, tiny_target_dir: Path, tiny_conversations: Path) -> Callable[..., FeatureStore]:
    """Extract under a run name, with overrides, and open what there is."""

    def make(name: str, *overrides: str) -> FeatureStore:
        common = [
            f"root={tmp_path}",
            f"name={name}",
            f"target.path={tiny_target_dir}",
            "target.dtype=float32",
            f"data.conversations=[{tiny_conversations}]",
            "data.limit=9",
            "featurize.shard_tokens=150",
            "featurize.device=cpu",
        ]
        stage.work(conf.load([*common, *overrides]))
        return FeatureStore.open(tmp_path / name / "features")

    return make
