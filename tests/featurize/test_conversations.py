"""Rows in, conversations out; nothing is lost without being counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from featurize.config import DataConfig, SourceConfig
from featurize.conversations import Refusals, Unusable, parse_row
from featurize.sources import describe_sources, read_conversations
from models.errors import Refused

USER = {"role": "user", "content": "question"}
ANSWER = {"role": "assistant", "content": "answer"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def write(path: Path, rows: list[Any]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def read(*files: str) -> tuple[list[Any], Refusals]:
    refusals = Refusals()
    return list(read_conversations(DataConfig(list(files)), refusals)), refusals


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
        ({"messages": [USER, {"role": "assistant", "content": ["x"]}]}, "content of an assistant message is list"),
        ({"messages": [USER, ANSWER], "route": 3}, "route is not text"),
        ({"messages": [USER, ANSWER], "id": 1.5}, "id is neither"),
        ({"messages": ["x"]}, "a message is not an object"),
        ({"messages": [ANSWER, USER]}, "its only assistant message answers nothing"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "content of an assistant message is NoneType"),
        ({"messages": [USER, ANSWER | {"tool_calls": [{"name": "f", "arguments": "{"}]}]}, "tool calls are not"),
        ({"messages": [USER, ANSWER | {"tool_calls": [7]}]}, "tool calls are not"),
        ({"messages": [USER, ANSWER | {"reasoning_content": ["x"]}]}, "reasoning of an assistant message is list"),
        ({"messages": [USER, ANSWER | {"token_ids": [1.5]}]}, "token_ids of an assistant message"),
        ({"messages": [USER, ANSWER], "tools": "[{"}, "tools is text that is not JSON"),
    ],
)
def test_b08_a_row_that_cannot_be_used_says_why(row: Any, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        parse_row(row)


def test_b08_tool_turns_and_unusual_orders_are_accepted() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    messages = [ANSWER, USER, USER, call, {"role": "tool", "content": "42"}, ANSWER]
    assert parse_row({"messages": messages}).messages == messages


@pytest.mark.parametrize(
    "calls",
    [
        [{"function": {"name": "f", "arguments": {"x": 1}}}],
        [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        [{"name": "f", "arguments": '{"x": 1}'}],
        '[{"name": "f", "arguments": {"x": 1}}]',
    ],
)
def test_b08_a_tool_call_has_an_object_as_arguments_and_no_text_is_empty_text(calls: Any) -> None:
    row = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": calls}]}
    (_, message) = parse_row(row).messages
    assert message == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_reasoning_token_ids_tools_and_template_arguments_are_kept() -> None:
    answer = ANSWER | {"reasoning": "hm", "token_ids": [5, 2], "weight": 1}
    row = {"messages": [USER, answer], "tools": '[{"name": "f"}]', "chat_template_kwargs": {"enable_thinking": False}}
    conversation = parse_row(row)
    assert conversation.messages[1] == ANSWER | {"reasoning_content": "hm", "token_ids": [5, 2]}
    assert conversation.tools == [{"name": "f"}]
    assert conversation.template_arguments == {"enable_thinking": False}


def test_a_row_that_will_be_answered_needs_a_users_message_only() -> None:
    assert parse_row({"messages": [USER]}, prompts=True).messages == [USER]
    with pytest.raises(Unusable, match="no user message"):
        parse_row({"messages": [ANSWER]}, prompts=True)


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
        ([write(tmp_path / "bad.jsonl", [{"messages": [USER]}])], "no usable conversation .*bad.jsonl:1: no assistant"),
    ]:
        with pytest.raises(Refused, match=message):
            read(*files)


def columnar(path: Path, rows: list[dict[str, Any]]) -> str:
    """The rows as a .parquet or .arrow file, or as a folder saved by `datasets`."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".arrow":
        writer = pyarrow.ipc.new_file if "file" in path.name else pyarrow.ipc.new_stream
        with writer(path, table.schema) as out:
            out.write_table(table)
    elif path.name == "saved":
        datasets.Dataset(table).save_to_disk(str(path))
    elif path.name == "dictionary":
        datasets.DatasetDict({"train": datasets.Dataset(table)}).save_to_disk(str(path))
    else:
        path.mkdir()
        pyarrow.parquet.write_table(table, path / "train.parquet")
    return str(path)


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow", "saved", "dictionary", "files"])
def test_columnar_files_and_folders_give_what_json_lines_give(tmp_path: Path, name: str) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    # Columns have the keys of all rows: what a row does not have is null there, and absent here.
    one, other = {"chat_template_kwargs": {"x": 1}}, {"chat_template_kwargs": {"y": [{"z": 2}, {"w": 3}]}}
    rows: list[dict[str, Any]] = [{"id": "a", "route": "code", "messages": [USER, call], **one}]
    rows += [{"id": "b", "messages": [USER], **one}, {"id": "c", "messages": [USER, ANSWER], **other}]
    wanted, _ = read(write(tmp_path / "a.jsonl", rows))
    found, refusals = read(columnar(tmp_path / name, rows))
    assert [vars(c) | {"source": ""} for c in found] == [vars(c) | {"source": ""} for c in wanted]
    assert refusals.places == {"no assistant message": [f"{tmp_path / name}:2"]}


def test_a_name_that_is_no_path_is_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(name: str, *, repo_type: str) -> str:
        assert (name, repo_type) == ("owner/chats", "dataset")
        return columnar(tmp_path / "files", [{"id": "a", "messages": [USER, ANSWER]}])

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    conversations, _ = read("owner/chats")
    assert [c.id for c in conversations] == ["a"]


def test_a_name_that_nobody_knows_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(Refused, match=r"owner/chats, nor is it a data set reachable on the hub .no network"):
        read("owner/chats")
    folder = columnar(tmp_path / "files", [{"id": "a", "messages": [USER, ANSWER]}])
    with pytest.raises(Refused, match="split test: Bad split"):
        list(read_conversations(DataConfig(mixture={"a": SourceConfig([folder], split="test")}), Refusals()))
    (tmp_path / "no.parquet").write_bytes(b"text")
    with pytest.raises(Refused, match=r"no.parquet is damaged after row 0, or no .parquet file"):
        read(str(tmp_path / "no.parquet"))


def mixture(tmp_path: Path, **weights: float) -> DataConfig:
    """Sources of 30 conversations each; those of `a` name their route themselves."""
    sources = {}
    for name, weight in weights.items():
        rows = [
            {"id": f"{name}{i}", "messages": [USER, ANSWER]} | ({"route": "own"} if name == "a" else {})
            for i in range(30)
        ]
        sources[name] = SourceConfig([write(tmp_path / f"{name}.jsonl", rows)], weight, route=f"of-{name}")
    return DataConfig(mixture=sources)


def test_a_mixture_has_its_shares_from_the_beginning_and_ends_with_the_first_source(tmp_path: Path) -> None:
    data = mixture(tmp_path, a=3, b=1, c=2)
    ids = [c.id for c in read_conversations(data, Refusals())]
    for count in range(6, len(ids), 6):
        shares = [sum(name.startswith(letter) for name in ids[:count]) for letter in "abc"]
        assert shares == [count // 2, count // 6, count // 3]
    assert 60 <= len(ids) < 66
    assert [name for name in ids if name[0] == "b"] == [f"b{i}" for i in range(10)]
    routes = {c.id[0]: c.route for c in read_conversations(data, Refusals())}
    assert routes == {"a": "own", "b": "of-b", "c": "of-c"}


def test_what_is_read_is_described_by_contents(tmp_path: Path) -> None:
    (tmp_path / "same").mkdir()
    (tmp_path / "other").mkdir()
    data, again = mixture(tmp_path, a=3, b=1), mixture(tmp_path / "same", a=3, b=1)
    assert describe_sources(data) == describe_sources(again) != describe_sources(mixture(tmp_path / "other", a=3, b=2))
    folder = columnar(tmp_path / "files", [{"id": "a", "messages": [USER, ANSWER]}])
    before = describe_sources(DataConfig([folder]))
    (tmp_path / "files/more.parquet").write_bytes((tmp_path / "files/train.parquet").read_bytes())
    assert describe_sources(DataConfig([folder])) != before


def test_mixtures_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"data.mixture.a needs paths and a weight above 0"):
        DataConfig(mixture={"a": SourceConfig(["x"], 0)})
    with pytest.raises(Refused, match=r"no such file: absent.jsonl .data.mixture.a.paths;"):
        list(read_conversations(DataConfig(mixture={"a": SourceConfig(["absent.jsonl"])}), Refusals()))
    with pytest.raises(ValueError, match="exclude each other"):
        DataConfig(["x"], mixture={"a": SourceConfig(["x"])})
    with pytest.raises(ValueError, match="data.turns=some is not one of all, split, last"):
        DataConfig(["x"], turns="some")


def test_template_arguments_of_the_run_give_way_to_a_rows_own(tmp_path: Path) -> None:
    rows = [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinking": True}},
    ]
    data = DataConfig([write(tmp_path / "a.jsonl", rows)], chat_template_kwargs={"enable_thinking": False, "x": 1})
    told = [c.template_arguments for c in read_conversations(data, Refusals())]
    assert told == [{"enable_thinking": False, "x": 1}, {"enable_thinking": True, "x": 1}]
