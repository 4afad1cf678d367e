"""What cannot be trained on is counted and told, and the draft vocabulary counts supervised tokens alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from featurize import vocabulary
from featurize.tokenised import held_out
from featurize.vocabulary import count_supervised, divide, draft_vocabulary
from models.errors import Refused
from models.vocabulary import choose_draft_vocabulary
from tests.train.memory import MemoryStore, documents_of
from train.plan import Corpus, Costs
from train.stock import Stock

COSTS = Costs(token=1.0, row=20.0, key=0.01, teacher=2.0, row_share=1.0)


def test_held_out_documents_are_chosen_by_their_id_alone():
    names = [f"chat-{i}" for i in range(4000)]
    share = sum(held_out(name, 0.1) for name in names) / len(names)
    assert share == pytest.approx(0.1, abs=0.02)
    assert {name for name in names if held_out(name, 0.05)} <= {name for name in names if held_out(name, 0.1)}
    assert not any(held_out(name, 0.0) for name in names)


def test_b05_documents_without_a_row_are_left_out_and_counted():
    # Two tokens at position 0 give no row: nothing comes before the first token. Nor do a single one and none.
    documents = documents_of([(9, ((3, 6),)), (9, ((0, 2),)), (9, ((4, 5),)), (9, ()), (9, ((0, 3),)), (5, ((1, 3),))])
    store: Any = MemoryStore(documents)
    totals = {"truncated": {"documents": 2, "supervised_tokens": 7}, "refused_conversations": {"a": 1, "b": 3}}
    store.manifest = {"totals": totals, "inputs": {"data.max_tokens": 9}}
    corpus = Corpus.of(documents, COSTS, 3)
    assert corpus.rows_NK[:, 0].tolist() == [document.rows for document in documents]
    training, validation = divide(documents, 0.0)
    assert (training, validation) == ([0, 4, 5], [])
    taken = Stock.take(store, corpus, training, validation)
    assert taken == Stock(
        training=3, validation=0, without_row=3, tokens=23, rows=2 + 1 + 1,
        max_tokens=9, truncated=2, truncated_tokens=7, refused=4,
    )  # fmt: skip
    assert taken.line() == (
        "data: 3 documents to train on (0 held out, 3 without a supervised row), 23 tokens, 4 supervised rows; "
        "data.max_tokens=9 cut 2 documents (7 supervised tokens); 4 conversations had been left out"
    )


def test_b05_nothing_to_train_on_is_refused():
    documents = documents_of([(9, ((0, 2),)), (9, ())])
    with pytest.raises(Refused, match="none of 2 documents supervises a row"):
        divide(documents, 0.0)
    documents = documents_of([(9, ((2, 5),))])
    with pytest.raises(Refused, match="all 1 documents are held out; lower data.validation_share"):
        divide(documents, 1.0)


@pytest.mark.parametrize("at_once", [1, 2, 1000])
def test_b20_supervised_tokens_alone_are_counted(at_once, monkeypatch):
    monkeypatch.setattr(vocabulary, "DOCUMENTS_AT_ONCE", at_once)
    store: Any = MemoryStore(documents_of([(6, ((2, 4), (5, 6))), (4, ((0, 2),)), (5, ((1, 5),))]))
    store.tokens_T.copy_(torch.tensor([9, 9, 3, 7, 9, 3] + [11, 12, 9, 9] + [9, 19, 3, 11, 7]))
    counts = count_supervised(store.documents, store.tokens_T, [0, 1, 2], 20)
    assert counts.dtype == torch.int64
    assert {i: int(n) for i, n in enumerate(counts) if n} == {3: 3, 7: 2, 11: 2, 12: 1, 19: 1}
    assert not store.reads, "counting read planes"
    assert torch.equal(count_supervised(store.documents, store.tokens_T, [2, 0, 1], 20), counts)
    assert count_supervised(store.documents, store.tokens_T, [1], 20).nonzero()[:, 0].tolist() == [11, 12]
    # Five distinct ids for eight places: the lowest unused ids fill up. Twice the same.
    for _ in range(2):
        ids = choose_draft_vocabulary(counts, 8)
        assert ids is not None and ids.tolist() == [0, 1, 2, 3, 7, 11, 12, 19]
    # All three have a row: (0, 2) in the second has none, so that without it one id less is counted.
    chosen = draft_vocabulary(store.documents, store.tokens_T, 0.0, 20, 8)
    assert chosen.tolist() == [0, 1, 2, 3, 4, 7, 11, 19]
    assert draft_vocabulary(store.documents, store.tokens_T, 0.0, 20, None).tolist() == list(range(20))
