"""Hidden states from vLLM: the target as it will be served, quantised where it is, many documents in flight.

A server runs vLLM's method `extract_hidden_states` with our connector (`vllm_connector.py`, which is copied to where
the server runs: it must not see this project's packages). Each document is one request: its token ids, never text,
and one token asked for, which is never used. The answer names the file in which the connector leaves the planes;
the file appears whole, is mapped, compared with what was asked (rows, ids, planes, dtype) and removed. So many files
as requests are in flight is all the space that is ever taken.

vLLM's plane L is the residual stream BEFORE the final norm; the store's final plane is after it. The target's own
norm, as transformers builds it, is applied here, at the border.

The same documents give the same units and the same layout as with transformers. Bits may differ between two runs: the
server's batches depend on what arrives together.

Shape suffixes: T tokens of a document, P planes of a file (aux planes and plane L), H hidden.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from featurize.canary import PlainForward, Reference
from featurize.config import FeaturizeConfig
from featurize.contract import dtype_name
from models.config import EngineConfig
from models.errors import Refused
from models.servers import Server, attached, authorities, running
from models.serving import remarks_on
from models.target import Target

CONNECTOR = "draftsmith_planes"
"""Name of the module under which the server finds the connector."""

FILE_PATIENCE_S = 60.0
"""How long after the answer a file may take to be there and whole."""

ATTEMPTS = 3
"""At a request that fails through no fault of its own."""

FILE_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")


def final_norm(target: Target) -> torch.nn.Module:
    """The target's final norm as transformers builds it, with the target's weight, in its dtype.

    Raises:
        Refused: the decoder has none where transformers puts it, or it has more than a weight.
    """
    model = target.skeleton()
    norm = getattr(model.get_decoder(), "norm", None)
    if norm is None or list(norm.state_dict()) != ["weight"]:
        raise Refused(
            f"{type(model).__name__}: its final norm is not a weight at `norm`, so that vLLM's last plane cannot be "
            "finished here; use featurize.backend=transformers"
        )
    norm.load_state_dict({"weight": target.load_final_norm_weight().to(target.dtype)}, assign=True)
    return norm.eval()


@dataclass(frozen=True)
class VllmBackend:
    """A server that yields planes; made by `served_planes`.

    Attributes:
        server: runs the target with the connector.
        directory: where the connector leaves files, as this machine sees it.
        target: what it serves.
        aux_layers: planes to take; plane i = residual stream after i decoder layers.
        norm: the target's final norm.
        in_flight, timeout_s: see `FeaturizeConfig`.
    """

    server: Server
    directory: Path
    target: Target
    aux_layers: tuple[int, ...]
    norm: torch.nn.Module
    in_flight: int
    timeout_s: float
    device: torch.device = torch.device("cpu")
    name = "vllm"
    _told: dict[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """Of vLLM, as the server tells it."""
        return self.server.version

    @property
    def quantization(self) -> str:
        """How the server runs the target: its own word, which it gives with every document."""
        return self._told["quantization"]

    def try_out(self) -> None:
        """Ask for two tokens' planes.

        Raises:
            Refused: this is a server of another kind, of other planes or of another dtype.
        """
        list(self.documents([("of the first request", torch.tensor([0, 0], dtype=torch.int32))], 0))

    def documents(
        self, documents: Sequence[tuple[str, torch.Tensor]], batch_tokens: int
    ) -> Iterator[tuple[int, list[torch.Tensor], torch.Tensor]]:
        """See `PlaneSource`; longest documents first, `batch_tokens` is the server's own affair."""
        todo = iter(sorted(range(len(documents)), key=lambda i: -len(documents[i][1])))
        flying: dict[Future[tuple[torch.Tensor, Any]], int] = {}
        leaving = threading.Event()
        with self._client() as client:
            pool = ThreadPoolExecutor(self.in_flight, thread_name_prefix="documents")
            try:
                while True:
                    for i in islice(todo, self.in_flight - len(flying)):
                        flying[pool.submit(self._fetch, client, leaving, *documents[i])] = i
                    if not flying:
                        return
                    for future in wait(flying, return_when=FIRST_COMPLETED).done:
                        i, (planes_TPH, _) = flying.pop(future), future.result()
                        with torch.inference_mode():
                            final_TH = self.norm(planes_TPH[:, -1])
                        yield i, list(planes_TPH[:, :-1].unbind(1)), final_TH
            finally:  # what is in flight ends by itself: when its file is removed, with its server, or at its timeout
                leaving.set()
                pool.shutdown(wait=False, cancel_futures=True)

    def reference(self) -> Reference:
        """The server's own next tokens (by its own logits, at every position) as what the canary compares with."""
        head_VH = self.target.load_lm_head().to(self.target.dtype)
        head = torch.nn.utils.skip_init(torch.nn.Linear, *head_VH.T.shape, bias=False, dtype=head_VH.dtype)
        head.load_state_dict({"weight": head_VH}, assign=True)

        def forward(index: int, ids_T: torch.Tensor) -> PlainForward:
            with self._client() as client:
                _, answer = self._fetch(client, threading.Event(), f"number {index}", ids_T, prompt_logprobs=1)
            choice = answer["choices"][0]
            best = [next(int(i) for i, p in each.items() if p["rank"] == 1) for each in choice["prompt_logprobs"][1:]]
            return PlainForward(torch.tensor([*best, *choice["token_ids"]]), None)

        return Reference(forward, head, self.target.dtype)

    def _client(self) -> httpx.Client:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.in_flight)
        timeout = httpx.Timeout(self.timeout_s, connect=30)
        url = self.server.url
        return httpx.Client(base_url=url, timeout=timeout, limits=limits, trust_env=False, verify=authorities([url]))

    def _refuse(self, name: str, reason: str) -> Refused:
        return Refused(f"document {name}: {reason}; {self.server.last_words()}")

    def _ask(self, client: httpx.Client, leaving: threading.Event, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request, tried again when the server or the connection failed, not when it refused."""
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt and (leaving.wait(attempt) or self.server.ended):
                break
            try:
                response = client.post("/v1/completions", json=body)
            except httpx.TimeoutException:
                reason = f"no answer within featurize.timeout_s={self.timeout_s:g}"
                break
            except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed meanwhile
                reason = f"the request failed ({error!r})"
                continue
            if response.status_code == 200:
                with contextlib.suppress(ValueError):
                    if isinstance(answer := response.json(), dict):
                        return answer
            reason = f"the server answered {response.status_code} ({' '.join(response.text.split())[:300]})"
            if response.status_code < 500 and response.status_code != 429:
                break
        raise self._refuse(name, reason)

    def _fetch(
        self, client: httpx.Client, leaving: threading.Event, name: str, ids_T: torch.Tensor, **more: Any
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """One document's planes [T, P, H] in the target's dtype, and the answer they came with.

        Raises:
            Refused: no answer, an answer of another kind of server, or no whole file within FILE_PATIENCE_S.
        """
        sampling = {"max_tokens": 1, "temperature": 0, "return_token_ids": True} | more
        answer = self._ask(client, leaving, name, {"model": "target", "prompt": ids_T.tolist()} | sampling)
        told = answer.get("kv_transfer_params") or {}
        layers = [*self.aux_layers, self.target.num_layers]
        for key, wanted in {"layers": layers, "dtype": dtype_name(self.target.dtype)}.items():
            if told.get(key) != wanted:
                raise self._refuse(name, f"the server takes {key} {told.get(key)} where {wanted} is wanted")
        if not FILE_NAME.fullmatch(str(told.get("file"))):
            raise self._refuse(name, f"the server names no file of planes (but {told.get('file')})")
        quantization = told.get("quantization") or "none"
        if self._told.setdefault("quantization", quantization) != quantization:
            raise self._refuse(name, f"the server changed: its weights were {self.quantization}, now {quantization}")
        path, patience = self.directory / told["file"], time.monotonic() + FILE_PATIENCE_S
        while True:
            planes_TPH, lack = self._read(path, ids_T, len(layers))
            if planes_TPH is not None:
                path.unlink()
                return planes_TPH, answer
            if time.monotonic() > patience:
                raise self._refuse(name, f"its planes {lack} {FILE_PATIENCE_S:g} s after the answer ({path})")
            if self.server.ended:
                raise self._refuse(name, f"its planes {lack}, and nobody is left to write them ({path})")
            time.sleep(0.01)

    def _read(self, path: Path, ids_T: torch.Tensor, planes: int) -> tuple[torch.Tensor | None, str]:
        """A file's planes, or what it still lacks, to follow "its planes"."""
        try:
            tensors = load_file(path)
            planes_TPH, tokens_T = tensors["planes"], tensors["tokens"]
        except FileNotFoundError:
            return None, "are not there"
        except (SafetensorError, OSError, KeyError) as error:
            return None, f"cannot be read ({error})"
        shape = (len(ids_T), planes, self.target.hidden_size)
        if tuple(planes_TPH.shape) != shape or len(tokens_T) != len(ids_T):
            return None, f"are {list(planes_TPH.shape)} with {len(tokens_T)} ids, not {list(shape)}"
        if planes_TPH.dtype != self.target.dtype:
            return None, f"are of {planes_TPH.dtype}, not {self.target.dtype}"
        if not torch.equal(tokens_T.int(), ids_T.int()):
            return None, "belong to other token ids"
        return planes_TPH, ""


def purpose(layers: Sequence[int], directory: Path, batch_tokens: int, trust_remote_code: bool) -> list[str]:
    """The arguments that make a vLLM server one that yields planes of these layers."""
    ids = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": ids},
    }
    transfer = {
        "kv_connector": "PlanesConnector",
        "kv_role": "kv_producer",
        "kv_connector_module_path": CONNECTOR,
        "kv_connector_extra_config": {"directory": str(directory)},
    }
    words = ["--no-enable-prefix-caching", "--max-num-batched-tokens", str(batch_tokens)]
    words += ["--disable-uvicorn-access-log", *(["--trust-remote-code"] if trust_remote_code else [])]
    for name, value in {"speculative": speculation, "kv-transfer": transfer}.items():
        words += [f"--{name}-config", json.dumps(value, separators=(",", ":"))]
    return words


def check_spool(directory: Path, needed: int) -> None:
    """Check that the files of all requests in flight fit.

    Raises:
        Refused: they do not.
    """
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise Refused(
            f"{directory} has {free / 1e9:.1f} GB free, and the files in flight may take {needed / 1e9:.1f} GB; lower "
            "featurize.in_flight, or name another folder in featurize.planes_directory"
        )


@contextlib.contextmanager
def served_planes(
    target: Target,
    aux_layers: tuple[int, ...],
    lengths: Sequence[int],
    settings: FeaturizeConfig,
    engine: EngineConfig,
    directory: Path,
) -> Iterator[VllmBackend]:
    """A server of the target that yields planes: our own, gone afterwards with its files, or the one at featurize.url.

    Args:
        lengths: of all documents.
        directory: where our own server runs and keeps its log; the log stays when something failed.

    Raises:
        Refused: vLLM cannot do this for the target, no server is configured, it does not start or answer, or its
            files would not fit.
    """
    if not remarks_on(target.config.model_type).vllm_extracts:
        raise Refused(
            f"featurize.backend=vllm: vLLM gives no planes of a {target.config.model_type} target; use "
            "featurize.backend=transformers"
        )
    if settings.url is None and engine.kind != "vllm":
        raise Refused(
            f"featurize.backend=vllm needs a server: engine=vllm or engine=vllm-cpu starts one (engine.kind is "
            f"{engine.kind}), featurize.url names one that runs"
        )
    parent = Path(settings.planes_directory or tempfile.gettempdir()).expanduser().absolute()
    if not parent.is_dir():
        raise Refused(f"featurize.planes_directory={parent} is not there; it is where the server leaves its files")
    norm, layers = final_norm(target), [*aux_layers, target.num_layers]
    in_flight = sum(sorted(lengths)[-settings.in_flight :])
    check_spool(parent, in_flight * len(layers) * target.hidden_size * target.dtype.itemsize)

    def backend(server: Server, spool: Path) -> VllmBackend:
        made = VllmBackend(server, spool, target, aux_layers, norm, settings.in_flight, settings.timeout_s)
        made.try_out()
        return made

    if settings.url is not None:
        yield backend(attached(settings.url, "featurize.url"), parent)
        return
    own = replace(engine, dtype=dtype_name(target.dtype), max_model_len=max(lengths) + 2)
    place = (directory / f"{socket.gethostname()}-{os.getpid()}").absolute()
    place.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("vllm_connector.py"), place / f"{CONNECTOR}.py")
    spool = Path(tempfile.mkdtemp(prefix="draftsmith-planes-", dir=parent))
    words = purpose(layers, spool, settings.batch_tokens, target.trust_remote_code)
    try:
        with running(own, target.path, name="planes", directory=place, purpose=words, scratch=spool) as server:
            yield backend(server, spool)
    finally:
        shutil.rmtree(spool, ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
