"""Runs inside vLLM, not here: writes the planes of every finished prompt to a file, once and completely.

vLLM's method `extract_hidden_states` keeps the chosen planes of every token in a paged cache beside the keys and
values, so that chunked prefill and preemption are its business: when a request is finished, its planes lie in its
blocks, whole. This connector takes them out there. vLLM loads it through its extension point
(`kv_connector_module_path`), in the scheduler's process and in each worker's:

    scheduler   names a file when a request finishes, tells the client in the response, holds the blocks back
    worker      gathers the rows from the blocks, in the order of the device's own stream, which frees the blocks;
                copies them to the host and writes them in a thread, under a temporary name, then renames

The stock connector takes an accelerator for granted. This one pins memory and copies on a stream of its own where
there is one, and does without where there is none.

A file holds `planes` [T, P, H] in the target's dtype, planes in the order of their ids (P of them; id i = the residual
stream after i decoder layers, the last one BEFORE the final norm), and `tokens` int64 [T]. The response carries its
name and what the planes are: `kv_transfer_params = {"file", "layers", "dtype", "quantization"}`.

It lives in vLLM's environment: it imports torch, safetensors and vLLM, and nothing of ours.
"""

from __future__ import annotations

import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec
from vllm.v1.request import RequestStatus

logger = init_logger("vllm.draftsmith")

WRITERS = 4
"""Threads that write files."""


@dataclass
class Save:
    """One finished prompt: what to write, and the blocks that hold its planes, in order."""

    request: str
    file: str
    tokens: list[int]
    blocks: list[int]


@dataclass
class Saves(KVConnectorMetadata):
    """What the scheduler tells the workers with a step."""

    saves: list[Save] = field(default_factory=list)


def gather(cache_BPSH: torch.Tensor, blocks: list[int], rows: int) -> torch.Tensor:
    """The first `rows` rows of these blocks as a copy [T, P, H]; B blocks of S slots each."""
    ids = torch.tensor(blocks, device=cache_BPSH.device)
    taken = cache_BPSH.index_select(0, ids).transpose(1, 2).flatten(0, 1)
    if len(taken) < rows:
        raise ValueError(f"{len(blocks)} blocks hold {len(taken)} rows, {rows} are wanted")
    return taken[:rows].contiguous()


def write_once(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file that appears whole under its name."""
    temporary = path.with_name(f".{path.name}.tmp")
    save_file(tensors, temporary)
    os.replace(temporary, path)


class PlanesConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module; `kv_connector_extra_config` holds `directory`, where the files go."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if vllm_config.cache_config.enable_prefix_caching:
            raise ValueError("planes of a cached prefix are never computed: start with --no-enable-prefix-caching")
        speculation = vllm_config.speculative_config
        if speculation is None or speculation.method != "extract_hidden_states":
            raise ValueError("PlanesConnector needs the speculative method extract_hidden_states")
        directory = self._kv_transfer_config.get_from_extra_config("directory", None)
        if directory is None or not os.path.isdir(directory):
            raise ValueError(f"kv_connector_extra_config.directory={directory} is no directory")
        self.directory = Path(directory)
        model = vllm_config.model_config
        self.facts = {
            "layers": list(speculation.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids),
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": model.quantization,
        }
        groups = kv_cache_config.kv_cache_groups
        ours = [index for index, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
        if len(ours) != 1 and len(groups) != 1:
            raise ValueError(f"{len(ours)} of {len(groups)} groups of the cache hold planes, one must")
        self.group = ours[0] if ours else 0
        self.waiting: list[Save] = []
        self.cache: torch.Tensor | None = None
        self.stream: Any = None
        self.writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="planes")

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Blocks outermost, slots before planes: a token's planes lie together."""
        return "LBNHC"

    def get_finished_count(self) -> int | None:
        """Only the first worker writes, so that one of them is heard of a finished request."""
        return 1

    # In the scheduler's process.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Plan the file of a request that has run to its end; its blocks stay until a worker has read them."""
        if request.status == RequestStatus.FINISHED_ABORTED or not request.prompt_token_ids:
            return False, None
        file = f"{uuid.uuid4().hex}.safetensors"
        self.waiting.append(Save(request.request_id, file, list(request.prompt_token_ids), list(block_ids[self.group])))
        return True, {"file": file, **self.facts}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Hand what is planned to the workers, with the next step."""
        saves, self.waiting = self.waiting, []
        return Saves(saves)

    # In a worker's process.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the cache of planes, [B, P, S, H], among all caches; on the first worker alone."""
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        if get_tensor_model_parallel_rank() != 0:
            return
        (name,) = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        cache, slots = kv_caches[name], self._kv_cache_config.kv_cache_groups[self.group].kv_cache_spec.block_size
        if cache.shape[1:3] != (len(self.facts["layers"]), slots):
            raise ValueError(f"the cache of planes is {tuple(cache.shape)}, not [blocks, planes, {slots}, hidden]")
        self.cache = cache
        self.stream = torch.cuda.Stream(cache.device) if cache.is_cuda else None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Take out the planes of what has finished; its blocks may be used again by whatever is queued after this."""
        metadata = self._get_connector_metadata() if self.has_connector_metadata() else None
        if self.cache is None or not isinstance(metadata, Saves):
            return None, None
        for save in metadata.saves:
            planes, copied = self._to_host(gather(self.cache, save.blocks, len(save.tokens)))
            self.writers.submit(self._write, save, planes, copied)
        return {save.request for save in metadata.saves} or None, None

    def _to_host(self, planes: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The planes in host memory, and the event after which they are there (None: they are)."""
        if self.stream is None:
            return planes.cpu(), None
        host = torch.empty(planes.shape, dtype=planes.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(planes.device))
        with torch.cuda.stream(self.stream):
            host.copy_(planes, non_blocking=True)
        planes.record_stream(self.stream)
        return host, self.stream.record_event()

    def _write(self, save: Save, planes: torch.Tensor, copied: Any) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            write_once(self.directory / save.file, {"planes": planes, "tokens": torch.tensor(save.tokens)})
        except Exception as error:  # in a thread: unsaid, it would only be a file that never comes
            logger.error("%s: planes of %s cannot be written (%s)", type(error).__name__, save.request, error)

    def shutdown(self) -> None:
        """Write what is still to be written."""
        self.writers.shutdown(wait=True)

    # Nothing is done layer by layer.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """The planes are in the cache already."""

    def wait_for_save(self) -> None:
        """Saving goes by requests, in `get_finished`."""
