"""Short runs in which a rank fails, hangs or is killed, and commands that are interrupted while they train."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.helpers.forked_cli import ServedProcess
from tests.helpers.runs import HELPERS, REPOSITORY

QUICK = (
    "model=gpt_tiny",  # does not import transformers, which takes seconds
    "dataset.train_size=256",
    "dataset.eval_size=8",
    "train.num_epochs=2",
    "train.log_every=1",
    "cluster.device=cpu",
    "trusted_packages=[failing_runs]",
    "dataset.keys=[train_size,eval_size,max_length,padding,num_workers,options]",
)
ENV = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(HELPERS)])}
DEADLINE_S = 300.0
"""A time that only a broken program misses. Hung workers sleep for ten minutes."""


def sabotage(kind: str, rank: int = 0, at: int = 40) -> tuple[str, ...]:
    """Return overrides of a run in which one rank breaks.

    Args:
        kind: Name of a data set in ``failing_runs``, such as ``hangs`` or ``killed``.
        rank: The rank.
        at: Number of the sample at which it breaks.
    """
    return f"dataset._target_=failing_runs.{kind}", f"+dataset.options.rank={rank}", f"+dataset.options.at={at}"


def wait_for(condition: Callable[[], bool]) -> bool:
    """Wait for a condition; return False if it does not come true in time."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


class StartedCommand:
    """A command in the background. It is killed when the block ends."""

    def __init__(self, folder: Path, *arguments: str, interpreter: bool = False) -> None:
        """Start a command, with an interpreter of its own if a test finds its processes by their command lines."""
        self.folder = folder
        environment = {**os.environ, **ENV}
        self.process: ServedProcess | subprocess.Popen[bytes]
        if interpreter:
            command, lost = [sys.executable, "-m", "distexp", *arguments], subprocess.DEVNULL
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=lost, stderr=lost, start_new_session=True
            )
        else:
            self.process = ServedProcess("distexp", arguments, environment, cwd=folder, session=True)

    def __enter__(self) -> StartedCommand:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def until_training(self) -> Path:
        """Wait for the first steps and return the run directory."""
        assert wait_for(lambda: any(p.stat().st_size for p in self.folder.rglob("metrics.jsonl")))
        (found,) = self.folder.rglob("metrics.jsonl")
        return found.parent


def tree_of(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
