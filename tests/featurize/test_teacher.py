"""The teacher as its likeliest draft tokens: the target's own distribution, on the vocabulary that training chooses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import conf
from featurize import teacher
from featurize.bench import kept_mass
from featurize.store import FeatureStore
from featurize.teacher import Teaching, TopK, index_dtype, read_vocabulary
from featurize.tokenised import held_out
from featurize.verify import verify
from models.artefact import write_tensors
from models.errors import Refused
from models.target import describe_target

KEPT, DRAFTED = 12, 100


@pytest.fixture
def extracted(extracted: Callable[..., FeatureStore]) -> Callable[..., FeatureStore]:
    """With more documents, some of them held out, and a draft vocabulary."""
    more = ["data.limit=20", "data.validation_share=0.3", "featurize.shard_tokens=300", f"draft.vocab_size={DRAFTED}"]
    return lambda name, *overrides: extracted(name, *more, *overrides)


def top_of(store: FeatureStore, index: int) -> TopK:
    top = store.read(index).stored_final
    assert isinstance(top, TopK)
    return top


def test_what_is_stored_is_the_targets_own_log_softmax(
    extracted, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "CHUNK", 5000)  # some ten positions at a time
    store = extracted("a", f"featurize.teacher_k={KEPT}", "featurize.encoding=int8")
    planes = extracted("b")
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32)
    ids_D = read_vocabulary(store.directory)
    agreed = positions = 0
    for index in range(len(store)):
        features, top = store.read(index), top_of(store, index)
        assert torch.equal(features.final_positions, planes.read(index).final_positions)
        with torch.inference_mode():
            logits_FV = model.lm_head(planes.read(index).final.float())
            own_TV = model(input_ids=features.tokens.long()[None]).logits[0]
        log_p_FV = logits_FV.log_softmax(-1)
        log_p_FD = log_p_FV[:, ids_D]
        wanted = log_p_FD.sort(-1, descending=True).values
        assert top.index_FS.dtype == torch.int16 and top.index_FS.shape == (len(features.final_positions), KEPT)
        assert top.log_p_FS.dtype == torch.float16 and top.rest_F.dtype == torch.float32
        torch.testing.assert_close(top.log_p_FS.float(), wanted[:, :KEPT], rtol=2**-11, atol=1e-5)
        torch.testing.assert_close(log_p_FD.gather(-1, top.index_FS.long()), wanted[:, :KEPT], rtol=0, atol=1e-5)
        torch.testing.assert_close(top.rest_F, wanted[:, KEPT:].exp().sum(-1), rtol=1e-4, atol=1e-7)
        # Of planes that are rounded to bf16, the full model says nearly the same.
        agreed += int((top.best_F == own_TV[features.final_positions].argmax(-1)).sum())
        positions += len(top)
        assert torch.equal(top.best_F.long(), logits_FV.argmax(-1))
        own = own_TV.log_softmax(-1)[features.final_positions][:, ids_D].gather(-1, top.index_FS.long())
        assert (top.log_p_FS.float() - own).abs().mean() < 0.05
    assert agreed / positions > 0.97


def test_b20_the_vocabulary_is_that_of_supervised_tokens_of_training_documents_alone(extracted) -> None:
    store = extracted("a", f"featurize.teacher_k={KEPT}", "data.max_tokens=60")
    counts = torch.zeros(store.contract.vocab_size)
    ends = store.starts_N.tolist()
    for start, document in zip(ends, store.documents, strict=False):
        if not held_out(document.id, 0.3):
            for a, b in document.spans:
                for token in store.tokens_T[start + a : start + b].tolist():
                    counts[token] += 1
    wanted = sorted(sorted(range(len(counts)), key=lambda token: (-float(counts[token]), token))[:DRAFTED])
    assert read_vocabulary(store.directory).tolist() == wanted
    assert store.contract.draft_vocab_size == DRAFTED
    store.require_vocabulary(torch.tensor(wanted))
    with pytest.raises(Refused, match=r"on another draft vocabulary, of 100 tokens, .* the same draft\.vocab_size"):
        store.require_vocabulary(torch.tensor([*wanted[:-1], wanted[-1] + 1]))


def test_a_teacher_over_the_whole_vocabulary_is_possible_and_usual_stores_stay_what_they_were(extracted) -> None:
    whole = extracted("a", f"featurize.teacher_k={KEPT}", "draft.vocab_size=null")
    assert read_vocabulary(whole.directory).tolist() == list(range(whole.contract.vocab_size))
    p_F = top_of(whole, 0).log_p_FS.float().exp().sum(-1)
    torch.testing.assert_close(p_F + top_of(whole, 0).rest_F, torch.ones(len(p_F)), rtol=2e-3, atol=0)
    usual = extracted("b")
    facts = {"teacher_k", "draft_vocab_size", "draft_vocabulary", "featurize.teacher_k", "data.validation_share"}
    assert not facts & {*usual.manifest["contract"], *usual.manifest["inputs"]}
    assert not (usual.directory / "vocabulary.safetensors").exists()
    usual.require_vocabulary(torch.arange(3))


def test_other_settings_are_refused_by_name_and_a_damaged_vocabulary_is_found(
    extracted, tmp_path: Path, tiny_target_dir: Path
) -> None:
    store = extracted("a", f"featurize.teacher_k={KEPT}")
    with pytest.raises(Refused, match=r"other inputs: featurize\.teacher_k \(was 12, is 5\)"):
        extracted("a", "featurize.teacher_k=5")
    with pytest.raises(Refused, match=r"draft\.vocab_size \(was 100, is 90\), data\.validation_share \(was 0\.3, is 0"):
        extracted("a", f"featurize.teacher_k={KEPT}", "draft.vocab_size=90", "data.validation_share=0.1")
    target = describe_target(conf.load(["name=x", f"target.path={tiny_target_dir}", "target.dtype=float32"]).target)
    assert "everything is as its manifest says" in verify(store.directory, target, (2, 4, 5))
    store.require(target, (2, 4, 5))
    with pytest.raises(Refused, match=r"this head reads the final plane .* keeps no final plane \(featurize\.teacher_"):
        store.require(target, (2, 4, 5), final=True)
    write_tensors(store.directory / "vocabulary.safetensors", {"ids": torch.arange(DRAFTED, dtype=torch.int32)})
    with pytest.raises(Refused, match="on another draft vocabulary"):
        verify(store.directory, target, (2, 4, 5))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["featurize.teacher_k=0"], r"featurize\.teacher_k=0 must be at least 1"),
        (["featurize.teacher_k=5", "featurize.final_everywhere=true"], r"which featurize\.teacher_k does without"),
        (["featurize.teacher_k=101"], r"featurize\.teacher_k=101 is more than the 100 tokens of draft\.vocab_size"),
        (
            ["featurize.teacher_k=5", "draft.use_aux_hidden_state=false"],
            r"featurize\.teacher_k=5 keeps no final plane, but .* draft\.use_aux_hidden_state=false\) reads it",
        ),
        (
            ["featurize.teacher_k=5", "draft.algorithm=mtp", "draft.vocab_size=null"],
            r"featurize\.teacher_k=5 keeps no final plane, but this head \(draft\.algorithm=mtp .* reads it at every "
            r"position; set featurize\.teacher_k=null featurize\.final_everywhere=true",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_in_one_line_before_a_model_is_loaded(
    extracted, monkeypatch: pytest.MonkeyPatch, more: list[str], message: str
) -> None:
    monkeypatch.setattr("featurize.backends.load_backend", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(Refused, match=message) as told:
        extracted("a", *more)
    assert "\n" not in str(told.value)


def test_equals_are_in_order_of_their_places_and_nothing_is_held_but_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    lm_head = torch.randint(-3, 4, (30, 8)).float()  # whole numbers: equals are equal, others are not
    teaching = Teaching(lm_head, torch.arange(1, 30), 7)
    planes = torch.randint(-3, 4, (50, 8)).bfloat16()
    one = teaching(planes)
    log_p = one.log_p_FS.float()
    falling, tied = log_p[:, :-1] - log_p[:, 1:], one.index_FS[:, 1:] - one.index_FS[:, :-1]
    assert (falling >= 0).all() and (falling == 0).any() and (tied[falling == 0] > 0).all()
    monkeypatch.setattr(teacher, "CHUNK", 100)
    for ours, theirs in zip(vars(teaching(planes)).values(), vars(one).values(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(teaching(planes[:0])) == 0 and teaching(planes[:0]).log_p_FS.shape == (0, 7)
    everything = Teaching(lm_head, torch.arange(30), 30)(planes)
    assert (everything.rest_F == 0).all()
    # A hopeless token has a log-probability that is finite, and none of it is lost as a NaN.
    sure = Teaching(lm_head * 1e5, torch.arange(30), 30)(planes)
    assert sure.log_p_FS.isfinite().all() and (sure.log_p_FS == torch.finfo(torch.float16).min).any()
    with pytest.raises(Refused, match="logits that are not finite"):
        Teaching(lm_head * torch.nan, torch.arange(30), 3)(planes)


def test_indices_take_two_bytes_as_long_as_they_fit() -> None:
    assert index_dtype(1 << 15) == torch.int16 and index_dtype((1 << 15) + 1) == torch.int32
    torch.manual_seed(0)
    drafted = (1 << 15) + 1
    top = Teaching(torch.randn(drafted, 4), torch.arange(drafted), 2)(torch.randn(40, 4).bfloat16())
    assert top.index_FS.dtype == torch.int32 and top.index_FS.min() >= 0


def test_fp16_rounds_log_probabilities_an_eighth_as_much_as_bf16() -> None:
    torch.manual_seed(0)
    log_p = -torch.rand(100_000) * 4 - 4  # where most of the kept tokens are
    half, brain = ((log_p.to(dtype).float() - log_p).abs().max().item() for dtype in (torch.float16, torch.bfloat16))
    assert half < 0.002 < 0.015 < brain
    assert teacher.LOG_P is torch.float16


def test_a_shard_says_what_it_holds_and_is_as_large_as_was_promised(extracted, capsys) -> None:
    store = extracted("a", f"featurize.teacher_k={KEPT}", "featurize.encoding=int8")
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "bytes per token" in line]
    totals = store.manifest["totals"]
    files = [path.stat().st_size for path in (store.directory / "shards").glob("*.safetensors")]
    tensors = totals["tokens"] * (4 + 3 * (64 + 2)) + totals["teacher_positions"] * (KEPT * 4 + 8)
    tensors += len(files) * 3 * 64 * 2
    assert f" {tensors / totals['tokens']:,.0f} bytes per token" in said
    assert tensors < sum(files) < tensors + 2000 * len(files)
    assert json.loads((store.directory / "manifest.json").read_text())["contract"]["teacher_k"] == KEPT


def test_the_table_of_kept_probability_is_that_of_a_plain_softmax() -> None:
    torch.manual_seed(0)
    lm_head, planes, ids = torch.randn(400, 8) * 2, torch.randn(50, 8).bfloat16(), torch.arange(0, 400, 2)
    p = (planes.float() @ lm_head.T)[:, ids].softmax(-1).sort(-1, descending=True).values
    shares = kept_mass(planes, lm_head, ids)
    assert list(shares) == [16, 64, 200], "no more tokens than can be drafted"
    for kept, share in shares.items():
        assert share == pytest.approx(float(p[:, :kept].sum(-1).mean()), rel=1e-3)
