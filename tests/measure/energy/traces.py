"""Hand-written traces and events."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from distexp.runs.memory_trace import CPU, GPU, MemorySample, MemoryTraceWriter

PHASES = ((0, "setup"), (1, "warmup"), (2.25, "train"), (4, "eval"), (6, "train"), (8, "done"))
"""The training lasts from 2.25 s to 4 s and from 6 s to 8 s."""

START = 1000.0
"""Unix time of second 0, and what a counter has counted by then: samples before the run have no negative numbers."""

Value = Callable[[float], float | None]


def write_events(path: Path, phases: Sequence[tuple[float, str]] = PHASES) -> Path:
    """Write an event file."""
    lines = (json.dumps({"unix_time_s": START + time_s, "phase": phase}) + "\n" for time_s, phase in phases)
    path.write_text("".join(lines))
    return path


def gpu_samples(
    times: Sequence[float], *, power: Value = lambda _: None, energy: Value = lambda _: None, index: int = 0
) -> list[MemorySample]:
    """Return samples of a GPU; ``power`` in W and ``energy`` in J are functions of the time."""
    return [MemorySample(START + t, "", GPU, index, 1.0, power_w=power(t), energy_j=_counter(energy(t))) for t in times]


def cpu_samples(times: Sequence[float], energy: Value) -> list[MemorySample]:
    """Return samples of the CPU."""
    return [MemorySample(START + t, "", CPU, 0, 1.0, energy_j=_counter(energy(t))) for t in times]


def write_trace(path: Path, *devices: Sequence[MemorySample]) -> Path:
    """Write a trace with the samples of some devices."""
    file = MemoryTraceWriter(path)
    file.append(sample for samples in devices for sample in samples)
    file.close()
    return path


def _counter(energy_j: float | None) -> float | None:
    return None if energy_j is None else START + energy_j
