"""Start and end of the tracker process of a run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distexp.runs.run_dir import tracker_end_path, tracker_log_path
from distexp.runs.spec import RunSpec
from distexp.system.process_shutdown import end_tree
from distexp.system.processes import start_module

FINISH_TIMEOUT_S = 60.0
"""Time for a tracker to write summary and files after the run."""


class Tracking:
    """Messages of a tracker for the user; they are complete when the block of ``tracked`` has ended."""

    def __init__(self) -> None:
        self.messages: list[str] = []


@contextmanager
def tracked(spec: RunSpec, directory: Path) -> Iterator[Tracking]:
    """Run the tracker of a run during a ``with`` block; never raise. The block must write the record."""
    tracking, name = Tracking(), spec.config.tracker.name
    if spec.config.tracker._target_ is None:
        yield tracking
        return
    log = tracker_log_path(directory)
    log.parent.mkdir(parents=True, exist_ok=True)
    tracker_end_path(directory).unlink(missing_ok=True)
    with log.open("w") as output:
        process = start_module("distexp.tracking", str(directory), env=os.environ, output=output)
    try:
        yield tracking
    finally:
        with suppress(OSError):  # On a full disk, the tracker is stopped after the time limit.
            tracker_end_path(directory).touch()
        try:
            process.wait(FINISH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            end_tree(process, 1.0)
            tracking.messages.append(
                f"warning: tracker={name} did not finish within {FINISH_TIMEOUT_S:g} s and was stopped"
            )
        lines = log.read_text(errors="replace").splitlines()
        tracking.messages += [line for line in lines if line.startswith(("warning:", f"{name}:"))]
        if not tracking.messages:
            last = lines[-1] if lines else "no output"
            tracking.messages.append(f"warning: tracker={name} ended early ({last}): see {log}")
