"""Tests of the status of a folder with several sweeps."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from distexp import ls
from distexp.report.__main__ import main as report
from distexp.runs.record_sections import RunError
from distexp.status import main
from distexp.system import files
from tests.helpers.records import record, write

LONG = "the value of the option is far too large for this machine and for this model, and for every other one as well"


def write_sweep(folder: Path, *overrides: tuple[str, ...], cells: int | None = None) -> None:
    """Write a sweep with one completed run for each list of overrides."""
    folder.mkdir(parents=True)
    command = {"words": [], "directory": str(folder), "cells": cells or len(overrides)}
    (folder / "command.json").write_text(json.dumps(command))
    for number, texts in enumerate(overrides):
        (folder / str(number)).mkdir()
        record(number, overrides=texts, loss=2.0 + number).write(folder / str(number))


@pytest.fixture
def sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with three sweeps: of two runs, of three runs, and of one run."""
    monkeypatch.setenv("COLUMNS", "160")
    write_sweep(tmp_path / "demo/first", ("strategy=ddp", "lr=1"), ("strategy=fsdp", "lr=1"))
    write_sweep(tmp_path / "demo/second", *(("strategy=ddp", f"seed={seed}") for seed in (7, 8, 9)), cells=5)
    write_sweep(tmp_path / "other", ("scale=tiny",))
    return tmp_path


def test_each_run_is_labeled_by_the_overrides_of_its_sweep(sweeps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweeps)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["folder", "run", "state", "overrides", "detail"]
    assert [line.split()[:4] for line in lines[1:7]] == [
        ["demo/first", "0", "completed", "strategy=ddp"],
        ["demo/first", "1", "completed", "strategy=fsdp"],
        ["demo/second", "0", "completed", "seed=7"],
        ["demo/second", "1", "completed", "seed=8"],
        ["demo/second", "2", "completed", "seed=9"],
        ["other", "0", "completed", "scale=tiny"],
    ]
    resume = f"distexp resume {sweeps / 'demo/second'}"
    assert lines[7:] == ["6 completed", f"demo/second: 2 not started: {resume}"]


def test_one_sweep_has_no_column_for_the_folder(sweeps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, columns in (("demo/first", ["run", "state", "overrides"]), ("other", ["run", "state", "detail"])):
        assert main([str(sweeps / folder)]) == 0
        assert capsys.readouterr().out.split()[:3] == columns


def test_a_file_is_no_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main([str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"distexp: {tmp_path}/file is a file: give the directory of a sweep\n"


def test_a_truncated_reason_names_the_sweep(
    sweeps: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for sweep in ("demo/first", "other"):
        record(0, status="failed", error=RunError("ValueError", LONG)).write(sweeps / sweep / "0")
    assert main([str(sweeps)]) == 0
    shown = capsys.readouterr().out
    for sweep in ("demo/first", "other"):
        assert f"\n{sweep}: run 0 failed: ValueError: {LONG}\n" in shown


def test_ls_lists_the_sweeps_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for name, words in (("first", ["--multirun", "zero_stage='1','2'"]), ("second", ["--multirun", "train.seed=1"])):
        write(tmp_path / "sweeps" / name, record(0), record(1, status="failed", error=RunError("ValueError", "oh")))
        command, cells = ("plan", 1) if name == "second" else ("train", 2)
        content = {"command": command, "words": words, "directory": "/", "cells": cells}
        (tmp_path / "sweeps" / name / "command.json").write_text(json.dumps(content))
        os.utime(tmp_path / "sweeps" / name / "command.json", (1e9 + len(words), 1e9 + (name == "second")))
    assert ls.main([str(tmp_path / "sweeps")]) == 0
    first, command, second, other = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path / 'sweeps' / 'first'}  2001-09-09 ")
    assert first.endswith("  1 completed, 1 failed")
    assert second.startswith(f"{tmp_path / 'sweeps' / 'second'}  ")
    assert (command, other) == ("    distexp --multirun zero_stage=1,2", "    distexp plan train.seed=1")
    content |= {"command": "train", "words": ["--multirun", "train.seed=range(1,2)"]}  # a sweep of one cell
    (tmp_path / "sweeps" / "second" / "command.json").write_text(json.dumps(content))
    assert ls.main([str(tmp_path / "sweeps"), "-n", "1"]) == 0
    shown = capsys.readouterr().out
    assert "\n    distexp --multirun 'train.seed=range(1,2)'\n" in shown
    assert f"1 older sweep: distexp ls {tmp_path / 'sweeps'} -n 2" in shown
    assert ls.main([str(tmp_path / "sweeps"), "-n", "0"]) == 2
    assert capsys.readouterr().err == "distexp: -n 0 shows no sweep: write -n N with a number from 1\n"
    assert ls.main([str(tmp_path / "none")]) == 2
    assert "no sweep below" in capsys.readouterr().err


def test_a_sweep_that_cannot_be_read_hides_no_other(
    sweeps: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ledger is a pipe, and a link to nothing has the name of a sweep's file. A long search is announced."""
    os.mkfifo(sweeps / "other" / "ledger.jsonl")
    (sweeps / "broken").mkdir()
    (sweeps / "broken" / "command.json").symlink_to("/nowhere")
    monkeypatch.setattr(files, "SILENT_S", 0.0)
    assert main([str(sweeps)]) == 0
    shown = capsys.readouterr()
    assert "demo/first" in shown.out
    assert f"skipped: {sweeps}/other/ledger.jsonl: it is not a regular file\n" in shown.err
    assert f"searching {sweeps}: 1 folders so far. Ctrl-C ends the search" in shown.err
    assert ls.main([str(sweeps)]) == 0
    assert f"{sweeps}/other/ledger.jsonl: it is not a regular file" in capsys.readouterr().out
    assert report([str(sweeps)]) == 0
    assert "searching" not in capsys.readouterr().err, "it is announced once"
