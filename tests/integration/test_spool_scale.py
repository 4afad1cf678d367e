"""Streaming at the size it is for: 640 MB of features pass through a folder of 64 MB (make test-scale)."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import conf
import featurize.__main__ as featurize_stage
from tests.conftest import sentence, write_lines
from tests.train.runs import final_head, finish, losses, overrides, start, train_here

BOUND, DOCUMENTS, HIDDEN = 64_000_000, 1_900, 256

pytestmark = pytest.mark.scale


def test_training_from_a_spool_of_64_mb_over_ten_times_as_much_is_as_from_the_whole_store(
    make_target: Callable[..., Path], tmp_path: Path
) -> None:
    rng = random.Random(9)
    rows = []
    for index in range(DOCUMENTS):
        user, answer = sentence(rng, rng.randint(20, 60)), sentence(rng, rng.randint(60, 200))
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        rows.append({"id": f"c{index:04d}", "messages": messages})
    target = make_target(hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    conversations = write_lines(tmp_path / "conversations.jsonl", rows)
    arguments = [
        *overrides(target, conversations, tmp_path / "whole"),
        "data.validation_share=0.02",
        "featurize.shard_tokens=10000",
        "featurize.batch_tokens=8192",
        "featurize.device=cpu",
        "trainer.epochs=1",
        "trainer.shuffle_shards=1",
        "trainer.pack_tokens=4096",
        "trainer.packs_per_step=1",
        "trainer.validate_every=1000",
        "trainer.checkpoint_every=1000",
    ]
    whole = conf.load(arguments)
    featurize_stage.work(whole)
    shards = json.loads((whole.directory / "features/manifest.json").read_text())["files"]
    assert sum(entry["size"] for entry in shards) > 10 * BOUND
    assert train_here(arguments) is True
    shutil.rmtree(whole.directory / "features")

    streamed = [*arguments, f"root={tmp_path / 'streamed'}", f"spool.gigabytes={BOUND / 1e9}"]
    finish(start(["featurize", *streamed]) + start(["train", *streamed]), seconds=1800)
    there, here = (root / "run/train" for root in (tmp_path / "whole", tmp_path / "streamed"))
    assert len(losses(here)) > 50 and losses(here) == losses(there)
    for name, value in final_head(there).items():
        assert torch.equal(final_head(here)[name], value), name
