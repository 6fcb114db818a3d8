"""The items of a step with another number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distexp.runs.step_model import BACKWARD, FORWARD, OPTIMIZER, Collective, Item, Segment
from distexp.strategies.step_collectives import GATHERS, REDUCTIONS, StepCommunication, insert, work


def with_micro_batches(
    items: Sequence[Item], profiled: int, wanted: int, communication: StepCommunication
) -> tuple[Item, ...]:
    """Return the items of a step with another number of micro-batches of the same size.

    The first and the last micro-batch are as in the profiled step, and those between them are all alike. Gradients are
    reduced in the last one, unless the strategy reduces them in each.

    Args:
        items: Items of the profiled step, with at most three micro-batches.
        profiled: Micro-batches of the profiled step.
        wanted: Micro-batches of the result.
        communication: What the strategy states about its collectives.
    """
    blocks = _blocks(items)
    if not blocks or (wanted == profiled and len(blocks) == profiled):
        return tuple(items)
    found: list[Item] = []
    for position in range(wanted):
        last = position == wanted - 1
        block = _source(blocks, position, wanted)
        if last and wanted == 1 and communication.gathers_once:
            block = _with_gathers_of(block, blocks[0])
        kept = [item for item in block if _is_used(item, position, last=last, communication=communication)]
        found += [replace(item, micro_batch=position) for item in kept]
    return (*found, *(replace(item, micro_batch=wanted - 1) for item in items if item.phase == OPTIMIZER))


def _blocks(items: Sequence[Item]) -> list[list[Item]]:
    """Return the items of forward and backward pass of each micro-batch that the profile has."""
    blocks: dict[int, list[Item]] = {}
    for item in items:
        if item.phase != OPTIMIZER:
            blocks.setdefault(item.micro_batch, []).append(item)
    return [blocks[number] for number in sorted(blocks)]


def _source(blocks: Sequence[list[Item]], position: int, wanted: int) -> list[Item]:
    """Return the profiled micro-batch for a position."""
    if position == wanted - 1:
        return blocks[-1]
    return blocks[0] if position == 0 else blocks[1] if len(blocks) > 2 else blocks[0]


def _is_used(item: Item, position: int, *, last: bool, communication: StepCommunication) -> bool:
    """Return whether an item happens in a micro-batch; a collective of another one may not."""
    if isinstance(item, Segment):
        return True
    if item.kind in REDUCTIONS:
        if item.phase == FORWARD:  # as the number of targets, which is summed once per step
            return position == 0
        return last or communication.reduces_each_micro_batch
    return position == 0 or not (communication.gathers_once and item.kind in GATHERS)


def _with_gathers_of(block: Sequence[Item], first: Sequence[Item]) -> list[Item]:
    """Return a micro-batch with the collectives of another that gather weights, at the same shares of its work."""
    if any(isinstance(item, Collective) and item.kind in GATHERS for item in block):
        return list(block)
    found = list(block)
    for phase in (FORWARD, BACKWARD):
        done = 0.0
        total = sum(work(item) for item in first if item.phase == phase) or 1.0
        for item in first:
            if item.phase == phase and isinstance(item, Collective) and item.kind in GATHERS:
                insert(found, item, done / total)
            done += work(item) if item.phase == phase else 0.0
    return found
