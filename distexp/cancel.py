"""``python -m distexp.cancel DIR``: ends the jobs of a sweep that have not ended, and says what became of each."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from distexp.exceptions import run_until_pipe_closes
from distexp.launch import ledger
from distexp.launch.slurm import client
from distexp.launch.slurm.status import ACTIVE, look

WAIT_S = 60.0
"""How long Slurm may take to end them: its KillWait is half of that by default."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 where a job could not be cancelled; 2 where there is no sweep on Slurm."""
    parser = argparse.ArgumentParser(prog="python -m distexp.cancel", description="End the jobs of a sweep.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="a sweep's directory")
    sweep_dir = parser.parse_args(arguments).directory
    entries = ledger.latest(sweep_dir)
    if not entries:
        print(f"distexp: {sweep_dir} holds no {ledger.FILE}: only sweeps on Slurm have jobs", file=sys.stderr)
        return 2
    active = [run for run in look(sweep_dir) if run.state in ACTIVE]
    try:
        client.cancel([run.job for run in active if run.job])
    except client.SlurmError as error:
        print(f"distexp: {error}: nothing is cancelled", file=sys.stderr)
        return 1
    gone = [entries[run.number] for run in active]
    ledger.append(sweep_dir, [ledger.Entry(e.run, e.id, e.directory, e.job, "cancelled") for e in gone])
    left = _wait(sweep_dir)
    print(f"{len(active)} run{'s' if len(active) != 1 else ''} cancelled")
    for number in left:
        print(f"run {number} (job {entries[number].job}) has not ended yet: look again with distexp.status")
    return 0


def _wait(sweep_dir: Path) -> list[int]:
    """Waits for the jobs' ends, which leaves a record for each; the runs that have not ended in time."""
    deadline = time.monotonic() + WAIT_S
    while True:
        left = [run.number for run in look(sweep_dir) if run.state in ACTIVE]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
