"""Files appear whole or not at all."""

from __future__ import annotations

import errno
import os
import resource
import stat

import pytest
import torch

from models import artefact
from models.artefact import fingerprint, read_json, replacing_directory, write_bytes, write_json, write_tensors
from models.errors import Refused


def test_a_write_that_fails_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    monkeypatch.setattr(artefact, "_flush", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full", str(path))))
    with pytest.raises(OSError, match="full"):
        write_json(path, {"new": 2})
    assert read_json(path) == {"old": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_directory_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError), replacing_directory(tmp_path / "d") as inside:
        write_bytes(inside / "x", b"1")
        raise RuntimeError
    assert os.listdir(tmp_path) == []
    for content in (b"1", b"2"):
        with replacing_directory(tmp_path / "d") as inside:
            write_bytes(inside / "x", content)
        assert (tmp_path / "d" / "x").read_bytes() == content
    assert os.listdir(tmp_path) == ["d"]


def test_all_that_is_in_a_directory_is_on_the_disk_before_it_appears(tmp_path, monkeypatch):
    flushed: list[str] = []
    monkeypatch.setattr(artefact, "_flush", lambda path: flushed.append(path.name))
    with replacing_directory(tmp_path / "d") as inside:
        (inside / "folder").mkdir()
        for name in ("a", "folder/b"):
            (inside / name).touch()
    assert {"a", "folder", "b"} <= set(flushed[:-1]) and flushed[-1] == tmp_path.name


def test_files_are_as_readable_as_any_other_file(tmp_path):
    old = os.umask(0o022)
    try:
        write_tensors(tmp_path / "t.safetensors", {"a": torch.ones(2)})
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "t.safetensors").stat().st_mode) == 0o644


def test_torn_json_is_refused_by_name_and_fingerprints_ignore_order(tmp_path):
    write_bytes(tmp_path / "torn.json", b'{"a": ')
    with pytest.raises(Refused, match="torn.json is not valid JSON"):
        read_json(tmp_path / "torn.json")
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1, "b": 3})


def test_what_the_disk_refuses_is_told_with_its_number_when_tensors_are_written(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a full disk, near enough: EFBIG for ENOSPC
    try:
        with pytest.raises(OSError) as caught:
            write_tensors(tmp_path / "t.safetensors", {"a": torch.ones(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == []
