"""An MTP head with a ragged cache drafts what its unroll drafts, whatever its keys, values and norms are like.

And the targets that bring such modules are decoded losslessly, those with linear attention, too.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.config import DraftConfig
from models.errors import Refused
from models.mtp import MtpConfig
from models.native import load_native
from models.planes import FINAL
from serve_eval.cache import CachedModel, Places
from serve_eval.config import DraftingConfig, EvalConfig
from serve_eval.decoder import decode, measure_costs
from serve_eval.drafters import HeadStepper, TreeDrafter, make_drafter
from serve_eval.prompts import Prompt
from serve_eval.reference import Measurement
from serve_eval.trees import StaticTree, Verified
from tests.models.mtp_targets import FAMILIES, config_for, described, random_head, save_native, save_plain
from tests.serve_eval.small import greedy_by_hand


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_of_a_batch_are_those_of_the_unroll(family, tmp_path):
    head = random_head(config_for(family, save_plain(family, tmp_path))).double()
    torch.manual_seed(2)
    embedding_VH, lm_head_VH = torch.randn(2, 50, 32, dtype=torch.float64)
    lengths, k = (9, 5), 4  # verified rows of two requests; the second is padded
    tokens_BQ = torch.randint(3, 50, (2, 10))
    planes_BQ1H = torch.randn(2, 9, 1, 32, dtype=torch.float64)
    positions_BQ = torch.arange(9).expand(2, 9)
    told = Verified(tokens_BQ[:, :-1], tokens_BQ[:, 1:], positions_BQ, planes_BQ1H, torch.tensor(lengths) - 1)
    with torch.no_grad():
        drafter = TreeDrafter(HeadStepper(head, embedding_VH, lm_head_VH), StaticTree.chain(k))
        drafts_BK = drafter.draft(told, torch.Generator()).tokens_BM[:, 1:]
        for request, length in enumerate(lengths):
            drafts = drafts_BK[request]
            tokens_T = torch.cat((tokens_BQ[request, : length + 1], drafts))
            planes_T1H = torch.zeros(len(tokens_T), 1, 32, dtype=torch.float64)
            planes_T1H[:length] = planes_BQ1H[request, :length]
            rows = [torch.tensor([length - 1])] * k
            steps = head.unroll(tokens_T, planes_T1H, torch.zeros_like(tokens_T), rows, embedding_VH)
            assert [int((step.hidden_RH[0] @ lm_head_VH.T).argmax()) for step in steps] == drafts.tolist()


LENGTHS, NEW, K = (9, 2, 5), 12, 3


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "deepseek_v3"])
def test_a_target_with_its_own_module_is_decoded_losslessly_whatever_its_layers_keep(family, tmp_path):
    directory = save_native(family, tmp_path)
    target, model = described(directory), AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    head = load_native(target, MtpConfig.for_target(target, DraftConfig(algorithm="mtp_native"), native=True))
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(3, 50, (length,), generator=generator).tolist() for length in LENGTHS]
    prompts = [Prompt(f"p{i}", "chat", tuple(text)) for i, text in enumerate(texts)]
    with torch.no_grad():
        wanted = [greedy_by_hand(model, prompt.ids, NEW) for prompt in prompts]

    def answers(drafting: DraftingConfig, k: int) -> list:
        drafter = make_drafter(drafting, k, model=model, head=head, draft_model=model) if k else None
        return decode(model, prompts, stop=set(), max_new_tokens=NEW, drafter=drafter)

    itself = answers(DraftingConfig(method="draft_model", model="itself"), K)
    lookup = answers(DraftingConfig(method="ngram", lookup_min=1), K)  # some of its rounds draft fewer tokens, or none
    for found in (answers(DraftingConfig(), 0), answers(DraftingConfig(), K), itself, lookup):
        assert [answer.ids for answer in found] == wanted
    assert {count for answer in itself for count in answer.accepted} == {K}, "it agrees with itself"


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_planes_of_a_text_that_grows_in_parts_are_those_of_one_forward(family, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_plain(family, tmp_path), dtype=torch.float32).eval()
    ids_BT, read = torch.randint(3, 50, (2, 9)), CachedModel(model, (1, FINAL))
    with torch.no_grad():
        states = model.model(ids_BT, output_hidden_states=True).hidden_states
        wanted = torch.stack((states[1], states[-1]), 2)
        read.read(torch.cat((ids_BT[:, :4], torch.full((2, 3), 7)), 1), Places.line(torch.arange(7).expand(2, 7)))
        starts_B1 = torch.tensor([[4], [2]])  # the second request goes on from where less of it was accepted
        positions_BQ = starts_B1 + torch.arange(3)
        _, planes = read.read(ids_BT.gather(1, positions_BQ), Places.line(positions_BQ))
    index = positions_BQ[:, :, None, None].expand(-1, -1, 2, 32)
    torch.testing.assert_close(planes, wanted.gather(1, index), rtol=1e-4, atol=1e-5)


def test_costs_of_a_target_that_reads_its_text_again_do_not_hold_the_context(tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(save_plain("qwen3_5", tmp_path), dtype=torch.float32).eval()
    lengths: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda _module, _args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    head = random_head(config_for("qwen3_5", tmp_path))
    verify, draft = measure_costs(
        model, lambda k: make_drafter(DraftingConfig(), k, model=model, head=head), 2, context=16, repeats=1
    )
    hook.remove()
    assert lengths == [16, 1, 2, 3] and (len(verify), len(draft)) == (3, 2)


def test_trees_over_such_a_target_are_refused_before_anything_is_loaded(tmp_path):
    target = described(save_plain("qwen3_next", tmp_path / "target"))
    settings = EvalConfig(drafting=DraftingConfig(tree="dynamic", width=2, nodes=3))
    with pytest.raises(Refused, match=r"eval\.drafting\.tree=dynamic: .*cannot take back what they have read"):
        Measurement(target, random_head(config_for("qwen3_next", tmp_path / "target")), "w", [], settings, tmp_path)
