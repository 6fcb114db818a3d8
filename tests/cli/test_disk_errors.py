"""Directories that cannot be written: one message with the reason and what to type, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distexp.cli.main import main
from distexp.runs.record import RunRecord
from tests.helpers.records import record, write
from tests.helpers.small_disk import fill, small_disk

SMALL = ("strategy=single", "model=gpt_tiny", "dataset=synthetic", "cluster.device=cpu", "train.max_steps=1")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a disk of 64 KiB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["distexp"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with small_disk(tmp_path / "disk", "64k") as folder:
        yield folder


@pytest.mark.parametrize("key", ["hydra.sweep.dir", "hydra.run.dir"])
def test_a_full_disk_stops_a_sweep_before_its_first_run(
    key: str, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(disk)
    assert main([f"{key}={disk}/sweep", *SMALL]) == 1
    assert capsys.readouterr().err == (
        f"distexp: the sweep stops: No space left on device ({disk}/sweep): free space, or choose another directory "
        f"with {key}=DIR\n"
    )


def test_a_file_is_no_directory_of_a_sweep(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (disk / "file").touch()
    assert main([f"hydra.sweep.dir={disk}/file", *SMALL]) == 1
    assert capsys.readouterr().err == (
        f"distexp: the sweep stops: File exists ({disk}/file): choose another directory with hydra.sweep.dir=DIR\n"
    )


def test_a_report_on_a_full_disk_leaves_no_partial_file(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = disk / "sweep"
    write(sweep, record(0))
    fill(disk)
    assert main(["report", str(sweep)]) == 1
    assert capsys.readouterr().err == (
        f"distexp: cannot write to {sweep}/report: No space left on device. Free space and repeat the command\n"
    )
    assert [path for path in (sweep / "report").rglob("*") if path.is_file()] == []


def test_a_read_only_sweep_can_be_looked_at_but_not_continued(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = disk / "sweep"
    write(sweep, record(0))
    (sweep / "command.json").write_text(
        '{"words": ["strategy=single", "model=gpt_tiny"], "directory": "/gone", "cells": 1}'
    )
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert main(["status", str(sweep)]) == 0
    assert "1 completed" in capsys.readouterr().out
    assert main(["report", str(sweep)]) == 1
    message = f"cannot write to {sweep}/report: Read-only file system. Copy the folder to a place that you can write"
    assert message in capsys.readouterr().err
    for arguments, hint in (
        (["resume", str(sweep)], "copy the sweep to a folder that you can write, and resume the copy"),
        ([f"hydra.sweep.dir={disk}/other", *SMALL], "choose a directory that you can write with hydra.sweep.dir=DIR"),
    ):
        assert main(arguments) == 1
        message = capsys.readouterr().err
        assert f"distexp: the sweep stops: Read-only file system ({disk}/" in message
        assert message.endswith(f": {hint}\n")


def test_a_run_without_room_to_start_is_found_by_every_command_and_can_be_resumed(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 KiB are enough for the files of Hydra, and for a record, but not for the space that a run reserves."""
    sweep = disk / "sweep"
    assert main([f"hydra.sweep.dir={sweep}", *SMALL]) == 1
    stops = f"distexp: the sweep stops: No space left on device ({sweep}/0): free space"
    assert f"{stops}, or choose another directory with hydra.sweep.dir=DIR\n" in capsys.readouterr().err
    found = RunRecord.read(sweep / "0" / "record.json")
    assert found.error is not None
    assert (found.status, found.error.type) == ("failed", "DiskFull")
    assert f"the disk of {sweep}/0 is full (" in found.error.message
    assert main(["status", str(sweep)]) == 0
    assert "1 failed" in capsys.readouterr().out
    assert main(["cancel", str(sweep)]) == 0
    assert main(["resume", str(sweep)]) == 1
    assert f"{stops} and repeat the command\n" in capsys.readouterr().err, "resume refuses hydra.sweep.dir"
    assert RunRecord.read(sweep / "0" / "record.json") == found, "the earlier record stays"
    subprocess.run(["mount", "-o", "remount,size=9m", str(disk)], check=True)
    assert main(["resume", str(sweep)]) == 0
    assert RunRecord.read(sweep / "0" / "record.json").status == "completed"


def test_a_single_run_whose_first_files_do_not_fit_can_be_resumed(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["mount", "-o", "remount,size=40k", str(disk)], check=True)
    assert main([f"hydra.run.dir={disk}/run", *SMALL]) == 1
    assert f"to continue: distexp resume {disk}/run\n" in capsys.readouterr().out
    assert not (disk / "run" / "spec.json").exists()
    assert main(["resume", f"{disk}/run"]) == 1
    stops = f"distexp: the sweep stops: No space left on device ({disk}/run): free space and repeat the command\n"
    assert stops in capsys.readouterr().err
    subprocess.run(["mount", "-o", "remount,size=64k", str(disk)], check=True)
    assert main(["resume", f"{disk}/run"]) == 1
    assert stops in capsys.readouterr().err
    found = RunRecord.read(disk / "run" / "record.json").error
    assert found is not None
    assert found.message.endswith("start again on another disk with hydra.run.dir"), "the run has started"


def test_a_cache_that_is_no_folder_is_refused_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", "/dev/null")
    assert main([f"hydra.sweep.dir={tmp_path}/sweep", *SMALL]) == 2
    assert capsys.readouterr().err == (
        "distexp: cannot write to the cache directory /dev/null (File exists): set the environment variable "
        "DISTEXP_CACHE to a writable directory\n"
    )
    assert not (tmp_path / "sweep").exists()
