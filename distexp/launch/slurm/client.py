"""Wrappers of Slurm's commands: sbatch, squeue, scancel and scontrol. Each call has a timeout."""

import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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

TIMED_OUT = re.compile(r"timed out|did not answer within", re.IGNORECASE)
"""Those of a request that the controller may have received."""


class SlurmError(Exception):
    """A Slurm command failed."""


class UnreachableError(SlurmError):
    """Slurm is not installed, or its controller does not answer."""


class UnknownJobError(SlurmError):
    """It is not known whether Slurm has the job of a submission."""


SUBMITTED = [
    re.compile(rf"^{start}(\d+)(?:;.*| on cluster .*)?\s*$", re.MULTILINE) for start in ("Submitted batch job ", "")
]
"""What sbatch prints after a submission; the longer text if a wrapper of a site drops ``--parsable``."""


def submit(script: Path) -> str:
    """Submit an sbatch file and return the id of its array.

    Raise SlurmError with Slurm's message if it is refused, and UnknownJobError if the job may be in the queue.
    """
    # If this command runs inside a job, sbatch must not inherit that job's resources.
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("SLURM_") or key == "SLURM_CONF"
    }
    try:
        output = run_command(["sbatch", "--parsable", str(script)], SUBMIT_TIMEOUT_S, environment)
    except UnreachableError as error:
        if TIMED_OUT.search(str(error)):  # The controller may have received the job.
            raise UnknownJobError(str(error)) from None
        raise
    numbers = [number for pattern in SUBMITTED for number in reversed(pattern.findall(output))]
    if not numbers:
        raise UnknownJobError(f"sbatch printed no job id: {output.strip()!r}")
    return str(numbers[0])


def cancel(jobs: Sequence[str]) -> None:
    """Cancel jobs, given as ARRAY_INDEX; ignore those that have ended."""
    for chunk in chunk_ids(jobs):
        run_command(["scancel", "--quiet", *chunk], QUERY_TIMEOUT_S)


def requeue(job: str) -> None:
    """Stop a running job and put it back into the queue under the same id."""
    run_command(["scontrol", "requeue", job], QUERY_TIMEOUT_S)


def max_array_size() -> int:
    """Return the cluster's MaxArraySize. Raise UnreachableError if Slurm does not answer."""
    output = run_command(["scontrol", "show", "config"], QUERY_TIMEOUT_S)
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", output, re.MULTILINE)
    return int(found.group(1)) if found else DEFAULT_MAX_ARRAY_SIZE


def minutes_left(job: str) -> float | None:
    """Return the minutes to a job's time limit; None if there is no limit or Slurm does not answer."""
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
    """Run a Slurm command and return its stdout. Raise SlurmError with Slurm's message if it fails.

    Raise UnreachableError if Slurm is not installed, or does not answer.
    """
    name = command[0]
    try:
        # In a group of its own, so that Ctrl-C does not end sbatch between the submission and its answer.
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment, process_group=0
        )
    except FileNotFoundError:
        raise UnreachableError(f"{name} is not installed on this machine") from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"{name} did not answer within {timeout_s:g} s") from None
    if done.returncode == 0:
        return done.stdout
    message = re.sub(rf"\b{name}: (error|fatal): ", "", " ".join(done.stderr.split()))
    if UNREACHABLE.search(message):
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        fatal = [line for line in lines if ": fatal: " in line]
        reasons = fatal or list(filter(UNREACHABLE.search, lines)) or lines  # and not a banner of the site
        raise UnreachableError(re.sub(r"^\S+: (error|fatal): ", "", reasons[0]))
    raise SlurmError(message or f"{name} failed with exit code {done.returncode}")


FINAL_STATES = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY"),
    *("PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"),
)
"""Slurm states of a job that has ended."""


@dataclass(frozen=True)
class JobState:
    """State of one array element, as reported by Slurm."""

    state: str  # Slurm's name: PENDING, RUNNING, COMPLETED, ...
    reason: str = ""  # why it is pending
    nodes: str = ""
    expected_start: str = ""  # empty if Slurm has not planned it yet


def query_jobs(jobs: Iterable[str]) -> dict[str, JobState]:
    """Return the states of jobs from the queue, else from the accounting. Raise UnreachableError without an answer."""
    wanted = set(jobs)
    queue, printed = _read_queue(_array_ids(wanted))
    found = _select(wanted, queue)
    missing = wanted - set(found)
    found |= _select(missing, _read_accounting(_array_ids(missing)))
    if printed and not queue and found.keys() != wanted:  # It does not mean that a job has ended.
        raise UnreachableError(f"squeue printed no state, but {printed!r}")
    return found


def _array_ids(jobs: set[str]) -> list[str]:
    return sorted({job.partition("_")[0] for job in jobs}, key=int)


def _select(jobs: set[str], states: Mapping[str, JobState]) -> dict[str, JobState]:
    """Return the states of the given jobs. Slurm reports never-started array elements as one entry."""
    found = {job: states.get(job) or states.get(job.partition("_")[0]) for job in jobs}
    return {job: state for job, state in found.items() if state is not None}


def _job_id(array: str, index: str) -> str:
    """Return ARRAY_INDEX; ARRAY for the elements that have not started, whose index is a range."""
    return f"{array}_{index}" if index.isdigit() else array


def _read_queue(arrays: Sequence[str]) -> tuple[dict[str, JobState], str]:
    """Return squeue's states by ARRAY_INDEX, and what it has printed last.

    Elements that squeue does not list separately are under ARRAY.
    """
    found, printed = dict[str, JobState](), ""
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
        printed = output.strip() or printed
        for array, index, state, reason, nodes, start in _split_lines(output, fields=6, state=2):
            known_reason, known_start = "" if reason == "None" else reason, "" if start == "N/A" else start
            found[_job_id(array, index)] = JobState(state, known_reason, nodes, known_start)
    return found, printed


def _split_lines(output: str, *, fields: int, state: int) -> list[list[str]]:
    """Return the fields of each line. Leave out lines of something else, such as warnings, which have no state."""
    lines = (line.split("|") for line in output.splitlines())
    return [parts for parts in lines if len(parts) == fields and parts[state].strip()]


def _read_accounting(arrays: Sequence[str]) -> dict[str, JobState]:
    """Return sacct's states, with the keys of ``_read_queue``; none if there is no accounting."""
    found: dict[str, JobState] = {}
    for chunk in chunk_ids(arrays):
        command = ["sacct", "-X", "-n", "-P", "-j", ",".join(chunk), "-o", "JobID,State,NodeList"]
        try:
            output = run_command(command, QUERY_TIMEOUT_S)
        except SlurmError:
            return found
        for job, state, nodes in _split_lines(output, fields=3, state=1):
            array, _, index = job.partition("_")
            name = state.split()[0]  # The state may be ``CANCELLED by 1000``.
            found[_job_id(array, index)] = JobState(name, "", "" if nodes == "None assigned" else nodes)
    return found
