"""Where training starts: planes of one scale, rows that attend to themselves, the target's own output space."""

from __future__ import annotations

import pytest
import torch

from models.config import DraftConfig, TargetConfig
from models.eagle3 import Eagle3Config, Eagle3Head, initialise
from models.target import describe_target


@pytest.fixture(params=["plain", "fc_norm", "norm_before_fc"])
def started(request, tiny_target_dir):
    """An initialised head and planes in which a few channels are huge, as in real residual streams."""
    target = describe_target(TargetConfig(path=str(tiny_target_dir), dtype="float32"))
    draft = DraftConfig(vocab_size=100)
    if request.param != "plain":
        setattr(draft, request.param, True)
    config = Eagle3Config.for_target(target, (2, 4, 5), draft)
    torch.manual_seed(0)
    head = Eagle3Head(config, torch.arange(2, 302, 3))
    planes = torch.randn(400, 3, 64) * torch.tensor([1.0, 5.0, 20.0])[:, None]
    planes[:, :, 7] *= 30
    initialise(head, target, planes)
    return target, head, planes


def test_b09_a_final_plane_as_feature_is_whitened_for_the_attention_and_stays_itself_in_the_residual(tiny_target_dir):
    target = describe_target(TargetConfig(path=str(tiny_target_dir), dtype="float32"))
    config = Eagle3Config.for_target(target, (2, 4, 5), DraftConfig(use_aux_hidden_state=False))
    assert config.aux_layers == () and "fc.weight" not in Eagle3Head(config).state_dict()
    head, planes = Eagle3Head(config), torch.randn(400, 1, 64)
    planes[:, :, 7] *= 30
    initialise(head, target, planes)
    with torch.no_grad():
        assert torch.equal(head.fuse(planes), planes[:, 0])
        normed = head.midlayer.hidden_norm(head.fuse(planes))
    sizes = normed.pow(2).mean(0).sqrt()
    assert sizes.min() > 0.9 and sizes.max() < 1.1


def test_no_channel_drowns_in_a_huge_one(started):
    _, head, planes = started
    with torch.no_grad():
        whole = head.fuse(planes)
        flipped = planes.clone()
        flipped[:, :, 7] *= -1  # norms stay as they are; the difference is twice the channel's part
        share = ((whole - head.fuse(flipped)) / 2).pow(2).mean() / whole.pow(2).mean()
    assert 0.3 < whole.pow(2).mean().sqrt() < 3
    assert share < 0.25, "one channel of 64 carries most of the features"


def test_a_row_attends_to_itself(started):
    _, head, planes = started
    layer = head.midlayer
    with torch.no_grad():
        wide = layer.wide(torch.randn(400, 64), head.fuse(planes))
        rope = head.rope.table(torch.arange(400), torch.float32)
        query, (key, _) = layer.self_attn.query(wide, rope), layer.self_attn.key_value(wide, rope)
        scores = torch.einsum("re,te->rt", query[:, 0], key[:, 0]) / 4
        own = scores.masked_fill(torch.ones(400, 400).triu(1).bool(), float("-inf")).softmax(-1).diagonal()
    assert own.median() > 0.5


def test_the_output_space_is_the_targets(started):
    target, head, _ = started
    assert torch.equal(head.lm_head.weight, target.load_lm_head()[head.ids_D])
    assert torch.equal(head.norm.weight, target.load_final_norm())
