"""One rank of a run: ``torchrun --nproc-per-node 2 -m distexp.worker RUN_DIR``.

What it prints goes to its own log, and why it failed to a file beside that. Everything that imports
torch is in ``training.py``, which starts after the log is in place.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from distexp.launch.logs import error_path, log_path, take_over_output
from distexp.measure.events import Events
from distexp.results import RunError, write_json


def main() -> None:
    """Runs a rank; a failure is written down for the agent, and ends the process with code 1."""
    if len(sys.argv) != 2 or "RANK" not in os.environ:
        sys.exit("usage: torchrun --nproc-per-node N -m distexp.worker RUN_DIR")
    started = time.time()
    run_dir = Path(sys.argv[1]).absolute()
    rank, node = int(os.environ["RANK"]), int(os.environ["GROUP_RANK"])
    take_over_output(log_path(run_dir, node, rank))
    faulthandler.enable()
    events = Events(run_dir, writes=rank == 0)
    try:
        from distexp.training import run

        run(run_dir, events, started)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        cause = RunError(type(error).__name__, str(error).strip() or repr(error), events.phase, rank)
        write_json(error_path(run_dir, node, rank), {"unix_time_s": time.time(), **asdict(cause)})
        # Peers may hang in a collective, and so would an orderly exit.
        os._exit(1)


if __name__ == "__main__":
    main()
