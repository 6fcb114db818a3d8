"""Train ``DIR/<cell>/spec.json`` until a stop request in step 4, then to the end: ``torchrun stopped_runs.py DIR``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from distexp.distributed.process_group import join
from distexp.runs import run_state
from distexp.runs.record import RunSpec
from distexp.system.processes import end_at_once
from tests.helpers.interrupted_runs import train_cell

STOPPED_IN_STEP = 4


class RequestInStep:
    """A stop request, polled once in each step, that arrives in a certain step."""

    def __init__(self, *_: object, enabled: bool) -> None:
        self.polls = 0

    def __call__(self) -> bool:
        """Return whether a stop was requested."""
        self.polls += 1
        return self.polls == STOPPED_IN_STEP

    def reason(self) -> str:
        """Return why the run was asked to stop."""
        return "SIGUSR1"


def main() -> None:
    """Train all cells: each is stopped once."""
    cells = sorted(path.parent for path in Path(sys.argv[1]).glob("*/spec.json"))
    context = join(RunSpec.read(cells[0]), cells[0])
    real = run_state.StopRequest
    for cell in cells:
        run_state.StopRequest = RequestInStep  # type: ignore[assignment,misc]
        train_cell(cell, context)
        (cell / "record.json").rename(cell / "stopped.json")
        run_state.StopRequest = real  # type: ignore[misc]
        train_cell(cell, context)
    dist.destroy_process_group()
    end_at_once(0)


if __name__ == "__main__":
    main()
