"""Text about a run that was disturbed by other programs."""

from __future__ import annotations

from collections.abc import Iterator

from distexp.runs.disturbance import describe_disturbance, starved_share, threads_per_worker
from distexp.runs.record import RunRecord


def busy_core_lines(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield name and text of the line about a run that something else slowed down; nothing for other runs."""
    share = starved_share(record)
    if share is not None:
        yield "busy cores", f"{_share_of_time(share)}. {_advice(record)}"
    elif disturbance := describe_disturbance(record):
        yield "uneven steps", f"{disturbance}, probably because of other programs. Repeat the run when they are done"


def _share_of_time(share: float) -> str:
    return f"this run got {share:.0%} of the time of its CPU cores, probably because other programs use them"


def _advice(record: RunRecord) -> str:
    """Return what to do. Threads wait for each other after each operator, so one busy core stops all of them."""
    threads = threads_per_worker(record)
    if threads == 1:
        return "Its speed is too low. Repeat it when they are done"
    return (
        f"The {threads} threads of a worker then wait for each other. Try cluster.cpus_per_worker=1 or "
        "cluster.environment={OMP_WAIT_POLICY:PASSIVE}. One thread sums in another order, so losses differ slightly"
    )
