"""Starting a tracker beside a run, and letting it finish."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distexp.runs.spec import RunSpec
from distexp.system.processes import end_tree, start_module
from distexp.tracking.base import END

FINISH_S = 60.0
"""What a tracker may take for summary and files before it is given up."""

LOG = "tracker.log"


class Tracking:
    """A tracker's process; what it has to tell is there when the block of ``tracked`` is over."""

    def __init__(self) -> None:
        self.messages: list[str] = []


@contextmanager
def tracked(spec: RunSpec, directory: Path) -> Iterator[Tracking]:
    """Follows a run with its tracker; the record must be written when the block ends. Never raises."""
    tracking = Tracking()
    if spec.config.tracker._target_ is None:
        yield tracking
        return
    log = directory / "logs" / LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    (directory / END).unlink(missing_ok=True)
    with log.open("w") as output:
        process = start_module("distexp.tracking", str(directory), env=os.environ, output=output)
    try:
        yield tracking
    finally:
        (directory / END).touch()
        try:
            process.wait(FINISH_S)
        except subprocess.TimeoutExpired:
            end_tree(process, 1.0)
            tracking.messages.append(
                f"warning: tracker={spec.config.tracker.name} did not finish within {FINISH_S:g} s and was ended"
            )
        lines = log.read_text(errors="replace").splitlines()
        tracking.messages += [line for line in lines if line.startswith(("warning:", f"{spec.config.tracker.name}:"))]
        if not tracking.messages:
            last = lines[-1] if lines else "it said nothing"
            tracking.messages.append(f"warning: tracker={spec.config.tracker.name} ended early ({last}): see {log}")
