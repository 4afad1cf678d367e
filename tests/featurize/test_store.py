"""Several processes make one store: units in any order, each computed by one of them, the same bytes in the end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conf import load
from featurize.__main__ import work
from featurize.claims import Claims
from featurize.store import FeatureStore
from models.errors import Refused

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
    ends = [worker.communicate(timeout=120) for worker in three]
    assert [worker.returncode for worker in three] == [0, 0, 0], ends
    computed = sorted(unit for out, _ in ends for unit in units_in(out))
    assert computed == sorted(set(range(shards)) - kept | {torn}), "a unit was left out, or computed more than once"
    assert sum(bool(units_in(out)) for out, _ in ends) > 1, "one worker did everything"
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
