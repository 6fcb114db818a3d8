"""Insertion of collectives into the passes of a step."""

from __future__ import annotations

from collections.abc import Sequence

from distexp.runs.step_model import BACKWARD, OPTIMIZER, Collective, Item, Segment

LAUNCH_S = 100e-6
"""Time of the CPU to start a collective of a sharded unit: flat buffers, copies into them, events and the call. An
assumption, for a run in which one worker skips them."""

SCALAR_BYTES = 4
"""Size of a sum over the workers, as that of the gradient norm."""


def work(item: Item) -> float:
    """Return the time that measures how far a pass is: that of the device, or of the CPU if there is none."""
    return (item.device_s or item.host_s) if isinstance(item, Segment) else 0.0


def insert(items: list[Item], new: Collective, share: float) -> None:
    """Insert a collective into the pass of its micro-batch, after this share of the work of the pass.

    Later calls with the same share insert after earlier ones.
    """
    inside = [i for i, item in enumerate(items) if (item.phase, item.micro_batch) == (new.phase, new.micro_batch)]
    if not inside:
        items.append(new)
        return
    total, done, place = sum(work(items[i]) for i in inside), 0.0, inside[0]
    for i in inside:
        reached = done >= share * total - 1e-9 * total
        if reached and isinstance(items[i], Segment):
            break
        done += work(items[i])
        place = i + 1
    items.insert(place, new)


def segments_before(items: Sequence[Item], phase: str, micro_batch: int, share: float) -> int:
    """Return how many segments of a pass are before the place at which ``insert`` inserts for a share of its work."""
    inside = [
        item for item in items if isinstance(item, Segment) and (item.phase, item.micro_batch) == (phase, micro_batch)
    ]
    total, done = sum(map(work, inside)), 0.0
    for number, segment in enumerate(inside):
        if done >= share * total - 1e-9 * total:
            return number
        done += work(segment)
    return len(inside)


def insert_buckets(items: list[Item], buckets: Sequence[int], micro_batch: int, *, awaited: str) -> list[Item]:
    """Insert all-reduces into a backward pass: each bucket is ready after its share of the parameters.

    Args:
        items: Items of the step; changed in place.
        buckets: Bytes of each bucket.
        micro_batch: Number of the micro-batch.
        awaited: What waits for the reductions.
    """
    done, total = 0, sum(buckets) or 1
    for size in buckets:
        done += size
        new = Collective("all_reduce", size, 1, "all", BACKWARD, micro_batch, awaited=awaited)
        insert(items, new, done / total)
    return items


def add_norm(items: list[Item]) -> list[Item]:
    """Add the sum of the gradient norm over the workers, before the optimizer, unless the trace has one."""
    if any(isinstance(item, Collective) and item.phase == OPTIMIZER for item in items):
        return items
    first = next((i for i, item in enumerate(items) if item.phase == OPTIMIZER), len(items))
    micro_batch = items[-1].micro_batch if items else 0
    return [*items[:first], Collective("all_reduce", SCALAR_BYTES, 1, "all", OPTIMIZER, micro_batch), *items[first:]]
