"""`python -m featurize` as a user runs it: stopped, torn, changed and repeated, the store comes out the same."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import featurize.__main__ as stage
import featurize.extract
import featurize.store
from conf import Run, load
from featurize.__main__ import work
from featurize.extract import extract_unit
from featurize.store import FeatureStore
from featurize.tokenised import Document, describe_inputs, load_or_tokenise
from featurize.verify import verify
from models.artefact import file_sha256
from models.errors import Refused
from models.target import describe_target
from tests.featurize.processes import command

ROOT = Path(__file__).parents[2]
LAYERS = (2, 4, 5)


@pytest.fixture
def overrides(tmp_path: Path, tiny_target_dir: Path, tiny_conversations: Path) -> list[str]:
    return [
        "name=a",
        f"root={tmp_path}",
        f"target.path={tiny_target_dir}",
        "target.dtype=float32",
        f"data.conversations=[{tiny_conversations}]",
        "featurize.shard_tokens=400",
        "featurize.batch_tokens=300",
        "featurize.device=cpu",
    ]


@pytest.fixture
def run(overrides: list[str]) -> Run:
    return load(overrides)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_the_stage_makes_a_store_that_a_trainer_can_read(run: Run, tiny_conversations: Path) -> None:
    assert work(run)
    store = FeatureStore.open(run.directory / "features")
    target = describe_target(run.target)
    store.require(target, LAYERS)
    rows = [json.loads(line) for line in tiny_conversations.read_text().splitlines()]
    assert [document.id for document in store.documents] == [row["id"] for row in rows]
    assert [document.route for document in store.documents] == [row["route"] for row in rows]
    backend = featurize.extract.load_backend(target, run.target, LAYERS, "cpu")
    for index, document in enumerate(store.documents):
        features = store.read(index)
        assert features.tokens.dtype == torch.int32
        assert features.aux.dtype == features.final.dtype == torch.bfloat16
        assert features.tokens.shape == (document.length,)
        assert features.aux.shape == (document.length, 3, 64)
        assert features.final.shape == (len(features.final_positions), 64)
        with torch.no_grad():
            states = backend.model(input_ids=features.tokens.long()[None], output_hidden_states=True).hidden_states
        wanted = torch.stack([states[layer][0] for layer in LAYERS], dim=1).bfloat16()
        torch.testing.assert_close(features.aux, wanted, rtol=1e-2, atol=1e-4)
        final = states[-1][0, features.final_positions].bfloat16()
        torch.testing.assert_close(features.final, final, rtol=1e-2, atol=1e-3)
    totals = store.manifest["totals"]
    assert totals["documents"] == len(store) == 48
    assert totals["supervised_tokens"] == sum(e - s for d in store.documents for s, e in d.spans)
    assert store.manifest["canary"]["argmax_agreement"] > 0.98


def test_reading_maps_the_shard_and_copies_nothing(run: Run) -> None:
    work(run)
    store = FeatureStore.open(run.directory / "features")
    one, again = store.read(1), store.read(1)
    assert one.aux.data_ptr() == again.aux.data_ptr()
    assert one.aux.untyped_storage().data_ptr() == store.read(0).final.untyped_storage().data_ptr()


def test_a_shard_is_checked_when_it_is_first_used_once_however_many_threads_want_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(run)
    checked: list[str] = []

    def counted(path: Path) -> str:
        checked.append(path.name)
        return file_sha256(path)

    monkeypatch.setattr(featurize.store, "file_sha256", counted)
    store = FeatureStore.open(run.directory / "features")
    edges = zip(store.starts_N, store.starts_N[1:], strict=False)
    tokens = [store.tokens_T[start:end].clone() for start, end in edges]
    assert checked == []
    with ThreadPoolExecutor(8) as pool:
        features = list(pool.map(store.read, [*range(len(store))] * 3))
    assert sorted(checked) == sorted(path.name for path in (run.directory / "features/shards").glob("*.safetensors"))
    assert len(checked) >= 4
    for index, ids in enumerate(tokens):
        assert torch.equal(features[index].tokens, ids)


def test_documents_cut_at_the_limit_are_counted_with_what_they_lost(run: Run) -> None:
    work(run)
    whole = {document.id: document for document in FeatureStore.open(run.directory / "features").documents}
    run.name, run.data.max_tokens = "cut", 60
    work(run)
    store = FeatureStore.open(run.directory / "features")

    def supervised(document: Document) -> int:
        return sum(end - start for start, end in document.spans)

    lost = [supervised(whole[document.id]) - supervised(document) for document in store.documents]
    counted = store.manifest["totals"]["truncated"]
    assert counted == {"documents": sum(each > 0 for each in lost), "supervised_tokens": sum(lost)}
    assert 0 < counted["documents"] < len(store)


def test_a_second_launch_does_nothing_and_loads_no_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    work(run)
    monkeypatch.setattr("featurize.backends.load_backend", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr("featurize.__main__.load_or_tokenise", lambda *_: pytest.fail("conversations were rendered"))
    assert work(run) is False


def test_other_inputs_are_refused_by_name_and_equal_contents_elsewhere_are_not(
    run: Run, overrides: list[str], tiny_conversations: Path, make_target: Any, tmp_path: Path
) -> None:
    work(run)
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(tiny_conversations.read_bytes())
    run.data.conversations = [str(copy)]
    assert work(run) is False
    copy.write_bytes(copy.read_bytes() + copy.read_bytes())
    run.data.max_tokens = 77
    with pytest.raises(
        Refused, match=r"data.conversations \(contents\), data.max_tokens \(was 2048, is 77\); use anoth"
    ):
        work(run)
    run.data, run.featurize.encoding = load(overrides).data, "int8"
    with pytest.raises(Refused, match=r"other inputs: featurize.encoding .was bf16, is int8.; use another"):
        work(run)
    run.featurize.encoding = "bf16"
    run.target.path = str(make_target(rms_norm_eps=1e-3))
    with pytest.raises(Refused, match="target configuration"):
        work(run)


def test_a_mistake_before_the_first_shard_can_be_mended_under_the_same_name(
    run: Run, overrides: list[str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("no json")
    for files, message in ([], "data.conversations names no file"), ([str(broken)], "broken.jsonl:1 is not JSON"):
        run.data.conversations = files
        with pytest.raises(Refused, match=message):
            work(run)
    assert work(load(overrides))


def test_a_device_that_torch_does_not_know_is_told_in_a_line_before_documents_are_rendered(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featurize.__main__.load_or_tokenise", lambda *_: pytest.fail("conversations were rendered"))
    run.featurize.device = "gpu"
    with pytest.raises(Refused, match=r"^featurize.device=gpu is no device of torch; say auto, cpu, cuda or cuda:1$"):
        work(run)


@pytest.mark.parametrize(
    "wrong", ["canary_documents=-1", "batch_tokens=0", "shard_tokens=0", "in_flight=0", "timeout_s=0.0"]
)
def test_options_with_impossible_values_are_refused_by_name(overrides: list[str], wrong: str) -> None:
    with pytest.raises(Refused, match=f"featurize.{wrong} must "):
        load([*overrides, f"featurize.{wrong}"])


def test_b12_only_the_torn_shard_is_computed_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    work(run)
    directory = run.directory / "features"
    before = contents(directory)
    shards = sorted(directory.glob("shards/*.safetensors"))
    times = {path: path.stat().st_mtime_ns for path in shards}
    assert len(shards) >= 4
    computed: list[int] = []

    def counted(backend: Any, tokenised: Any, unit: Any, *rest: Any) -> Any:
        computed.append(unit.index)
        return extract_unit(backend, tokenised, unit, *rest)

    monkeypatch.setattr(featurize.extract, "extract_unit", counted)
    shards[1].write_bytes(shards[1].read_bytes()[:-100])
    with pytest.raises(
        Refused, match=r"00001.safetensors is torn \(\d+ of \d+ bytes\); run `python -m featurize` again"
    ):
        FeatureStore.open(directory)
    assert work(run)
    assert computed == [1]
    assert contents(directory) == before
    assert all(path.stat().st_mtime_ns == times[path] for path in shards if path != shards[1])

    # A flipped byte is found when the shard is used, and mended when the shard is removed.
    flipped = bytearray(shards[2].read_bytes())
    flipped[-5] ^= 1
    shards[2].write_bytes(flipped)
    store = FeatureStore.open(directory)
    store.read(0)
    with pytest.raises(Refused, match=r"00002.safetensors is damaged"):
        store.read(store.manifest["files"][2]["first"])
    shards[2].unlink()
    assert work(run)
    assert computed == [1, 2]
    assert contents(directory) == before


@pytest.mark.parametrize("more", [[], ["featurize.teacher_k=8", "draft.vocab_size=100"]], ids=["planes", "top-k"])
def test_a_stage_killed_again_and_again_ends_with_the_same_bytes(
    overrides: list[str], more: list[str], tmp_path: Path
) -> None:
    overrides = [*overrides, "featurize.shard_tokens=100", *more]
    reference = load([*overrides, "name=whole"])
    work(reference)
    directory = tmp_path / "a" / "features"
    for shards in (1, 5):
        process = command(overrides)
        while process.poll() is None and len(list(directory.glob("shards/*.json"))) < shards:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if not (directory / "manifest.json").exists():
            with pytest.raises(Refused, match="incomplete"):
                FeatureStore.open(directory)
    (directory / "shards" / ".00001.safetensors.1234.tmp").write_bytes(b"left by a kill")
    process = command(overrides)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "tokens/s" in out
    assert contents(directory) == contents(reference.directory / "features")


def test_b42_processes_that_start_apart_share_one_folder_and_relative_paths_are_from_where_they_started(
    overrides: list[str], tiny_conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    shutil.copy(tiny_conversations, tmp_path / "data/chats.jsonl")
    relative = [*overrides, "root=runs", "data.conversations=[data/chats.jsonl]"]
    first = command(relative, tmp_path)
    time.sleep(1.5)
    second = command(relative, tmp_path)
    for process in (first, second):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert {path.name for path in tmp_path.iterdir()} == {"data", "runs"}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    monkeypatch.chdir(tmp_path)
    assert work(load(relative)) is False, "a third launch finds what they have made"


def test_a_users_mistake_is_one_line_and_exit_code_2(overrides: list[str], tmp_path: Path) -> None:
    process = command([*overrides, f"data.conversations=[{tmp_path}/absent.jsonl]"])
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.strip().splitlines()[-1].startswith("featurize: no such file: ")
    assert "Traceback" not in err


def test_b05_a_set_without_any_supervised_row_is_refused_with_counts(run: Run) -> None:
    run.data.max_tokens = 4
    with pytest.raises(Refused, match="no document is left.*48 x no supervised row within data.max_tokens=4"):
        work(run)


def test_the_first_documents_alone_can_be_taken(run: Run) -> None:
    run.data.limit = 5
    work(run)
    assert len(FeatureStore.open(run.directory / "features")) == 5


def test_of_a_route_so_many_documents_as_its_limit_says(run: Run) -> None:
    run.data.route_limits = {"json": 3}
    work(run)
    routes = [document.route for document in FeatureStore.open(run.directory / "features").documents]
    assert (routes.count("chat"), routes.count("json")) == (24, 3)


def test_b07_features_of_another_target_template_or_layers_do_not_fit(run: Run, make_target: Any) -> None:
    work(run)
    store = FeatureStore.open(run.directory / "features")
    target = describe_target(run.target)
    with pytest.raises(Refused, match=r"aux_layers is \(2, 4, 5\) in the store and \(1, 4, 5\)"):
        store.require(target, [1, 4, 5])
    run.target.dtype = "bfloat16"
    with pytest.raises(Refused, match="dtype is float32 in the store and bfloat16"):
        store.require(describe_target(run.target), LAYERS)
    run.target.dtype, run.target.path = "float32", str(make_target(hidden_size=32))
    with pytest.raises(Refused, match="hidden_size is 64 in the store and 32"):
        store.require(describe_target(run.target), LAYERS)
    template = make_target()
    config = json.loads((template / "tokenizer_config.json").read_text())
    jinja = template / "chat_template.jinja"
    assert jinja.exists() or "chat_template" in config
    jinja.write_text(jinja.read_text() + " ")
    run.target.path = str(template)
    with pytest.raises(Refused, match="tokenizer is .* in the store"):
        store.require(describe_target(run.target), LAYERS)


def test_b09_features_that_call_their_final_plane_otherwise_do_not_fit(run: Run) -> None:
    work(run)
    contract, target = FeatureStore.open(run.directory / "features").contract, describe_target(run.target)
    contract.require(target, LAYERS)
    with pytest.raises(Refused, match="final is pre_norm in the store and post_norm in this run"):
        replace(contract, final="pre_norm").require(target, LAYERS)


def test_the_fingerprint_of_a_store_is_that_of_its_contents(run: Run) -> None:
    work(run)
    first = FeatureStore.open(run.directory / "features").fingerprint
    run.name = "b"
    work(run)
    assert FeatureStore.open(run.directory / "features").fingerprint == first
    run.name, run.data.limit = "c", 47
    work(run)
    assert FeatureStore.open(run.directory / "features").fingerprint != first


def test_a_launch_with_other_settings_during_the_canary_does_not_change_the_documents_under_the_first(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, target = stage.checked_backend, describe_target(run.target)
    other = replace(run.data, max_tokens=60)

    @contextmanager
    def meanwhile(*arguments: Any) -> Iterator[Any]:
        inputs = describe_inputs(other, run.featurize, target, LAYERS, {})
        load_or_tokenise(run.directory / "features", other, target, run.target, inputs)
        with opened(*arguments) as found:
            yield found

    monkeypatch.setattr(stage, "checked_backend", meanwhile)
    assert stage.work(run)
    assert "everything is as its manifest says" in verify(run.directory / "features", target, LAYERS)


def test_missing_and_unfinished_stores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no features in"):
        FeatureStore.open(tmp_path / "absent")
    with pytest.raises(Refused, match="incomplete"):
        FeatureStore.open(tmp_path)
