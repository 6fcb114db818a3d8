"""The workers of one node: ``python -m distexp.worker.group RUN_DIR NODE ADDRESS PORT``.

This process imports the libraries once and then forks one worker per GPU. So a node reads torch from the disk once,
and a run starts in half the CPU time that one interpreter per worker takes. A local run forks this process from one
that has imported the libraries (``distexp.worker.shared_start``).
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from distexp.runs.record import RunSpec
from distexp.runs.run_dir import WORKER_EXITS
from distexp.runs.texts import print_despite_full_disk
from distexp.system import environment_variables, files, processes
from distexp.worker.__main__ import run_worker
from distexp.worker.preload import own_modules, preload

GRACE_S = 5.0  # seconds between SIGTERM and SIGKILL for the workers that are left after a failure
POLL_S = 0.5  # time between two looks at the workers if no signal arrives
WAITED = {signal.SIGCHLD, signal.SIGTERM}  # blocked once there are workers, to handle one after the other


def main() -> int:
    """Run the workers of a node; return 0 if all of them ended well, else 1."""
    environment_variables.captured_environment()  # before torch and DeepSpeed set some of these variables
    set_torchrun_defaults()
    processes.die_with_parent()
    run_dir, node, address, port = sys.argv[1:]
    return run_group(Path(run_dir).absolute(), int(node), address, int(port))


def set_torchrun_defaults() -> None:
    """Set the variables that torchrun sets for workers, except those that the user has set."""
    for name, value in environment_variables.TORCHRUN_DEFAULTS.items():
        os.environ.setdefault(name, value)


def run_group(run_dir: Path, node: int, address: str, port: int) -> int:
    """Import what is not imported yet, and run the workers of a node; return 0 if all of them ended well, else 1."""
    spec = RunSpec.read(run_dir)
    preload(own_modules(spec.config), spec.config.cluster.device)
    os.environ.update(
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        GROUP_RANK=str(node),
        WORLD_SIZE=str(spec.world_size),
        LOCAL_WORLD_SIZE=str(spec.workers_per_node),
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED)
    group = WorkerGroup(WORKER_EXITS.path(run_dir, node), first_rank=node * spec.workers_per_node)
    for local_rank in range(spec.workers_per_node):
        group.start(local_rank, run_dir)
    return group.wait()


class WorkerGroup:
    """Forked workers of one node."""

    def __init__(self, exits: Path, *, first_rank: int) -> None:
        self._path = exits
        self._first_rank = first_rank
        self._running: dict[int, int] = {}  # process id: rank
        self._exits: list[dict[str, Any]] = []  # how each worker ended; a code is negative for a signal
        self._sent: set[int] = set()  # signals that the group sent to its workers

    def start(self, local_rank: int, run_dir: Path) -> None:
        """Fork one worker; the child never returns."""
        rank = self._first_rank + local_rank
        pid = os.fork()
        if pid == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank))
            run_worker(run_dir, launched=True)
        self._running[pid] = rank

    def wait(self) -> int:
        """Wait for all workers, and stop the others after a failure or SIGTERM. Return 0 if all of them ended well."""
        while self._running:
            received = signal.sigtimedwait(WAITED, POLL_S)
            self._reap()
            if received is not None and received.si_signo == signal.SIGTERM:
                self.stop()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED)
                os.kill(os.getpid(), signal.SIGTERM)
            if any(worker["code"] for worker in self._exits):
                self.stop()
        return int(any(worker["code"] for worker in self._exits))

    def stop(self) -> None:
        """End the workers that still run: SIGTERM, and SIGKILL after ``GRACE_S``."""
        for number, deadline in ((signal.SIGTERM, time.monotonic() + GRACE_S), (signal.SIGKILL, float("inf"))):
            for pid in self._running:
                self._sent.add(number)
                os.kill(pid, number)
            while self._running and time.monotonic() < deadline:
                signal.sigtimedwait({signal.SIGCHLD}, POLL_S)
                self._reap()

    def _reap(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            # A worker that died by another signal than ours failed by itself, even if it is reaped late.
            stopped = bool(self._sent) and (code >= 0 or -code in self._sent)
            rank = self._running.pop(pid)
            self._exits.append({"rank": rank, "code": code, "unix_time_s": time.time(), "stopped": stopped})
            try:
                files.write_json(self._path, self._exits)
            except OSError as error:  # A full disk must not keep the group from stopping its workers.
                print_despite_full_disk(f"{self._path} cannot be written: {error}")


if __name__ == "__main__":
    processes.end_at_once(main())
