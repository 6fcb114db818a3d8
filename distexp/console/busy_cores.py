"""Text about a run on CPUs whose threads share their cores with other programs."""

from __future__ import annotations

from collections.abc import Iterator

from distexp.runs.entry_values import number_of
from distexp.runs.record import RunRecord

LOW_SHARE = 0.75
"""Share of its cores below which the line is printed. Threads that wait for each other use their cores, too.

On two cores, an undisturbed run with two threads used 95 % of them. Next to other programs it used 15 % to 60 %,
and was 4 to 40 times slower than with one thread.
"""

PASSIVE = "passive"
"""Value of OMP_WAIT_POLICY with which threads sleep while they wait, so that they leave their cores unused."""

LARGE_DATA_WAIT = 0.2
"""Share of the training that waits for its data, from which the cores may be unused for this reason."""


def busy_core_lines(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield name and text of the line about busy cores, if a worker has several threads and few of its cores' time.

    The threads wait for each other after each operator. So a program that takes one of their cores stops all of them.
    """
    cluster = record.config["cluster"]
    threads, share = cluster.get("cpus_per_worker") or 1, _share_of_cores(record)
    if cluster["device"] != "cpu" or threads < 2 or share is None or share >= LOW_SHARE:
        return
    if _waits_for_data(record) or _wait_policy(record) == PASSIVE:
        return
    yield (
        "busy cores",
        f"this run got {share:.0%} of the time of its CPU cores, probably because other programs use them. The "
        f"{threads} threads of a worker then wait for each other. Try cluster.cpus_per_worker=1 or "
        "cluster.environment={OMP_WAIT_POLICY:PASSIVE}",
    )


def _share_of_cores(record: RunRecord) -> float | None:
    """Return the CPU time of the training relative to that of the cores that its threads can use; None if unknown."""
    environment, cluster = record.environment, record.config["cluster"]
    used = [number_of(entry.get("phases") or {}, "train") for entry in record.utilization["cpu"]]
    known = [percent for percent in used if percent is not None]
    if not known or environment is None or not environment.cpu_count:
        return None
    nodes_here = cluster["nodes"] if cluster["launcher"] == "local" else 1  # Simulated nodes share the cores.
    threads = (cluster.get("cpus_per_worker") or 1) * cluster["workers_per_node"] * nodes_here
    cores = min(threads, environment.cpu_count, environment.cpu_limit or threads)
    total = sum(known) if nodes_here > 1 else max(known)
    return float(total / 100 * environment.cpu_count / cores)


def _wait_policy(record: RunRecord) -> str:
    variables = record.config["cluster"].get("environment") or {}
    return str(variables.get("OMP_WAIT_POLICY", "")).lower()


def _waits_for_data(record: RunRecord) -> bool:
    wait, runtime = record.metrics.data_wait_s, record.metrics.train_runtime
    return bool(wait and runtime and wait > LARGE_DATA_WAIT * runtime)
