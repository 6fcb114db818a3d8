"""A launcher of another package passes what the launchers of distexp pass, through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from time import monotonic, sleep

import pytest

from distexp.runs.record import ExistingRuns, RunRecord
from tests.helpers.runs import REPOSITORY, run_distexp, run_module
from tests.helpers.toy_launcher import FOLDER, MODULE

YAML = f"defaults: [local]\nname: toy\n_target_: {MODULE}.ToyLauncher\n"
SMALL = (
    *("model=gpt_tiny", "dataset=synthetic", "dataset.train_size=16", "dataset.eval_size=4", "strategy=single"),
    *("cluster.device=cpu", "plan=off"),
)
LONG, *SHORT = ["train.num_epochs=100000"], ["train.max_steps=2"], ["train.max_steps=2", "train.seed=2"]
TIMEOUT_S = 300.0


def cells(*overrides: list[str]) -> str:
    """Return the override for a sweep of these cells."""
    return f"sweep.cells={json.dumps(overrides, separators=(',', ':'))}"


class Toy:
    """The command line with ``cluster=toy`` in a folder."""

    def __init__(self, folder: Path) -> None:
        """Write the YAML file of the launcher."""
        self.folder, self.sweep = folder, folder / "sweep"
        self.environment = {FOLDER: str(folder), "PYTHONPATH": str(REPOSITORY)}
        (folder / "conf" / "cluster").mkdir(parents=True)
        (folder / "conf" / "cluster" / "toy.yaml").write_text(YAML)

    def run(self, module: str, *arguments: str) -> CompletedProcess[str]:
        """Run a command."""
        return run_module(module, *arguments, cwd=self.folder, env=self.environment)

    def start(self, *arguments: str, trust: str = "trusted_packages=[tests]") -> CompletedProcess[str]:
        """Start a sweep."""
        options = ("--config-dir", str(self.folder / "conf"), "cluster=toy", f"hydra.sweep.dir={self.sweep}")
        return self.run("distexp", "--multirun", *options, *filter(None, (trust,)), *SMALL, *arguments)

    def wait_for(self, text: str) -> str:
        """Return the output of ``distexp status`` that contains a text."""
        deadline = monotonic() + TIMEOUT_S
        while text not in (shown := self.run("distexp.status", str(self.sweep)).stdout):
            assert monotonic() < deadline, shown
            sleep(0.5)
        return shown

    def statuses(self) -> list[str | None]:
        """Return the status of each run."""
        return [run.status for run in ExistingRuns.read(self.sweep).runs]


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Toy]:
    """Start the queue."""
    found = Toy(tmp_path)
    command = [sys.executable, "-m", MODULE, "serve", str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL) as server:
        try:
            deadline = monotonic() + TIMEOUT_S
            while not (tmp_path / "port").exists():
                assert monotonic() < deadline
                sleep(0.1)
            yield found
        finally:
            server.terminate()


def test_the_code_of_a_launcher_needs_trust(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    done = toy.start(trust="")
    assert done.returncode == 2
    assert "ToyLauncher is outside distexp: add trusted_packages=[tests] to allow code of that package" in done.stderr
    done = toy.start()
    assert (done.returncode, done.stderr) == (2, "distexp: the toy queue does not answer: start it first\n")
    assert not toy.sweep.exists()


def test_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    done = toy.start("cluster.dry_run=true", "train.seed=1,2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "job 0: train.seed=1\njob 1: train.seed=2\n"
    assert not toy.sweep.exists()
    done = toy.start("cluster.partition=gpu")
    assert (done.returncode, "cluster.partition=gpu is for Slurm only" in done.stderr) == (2, True)


def test_a_launcher_without_a_dry_run_refuses_it_in_a_sweep(tmp_path: Path) -> None:
    done = run_distexp("--multirun", "train.seed=1,2", "cluster.dry_run=true", cwd=tmp_path)
    error = "distexp: cluster.dry_run=true is for Slurm only: leave it out, or choose cluster=slurm\n"
    assert (done.returncode, done.stderr) == (2, error)
    assert not list(tmp_path.iterdir())


def test_status_never_imports_a_launcher_that_is_not_trusted(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    (tmp_path / "sweep" / "0").mkdir(parents=True)
    cluster = {"_target_": "strange.Launcher"}
    spec = {"config": {"cluster": cluster}, "run": {"id": "a", "name": "b", "number": 0, "overrides": []}}
    (tmp_path / "sweep" / "0" / "spec.json").write_text(json.dumps(spec))
    (tmp_path / "sweep" / "command.json").write_text('{"words": [], "directory": "/", "cells": 1}')
    (tmp_path / "strange.py").write_text("raise SystemExit('imported')")
    shown = toy.run("distexp.status", str(toy.sweep))
    assert "unknown" in shown.stdout, shown.stderr
    assert "DISTEXP_TRUSTED_PACKAGES=strange" in shown.stdout
    done = toy.run("distexp.cancel", str(toy.sweep))
    assert done.returncode == 1
    assert done.stderr.startswith("distexp: run 0 cannot be cancelled: its launcher strange.Launcher is not used")


@pytest.mark.slow
def test_runs_are_queued_shown_cancelled_and_resumed(toy: Toy) -> None:
    done = toy.start(cells(LONG, *SHORT), "train.evaluate=false", "cluster.wait=false")
    assert (done.returncode, done.stdout) == (0, f"queued: {toy.sweep}\n"), done.stderr
    shown = toy.wait_for("1 running, 2 pending")
    assert all(f"toy-{number}" in shown for number in range(3))
    logs = toy.sweep / "0" / "logs"  # The job has started an agent, so it gets signals.
    for _ in range(3000):
        if not logs.exists():
            time.sleep(0.1)
    assert logs.exists()

    done = toy.run("distexp.cancel", str(toy.sweep))
    assert (done.returncode, done.stdout) == (0, "3 runs cancelled\n"), done.stderr
    assert toy.statuses() == ["killed", None, None]

    done = toy.run("distexp.resume", str(toy.sweep), cells(*SHORT), "cluster.wait=true")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "run 0 (killed) was not resumed: new overrides or changed data make it another run" in done.stdout
    assert "run 2 (job toy-2): running" in done.stdout
    assert toy.statuses() == ["killed", "completed", "completed"]
    record = RunRecord.read(toy.sweep / "2" / "record.json")
    assert record.config["cluster"]["_target_"] == f"{MODULE}.ToyLauncher"
    assert record.run.attempts[-1]["reason"] == "completed"
    again = toy.run("distexp.resume", str(toy.sweep), cells(*SHORT))
    assert "run 2: already completed" in again.stdout
    assert "1 killed, 2 completed" in toy.run("distexp.status", str(toy.sweep), "--watch").stdout
    report = toy.run("distexp.report", str(toy.sweep))
    assert report.returncode == 0, report.stderr
