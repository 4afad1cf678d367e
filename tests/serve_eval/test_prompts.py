"""Prompts are rendered as the target expects them, and every bad row is named."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from featurize.conversations import Unusable
from featurize.exchanges import normalised
from featurize.spans import Renderer
from models.errors import Refused
from serve_eval.prompts import Prompt, by_route, load_prompts

DEMO = Path(__file__).parents[2] / "data/demo"
ROUTES = {"chat", "code", "math", "json", "summary", "rewriting"}


class Characters(Renderer):
    """A renderer whose ids are characters and whose template is easy to read."""

    def __init__(self) -> None:
        pass

    def text(self, messages: Any, *, generation: bool = False, tools: Any = None, arguments: Any = None) -> str:
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        if "poison" in text:
            raise Unusable("roles must alternate")
        return text + ("<assistant>" if generation else "") + (arguments or {}).get("mode", "")

    def ids(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def row(name: str = "a", content: str = "hi", **more: Any) -> dict[str, Any]:
    return {"id": name, "route": "chat", "messages": [{"role": "user", "content": content}]} | more


def test_prompts_end_where_the_assistant_begins(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", row("a", "hi"), "", row("b", "yo", chat_template_kwargs={"mode": "!"}))
    first, second = load_prompts([file], Characters())
    assert first == Prompt("a", "chat", tuple(map(ord, "<user>hi<assistant>")))
    assert "".join(map(chr, second.ids)) == "<user>yo<assistant>!"


def test_a_line_ends_where_json_lines_end_and_not_within_a_text(tmp_path: Path) -> None:
    said = "one\u2028two\x85three"
    file = tmp_path / "p.jsonl"
    file.write_bytes((json.dumps(row("a", said), ensure_ascii=False) + "\r\n").encode())
    (prompt,) = load_prompts([file], Characters())
    assert "".join(map(chr, prompt.ids)) == f"<user>{said}<assistant>"


def test_files_are_read_in_order_and_grouped_by_route(tmp_path: Path) -> None:
    one = write(tmp_path / "1.jsonl", row("z", route="x"), row("a", route="y"))
    two = write(tmp_path / "2.jsonl", row("m", route="x"))
    groups = by_route(load_prompts([one, str(two)], Characters()))
    assert {route: [prompt.id for prompt in group] for route, group in groups.items()} == {"x": ["z", "m"], "y": ["a"]}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{torn", "is not JSON"),
        ([1], "is not a JSON object"),
        ({"id": "b", "messages": []}, "has no route"),
        (row("", "x"), "has no id"),
        (row("b", route="all"), "has the route 'all'"),
        (row("b", messages=[]), "has no messages"),
        (row("b", messages=["x"]), "message without a role"),
        (row("b", messages=[{"role": "user", "content": None}]), "content is no string"),
        (row("b", messages=[{"role": "assistant", "content": "x"}]), "ends with role 'assistant'"),
        (row("b", chat_template_kwargs=["mode"]), "chat_template_kwargs that are no object"),
        (row("b", " \n"), "ends with an empty message"),
        (row("a", "again"), r"repeats the id 'a' of .*p\.jsonl:1"),
        (row("b", "poison"), "cannot be rendered.*must alternate"),
    ],
)
def test_a_bad_row_is_refused_with_its_file_and_number(tmp_path: Path, bad: Any, reason: str) -> None:
    file = write(tmp_path / "p.jsonl", row("a"), bad)
    with pytest.raises(Refused, match=rf"p\.jsonl:2 .*{reason}|p\.jsonl:2 {reason}"):
        load_prompts([file], Characters())


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no file .*nowhere\.jsonl"):
        load_prompts([tmp_path / "nowhere.jsonl"], Characters())
    with pytest.raises(Refused, match="names no file"):
        load_prompts([], Characters())
    with pytest.raises(Refused, match="holds no prompt"):
        load_prompts([write(tmp_path / "empty.jsonl")], Characters())


def demo_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DEMO / "prompts.jsonl").read_text().splitlines()]


def test_the_demo_has_at_least_sixteen_different_prompts_on_each_of_six_routes() -> None:
    rows = demo_rows()
    counts = Counter(row["route"] for row in rows)
    assert set(counts) >= ROUTES
    assert min(counts.values()) >= 16
    assert len(rows) >= 96
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({normalised(row["messages"][-1]["content"]) for row in rows}) == len(rows)
    assert len(load_prompts([DEMO / "prompts.jsonl"], Characters())) == len(rows)


def test_no_prompt_of_the_demo_is_in_its_training_set() -> None:
    packed = sorted(DEMO.glob("*.jsonl.gz"))
    if not packed:
        pytest.skip("the demo's conversations are not in this checkout")
    trained = set()
    for file in packed:
        for line in gzip.decompress(file.read_bytes()).decode().splitlines():
            trained |= {normalised(m["content"]) for m in json.loads(line)["messages"] if m["role"] == "user"}
    assert trained
    asked = {normalised(row["messages"][-1]["content"]): row["id"] for row in demo_rows()}
    assert not [asked[text] for text in asked.keys() & trained]
