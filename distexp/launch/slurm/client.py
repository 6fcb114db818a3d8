"""Slurm's commands: submitting, asking and cancelling, each with a time limit of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ASK_S, SUBMIT_S = 60, 300
DEFAULT_MAX_ARRAY = 1001
CHUNK = 500
"""Ids in one question, so that a command line does not grow too long."""

NO_ANSWER = re.compile(
    r"unable to contact|connection refused|timed out|could not establish|not responding|zero bytes", re.IGNORECASE
)
"""What Slurm's commands say when nobody answers them."""

ENDED = (
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
"""States after which a job does nothing more."""


class SlurmError(Exception):
    """Slurm refused, or did not answer."""


class UnreachableError(SlurmError):
    """There is no Slurm here, or its controller does not answer."""


@dataclass(frozen=True)
class JobState:
    """What Slurm says of one element of an array."""

    state: str  # PENDING, RUNNING, COMPLETED, ..., in Slurm's words
    reason: str = ""
    nodes: str = ""
    started: bool = False
    expected: str = ""  # when it is to start, where Slurm has planned it

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.state in ENDED


def available() -> bool:
    """Whether jobs can be submitted from here."""
    return shutil.which("sbatch") is not None


def submit(script: Path) -> str:
    """Submits an sbatch file; the id of its array. SlurmError in Slurm's own words."""
    # A job submitted from inside another one must not take that one's shape for its own.
    outside = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_") or key == "SLURM_CONF"}
    said = _call(["sbatch", "--parsable", str(script)], SUBMIT_S, outside)
    found = re.search(r"^(\d+)(;.*)?$", said, re.MULTILINE)
    if found is None:
        raise SlurmError(f"sbatch answered {said.strip()!r}, which is no job id")
    return found.group(1)


def cancel(jobs: Sequence[str]) -> None:
    """Ends jobs, given as ARRAY_INDEX; those that have ended already are no error."""
    for start in range(0, len(jobs), CHUNK):
        _call(["scancel", "--quiet", *jobs[start : start + CHUNK]], ASK_S)


def requeue(job: str) -> None:
    """Has Slurm end a running job and start it anew later, under the same id."""
    _call(["scontrol", "requeue", job], ASK_S)


def max_array_size() -> int:
    """How many elements an array may have here; UnreachableError where there is no Slurm to ask."""
    said = _call(["scontrol", "show", "config"], ASK_S)
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", said, re.MULTILINE)
    return int(found.group(1)) if found else DEFAULT_MAX_ARRAY


def minutes_left(job: str) -> float | None:
    """Minutes to a job's time limit; None where there is none or nobody tells."""
    try:
        said = _call(["squeue", "-h", "-j", job, "-O", "TimeLeft:30"], 10).strip()
    except SlurmError:
        return None
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", said)
    if found is None:
        return 0.0 if said.startswith("0:") else None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return days * 1440 + hours * 60 + minutes + seconds / 60


def states(jobs: Iterable[str]) -> dict[str, JobState]:
    """What Slurm knows of jobs, given as ARRAY_INDEX: the queue's word, else the accounting's; unknown ones are absent.

    Raises:
        UnreachableError: where the queue cannot be asked.
    """
    wanted = set(jobs)
    found = _of(wanted, _queue(_arrays(wanted)))
    missing = wanted - set(found)
    return found | _of(missing, _accounting(_arrays(missing)))


def _arrays(jobs: set[str]) -> list[str]:
    return sorted({job.partition("_")[0] for job in jobs}, key=int)


def _of(wanted: set[str], said: Mapping[str, JobState]) -> dict[str, JobState]:
    """The states of some jobs; Slurm speaks of an array's elements that never began as of one."""
    told = {job: said.get(job) or said.get(job.partition("_")[0]) for job in wanted}
    return {job: state for job, state in told.items() if state is not None}


def _element(array: str, index: str) -> str:
    return f"{array}_{index}" if index.isdigit() else array


def _queue(arrays: Sequence[str]) -> dict[str, JobState]:
    """What the controller knows, by ARRAY_INDEX, or by ARRAY for elements that it does not tell apart."""
    found: dict[str, JobState] = {}
    for some in _chunks(arrays):
        words = ["squeue", "-h", "-r", "-t", "all", "-j", ",".join(some), "-o", "%F|%K|%T|%r|%N|%S|%M"]
        try:
            said = _call(words, ASK_S)
        except UnreachableError:
            raise
        except SlurmError as error:
            if "Invalid job id" not in str(error):
                raise UnreachableError(str(error)) from None
            continue  # forgotten by the controller, some time after their end
        for line in said.splitlines():
            array, index, state, reason, nodes, expected, elapsed = line.split("|")
            begun = state != "PENDING" and bool(nodes) and elapsed != "INVALID"
            reason = "" if reason == "None" else reason
            expected = "" if expected == "N/A" else expected
            found[_element(array, index)] = JobState(state, reason, nodes, begun, expected)
    return found


def _accounting(arrays: Sequence[str]) -> dict[str, JobState]:
    """Ended jobs by sacct, as ``_queue`` names them; nothing where there is no accounting."""
    found: dict[str, JobState] = {}
    for some in _chunks(arrays):
        words = ["sacct", "-X", "-n", "-P", "-j", ",".join(some), "-o", "JobID,State,NodeList"]
        try:
            said = _call(words, ASK_S)
        except SlurmError:
            return found
        for line in said.splitlines():
            job, state, nodes = line.split("|")
            nodes = "" if nodes == "None assigned" else nodes
            array, _, index = job.partition("_")
            found[_element(array, index)] = JobState(state.split()[0], "", nodes, bool(nodes))
    return found


def _chunks(arrays: Sequence[str]) -> list[Sequence[str]]:
    return [arrays[start : start + CHUNK] for start in range(0, len(arrays), CHUNK)]


def _call(words: list[str], timeout_s: float, environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)
    except FileNotFoundError:
        raise UnreachableError(f"there is no {words[0]} on this machine") from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"{words[0]} did not answer within {timeout_s:g} s") from None
    if done.returncode == 0:
        return done.stdout
    said = re.sub(rf"\b{words[0]}: (error|fatal): ", "", " ".join(done.stderr.split()))
    if NO_ANSWER.search(said):
        raise UnreachableError(_gist(done.stderr) or said)
    raise SlurmError(said or f"{words[0]} ended with code {done.returncode}")


def _gist(said: str) -> str:
    """The line that Slurm's commands gave up at, else their first, without who says it."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    fatal = [line for line in lines if ": fatal: " in line]
    return re.sub(r"^\S+: (error|fatal): ", "", (fatal or lines or [""])[0])
