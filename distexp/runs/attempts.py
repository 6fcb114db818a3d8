"""Attempts of a run, the processes behind it, their error files, and the locks of runs and sweeps."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distexp.config import Command, ConfigError
from distexp.config.overrides import suggest_command
from distexp.runs import events
from distexp.runs import run_dir as names
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import RunError, RunInfo
from distexp.system import files, processes, typed_values

NO_RECORD = "ended without a record"
"""Reason of an attempt whose launcher died before it could write the record, as when the head node crashes."""


def archive_previous(directory: Path) -> None:
    """Move the files of the previous attempt to ``attempts/<k>/``, if there are any."""
    archived_names = {name: name for name in names.ATTEMPT_FILES} | {names.RECORD: names.ARCHIVED_RECORD}
    found = [name for name in archived_names if (directory / name).exists()]
    if not found:
        return
    archive = directory / names.ATTEMPTS
    archive.mkdir(exist_ok=True)
    folder = archive / str(len(list(archive.iterdir())))
    folder.mkdir()
    for name in found:
        (directory / name).rename(folder / archived_names[name])


def read_attempts(directory: Path) -> list[dict[str, Any]]:
    """Read the attempts so far from the record, or from the spec if there is no record."""
    try:
        return RunRecord.read(directory / names.RECORD).run.attempts
    except ValueError:
        run = typed_values.read_dataclass(RunInfo, directory / names.SPEC, "run")
        return [] if run is None else run.attempts


def earlier_records(directory: Path) -> list[RunRecord]:
    """Return the records of all attempts but the latest, oldest first; without missing and damaged ones."""
    found = []
    paths = (directory / names.ATTEMPTS).glob(f"*/{names.ARCHIVED_RECORD}")
    for path in sorted(paths, key=lambda path: (len(path.parent.name), path.parent.name)):  # 2 is before 10.
        with suppress(ValueError):
            found.append(RunRecord.read(path))
    return found


def register_attempt(run: RunInfo, directory: Path, job_id: str | None, hosts: list[str]) -> None:
    """Add a new attempt to those of a run, and archive the files of the previous one."""
    attempts = read_attempts(directory)
    if attempts and attempts[-1].get("reason") is None:
        # Before its files are archived, because the step is in one of them.
        attempts[-1] |= {"reason": NO_RECORD, "resumed_from_step": events.last_value(directory, "resumed_from_step")}
    archive_previous(directory)
    run.attempts = [*attempts, new_attempt(job_id, hosts)]


def register_manual_attempt(run: RunInfo, directory: Path) -> None:
    """Add an attempt that was started by hand with torchrun, and drop a stop request for an earlier one.

    The spec lists the attempt that it was written for. If that attempt trained in this directory, it has ended without
    a record. If not, the directory is a copy, and the attempt is not one of this directory.
    """
    for name in (names.STOP_REQUEST, names.LAUNCHER_PROCESS):  # of an earlier attempt
        (directory / name).unlink(missing_ok=True)
    run.attempts = read_attempts(directory)
    if run.attempts and run.attempts[-1].get("reason") is None:
        if (directory / names.HEARTBEAT).exists():
            run.attempts[-1]["reason"] = NO_RECORD
        else:
            run.attempts.pop()
    run.attempts.append(new_attempt(None, []))


def new_attempt(job_id: str | None, hosts: list[str]) -> dict[str, Any]:
    """Return an attempt that has not ended."""
    return {"job_id": job_id, "hosts": hosts, "resumed_from_step": None, "changes": [], "reason": None}


def record_resume(run: RunInfo, step: int | None, changes: list[str]) -> None:
    """Record how the latest attempt resumed. The step is None if it started fresh."""
    if run.attempts:
        run.attempts[-1] |= {"resumed_from_step": step, "changes": changes}


def record_attempt_end(record: RunRecord) -> None:
    """Record the hosts of the latest attempt, and the status of the run as its reason."""
    if record.run.attempts:
        record.run.attempts[-1] |= {"hosts": record.run.hosts, "reason": record.status}


ERROR_HEADING = "this rank ends with an error:"

FORKED = "forked from process"
"""Start of the line that the parent process of the workers prints first."""

SUBMISSION_REFUSED = "SubmissionRefused"


def write_error_file(path: Path, error: RunError) -> None:
    """Write an error with the current time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, {"unix_time_s": time.time(), **asdict(error)})


def read_rank_errors(run_dir: Path) -> list[RunError]:
    """Read the errors of all ranks and agents in the order of time."""
    by_time: list[tuple[float, RunError]] = []
    for path in (*names.RANK_ERROR.find(run_dir), *names.AGENT_ERROR.find(run_dir)):
        try:
            content = files.read_json(path)
        except ValueError:
            continue  # Torn, because its rank was killed. The rank's log has more.
        by_time.append((float(content.pop("unix_time_s")), RunError(**content)))
    return [error for _, error in sorted(by_time, key=lambda timed: timed[0])]


AGENT_TIMEOUT_S = 30.0
"""Longest wait for an agent. It needs a few seconds to end its workers and to write the record."""


@dataclass(frozen=True)
class ProcessIdentity:
    """The launcher of a local run, or the agent of its first node.

    On the same machine, they decide at once whether the run is still running. Elsewhere only the age of its files can.
    """

    pid: int
    started: int  # clock ticks since the machine started; different for a later process with the same id
    machine: str
    host: str

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Return this process."""
        return cls(os.getpid(), processes.start_ticks(os.getpid()) or 0, processes.machine_id(), socket.gethostname())

    @property
    def is_local(self) -> bool:
        """Return whether the process was started on this machine, since its last reboot."""
        return self.machine == processes.machine_id()

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs on this machine."""
        return self.is_local and processes.start_ticks(self.pid) == self.started

    def holds_lock(self, run_dir: Path) -> bool:
        """Return whether the process has the lock of a run or of its sweep open.

        Anybody can write an identity into a folder. Only the launcher of a run has opened its locks. Of a process of
        another user this is not known, and true: no signal reaches it.
        """
        paths = (run_dir / names.LOCK, *(parent / names.SWEEP_LOCK for parent in run_dir.parents))
        locks = [path.stat() for path in paths if path.is_file()]
        try:
            opened = list(Path(f"/proc/{self.pid}/fd").iterdir())
        except PermissionError:
            return True
        except OSError:
            return False
        for path in opened:
            with suppress(OSError):
                if any(os.path.samestat(path.stat(), lock) for lock in locks):
                    return True
        return False


def write_launcher_process(run_dir: Path) -> None:
    """Write that this process is the launcher of a run."""
    files.write_json(run_dir / names.LAUNCHER_PROCESS, asdict(ProcessIdentity.current()))


def write_agent_process(run_dir: Path) -> None:
    """Write that this process is the agent of a run's first node."""
    path = names.AGENT_PROCESS.path(run_dir, node=0)
    with suppress(OSError):  # A full disk must not keep the agent from reporting the run's error.
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, asdict(ProcessIdentity.current()))


def read_launcher_process(run_dir: Path) -> ProcessIdentity | None:
    """Return the launcher of a run's latest attempt; None if it is not known."""
    return typed_values.read_dataclass(ProcessIdentity, run_dir / names.LAUNCHER_PROCESS)


def read_agent_process(run_dir: Path) -> ProcessIdentity | None:
    """Return the agent of a run's first node; None if it is not known."""
    return typed_values.read_dataclass(ProcessIdentity, names.AGENT_PROCESS.path(run_dir, node=0))


def wait_for_agent(run_dir: Path) -> str | None:
    """Wait for the agent of a launcher that was killed; return which process it is if it does not end."""
    agent = read_agent_process(run_dir)
    if agent is None or processes.wait_until(lambda: not agent.is_alive, AGENT_TIMEOUT_S):
        return None
    return f"process {agent.pid} on {agent.host}"


def run_lock(directory: Path) -> AbstractContextManager[str | None]:
    """Hold the lock of a run directory during the block; yield None, or which process has the lock.

    So two commands never write to a directory at the same time. The system frees the lock if this process dies. File
    systems without locks are used without.
    """
    return _locked(directory / names.LOCK)


@contextmanager
def sweep_lock(sweep_dir: Path) -> Iterator[None]:
    """Hold the lock of a sweep directory during the block. Raise ConfigError if another command holds it."""
    with _locked(sweep_dir / names.SWEEP_LOCK) as owner:
        if owner is not None:
            has_runs = files.read_or_none(sweep_dir / names.COMMAND, "command") != Command.VERIFY
            end = f"'{suggest_command('cancel', sweep_dir)}'" if has_runs else "Ctrl-C"
            raise ConfigError(
                f"{owner} runs the sweep in {sweep_dir}: follow it with '{suggest_command('status', sweep_dir)} "
                f"--watch', end it with {end}, or choose another directory with {names.directory_key(sweep_dir)}=DIR"
            )
        yield


def is_locked(sweep_dir: Path) -> bool:
    """Return whether a command holds the lock of a sweep directory. The file of a killed one stays."""
    with suppress(OSError):
        descriptor = os.open(sweep_dir / names.SWEEP_LOCK, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


@contextmanager
def _locked(path: Path) -> Iterator[str | None]:
    """Hold a lock file during the block; yield None, or the process that holds it."""
    descriptor = _open_locked(path)
    if descriptor is None:
        owner = ""  # until it is written, and after the file is removed
        with suppress(FileNotFoundError):
            owner = path.read_text()
        yield owner or "another process"
        return
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield None
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _open_locked(path: Path) -> int | None:
    """Open and lock a file; None if another process has the lock. Raise ConfigError if it is a link to another file."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ConfigError(f"{path} is a link to another place, and no lock of distexp: remove it") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            return descriptor  # the file system has no locks
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)  # The process that had the lock has removed the file.
