"""A launcher of another package: a queue on this machine, behind a socket on loopback.

``python -m tests.helpers.toy_launcher serve FOLDER`` runs one job after the other. ``... run RUN_DIR`` is a job.
The folder of the queue is in ``$TOY_QUEUE``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from rich.console import Console

from distexp.config import Config, ConfigError
from distexp.launch.launcher import Cancelled, Launcher, Sweep
from distexp.launch.local.launcher import LocalLauncher
from distexp.runs.record import ExistingRun
from distexp.runs.run_state import RunState, local_state

FOLDER = "TOY_QUEUE"
MODULE = "tests.helpers.toy_launcher"
POLL_S = 0.1


class ToyLauncher(Launcher):
    """Launcher that puts runs into the queue of this machine."""

    runs_here = True
    queues = True
    reads = ("dry_run", "wait")

    def decide_resources(self, config: Config) -> list[str]:
        """Decide what the user left open as for a local run, which a job is."""
        return LocalLauncher().decide_resources(config)

    def check(self) -> None:
        """Check that the queue answers."""
        if ask("states") is None:
            raise ConfigError("the toy queue does not answer: start it first")

    def start(self, sweep: Sweep) -> list[JobReturn]:
        """Put all runs into the queue, and follow them unless ``cluster.wait=false``."""
        from distexp.launch.queued_runs import prepare_runs
        from distexp.launch.run_dirs import locked_sweep_dir, package_git_state

        console, resume = Console(), sweep.master.sweep.resume
        with locked_sweep_dir(sweep.master, len(sweep.cells)) as claimed:
            folder, code = claimed.absolute(), package_git_state()
            active = [int(Path(job).name) for job in (ask("states") or {}) if Path(job).parent == folder]
            for run in prepare_runs(sweep.cells, folder, code, console, active=active, resume=resume):
                ask("submit", str(run.directory))
        print(f"queued: {folder}")
        if sweep.cells[0].composed.cluster.wait:
            self.follow(folder, console)
        return []

    def print_dry_run(self, sweep: Sweep) -> None:
        """Print the jobs."""
        for number, cell in enumerate(sweep.cells):
            print(f"job {number}: {' '.join(cell.varied)}")

    def states(self, sweep_dir: Path, runs: Sequence[ExistingRun]) -> list[RunState]:
        """Return the states in the queue. The files of a run decide after its job."""
        jobs = ask("states") or {}
        return [
            RunState(run.number, run.directory, f"toy-{run.number}", jobs[str(run.directory)])
            if str(run.directory) in jobs
            else local_state(run)
            for run in runs
        ]

    def cancel(self, sweep_dir: Path, runs: Sequence[ExistingRun]) -> Cancelled:
        """Remove jobs from the queue, and end the one that runs."""
        cancelled = [run for run in runs if ask("cancel", str(run.directory))]
        while any(str(run.directory) in (ask("states") or {}) for run in cancelled):
            time.sleep(POLL_S)
        return Cancelled(len(cancelled))


def ask(request: str, job: str = "") -> Any:
    """Send a request to the queue and return the answer; None if it does not run."""
    try:
        port = int(Path(os.environ[FOLDER], "port").read_text())
        with closing(socket.create_connection(("127.0.0.1", port))) as connection:
            connection.sendall(json.dumps([request, job]).encode() + b"\n")
            return json.loads(connection.makefile().readline())
    except OSError:
        return None


class Queue:
    """The jobs by run directory, in their order. One job runs at a time."""

    def __init__(self) -> None:
        """Create a queue that runs nothing."""
        self.waiting: list[str] = []
        self.running: str | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def answer(self, request: str, job: str) -> Any:
        """Return the answer to a request."""
        with self.lock:
            if request == "submit":
                self.waiting.append(job)
            if request == "cancel" and job in self.waiting:
                self.waiting.remove(job)
                return True
            if request == "cancel" and job == self.running and self.process is not None:
                self.process.terminate()
                return True
            if request == "states":
                running = {self.running: "running"} if self.running else {}
                return {**running, **dict.fromkeys(self.waiting, "pending")}
            return request == "submit"

    def step(self) -> None:
        """Start the next job if none runs."""
        with self.lock:
            if self.process is not None and self.process.poll() is not None:
                self.process = self.running = None
            if self.process is None and self.waiting:
                self.running = self.waiting.pop(0)
                self.process = subprocess.Popen([sys.executable, "-m", MODULE, "run", self.running])

    def serve(self, folder: Path) -> None:
        """Run jobs and reply to requests until the process is ended."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(POLL_S)
            temporary = folder / "port.new"
            temporary.write_text(str(server.getsockname()[1]))
            temporary.rename(folder / "port")
            while True:
                self.step()
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with closing(connection):
                    request, job = json.loads(connection.makefile().readline())
                    connection.sendall(json.dumps(self.answer(request, job)).encode() + b"\n")


def run_job(directory: Path) -> None:
    """Run one run of a sweep to its record."""
    from distexp.console.screen import Screen
    from distexp.exceptions import InterruptedRunError
    from distexp.launch.local.launcher import LocalLauncher
    from distexp.launch.local.runner import run_locally
    from distexp.launch.local.shared_start import SharedStart
    from distexp.runs.record import RunSpec

    try:
        screen = Screen(total=1, sweep_dir=directory.parent)
        with SharedStart() as shared_start:
            run_locally(RunSpec.read(directory), directory, screen, shared_start, LocalLauncher().agent_command)
    except InterruptedRunError as error:
        sys.exit(128 + error.number)


if __name__ == "__main__":
    place = Path(sys.argv[2])
    if sys.argv[1] == "serve":
        Queue().serve(place)
    else:
        run_job(place)
