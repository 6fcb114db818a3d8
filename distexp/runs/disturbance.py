"""Whether something else slowed a run down, so that its speed is not that of its configuration."""

from typing import Any

from distexp.runs.record import RunRecord
from distexp.system.typed_values import number_of

UNEVEN = 1.5
"""Mean step in median steps, from which a run was disturbed. Undisturbed runs had up to 1.4."""

LOW_SHARE = 0.75
"""Share of its cores below which a run with several threads per worker was starved.

Its threads use their cores while they wait for each other. On two cores, an undisturbed run with two threads used
77 % to 98 % of them. Next to other programs it used 15 % to 60 %, and was 4 to 40 times slower than with one thread.
"""

LOW_SHARE_OF_ONE_THREAD = 0.5
"""The same with one thread per worker, which sleeps while it waits for other workers.

On two cores, undisturbed runs of two workers used 68 % (FSDP) to 84 % (DDP). Below 50 % they had at most two thirds of
their speed.
"""

SHORT_S = 3.0
"""Duration of the phase ``train`` below which its share of the cores is not known. Load is sampled twice a second."""

LARGE_DATA_WAIT = 0.2
"""Share of the training that waits for its data, from which steps may be uneven and cores unused for this reason."""

PASSIVE = "passive"
"""Value of OMP_WAIT_POLICY with which threads sleep while they wait, so that they leave their cores unused."""


def describe_disturbance(record: RunRecord) -> str | None:
    """Return what shows that something else slowed a run down; None if nothing does."""
    if (share := starved_share(record)) is not None:
        return f"it got {share:.0%} of the time of its CPU cores"
    is_bucketed = (record.config.get("dataset") or {}).get("bucketing")  # Some steps have longer samples.
    if (ratio := _mean_in_medians(record)) is None or ratio < UNEVEN or is_bucketed:
        return None
    if _waits_for_data(record) or _are_steps_compiled(record):
        return None
    return f"its mean step took {ratio:.1f} times as long as its median step"


def starved_share(record: RunRecord) -> float | None:
    """Return the share of its CPU cores that a run got, if other programs probably used them; else None."""
    if _cluster(record).get("device") != "cpu":
        return None
    threads, share, steps = threads_per_worker(record), _share_of_cores(record), _measured_steps(record)
    rate, runtime = record.metrics.train_steps_per_second, record.metrics.train_runtime
    if share is None or not (steps and rate and runtime) or min(steps / rate, runtime) < SHORT_S:
        return None
    if _waits_for_data(record) or (threads == 1 and not _is_one_machine(record)):
        return None
    inherited = record.environment.variables if record.environment else {}
    variables = {**inherited, **(_cluster(record).get("environment") or {})}
    if threads > 1 and str(variables.get("OMP_WAIT_POLICY")).lower() == PASSIVE:
        return None
    return share if share < (LOW_SHARE if threads > 1 else LOW_SHARE_OF_ONE_THREAD) else None


def threads_per_worker(record: RunRecord) -> int:
    """Return the CPU threads of a worker; 1 if they were not set."""
    return int(number_of(_cluster(record), "cpus_per_worker") or 1)


def _mean_in_medians(record: RunRecord) -> float | None:
    """Return the mean step divided by the median one; None if one is unknown."""
    median_s, rate = number_of(record.metrics.step_time_s or {}, "p50"), record.metrics.train_steps_per_second
    return 1 / (rate * median_s) if median_s and rate else None


def _measured_steps(record: RunRecord) -> float | None:
    """Return the number of steps of the latest attempt that count for the speed; None if it is unknown."""
    metrics, attempts = record.metrics, record.run.attempts
    first_profiled = number_of(metrics.communication or {}, "first_step")
    last = first_profiled - 1 if first_profiled else metrics.total_steps
    if last is None:
        return None
    resumed = number_of(attempts[-1], "resumed_from_step") if attempts else None
    return max(0.0, last - (resumed or 0.0) - _warmup_steps(record))


def _warmup_steps(record: RunRecord) -> float:
    """Return the number of steps that do not count for the speed, because they may contain compilations."""
    return number_of(record.config.get("train") or {}, "measure_after_step") or 0.0


def _share_of_cores(record: RunRecord) -> float | None:
    """Return the CPU time of the training relative to that of the cores that its threads can use; None if unknown."""
    environment, built = record.environment, record.built
    phases = (entry.get("phases") for entry in record.utilization.get("cpu") or ())
    of_nodes = [number_of(known, "train") for known in phases if isinstance(known, dict)]
    percents = [percent for percent in of_nodes if percent is not None]
    if not percents or environment is None or not environment.cpu_count or built is None or not built.world_size:
        return None
    nodes = int(number_of(_cluster(record), "nodes") or 1)
    simulated = nodes if _is_one_machine(record) else 1  # Its nodes have equal parts of the cores.
    threads = threads_per_worker(record) * built.world_size * simulated / nodes
    cores = min(threads, environment.cpu_count, environment.cpu_limit or threads)
    used = sum(percents) * simulated / len(percents) if simulated > 1 else max(percents)
    return used / 100 * max(1, environment.cpu_count // simulated) / cores


def _cluster(record: RunRecord) -> dict[str, Any]:
    return record.config.get("cluster") or {}


def _is_one_machine(record: RunRecord) -> bool:
    """Return whether all nodes of a run were simulated on one machine."""
    return len(set(record.run.hosts)) <= 1


def _are_steps_compiled(record: RunRecord) -> bool:
    """Return whether the measured steps are even without the time of compilations."""
    steps, ratio, compiled = _measured_steps(record), _mean_in_medians(record), record.metrics.compile or {}
    median_s, seconds = number_of(record.metrics.step_time_s or {}, "p50"), number_of(compiled, "seconds")
    if not (steps and ratio and median_s and seconds):
        return False
    of_evaluation = 1 if record.metrics.eval_losses else 0  # It compiles the model again, without gradients.
    if _warmup_steps(record) and (number_of(compiled, "recompilations") or 0.0) <= of_evaluation:
        return False
    return ratio - seconds / (steps * median_s) < UNEVEN


def _waits_for_data(record: RunRecord) -> bool:
    wait, runtime = record.metrics.data_wait_s, record.metrics.train_runtime
    return bool(wait and runtime and wait > LARGE_DATA_WAIT * runtime)
