"""Values of a record's entries for each GPU, rank or node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


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


def peak_before_end(memory: Mapping[str, Any]) -> float | None:
    """Return the largest CPU memory of a node before its processes ended, in MiB; None if it was not measured.

    While processes end, memory that they shared may count several times.
    """
    phases = [entry.get("phases") or {} for entry in memory.get("cpu") or ()]
    peaks = [mib for entry in phases for phase, mib in entry.items() if phase != "done" and mib is not None]
    return max(peaks, default=None)
