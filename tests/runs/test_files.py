"""Atomic writing: a failed writer changes nothing and leaves nothing."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from distexp.launch import run_dirs
from distexp.runs.attempts import run_lock
from distexp.runs.events import ProgressWriter
from distexp.runs.memory_trace import MemoryTraceWriter
from distexp.runs.run_dir import log_dir
from distexp.system.files import create_atomically, replace_atomically, write_json


def test_json_replaces_the_old_file_and_has_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for content in ({"loss": 1.5}, {"loss": float("nan"), "losses": [float("inf"), 2]}):
        write_json(path, content)
    assert json.loads(path.read_text()) == {"loss": None, "losses": [None, 2]}
    assert [each.name for each in tmp_path.iterdir()] == ["record.json"]


def test_a_failed_writer_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("old")

    def write() -> None:
        with replace_atomically(path) as temporary:
            temporary.write_text("half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write()
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


def test_a_folder_replaces_a_folder(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with replace_atomically(tmp_path / "model") as temporary:
            temporary.mkdir()
            (temporary / name).touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "second"]


def test_a_folder_of_another_process_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "theirs").touch()

    def create() -> None:
        with create_atomically(tmp_path / "snapshot") as temporary:
            temporary.mkdir()
            (temporary / "ours").touch()

    with pytest.raises(OSError, match="not empty"):
        create()
    assert [path.name for path in tmp_path.rglob("*")] == ["snapshot", "theirs"]


@pytest.mark.parametrize(("mask", "file_mode", "folder_mode"), [(0o077, 0o600, 0o700), (0o002, 0o664, 0o775)])
def test_files_of_a_run_follow_the_umask(mask: int, file_mode: int, folder_mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_json(tmp_path / "spec.json", {})
        MemoryTraceWriter(tmp_path / "memory" / "node0.csv").close()
        log_dir(tmp_path, 0).mkdir(parents=True)
        ProgressWriter(tmp_path, 0, 0).advance("train", 1)
        run_dirs.append(tmp_path, [run_dirs.Entry(0, "id", "0", None, "submitted")])
        with run_lock(tmp_path):
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
            folders = {path.name for path in tmp_path.rglob("*") if path.is_dir()}
    finally:
        os.umask(before)
    assert {".running", "ledger.jsonl", "node0.csv", "spec.json"} <= set(modes)
    assert modes == {name: folder_mode if name in folders else file_mode for name in modes}
