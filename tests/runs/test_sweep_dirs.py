"""Tests of which sweep a command is about."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from distexp import ls
from distexp.config import Command, ConfigError
from distexp.explain.__main__ import main as explain
from distexp.forecast.__main__ import main as forecast
from distexp.runs.record import choose_newest_sweep
from distexp.runs.run_dir import COMMAND
from tests.helpers.records import record


def write_sweeps(place: Path) -> None:
    """Write three sweeps: a training, then a search, then a preflight."""
    commands = {"distexp/a": "train", "choose/b": "choose", "preflight/c": "preflight"}
    for age, (name, command) in enumerate(commands.items()):
        path = place / "multirun_outputs" / name / COMMAND
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"command": command, "words": ["--multirun"], "cells": 1}))
        os.utime(path, (1e9 + age, 1e9 + age))


def test_preflights_and_searches_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sweeps(tmp_path)
    monkeypatch.chdir(tmp_path)
    left_out: list[tuple[Command, ...]] = [(), (Command.PREFLIGHT,), (Command.PREFLIGHT, Command.CHOOSE)]
    found = [choose_newest_sweep(leave_out=commands).parent.name for commands in left_out]
    assert found == ["preflight", "choose", "distexp"]
    assert capsys.readouterr().err.splitlines() == [
        "newest sweep: multirun_outputs/preflight/c",
        "newest sweep: multirun_outputs/choose/b (later directories of preflight do not count)",
        "newest sweep: multirun_outputs/distexp/a (later directories of preflight and choose do not count)",
    ]


def test_a_verification_is_no_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sweeps(tmp_path)
    path = tmp_path / "multirun_outputs" / "verify" / "d" / COMMAND
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"command": "verify", "words": []}))
    (path.parent / "0").mkdir()
    (path.parent / "0/proof.json").write_text(json.dumps({"status": "different"}))
    monkeypatch.chdir(tmp_path)
    assert choose_newest_sweep().name == "c"
    assert "(later directories of verify do not count)" in capsys.readouterr().err
    assert ls.main([]) == 0
    assert re.search(r"verify/d .* 1 different$", capsys.readouterr().out, re.MULTILINE)


def test_without_a_training_there_is_no_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "multirun_outputs" / "preflight" / "c" / COMMAND
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"command": "preflight", "words": []}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no sweep below multirun_outputs/"):
        choose_newest_sweep(leave_out=(Command.PREFLIGHT,))
    path.write_text("{")
    assert choose_newest_sweep(leave_out=(Command.PREFLIGHT,)).name == "c", "what reads the damaged file reports it"


@pytest.mark.parametrize(
    ("command", "error"),
    [("choose", "run the command of its winner"), ("preflight", "give the directory of a training")],
)
def test_the_hint_for_a_search_or_a_preflight_starts_no_other_one(
    command: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record(0)
    run.config["command"] = command
    run.write(tmp_path)
    for main in (explain, forecast):
        assert main([str(tmp_path)]) == 2
        assert error in capsys.readouterr().err
