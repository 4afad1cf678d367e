"""An MTP head with a ragged cache drafts what its unroll drafts, whatever its keys, values and norms are like."""

from __future__ import annotations

import pytest
import torch

from serve_eval.drafters import HeadStepper, TreeDrafter
from serve_eval.trees import StaticTree, Verified
from tests.models.mtp_targets import FAMILIES, config_for, random_head, save_plain


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
