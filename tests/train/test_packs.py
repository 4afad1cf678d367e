"""Packs are read in order, a bounded number ahead; an error is not kept for later, and nothing is left behind."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from tests.train.memory import MemoryStore, documents_of
from train.packs import build_pack, read_ahead, supervised_rows


def make_store(count: int = 12) -> Any:
    torch.manual_seed(0)
    return MemoryStore(documents_of([(6 + i, ((2, 5 + i),)) for i in range(count)]))


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_pack_is_its_documents_end_to_end():
    torch.manual_seed(0)
    store: Any = MemoryStore(documents_of([(5, ((0, 3), (4, 5))), (4, ()), (6, ((0, 2), (3, 6)))]))
    pack = build_pack(store, [2, 1, 0])
    parts = [store.read(index) for index in (2, 1, 0)]
    assert torch.equal(pack.tokens_T, torch.cat([part.tokens for part in parts]).long())
    assert torch.equal(pack.aux_TAP, torch.cat([part.aux for part in parts]))
    assert torch.equal(pack.final_FP, torch.cat([part.final for part in parts]))
    assert pack.starts_T.tolist() == [0] * 6 + [6] * 4 + [10] * 5
    assert pack.teacher_T.tolist() == [0, -1, -1, 1, 2, -1] + [-1] * 4 + [3, 4, -1, -1, -1]
    # A span at a document's start has no row before it: that would be the previous document's last token.
    assert supervised_rows(pack.spans, 0).tolist() == [2, 3, 10]


@pytest.mark.parametrize("ahead", [1, 3])
def test_packs_come_in_order_whichever_is_read_first(ahead):
    store = make_store()
    store.waits_at = {0: threading.Event()}
    threading.Timer(0.05, store.waits_at[0].set).start()
    plan = [[0], [1, 2], None, [3], [4, 5, 6], None, [7]]
    read = list(read_ahead(store, plan, ahead))
    assert [pack and pack.documents for pack in read] == plan
    assert not readers()


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_packs_are_read_ahead_than_asked_for(ahead):
    store = make_store()
    taken: list[int] = []

    def plan():
        for index in range(12):
            taken.append(index)
            yield [index]

    stream = read_ahead(store, plan(), ahead)
    for used in range(1, 13):
        next(stream)
        wait_until(lambda: len(store.reads) == len(taken))
        assert taken == list(range(min(12, used + ahead)))


def test_an_error_in_a_pack_further_on_is_raised_at_the_next_one_asked_for():
    store = make_store()
    store.fails_at = 3
    store.waits_at = {3: threading.Event()}
    stream = read_ahead(store, [[i] for i in range(12)], 4)
    first = next(stream)
    assert first is not None and first.documents == [0]
    store.waits_at[3].set()
    wait_until(lambda: 4 in store.reads)
    time.sleep(0.05)
    with pytest.raises(OSError, match="cannot read document 3"):
        next(stream)
    assert not readers()


def test_an_error_in_the_pack_asked_for_is_raised():
    store = make_store()
    store.fails_at = 0
    with pytest.raises(OSError, match="cannot read document 0"):
        next(read_ahead(store, [[0], [1]]))
    assert not readers()


def test_closed_early_nothing_is_left_running_and_nothing_more_is_read():
    store = make_store()
    store.waits_at = {1: threading.Event()}
    stream = read_ahead(store, [[i] for i in range(12)], 3)
    next(stream)
    wait_until(lambda: 1 in store.reads)
    threading.Timer(0.05, store.waits_at[1].set).start()
    stream.close()
    assert not readers()
    assert set(store.reads) <= {0, 1, 2, 3}
