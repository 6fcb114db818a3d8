"""The events of a recorded training: what is allocated and freed, and what for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distexp.plan.recorder import BlockChange, TracedBlock
from distexp.plan.step_trace import Event, StepWork

WORKSPACE_BLOCKS = {"forward": -1, "backward": -2}
"""Blocks of the workspaces of cuBLAS, by the phase that allocates them. Each phase has its own thread."""


@dataclass(frozen=True)
class Recorded:
    """What a recorder saw.

    Attributes:
        history: construction of the model, and the first step.
        changes: what was in memory before the second step, and this step.
        evaluation: a batch of the evaluation after it; empty if it was not recorded.
        vocabulary: size of the vocabulary; None for image models.
        workspace: bytes of a workspace of cuBLAS.
        first_products: position in ``history`` after the first matrix product of a phase.
        work: what the step computes; None if it was not counted.
        parameters: number of parameters of the whole model.
    """

    history: tuple[BlockChange, ...]
    changes: tuple[BlockChange, ...]
    evaluation: tuple[BlockChange, ...]
    vocabulary: int | None
    workspace: int
    first_products: Mapping[str, int] = field(default_factory=dict)
    work: StepWork | None = None
    parameters: int = 0


def step_events(recorded: Recorded) -> tuple[Event, ...]:
    """Return what is in memory before the step, and the step."""
    workspaces = (_workspace(number, "setup", recorded) for number in WORKSPACE_BLOCKS.values())
    return (*workspaces, *(_event(change, recorded) for change in recorded.changes))


def history_events(recorded: Recorded) -> tuple[Event, ...]:
    """Return what happened before the step."""
    events: list[Event] = []
    missing = dict(WORKSPACE_BLOCKS)
    for position, change in enumerate(recorded.history):
        if change.phase in missing and position >= recorded.first_products.get(change.phase, 0):
            number = missing.pop(change.phase)
            events.append(_workspace(number, change.phase, recorded))
        events.append(_event(change, recorded))
    return tuple(events)


def evaluation_events(recorded: Recorded) -> tuple[Event, ...]:
    """Return the evaluation after the step."""
    return tuple(_event(change, recorded) for change in recorded.evaluation)


def _workspace(number: int, phase: str, recorded: Recorded) -> Event:
    return Event(recorded.workspace, number, "temporaries", phase, "gpu")


def _event(change: BlockChange, recorded: Recorded) -> Event:
    block = change.block
    return Event(
        -block.size if change.is_free else block.size,
        block.number,
        _part(block, recorded.vocabulary),
        change.phase,
        block.device,
        block.stream,
    )


def _part(block: TracedBlock, vocabulary: int | None) -> str:
    if block.part is not None:
        return block.part
    if vocabulary is not None and block.last_axis == vocabulary:
        return "logits"
    return "activations" if block.kept else "temporaries"
