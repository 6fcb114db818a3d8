"""One rank of a run: ``torchrun --nproc-per-node 2 -m distexp.worker RUN_DIR``.

What it prints goes to its own log, and why it failed to a file beside that. Everything that imports
torch is in ``training.py``, which starts after the log is in place.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from distexp.config import ConfigError
from distexp.launch.outcome import DISK_RESERVE
from distexp.runs.events import Events
from distexp.runs.record import RunError, write_json
from distexp.runs.run_dir import error_path, log_path, memory_path, redirect_output
from distexp.system.environment_variables import captured_environment
from distexp.system.processes import die_with_parent


def main() -> None:
    """Runs a rank; a failure is written down for the agent, and ends the process with code 1."""
    if len(sys.argv) != 2 or "RANK" not in os.environ:
        sys.exit("usage: torchrun --nproc-per-node N -m distexp.worker RUN_DIR")
    started = time.time()
    captured_environment()  # before DeepSpeed is imported, which sets some of these variables
    run_dir = Path(sys.argv[1]).absolute()
    rank, node = int(os.environ["RANK"]), int(os.environ["GROUP_RANK"])
    redirect_output(log_path(run_dir, node, rank))
    die_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the agent asks for stacks when a run hangs
    events = Events(run_dir, enabled=rank == 0)
    try:
        from distexp.worker.rank import run

        run(run_dir, events, started)
    except BaseException as error:
        _tell(error)
        cause = RunError(type(error).__name__, str(error).strip() or repr(error), events.phase, rank)
        (run_dir / DISK_RESERVE).unlink(missing_ok=True)  # room for what follows, on a disk that is full
        write_json(error_path(run_dir, node, rank), {"unix_time_s": time.time(), **asdict(cause)})
        _tell_memory(run_dir, node, rank)
        # Peers may hang in a collective, and so would an orderly exit.
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written and every rank has said so. The interpreter's own end would now and then abort, on threads
    # that gloo's and DDP's static objects still hold.
    os._exit(0)


def _tell(error: BaseException) -> None:
    """What goes to the log: of an error of the user's its sentences and their cause, of any other the traceback."""
    if isinstance(error, ConfigError):
        print("\n".join(f"{type(error).__name__}: {message}" for message in error.errors), file=sys.stderr)
        if error.__cause__ is not None:
            print(*traceback.format_exception_only(error.__cause__)[-1].splitlines()[:1], file=sys.stderr)
    else:
        traceback.print_exception(error)
    sys.stderr.flush()


def _tell_memory(run_dir: Path, node: int, rank: int) -> None:
    """What the allocator held when the rank failed: the peak of a run that was out of memory."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        from distexp.measure.memory.allocator import allocator_peaks

        write_json(memory_path(run_dir, node, rank), allocator_peaks(torch.device("cuda"), rank))


if __name__ == "__main__":
    main()
