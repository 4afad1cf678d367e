"""The unroll and its loss equal drafting one token at a time, as a server does, in fp64."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models import unroll
from models.eagle3 import Eagle3Config, Eagle3Head
from models.errors import Refused
from models.rope import rotate
from tests.train.memory import MemoryStore, documents_of
from train import losses
from train.config import ObjectiveConfig
from train.objective import Objective, judge, simulated_al
from train.packs import Pack, row_count, supervised_rows
from train.validate import validate

CONFIG = Eagle3Config(
    hidden_size=12,
    target_hidden_size=12,
    vocab_size=20,
    draft_vocab_size=9,
    aux_layers=(2, 4, 5),
    intermediate_size=20,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
)
DRAFT_IDS = torch.tensor([0, 1, 4, 5, 7, 11, 12, 15, 19])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Five positions a chunk, two rows a strip, ten a product: so that these small packs cross all borders."""
    monkeypatch.setitem(losses.SIZES, "cpu", losses.Sizes(5, 2, 10))


def random_head(**changes) -> Eagle3Head:
    config = dataclasses.replace(CONFIG, **changes)
    reduced = config.draft_vocab_size < config.vocab_size
    head = Eagle3Head(config, DRAFT_IDS if reduced else None).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    return head


def random_pack(documents: list[tuple[int, list[tuple[int, int]]]]) -> Pack:
    """Documents of (length, spans); final planes only where a teacher is needed, as the store keeps them."""
    starts, teacher, spans, offset, teachers = [], [], [], 0, 0
    for length, own in documents:
        positions = torch.full((length,), -1)
        for start, end in own:
            positions[start : end - 1] = torch.arange(teachers, teachers + end - 1 - start)
            teachers += end - 1 - start
            spans.append((max(start, 1) + offset, end + offset))
        starts.append(torch.full((length,), offset))
        teacher.append(positions)
        offset += length
    return Pack(
        tokens_T=torch.randint(0, 20, (offset,)),
        starts_T=torch.cat(starts),
        aux_TAP=torch.randn(offset, 3, 12, dtype=torch.float64),
        final_FP=torch.randn(teachers, 12, dtype=torch.float64),
        teacher_T=torch.cat(teacher),
        spans=spans,
        documents=[],
    )


def make_objective(head: Eagle3Head, **settings) -> Objective:
    target: Any = SimpleNamespace(
        load_embedding=lambda: torch.randn(20, 12, dtype=torch.float64),
        load_lm_head=lambda: torch.randn(20, 12, dtype=torch.float64),
    )
    objective = Objective(head, target, ObjectiveConfig(**{"unroll_steps": 4} | settings), "fp32")
    return objective.double()


def test_a_tied_targets_embedding_and_head_are_one_tensor():
    both = torch.randn(20, 12)
    target: Any = SimpleNamespace(load_embedding=lambda: both, load_lm_head=both.clone)
    objective = Objective(random_head(), target, ObjectiveConfig(), "fp32").double()
    assert objective.teacher_VP is objective.embedding_VH
    assert torch.equal(objective.teacher_VP, both.double())


def draft_one_at_a_time(objective: Objective, pack: Pack, row: int, steps: int) -> list[torch.Tensor]:
    """Draft logits [D] of one row, step after step, with a plain list as its key-value cache."""
    head = objective.head
    assert isinstance(head, Eagle3Head)
    layer = head.midlayer
    start = int(pack.starts_T[row])
    keys, values, outputs = [], [], []

    def advance(token: int, feature: torch.Tensor, position: int) -> torch.Tensor:
        wide = layer.wide(objective.embedding_VH[token][None], feature[None])
        rope = head.rope.table(torch.tensor([position]), torch.float64)
        key, value = layer.self_attn.key_value(wide, rope)
        keys.append(key[0])
        values.append(value[0])
        query = rotate(layer.self_attn.q_proj(wide).unflatten(-1, (-1, 6)), *rope)[0]
        k, v = torch.stack(keys).repeat_interleave(2, 1), torch.stack(values).repeat_interleave(2, 1)
        p = (torch.einsum("ne,tne->nt", query, k) / math.sqrt(6)).softmax(-1)
        return layer.finish(feature[None], torch.einsum("nt,tne->ne", p, v)[None])[0]

    for position in range(start, row + 1):
        feature = head.fuse(pack.aux_TAP[position][None])[0]
        hidden = advance(int(pack.tokens_T[position + 1]), feature, position - start)
    for step in range(steps):
        if step > 0:
            hidden = advance(int(pack.tokens_T[row + 1 + step]), head.feedback(hidden), row - start + step)
        outputs.append(head.lm_head(head.norm(hidden)))
    return outputs


def divergence_oracle(kind: str, p: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The loss of one row as the papers write it, left to autograd."""
    log_q = logits.log_softmax(-1)
    kl, alpha = (p * (p.log() - log_q)).sum(), torch.minimum(p, log_q.exp()).sum()
    blend = (-3 * alpha.detach()).exp()
    return {
        "kl": kl,
        "ce": -log_q[p.argmax()],
        "nla": -alpha.log(),
        "lk_hybrid": blend * kl + (1 - blend) * (1 - alpha),
    }[kind]


def oracle_loss(objective: Objective, pack: Pack, counts: list[float]) -> torch.Tensor:
    total, settings = torch.zeros((), dtype=torch.float64), objective.settings
    for k in range(settings.unroll_steps):
        for row in supervised_rows(pack.spans, k).tolist():
            if settings.out_of_vocabulary == "skip" and int(pack.tokens_T[row + 2 + k]) not in objective.head.ids_D:
                continue
            logits = draft_one_at_a_time(objective, pack, row, k + 1)[k]
            teacher = pack.final_FP[pack.teacher_T[row + 1 + k]] @ objective.teacher_VP.T
            p = teacher[objective.head.ids_D].softmax(-1)
            weight = settings.decay**k if settings.step_weights is None else settings.step_weights[k]
            total = total + weight * divergence_oracle(settings.loss, p, logits) / counts[k]
    return total


DOCUMENTS = [(9, [(3, 9)]), (4, [(2, 4)]), (12, [(0, 3), (5, 11)]), (3, [])]


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {}),
        ({"norm_output": True}, {}),
        ({"norm_before_fc": True}, {}),
        ({"fc_norm": True}, {}),
        ({"draft_vocab_size": 20}, {}),
        ({"aux_layers": ()}, {}),
        ({"aux_layers": ()}, {"step_weights": [0.5, 0.3, 0.15, 0.05]}),
        ({}, {"loss": "ce"}),
        ({}, {"loss": "nla"}),
        ({}, {"loss": "lk_hybrid"}),
        ({}, {"out_of_vocabulary": "skip"}),
    ],
    ids=str,
)
def test_b17_unrolled_loss_and_gradients_equal_drafting_one_token_at_a_time(changes, settings):
    torch.manual_seed(1)
    objective = make_objective(random_head(**changes), **settings)
    pack = random_pack(DOCUMENTS)
    if not objective.head.config.aux_layers:
        pack = dataclasses.replace(pack, aux_TAP=pack.aux_TAP[:, :1])  # the final plane
    counts = [float(row_count(pack.spans, k)) for k in range(4)]
    parameters = list(objective.head.parameters())
    outcome = objective(pack, counts, seed=0)
    wanted = oracle_loss(objective, pack, counts)
    torch.testing.assert_close(outcome.loss, wanted, rtol=1e-10, atol=1e-12)
    got = torch.autograd.grad(outcome.loss, parameters)
    for a, b in zip(got, torch.autograd.grad(wanted, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)


def test_what_is_computed_in_chunks_and_again_in_backward_gives_the_same_loss_and_gradients(monkeypatch):
    torch.manual_seed(1)
    objective = make_objective(random_head(norm_output=True))
    pack = random_pack(DOCUMENTS)
    counts = [float(row_count(pack.spans, k)) for k in range(4)]
    results = []
    for chunk in (100, 3):
        monkeypatch.setattr(unroll, "POSITIONS", chunk)
        monkeypatch.setattr(unroll, "ROWS", chunk)
        loss = objective(pack, counts, seed=0).loss
        results.append([loss, *torch.autograd.grad(loss, list(objective.head.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_b19_packed_and_separate_documents_give_the_same_loss_and_gradients():
    torch.manual_seed(2)
    objective = make_objective(random_head())
    packs = [random_pack([document]) for document in DOCUMENTS[:3]]
    offsets = [0, 9, 13]
    together = Pack(
        tokens_T=torch.cat([p.tokens_T for p in packs]),
        starts_T=torch.cat([p.starts_T + o for p, o in zip(packs, offsets, strict=True)]),
        aux_TAP=torch.cat([p.aux_TAP for p in packs]),
        final_FP=torch.cat([p.final_FP for p in packs]),
        teacher_T=torch.cat(
            [
                torch.where(p.teacher_T < 0, -1, p.teacher_T + sum(q.final_FP.shape[0] for q in packs[:i]))
                for i, p in enumerate(packs)
            ]
        ),
        spans=[(s + o, e + o) for p, o in zip(packs, offsets, strict=True) for s, e in p.spans],
        documents=[],
    )
    counts = [float(row_count(together.spans, k)) for k in range(4)]
    parameters = list(objective.head.parameters())
    one = torch.autograd.grad(objective(together, counts, 0).loss, parameters)
    parts = [torch.autograd.grad(objective(p, counts, 0).loss, parameters) for p in packs]
    for whole, *pieces in zip(one, *parts, strict=True):
        torch.testing.assert_close(whole, sum(pieces), rtol=1e-9, atol=1e-12)


def test_b14_rows_start_just_before_the_answer_and_end_with_their_span():
    # Span of three tokens at 4, 5, 6: row 3 (in: token 4) predicts 5 then 6; row 4 predicts 6.
    spans = [(4, 7)]
    assert [supervised_rows(spans, k).tolist() for k in range(3)] == [[3, 4], [3], []]
    assert [row_count(spans, k) for k in range(3)] == [2, 1, 0]


def test_b05_a_pack_without_supervision_gives_a_finite_zero_that_reaches_every_parameter():
    torch.manual_seed(3)
    objective = make_objective(random_head())
    for pack in (None, random_pack([(6, [])]), random_pack([(6, [(3, 4)])])):
        loss = objective(pack, [1.0] * 4, 0).loss
        loss.backward()
        assert loss.item() == 0
        assert all(p.grad is not None and not p.grad.any() for p in objective.head.parameters())


def test_sampling_rows_keeps_the_expected_loss():
    torch.manual_seed(4)
    objective = make_objective(random_head(), row_share=0.6)
    pack = random_pack(DOCUMENTS)
    counts = [float(row_count(pack.spans, k)) for k in range(4)]
    sampled = [objective(pack, counts, seed).loss.item() for seed in range(400)]
    objective.settings = ObjectiveConfig(unroll_steps=4)
    whole = objective(pack, counts, 0).loss.item()
    mean, error = torch.tensor(sampled).mean().item(), torch.tensor(sampled).std().item() / 20
    assert abs(mean - whole) < 4 * error


def test_simulated_al_is_the_run_to_the_first_miss_and_out_of_vocabulary_is_a_miss():
    nan = math.nan
    hits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [1.0, nan, nan]])
    assert simulated_al(hits) == pytest.approx(1 + (2 + 0 + 1) / 3)
    torch.manual_seed(5)
    objective = make_objective(random_head())
    pack = random_pack(DOCUMENTS)
    steps = objective.unroll(pack, None)
    hits_RK, accept_RK = judge(objective, pack, steps)
    for place, row in enumerate(supervised_rows(pack.spans, 0).tolist()):
        for k in range(4):
            if row not in supervised_rows(pack.spans, k).tolist():
                assert math.isnan(hits_RK[place, k])
                continue
            logits = draft_one_at_a_time(objective, pack, row, k + 1)[k]
            p = (pack.final_FP[pack.teacher_T[row + 1 + k]] @ objective.teacher_VP.T).softmax(-1)
            q = torch.zeros(20, dtype=torch.float64).index_put((DRAFT_IDS,), logits.softmax(-1))
            assert hits_RK[place, k] == float(DRAFT_IDS[logits.argmax()] == p.argmax())
            assert accept_RK[place, k].item() == pytest.approx(torch.minimum(p, q).sum().item(), rel=1e-5)


@pytest.mark.parametrize("plane", ["aux", "final"])
def test_held_out_features_that_are_not_finite_are_no_acceptance_length(plane):
    torch.manual_seed(5)
    objective, pack = make_objective(random_head()), random_pack(DOCUMENTS)
    row = int(supervised_rows(pack.spans, 0)[0])
    (pack.aux_TAP[row] if plane == "aux" else pack.final_FP[pack.teacher_T[row + 1]])[..., 0] = math.nan
    with pytest.raises(Refused, match="not finite"):
        judge(objective, pack, objective.unroll(pack, None))


def test_a_step_that_supervises_no_held_out_row_has_no_accuracy():
    torch.manual_seed(6)
    store: Any = MemoryStore(documents_of([(9, ((3, 6),)), (4, ())]))
    alone = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"))
    verdict = validate(make_objective(random_head()), store, [[0], [1]], alone)
    assert [share is None for share in verdict.accuracy] == [False, False, True, True]
    json.dumps(verdict.accuracy, allow_nan=False)
