"""A real vLLM yields the planes that transformers yields, row for row, for documents that share prefixes.

The target's heads are 64 wide, which vLLM's CPU attention wants; its final norm is far from all ones, so that a norm
left out or applied twice shows. A forward of the server holds fewer tokens than most documents: they arrive in chunks.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf import load
from featurize.backends import checked_backend
from featurize.canary import run_canary
from featurize.extract import load_backend
from featurize.store import FeatureStore
from featurize.tokenised import load_renderer, tokenise
from models.target import describe_target
from tests.conftest import sentence, write_lines

ROOT = Path(__file__).resolve().parents[3]
VLLM = ROOT / ".venv-vllm/bin/python"
LAYERS = (2, 4, 5)
DOCUMENTS = 64

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def overrides(make_target: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run over 64 conversations with one of two long system prompts, and first questions that recur."""
    rng = random.Random(3)
    systems, questions = [sentence(rng, 60) for _ in range(2)], [sentence(rng, 12) for _ in range(4)]
    rows = [
        {
            "id": f"c{index:02d}",
            "messages": [
                {"role": "system", "content": systems[index % 2]},
                {"role": "user", "content": questions[index % 4]},
                {"role": "assistant", "content": sentence(rng, 1 + index)},
            ],
        }
        for index in range(DOCUMENTS)
    ]
    root = tmp_path_factory.mktemp("user")
    target = make_target(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    return [
        "name=a",
        f"root={root}/runs",
        f"target.path={target}",
        "target.dtype=float32",
        f"data.conversations=[{write_lines(root / 'conversations.jsonl', rows)}]",
        "featurize.device=cpu",
        "featurize.backend=vllm",
        "featurize.batch_tokens=64",
        "featurize.shard_tokens=3000",
        "featurize.in_flight=24",
        "engine=vllm-cpu",
        f"engine.python={VLLM}",
    ]


def test_b09_b10_vllm_and_transformers_give_the_same_planes_to_1e_5(overrides: list[str]) -> None:
    run = load(overrides)
    target = describe_target(run.target)
    tokenised = tokenise(run.data, load_renderer(target, run.target), "key")
    assert len(tokenised.documents) == DOCUMENTS
    assert max(document.length for document in tokenised.documents) > 2 * run.featurize.batch_tokens
    plain = load_backend(target, run.target, LAYERS, "cpu")
    rows = [(document.id, tokenised.ids(index)) for index, document in enumerate(tokenised.documents)]

    opened = checked_backend(target, LAYERS, tokenised, run.featurize, run.target, run.engine, run.directory)
    with opened as (backend, canary):
        assert canary["argmax_agreement"] > 0.98
        assert all(plane["largest_relative_error"] < 0.01 for plane in canary["planes"].values())
        assert run_canary(backend, tokenised, 4, backend.reference(), 2048)["argmax_agreement"] > 0.98  # type: ignore[attr-defined]
        spool = backend.directory  # type: ignore[attr-defined]
        seen, errors, worst_rows = [], [], []
        for index, aux, final_TH in backend.documents(rows, 0):
            ids_T = rows[index][1]
            with torch.no_grad():
                states = plain.model(input_ids=ids_T.long()[None], output_hidden_states=True).hidden_states
            for ours_TH, wanted_TH in zip(
                [*aux, final_TH], [*(states[i][0] for i in LAYERS), states[-1][0]], strict=True
            ):
                assert ours_TH.dtype == torch.float32
                assert ours_TH.shape == (len(ids_T), 128)
                errors.append(float((ours_TH - wanted_TH).norm() / wanted_TH.norm()))
                worst_rows.append(float(row_errors(ours_TH, wanted_TH).max()))
            seen.append(index)
        assert sorted(seen) == list(range(DOCUMENTS))
        assert list(spool.iterdir()) == [], "files go as soon as they are read"
        print(f"relative errors: {max(errors):.1e} of a document's plane, {max(worst_rows):.1e} of a row")
        assert max(errors) < 1e-5
        assert max(worst_rows) < 5e-5
    assert not spool.exists()
    assert list((run.directory / "extraction").iterdir()) == [], "nor does the server leave anything"


def quantise(target: Path) -> None:
    """Rewrite a target with 8-bit weights, a scale per output channel (W8A8 in the format of compressed-tensors)."""
    tensors = load_file(target / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[name] = (tensors[name] / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | {"strategy": "channel", "dynamic": False},
        "input_activations": number | {"strategy": "token", "dynamic": True},
    }
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = settings | {"ignore": ["lm_head"], "config_groups": {"group_0": group}}
    (target / "config.json").write_text(json.dumps(config))


def test_a_quantised_target_is_extracted_quantised_and_the_contract_says_so(
    overrides: list[str], make_target: Callable[..., Path]
) -> None:
    target = make_target(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    exact = load_backend(
        describe_target(load([*overrides, f"target.path={target}"]).target), load(overrides).target, LAYERS, "cpu"
    )
    quantise(target)
    changes = ["name=quantised", f"target.path={target}", "featurize.canary_against=engine", "data.limit=8"]
    result = featurize([*overrides, *changes])
    assert result.returncode == 0, result.stderr
    store = FeatureStore.open(load([*overrides, *changes]).directory / "features")
    assert store.contract.quantization == "compressed-tensors"
    assert store.manifest["canary"]["argmax_agreement"] > 0.98
    features = store.read(7)
    aux, _ = exact.planes(features.tokens.long()[None])
    error = float(row_errors(features.aux, torch.stack([plane[0] for plane in aux], dim=1)).median())
    print(f"relative error of W8A8 against fp32: {error:.3f}")
    assert 0.005 < error < 0.2, "near the unquantised target, and not it"


def row_errors(ours: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Relative error of every row [..., H]."""
    return (ours.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)


def featurize(overrides: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "featurize", *overrides],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        **options,
    )


def test_the_command_gives_the_same_store_from_vllm_in_bf16_as_from_transformers(overrides: list[str]) -> None:
    stores: dict[str, FeatureStore] = {}
    for backend in ("transformers", "vllm"):
        names = [f"name={backend}", f"featurize.backend={backend}", "target.dtype=bfloat16"]
        result = featurize([*overrides, *names])
        assert result.returncode == 0, result.stderr
        stores[backend] = FeatureStore.open(load([*overrides, *names]).directory / "features")
    ours, plain = stores["vllm"], stores["transformers"]
    assert ours.documents == plain.documents
    assert [entry["size"] for entry in ours.manifest["files"]] == [entry["size"] for entry in plain.manifest["files"]]
    assert len(ours.manifest["files"]) > 4
    told = ours.manifest["contract"]
    assert (told["backend"], told["backend_version"][:4], told["quantization"]) == ("vllm", "0.32", "none")
    assert told["dtype"] == "bfloat16"
    # How far bf16 lies from the truth is the target's doing; neither backend may be further from it than the other is.
    run = load(overrides)
    exact = load_backend(describe_target(run.target), run.target, LAYERS, "cpu")
    errors: dict[str, list[torch.Tensor]] = {"vllm": [], "transformers": []}
    for index in range(len(ours)):
        ids_T = ours.read(index).tokens
        assert torch.equal(ids_T, plain.read(index).tokens)
        aux, final_LH = exact.planes(ids_T.long()[None])
        wanted_TPH = torch.stack([plane[0] for plane in aux], dim=1)
        for name, store in stores.items():
            features = store.read(index)
            errors[name].append(row_errors(features.aux, wanted_TPH).flatten())
            errors[name].append(row_errors(features.final, final_LH[0, features.final_positions]))
    told_errors = {name: [float(torch.cat(rows).quantile(q)) for q in (0.5, 0.99)] for name, rows in errors.items()}
    print("relative errors of bf16 (median, 99 %):", told_errors)
    assert all(a < 1.25 * b for a, b in zip(told_errors["vllm"], told_errors["transformers"], strict=True))
    manifest = ours.directory / "manifest.json"
    before = manifest.stat().st_mtime_ns, json.loads(manifest.read_text())
    names[-2:] = ["featurize.backend=vllm", "target.dtype=bfloat16"]
    assert "nothing to do" in featurize([*overrides, *names]).stdout
    assert (manifest.stat().st_mtime_ns, json.loads(manifest.read_text())) == before
