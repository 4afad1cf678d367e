"""The folder that shards pass through: what may lie there, who makes it, and what is left of the dead."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from featurize.claims import EXTRACTING, TRAINING, Claims
from featurize.config import SpoolConfig
from featurize.contract import FeatureContract
from featurize.shards import Unit, Widths, cut_units, map_tensors, shard_path
from featurize.spool import Demand, Made, Pace, Spool, fill, make_next
from featurize.spooled import SpoolStore
from featurize.tokenised import Document, TokenisedSet
from models.errors import Refused

ROOT = Path(__file__).parents[2]
WIDTHS = Widths(64, 3, "bf16")
UNITS = [Unit(i, 4 * i, 4 * i + 4, 100 + i, 50, False, f"key{i}") for i in range(10)]
SIZE = Spool(Path(), SpoolConfig(1.0), UNITS, WIDTHS).sizes[9]
BOUND = int(4.5 * SIZE)
ATTENDS = (
    "import sys, time, pathlib; from featurize.claims import Claims\n"
    "claims = Claims(pathlib.Path(sys.argv[1])); claims.attend(int(sys.argv[2])); claims.sole(); "
    "print('there', flush=True); time.sleep(600)"
)


@pytest.fixture
def claims(tmp_path: Path) -> Claims:
    return Claims(tmp_path)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """Room for four shards of ten."""
    return Spool(tmp_path, SpoolConfig(BOUND / 1e9, patience_s=0.3), UNITS, WIDTHS)


def made(unit: Unit) -> Made:
    planes = torch.full((unit.tokens, 3, 64), float(unit.first)).bfloat16(), torch.ones(unit.finals, 64).bfloat16()
    return torch.zeros(unit.tokens, dtype=torch.int32), *planes


def there(spool: Spool) -> list[int]:
    return sorted(int(path.stem) for path in spool.directory.glob("shards/*.safetensors"))


def taken(spool: Spool) -> int:
    return sum(path.stat().st_size for path in spool.directory.rglob("shards/*"))


def make_all(spool: Spool, claims: Claims, demand: Demand) -> None:
    while make_next(spool, claims, demand, made, Pace()):
        assert taken(spool) <= spool.bound


def attending(directory: Path, side: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ATTENDS, str(directory), str(side)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    return process


def test_every_epoch_takes_every_shard_once_in_an_order_of_its_own(spool: Spool) -> None:
    demand = Demand(seed=5, epochs=3, bound=BOUND)
    numbers = [spool.which(demand, number) for number in range(spool.total(demand))]
    epochs = [numbers[at : at + 10] for at in (0, 10, 20)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert numbers[:10] == [spool.which(Demand(seed=5, epochs=1, bound=BOUND), number) for number in range(10)]


def test_what_fits_is_made_in_order_and_more_when_room_is_given_back(spool: Spool, claims: Claims) -> None:
    demand = Demand(seed=0, epochs=1, bound=BOUND)
    spool.tell(demand)
    make_all(spool, claims, demand)
    assert there(spool) == [0, 1, 2, 3]
    # Done with but not removed yet: not made again, and no room for others.
    demand = replace(demand, done=2)
    spool.tell(demand)
    make_all(spool, claims, demand)
    assert there(spool) == [0, 1, 2, 3]
    spool.remove(range(2))
    demand = replace(demand, freed=2)
    spool.tell(demand)
    make_all(spool, claims, demand)
    assert there(spool) == [2, 3, 4, 5]
    unit = UNITS[spool.which(demand, 4)]
    tensors = map_tensors(shard_path(spool.directory, replace(unit, index=4)))
    assert tensors["aux"].shape == (unit.tokens, 3, 64) and float(tensors["aux"][0, 0, 0]) == unit.first


def test_a_killed_writers_halves_are_gone_before_the_shard_is_written_again(spool: Spool, claims: Claims) -> None:
    demand = Demand(seed=0, epochs=1, bound=BOUND)
    spool.tell(demand)
    folder = spool.directory / "shards"
    folder.mkdir()
    (folder / ".00001.safetensors.abc.tmp").write_bytes(bytes(SIZE - 4096))
    (folder / "00003.safetensors").write_bytes(bytes(SIZE - 4096))
    (folder / ".00003.json.abc.tmp").touch()
    make_all(spool, claims, demand)
    files = [f"0000{number}.{end}" for number in range(4) for end in ("json", "safetensors")]
    assert sorted(path.name for path in folder.iterdir()) == files


def test_training_that_begins_anew_keeps_what_it_can_use(spool: Spool, claims: Claims) -> None:
    demand = Demand(seed=0, epochs=2, bound=BOUND, done=4, freed=4)
    spool.tell(demand)
    make_all(spool, claims, demand)
    assert there(spool) == [4, 5, 6, 7]
    (spool.directory / "shards/.00007.json.abc.tmp").touch()
    earlier = replace(demand, done=2, freed=2)
    spool.ask(claims, earlier)
    assert sorted(path.name for path in spool.directory.glob("shards/*.json")) == ["00004.json", "00005.json"]
    assert there(spool) == [4, 5] and not list(spool.directory.glob("shards/.*"))
    make_all(spool, claims, earlier)
    assert there(spool) == [2, 3, 4, 5]
    other = Demand(seed=1, epochs=2, bound=BOUND, done=2, freed=2)  # other shards have these numbers
    spool.ask(claims, other)
    assert there(spool) == [n for n in range(2, 6) if spool.which(other, n) == spool.which(earlier, n)] != [2, 3, 4, 5]


def test_a_shard_that_is_not_asked_for_any_more_when_it_is_done_is_not_written(spool: Spool, claims: Claims) -> None:
    demand = Demand(seed=0, epochs=1, bound=BOUND, done=5, freed=5)
    spool.tell(demand)

    def made_while_training_begins_anew(unit: Unit) -> Made:
        spool.ask(claims, Demand(seed=0, epochs=1, bound=BOUND))
        return made(unit)

    assert make_next(spool, claims, demand, made_while_training_begins_anew, Pace())
    assert there(spool) == []


def test_only_one_training_takes_from_a_spool(spool: Spool, claims: Claims) -> None:
    other = attending(spool.directory, TRAINING)
    with pytest.raises(Refused, match="another training takes from .*; give each a spool.directory of its own"):
        spool.ask(claims, Demand(seed=0, epochs=1, bound=BOUND))
    other.kill()
    other.communicate()
    spool.ask(claims, Demand(seed=0, epochs=1, bound=BOUND))


DOCUMENTS = [Document(f"d{i}", "chat", 25, ((5, 20),)) for i in range(40)]


@pytest.fixture
def store(spool: Spool, claims: Claims) -> SpoolStore:
    """The training side, with four documents to a shard; none is held out."""
    tokens = torch.arange(1000, dtype=torch.int32)
    tokenised = TokenisedSet(DOCUMENTS, tokens, "key", {}, {"documents": 0, "supervised_tokens": 0})
    spool.units = cut_units(tokenised, 100)
    contract = FeatureContract(
        target_config="", target_weights="", hidden_size=64, vocab_size=9, dtype="float32", aux_layers=(1, 2, 3),
        encoding="bf16", final="post_norm", tokenizer="", backend="", backend_version="",
    )  # fmt: skip
    opened = {"contract": contract.to_json(), "inputs": {}, "files": []}, tokenised
    return SpoolStore(spool, claims, opened, Demand(seed=0, epochs=2, bound=BOUND))


def test_documents_are_read_from_the_shards_of_their_epoch(store: SpoolStore, claims: Claims) -> None:
    store.ask(done=8)  # the last two shards of the first epoch, and two of the second
    make_all(store.spool, claims, Demand(seed=0, epochs=2, bound=BOUND, done=8, freed=8))
    assert store.wait(range(8, 12), 0, 1, lambda: False) is None
    for number in range(8, 12):
        unit = store.spool.units[store.spool.which(Demand(seed=0, epochs=2, bound=BOUND), number)]
        for index in range(unit.first, unit.last):
            features = store.in_epoch(number // 10).read(index)
            assert features.aux.shape == (25, 3, 64) and bool((features.aux == unit.first).all())
    store.free(done=11)
    assert there(store.spool) == [11]


def test_a_damaged_shard_is_named_by_whose_share_it_is_and_made_again(store: SpoolStore, claims: Claims) -> None:
    demand = Demand(seed=0, epochs=2, bound=BOUND)
    store.ask(done=0)
    make_all(store.spool, claims, demand)
    path = store.directory / "shards/00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert store.wait(range(4), 1, 2, lambda: False) is None
    told = store.wait(range(4), 0, 2, lambda: False)
    assert told is not None and "00002.safetensors was damaged" in told
    make_all(store.spool, claims, demand)
    assert store.wait(range(4), 0, 2, lambda: False) is None


def test_who_finds_a_shard_damaged_waits_for_the_others_of_its_step_as_all_do(
    store: SpoolStore, claims: Claims
) -> None:
    store.ask(done=0)
    make_all(store.spool, claims, Demand(seed=0, epochs=2, bound=BOUND))
    (store.directory / "shards/00000.safetensors").write_bytes(
        bytes((store.directory / "shards/00000.safetensors").stat().st_size)
    )
    (store.directory / "shards/00003.json").unlink()
    asked: list[int] = []

    def leave() -> bool:
        asked.append(1)
        make_all(store.spool, claims, Demand(seed=0, epochs=2, bound=BOUND))
        return False

    told = store.wait(range(4), 0, 2, leave)
    assert asked and told is not None and "00000.safetensors was damaged" in told


def test_nobody_waits_longer_than_he_has_to(store: SpoolStore) -> None:
    store.ask(done=0)
    assert "shard 0 of 20 is not there; start `python -m featurize`" in str(store.wait(range(4), 0, 1, lambda: False))
    assert store.wait(range(4), 0, 1, lambda: True) is None, "asked to stop, it goes on waiting"
    threading.Timer(0.3, store.close).start()
    with pytest.raises(Refused, match="is not waited for any longer"):
        store.in_epoch(0).read(0)


def test_held_out_documents_of_another_share_are_refused(store: SpoolStore) -> None:
    store.require_kept([])
    with pytest.raises(Refused, match="give both stages the same data.validation_share"):
        store.require_kept([3])


def test_a_bound_below_one_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is less than a shard of"):
        Spool(tmp_path, SpoolConfig(0.9 * SIZE / 1e9), UNITS, WIDTHS)


def test_a_bound_beyond_what_is_free_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="GB free; lower spool.gigabytes="):
        Spool(tmp_path, SpoolConfig(1e9), UNITS, WIDTHS).check_space([])


def test_a_side_is_seen_while_one_of_its_processes_lives(tmp_path: Path, claims: Claims) -> None:
    assert not claims.anyone(TRAINING)
    two = [attending(tmp_path, TRAINING) for _ in range(2)]
    for process in two:
        assert claims.anyone(TRAINING) and not claims.anyone(EXTRACTING)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not claims.anyone(TRAINING)


def test_extraction_waits_while_training_lives_and_stops_when_it_is_gone(spool: Spool, claims: Claims) -> None:
    with pytest.raises(Refused, match=r"nobody has been training from .* for 0.3 s \(it never came\)"):
        fill(spool, claims, made)
    trainer = attending(spool.directory, TRAINING)
    spool.tell(Demand(seed=0, epochs=1, bound=BOUND))
    extraction = subprocess.Popen(
        [sys.executable, "-c", FILLS, str(spool.directory), str(spool.bound / 1e9)],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while there(spool) != [0, 1, 2, 3]:
        assert time.monotonic() < deadline and extraction.poll() is None
        time.sleep(0.05)
    with pytest.raises(subprocess.TimeoutExpired):
        extraction.wait(timeout=10 * spool.patience_s)
    trainer.kill()
    trainer.communicate()
    _, said = extraction.communicate(timeout=60)
    assert "(done with 0 of 10 shards); start `python -m train`, then this again" in said


def test_extraction_that_was_busy_waits_as_long_as_any_other_for_training_that_is_gone(
    spool: Spool, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0, gone=0.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    def made_slowly(unit: Unit) -> Made:
        clock.now += 100 * spool.patience_s
        if unit.index == 3:  # the last that fits; training, which was there all the time, leaves now
            clock.gone = clock.now
        return made(unit)

    monkeypatch.setattr("featurize.spool.time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    monkeypatch.setattr(claims, "anyone", lambda _side: not clock.gone)
    spool.tell(Demand(seed=0, epochs=1, bound=BOUND))
    with pytest.raises(Refused, match="nobody has been training"):
        fill(spool, claims, made_slowly)
    assert there(spool) == [0, 1, 2, 3]
    assert clock.now - clock.gone > spool.patience_s


FILLS = """
import sys, pathlib
sys.path.insert(0, ".")
from tests.featurize.test_spool import *
directory = pathlib.Path(sys.argv[1])
spool = Spool(directory, SpoolConfig(float(sys.argv[2]), patience_s=0.3), UNITS, WIDTHS)
fill(spool, Claims(directory), made)
"""


def test_extraction_ends_when_training_is_done_with_everything(
    spool: Spool, claims: Claims, capsys: pytest.CaptureFixture[str]
) -> None:
    spool.tell(Demand(seed=0, epochs=2, bound=BOUND, done=20, freed=20))
    fill(spool, claims, made)
    assert "training is done with 20 of 20 shards" in capsys.readouterr().out
    assert spool.finished()
    assert json.loads((spool.directory / "demand.json").read_text())["done"] == 20
