"""What a trace does not show of the collectives of a run: who waits for them and, with gloo, their sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from distexp.runs.step_model import Collective, Item, StepModel
from distexp.strategies.step_collectives import (
    GATHERS,
    REDUCTIONS,
    SCALAR_BYTES,
    StepCommunication,
    element_count,
    is_gradient_reduction,
)


def assign_waits(items: Sequence[Item], communication: StepCommunication, *, on_gpu: bool) -> tuple[Item, ...]:
    """Return the items with the process group of each collective and what waits for it, as the strategy does it."""
    return tuple(
        communication.with_waits(item, on_gpu=on_gpu) if isinstance(item, Collective) else item for item in items
    )


def fill_sizes(items: Sequence[Item], model: StepModel, communication: StepCommunication) -> tuple[Item, ...]:
    """Return the items of several workers with sizes that the trace does not have, as with gloo.

    The reductions of a backward pass send all gradients, in parts that the strategy states. Gathers send all weights,
    in equal parts. Other all-reduces sum a number.
    """
    counts = Counter(_pass(item) for item in items if isinstance(item, Collective) and item.bytes is None)
    seen: Counter[tuple[str, str, int]] = Counter()
    found: list[Item] = []
    for item in items:
        if not isinstance(item, Collective) or item.bytes is not None:
            found.append(item)
            continue
        key = _pass(item)
        size = SCALAR_BYTES
        if is_gradient_reduction(item):
            size = communication.reduction_sizes(model, counts[key])[seen[key]]
        elif item.kind in GATHERS:
            size = element_count(model) * communication.weight_bytes // counts[key]
        seen[key] += 1
        found.append(replace(item, bytes=size))
    return tuple(found)


def _pass(item: Collective) -> tuple[str, str, int]:
    """Return what the collectives that share a size have in common."""
    kind = "reduction" if item.kind in REDUCTIONS else "gather" if item.kind in GATHERS else item.kind
    return kind, item.phase, item.micro_batch
