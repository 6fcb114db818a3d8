"""Energy and cost of a run, from its memory traces and the counters of the CPU."""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from distexp.config.sections import ClusterConfig
from distexp.runs.events import phase_intervals, read_phase_events
from distexp.runs.memory_trace import CPU, GPU, MemorySample, group_by_device, read_memory_trace


def energy_entry(
    energy: TraceEnergy, cluster: ClusterConfig, *, duration_s: float | None, samples: int | None, tokens: int | None
) -> dict[str, float | None] | None:
    """Return ``metrics.energy`` of the record, for the samples of the training steps; None if nothing is known."""
    on_gpus = cluster.device == "cuda"
    training_j = energy.gpu_training if on_gpus else energy.cpu_training
    kwh, by_power = _kwh(energy, on_gpus=on_gpus), energy.gpu_by_power
    gpu_hours = cluster.world_size * duration_s / 3600 if on_gpus and duration_s is not None else None
    entry = {
        "gpu_j": energy.gpu,
        "gpu_j_by_power": by_power,
        "power_difference_pct": None if by_power is None or not energy.gpu else 100 * (by_power / energy.gpu - 1),
        "cpu_j": energy.cpu,
        "gpu_j_training": energy.gpu_training,
        "cpu_j_training": energy.cpu_training,
        "idle_w": energy.idle_w,
        "j_per_sample": training_j / samples if training_j is not None and samples else None,
        "j_per_token": training_j / tokens if training_j is not None and tokens else None,
        "kwh": kwh,
        "gpu_hours": gpu_hours,
        "co2e_g": _product(kwh, cluster.gco2_per_kwh),
        "price": _product(gpu_hours, cluster.price_per_gpu_hour),
    }
    return entry if any(value is not None for value in entry.values()) else None


def _kwh(energy: TraceEnergy, *, on_gpus: bool) -> float | None:
    """Return the energy of GPUs and CPUs in kWh; None if that of the devices that train is unknown.

    Many machines do not report the energy of their CPUs. That of the GPUs is then the result.
    """
    gpu = energy.gpu if energy.gpu is not None else energy.gpu_by_power
    if on_gpus and gpu is None:
        return None
    known = [joules for joules in (gpu, energy.cpu) if joules is not None]
    return sum(known) / 3.6e6 if known else None


def _product(amount: float | None, factor: float | None) -> float | None:
    return None if amount is None or factor is None else amount * factor


Curve = Sequence[tuple[float, float]]
"""(Unix time in s, energy in J from an arbitrary start) of each sample. Between two samples, energy grows linearly."""

Samples = list[MemorySample]  # of one device
Span = tuple[float, float]  # start and end in Unix seconds; the end may be infinite
MAX_GAP = 2  # spacings of samples that may be missing at an end of an interval


def counter_curve(samples: Sequence[MemorySample]) -> Curve:
    """Return the energy counter of a device; empty if it is unknown in a sample, or if it was reset."""
    curve = [(sample.unix_time_s, sample.energy_j) for sample in samples if sample.energy_j is not None]
    complete = len(curve) == len(samples) and all(a[1] <= b[1] for a, b in pairwise(curve))
    return curve if complete else []


def power_curve(samples: Sequence[MemorySample]) -> Curve:
    """Return the trapezoidal integral of a device's power; empty if the power is unknown."""
    power = [(sample.unix_time_s, sample.power_w) for sample in samples if sample.power_w is not None]
    curve = [(power[0][0], 0.0)] if power else []
    for (begin, first), (end, last) in pairwise(power):
        curve.append((end, curve[-1][1] + (end - begin) * (first + last) / 2))
    return curve


def energy_in(curve: Curve, span: Span) -> float | None:
    """Return the joules in an interval, or None if samples are missing at an end of it."""
    begin, end = span[0], curve[-1][0] if math.isinf(span[1]) and curve else span[1]
    if len(curve) < 2 or end <= begin != span[1]:  # The interval starts after the last sample.
        return None
    spacing = (curve[-1][0] - curve[0][0]) / (len(curve) - 1)
    if curve[0][0] - begin > MAX_GAP * spacing or end - curve[-1][0] > MAX_GAP * spacing:
        return None
    return _interpolate(curve, end) - _interpolate(curve, begin)


def _interpolate(curve: Curve, time_s: float) -> float:
    position = min(max(bisect_right(curve, (time_s, math.inf)), 1), len(curve) - 1)
    before, after = curve[position - 1], curve[position]
    slope = (after[1] - before[1]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
    return before[1] + slope * (time_s - before[0])


@dataclass(frozen=True)
class TraceEnergy:
    """Energy of a run in joules; a value is None if it is unknown for any of the devices."""

    gpu: float | None = None  # of the run's GPUs, by their energy counters
    gpu_by_power: float | None = None  # the same, by the integral of their power
    gpu_training: float | None = None  # of the training steps alone; by power if a GPU has no counter
    cpu: float | None = None  # the run's part of the energy of the CPU packages
    cpu_training: float | None = None  # the same, of the training steps alone
    idle_w: float | None = None  # power of the run's GPUs before the workers used them


def measure_energy(traces: Sequence[Path], events: Path) -> TraceEnergy:
    """Return the energy of a run. If a trace is missing, nothing is known."""
    try:
        nodes = [group_by_device(read_memory_trace(path).samples) for path in traces]
    except (OSError, ValueError):
        return TraceEnergy()
    gpus, cpus = _devices(nodes, GPU), _devices(nodes, CPU)
    phase_events = read_phase_events(events)
    training = phase_intervals(phase_events, frozenset({"train"}))  # the steps that count for the speed
    first_event_s = phase_events[0].unix_time_s if phase_events else None
    return TraceEnergy(
        gpu=_energy(gpus, counter_curve),
        gpu_by_power=_energy(gpus, power_curve),
        gpu_training=_energy(gpus, lambda gpu: counter_curve(gpu) or power_curve(gpu), training),
        cpu=_energy(cpus, counter_curve),
        cpu_training=_energy(cpus, counter_curve, training),
        idle_w=_sum_or_none([_idle_power(samples, first_event_s) for samples in gpus]),
    )


def _devices(nodes: Sequence[dict[tuple[str, int], Samples]], kind: str) -> list[Samples]:
    """Return the samples of each device of a kind; none if a node has no such device."""
    by_node = [[samples for (found, _), samples in node.items() if found == kind] for node in nodes]
    return [samples for devices in by_node for samples in devices] if all(by_node) else []


def _energy(
    devices: Sequence[Samples], curve_of: Callable[[Samples], Curve], spans: Sequence[Span] | None = None
) -> float | None:
    """Return the joules of some devices in some intervals; by default in the whole run."""
    values: list[float | None] = []
    for samples in devices:
        curve, whole = curve_of(samples), (samples[0].unix_time_s, samples[-1].unix_time_s)
        values += [energy_in(curve, span) for span in ([whole] if spans is None else spans)]
    return _sum_or_none(values)


def _sum_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _idle_power(samples: Samples, first_event_s: float | None) -> float | None:
    """Return the lowest power of a GPU before it is used: the others may include the end of an earlier program."""
    before = (one for one in samples if first_event_s is None or one.unix_time_s < first_event_s)
    idle = (one.power_w for one in before if one.used_mib == samples[0].used_mib and one.power_w is not None)
    return min(idle, default=None)


POWERCAP = Path("/sys/class/powercap")  # RAPL domains; the kernel uses the name ``intel-rapl`` for AMD too
STAT = Path("/proc/stat")
TOP_LEVEL = re.compile(r"intel-rapl:\d+")  # packages; their cores and graphics are ``intel-rapl:0:1``
BUSY_FIELDS = slice(0, 3), slice(5, 8)  # of ``/proc/stat``: user, nice, system; irq, softirq, steal (proc(5))


class PackageCounter:
    """Energy counter of one CPU package, which restarts at 0 after its maximum. Raises OSError or ValueError."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text())
        self._last_uj = int(self._file.read_text())

    def advance(self) -> float:
        """Return the joules since the last call. Call it before the counter restarts twice, after minutes."""
        now_uj = int(self._file.read_text())
        used_uj, self._last_uj = (now_uj - self._last_uj) % (self._range_uj + 1), now_uj
        return used_uj / 1e6


class CpuEnergyReader:
    """Reader of the energy of all CPU packages of this machine.

    Programs outside the process tree use energy too. So the tree gets its fraction of the CPU time in use. The
    fractions of all programs add up to 1, so nothing is counted twice.
    """

    def __init__(self, powercap: Path | None = None, stat: Path | None = None) -> None:
        self._stat = stat or STAT
        self._counters = open_counters(powercap or POWERCAP)
        self._busy_ticks = self._read_busy_ticks() if self._counters else 0
        self._fraction = 0.0
        self._tree_j = 0.0

    def read(self, cpu_s: float) -> float | None:
        """Return the joules of the tree since the first reading, given its CPU time since the last one."""
        if not self._counters:
            return None
        try:
            used_j = sum(counter.advance() for counter in self._counters)
            busy_ticks = self._read_busy_ticks()
        except (OSError, ValueError):
            self._counters = []
            return None
        busy_s, self._busy_ticks = (busy_ticks - self._busy_ticks) / os.sysconf("SC_CLK_TCK"), busy_ticks
        if busy_s > 0:  # Both times have a resolution of 10 ms.
            self._fraction = min(1.0, cpu_s / busy_s)
        self._tree_j += used_j * self._fraction
        return self._tree_j

    def _read_busy_ticks(self) -> int:
        fields = [int(field) for field in self._stat.read_text().split("\n", 1)[0].split()[1:]]
        return sum(sum(fields[part]) for part in BUSY_FIELDS)


def can_read_energy() -> bool:
    """Return whether this machine shows the energy of its CPUs to this user."""
    return bool(open_counters(POWERCAP))


def open_counters(powercap: Path) -> Sequence[PackageCounter]:
    """Return the counters of all CPU packages; none if there is no RAPL, or if one of them cannot be read."""
    try:
        folders = [path for path in powercap.iterdir() if TOP_LEVEL.fullmatch(path.name)]
        # The domain ``psys`` is the whole platform, which contains the packages.
        packages = [path for path in folders if (path / "name").read_text().startswith("package")]
        return [PackageCounter(path) for path in sorted(packages)]
    except (OSError, ValueError):
        return []
