"""Removal of the profiler's overhead from the parts of a step."""

from __future__ import annotations

from typing import Any

from distexp.runs.step_parts import HIDDEN, PARTS

SLOWED = ("launch_idle_ms", "host_ms", "waiting_ms")
"""Parts that grow because the profiler slows down the CPU."""

DATA_WAIT = "data_wait_ms"
"""Part that grows too, because the CPU collates and copies batches."""

WITHOUT_CORE = "without_core_ms"
"""Time inside the parts of a CPU. It is scaled with them."""

SIMILAR = 1.05
"""Largest ratio of the sizes of two steps whose kernels take equally long."""


class StepSizes:
    """Smallest and largest sizes of the batches of a rank's steps."""

    def __init__(self) -> None:
        self._least: tuple[int, ...] = ()
        self._most: tuple[int, ...] = ()

    def add(self, *sizes: int) -> None:
        """Add the sizes of a step, always in the same order."""
        self._least = tuple(map(min, self._least or sizes, sizes))
        self._most = tuple(map(max, self._most or sizes, sizes))

    @property
    def differ(self) -> bool:
        """Return whether the kernels of some steps take longer than those of others."""
        return any(most > SIMILAR * least for least, most in zip(self._least, self._most, strict=True))


def remove_overhead(
    entry: dict[str, Any], median_s: float, *, data_wait_s: float = 0.0, sizes_differ: bool = False
) -> dict[str, Any]:
    """Return an entry of ``metrics.step_breakdown`` for a step that was not profiled.

    On a GPU, kernels and transfers are as long as without the profiler. So the parts in ``SLOWED`` lose what the
    profiled step takes longer than the median one, in proportion to their size. If they are too small, ``DATA_WAIT``
    loses the rest. Nothing is removed if the batches of the steps have different sizes: the profiled step may then be
    longer because it has more work.

    On a CPU the profiler slows down all parts, and other programs slow down any step. So all parts are scaled: they
    have the shares of the profiled step, and add up to the median one.

    Args:
        entry: parts of a profiled step in milliseconds.
        median_s: median of the measured steps, which are not profiled, in seconds.
        data_wait_s: median wait for data in these steps, in seconds. ``DATA_WAIT`` does not become shorter than this.
        sizes_differ: whether a rank has batches of different sizes.
    """
    if entry["launch_idle_ms"] is None:
        return _scale(entry, 1000 * median_s)
    profiled_ms, slowed_ms = entry["step_ms"], sum(entry[name] for name in SLOWED)
    if sizes_differ:
        return {**entry, "profiled_step_ms": profiled_ms, "includes_overhead": True}
    overhead_ms = max(0.0, profiled_ms - 1000 * median_s)
    removed_ms = min(overhead_ms, slowed_ms)
    kept = 1 - removed_ms / slowed_ms if slowed_ms else 1.0
    from_data_ms = min(overhead_ms - removed_ms, max(0.0, entry[DATA_WAIT] - 1000 * data_wait_s))
    shorter = {name: entry[name] * kept for name in SLOWED} | {DATA_WAIT: entry[DATA_WAIT] - from_data_ms}
    times = {"step_ms": profiled_ms - removed_ms - from_data_ms, "profiled_step_ms": profiled_ms}
    return {**entry, **shorter, **times, "includes_overhead": False}


def _scale(entry: dict[str, Any], median_ms: float) -> dict[str, Any]:
    """Return an entry whose parts add up to a median step. They still have the shares of the profiled step."""
    profiled_ms = entry["step_ms"]
    keys = (*(f"{name}_ms" for name in (*PARTS, HIDDEN)), WITHOUT_CORE)
    times = {key: entry.get(key) for key in keys}
    scaled = {name: time * median_ms / profiled_ms for name, time in times.items() if time is not None}
    return {**entry, **scaled, "step_ms": median_ms, "profiled_step_ms": profiled_ms, "includes_overhead": True}
