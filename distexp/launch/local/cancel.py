"""End of the local runs of a sweep, also if their command has lost its terminal."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from distexp.config.overrides import suggest_command
from distexp.launch.launcher import CancelError, Cancelled
from distexp.runs.attempts import ProcessIdentity, read_agent_process, read_launcher_process
from distexp.runs.run_dir import LAUNCHER_LOG
from distexp.runs.run_state import local_state
from distexp.runs.spec import ExistingRun
from distexp.system.processes import handle_signals, wait_until

TIMEOUT_S = 30.0
"""A launcher needs a few seconds to end its workers and to write the record."""


def cancel_local(sweep_dir: Path, found: Sequence[ExistingRun]) -> Cancelled:
    """End the launchers of runs on this machine, and wait for the runs.

    A launcher ends its workers, writes the record of its run, and starts no other run. Raise CancelError if one belongs
    to another user.
    """
    known = {run.number: read_launcher_process(run.directory) for run in found}
    launchers = {number: launcher for number, launcher in known.items() if launcher is not None}
    active = [run for run in found if local_state(run).is_active]
    here = [run for run in active if run.number in launchers and launchers[run.number].is_local]
    for pid in {launcher.pid for launcher in launchers.values() if launcher.is_alive}:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue
        except PermissionError:
            raise CancelError("the runs belong to another user, who can cancel them") from None
    left = _wait(here, launchers.values())
    status, cancel = suggest_command("status", sweep_dir), suggest_command("cancel", sweep_dir)
    hosts = {number: launcher.host for number, launcher in launchers.items()}
    elsewhere = [(run.number, hosts.get(run.number, "an unknown machine")) for run in active if run not in here]
    return Cancelled(
        len(here) - len(left),
        [f"run {number} is still ending: check again with {status}" for number in left],
        [f"run {number} was started on {host}: cancel it there with {cancel}" for number, host in elsewhere],
    )


def _wait(runs: Sequence[ExistingRun], launchers: Iterable[ProcessIdentity]) -> list[int]:
    """Wait for the end of all processes; return the numbers of the runs that are left."""
    processes = [*launchers, *(agent for run in runs if (agent := read_agent_process(run.directory)) is not None)]
    wait_until(lambda: not any(process.is_alive for process in processes), TIMEOUT_S)
    of_runs = {run.number: (read_agent_process(run.directory), read_launcher_process(run.directory)) for run in runs}
    return [
        number for number, pair in of_runs.items() if any(process is not None and process.is_alive for process in pair)
    ]


@contextmanager
def continue_after_hangup(folder: Path) -> Iterator[None]:
    """Keep the runs below a folder after SIGHUP, which a closed terminal sends.

    The output continues in ``launcher.log`` of the folder, because the terminal can no longer be written. The same
    holds for a pipe, because its reader, such as ``tee``, gets the signal too and ends. A signal that the user has
    ignored (``nohup``) stays ignored.
    """
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        yield
        return
    lost = [descriptor for descriptor in (1, 2) if os.isatty(descriptor) or _is_pipe(descriptor)]
    received: list[int] = []

    def leave_terminal(number: int, frame: FrameType | None) -> None:
        if not received:  # The kernel may send the signal to the session and to the process group.
            received.append(number)
            _continue_in_log(folder, lost)

    with handle_signals(leave_terminal, signal.SIGHUP):
        yield


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:  # It is closed.
        return False


def _continue_in_log(folder: Path, lost: Sequence[int]) -> None:
    """Redirect the descriptors ``lost`` to a log, and start the log with how to follow and to end the runs."""
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / LAUNCHER_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in lost:
        os.dup2(log, descriptor)
    os.close(log)
    message = (
        f"the terminal was closed (SIGHUP), and the runs continue. To look at them: "
        f"{suggest_command('status', folder)}. To end them: {suggest_command('cancel', folder)}\n"
    )
    os.write(sys.stdout.fileno(), message.encode())  # A signal handler must not use the buffer of print.
