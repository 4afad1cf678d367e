"""The reference decoder returns the target's own tokens, drafts what the trainer unrolls, and counts as servers do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from models.config import DraftConfig, TargetConfig
from models.eagle3 import Eagle3Config, Eagle3Head, initialise
from models.planes import FINAL
from models.target import aux_layers, describe_target
from serve_eval.cache import CachedModel, Places, RaggedCache
from serve_eval.config import DraftingConfig
from serve_eval.decoder import Answer, decode, measure_costs
from serve_eval.drafters import HeadStepper, TreeDrafter, looked_up, make_drafter
from serve_eval.prompts import Prompt
from serve_eval.trees import StaticTree, Verified
from serve_eval.verification import Draft
from tests.serve_eval.small import VOCABULARY, greedy_by_hand, small_parts, small_prompts
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


TREE = [[0], [1], [2], [3], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]
TREE += [[1, 0, 1], [0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
BUSHES: dict[str, tuple[int, dict[str, Any]]] = {
    "two nodes": (1, {"tree": "static", "paths": [[0], [1]]}),
    "21 nodes": (5, {"tree": "static", "paths": TREE}),
    "by confidence, 21 nodes": (4, {"tree": "dynamic", "width": 4, "nodes": 21}),
    "by confidence, deep": (6, {"tree": "dynamic", "width": 2, "nodes": 9}),
}
METHODS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "no fc": {"kind": "no fc"},
    "ngram": {"method": "ngram", "lookup_min": 1},
    "draft_model": {"method": "draft_model", "model": "-"},
}
LENGTHS, NEW = [3, 11, 7, 1, 5, 2, 9, 4], 20


@cache
def by_hand() -> list[list[int]]:
    return [greedy_by_hand(small_parts().model, prompt.ids, NEW) for prompt in small_prompts(LENGTHS)]


def decoded(
    k: int, prompts: list[Prompt], limit: int = NEW, stop: Sequence[int] = (), kind: str = "eagle3", **settings: Any
) -> list[Answer]:
    parts = small_parts(kind)
    drafter = make_drafter(DraftingConfig(**settings), k, **vars(parts)) if k else None
    return decode(parts.model, prompts, stop=set(stop), max_new_tokens=limit, drafter=drafter)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_chains_return_the_targets_own_tokens(method: str, batch: int) -> None:
    prompts, most = small_prompts(LENGTHS), 0
    for k in range(8):  # 0 is the target alone
        for first in range(0, 8 if batch == 8 else 2, batch):
            answers = decoded(k, prompts[first : first + batch], **METHODS[method])
            assert [answer.ids for answer in answers] == by_hand()[first : first + batch], f"k = {k}"
            assert all(len(answer.entropies) == NEW for answer in answers)
        most = max([most, *(n for answer in answers for n in answer.accepted if n is not None)])
    assert batch == 1 or most >= (1 if method == "no fc" else 2), "chance is kinder to the others"


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("shape", BUSHES)
@pytest.mark.parametrize("method", ["eagle3", "no fc", "draft_model"])
def test_greedy_trees_return_the_targets_own_tokens(method: str, shape: str, batch: int) -> None:
    (k, settings), prompts = BUSHES[shape], small_prompts(LENGTHS)
    for first in range(0, 8 if batch == 8 else 2, batch):
        answers = decoded(k, prompts[first : first + batch], **settings, **METHODS[method])
        assert [answer.ids for answer in answers] == by_hand()[first : first + batch]
    if batch == 8:
        rounds = [each for answer in answers for each in answer.rounds if each is not None]
        assert any(each.straight < len(each.path) for each in rounds), "no branch was ever better than the first"


LAYERS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mistral": {},  # all layers have the window
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},  # every other layer has; attention has sinks
}


@pytest.mark.parametrize("family", LAYERS)
def test_a_target_whose_layers_see_a_window_keeps_to_it(family: str) -> None:
    config = AutoConfig.for_model(
        family,
        **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.25},
        **{"sliding_window": 6, "tie_word_embeddings": False} | LAYERS[family],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    prompts = small_prompts(LENGTHS)
    wanted = [greedy_by_hand(model, prompt.ids, NEW) for prompt in prompts]
    model.config.sliding_window = 512
    assert wanted != [greedy_by_hand(model, prompt.ids, NEW) for prompt in prompts], "the window matters"
    model.config.sliding_window = 6
    itself: dict[str, Any] = METHODS["draft_model"]
    for k, settings in ((3, METHODS["ngram"]), (3, itself), (5, itself | BUSHES["21 nodes"][1])):
        drafter = make_drafter(DraftingConfig(**settings), k, model=model, draft_model=model)
        answers = decode(model, prompts, stop=set(), max_new_tokens=NEW, drafter=drafter)
        assert [answer.ids for answer in answers] == wanted
        if settings["method"] == "draft_model":
            assert {n for answer in answers for n in answer.accepted} == {k}, "it agrees with itself"


@pytest.mark.parametrize("shape", BUSHES)
def test_a_trees_drafts_are_those_that_chains_along_its_paths_would_make(shape: str) -> None:
    """The oracle reads each path as a text of its own, without a cache or a mask."""
    (k, settings), parts, (prompt,) = BUSHES[shape], small_parts(), small_prompts([6])
    ids = torch.tensor([prompt.ids])
    told = Verified(
        ids, torch.tensor([[*prompt.ids[1:], 5]]), torch.arange(6)[None], torch.empty(1, 6, 0, 32), torch.tensor([5])
    )
    drafter = make_drafter(DraftingConfig(**settings, **METHODS["draft_model"]), k, **vars(parts))
    with torch.inference_mode():
        draft = drafter.draft(told, torch.Generator())
    tokens, parents = draft.tokens_BM[0].tolist(), draft.parents_BM[0].tolist()

    def path(node: int) -> list[int]:
        return [*path(parents[node]), tokens[node]] if node else [tokens[0]]

    def scores(text: list[int]) -> torch.Tensor:
        return parts.draft_model(torch.tensor([[*prompt.ids, *text]])).logits[0, -1].log_softmax(-1)

    for node in range(len(tokens)):
        children = [tokens[child] for child in range(1, len(tokens)) if parents[child] == node]
        best = scores(path(node)).topk(max(1, len(children))).indices.tolist()
        assert children == best[: len(children)]
    if settings["tree"] == "dynamic":
        assert len(tokens) == 1 + settings["nodes"]
        likelihood = [
            sum(float(scores(path(n)[:i])[path(n)[i]]) for i in range(1, len(path(n)))) for n in range(len(tokens))
        ]
        assert all(a >= b - 1e-5 for a, b in zip(likelihood, likelihood[1:], strict=False))


class Oracle:
    """Drafts a known continuation, or tokens that are all wrong."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, k: int, wrong: bool) -> None:
        self.k, self.wrong, self.texts = k, wrong, [list(t) for t in by_hand()[:2]]
        self.starts = LENGTHS[:2]

    def draft(self, verified: Verified, generator: torch.Generator) -> Draft:
        at = [root - start + 1 for root, start in zip(verified.root_B.tolist(), self.starts, strict=True)]
        drafts = [(text + [0] * self.k)[a : a + self.k] for text, a in zip(self.texts, at, strict=True)]
        drafts_Bk = (torch.tensor(drafts) + self.wrong) % VOCABULARY
        parents = torch.arange(-1, self.k).expand(len(drafts), -1)
        return Draft(torch.cat((verified.newest_B[:, None], drafts_Bk), 1), parents)

    def keep(self, rows: torch.Tensor) -> None:
        raise AssertionError("both requests end together")


def test_a_perfect_drafter_accepts_everything_and_a_hopeless_one_nothing() -> None:
    model, prompts = small_parts().model, small_prompts(LENGTHS[:2])
    answers = decode(model, prompts, stop=set(), max_new_tokens=13, drafter=Oracle(3, wrong=False))
    assert [a.accepted for a in answers] == [[3, 3, 3], [3, 3, 3]]  # 1 + 3 rounds of 4
    answers = decode(model, prompts, stop=set(), max_new_tokens=6, drafter=Oracle(3, wrong=True))
    assert [a.accepted for a in answers] == [[0] * 5, [0] * 5]


def test_answers_end_with_their_stop_token() -> None:
    (prompt,), full = small_prompts(LENGTHS[:1]), by_hand()[0]
    stop = next(token for token in full if token != full[0])
    (answer,) = decoded(4, [prompt], stop=[stop])
    assert answer.ids == full[: full.index(stop) + 1]
    assert len(answer.entropies) == len(answer.ids)


def test_entropies_are_those_of_the_targets_own_distribution() -> None:
    (prompt,) = small_prompts(LENGTHS[:1])
    (answer,) = decoded(5, [prompt], tree="static", paths=TREE)
    logits = small_parts().model(torch.tensor([[*prompt.ids, *answer.ids[:-1]]])).logits[0, len(prompt.ids) - 1 :]
    p = logits.softmax(-1)
    assert answer.entropies == pytest.approx((-(p * p.log()).sum(-1)).tolist(), rel=1e-4)


def test_a_round_without_a_draft_is_no_drafting_round() -> None:
    (prompt,) = small_prompts(LENGTHS[:1])
    (answer,) = decoded(3, [prompt], method="ngram", lookup_min=2)
    assert None in answer.accepted
    assert len(answer.ids) <= 1 + sum((n or 0) + 1 for n in answer.accepted)


LOOKUPS = [
    ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),
    ([1, 2, 7, 5, 2, 8, 1, 2], [7, 5, 2]),  # two tokens are found again before one is
    ([4, 1, 2, 3, 1, 2, 5, 1, 2], [3, 1, 2]),  # the first place counts
    ([1, 2, 3, 4], []),
    ([6, 6, 6], [6]),  # the ending may overlap where it was found, and the text may end first
    ([1, 2, 3, 4, 9, 2, 3, 4, 8, 1, 2, 3, 4], [9, 2, 3]),  # all four tokens
    ([5], []),
]


@pytest.mark.parametrize(("text", "wanted"), LOOKUPS)
def test_prompt_lookup_takes_the_longest_ending_at_its_first_place(text: list[int], wanted: list[int]) -> None:
    assert looked_up(text, 3, 2, 4) == wanted


@pytest.mark.parametrize("changes", [{}, {"norm_output": True}, {"aux_layers": ()}], ids=str)
def test_drafts_are_those_of_the_trainers_unroll(parts, changes):
    config = dataclasses.replace(parts.head.config, **changes)
    head = Eagle3Head(config, parts.head.ids_D)
    head.load_state_dict({name: parts.head.state_dict()[name] for name in head.state_dict()})
    objective = Objective(head, parts.target, ObjectiveConfig(unroll_steps=5), "fp32")
    torch.manual_seed(2)
    length, k = 9, 5
    tokens = torch.randint(3, 300, (length + 1,))
    aux = torch.randn(1, length, len(config.planes), 64)
    runner = TreeDrafter(HeadStepper(head, objective.embedding_VH, objective.teacher_VP), StaticTree.chain(k))
    told = Verified(tokens[None, :-1], tokens[None, 1:], torch.arange(length)[None], aux, torch.tensor([length - 1]))
    with torch.no_grad():
        drafts = runner.draft(told, torch.Generator()).tokens_BM[0, 1:]
    extended = torch.cat((tokens, drafts, torch.zeros(3, dtype=torch.int64)))
    padded = torch.zeros(len(extended), len(config.planes), 64)
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


def test_b09_a_drafter_that_reads_the_final_plane_is_given_it_after_the_norm(parts) -> None:
    ids = torch.randint(3, 300, (1, 9))
    with torch.no_grad():
        logits, planes = CachedModel(parts.model, (FINAL, 2)).read(ids, Places.line(torch.arange(9)[None]))
        whole = parts.model(ids, output_hidden_states=True)
    assert planes.shape == (1, 9, 2, 64)
    torch.testing.assert_close(parts.model.lm_head(planes[:, :, 0]), whole.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(planes[:, :, 1], whole.hidden_states[2], rtol=1e-4, atol=1e-4)


def test_drafting_continues_from_the_cache_as_if_it_had_seen_everything_at_once(parts):
    torch.manual_seed(3)
    embedding = parts.model.get_input_embeddings().weight
    tokens, aux = torch.randint(3, 300, (1, 12)), torch.randn(1, 11, 3, 64)

    def told(start: int, end: int, last: int) -> Verified:
        """Rows start .. end, of which those up to query index `last` are verified."""
        where = torch.arange(start, end)[None]
        part = (tokens[:, start:end], tokens[:, start + 1 : end + 1], where, aux[:, start:end])
        return Verified(*part, torch.tensor([last]))

    tree = StaticTree.of_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    with torch.no_grad():
        whole, pieces = (TreeDrafter(HeadStepper(parts.head, embedding, embedding), tree) for _ in range(2))
        wanted = whole.draft(told(0, 11, 10), torch.Generator()).tokens_BM
        pieces.draft(told(0, 7, 6), torch.Generator())
        # Four rows are offered, two were verified; the rest is padding to be overwritten.
        pieces.draft(told(7, 11, 1), torch.Generator())
        got = pieces.draft(told(9, 11, 1), torch.Generator()).tokens_BM
    assert got.tolist() == wanted.tolist()


def test_ragged_cache_shows_each_row_only_its_own_past() -> None:
    mask = RaggedCache().place(Places.line(torch.tensor([[2, 3], [0, 1]])))
    assert mask[:, 0].tolist() == [
        [[True, True, True, False], [True, True, True, True]],
        [[True, False, False, False], [True, True, False, False]],
    ]


def test_ragged_cache_shows_a_node_the_text_and_its_ancestors() -> None:
    parents = torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, -1]])
    places = Places.branches(torch.tensor([2, 0]), parents, 2)
    assert places.positions_BQ.tolist() == [[3, 4], [2, 0]]
    assert places.slots_BQ.tolist() == [[4, 5], [2, 3]]
    assert RaggedCache().place(places)[:, 0].int().tolist() == [
        [[1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 1, 1]],
        [[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]],  # the last place is empty and sees itself alone
    ]


def test_costs_are_measured_for_every_length_of_chain() -> None:
    parts = small_parts()
    for method in ("eagle3", "ngram", "draft_model"):
        chain = DraftingConfig(**METHODS[method])
        verify, draft = measure_costs(parts.model, lambda k: make_drafter(chain, k, **vars(parts)), 2, 8, 1)  # noqa: B023
        assert (len(verify), len(draft)) == (3, 2)
        assert min(verify + draft) > 0
