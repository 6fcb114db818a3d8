"""Removal of the profiler's overhead from the parts of a step on a GPU."""

from __future__ import annotations

from typing import Any

SLOWED = ("launch_idle_ms", "host_ms", "waiting_ms")
"""Parts that grow because the profiler slows down the CPU."""


def remove_overhead(entry: dict[str, Any], median_s: float) -> dict[str, Any]:
    """Return an entry of ``metrics.step_breakdown`` for a step that was not profiled.

    Kernels and transfers are as long as without the profiler. So the parts in ``SLOWED`` lose what the profiled step
    takes longer than the median one, in proportion to their size. On a CPU nothing is removed.

    Args:
        entry: parts of a profiled step in milliseconds.
        median_s: median of the measured steps, which are not profiled, in seconds.
    """
    profiled_ms, slowed_ms = entry["step_ms"], sum(entry[name] or 0.0 for name in SLOWED)
    if entry["launch_idle_ms"] is None:
        return {**entry, "profiled_step_ms": profiled_ms}
    removed_ms = min(max(0.0, profiled_ms - 1000 * median_s), slowed_ms)
    kept = 1 - removed_ms / slowed_ms if slowed_ms else 1.0
    shorter = {name: entry[name] * kept for name in SLOWED}
    return {**entry, **shorter, "step_ms": profiled_ms - removed_ms, "profiled_step_ms": profiled_ms}
