"""The connector without vLLM around it: what is in the blocks of a request is in its file, in order, once and whole.

Stand-ins take the place of the few names that it imports; tests/integration/engine has the real ones. On a GPU the
same must hold while the device goes on and uses the blocks again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

SLOTS, PLANES, HIDDEN = 4, 3, 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Base:
    """The part of vLLM's base class that the connector leans on."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self.metadata: Any = None

    def has_connector_metadata(self) -> bool:
        return self.metadata is not None

    def _get_connector_metadata(self) -> Any:
        return self.metadata


class HiddenStateCacheSpec:
    block_size = SLOTS


@pytest.fixture
def connector_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The connector's module, imported with stand-ins for vLLM."""
    names: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {
            "get_layers_from_vllm_config": lambda _config, _kind, names: {n: None for n in names if "only" in n}
        },
        "vllm.distributed": {},
        "vllm.distributed.kv_transfer": {},
        "vllm.distributed.kv_transfer.kv_connector": {},
        "vllm.distributed.kv_transfer.kv_connector.v1": {},
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorBase_V1": Base,
            "KVConnectorMetadata": object,
            "SupportsHMA": type("SupportsHMA", (), {}),
        },
        "vllm.distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: 0},
        "vllm.logger": {"init_logger": lambda _name: SimpleNamespace(error=lambda *words: pytest.fail(str(words)))},
        "vllm.v1": {},
        "vllm.v1.kv_cache_interface": {"HiddenStateCacheSpec": HiddenStateCacheSpec},
        "vllm.v1.request": {"RequestStatus": SimpleNamespace(FINISHED_ABORTED="aborted")},
        "vllm.model_executor": {},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.extract_hidden_states": {"CacheOnlyAttentionLayer": object},
    }
    for name, contents in names.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "featurize.vllm_connector", raising=False)
    yield importlib.import_module("featurize.vllm_connector")
    sys.modules.pop("featurize.vllm_connector", None)


def make(module: Any, directory: Path, **changes: Any) -> Any:
    """A connector of a server with two groups of caches, the second one of planes."""
    settings = {"caching": False, "method": "extract_hidden_states"} | changes
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=settings["caching"]),
        speculative_config=SimpleNamespace(
            method=settings["method"],
            draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=[2, 4, 8])),
        ),
        kv_transfer_config=SimpleNamespace(get_from_extra_config=lambda _key, _default: str(directory)),
        model_config=SimpleNamespace(dtype=torch.bfloat16, quantization="fp8"),
    )
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in (SimpleNamespace(block_size=16), HiddenStateCacheSpec())]
    return module.PlanesConnector(config, "role", SimpleNamespace(kv_cache_groups=groups))


def request(name: str, tokens: list[int], status: str = "length") -> Any:
    return SimpleNamespace(request_id=name, prompt_token_ids=tokens, status=status)


@pytest.mark.parametrize("device", DEVICES)
def test_b10_a_requests_file_holds_the_rows_of_its_blocks_in_order_though_they_are_used_again_at_once(
    connector_module: Any, tmp_path: Path, device: str
) -> None:
    connector = make(connector_module, tmp_path)
    cache = torch.arange(512 * PLANES * SLOTS * HIDDEN, dtype=torch.float32, device=device)
    cache = cache.view(512, PLANES, SLOTS, HIDDEN)
    connector.register_kv_caches({"attention": torch.empty(0), "cache_only": cache})
    wanted: dict[str, tuple[list[int], torch.Tensor]] = {}
    sent = []
    for index in range(40):
        tokens = list(range(100 * index, 100 * index + 3 + index))
        blocks = [(index * 11 + 37 * k) % 512 for k in range(-(-len(tokens) // SLOTS))]
        rows = [cache[block, :, slot] for block in blocks for slot in range(SLOTS)][: len(tokens)]
        held_back, told = connector.request_finished_all_groups(request(f"r{index}", tokens), ([999], blocks))
        assert held_back
        assert {key: told[key] for key in ("layers", "dtype", "quantization")} == {
            "layers": [2, 4, 8],
            "dtype": "bfloat16",
            "quantization": "fp8",
        }
        wanted[told["file"]] = tokens, torch.stack(rows).cpu()
        sent.append(f"r{index}")
    connector.metadata = connector.build_connector_meta(None)
    assert connector.get_finished(set(sent)) == (set(sent), None), "told as sent, each once"
    cache.zero_()
    connector.metadata = connector.build_connector_meta(None)
    assert connector.get_finished(set()) == (None, None)
    connector.shutdown()
    assert {path.name for path in tmp_path.iterdir()} == set(wanted), "whole files alone, under their names"
    for file, (tokens, planes) in wanted.items():
        found = load_file(tmp_path / file)
        assert found["tokens"].tolist() == tokens
        assert torch.equal(found["planes"], planes)


def test_a_request_that_was_aborted_leaves_no_file_and_holds_no_blocks(connector_module: Any, tmp_path: Path) -> None:
    connector = make(connector_module, tmp_path)
    assert connector.request_finished_all_groups(request("a", [1, 2], "aborted"), ([0], [0])) == (False, None)
    assert connector.build_connector_meta(None).saves == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"caching": True}, "start with --no-enable-prefix-caching"),
        ({"method": "eagle3"}, "needs the speculative method extract_hidden_states"),
    ],
)
def test_b10_a_server_that_would_not_compute_every_row_does_not_start(
    connector_module: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(connector_module, tmp_path, **changes)


def test_blocks_that_hold_too_few_rows_are_a_fault_not_a_short_file(connector_module: Any) -> None:
    with pytest.raises(ValueError, match="1 blocks hold 4 rows, 5 are wanted"):
        connector_module.gather(torch.zeros(2, PLANES, SLOTS, HIDDEN), [1], 5)
