"""The size of a run to forecast, and its forecast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Target:
    """The size of a run.

    Attributes:
        nodes: Number of nodes.
        workers_per_node: Workers of each node.
        micro_batches: Micro-batches of each worker in an optimizer step.
        samples_per_step: Samples of all workers in an optimizer step.
    """

    nodes: int
    workers_per_node: int
    micro_batches: int
    samples_per_step: float

    @property
    def workers(self) -> int:
        """Return the number of workers on all nodes."""
        return self.nodes * self.workers_per_node


@dataclass(frozen=True)
class Forecast:
    """The forecast of an optimizer step.

    Attributes:
        target: The size.
        step_time_s: Most likely duration of the step.
        low_s: Lower end of the interval.
        high_s: Upper end of the interval.
        parts: Seconds of the step by part: compute, exposed_communication, launch, waiting, ... They add up to it.
        beyond: How far the size is beyond the measured range; empty inside of it.
        limit: What limits it most, as ``the all-gather of the backward pass``; empty if unknown.
        notes: What was assumed.
    """

    target: Target
    step_time_s: float
    low_s: float
    high_s: float
    parts: Mapping[str, float] = field(default_factory=dict)
    beyond: str = ""
    limit: str = ""
    notes: tuple[str, ...] = ()
