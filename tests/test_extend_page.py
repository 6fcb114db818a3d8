"""The examples of the page "Extend distexp": each one is run as it is written there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distexp.runs.record import RunRecord
from distexp.strategies import torch_model
from tests.helpers.runs import REPOSITORY, TIMEOUT_S, run_distexp

PAGE = (REPOSITORY / "docs" / "how-to" / "extend.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
SHORT = ("dataset.train_size=32", "dataset.eval_size=8", "train.max_steps=2", "cluster.device=cpu")
WORKERS = {
    "model=mine": ("strategy=single",),
    "dataset=mine": ("strategy=single",),
    "strategy=ddp,mine": ("cluster.workers_per_node=2",),
    "cluster=mine": ("strategy=single",),
    "tracker=mine": ("strategy=single",),
    "measure.watchers=": ("strategy=single", "train.measure_after_step=1"),
}
"""Further overrides of each command, by the option that it shows."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write each file of the page, as its first line names it."""
    for language, text in BLOCKS:
        if language != "bash":
            path = tmp_path / text.splitlines()[0].removeprefix("# ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (tmp_path / "my_package" / "__init__.py").touch()
    return tmp_path


def run_example(option: str, *overrides: str, cwd: Path) -> list[RunRecord]:
    """Run the command of an option for a few steps and return the records of its runs."""
    (command,) = (shlex.split(line) for line in COMMANDS if option in line)
    arguments = [*command[1:], *SHORT, *WORKERS[option], *overrides]
    if option == "strategy=ddp,mine":  # as a user starts it
        program = [Path(sys.executable).with_name(command[0]), *arguments]
        done = subprocess.run(program, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    else:
        done = run_distexp(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [RunRecord.read(path) for path in sorted(cwd.glob("multirun_outputs/distexp/*/*/record.json"))]
    assert {record.status for record in records} == {"completed"}, done.stdout
    return records


def test_every_command_of_the_page_is_run() -> None:
    assert len(COMMANDS) == len(WORKERS)
    assert all(any(option in line for line in COMMANDS) for option in WORKERS)


@pytest.mark.slow
def test_a_custom_model_trains(folder: Path) -> None:
    (record,) = run_example("model=mine", cwd=folder)
    assert record.config["model"]["options"] == {"kernel_size": 4}


@pytest.mark.slow
def test_a_custom_dataset_is_trained_on(folder: Path) -> None:
    (record,) = run_example("dataset=mine", cwd=folder)
    assert record.metrics.steps_per_epoch == 32 // 8


@pytest.mark.slow
def test_a_custom_strategy_has_the_losses_of_ddp(folder: Path) -> None:
    ddp, mine = run_example("strategy=ddp,mine", cwd=folder)
    assert mine.built is not None
    assert (mine.built.wrapper, mine.built.mesh) == ("all-reduce", [2, 1])
    assert mine.metrics.train_losses == pytest.approx(ddp.metrics.train_losses, rel=1e-5)
    assert mine.metrics.eval_losses == pytest.approx(ddp.metrics.eval_losses, rel=1e-5)


def test_a_custom_strategy_leaves_out_frozen_parameters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``distexp verify`` has a phase with one."""
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    monkeypatch.setattr(dist, "all_reduce", lambda gradient: gradient.mul_(2))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch_model, "TorchModel", lambda *_, sync_context, **__: sync_context)
    strategy = run_path(str(folder / "my_package" / "strategy.py"))["AllReduce"]()
    blueprint = SimpleNamespace(model=model, materialize=lambda module: None)
    with strategy.setup(blueprint, None, None)(last_micro=True):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


@pytest.mark.slow
def test_a_custom_launcher_starts_the_agents(folder: Path) -> None:
    (record,) = run_example("cluster=mine", cwd=folder)
    assert record.config["cluster"]["_target_"] == "my_package.launcher.Nice"


@pytest.mark.slow
def test_a_custom_tracker_gets_the_metrics(folder: Path) -> None:
    run_example("tracker=mine", cwd=folder)
    (path,) = folder.glob("multirun_outputs/distexp/*/0/tracker.csv")
    assert "2,train/loss," in path.read_text()


@pytest.mark.slow
def test_the_summary_of_a_custom_watcher_is_in_the_record(folder: Path) -> None:
    (record,) = run_example("measure.watchers=", cwd=folder)
    assert record.metrics.watchers == {"my_package.watcher.UnmeasuredSteps": {"unmeasured": 1, "measured": 1}}
