"""On-policy conversations: filled once, resumed without loss or repetition, packed in order, whoever speaks."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from featurize.claims import Claims
from featurize.config import GenerateConfig, RouteConfig
from featurize.conversations import Unusable, parse_row
from featurize.exchanges import repetition, user_turn_head
from featurize.generate import failed_file, fill_and_pack, plan_slots
from featurize.rows import Rows, append
from featurize.spans import Renderer
from featurize.speakers import Servers
from featurize.tokenised import load_renderer
from models.config import TargetConfig
from models.errors import Refused
from models.target import describe_target


class Server:
    """A stub of a model server. It answers with words that hold the seed; `status(text)` says with which status."""

    def __init__(self, renderer: Renderer) -> None:
        self.requests: list[dict[str, Any]] = []
        self.status: Any = lambda _text: 200
        stub, tokenizer = self, renderer.tokenizer

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = tokenizer.decode(body["prompt"])
                stub.requests.append(body | {"path": self.path, "text": text})
                if (status := stub.status(text)) != 200:
                    self.send_error(status)
                    return
                words, seed = f" number {body['seed']} of the things that people ask", body["seed"]
                if text.endswith("<|im_start|>assistant\n"):
                    words, cut = "an answer to" + words, seed % 5 == 0
                else:
                    cut = seed % 3 == 0
                ids = tokenizer(words)["input_ids"] + ([] if cut else [renderer.closing])
                choice = {"text": words, "finish_reason": "length" if cut else "stop", "token_ids": ids}
                data = json.dumps({"choices": [choice]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> TargetConfig:
    return TargetConfig(path=str(tiny_target_dir), dtype="float32")


@pytest.fixture(scope="module")
def renderer(target: TargetConfig) -> Renderer:
    return load_renderer(describe_target(target), target)


@pytest.fixture
def servers(renderer: Renderer) -> Iterator[list[Server]]:
    servers = [Server(renderer), Server(renderer)]
    threads = [threading.Thread(target=server.http.serve_forever, args=(0.05,)) for server in servers]
    for thread in threads:
        thread.start()
    yield servers
    for server, thread in zip(servers, threads, strict=True):
        server.http.shutdown()
        thread.join()
        server.http.server_close()


@pytest.fixture
def server(servers: list[Server]) -> Server:
    return servers[0]


@pytest.fixture
def config(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GenerateConfig:
    async def at_once(_seconds: float) -> None: ...

    monkeypatch.setattr("featurize.speakers.asyncio.sleep", at_once)
    return GenerateConfig(
        chat_template_kwargs={},
        urls=[server.url],
        output=str(tmp_path / "conversations.jsonl"),
        conversations=12,
        routes={"chat": RouteConfig([""], 2.0), "code": RouteConfig(["Write", "Explain"], 1.0)},
        concurrency=4,
    )


def packed(config: GenerateConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.open(config.output + ".gz", "rt")]


def failed(config: GenerateConfig) -> dict[str, str]:
    file = failed_file(Path(config.output))
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {row["id"]: row["reason"] for row in rows}


def test_every_slot_is_filled_by_the_target_and_packed_in_the_order_of_the_plan(
    config: GenerateConfig, server: Server, target: TargetConfig, renderer: Renderer
) -> None:
    assert fill_and_pack(config, target)
    rows = packed(config)
    assert [row["id"] for row in rows] == [slot.id for slot in plan_slots(config)]
    assert sum(row["route"] == "chat" for row in rows) == 8
    prompts = [r["text"] for r in server.requests if not r["text"].endswith("assistant\n")]
    assert set(prompts) == {"<|im_start|>user\n", "<|im_start|>user\nWrite", "<|im_start|>user\nExplain"}
    # User turns that reached their bound were sampled again; answers that did are kept and say so.
    assert len(prompts) > len(rows)
    for row in rows:
        conversation = parse_row(row)
        rendered = renderer.render(conversation, 10_000)
        ((start, end),) = rendered.spans
        assert list(rendered.ids[start:end]) == row["messages"][-1]["token_ids"]
        assert (rendered.ids[end - 1] == renderer.closing) == (conversation.cut is None)


def test_a_second_launch_asks_nothing_and_a_stopped_one_goes_on(
    config: GenerateConfig, server: Server, target: TargetConfig
) -> None:
    fill_and_pack(config, target)
    whole, asked = Path(config.output + ".gz").read_bytes(), len(server.requests)
    assert not fill_and_pack(config, target)
    assert len(server.requests) == asked
    lines = Path(config.output).read_bytes().splitlines(keepends=True)
    Path(config.output).write_bytes(b"".join(lines[:7]) + lines[7][:20])
    assert fill_and_pack(config, target)
    assert Path(config.output + ".gz").read_bytes() == whole
    assert len(server.requests) < 2 * asked


COMPLETION = {"choices": [{"text": "text", "token_ids": [1], "finish_reason": "stop"}]}

FILL = """
import json, sys
from featurize.config import GenerateConfig, RouteConfig
from featurize.generate import fill_and_pack
from models.config import TargetConfig
settings = json.loads(sys.argv[1])
settings["routes"] = {name: RouteConfig(**route) for name, route in settings["routes"].items()}
fill_and_pack(GenerateConfig(**settings), TargetConfig(path=sys.argv[2], dtype="float32"))
"""


def test_servers_of_its_own_are_started_only_when_something_is_missing_and_always_stopped(
    config: GenerateConfig, server: Server, target: TargetConfig
) -> None:
    told: list[str] = []

    @contextlib.contextmanager
    def own() -> Iterator[list[str]]:
        told.append("started")
        try:
            yield [server.url]
        finally:
            told.append("stopped")

    config.urls = ["http://127.0.0.1:9/v1"]
    server.status = lambda _text: 500
    with pytest.raises(Refused):
        fill_and_pack(config, target, own)
    server.status = lambda _text: 200
    assert fill_and_pack(config, target, own)
    assert not fill_and_pack(config, target, own)
    assert told == ["started", "stopped"] * 2


def test_processes_at_once_share_the_slots_and_ask_for_none_twice(
    config: GenerateConfig, server: Server, target: TargetConfig
) -> None:
    config.conversations, config.concurrency = 60, 2
    arguments = [sys.executable, "-c", FILL, json.dumps(asdict(config)), target.path]
    processes = [subprocess.Popen(arguments) for _ in range(2)]
    assert [process.wait(300) for process in processes] == [0, 0]
    assert [row["id"] for row in packed(config)] == [slot.id for slot in plan_slots(config)]
    asked = Counter((request["text"], request["seed"]) for request in server.requests)
    assert set(asked.values()) == {1}
    # What they made together is what one would have made.
    together = Path(config.output + ".gz").read_bytes()
    config.output += ".alone"
    assert fill_and_pack(config, target)
    assert Path(config.output + ".gz").read_bytes() == together


def test_what_a_process_had_begun_is_made_by_another_when_it_dies(
    config: GenerateConfig, server: Server, target: TargetConfig
) -> None:
    claims = Path(config.output).with_name(f".{Path(config.output).name}.claims")
    hold = "claims = Claims(Path(sys.argv[1])); held = claims.unit(3, wait=True); held.__enter__()"
    script = (
        f"import sys; from pathlib import Path; from featurize.claims import Claims; {hold}; print('held', flush=True)"
    )
    arguments = [sys.executable, "-c", f"{script}; input()", str(claims)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"

        def die_when_the_rest_is_done() -> None:
            while not Path(config.output).exists() or Path(config.output).read_text().count("\n") < 11:
                time.sleep(0.01)
            other.kill()

        killer = threading.Thread(target=die_when_the_rest_is_done, daemon=True)
        killer.start()
        assert fill_and_pack(config, target)
    last = Path(config.output).read_text().splitlines()[-1]
    assert json.loads(last)["id"] == plan_slots(config)[3].id
    assert len(packed(config)) == 12


def test_a_row_that_a_killed_process_left_half_written_is_dropped_by_the_next_append(tmp_path: Path) -> None:
    file, claims = tmp_path / "rows.jsonl", Claims(tmp_path / "claims")
    append(file, {"id": 1}, claims)
    rows = Rows(file)
    file.write_bytes(file.read_bytes() + b'{"id": 2, "te')
    assert rows.new() == [{"id": 1}]
    append(file, {"id": 3}, claims)
    assert rows.new() == [{"id": 3}]
    assert Rows(file).new() == [{"id": 1}, {"id": 3}]


def test_a_slot_that_is_given_up_is_recorded_and_not_asked_for_again(
    config: GenerateConfig, server: Server, target: TargetConfig
) -> None:
    server.status = lambda text: 400 if "Explain" in text else 200
    assert fill_and_pack(config, target)
    assert set(failed(config)) == {"code-00001", "code-00003"}
    assert all("refuses it" in reason for reason in failed(config).values())
    assert len(packed(config)) == 10
    asked = len(server.requests)
    assert not fill_and_pack(config, target)
    assert len(server.requests) == asked
    # With that file gone they are asked for again.
    failed_file(Path(config.output)).unlink()
    server.status = lambda _text: 200
    assert fill_and_pack(config, target)
    assert [row["id"] for row in packed(config)] == [slot.id for slot in plan_slots(config)]


def test_a_request_that_keeps_failing_does_not_stop_the_others(
    config: GenerateConfig, server: Server, target: TargetConfig
) -> None:
    server.status = lambda text: 500 if "Explain" in text else 200
    assert fill_and_pack(config, target)
    assert set(failed(config)) == {"code-00001", "code-00003"}
    assert all("keeps failing" in reason for reason in failed(config).values())
    assert sum("Explain" in r["text"] for r in server.requests) == 8


def test_servers_that_answer_nobody_stop_the_run_and_nothing_is_lost(
    config: GenerateConfig, server: Server, target: TargetConfig
) -> None:
    server.status = lambda _text: 500
    with pytest.raises(Refused, match=r"keeps failing: .*; generate\.urls names the servers"):
        fill_and_pack(config, target)
    assert not failed(config)
    server.status = lambda _text: 200
    assert fill_and_pack(config, target)
    assert len(packed(config)) == 12


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (404, {"error": {"message": "The model `target` does not exist.", "code": 404}}, "The model `target` does not"),
        (404, {"object": "error", "message": "no such model"}, "no such model"),
        (404, {"detail": "Not Found"}, "Not Found"),
        (401, {"error": "Unauthorized"}, '{"error":"Unauthorized"}'),
    ],
)
def test_a_server_that_refuses_every_request_is_told_of_at_once_in_its_own_words(
    status: int, body: dict[str, Any], told: str, config: GenerateConfig
) -> None:
    asked: list[httpx.Request] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(status, json=body)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(refuse)) as client:
            await Servers(config, client).complete([1])

    with pytest.raises(
        Refused, match=f"answers {status}: {re.escape(told)}.*generate.urls names the servers"
    ) as refusal:
        asyncio.run(ask())
    assert ("generate.model=target must be the name" in str(refusal.value)) == (status == 404)
    assert len(asked) == 1


def test_many_servers_share_the_work_and_one_that_fails_is_replaced(
    config: GenerateConfig, servers: list[Server], target: TargetConfig
) -> None:
    config.urls = [server.url for server in servers]
    assert fill_and_pack(config, target)
    counts = [len(server.requests) for server in servers]
    assert min(counts) > 0.2 * sum(counts)
    Path(config.output).unlink()
    servers[0].status = lambda _text: 503
    assert fill_and_pack(config, target)
    assert len(packed(config)) == 12
    assert not failed(config)


def test_a_request_waits_while_all_servers_rest(config: GenerateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    async def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("featurize.speakers.asyncio.sleep", sleep)
    monkeypatch.setattr("featurize.speakers.time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def ask(count: int) -> int:
        config.urls = [f"http://{number}/v1" for number in range(count)]
        transport = httpx.MockTransport(lambda _request: httpx.Response(503 if clock[0] < 2 else 200, json=COMPLETION))
        async with httpx.AsyncClient(transport=transport) as client:
            return len((await Servers(config, client).complete([1])).text)

    for count in (1, 2):
        clock[0] = 0.0
        assert asyncio.run(ask(count)) == 4


def test_each_answer_conditions_the_next_user_turn_with_its_routes_settings(
    config: GenerateConfig, server: Server, target: TargetConfig
) -> None:
    config.sampled_share = 1.0
    config.routes = {"chat": RouteConfig(turns=3, temperature=0.3, top_p=0.7, chat_template_kwargs={"think": False})}
    config.chat_template_kwargs = {"think": True, "effort": "low"}
    assert fill_and_pack(config, target)
    rows, texts = packed(config), [r["text"] for r in server.requests]
    assert max(len(row["messages"]) for row in rows) == 6
    for row in rows:
        assert row["chat_template_kwargs"] == {"think": False, "effort": "low"}
        history = ""
        for user, answer in zip(row["messages"][::2], row["messages"][1::2], strict=True):
            assert history + "<|im_start|>user\n" in texts
            history += f"<|im_start|>user\n{user['content']}<|im_end|>\n<|im_start|>assistant\n"
            assert history in texts
            history += answer["content"] + "<|im_end|>\n"
        assert len(row["messages"]) == 6 or "finish_reason" in row["messages"][-1]
    answers = [r for r in server.requests if r["text"].endswith("assistant\n")]
    assert {(r["temperature"], r["top_p"]) for r in answers} == {(0.3, 0.7)}


@pytest.mark.parametrize("refuses", ["server", "template"])
def test_a_turn_that_is_refused_ends_its_conversation_and_the_turns_before_it_stay(
    refuses: str, config: GenerateConfig, server: Server, target: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the server, since it is too long, say; by the chat template, for the order of its messages."""
    text = Renderer.text

    def of_one_turn(renderer: Renderer, messages: Any, **how: Any) -> str:
        if sum(message["role"] == "user" for message in messages) > 1:
            raise Unusable("the chat template refuses it: one question at a time")
        return text(renderer, messages, **how)

    if refuses == "template":
        monkeypatch.setattr(Renderer, "text", of_one_turn)
    else:
        server.status = lambda text: 400 if text.count("user\n") > 1 else 200
    config.routes = {"chat": RouteConfig(turns=3)}
    assert fill_and_pack(config, target)
    assert failed(config) == {}
    assert [[m["role"] for m in row["messages"]] for row in packed(config)] == [["user", "assistant"]] * 12


def test_what_the_template_refuses_at_once_is_recorded_and_stops_nothing_else(
    config: GenerateConfig, target: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Renderer.text

    def without_thoughts(renderer: Renderer, messages: Any, **how: Any) -> str:
        if how.get("arguments"):
            raise Unusable("the chat template refuses it: it knows no think")
        return text(renderer, messages, **how)

    monkeypatch.setattr(Renderer, "text", without_thoughts)
    config.routes = {"chat": RouteConfig(), "deep": RouteConfig(chat_template_kwargs={"think": True})}
    assert fill_and_pack(config, target)
    assert len(packed(config)) == 6
    assert set(failed(config).values()) == {"the chat template refuses it: it knows no think"}


def test_what_is_wrong_with_prompts_is_told_of_the_option_that_names_them(
    config: GenerateConfig, target: TargetConfig, tiny_prompts: Path
) -> None:
    for prompts in (["questons.jsonl"], [str(tiny_prompts), "questons.jsonl"]):
        config.prompts, config.conversations = prompts, 1
        with pytest.raises(Refused, match=r"no such file: questons.jsonl .generate.prompts; relative paths"):
            fill_and_pack(config, target)


def test_prompts_from_a_source_are_answered_in_place(
    config: GenerateConfig, server: Server, target: TargetConfig, tmp_path: Path
) -> None:
    def message(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    system, one, two = message("system", "be kind"), message("user", "one"), message("user", "two")
    rows = [
        {"id": "z", "route": "code", "messages": [system, one, message("assistant", "not the target's"), two]},
        {"id": "a", "messages": [one, two]},
        {"id": "none", "messages": [system]},
        {"id": "t", "messages": [one, message("assistant", "call"), message("tool", "42"), two]},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.prompts, config.routes = [str(file)], {}
    # A seed by which no answer is cut.
    seeds = (seed for seed in range(1000) if all(s.seed(seed, at) % 5 for s in plan_slots(config) for at in range(4)))
    config.seed = next(seeds)
    assert fill_and_pack(config, target)
    made = packed(config)
    assert [row["id"] for row in made] == ["z", "a", "t"]
    assert [[m["role"] for m in row["messages"]] for row in made] == [
        ["system", "user", "assistant", "user", "assistant"],
        ["user", "user", "assistant"],
        ["user", "assistant"],
    ]
    answers = [m["content"] for row in made for m in row["messages"] if m["role"] == "assistant"]
    assert all(content.startswith("an answer") for content in answers)
    assert "not the target's" not in "".join(r["text"] for r in server.requests)


def test_without_a_server_the_target_answers_in_this_process(
    config: GenerateConfig, target: TargetConfig, renderer: Renderer, tiny_prompts: Path
) -> None:
    config.urls, config.prompts, config.max_answer_tokens, config.sampled_share = [], [str(tiny_prompts)], 6, 0.5
    assert fill_and_pack(config, target)
    first = packed(config)
    assert 0 < len(first) <= 6
    for row in first:
        answer = row["messages"][-1]
        assert renderer.tokenizer.decode(answer["token_ids"], skip_special_tokens=True) == answer["content"]
    Path(config.output).unlink()
    assert fill_and_pack(config, target)
    assert packed(config) == first


def test_another_target_or_other_settings_do_not_mix(
    config: GenerateConfig, target: TargetConfig, make_target: Any
) -> None:
    fill_and_pack(config, target)
    config.temperature, config.routes["code"].share = 0.1, 3.0
    changed = r"generate.routes.code.share .was 1.0, is 3.0., generate.temperature .was 0.8, is 0.1.; choose another"
    with pytest.raises(Refused, match=f"begun with other inputs: {changed} generate.output"):
        fill_and_pack(config, target)
    with pytest.raises(Refused, match="inputs: target configuration, "):
        fill_and_pack(config, TargetConfig(path=str(make_target(rms_norm_eps=1e-3)), dtype="float32"))


def test_the_head_of_a_user_turn_is_the_templates_own(make_tokenizer: Any) -> None:
    template = "{{ bos_token }}[sys]{% for m in messages %}({{ m.role }}: {{ m.content }}<|eot|>){% endfor %}"
    renderer = Renderer(make_tokenizer(template, bos="<s>"))
    assert user_turn_head(renderer) == "<s>[sys](user: "
    assert user_turn_head(renderer, [{"role": "assistant", "content": "x"}]) == "<s>[sys](assistant: x<|eot|>)(user: "
    with pytest.raises(Refused, match="does not render a user message as it is"):
        user_turn_head(Renderer(make_tokenizer("{% for m in messages %}{{ m.content[:3] }}<|eot|>{% endfor %}")))


def test_repetition_is_the_share_of_repeated_word_4_grams() -> None:
    assert repetition("one two three four five") == 0
    assert repetition("a b c d " * 20) > 0.9
