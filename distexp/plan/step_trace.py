"""Memory events of one training step, as the tracer records them and the allocator model replays them."""

from __future__ import annotations

from dataclasses import dataclass

PARTS = (
    "parameters",
    "gradients",
    "optimizer_states",
    "activations",
    "logits",
    "communication",
    "temporaries",
    "batch",
)
PHASES = ("setup", "forward", "backward", "optimizer")


class PlanError(Exception):
    """A training whose memory cannot be traced. The message is the reason."""


@dataclass(frozen=True)
class Event:
    """An allocation, or the free of an earlier one.

    Attributes:
        bytes: Size. It is negative for a free.
        block: Number of the allocation. Its free has the same number.
        part: What the memory is for, one of PARTS.
        phase: One of PHASES.
        device: ``gpu`` or ``host``.
    """

    bytes: int
    block: int
    part: str
    phase: str
    device: str


@dataclass(frozen=True)
class StepTrace:
    """The events of a training step in their order, after those of the setup."""

    events: tuple[Event, ...]
    seconds: float
    notes: tuple[str, ...]
