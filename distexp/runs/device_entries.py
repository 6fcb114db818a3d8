"""Values of a record's entries for each GPU, rank or node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

UNCOUNTED_CPU_PHASES = frozenset({"search", "profile", "done"})
"""Phases that do not count for CPU memory.

The search tries sizes that are not chosen, and the profiler needs memory itself. In ``done`` the processes end, so
memory that they shared may count several times.
"""


def device_values(entries: Iterable[Mapping[str, Any]] | None, key: str) -> list[float]:
    """Return the measured values of a key in entries such as ``memory["gpu"]``.

    Raises:
        TypeError, ValueError: if a value is not a number.
    """
    return [float(entry[key]) for entry in entries or () if entry.get(key) is not None]


def mean_or_none(values: Iterable[float]) -> float | None:
    """Return the mean; None if there are no values."""
    known = list(values)
    return sum(known) / len(known) if known else None


def cpu_peak_mib(memory: Mapping[str, Any]) -> float | None:
    """Return the largest CPU memory of a node in the phases that count, in MiB; None if it was not measured."""
    return max(device_values(memory.get("cpu"), "peak_mib"), default=None)
