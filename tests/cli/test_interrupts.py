"""Tests of Ctrl-C during commands that train nothing, with real processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from distexp.cli.main import main
from tests.helpers.forecasts import profiled_record, write_profiled
from tests.helpers.processes import have_ended
from tests.helpers.records import record, write
from tests.helpers.runs import REPOSITORY

LIMIT_S = 300.0
INTERRUPTED = (130, -signal.SIGINT)
"""Exit codes after Ctrl-C. Python ends by the signal if it arrived while it ran generated code; shells show 130."""

CPU = ("model=gpt_tiny", "cluster.device=cpu", "cluster.workers_per_node=1")
PREDICTING = {
    "forecast": ("forecast", "run", "cluster.nodes=1,2"),
    "plan": ("plan", *CPU),
    "sweep": ("plan", "--multirun", *CPU, "zero_stage=1,2"),
    "choose": ("choose", *CPU, "choose.dry_run=true"),
}


def start(arguments: tuple[str, ...], folder: Path) -> subprocess.Popen[str]:
    """Start a command with an empty cache. A test in the background ignores SIGINT, the command does not."""
    return subprocess.Popen(
        [sys.executable, "-m", "distexp", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "DISTEXP_CACHE": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,  # noqa: PLW1509
    )


def wait_until(condition: Callable[[], bool]) -> bool:
    """Return whether a condition becomes true in time."""
    deadline = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def predicts(parent: psutil.Process) -> bool:
    """Return whether a command has started the process that predicts."""
    with suppress(psutil.NoSuchProcess):
        return any("distexp.plan.trace.server" in child.cmdline() for child in parent.children())
    return False


def interrupt(process: subprocess.Popen[str]) -> None:
    """Send Ctrl-C and check exit code and message."""
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode in INTERRUPTED, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("distexp: interrupted")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "choose" else []) for name in PREDICTING]
)
def test_ctrl_c_during_a_prediction_leaves_no_process(name: str, tmp_path: Path) -> None:
    write_profiled(tmp_path / "run", profiled_record())
    process = start(PREDICTING[name], tmp_path)
    parent = psutil.Process(process.pid)
    assert wait_until(lambda: predicts(parent)), "no process that predicts was started"
    children = parent.children(recursive=True)
    interrupt(process)
    assert wait_until(lambda: have_ended(children))
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "cache"}, "a run was started"


def test_ctrl_c_while_the_report_draws(tmp_path: Path) -> None:
    write(tmp_path, *(record(number, overrides=(f"train.seed={number}",)) for number in range(16)))
    process = start(("report", str(tmp_path)), tmp_path)
    assert wait_until((tmp_path / "report").exists)
    interrupt(process)


READERS = {
    "explain": "distexp.explain.explanation.read_records",
    "status": "distexp.status.read_folder",
    "run": "distexp.cli.run.normalize_arguments",
}
"""A function of each command."""


@pytest.mark.parametrize("command", ["explain", "status"])
def test_ctrl_c_while_records_are_read(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(READERS[command], press)
    assert main([command, str(tmp_path)]) == 130
    assert capsys.readouterr().err == "distexp: interrupted\n"


@pytest.mark.parametrize("command", READERS)
def test_an_error_during_the_cleanup_after_ctrl_c_does_not_hide_it(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(READERS[command], partial(press, AttributeError("no flags")))
    assert main([command, str(tmp_path)]) == 130
    assert capsys.readouterr().err == "distexp: interrupted\n"


def test_a_full_disk_after_ctrl_c_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "record.json")
    monkeypatch.setattr(READERS["status"], partial(press, full))
    assert main(["status", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "distexp: record.json: No space left on device\n"


def press(cleanup_error: Exception | None = None, *_: object, **__: object) -> None:
    """Raise what Ctrl-C raises, or the error of a cleanup after it."""
    try:
        raise KeyboardInterrupt
    finally:
        if isinstance(cleanup_error, Exception):
            raise cleanup_error
