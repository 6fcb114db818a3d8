"""Wrappers of Slurm's commands: sbatch, squeue, scancel and scontrol. Each call has a timeout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

QUERY_TIMEOUT_S, SUBMIT_TIMEOUT_S, TIME_LEFT_TIMEOUT_S = 60, 300, 10
DEFAULT_MAX_ARRAY_SIZE = 1001
MAX_IDS_PER_CALL = 500
"""More job ids than this are split over several calls, to keep command lines short."""

TIME_LEFT = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)")
"""squeue's format: days-hours:minutes:seconds, of which days and hours may be missing."""

UNREACHABLE = re.compile(
    r"unable to contact|connection refused|timed out|could not establish|not responding|zero bytes", re.IGNORECASE
)
"""Error messages of Slurm's commands if the controller does not answer."""


class SlurmError(Exception):
    """A Slurm command failed."""


class UnreachableError(SlurmError):
    """Slurm is not installed, or its controller does not answer."""


def has_sbatch() -> bool:
    """Return whether sbatch is installed here."""
    return shutil.which("sbatch") is not None


def submit(script: Path) -> str:
    """Submit an sbatch file and return the id of its array.

    Raises:
        SlurmError: With Slurm's message, if the submission was refused.
    """
    # If this command runs inside a job, sbatch must not inherit that job's resources.
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("SLURM_") or key == "SLURM_CONF"
    }
    output = run_command(["sbatch", "--parsable", str(script)], SUBMIT_TIMEOUT_S, environment)
    found = re.search(r"^(\d+)(;.*)?$", output, re.MULTILINE)
    if found is None:
        raise SlurmError(f"sbatch printed no job id: {output.strip()!r}")
    return found.group(1)


def cancel(jobs: Sequence[str]) -> None:
    """Cancel jobs, given as ARRAY_INDEX; ignore those that have ended."""
    for chunk in chunk_ids(jobs):
        run_command(["scancel", "--quiet", *chunk], QUERY_TIMEOUT_S)


def requeue(job: str) -> None:
    """Stop a running job and put it back into the queue under the same id."""
    run_command(["scontrol", "requeue", job], QUERY_TIMEOUT_S)


def max_array_size() -> int:
    """Return the cluster's MaxArraySize.

    Raises:
        UnreachableError: If Slurm does not answer.
    """
    output = run_command(["scontrol", "show", "config"], QUERY_TIMEOUT_S)
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", output, re.MULTILINE)
    return int(found.group(1)) if found else DEFAULT_MAX_ARRAY_SIZE


def minutes_left(job: str) -> float | None:
    """Return the minutes to a job's time limit.

    The result is None if there is no limit or Slurm does not answer.
    """
    try:
        output = run_command(["squeue", "-h", "-j", job, "-O", "TimeLeft:30"], TIME_LEFT_TIMEOUT_S).strip()
    except SlurmError:
        return None
    found = TIME_LEFT.fullmatch(output)
    if found is None:
        return 0.0 if output.startswith("0:") else None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return days * 1440 + hours * 60 + minutes + seconds / 60


def chunk_ids(ids: Sequence[str]) -> list[Sequence[str]]:
    """Return job ids in parts that fit into a command line."""
    return [ids[start : start + MAX_IDS_PER_CALL] for start in range(0, len(ids), MAX_IDS_PER_CALL)]


def run_command(command: list[str], timeout_s: float, environment: dict[str, str] | None = None) -> str:
    """Run a Slurm command and return its stdout.

    Raises:
        UnreachableError: If Slurm is not installed, or does not answer.
        SlurmError: With Slurm's message, if the command failed.
    """
    name = command[0]
    try:
        # In a group of its own, so that Ctrl-C does not end sbatch between the submission and its answer.
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=environment,
            process_group=0,
        )
    except FileNotFoundError:
        raise UnreachableError(f"{name} is not installed on this machine") from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"{name} did not answer within {timeout_s:g} s") from None
    if done.returncode == 0:
        return done.stdout
    message = re.sub(rf"\b{name}: (error|fatal): ", "", " ".join(done.stderr.split()))
    if UNREACHABLE.search(message):
        raise UnreachableError(_main_line(done.stderr) or message)
    raise SlurmError(message or f"{name} failed with exit code {done.returncode}")


def _main_line(stderr: str) -> str:
    """Return the fatal line of an error output, or its first line.

    The prefix with the command's name is removed.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if ": fatal: " in line]
    return re.sub(r"^\S+: (error|fatal): ", "", (fatal or lines or [""])[0])
