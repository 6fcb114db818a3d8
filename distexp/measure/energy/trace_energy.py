"""Energy of a run, computed from its memory traces, of which there is one per node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distexp.measure.energy.curves import Curve, Span, counter_curve, energy_in, power_curve
from distexp.runs.memory_trace import CPU, GPU, MemorySample, group_by_device, read_memory_trace
from distexp.runs.phases import phase_intervals, read_phase_events

TRAINING = frozenset({"train"})
"""Phase of the steps that count for the speed: after the warm-up, without evaluation and saving."""

Samples = list[MemorySample]


@dataclass(frozen=True)
class TraceEnergy:
    """Energy of a run in joules; a value is None if it is unknown for any of the devices.

    Attributes:
        gpu: Of the run's GPUs, by their energy counters.
        gpu_by_power: The same, by the integral of their power.
        gpu_training: Of the training steps alone; by the counters, or by power if a GPU has no counter.
        cpu: The run's part of the energy of the CPU packages.
        cpu_training: The same, of the training steps alone.
        idle_w: Power of the run's GPUs before the workers used them.
    """

    gpu: float | None = None
    gpu_by_power: float | None = None
    gpu_training: float | None = None
    cpu: float | None = None
    cpu_training: float | None = None
    idle_w: float | None = None


def measure_energy(traces: Sequence[Path], events: Path) -> TraceEnergy:
    """Return the energy of a run. If a trace is missing, nothing is known.

    Args:
        traces: The memory trace of each node.
        events: File with the phases of the run.
    """
    try:
        nodes = [group_by_device(read_memory_trace(path).samples) for path in traces]
    except (OSError, ValueError):
        return TraceEnergy()
    gpus = _devices(nodes, GPU)
    cpus = _devices(nodes, CPU)
    phase_events = read_phase_events(events)
    training = phase_intervals(phase_events, TRAINING)
    first_event_s = phase_events[0].unix_time_s if phase_events else None
    return TraceEnergy(
        gpu=_sum_or_none(_whole_run(gpus, counter_curve)),
        gpu_by_power=_sum_or_none(_whole_run(gpus, power_curve)),
        gpu_training=_sum_or_none(_energies(gpus, training, counter_or_power)),
        cpu=_sum_or_none(_whole_run(cpus, counter_curve)),
        cpu_training=_sum_or_none(_energies(cpus, training, counter_curve)),
        idle_w=_sum_or_none([_idle_power(samples, first_event_s) for samples in gpus]),
    )


def counter_or_power(samples: Samples) -> Curve:
    """Return the energy of a device by its counter or, if it has none, by its power."""
    return counter_curve(samples) or power_curve(samples)


def _devices(nodes: Sequence[dict[tuple[str, int], Samples]], kind: str) -> list[Samples]:
    """Return the samples of each device of a kind; none if a node has no such device."""
    by_node = [[samples for (found, _), samples in node.items() if found == kind] for node in nodes]
    return [samples for devices in by_node for samples in devices] if all(by_node) else []


def _whole_run(devices: Sequence[Samples], curve_of: Callable[[Samples], Curve]) -> list[float | None]:
    return [energy_in(curve_of(samples), (samples[0].unix_time_s, samples[-1].unix_time_s)) for samples in devices]


def _energies(
    devices: Sequence[Samples], spans: Sequence[Span], curve_of: Callable[[Samples], Curve]
) -> list[float | None]:
    curves = [curve_of(samples) for samples in devices]
    return [energy_in(curve, span) for curve in curves for span in spans]


def _sum_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _idle_power(samples: Samples, first_event_s: float | None) -> float | None:
    """Return the lowest power of a GPU before the first phase, while its memory is as in the first sample.

    The lowest, because the power that NVML reports may include the end of an earlier program.
    """
    idle = [
        sample.power_w for sample in samples
        if sample.power_w is not None and sample.used_mib == samples[0].used_mib
        and (first_event_s is None or sample.unix_time_s < first_event_s)
    ]  # fmt: skip
    return min(idle, default=None)
