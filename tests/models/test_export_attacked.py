"""An export that is killed, raced, refused by the disk or given a wrong checkpoint leaves a whole export or none."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models import artefact
from models import export as stage
from models.artefact import replacing_directory, write_bytes, write_json, write_tensors
from models.config import ExportConfig
from models.export import export_head, load_export
from tests.models.heads import save_trained

ROOT = Path(__file__).resolve().parents[2]
STALLED = """
import sys, time
from models import export
real = export.write_tensors

def stall(*arguments):
    real(*arguments)
    print("written", flush=True)
    time.sleep(600)

export.write_tensors = stall
export.main()
"""


@pytest.fixture
def run(make_target, tmp_path) -> Path:
    """A run with a finished training, and the arguments of its stages in `arguments`."""
    target, directory = make_target(), tmp_path / "runs/tiny"
    checkpoint = directory / "train/checkpoints/step-0000012"
    save_trained(target, checkpoint)
    write_json(checkpoint / "state.json", {"progress": {"step": 12}})
    which = {"best": "checkpoints/step-0000012", "last": "checkpoints/step-0000012"}
    write_json(directory / "train/manifest.json", {"checkpoints": which})
    words = ["name=tiny", f"root={directory.parent}", f"target.path={target}", "target.dtype=float32"]
    (directory / "arguments").write_text("\n".join(words))
    return directory


def start(run: Path, *how: str) -> subprocess.Popen[str]:
    """The stage as a process of its own; its messages come through a pipe."""
    words = [sys.executable, *how, *(run / "arguments").read_text().split("\n")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=run.parent, env=environment, stdout=pipe, stderr=pipe, text=True)


def export(run: Path) -> subprocess.CompletedProcess[str]:
    process = start(run, "-m", "models.export")
    out, err = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_an_export_killed_in_the_middle_leaves_none_and_the_next_one_is_whole_and_sweeps_up(run):
    process = start(run, "-c", STALLED)
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    second = export(run)
    assert second.returncode == 2 and "another process is running stage export" in second.stderr
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (run / "export").exists() and len(list(run.glob(".export.*.tmp"))) == 1
    done = export(run)
    assert done.returncode == 0, done.stderr
    assert list(run.glob(".export.*")) == [run / ".export.lock"]
    head, _ = load_export(run / "export")
    assert torch.equal(head.ids_D, torch.arange(1, 301, 3))


def refused(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """The one line with which the stage, in this process, leaves with 2."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["export", *(run / "arguments").read_text().split("\n"), *more])
    with pytest.raises(SystemExit) as left:
        stage.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    return line


def test_a_full_disk_and_a_place_that_cannot_be_written_are_one_line_and_the_old_export_stays(
    run, make_target, tmp_path, monkeypatch, capsys
):
    target, _ = save_trained(make_target(), tmp_path / "again")
    export_head(run / "train/checkpoints/step-0000012", run / "export", target, ExportConfig())
    before = {path.name: path.read_bytes() for path in (run / "export").iterdir()}
    for code, told in ((errno.ENOSPC, "no space left on the disk"), (errno.EROFS, "Read-only file system: ")):

        def refuse(path: Path, *_: object, code: int = code) -> None:
            raise OSError(code, os.strerror(code), str(path))

        monkeypatch.setattr(stage, "write_tensors", refuse)
        assert told in refused(run, monkeypatch, capsys, "export.dtype=float32")
        assert {path.name: path.read_bytes() for path in (run / "export").iterdir()} == before
        assert list(run.glob(".export.*")) == [run / ".export.lock"]


def test_an_old_directory_comes_back_when_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    place = tmp_path / "d"
    with replacing_directory(place) as inside:
        write_bytes(inside / "x", b"old")
    real = os.replace

    def refuse(source: Path, wanted: Path) -> None:
        if wanted == place and not source.name.endswith(".old.tmp"):
            raise OSError(errno.EIO, "broken", str(wanted))
        real(source, wanted)

    with pytest.raises(OSError, match="broken"), replacing_directory(place) as inside:
        write_bytes(inside / "y", b"new")
        monkeypatch.setattr(artefact.os, "replace", refuse)
    assert os.listdir(tmp_path) == ["d"] and (place / "x").read_bytes() == b"old"


def test_a_checkpoint_with_a_nan_or_of_another_target_is_one_line_and_nothing_is_written(
    run, make_target, monkeypatch, capsys
):
    checkpoint = run / "train/checkpoints/step-0000012"
    tensors = load_file(checkpoint / "head.safetensors")
    tensors["norm.weight"][3] = math.nan
    write_tensors(checkpoint / "head.safetensors", tensors)
    assert "norm.weight holds values that are not finite" in refused(run, monkeypatch, capsys)
    save_trained(make_target(rms_norm_eps=1e-4), checkpoint)
    made_for = json.loads((checkpoint / "head.json").read_text())["target"]["config_hash"]
    told = refused(run, monkeypatch, capsys)
    assert "was trained for another target than" in told and f"(configuration {made_for}, here " in told
    assert not (run / "export").exists() and not list(run.glob(".export.*.tmp"))


def test_two_threads_that_export_at_once_leave_one_whole_export(make_target, tmp_path):
    target, head = save_trained(make_target(), tmp_path / "checkpoint")
    failures: list[OSError] = []

    def work(dtype: str) -> None:
        try:
            export_head(tmp_path / "checkpoint", tmp_path / "export", target, ExportConfig(dtype=dtype))
        except OSError as error:  # the other one was first
            failures.append(error)

    threads = [threading.Thread(target=work, args=(dtype,)) for dtype in ("float32", "bfloat16")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) < 2 and torch.equal(load_export(tmp_path / "export")[0].ids_D, head.ids_D)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "export"}
