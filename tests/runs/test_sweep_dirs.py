"""Tests of which sweep a command is about."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from distexp.cli.main import main
from distexp.config import Command, ConfigError
from distexp.explain.__main__ import main as explain
from distexp.forecast.__main__ import main as forecast
from distexp.runs import attempts
from distexp.runs.record import choose_newest_sweep
from distexp.runs.run_dir import COMMAND
from tests.helpers.records import record
from tests.helpers.runs import make_spec


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
    (path.parent / "0/sgd").mkdir()
    (path.parent / "0/sgd/phase.json").touch()
    make_spec("cluster.device=cpu").write(path.parent / "0/sgd")
    (path.parent / "0/sgd/events.jsonl").touch()  # It is recent, as of a run that is running.
    folder = "multirun_outputs/verify/d"
    for arguments, line in (
        (["ls"], rf"{folder} .* 1 different"),
        (["status", folder], "1 different"),
        (["rm", folder], rf"{folder}: 1 different; 5 files, .*"),
    ):
        assert main(arguments) == (2 if arguments[0] == "rm" else 0)  # There is no terminal to ask.
        shown = capsys.readouterr()
        assert re.search(f"^{line}$", shown.out, re.MULTILINE), shown
    assert main(["cancel", folder]) == 2
    assert f"{folder} belongs to distexp verify and has no runs: distexp status {folder}" in capsys.readouterr().err
    for status, code in (("not comparable", 2), ("equal", 0), ("different", 1)):
        (path.parent / "0/proof.json").write_text(json.dumps({"status": status}))
        assert (main(["status", folder, "--watch"]), main(["status", folder])) == (code, 0)
    capsys.readouterr()
    with attempts.sweep_lock(path.parent):
        assert main(["status", folder]) == 0
        assert main(["rm", "--yes", folder]) == 2
        with pytest.raises(ConfigError, match="end it with Ctrl-C, or choose"), attempts.sweep_lock(path.parent):
            pass
    shown = capsys.readouterr()
    assert shown.out.startswith("running\n")
    assert f"{folder}: its command is running" in shown.err


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
    for command_of in (explain, forecast):
        assert command_of([str(tmp_path)]) == 2
        assert error in capsys.readouterr().err
