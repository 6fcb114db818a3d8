"""The folder in which PyTorch builds an operator: abandoned locks, and libraries for other versions."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from distexp.strategies.zero import ds_operators


def test_a_lock_on_a_shared_file_system_is_abandoned_after_a_long_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "lock"
    (tmp_path / ".distexp_lock").touch()
    lock.touch()
    known = frozenset(mount.fstype for mount in psutil.disk_partitions(all=True))
    monkeypatch.setattr(ds_operators, "LOCAL_FILE_SYSTEMS", known)
    assert ds_operators.is_abandoned(lock)
    with lock.open():
        assert not ds_operators.is_abandoned(lock)
    monkeypatch.setattr(ds_operators, "LOCAL_FILE_SYSTEMS", frozenset())
    assert not ds_operators.is_abandoned(lock)
    os.utime(lock, (time.time() - 3600,) * 2)
    assert ds_operators.is_abandoned(lock)
    (tmp_path / "one.o").touch()
    assert not ds_operators.is_abandoned(lock)


@pytest.mark.parametrize("version", ["torch", "python", "deepspeed"])
def test_a_library_for_other_versions_is_removed(tmp_path: Path, version: str) -> None:
    """After an upgrade of PyTorch, the commands of the compiler may be the same."""
    library, stamp = tmp_path / "adam.so", tmp_path / ds_operators.STAMP
    for name in ("adam.so", "one.o", "build.ninja", "lock"):
        (tmp_path / name).write_text("of another version")
    ds_operators.remove_outdated(tmp_path, library)
    assert library.exists(), "it was built by another program"
    ds_operators.write_stamp(tmp_path, library)
    ds_operators.remove_outdated(tmp_path, library)
    assert library.exists(), "it is for these versions"
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), version: "1.0"}))
    ds_operators.remove_outdated(tmp_path, library)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_library_that_is_older_than_the_installed_sources_is_built_again(tmp_path: Path) -> None:
    """Ninja would compile it in a worker, within the time limits of the run."""
    library = tmp_path / "adam.so"
    library.write_text("of an earlier installation")
    ds_operators.write_stamp(tmp_path, library)
    assert not ds_operators.is_older_than_sources(library)
    os.utime(library, (0, 0))
    assert ds_operators.is_older_than_sources(library)
    ds_operators.remove_outdated(tmp_path, library)
    assert not library.exists()
