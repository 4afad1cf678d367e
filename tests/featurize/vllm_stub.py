"""A server that plays vLLM with our connector: answers with the name of a file of planes, and with mishaps.

In a test it runs in a thread (`stub_server(...)`); as a script it is what `engine.python` starts, told what to do by
STUB_MISHAPS (JSON) in its environment. `mishaps` maps a document's number of tokens to what goes wrong with it:

    late        its file comes half a second after the answer         short       its file has one row too few
    torn        its file is written in two halves, under its name     other ids   its file says it is of other tokens
    never       its file never comes                                  float16     its planes are of another dtype
    500 once    the first request for it fails                        500, 400    every request for it fails
    no json     its answer is no JSON                                 hang        it is never answered
    die         the server is gone at once
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save


def made_up(ids: list[int], layers: int, hidden: int) -> torch.Tensor:
    """Planes [T, P, H] float32 that depend on token, position, plane and channel."""
    t, p, h = torch.meshgrid(torch.arange(len(ids)), torch.arange(layers), torch.arange(hidden), indexing="ij")
    return torch.sin(torch.tensor(ids)[:, None, None] + 0.1 * t + 2.0 * p + 0.7 * h) + 1.5


class Stub(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, directory: Path, layers: list[int], hidden: int, **more: Any) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.directory, self.layers, self.hidden = directory, layers, hidden
        self.mishaps: dict[str, str] = more.get("mishaps", {})
        self.planes: Callable[[list[int]], torch.Tensor] = more.get(
            "planes", lambda ids: made_up(ids, len(layers), hidden)
        )
        self.best: Callable[[list[int]], list[int]] = more.get("best", lambda ids: ids)
        self.facts = {"layers": layers, "dtype": "float32", "quantization": None} | more.get("facts", {})
        self.delay_s: float = more.get("delay_s", 0.0)
        self.lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.asked: Counter[int] = Counter()
        self.in_flight = self.most_in_flight = self.most_files = 0

    def handle_error(self, *_: Any) -> None:
        """A client that leaves is no news."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Stub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _plain(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        self._plain(200, '{"version": "0.0.stub"}' if self.path == "/version" else "")

    def do_POST(self) -> None:
        stub = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = body["prompt"]
        with stub.lock:
            stub.bodies.append(body)
            stub.asked[len(ids)] += 1
            stub.in_flight += 1
            stub.most_in_flight = max(stub.most_in_flight, stub.in_flight)
            stub.most_files = max(stub.most_files, len(list(stub.directory.iterdir())))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._answer(body, ids, stub.mishaps.get(str(len(ids)), ""))
        with stub.lock:
            stub.in_flight -= 1

    def _answer(self, body: dict[str, Any], ids: list[int], mishap: str) -> None:
        stub = self.server
        time.sleep(stub.delay_s * (1 + len(ids) % 3))
        if mishap == "die":
            print("ValueError: the engine met its end", flush=True)
            os._exit(9)
        if mishap == "hang":
            time.sleep(60)
        if mishap in ("400", "500") or (mishap == "500 once" and stub.asked[len(ids)] == 1):
            self._plain(int(mishap[:3]), '{"error": "out of order"}')
            return
        if mishap == "no json":
            self._plain(200, "hello")
            return
        name = f"{uuid.uuid4().hex}.safetensors"
        threading.Thread(target=self._write, args=(stub.directory / name, ids, mishap)).start()
        choice: dict[str, Any] = {"token_ids": stub.best(ids)[-1:]}
        if body.get("prompt_logprobs"):
            best = stub.best(ids)[:-1]
            choice["prompt_logprobs"] = [None, *({"7": {"rank": 9}, str(each): {"rank": 1}} for each in best)]
        self._plain(200, json.dumps({"choices": [choice], "kv_transfer_params": {"file": name, **stub.facts}}))

    def _write(self, path: Path, ids: list[int], mishap: str) -> None:
        planes, tokens = self.server.planes(ids), torch.tensor(ids)
        if mishap == "never":
            return
        if mishap == "late":
            time.sleep(0.5)
        if mishap == "short":
            planes = planes[:-1]
        if mishap == "other ids":
            tokens = tokens + 1
        if mishap == "float16":
            planes = planes.half()
        data = save({"planes": planes.contiguous(), "tokens": tokens})
        if mishap == "torn":
            path.write_bytes(data[: len(data) // 2])
            time.sleep(0.3)
            path.write_bytes(data)
            return
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(data)
        temporary.rename(path)


@contextlib.contextmanager
def stub_server(directory: Path, layers: list[int], hidden: int, **more: Any) -> Iterator[Stub]:
    """A stub in a thread; see `Stub` for `more`."""
    with Stub(0, directory, layers, hidden, **more) as stub:
        thread = threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield stub
        finally:
            stub.shutdown()
            thread.join()


def main(words: list[str]) -> None:
    """Serve as the command line says, in the words of vLLM's."""
    options = dict(zip(words, words[1:], strict=False))
    layers = json.loads(options["--speculative-config"])["draft_model_config"]["hf_config"]
    place = json.loads(options["--kv-transfer-config"])
    assert Path(f"{place['kv_connector_module_path']}.py").exists(), "the connector is not where the server runs"
    hidden = json.loads((Path(options["--model"]) / "config.json").read_text())["hidden_size"]
    with Path(os.environ["STUB_STARTS"]).open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "words": words, "cwd": os.getcwd()}) + "\n")
    directory = Path(place["kv_connector_extra_config"]["directory"])
    more = {
        "mishaps": json.loads(os.environ.get("STUB_MISHAPS", "{}")),
        "delay_s": float(os.environ.get("STUB_DELAY_S", "0")),
    }
    more["facts"] = {"dtype": options["--dtype"], "quantization": "fp8"}
    stub = Stub(int(options["--port"]), directory, layers["eagle_aux_hidden_state_layer_ids"], hidden, **more)
    stub.serve_forever(poll_interval=0.02)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
