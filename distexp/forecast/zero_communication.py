"""The collectives of a step with DeepSpeed, for a profiled run with one worker.

Places and sizes follow DeepSpeed 0.19.8, ``deepspeed/runtime/zero``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from distexp.forecast.insertion import LAUNCH_S, SCALAR_BYTES, add_norm, insert, insert_buckets, segments_before
from distexp.forecast.settings import CommunicationSettings
from distexp.forecast.zero3_gathers import gathers_of_micro_batch, persistent_parameters
from distexp.runs.step_model import BACKWARD, FORWARD, NEXT, OPTIMIZER, Collective, Item, Parameters, Segment, StepModel


def plan_zero(items: list[Item], model: StepModel, settings: CommunicationSettings, micro_batches: int) -> list[Item]:
    """Return the items with the collectives of a ZeRO stage.

    Args:
        items: Items of the step, as measured with one worker.
        model: The profiled step, with the parameters of the model.
        settings: Settings of the communication.
        micro_batches: Micro-batches of the step.
    """
    items, last = [_without_transfer(item) for item in items], micro_batches - 1
    if settings.zero_stage == 0:
        return _insert_reductions(items, model.units, settings, micro_batches)
    items = add_norm(items)
    if settings.zero_stage == 3:
        for micro_batch in range(micro_batches):
            items = _insert_gathers(items, model, settings, micro_batch)
            items = _insert_scatters(items, model.units, settings, micro_batch)
        return [*items, *_gathers_of_persistent(model.units, settings, last)]
    items = _insert_reductions(items, model.units, settings, micro_batches)
    return [*items, *_gathers_of_update(model, settings, last)]


def _without_transfer(item: Item) -> Item:
    """Return what replaces a collective of one worker, which sends nothing.

    In the optimizer it is the sum of a scalar, else a segment with the CPU time of the call.
    """
    if isinstance(item, Segment):
        return item
    # The update sums the norm of each group, and checks for infinite gradients.
    is_sum_of_update = item.phase == OPTIMIZER and item.kind == "all_reduce"
    if is_sum_of_update:
        return Collective(item.kind, SCALAR_BYTES, 1, "all", OPTIMIZER, item.micro_batch, item.host_s)
    return Segment(item.phase, item.micro_batch, item.host_s, tail_s=item.host_s, tail_half_s=item.host_s / 2)


def zero_buckets(units: Sequence[Parameters], settings: CommunicationSettings) -> list[int]:
    """Return the elements of the buckets of DeepSpeed: a bucket is reduced before it would exceed its size."""
    buckets, open_bucket = [], 0
    for size in (elements for unit in reversed(units) for elements in reversed(unit.elements)):
        if open_bucket and open_bucket + size > settings.zero.reduce_bucket_size:
            buckets.append(open_bucket)
            open_bucket = 0
        open_bucket += size
    return [*buckets, open_bucket] if open_bucket else buckets


def _insert_reductions(
    items: list[Item], units: Sequence[Parameters], settings: CommunicationSettings, micro_batches: int
) -> list[Item]:
    """Insert the all-reduces of the stages 0 to 2."""
    sizes = [elements * settings.gradient_bytes for elements in zero_buckets(units, settings)]
    awaited = OPTIMIZER if settings.overlap else NEXT
    for micro_batch in range(micro_batches):
        last = micro_batch == micro_batches - 1
        if settings.zero_stage == 2 or (settings.zero_stage == 1 and settings.overlap and last):
            items = insert_buckets(items, sizes, micro_batch, awaited=awaited)
        elif last:
            for size in sizes:
                insert(items, Collective("all_reduce", size, 1, "all", BACKWARD, micro_batch, awaited=awaited), 1.0)
    return items


def _gathers_of_update(model: StepModel, settings: CommunicationSettings, micro_batch: int) -> Iterator[Collective]:
    """Yield the all-gathers of the updated weights at the stages 1 and 2: one for each group of the optimizer."""
    for group in model.group_elements:
        yield Collective("all_gather", sum(group) * settings.weight_bytes, 1, "all", OPTIMIZER, micro_batch)


def _insert_gathers(
    items: list[Item], model: StepModel, settings: CommunicationSettings, micro_batch: int
) -> list[Item]:
    """Insert the all-gathers of stage 3 into a micro-batch; the work of a module is as its parameters."""
    elements = [count for unit in model.units for count in unit.elements]
    found = gathers_of_micro_batch(model.modules, elements, settings.zero)
    places = _places_of_modules(model.modules, elements)
    segments = _segments_before_modules(items, places, micro_batch)
    for gather in found:
        phase, share = places[gather.position]
        size = gather.elements * settings.weight_bytes
        new = Collective(
            "all_gather",
            size,
            1,
            "shard",
            phase,
            micro_batch,
            LAUNCH_S,
            segments_ahead=segments[gather.used_at] - segments[gather.position],
            after_compute=not settings.overlap,
        )
        insert(items, new, share)
    return items


Place = tuple[str, float]
"""Phase, and the share of its work before it."""


def _places_of_modules(modules: Sequence[Sequence[int]], elements: Sequence[int]) -> list[Place]:
    """Return the places of the modules in the forward pass and then in the backward pass."""
    sizes = [sum(elements[param] for param in params) for params in modules]
    return [
        (phase, done / (sum(sizes) or 1))
        for phase, ordered in ((FORWARD, sizes), (BACKWARD, sizes[::-1]))
        for done in [0, *accumulate(ordered)][:-1]
    ]


def _segments_before_modules(items: Sequence[Item], places: Sequence[Place], micro_batch: int) -> list[int]:
    """Return how many segments of a micro-batch are before each module, and before its end."""
    forward, backward = (segments_before(items, phase, micro_batch, 1.0) for phase in (FORWARD, BACKWARD))
    found = [segments_before(items, phase, micro_batch, share) for phase, share in places]
    earlier = [forward if phase == BACKWARD else 0 for phase, _ in places]
    return [*(a + b for a, b in zip(earlier, found, strict=True)), forward + backward]


def _insert_scatters(
    items: list[Item], units: Sequence[Parameters], settings: CommunicationSettings, micro_batch: int
) -> list[Item]:
    """Insert the reduce-scatters of stage 3 into a backward pass: each bucket after its share of the parameters."""
    buckets, done = zero_buckets(units, settings), 0
    awaited = OPTIMIZER if settings.overlap else NEXT
    for elements in buckets:
        done += elements
        size = elements * settings.gradient_bytes
        new = Collective("reduce_scatter", size, 1, "shard", BACKWARD, micro_batch, LAUNCH_S, awaited=awaited)
        insert(items, new, done / sum(buckets))
    return items


def _gathers_of_persistent(
    units: Sequence[Parameters], settings: CommunicationSettings, micro_batch: int
) -> Iterator[Collective]:
    """Yield the all-gathers of stage 3 after the update: one for each parameter that no pass gathers."""
    elements = [count for unit in units for count in unit.elements]
    for param in persistent_parameters(elements, settings.zero):
        size = elements[param] * settings.weight_bytes
        yield Collective("all_gather", size, 1, "all", OPTIMIZER, micro_batch, LAUNCH_S)
