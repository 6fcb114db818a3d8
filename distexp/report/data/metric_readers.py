"""Readers of metrics: what a record has to be searched or computed for.

A function with a record as argument is a reader. The others return the reader of a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from distexp.runs.device_entries import device_values, mean_or_none
from distexp.runs.memory_parts import tensor_entries
from distexp.runs.model_states import ideal_states_mib
from distexp.runs.record import RunRecord
from distexp.statistics.noise import step_noise

ReadMetric = Callable[[RunRecord], float | None]
"""A function that returns a metric of a run, or None if it was not measured."""


def metrics_field(name: str) -> ReadMetric:
    """Return the reader of a field of ``record.metrics``."""
    return lambda record: number_or_none(getattr(record.metrics, name))


def last_percent(name: str) -> ReadMetric:
    """Return the reader of the last of a list of fractions, in percent."""

    def read(record: RunRecord) -> float | None:
        fractions = getattr(record.metrics, name)
        return 100 * float(fractions[-1]) if fractions else None

    return read


def step_time(quantile: str) -> ReadMetric:
    """Return the reader of a quantile of the step times, in seconds: p50, p90 or max."""
    return lambda record: number_or_none((record.metrics.step_time_s or {}).get(quantile))


def energy_value(name: str) -> ReadMetric:
    """Return the reader of a key of ``metrics.energy``."""
    return lambda record: number_or_none((record.metrics.energy or {}).get(name))


def communication_percent(name: str) -> ReadMetric:
    """Return the reader of a fraction in ``metrics.communication``, in percent."""

    def read(record: RunRecord) -> float | None:
        return _percent((record.metrics.communication or {}).get(name))

    return read


def step_noise_percent(record: RunRecord) -> float | None:
    """Return the noise of the speed between steps, in percent of the speed."""
    return _percent(step_noise(record.metrics.speed_error))


def padding_percent(record: RunRecord) -> float | None:
    """Return the share of padding in the training batches, in percent."""
    return _percent(record.metrics.padding_share)


def flops_utilization_percent(name: str) -> ReadMetric:
    """Return the reader of an MFU or HFU."""
    return lambda record: _percent(getattr(record.metrics, name))


def largest_of_devices(kind: str, key: str) -> ReadMetric:
    """Return the reader of the largest value in ``record.memory`` over the devices or ranks of a kind."""
    return lambda record: max(device_values(record.memory.get(kind), key), default=None)


def gpu_peak(record: RunRecord) -> float | None:
    """Return the peak that NVML sampled, or what torch had reserved if that is more.

    A run may run out of memory between two samples.
    """
    sampled = largest_of_devices("gpu", "peak_mib")(record)
    return None if sampled is None else max(sampled, largest_of_devices("torch", "peak_reserved_mib")(record) or 0.0)


def mean_utilization(kind: str) -> ReadMetric:
    """Return the reader of the mean utilization over the devices of a kind, in percent."""
    return lambda record: mean_or_none(device_values(record.utilization.get(kind), "average_pct"))


def largest_part(name: str) -> ReadMetric:
    """Return the reader of a part of the memory, on the worker where it is largest."""
    return lambda record: max(device_values(tensor_entries(record.memory), name), default=None)


def sum_of_parts(record: RunRecord) -> float | None:
    """Return the sum of all parts on the worker with the most, in MiB."""
    return _largest_sum(record, PARTS)


def sum_not_offloaded(record: RunRecord) -> float | None:
    """Return the sum of the parts that are not in host memory, on the worker with the most, in MiB."""
    return _largest_sum(record, [name for name in PARTS if name not in _offloaded_parts(record)])


def _largest_sum(record: RunRecord, names: Iterable[str]) -> float | None:
    """Return the sum of some parts on the worker where it is largest."""
    kept = list(names)
    sums = [sum(float(entry.get(name) or 0.0) for name in kept) for entry in tensor_entries(record.memory)]
    return max(sums, default=None)


def _offloaded_parts(record: RunRecord) -> set[str]:
    """Return the parts that are in host memory. From stage 2 on, an offloaded optimizer takes its gradients along."""
    built = record.built
    offloaded = set(built.offload.split("+")) if built else set()
    if built and "optimizer" in offloaded and (built.zero_stage or 0) >= 2:
        offloaded.add("gradients")
    return {f"{'optimizer_states' if name == 'optimizer' else name}_mib" for name in offloaded}


def number_or_none(value: Any) -> float | None:
    """Return a value as a float; None stays None."""
    return None if value is None else float(value)


def _percent(fraction: Any) -> float | None:
    return None if fraction is None else 100 * float(fraction)


def prediction(name: str) -> ReadMetric:
    """Return the reader of a field of ``record.predicted``."""
    return lambda record: number_or_none(getattr(record.predicted, name)) if record.predicted else None


def predicted_gpu_peak(record: RunRecord) -> float | None:
    """Return the predicted peak of torch's memory. On a CPU, torch has no memory that could be measured."""
    return None if record.config["cluster"]["device"] == "cpu" else prediction("peak_allocated_mib")(record)


def prediction_error_percent(record: RunRecord) -> float | None:
    """Return predicted minus measured peak, in percent of the measured one."""
    predicted = predicted_gpu_peak(record)
    measured = largest_of_devices("torch", "peak_allocated_mib")(record) if record.status == "completed" else None
    return 100 * (predicted / measured - 1) if predicted is not None and measured else None


def ideal_model_states(record: RunRecord) -> float | None:
    """Return the ideal memory of model states, only if the real one was measured."""
    return ideal_states_mib(record) if device_values(record.memory["torch"], "states_mib") else None


def filled_in_later(record: RunRecord) -> float | None:
    """Return None: a comparison with other runs fills in the value."""
    return None


PARTS = {
    "parameters_mib": "parameters",
    "gradients_mib": "gradients",
    "optimizer_states_mib": "optimizer states",
    "activations_mib": "activations",
}
"""Metrics of the parts of a worker's memory, with their titles."""
