"""Several processes make one store: units in any order, each computed by one of them, the same bytes in the end."""

from __future__ import annotations

import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from conf import load
from featurize.__main__ import work
from featurize.claims import Claims
from featurize.shards import shard_key
from featurize.store import FeatureStore, link_features
from featurize.verify import verify
from models.artefact import file_sha256, write_tensors
from models.errors import Refused
from models.target import Target, describe_target

ROOT = Path(__file__).parents[2]


@pytest.fixture
def overrides(tmp_path: Path, tiny_target_dir: Path, tiny_conversations: Path) -> list[str]:
    return [
        f"root={tmp_path}",
        f"target.path={tiny_target_dir}",
        "target.dtype=float32",
        f"data.conversations=[{tiny_conversations}]",
        "featurize.shard_tokens=60",
        "featurize.batch_tokens=300",
        "featurize.device=cpu",
        "featurize.encoding=int8",
    ]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


# Every unit takes a moment, so that processes that start some seconds apart meet; what each computes is printed.
WORKER = """
import sys, time
import featurize.extract as extract
import featurize.verify
from conf import load
from featurize.__main__ import work
one = extract.extract_unit
def slow(backend, tokenised, unit, *rest):
    time.sleep(0.15)
    print("unit", unit.index, flush=True)
    return one(backend, tokenised, unit, *rest)
extract.extract_unit = slow
work(load(sys.argv[1:]))
"""


def start(overrides: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WORKER, *overrides]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def units_in(said: str) -> list[int]:
    return [int(line.split()[1]) for line in said.splitlines() if line.startswith("unit ")]


def test_two_workers_killed_and_three_started_again_make_the_store_that_one_makes(
    overrides: list[str], tmp_path: Path
) -> None:
    whole = load([*overrides, "name=whole"])
    work(whole)
    directory, rng = tmp_path / "shared" / "features", random.Random(time.time_ns())
    shards = len(list((whole.directory / "features/shards").glob("*.json")))
    assert shards > 20

    def finished() -> set[int]:
        return {int(path.stem) for path in directory.glob("shards/*.json")}

    both = [start([*overrides, "name=shared"]) for _ in range(2)]
    for worker in both:
        already = len(finished())
        enough = already + rng.randint(1, 4)
        while len(finished()) < enough and worker.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.2)
        worker.send_signal(signal.SIGKILL)
    for worker in both:
        _, err = worker.communicate(timeout=60)
        assert worker.returncode == -signal.SIGKILL, err
    with pytest.raises(Refused, match="incomplete"):
        FeatureStore.open(directory)
    kept = finished()
    torn = min(kept)
    path = directory / "shards" / f"{torn:05d}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])

    three = [start([*overrides, "name=shared"]) for _ in range(3)]
    ends = [worker.communicate(timeout=300) for worker in three]
    assert [worker.returncode for worker in three] == [0, 0, 0], ends
    computed = sorted(unit for out, _ in ends for unit in units_in(out))
    assert computed == sorted(set(range(shards)) - kept | {torn}), "a unit was left out, or computed more than once"
    assert contents(directory) == contents(whole.directory / "features")
    store = FeatureStore.open(directory)
    ids = [json.loads(line)["id"] for line in Path(whole.data.conversations[0]).read_text().splitlines()]
    assert [document.id for document in store.documents] == ids
    for index, document in enumerate(store.documents):
        assert store.read(index).aux.shape == (document.length, 3, 64)


def test_a_unit_that_another_process_holds_is_waited_for_and_taken_when_that_process_dies(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib; from featurize.claims import Claims\n"
        "with Claims(pathlib.Path(sys.argv[1])).unit(3, wait=True): print('mine', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "mine\n"
    claims = Claims(tmp_path)
    with claims.unit(3, wait=False) as mine:
        assert not mine
    with claims.unit(2, wait=False) as mine:
        assert mine
    holder.kill()
    with claims.unit(3, wait=True) as mine:
        assert mine
    holder.communicate()


@pytest.fixture
def complete(overrides: list[str]) -> tuple[Path, Target]:
    run = load([*overrides, "name=complete"])
    work(run)
    return run.directory / "features", describe_target(run.target)


def test_a_store_is_verified_whole(complete: tuple[Path, Target]) -> None:
    directory, target = complete
    files = len(json.loads((directory / "manifest.json").read_bytes())["files"])
    assert f"verify: {files} files" in verify(directory, target, [2, 4, 5])
    with pytest.raises(Refused, match="aux_layers"):
        verify(directory, target, [2, 4, 6])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def put_other(directory: Path, name: str, key: str, change_tokens: int = 0) -> None:
    """A shard that is sound in itself, and listed as if it were ours."""
    path = directory / name
    tensors = load_file(path)
    write_tensors(path, tensors | {"tokens": tensors["tokens"] + change_tokens}, {"key": key})

    def enlist(manifest: dict[str, Any]) -> None:
        for entry in manifest["files"]:
            if entry["file"] == name:
                manifest["totals"]["bytes"] += path.stat().st_size - entry["size"]
                entry.update(size=path.stat().st_size, sha256=file_sha256(path))

    change(directory, enlist)


def change(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((directory / "manifest.json").read_bytes())
    edit(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: flip(d / "shards/00007.safetensors"), "00007.safetensors is damaged"),
        (lambda d: flip(d / "tokenised.json"), "tokenised.json is"),
        (lambda d: tear(d / "shards/00005.safetensors"), r"00005.safetensors is torn \(\d+ of \d+ bytes\)"),
        (lambda d: (d / "shards/00003.safetensors").unlink(), "00003.safetensors is missing"),
        (
            lambda d: put_other(d, "shards/00004.safetensors", "another"),
            "00004.safetensors is a shard of other features",
        ),
        (
            lambda d: shutil.copy(d / "shards/00001.safetensors", d / "shards/00099.safetensors"),
            "00099.safetensors is none of the shards of",
        ),
        (lambda d: change(d, lambda m: m["totals"].update(tokens=5)), "says 5 tokens, its documents have"),
        (lambda d: change(d, lambda m: m["totals"].update(bytes=5)), "says 5 bytes"),
        (lambda d: change(d, lambda m: m["files"].pop(2)), r"says \d+ bytes, its files have \d+"),
        (
            lambda d: put_other(d, "shards/00006.safetensors", shard_key(d / "shards/00006.safetensors"), 1),
            "00006.safetensors holds other tokens",
        ),
        (
            lambda d: change(d, lambda m: m["files"][2].update(last=m["files"][2]["last"] + 1)),
            "00002.safetensors is a shard of other features",
        ),
        (lambda d: change(d, lambda m: m["files"][2].update(first=0)), "begins with document 0"),
    ],
)
def test_the_first_fault_of_a_store_is_named(complete: tuple[Path, Target], damage: Any, message: str) -> None:
    directory, target = complete
    damage(directory)
    with pytest.raises(Refused, match=message):
        verify(directory, target, [2, 4, 5])


def test_verify_speaks_in_one_line_and_exits_with_2(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, told in (
        (["name=absent"], "featurize.verify: no features in "),
        (["--fast"], "featurize.verify: unrecognized arguments: --fast; options are KEY=VALUE"),
    ):
        monkeypatch.setattr(sys, "argv", ["featurize.verify", *overrides, *words])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_module("featurize.verify", run_name="__main__")
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(told)
    assert not (Path(overrides[0].removeprefix("root=")) / "absent").exists()


def test_a_link_to_features_that_are_not_there_makes_room_for_another(tmp_path):
    (tmp_path / "a/features").mkdir(parents=True)
    link_features(tmp_path / "run", "b")  # which may yet be extracted, or is a typing error
    with pytest.raises(Refused, match=r"no features in .*; run `python -m featurize` for run b first"):
        FeatureStore.open(tmp_path / "run/features")
    for _ in range(2):
        link_features(tmp_path / "run", "a")
        assert (tmp_path / "run/features").resolve() == tmp_path / "a/features"
        assert os.listdir(tmp_path / "run") == ["features"]


def test_a_run_keeps_the_features_that_it_has(tmp_path):
    for owner in ("a", "b"):
        (tmp_path / owner / "features").mkdir(parents=True)
    link_features(tmp_path / "run", "a")
    with pytest.raises(Refused, match="is that of run a, not of features_of=b; choose another name"):
        link_features(tmp_path / "run", "b")
    with pytest.raises(Refused, match="is a folder of its own"):
        link_features(tmp_path / "a", "b")
    with pytest.raises(Refused, match="features_of=a is the run itself"):
        link_features(tmp_path / "a", "a")


def test_processes_that_start_at_once_share_the_link(tmp_path):
    (tmp_path / "a/features").mkdir(parents=True)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(400):
            list(pool.map(lambda _: link_features(tmp_path / "run", "a"), range(8)))
            (tmp_path / "run/features").unlink()
