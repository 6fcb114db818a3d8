"""Waits of the CPU for the GPU. The rest of a step is the work of the CPU, such as launching kernels."""

from __future__ import annotations

from distexp.measure.profiling.chrome_trace import Trace
from distexp.measure.profiling.intervals import Interval, clip, merge, total_length

LONG_LAUNCH_S = 200e-6
"""A launch that takes longer waits for a free place in the queue of the GPU."""


def waits_for_gpu(trace: Trace) -> list[Interval]:
    """Return when the CPU waits for the GPU, or for a free place in its queue."""
    launches = (event.launch for event in trace.device_events if event.launch is not None)
    blocked = [(start + LONG_LAUNCH_S, end) for start, end in launches if end - start > LONG_LAUNCH_S]
    return [*trace.synchronizations, *blocked]


def cpu_busy_ms(trace: Trace, position: int) -> float | None:
    """Return how long the CPU does not wait for the GPU in a step; None without a GPU.

    Args:
        trace: Events of the rank.
        position: Number of the step in the trace.
    """
    if not trace.on_gpu:
        return None
    start, end = trace.steps[position]
    return 1000 * (end - start - total_length(merge(clip(waits_for_gpu(trace), (start, end)))))
