"""On-policy conversations through an OpenAI-compatible server: filled once, resumed, packed."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from featurize.config import GenerateConfig, RouteConfig
from featurize.conversations import parse_row
from featurize.generate import fill_and_pack, plan_slots, repetition, user_turn_head
from models.errors import Refused


class Server:
    """A stub of a model server; requests are counted, the first `failures` of them fail."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.failures = 0
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.requests.append((self.path, body))
                if stub.failures > 0:
                    stub.failures -= 1
                    self.send_error(500)
                    return
                words = f" number {body['seed']} of the things that people ask"
                if self.path.endswith("/chat/completions"):
                    finish = "length" if body["seed"] % 2 else "stop"
                    choice = {"message": {"content": "an answer to" + words}, "finish_reason": finish}
                else:
                    long = body["seed"] % 3 == 0
                    choice = {"text": words, "finish_reason": "length" if long else "stop"}
                data = json.dumps({"choices": [choice]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


@pytest.fixture
def config(server: Server, tmp_path: Path) -> GenerateConfig:
    return GenerateConfig(
        url=server.url,
        output=str(tmp_path / "conversations.jsonl"),
        conversations=12,
        routes={"chat": RouteConfig([""], 2.0), "code": RouteConfig(["Write", "Explain"], 1.0)},
        concurrency=4,
    )


def packed(config: GenerateConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.open(config.output + ".gz", "rt")]


def test_every_slot_is_filled_by_the_target_and_packed(
    config: GenerateConfig, server: Server, tiny_target_dir: Path
) -> None:
    assert fill_and_pack(config, str(tiny_target_dir))
    rows = packed(config)
    wanted = sorted((slot.id.rpartition("-")[2], slot.id) for slot in plan_slots(config))
    assert [row["id"] for row in rows] == [name for _, name in wanted]
    assert sum(row["route"] == "chat" for row in rows) == 8
    prompts = [body["prompt"] for path, body in server.requests if path == "/v1/completions"]
    assert set(prompts) == {"<|im_start|>user\n", "<|im_start|>user\nWrite", "<|im_start|>user\nExplain"}
    # User turns that reached their bound were sampled again; answers that did are kept and say so.
    assert len(prompts) > len(rows)
    cut = [parse_row(row).cut for row in rows]
    assert {None, 1} == set(cut)


def test_a_second_launch_asks_nothing_and_a_stopped_one_goes_on(
    config: GenerateConfig, server: Server, tiny_target_dir: Path
) -> None:
    fill_and_pack(config, str(tiny_target_dir))
    whole, asked = Path(config.output + ".gz").read_bytes(), len(server.requests)
    assert not fill_and_pack(config, str(tiny_target_dir))
    assert len(server.requests) == asked
    lines = Path(config.output).read_bytes().splitlines(keepends=True)
    Path(config.output).write_bytes(b"".join(lines[:7]) + lines[7][:20])
    assert fill_and_pack(config, str(tiny_target_dir))
    assert Path(config.output + ".gz").read_bytes() == whole
    assert len(server.requests) < 2 * asked


def test_a_failing_request_is_tried_again(
    config: GenerateConfig, server: Server, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(_seconds: float) -> None: ...

    monkeypatch.setattr("featurize.generate.asyncio.sleep", at_once)
    server.failures = 3
    assert fill_and_pack(config, str(tiny_target_dir))
    assert len(packed(config)) == 12
    server.failures = 10**6
    Path(config.output).unlink()
    with pytest.raises(Refused, match="keeps failing"):
        fill_and_pack(config, str(tiny_target_dir))


def test_the_head_of_a_user_turn_is_the_templates_own(make_tokenizer: Any) -> None:
    template = "{{ bos_token }}[sys]{% for m in messages %}({{ m.role }}: {{ m.content }}){% endfor %}"
    assert user_turn_head(make_tokenizer(template, bos="<s>")) == "<s>[sys](user: "
    with pytest.raises(Refused, match="no chat template"):
        user_turn_head(make_tokenizer(None))
    with pytest.raises(Refused, match="does not render a user message as it is"):
        user_turn_head(make_tokenizer("{{ messages[0].content[:3] }}"))


def test_repetition_is_the_share_of_repeated_word_4_grams() -> None:
    assert repetition("one two three four five") == 0
    assert repetition("a b c d " * 20) > 0.9
