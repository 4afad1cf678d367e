"""Rows in, conversations out; nothing is lost without being counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from featurize.conversations import Refusals, Unusable, parse_row, read_conversations
from models.errors import Refused

USER = {"role": "user", "content": "question"}
ANSWER = {"role": "assistant", "content": "answer"}


def write(path: Path, rows: list[Any]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def read(*files: str) -> tuple[list[Any], Refusals]:
    refusals = Refusals()
    return list(read_conversations(files, refusals)), refusals


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_rows_are_read_in_order_plain_and_compressed(tmp_path: Path, name: str) -> None:
    rows = [{"id": f"r{i}", "route": "code", "messages": [USER, ANSWER]} for i in (3, 1, 2)]
    conversations, refusals = read(write(tmp_path / name, rows))
    assert [c.id for c in conversations] == ["r3", "r1", "r2"]
    assert conversations[0].messages == [USER, ANSWER]
    assert conversations[0].route == "code"
    assert not refusals.counts


def test_sharegpt_keys_become_messages() -> None:
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    assert parse_row(row).messages == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def test_a_missing_id_is_taken_from_the_contents() -> None:
    one, same, other = ({"messages": [USER, dict(ANSWER, content=text)]} for text in ("x", "x", "y"))
    assert parse_row(one).id == parse_row(same).id != parse_row(other).id


def test_a_cut_answer_ends_its_conversation() -> None:
    cut = ANSWER | {"finish_reason": "length"}
    conversation = parse_row({"messages": [USER, cut, USER, ANSWER]})
    assert conversation.messages == [USER, ANSWER]
    assert conversation.cut == 1
    assert parse_row({"messages": [USER, ANSWER | {"finish_reason": "stop"}]}).cut is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("text", "not an object"),
        ({"id": "1"}, "no messages"),
        ({"messages": []}, "no messages"),
        ({"messages": [USER]}, "no assistant message"),
        ({"messages": [USER, {"role": "narrator", "content": "x"}]}, "unknown role 'narrator'"),
        ({"messages": [{"role": "user", "content": None}, ANSWER]}, "content of a user message is NoneType"),
        ({"messages": [USER, {"role": "assistant", "content": ["x"]}]}, "content of a assistant message is list"),
        ({"messages": [USER, ANSWER], "route": 3}, "route is not text"),
        ({"messages": [USER, ANSWER], "id": 1.5}, "id is neither"),
        ({"messages": ["x"]}, "a message is not an object"),
    ],
)
def test_b08_a_row_that_cannot_be_used_says_why(row: Any, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        parse_row(row)


def test_b08_tool_turns_and_unusual_orders_are_accepted() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [ANSWER, USER, USER, call, {"role": "tool", "content": "42"}, ANSWER]
    assert parse_row({"messages": messages}).messages == messages


def test_refused_rows_are_counted_by_reason_with_their_places(tmp_path: Path) -> None:
    good = {"id": "a", "messages": [USER, ANSWER]}
    file = write(tmp_path / "a.jsonl", [good, {"messages": [USER]}, good, {"messages": [USER]}, 7])
    conversations, refusals = read(file)
    assert [c.id for c in conversations] == ["a"]
    assert refusals.counts == {"no assistant message": 2, "duplicate id": 1, "the row is not an object": 1}
    assert refusals.places["no assistant message"] == [f"{file}:2", f"{file}:4"]
    assert refusals.lines()[0] == f"2 x no assistant message ({file}:2, {file}:4)"


def test_ids_are_unique_over_all_files(tmp_path: Path) -> None:
    row = {"id": "a", "messages": [USER, ANSWER]}
    other = {"id": "b", "messages": [USER, ANSWER]}
    files = write(tmp_path / "a.jsonl", [row]), write(tmp_path / "b.jsonl", [row, other])
    conversations, refusals = read(*files)
    assert [c.id for c in conversations] == ["a", "b"]
    assert refusals.counts == {"duplicate id": 1}


def test_files_that_cannot_be_used_stop_the_run(tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(json.dumps({"messages": [USER, ANSWER]}).encode() * 2000)[:-20])
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"messages": []}\n{"messages": [')
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"id": "\xe9"}\n')
    fake = tmp_path / "fake.jsonl.gz"
    fake.write_text("{}")
    empty = write(tmp_path / "empty.jsonl", [])
    for files, message in [
        ([], "names no file"),
        ([str(tmp_path / "absent.jsonl")], "no such file.*absent.jsonl"),
        ([str(torn)], "torn.jsonl.gz"),
        ([str(broken)], "broken.jsonl:2 is not JSON"),
        ([str(latin)], "latin.jsonl:1 is not JSON"),
        ([str(fake)], "fake.jsonl.gz is damaged"),
        ([empty], "no usable conversation .it is empty"),
        ([write(tmp_path / "bad.jsonl", [{"messages": [USER]}])], "no usable conversation .row 1: no assistant"),
    ]:
        with pytest.raises(Refused, match=message):
            read(*files)
