"""The reference decoder returns the target's own tokens, drafts what the trainer unrolls, and counts as servers do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.config import DraftConfig, TargetConfig
from models.eagle3 import Eagle3Config, Eagle3Head, initialise
from models.target import aux_layers, describe_target
from serve_eval.decoder import HeadRunner, RaggedCache, decode
from serve_eval.prompts import Prompt
from serve_eval.reference import acceptance, best_k, rounds_within
from train.config import ObjectiveConfig
from train.objective import Objective
from train.packs import Pack


@pytest.fixture(scope="module")
def parts(tiny_target_dir):
    target = describe_target(TargetConfig(path=str(tiny_target_dir), dtype="float32"))
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32).eval()
    config = Eagle3Config.for_target(target, aux_layers(target, [2, 4, 5]), DraftConfig(vocab_size=100))
    torch.manual_seed(0)
    head = Eagle3Head(config, torch.arange(0, 300, 3))
    initialise(head, target, torch.randn(50, len(config.aux_layers), 64))
    with torch.no_grad():
        for parameter in head.midlayer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return SimpleNamespace(target=target, model=model, head=head)


def prompts_of(lengths: list[int]) -> list[Prompt]:
    torch.manual_seed(1)
    return [Prompt(f"p{i}", "chat", tuple(torch.randint(3, 300, (n,)).tolist())) for i, n in enumerate(lengths)]


def greedy_by_hand(model, ids: tuple[int, ...], count: int) -> list[int]:
    found = list(ids)
    for _ in range(count):
        found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(ids) :]


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_greedy_output_is_the_targets_own_for_ragged_batches(parts, k):
    prompts = prompts_of([3, 11, 7, 1])
    wanted = [greedy_by_hand(parts.model, prompt.ids, 12) for prompt in prompts]
    alone = decode(parts.model, prompts, stop=set(), max_new_tokens=12)
    drafted = decode(parts.model, prompts, stop=set(), max_new_tokens=12, head=parts.head, k=k)
    assert [answer.ids for answer in alone] == wanted
    assert [answer.ids for answer in drafted] == wanted


def test_a_perfect_drafter_accepts_everything_and_a_hopeless_one_nothing(parts, monkeypatch):
    prompts = prompts_of([5, 9])
    truth = {p.ids: greedy_by_hand(parts.model, p.ids, 40) for p in prompts}
    sequences = [list(p.ids) + truth[p.ids] for p in prompts]

    def oracle(self, ids_BQ, aux, positions_BQ, last_B, k):
        rows = torch.arange(len(last_B))
        at = (positions_BQ[rows, last_B] + 2).tolist()
        return torch.tensor([sequences[row][a : a + k] for row, a in enumerate(at)])

    monkeypatch.setattr(HeadRunner, "draft", oracle)
    answers = decode(parts.model, prompts, stop=set(), max_new_tokens=13, head=parts.head, k=3)
    assert [a.accepted for a in answers] == [[3, 3, 3], [3, 3, 3]]  # 1 + 3 rounds of 4
    monkeypatch.setattr(
        HeadRunner, "draft", lambda self, ids, aux, at, last, k: oracle(self, ids, aux, at, last, k) + 1
    )
    answers = decode(parts.model, prompts, stop=set(), max_new_tokens=6, head=parts.head, k=3)
    assert [a.accepted for a in answers] == [[0] * 5, [0] * 5]


def test_answers_end_with_their_stop_token(parts):
    (prompt,) = prompts_of([6])
    full = greedy_by_hand(parts.model, prompt.ids, 12)
    stop = next(token for token in full if token != full[0])
    (answer,) = decode(parts.model, [prompt], stop={stop}, max_new_tokens=12, head=parts.head, k=4)
    assert answer.ids == full[: full.index(stop) + 1]


@pytest.mark.parametrize("norm_output", [False, True])
def test_drafts_are_those_of_the_trainers_unroll(parts, norm_output):
    config = parts.head.config
    head = Eagle3Head(type(config)(**vars(config) | {"norm_output": norm_output}), parts.head.ids_D)
    head.load_state_dict(parts.head.state_dict())
    objective = Objective(head, parts.target, ObjectiveConfig(unroll_steps=5), "fp32")
    torch.manual_seed(2)
    length, k = 9, 5
    tokens = torch.randint(3, 300, (length + 1,))
    aux = torch.randn(1, length, 3, 64)
    runner = HeadRunner(head, objective.embedding_VH)
    with torch.no_grad():
        drafts = runner.draft(tokens[None, 1:], aux, torch.arange(length)[None], torch.tensor([length - 1]), k)[0]
    extended = torch.cat((tokens, drafts, torch.zeros(3, dtype=torch.int64)))
    padded = torch.zeros(len(extended), 3, 64)
    padded[:length] = aux[0]
    pack = Pack(
        tokens_T=extended,
        starts_T=torch.zeros(len(extended), dtype=torch.int64),
        aux_TAP=padded,
        final_FP=torch.zeros(0, 64),
        teacher_T=torch.full((len(extended),), -1),
        spans=[(length, length + k + 1)],
        documents=[],
    )
    with torch.no_grad():
        steps = objective.unroll(pack, None)
        unrolled = [int(head.ids_D[head.lm_head(step.hidden_RH[0]).argmax()]) for step in steps]
    assert [int(step.rows_R[0]) for step in steps] == [length - 1] * k
    assert unrolled == drafts.tolist()


def test_drafting_continues_from_the_cache_as_if_it_had_seen_everything_at_once(parts):
    torch.manual_seed(3)
    embedding = parts.model.get_input_embeddings().weight
    tokens, aux = torch.randint(3, 300, (1, 12)), torch.randn(1, 11, 3, 64)
    with torch.no_grad():
        whole = HeadRunner(parts.head, embedding)
        wanted = whole.draft(tokens[:, 1:], aux, torch.arange(11)[None], torch.tensor([10]), 4)
        pieces = HeadRunner(parts.head, embedding)
        pieces.draft(tokens[:, 1:8], aux[:, :7], torch.arange(7)[None], torch.tensor([6]), 4)
        # Four rows are offered, two were verified; the rest is padding to be overwritten.
        pieces.draft(tokens[:, 8:12], aux[:, 7:11] * 1.0, torch.arange(7, 11)[None], torch.tensor([1]), 4)
        got = pieces.draft(tokens[:, 10:], aux[:, 9:], torch.arange(9, 11)[None], torch.tensor([1]), 4)
    assert got.tolist() == wanted.tolist()


def test_ragged_cache_shows_each_row_only_its_own_past():
    cache = RaggedCache()
    mask = cache.place(torch.tensor([[2, 3], [0, 1]]))
    assert mask[:, 0].tolist() == [
        [[True, True, True, False], [True, True, True, True]],
        [[True, False, False, False], [True, True, False, False]],
    ]


def test_acceptance_pools_rounds_and_is_absent_without_any():
    assert acceptance([2, 0, 1, 3], 3) == {"al": 2.5, "per_position": [0.75, 0.5, 0.25], "rounds": 4}
    assert acceptance([], 3)["al"] is None


def test_best_k_weighs_acceptance_against_cost():
    verify = [10.0, 10.5, 11.0, 11.5]
    assert best_k([0.5, 0.05, 0.01], verify, [2.0, 4.0, 6.0]) == 1
    assert best_k([0.9, 0.85, 0.8], verify, [1.0, 2.0, 3.0]) == 3


def test_the_rounds_of_a_shorter_answer_are_the_first_of_a_longer_ones(parts):
    prompts = prompts_of([4, 8])
    long = decode(parts.model, prompts, stop=set(), max_new_tokens=14, head=parts.head, k=3)
    for limit in range(1, 15):
        short = decode(parts.model, prompts, stop=set(), max_new_tokens=limit, head=parts.head, k=3)
        assert [rounds_within(a.accepted, limit) for a in long] == [a.accepted for a in short]
