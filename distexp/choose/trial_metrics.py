"""What a trial measured: from the record of its run to a trial of the search."""

from __future__ import annotations

from pathlib import Path

from distexp.choose.candidate import COMPLETED, Trial
from distexp.config import Config
from distexp.runs.device_entries import cpu_peak_mib, device_values
from distexp.runs.entry_values import number_of
from distexp.runs.failure_text import failure_text
from distexp.runs.jsonl import read_entries
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import OPERATORS, RECORD, SPEC

SECONDS_PER_HOUR = 3600.0


def read_record(run_dir: Path) -> RunRecord | None:
    """Return the record of a run; None if there is none that can be read."""
    try:
        return RunRecord.read(run_dir / RECORD)
    except ValueError:
        return None


def trial_of(record: RunRecord | None, run_dir: Path, steps: int, config: Config, cost: float) -> Trial:
    """Return the trial of a run that has ended.

    Args:
        record: Record of the run; None if it left none.
        run_dir: Directory of the run.
        steps: Number of measured steps.
        config: Resolved configuration of the run.
        cost: GPU-seconds of the run.
    """
    if record is None:
        return Trial(steps, "failed", run_dir, error=f"the run left no record in {run_dir}")
    if record.status != COMPLETED:
        return Trial(steps, record.status, run_dir, gpu_seconds=cost, error=failure_text(record))
    metrics = record.metrics
    speed = metrics.train_samples_per_second
    return Trial(
        steps,
        record.status,
        run_dir,
        step_s=(metrics.step_time_s or {}).get("p50"),
        samples_per_second=speed,
        peak_allocated_mib=peak_mib(record),
        j_per_sample=(metrics.energy or {}).get("j_per_sample"),
        price_per_sample=_price_per_sample(config, speed),
        gpu_seconds=cost,
        dropout=None if record.built is None else record.built.dropout,
    )


def gpu_seconds(record: RunRecord, run_dir: Path, config: Config) -> float:
    """Return the time of a run times the number of its workers, with the imports that the record leaves out.

    An attempt starts with its spec, and ends with its record. A Slurm job writes its spec again when it starts. An
    attempt that never starts has no hosts, and its time in the queue costs nothing. Neither does the compilation of
    DeepSpeed's operators, which happens once on a machine.
    """
    if record.run.attempts and not record.run.hosts:
        return 0.0
    try:
        seconds = (run_dir / RECORD).stat().st_mtime - (run_dir / SPEC).stat().st_mtime
    except OSError:
        return 0.0
    return max(0.0, seconds - _compilation_s(run_dir)) * config.cluster.world_size


def _compilation_s(run_dir: Path) -> float:
    """Return how long the nodes of a run compiled DeepSpeed's operators, or waited for another run that did."""
    entries = read_entries(run_dir / OPERATORS)
    times = (number_of(entry, key) for entry in entries for key in ("compiled_s", "waited_s"))
    return max((time for time in times if time is not None), default=0.0)


def training_gpu_seconds(record: RunRecord, config: Config) -> float:
    """Return the time of training and evaluation times the number of workers; 0 for a run that failed."""
    return (record.metrics.train_runtime or 0.0) * config.cluster.world_size


def peak_mib(record: RunRecord) -> float | None:
    """Return the highest peak of torch's memory on a GPU; for a run on CPUs that of the processes of a node."""
    allocated = device_values(record.memory.get("torch"), "peak_allocated_mib")
    return max(allocated) if allocated else cpu_peak_mib(record.memory)


def _price_per_sample(config: Config, samples_per_second: float | None) -> float | None:
    """Return the price of the GPUs for a sample; None if it is unknown, or for a run on CPUs."""
    price = config.cluster.price_per_gpu_hour
    if price is None or not samples_per_second or config.cluster.device == "cpu":
        return None
    return config.cluster.world_size * price / SECONDS_PER_HOUR / samples_per_second
