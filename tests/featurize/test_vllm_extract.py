"""Planes from a server: row for row those of the document, whatever happens to files, requests and the server."""

from __future__ import annotations

import json
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StableLmConfig

import featurize.vllm_extract
from conf import Run, load
from featurize.__main__ import work
from featurize.canary import reference, run_canary
from featurize.config import DataConfig, FeaturizeConfig
from featurize.extract import load_backend
from featurize.store import FeatureStore
from featurize.tokenised import TokenisedSet, load_renderer, tokenise
from featurize.vllm_extract import VllmBackend, check_spool, final_norm, served_planes
from models.config import EngineConfig, TargetConfig
from models.errors import Refused
from models.target import Target, describe_target
from tests.conftest import sentence, write_lines
from tests.featurize.processes import command
from tests.featurize.vllm_stub import Stub, made_up, stub_server
from tests.models.test_export_families import FAMILIES, family

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).with_name("vllm_stub.py")
LAYERS = (2, 4, 5)
TAKEN = [*LAYERS, 8]
HIDDEN = 64


@dataclass
class Setup:
    """A backend attached to a stub, and what it is asked for."""

    stub: Stub
    backend: VllmBackend
    spool: Path

    def planes(self, documents: list[tuple[str, torch.Tensor]]) -> dict[int, tuple[list[torch.Tensor], torch.Tensor]]:
        return {index: (aux, final) for index, aux, final in self.backend.documents(documents, 0)}


@pytest.fixture
def attach(target: Target, tmp_path: Path) -> Iterator[Callable[..., Setup]]:
    """A function (in_flight=8, timeout_s=30, **what `Stub` takes) -> Setup."""
    with ExitStack() as stack:

        @contextmanager
        def attached(in_flight: int, timeout_s: float, more: dict[str, Any]) -> Iterator[Setup]:
            spool = tmp_path / "spool"
            spool.mkdir()
            with stub_server(spool, TAKEN, HIDDEN, **more) as stub:
                config = FeaturizeConfig(
                    backend="vllm", url=stub.url, planes_directory=str(spool), in_flight=in_flight, timeout_s=timeout_s
                )
                with served_planes(target, LAYERS, [40], config, EngineConfig(kind="none"), tmp_path) as backend:
                    stub.most_in_flight = stub.most_files = 0
                    stub.bodies.clear()
                    yield Setup(stub, backend, spool)

        yield lambda in_flight=8, timeout_s=30.0, **more: stack.enter_context(attached(in_flight, timeout_s, more))


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(featurize.vllm_extract, "FILE_PATIENCE_S", 2.0)


def some_documents() -> list[tuple[str, torch.Tensor]]:
    """Documents of 3 to 22 tokens that share a prefix, by name."""
    shared = torch.arange(50, 90, dtype=torch.int32)
    rows = [torch.cat([shared[: n // 2], torch.arange(100 + n, 100 + 2 * n - n // 2)]).int() for n in range(3, 23)]
    return [(f"d{len(ids)}", ids) for ids in rows]


@pytest.mark.parametrize("in_flight", [1, 6])
def test_b10_row_i_belongs_to_token_i_however_many_are_in_flight(
    attach: Callable[..., Setup], target: Target, in_flight: int
) -> None:
    setup = attach(in_flight, delay_s=0.01)
    documents = some_documents()
    for _ in range(2):
        got = setup.planes(documents)
        assert sorted(got) == list(range(len(documents)))
        for index, (aux, final) in got.items():
            wanted = made_up(documents[index][1].tolist(), 4, HIDDEN)
            assert all(torch.equal(plane, wanted[:, place]) for place, plane in enumerate(aux))
            weight = target.load_final_norm()
            norm = wanted[:, 3] * torch.rsqrt(wanted[:, 3].pow(2).mean(-1, keepdim=True) + target.config.rms_norm_eps)
            torch.testing.assert_close(final, norm * weight)
    assert min(in_flight, 2) <= setup.stub.most_in_flight <= in_flight  # how many met is the machine's affair
    assert setup.stub.most_files <= in_flight, "the space is bounded by what is in flight"
    assert list(setup.spool.iterdir()) == []


def test_b10_token_ids_are_sent_and_one_token_is_asked_for(attach: Callable[..., Setup]) -> None:
    setup = attach()
    documents = some_documents()
    setup.planes(documents)
    assert sorted(body["prompt"] for body in setup.stub.bodies) == sorted(ids.tolist() for _, ids in documents)
    assert {body["max_tokens"] for body in setup.stub.bodies} == {1}


@pytest.mark.parametrize("mishap", ["late", "torn", "500 once"])
def test_b10_what_comes_late_is_waited_for_and_what_failed_is_asked_for_again(
    attach: Callable[..., Setup], mishap: str
) -> None:
    setup = attach(mishaps={"7": mishap, "12": mishap})
    documents = some_documents()
    for index, (aux, _) in setup.planes(documents).items():
        wanted = made_up(documents[index][1].tolist(), 4, HIDDEN)
        assert torch.equal(torch.stack(aux, 1), wanted[:, :3])
    assert setup.stub.asked[7] == (2 if mishap == "500 once" else 1)
    assert list(setup.spool.iterdir()) == []


@pytest.mark.parametrize(
    ("mishap", "message"),
    [
        ("short", r"its planes are \[11, 4, 64\] with 12 ids, not \[12, 4, 64\] 2 s after the answer"),
        ("never", r"its planes are not there 2 s after the answer"),
        ("other ids", r"its planes belong to other token ids"),
        ("float16", r"its planes are of torch.float16, not torch.float32"),
        ("no json", r"the server answered 200 \(hello\)"),
        ("400", r"the server answered 400 \({\"error\": \"out of order\"}\)"),
        ("500", r"the server answered 500"),
    ],
)
def test_b10_a_document_that_cannot_be_had_is_refused_by_name(
    attach: Callable[..., Setup], mishap: str, message: str
) -> None:
    setup = attach(mishaps={"12": mishap})
    with pytest.raises(Refused, match=f"document d12: {message}"):
        setup.planes(some_documents())
    assert setup.stub.asked[12] == (3 if mishap == "500" else 1)


def test_a_request_that_is_never_answered_ends_at_its_timeout(attach: Callable[..., Setup]) -> None:
    setup = attach(timeout_s=0.5, mishaps={"12": "hang"})
    with pytest.raises(Refused, match=r"document d12: no answer within featurize.timeout_s=0.5"):
        setup.planes(some_documents())


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"layers": [2, 4, 6, 8]}, r"takes layers \[2, 4, 6, 8\] where \[2, 4, 5, 8\] is wanted"),
        ({"dtype": "bfloat16"}, "takes dtype bfloat16 where float32 is wanted"),
        ({"file": "../../etc/passwd"}, r"names no file of planes \(but ../../etc/passwd\)"),
        ({"layers": None}, "takes layers None"),
    ],
)
def test_a_server_of_another_kind_is_refused_before_the_first_document(
    attach: Callable[..., Setup], facts: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        attach(facts=facts)


class Modelled:
    """A stub's planes and next tokens from the real tiny target; `post_norm` is the fault of B09."""

    def __init__(self, target: Target, settings: TargetConfig, *, post_norm: bool = False) -> None:
        self.model = load_backend(target, settings, (), "cpu").model
        self.post_norm = post_norm

    def planes(self, ids: list[int]) -> torch.Tensor:
        taken: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _module, inputs: taken.append(inputs[0][0]))
        with torch.no_grad():
            states = self.model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        hook.remove()
        return torch.stack([*(states[i][0] for i in LAYERS), states[-1][0] if self.post_norm else taken[0]], dim=1)

    def best(self, ids: list[int]) -> list[int]:
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()


@pytest.fixture(scope="module")
def tokenised(target: Target, settings: TargetConfig, tmp_path_factory: pytest.TempPathFactory) -> TokenisedSet:

    rng = random.Random(5)
    rows = [
        {
            "id": f"c{n}",
            "messages": [
                {"role": "user", "content": sentence(rng, n)},
                {"role": "assistant", "content": sentence(rng, 2 * n)},
            ],
        }
        for n in range(2, 14)
    ]
    data = DataConfig([str(write_lines(tmp_path_factory.mktemp("few") / "few.jsonl", rows))])
    return tokenise(data, load_renderer(target, settings), "key")


@pytest.mark.parametrize("against", ["transformers", "engine"])
def test_b09_the_canary_passes_a_pre_norm_last_plane_and_stops_on_one_that_is_normed_already(
    attach: Callable[..., Setup], target: Target, settings: TargetConfig, tokenised: TokenisedSet, against: str
) -> None:
    modelled = Modelled(target, settings)
    setup = attach(in_flight=1, planes=modelled.planes, best=modelled.best)
    plain = reference(modelled.model) if against == "transformers" else setup.backend.reference()
    report = run_canary(setup.backend, tokenised, 4, plain, 2048)
    assert report["argmax_agreement"] > 0.98
    assert list(report["planes"]) == (
        ["plane 2", "plane 4", "plane 5", "the final plane"] if against == "transformers" else []
    )
    modelled.post_norm = True
    message = r"the final plane differs" if against == "transformers" else r"lm_head\(final plane\) has the model's own"
    with pytest.raises(Refused, match=message):
        run_canary(setup.backend, tokenised, 4, plain, 2048)


def test_b09_a_final_norm_that_is_more_than_a_weight_is_refused(tmp_path: Path) -> None:
    StableLmConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=4).save_pretrained(tmp_path)
    with pytest.raises(Refused, match="its final norm is not a weight.*use featurize.backend=transformers"):
        final_norm(describe_target(TargetConfig(path=str(tmp_path))))


@pytest.fixture
def overrides(
    tmp_path: Path, tiny_target_dir: Path, tiny_conversations: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """A run of the stage with the stub as its engine."""
    monkeypatch.setenv("STUB_STARTS", f"{tmp_path}/starts.jsonl")
    script = tmp_path / "engine-env" / "bin" / "python"
    script.parent.mkdir(parents=True)
    script.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exit\nshift 2\nPYTHONPATH={ROOT} exec {sys.executable} {STUB} "$@"\n'
    )
    script.chmod(0o755)
    (tmp_path / "spools").mkdir()
    return [
        "name=a",
        f"root={tmp_path}/runs",
        f"target.path={tiny_target_dir}",
        "target.dtype=float32",
        f"data.conversations=[{tiny_conversations}]",
        "featurize.backend=vllm",
        "featurize.shard_tokens=400",
        "featurize.canary_documents=0",
        f"featurize.planes_directory={tmp_path}/spools",
        "engine=vllm",
        f"engine.python={script}",
        "engine.startup_timeout_s=60",
    ]


def shards(run: Run) -> dict[str, tuple[int, bytes]]:
    """Finished shards: when written, and their bytes."""
    folder = run.directory / "features/shards"
    return {p.stem: (p.stat().st_mtime_ns, p.with_suffix(".safetensors").read_bytes()) for p in folder.glob("*.json")}


def test_the_stage_makes_a_complete_store_and_leaves_no_server_and_no_files(
    overrides: list[str], tmp_path: Path
) -> None:
    run = load(overrides)
    assert work(run)
    store = FeatureStore.open(run.directory / "features")
    store.require(describe_target(run.target), LAYERS)
    contract = store.contract
    assert (contract.backend, contract.backend_version, contract.quantization) == ("vllm", "0.0.stub", "fp8")
    for index, document in enumerate(store.documents):
        features = store.read(index)
        wanted = made_up(features.tokens.tolist(), 4, HIDDEN)
        assert torch.equal(features.aux, wanted[:, :3].bfloat16())
        assert features.final.shape == (document.teachers, HIDDEN)
    (start,) = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert "--no-enable-prefix-caching" in start["words"]
    assert list((tmp_path / "spools").iterdir()) == list((run.directory / "extraction").iterdir()) == []
    assert not Path(f"/proc/{start['pid']}").exists()
    assert work(run) is False
    run.featurize.backend = "transformers"
    with pytest.raises(Refused, match=r"featurize.backend \(was vllm, is None\)"):
        work(run)


def test_a_server_that_dies_is_told_in_its_own_words_and_what_is_finished_is_not_computed_again(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load([*overrides, "name=whole"])
    work(whole)
    store = FeatureStore.open(whole.directory / "features")
    last = store.documents[-1].length
    assert [document.length for document in store.documents].count(last) == 1
    monkeypatch.setenv("STUB_MISHAPS", json.dumps({last: "die"}))
    process = command(overrides)
    _, err = process.communicate(timeout=120)
    line = err.strip().splitlines()[-1]
    assert process.returncode == 2
    assert "Traceback" not in err
    assert re.match(r"featurize: document c0\d\d: (the request failed|its planes are not there)", line), line
    assert "the server ended with exit code 9: ValueError: the engine met its end (log: " in line
    assert Path(line.rsplit("(log: ", 1)[1].removesuffix(")")).is_file(), "the log stays"
    assert list((tmp_path / "spools").iterdir()) == []

    monkeypatch.delenv("STUB_MISHAPS")
    run = load(overrides)
    before = shards(run)
    assert 0 < len(before) < len(shards(whole))
    assert work(run)
    after = shards(run)
    assert all(after[name] == shard for name, shard in before.items())
    assert [shard for _, shard in after.values()] == [shard for _, shard in shards(whole).values()]


def test_b12_killed_with_its_server_at_work_it_goes_on_where_it_was_and_the_files_are_gone(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load(overrides)
    monkeypatch.setenv("STUB_DELAY_S", "0.1")
    process = command([*overrides, "featurize.in_flight=2"])
    while process.poll() is None and len(shards(run)) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = shards(run)
    assert not (run.directory / "features/manifest.json").exists()
    (start,) = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    deadline = time.monotonic() + 30
    while Path(f"/proc/{start['pid']}").exists() or list((tmp_path / "spools").iterdir()):
        assert time.monotonic() < deadline, "the server or its files outlived us"
        time.sleep(0.1)
    assert work(run)
    after = shards(run)
    assert len(before) >= 2
    assert all(after[name] == shard for name, shard in before.items())
    FeatureStore.open(run.directory / "features")


def test_processes_that_share_one_running_server_share_the_units_as_well(overrides: list[str], tmp_path: Path) -> None:
    spool = tmp_path / "spools"
    with stub_server(spool, TAKEN, HIDDEN, delay_s=0.02) as stub:
        overrides = [*(each for each in overrides if "engine" not in each), f"featurize.url={stub.url}"]
        processes = [command(overrides) for _ in range(2)]
        assert [process.wait(120) for process in processes] == [0, 0], [process.communicate() for process in processes]
        asked = sum(count for tokens, count in stub.asked.items() if tokens > 2)
    run = load(overrides)
    assert asked == len(FeatureStore.open(run.directory / "features"))
    assert list(spool.iterdir()) == []
    assert not (tmp_path / "starts.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["engine.python=nowhere/python"], "engine.python=nowhere/python is not there; `make vllm-env` makes"),
        (["engine=none"], r"featurize.backend=vllm needs a server: .*\(engine.kind is none\)"),
        (["featurize.url=http://127.0.0.1:9"], r"featurize.url=http://127.0.0.1:9: no healthy server is there"),
        (["featurize.planes_directory=nowhere"], "featurize.planes_directory=.*/nowhere is not there"),
    ],
)
def test_without_a_server_there_is_one_line(overrides: list[str], changes: list[str], message: str) -> None:
    if changes == ["engine=none"]:
        overrides = [each for each in overrides if not each.startswith("engine")]
    with pytest.raises(Refused, match=message) as refusal:
        work(load([*overrides, *changes]))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["featurize.backend=sglang"], "featurize.backend=sglang is none of transformers, vllm"),
        (["featurize.backend=vllm", "featurize.url=http://h:1"], "needs featurize.planes_directory"),
        (["featurize.url=http://h:1", "featurize.planes_directory=x"], "need featurize.backend=vllm"),
        (["featurize.canary_against=nothing"], "featurize.canary_against=nothing is none of"),
        (["featurize=vllm", "featurize.in_flight=0"], "featurize.in_flight=0 must be at least 1"),
    ],
)
def test_impossible_settings_are_refused_by_name(changes: list[str], message: str) -> None:
    with pytest.raises(Refused, match=message):
        load(["name=a", "target.path=x", *changes])


def test_files_that_could_not_fit_are_refused_before_a_server_starts(tmp_path: Path) -> None:
    check_spool(tmp_path, 1000)
    with pytest.raises(Refused, match=r"GB free, and the files in flight may take .*featurize.in_flight"):
        check_spool(tmp_path, 10**18)


def test_a_target_of_which_vllm_gives_no_planes_is_refused(tmp_path: Path) -> None:
    family("gemma3", tmp_path)
    target = describe_target(TargetConfig(path=str(tmp_path)))
    opened = served_planes(target, LAYERS, [8], FeaturizeConfig(backend="vllm"), EngineConfig(kind="vllm"), tmp_path)
    with pytest.raises(Refused, match="no planes of a gemma3_text target; use featurize.backend=transformers"), opened:
        pass


@pytest.mark.parametrize("name", FAMILIES)
def test_b09_the_norm_that_finishes_the_last_plane_is_the_targets_own(name: str, tmp_path: Path) -> None:
    model = family(name, tmp_path)
    norm = final_norm(describe_target(TargetConfig(path=str(tmp_path), dtype="float32")))
    states = torch.randn(3, 32)
    with torch.no_grad():
        torch.testing.assert_close(norm(states), model.model.norm(states))
