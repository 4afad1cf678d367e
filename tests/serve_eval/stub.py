"""A server that plays the interfaces of vLLM and SGLang: scripted streams, usage, counters and mishaps.

In a test it runs in a thread (`running(Behaviour(...))`); as a script it is the fake engine that servers.py
starts in place of `python -m vllm...`, told what to do by STUB_BEHAVIOUR (JSON) in its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Behaviour:
    """What the stub does.

    tokens_per_chunk tokens per chunk, chunk_ms apart, `tokens` in all; the answer's ids depend on the prompt
    alone. `mishap` maps a prompt's first id (or "any") to "http500", "error event", "hang", "cut", "mute" (headers,
    then the connection's end), "page" (200, but no stream), "slow" (a second before the first chunk), or "late" (waits
    for `Stub.go` before it). `own_figures` tells a request's own acceptance beside its usage; `headers` are sent with
    each answer. With `kind` "sglang" it is asked at /generate, and its chunks repeat the whole text, or with
    `increments` do not. Each request adds `queued_s` to the time spent in the queue. As a process it dies of the
    request after `die_after` others.
    """

    tokens: int = 12
    tokens_per_chunk: int = 4
    chunk_ms: float = 0.0
    usage: bool = True
    ids: bool = True
    empty_first_delta: bool = False
    empty_delay_ms: float = 0.0
    mishap: dict[str, str] = field(default_factory=dict)
    drafts: bool = True
    accepted_per_draft: int = 2
    reset_after: int | None = None
    change_answers: bool = False
    own_figures: bool = False
    kind: str = "vllm"
    increments: bool = False
    queued_s: float = 0.0
    model: str = "target"
    waiting: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    start_delay_s: float = 0.0
    fail_start: str | None = None
    spawn_child: str | None = None
    die_after: int | None = None
    ignore_sigterm: bool = False


class Stub(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], behaviour: Behaviour) -> None:
        super().__init__(address, Handler)
        self.behaviour = behaviour
        self.lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.drafted, self.accepted, self.created, self.served = 100, 250, 1.0, 0
        self.in_flight = self.most_in_flight = 0
        self.heard: list[dict[str, str]] = []
        self.queue_s, self.healthy, self.go = 0.0, True, threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Stub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _plain(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        stub = self.server
        sglang = stub.behaviour.kind == "sglang"
        if self.path == "/version" and not sglang:
            self._plain(200, '{"version": "0.0.stub"}')
        elif self.path == "/server_info" and sglang:
            self._plain(200, '{"version": "0.5.stub", "internal_states": [{"avg_spec_accept_length": 2.5}]}')
        elif self.path == "/v1/models":
            self._plain(200, json.dumps({"data": [{"id": stub.behaviour.model}]}))
        elif self.path == "/metrics" and sglang:
            self._plain(200, sglang_metrics(stub))
        elif self.path == "/metrics":
            self._plain(200, metrics(stub) if stub.behaviour.drafts else "# nothing here\n")
        elif self.path == "/health":
            self._plain(200 if stub.healthy else 503, "")
        else:
            self._plain(200, json.dumps({"path": self.path}))

    def _event(self, value: Any) -> None:
        data = (f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n").encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def do_POST(self) -> None:
        stub, behaviour = self.server, self.server.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with stub.lock:
            stub.bodies.append(body)
            if behaviour.die_after is not None and len(stub.bodies) > behaviour.die_after:
                os._exit(7)
            stub.heard.append({name.lower(): value for name, value in self.headers.items()})
            stub.in_flight += 1
            stub.most_in_flight = max(stub.most_in_flight, stub.in_flight)
        try:
            prompt = body["input_ids"] if self.path == "/generate" else body["prompt"]
            mishap = behaviour.mishap.get(str(prompt[0]), behaviour.mishap.get("any"))
            if self.path == "/generate":
                self._generate(body, behaviour, mishap)
            else:
                self._answer(body, behaviour, mishap)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            with stub.lock:
                stub.in_flight -= 1

    def _answer(self, body: dict[str, Any], behaviour: Behaviour, mishap: str | None) -> None:
        if mishap == "http500":
            self._plain(500, '{"error": {"message": "the engine is out of order"}}')
            return
        if mishap == "page":
            self._plain(200, '<html>{"error": "come back later"}</html>')
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        for name, value in behaviour.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if mishap == "mute":
            self.close_connection = True
            return
        if mishap == "slow":
            time.sleep(1)
        if mishap == "late":
            self.server.go.wait(60)
        if behaviour.empty_first_delta:
            self._event(
                {"choices": [{"text": "", "finish_reason": None} | ({"token_ids": []} if behaviour.ids else {})]}
            )
            time.sleep(behaviour.empty_delay_ms / 1e3)
        count = min(behaviour.tokens, body["max_tokens"])
        first = sum(body["prompt"]) + (1 if behaviour.change_answers else 0)
        answer = [1000 + first + index for index in range(count)]
        for start in range(0, count, behaviour.tokens_per_chunk):
            if mishap == "hang":
                time.sleep(60)
            if mishap == "error event" and start:
                self._event({"error": {"message": "the engine fell over", "code": 500}})
                return
            if mishap == "cut" and start:
                self.wfile.write(b"0\r\n\r\n")
                return
            if start or not behaviour.empty_first_delta:
                time.sleep(behaviour.chunk_ms / 1e3)
            ids = answer[start : start + behaviour.tokens_per_chunk]
            last = start + behaviour.tokens_per_chunk >= count
            choice: dict[str, Any] = {"text": "".join(f" w{token}" for token in ids)}
            choice["finish_reason"] = "length" if last else None
            self._event({"choices": [choice | ({"token_ids": ids} if behaviour.ids else {})]})
        self._book(behaviour)
        if behaviour.usage:
            per = behaviour.accepted_per_draft
            drafted: dict[str, Any] = {"num_spec_steps": 10, "num_accepted_draft_tokens": 10 * per}
            drafted |= {"num_draft_tokens": 40, "acceptance_histogram": [10 * (place == per) for place in range(5)]}
            told = {"metrics": {"speculative_decoding": drafted}} if behaviour.own_figures else {}
            self._event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": count}} | told)
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _generate(self, body: dict[str, Any], behaviour: Behaviour, mishap: str | None) -> None:
        """SGLang's own stream: the whole answer so far (or an increment) and its counts in meta_info."""
        if mishap == "http500":
            self._plain(500, '{"error": {"message": "the engine is out of order"}}')
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count = min(behaviour.tokens, body["sampling_params"]["max_new_tokens"])
        answer = [1000 + sum(body["input_ids"]) + behaviour.change_answers + index for index in range(count)]
        per = behaviour.accepted_per_draft
        counts: dict[str, Any] = {
            "spec_verify_ct": 10,
            "spec_num_proposed_drafts": 40,
            "spec_num_correct_drafts": 10 * per,
        }
        counts |= {"spec_accept_length": 1 + per, "spec_correct_drafts_histogram": [0] * per + [10]}
        if behaviour.empty_first_delta:
            self._event({"text": "", "output_ids": [], "meta_info": {"completion_tokens": 0, "finish_reason": None}})
            time.sleep(behaviour.empty_delay_ms / 1e3)
        for start in range(0, count, behaviour.tokens_per_chunk):
            if mishap == "hang":
                time.sleep(60)
            end = min(start + behaviour.tokens_per_chunk, count)
            said = answer[start if behaviour.increments else 0 : end]
            meta: dict[str, Any] = {"prompt_tokens": 3, "finish_reason": None}
            if behaviour.usage:
                meta["completion_tokens"] = end
            if end == count:
                meta["finish_reason"] = {"type": "length", "length": count}
                meta |= counts if behaviour.drafts and behaviour.own_figures else {}
            if mishap == "abort" and start:
                meta["finish_reason"] = {"type": "abort", "message": "the request was thrown out"}
            time.sleep(behaviour.chunk_ms / 1e3)
            self._event({"text": "".join(f" w{token}" for token in said), "output_ids": said, "meta_info": meta})
        self._book(behaviour)
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _book(self, behaviour: Behaviour) -> None:
        stub = self.server
        with stub.lock:
            stub.served += 1
            stub.queue_s += behaviour.queued_s
            stub.drafted += 10
            stub.accepted += 10 * behaviour.accepted_per_draft
            if behaviour.reset_after is not None and stub.served == behaviour.reset_after:
                stub.drafted = stub.accepted = 0


def metrics(stub: Stub) -> str:
    name, labels = "vllm:spec_decode_num", 'engine="0",model_name="target"'
    per = stub.behaviour.accepted_per_draft
    lines = [f"vllm:num_requests_running{{{labels}}} 0.0"]
    lines.append(f"vllm:num_requests_waiting{{{labels}}} {float(stub.behaviour.waiting)}")
    lines.append(f"vllm:request_queue_time_seconds_sum{{{labels}}} {stub.queue_s}")
    lines.append(f"vllm:request_queue_time_seconds_count{{{labels}}} {float(stub.served)}")
    for suffix, value in (
        ("drafts", stub.drafted),
        ("draft_tokens", 4 * stub.drafted),
        ("accepted_tokens", stub.accepted),
    ):
        lines += [f"# TYPE {name}_{suffix}_total counter", f"{name}_{suffix}_total{{{labels}}} {float(value)}"]
        lines += [f"# TYPE {name}_{suffix}_created gauge", f"{name}_{suffix}_created{{{labels}}} {stub.created}"]
    lines.append(f"# TYPE {name}_accepted_tokens_per_pos_total counter")
    for position in range(4):
        value = stub.drafted if position < per else 0
        lines.append(f'{name}_accepted_tokens_per_pos_total{{{labels},position="{position}"}} {float(value)}')
    return "\n".join(lines) + "\n"


def sglang_metrics(stub: Stub) -> str:
    labels = 'model_name="target"'
    lines = [f"sglang:num_running_reqs{{{labels}}} 0.0", f"sglang:num_queue_reqs{{{labels}}} 0.0"]
    lines.append(f"sglang:queue_time_seconds_sum{{{labels}}} {stub.queue_s}")
    lines.append(f"sglang:queue_time_seconds_count{{{labels}}} {float(stub.served)}")
    if stub.behaviour.drafts:
        lines.append(f"sglang:spec_accept_length{{{labels}}} 2.5")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def running(behaviour: Behaviour) -> Iterator[tuple[str, Stub]]:
    """The stub's base URL and itself, served from a thread."""
    stub = Stub(("127.0.0.1", 0), behaviour)
    thread = threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{stub.server_address[1]}", stub
    finally:
        stub.shutdown()
        stub.server_close()


def bench(options: list[str]) -> None:
    """The fake `vllm bench serve`: it asks nothing, and tells what STUB_BENCH (JSON) says, its own prompts beside."""
    values = dict(zip(options, options[1:], strict=False))
    with open(values["--dataset-path"]) as handle:
        rows = [json.loads(line) for line in handle]
    told = {"completed": len(rows), "input_lens": [len(row["prompt"].split()) for row in rows]}
    told |= {"output_throughput": 100.0, "ttfts": [0.02] * len(rows), "generated_texts": [""] * len(rows)}
    told |= json.loads(os.environ.get("STUB_BENCH", "{}"))
    if "fails" in told:
        sys.exit(f"ValueError: {told['fails']}")
    with open(os.environ["STUB_STARTS"], "a") as handle:
        handle.write(json.dumps({"arguments": options, "rows": rows}) + "\n")
    with open(os.path.join(values["--result-dir"], values["--result-filename"]), "w") as handle:
        json.dump(told, handle)


def main() -> None:
    """The fake engine: `stub.py -m vllm.entrypoints.openai.api_server ... --port N`, or its benchmark with `-c`."""
    arguments = sys.argv[1:]
    if arguments[0] == "-c" and len(arguments) == 2:  # asked whether the engine is in its environment
        return
    if arguments[0] == "-c":
        bench(arguments[2:])
        return
    behaviour = Behaviour(**json.loads(os.environ.get("STUB_BEHAVIOUR", "{}")))
    if starts := os.environ.get("STUB_STARTS"):
        with open(starts, "a") as handle:
            handle.write(json.dumps({"arguments": arguments, "cwd": os.getcwd(), "pid": os.getpid()}) + "\n")
    if behaviour.ignore_sigterm:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour.spawn_child is not None:  # an engine worker that does not care about its parent
        script = "trap '' TERM; while :; do sleep 0.1; done"
        child = subprocess.Popen(["sh", "-c", script])
        with open(behaviour.spawn_child, "w") as handle:
            handle.write(str(child.pid))
    if behaviour.fail_start is not None:
        print(behaviour.fail_start, flush=True)
        sys.exit(1)
    time.sleep(behaviour.start_delay_s)
    speculative = "--speculative-config" in arguments or "--speculative-algorithm" in arguments
    behaviour.kind = "sglang" if "sglang.launch_server" in arguments else "vllm"
    behaviour.drafts = behaviour.drafts and speculative
    behaviour.change_answers = behaviour.change_answers and speculative
    port = int(arguments[arguments.index("--port") + 1])
    print("INFO 01-01 00:00:00 [stub.py:1] ready", flush=True)
    Stub(("127.0.0.1", port), behaviour).serve_forever()


if __name__ == "__main__":
    main()
