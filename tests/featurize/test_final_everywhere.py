"""Features that keep the final plane at every position: the same planes, and one more for heads that read it."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from conf import load
from featurize.verify import verify
from models.errors import Refused
from models.target import describe_target


@pytest.mark.parametrize("encoding", ["bf16", "int8"])
def test_a_head_that_reads_the_final_plane_gets_it_everywhere_and_others_get_what_they_always_got(
    extracted, tiny_target_dir, encoding
):
    usual = extracted("usual", f"featurize.encoding={encoding}")
    more = extracted("more", f"featurize.encoding={encoding}", "featurize.final_everywhere=true")
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32)
    over = more.over_final()
    for index, document in enumerate(more.documents):
        a, b, c = usual.read(index), more.read(index), over.read(index)
        assert torch.equal(a.aux, b.aux) and torch.equal(a.final_positions, b.final_positions)
        assert torch.equal(c.final_positions, b.final_positions) and torch.equal(c.final, b.final)
        assert c.aux.shape == (document.length, 1, 64)
        assert torch.equal(c.aux[:, 0][c.final_positions], c.final)
        if encoding == "bf16":  # scales of integers depend on what shares the shard
            assert torch.equal(a.final, b.final)
        with torch.inference_mode():
            wanted = model.model(input_ids=c.tokens.long()[None]).last_hidden_state[0]
        torch.testing.assert_close(c.aux[:, 0].float(), wanted, rtol=0.02, atol=0.1)


def test_the_option_is_in_contract_and_inputs_and_costs_a_plane_where_prompts_are(extracted, tmp_path, tiny_target_dir):
    usual, more = extracted("usual"), extracted("more", "featurize.final_everywhere=true")
    assert more.contract.final_everywhere and not usual.contract.final_everywhere
    assert "final_everywhere" not in usual.manifest["contract"], (
        "features that were extracted before stay what they are"
    )
    assert more.manifest["inputs"]["featurize.final_everywhere"] is True
    totals = more.manifest["totals"]
    rows = totals["tokens"] - totals["teacher_positions"]
    tensors = [
        sum(path.stat().st_size for path in (s.directory / "shards").glob("*.safetensors")) for s in (more, usual)
    ]
    assert tensors[0] - tensors[1] == pytest.approx(rows * 64 * 2, rel=0.05)
    target = describe_target(load(["name=x", f"target.path={tiny_target_dir}", "target.dtype=float32"]).target)
    assert "everything is as its manifest says" in verify(more.directory, target, (2, 4, 5))
    with pytest.raises(Refused, match=r"made with other inputs: featurize\.final_everywhere \(was True, is None\)"):
        extracted("more")


def test_a_store_without_it_is_refused_to_such_a_head_in_a_line_that_names_the_option(extracted, tiny_target_dir):
    usual = extracted("usual")
    target = describe_target(load(["name=x", f"target.path={tiny_target_dir}", "target.dtype=float32"]).target)
    usual.require(target, (2, 4, 5))
    with pytest.raises(Refused, match=r"extract again with featurize\.final_everywhere=true") as told:
        usual.require(target, (2, 4, 5), final=True)
    assert "\n" not in str(told.value)


def test_b12_a_shard_that_was_begun_without_it_is_not_taken_for_finished(extracted, tmp_path):
    usual = extracted("usual")
    record = json.loads((usual.directory / "shards/00000.json").read_text())
    more = extracted("more", "featurize.final_everywhere=true")
    assert record["key"] != json.loads((more.directory / "shards/00000.json").read_text())["key"]
