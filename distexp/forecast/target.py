"""What is forecast, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TO_MEASURE = "To measure them:"
"""Text in a note before the command that replaces its assumption."""

PARTS = ("compute", "exposed_communication", "launch", "waiting", "other")
"""Parts of a forecast step. ``launch``: the device is idle because the CPU launches its work too slowly."""


@dataclass(frozen=True)
class Target:
    """A number of workers to forecast.

    Attributes:
        nodes: Number of nodes.
        workers_per_node: Workers on each node.
        micro_batches: Micro-batches of a step on each worker. Their size is that of the profiled run.
        samples_per_step: Samples of a step over all workers.
    """

    nodes: int
    workers_per_node: int
    micro_batches: int
    samples_per_step: float

    @property
    def workers(self) -> int:
        """Return the number of workers."""
        return self.nodes * self.workers_per_node


@dataclass(frozen=True)
class Forecast:
    """The forecast of one target.

    Attributes:
        target: What was forecast.
        step_time_s: Duration of a step.
        low_s: Lower end of the interval.
        high_s: Upper end of the interval.
        parts: Seconds of each part of PARTS, which add up to the step.
        hidden_communication_s: Communication at the same time as computation.
        beyond: How far the target is outside of the measured range. Empty: inside.
        limit: What limits the step most, as ``the all_reduce of 540 MB``. Empty: unknown.
        notes: Assumptions.
    """

    target: Target
    step_time_s: float
    low_s: float
    high_s: float
    parts: Mapping[str, float] = field(default_factory=dict)
    hidden_communication_s: float = 0.0
    beyond: str = ""
    limit: str = ""
    notes: tuple[str, ...] = ()

    @property
    def samples_per_second(self) -> float:
        """Return the throughput over all workers."""
        return self.target.samples_per_step / self.step_time_s
