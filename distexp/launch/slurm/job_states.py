"""States of jobs, from Slurm's queue and its accounting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distexp.launch.slurm.client import QUERY_TIMEOUT_S, SlurmError, UnreachableError, chunk_ids, run_command

FINAL_STATES = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "NODE_FAIL",
    "BOOT_FAIL",
    "DEADLINE",
)
"""Slurm states of a job that has ended."""


@dataclass(frozen=True)
class JobState:
    """State of one array element, as reported by Slurm."""

    state: str  # Slurm's name: PENDING, RUNNING, COMPLETED, ...
    reason: str = ""  # why it is pending
    nodes: str = ""
    expected_start: str = ""  # empty if Slurm has not planned it yet

    @property
    def is_final(self) -> bool:
        """Return whether the job has ended."""
        return self.state in FINAL_STATES


def query_jobs(jobs: Iterable[str]) -> dict[str, JobState]:
    """Return the states of jobs.

    They come from the queue, or from the accounting if the queue has forgotten the job.

    Args:
        jobs: Job ids as ARRAY_INDEX.

    Returns:
        A state for each job that Slurm knows.

    Raises:
        UnreachableError: If the controller does not answer.
    """
    wanted = set(jobs)
    found = _select(wanted, _read_queue(_array_ids(wanted)))
    missing = wanted - set(found)
    return found | _select(missing, _read_accounting(_array_ids(missing)))


def _array_ids(jobs: set[str]) -> list[str]:
    return sorted({job.partition("_")[0] for job in jobs}, key=int)


def _select(jobs: set[str], states: Mapping[str, JobState]) -> dict[str, JobState]:
    """Return the states of the given jobs.

    Slurm reports never-started array elements as one entry.
    """
    found = {job: states.get(job) or states.get(job.partition("_")[0]) for job in jobs}
    return {job: state for job, state in found.items() if state is not None}


def _job_id(array: str, index: str) -> str:
    """Return ARRAY_INDEX; ARRAY for the elements that have not started, whose index is a range."""
    return f"{array}_{index}" if index.isdigit() else array


def _read_queue(arrays: Sequence[str]) -> dict[str, JobState]:
    """Return squeue's states by ARRAY_INDEX.

    Elements that squeue does not list separately are under ARRAY.
    """
    found: dict[str, JobState] = {}
    for chunk in chunk_ids(arrays):
        command = ["squeue", "-h", "-r", "-t", "all", "-j", ",".join(chunk), "-o", "%F|%K|%T|%r|%N|%S"]
        try:
            output = run_command(command, QUERY_TIMEOUT_S)
        except UnreachableError:
            raise
        except SlurmError as error:
            if "Invalid job id" not in str(error):
                raise UnreachableError(str(error)) from None
            continue  # the controller forgets jobs some time after their end
        found |= dict(map(_parse_queue_line, output.splitlines()))
    return found


def _parse_queue_line(line: str) -> tuple[str, JobState]:
    """Return the id and the state of a job from a line of squeue."""
    array, index, state, reason, nodes, start = line.split("|")
    known_reason, known_start = "" if reason == "None" else reason, "" if start == "N/A" else start
    return _job_id(array, index), JobState(state, known_reason, nodes, known_start)


def _read_accounting(arrays: Sequence[str]) -> dict[str, JobState]:
    """Return sacct's states, with the keys of ``_read_queue``.

    The result is empty if there is no accounting.
    """
    found: dict[str, JobState] = {}
    for chunk in chunk_ids(arrays):
        command = ["sacct", "-X", "-n", "-P", "-j", ",".join(chunk), "-o", "JobID,State,NodeList"]
        try:
            output = run_command(command, QUERY_TIMEOUT_S)
        except SlurmError:
            return found
        found |= dict(map(_parse_accounting_line, output.splitlines()))
    return found


def _parse_accounting_line(line: str) -> tuple[str, JobState]:
    """Return the id and the state of a job from a line of sacct, whose state may be ``CANCELLED by 1000``."""
    job, state, nodes = line.split("|")
    array, _, index = job.partition("_")
    return _job_id(array, index), JobState(state.split()[0], "", "" if nodes == "None assigned" else nodes)
