"""Names of files in a run directory: each is defined once, in ``distexp.runs.run_dir``."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from distexp.cli.main import main
from distexp.runs import run_dir
from tests.helpers.runs import REPOSITORY

NAMES = {value for name, value in vars(run_dir).items() if name.isupper() and isinstance(value, str)}
FILE_NAMES = {name for name in NAMES if "." in name} | {run_dir.HEARTBEAT, run_dir.CHECKPOINTS}


def test_no_other_module_contains_a_file_name_of_a_run_directory() -> None:
    modules = set((REPOSITORY / "distexp").rglob("*.py")) - {Path(run_dir.__file__)}
    assert {path: found for path in modules if (found := literals(path) & FILE_NAMES)} == {}


def literals(path: Path) -> set[str]:
    """Return the string literals of a module."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_memory_traces_are_in_the_order_of_the_nodes(tmp_path: Path) -> None:
    for node in (10, 0, 9):
        path = run_dir.memory_trace_path(tmp_path, node)
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / run_dir.MEMORY / "nodes.csv").touch()
    assert [path.stem for path in run_dir.memory_trace_paths(tmp_path)] == ["node0", "node9", "node10"]


@pytest.mark.parametrize("name", ["logs", "model", "metrics.jsonl"])
def test_a_run_does_not_start_in_a_folder_with_files_of_something_else(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run moves the files of an earlier attempt to ``attempts/``."""
    (tmp_path / name).mkdir()
    assert main(["model=gpt_tiny", "dataset=synthetic", "cluster.device=cpu", f"hydra.run.dir={tmp_path}"]) == 2
    assert f"{tmp_path} contains {name}, which belong to no run" in capsys.readouterr().err
    assert (tmp_path / name).is_dir()
    assert not (tmp_path / ".hydra").exists()


@pytest.mark.parametrize(
    ("stored", "key", "message"),
    [
        ((), "hydra.run.dir", "is the directory of a sweep: choose another directory, or add the run to the "),
        (("hydra.sweep.subdir=.",), "hydra.sweep.dir", "is the directory of a single run: choose another directory\n"),
    ],
)
def test_a_directory_has_the_runs_of_a_sweep_or_a_single_run(
    stored: tuple[str, ...], key: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both would have a run 0."""
    (tmp_path / "command.json").write_text(json.dumps({"words": stored, "directory": "/", "cells": 1}))
    words = ["model=gpt_tiny", "dataset=synthetic", "cluster.device=cpu", f"{key}={tmp_path}"]
    assert main([*words, "sweep.resume=true"]) == main(words) == 2
    shown = capsys.readouterr().err
    assert f"distexp: {key}={tmp_path} {message}" in shown
    assert shown.endswith(f" hydra.sweep.dir={tmp_path}\n") == (key == "hydra.run.dir")
    assert not list(tmp_path.rglob(".hydra"))


@pytest.mark.parametrize(
    ("mark", "overrides"),
    [
        (".hydra", ["hydra.run.dir={}"]),
        ("record.json", ["--multirun", "train.seed=5,6", "hydra.sweep.dir={}"]),
    ],
)
def test_the_directory_of_a_run_of_a_sweep_is_left_alone(
    mark: str, overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its sweep, which may have been deleted, there is nothing to resume."""
    run = tmp_path / "sweep" / "0"
    (run / mark).mkdir(parents=True)
    typed = ["model=gpt_tiny", "dataset=synthetic", "cluster.device=cpu", *(text.format(run) for text in overrides)]
    key = typed[-1].partition("=")[0]
    message = f"distexp: {key}={run} is the directory of a run: choose another directory"
    assert main(typed) == 2
    assert capsys.readouterr().err == f"{message}\n"
    (tmp_path / "sweep/command.json").touch()
    assert main(typed) == 2
    sweep = tmp_path / "sweep"
    assert capsys.readouterr().err == f"{message}, or continue its sweep with distexp resume {sweep}\n"
    assert [path.name for path in run.iterdir()] == [mark]
