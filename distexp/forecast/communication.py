"""The collectives that a strategy runs in a step, for a profiled run with one worker.

See docs/decisions/forecast-model.md for the sources. A run with several workers shows its collectives in its trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from distexp.config.sharding import Sharding
from distexp.forecast.micro_batches import REDUCTIONS, insert
from distexp.forecast.settings import DDP_FIRST_BUCKET, CommunicationSettings
from distexp.forecast.target import Target
from distexp.runs.step_model import BACKWARD, FORWARD, NEXT, OPTIMIZER, Collective, Item, Parameters, Segment, StepModel

SMALLEST_BUCKET, LARGEST_BUCKET = 5_000_000, 500_000_000
"""Limits of the buckets that distexp chooses for DeepSpeed, in elements."""

LAUNCH_S = 100e-6
"""Time of the CPU to start a collective of a sharded unit: flat buffers, copies into them, events and the call. An
assumption, for a run in which one worker skips them."""

SCALAR_BYTES = 4
"""Size of a sum over the workers, as that of the gradient norm."""


def plan_communication(
    items: Sequence[Item], model: StepModel, settings: CommunicationSettings, *, micro_batches: int
) -> tuple[Item, ...]:
    """Return the items of a step of one worker with the collectives of several workers.

    Args:
        items: Items of the step, as measured with one worker.
        model: The profiled step, with the parameters of the model.
        settings: Settings of the communication.
        micro_batches: Micro-batches of the step.
    """
    if model.on_gpu:
        items = [_with_launch(item) for item in items]
    planners = {"ddp": _plan_ddp, "fsdp": _plan_fsdp, "deepspeed": _plan_deepspeed}
    planner = planners.get(settings.strategy)
    return tuple(items) if planner is None else tuple(planner(list(items), model, settings, micro_batches))


def _with_launch(item: Item) -> Item:
    """Return an item with the time of the CPU for a collective that one worker skips."""
    skipped = isinstance(item, Collective) and item.axis == "shard" and item.transfer_s is None
    return replace(item, host_s=item.host_s + LAUNCH_S) if skipped else item


def ddp_buckets(model: StepModel, settings: CommunicationSettings) -> list[int]:
    """Return the bytes of the buckets of DDP, in the order in which they are reduced.

    They are those of the profiled run, if it used DDP. Otherwise gradients are ready in the reverse order of the
    parameters. The first bucket is closed at 1 MiB, later ones at ``bucket_cap_mb``. A bucket may be larger, because
    parameters are not divided.
    """
    if model.bucket_elements:
        return [elements * settings.gradient_bytes for elements in model.bucket_elements]
    sizes = [elements * settings.gradient_bytes for unit in model.units for elements in unit.elements]
    buckets, open_bucket, limit = [], 0, min(DDP_FIRST_BUCKET, settings.bucket_bytes)
    for size in reversed(sizes):
        open_bucket += size
        if open_bucket >= limit:
            buckets.append(open_bucket)
            open_bucket, limit = 0, settings.bucket_bytes
    return [*buckets, open_bucket] if open_bucket else buckets


def deepspeed_buckets(units: Sequence[Parameters], settings: CommunicationSettings) -> list[int]:
    """Return the bytes of the buckets of DeepSpeed: a bucket is reduced before it would exceed its size."""
    elements = [each for unit in reversed(units) for each in reversed(unit.elements)]
    chosen = min(max(sum(elements) // 16, SMALLEST_BUCKET), LARGEST_BUCKET)
    limit = settings.bucket_elements or (LARGEST_BUCKET if settings.zero_stage == 0 else chosen)
    buckets, open_bucket = [], 0
    for each in elements:
        if open_bucket and open_bucket + each > limit:
            buckets.append(open_bucket * settings.gradient_bytes)
            open_bucket = 0
        open_bucket += each
    return [*buckets, open_bucket * settings.gradient_bytes] if open_bucket else buckets


def _plan_ddp(items: list[Item], model: StepModel, settings: CommunicationSettings, micro_batches: int) -> list[Item]:
    """Return the items with an all-reduce per bucket in the last backward pass, which the optimizer awaits."""
    buckets, last = ddp_buckets(model, settings), micro_batches - 1
    seen = [i for i, item in enumerate(items) if is_gradient_reduction(item) and item.micro_batch == last]
    if seen:
        known = [items[i] for i in seen]
        sizes = _sizes_of([one.bytes for one in known if isinstance(one, Collective)], buckets)
        for position, size in zip(seen, sizes, strict=True):
            items[position] = _reduction(items[position], size)
        return items
    return _insert_buckets(items, buckets, last, awaited=OPTIMIZER)


def _reduction(item: Item, size: int) -> Item:
    assert isinstance(item, Collective)
    return replace(item, bytes=size, awaited=OPTIMIZER, transfer_s=None)


def _sizes_of(known: Sequence[int | None], planned: Sequence[int]) -> list[int]:
    """Return the sizes of the reductions of a trace: known ones, else planned ones, else equal shares."""
    sizes = [size for size in known if size is not None]
    if len(sizes) == len(known):
        return sizes
    if len(known) == len(planned):
        return list(planned)
    return [sum(planned) // len(known)] * len(known)


def _insert_buckets(items: list[Item], buckets: Sequence[int], micro_batch: int, *, awaited: str) -> list[Item]:
    """Insert reductions into a backward pass: each bucket is ready after its share of the parameters."""
    done, total = 0, sum(buckets) or 1
    for size in buckets:
        done += size
        new = Collective("all_reduce", size, 1, "all", BACKWARD, micro_batch, awaited=awaited)
        insert(items, new, done / total)
    return items


def _plan_fsdp(items: list[Item], model: StepModel, settings: CommunicationSettings, micro_batches: int) -> list[Item]:
    """Return the items with the collectives of FSDP, at the places of its hooks if the trace has them."""
    if settings.sharding == Sharding.NO_SHARD:
        reduced = _insert_buckets(items, _unit_sizes(model.units, settings), micro_batches - 1, awaited=OPTIMIZER)
        return _add_norm(reduced)
    if any(isinstance(item, Collective) and item.axis == "shard" and item.bytes for item in items):
        return _add_norm(items)
    return _add_norm(_plan_units(items, model.units, settings, micro_batches))


def _unit_sizes(units: Sequence[Parameters], settings: CommunicationSettings) -> list[int]:
    return [sum(unit.elements) * settings.gradient_bytes for unit in reversed(units)]


def _plan_units(
    items: list[Item], units: Sequence[Parameters], settings: CommunicationSettings, micro_batches: int
) -> list[Item]:
    """Insert the all-gathers and reduce-scatters of sharded units; the work of a unit is as its parameters."""
    sizes = [sum(unit.elements) for unit in units]
    total = sum(sizes) or 1
    again = settings.strategy == "deepspeed" or Sharding(settings.sharding).reshards_after_forward
    waits_for_results = settings.strategy == "deepspeed" and not settings.overlap
    for micro_batch in range(micro_batches):
        if settings.gathers_once and micro_batch > 0:
            again = False
        elif not settings.gathers_once or micro_batch == 0:
            for position, size in enumerate(sizes):
                new = _gather(size, FORWARD, micro_batch, settings, after=waits_for_results)
                insert(items, new, sum(sizes[:position]) / total)
        done = 0
        for size in reversed(sizes):
            if again:
                new = _gather(size, BACKWARD, micro_batch, settings, after=waits_for_results)
                insert(items, new, done / total)
            done += size
            if settings.reduces_each_micro_batch or micro_batch == micro_batches - 1:
                insert(items, _scatter(size, micro_batch, settings), done / total)
    return items


def _gather(size: int, phase: str, micro_batch: int, settings: CommunicationSettings, *, after: bool) -> Collective:
    ahead = settings.backward_prefetch if phase == BACKWARD and settings.strategy == "fsdp" else 0
    size *= settings.weight_bytes
    return Collective("all_gather", size, 1, "shard", phase, micro_batch, LAUNCH_S, ahead=ahead, after_compute=after)


def _scatter(size: int, micro_batch: int, settings: CommunicationSettings) -> Collective:
    awaited = OPTIMIZER if settings.strategy == "fsdp" or settings.overlap else NEXT
    size *= settings.gradient_bytes
    return Collective("reduce_scatter", size, 1, "shard", BACKWARD, micro_batch, LAUNCH_S, awaited=awaited)


def _add_norm(items: list[Item]) -> list[Item]:
    """Add the sum of the gradient norm over the workers, before the optimizer, unless the trace has one."""
    if any(isinstance(item, Collective) and item.phase == OPTIMIZER for item in items):
        return items
    first = next((i for i, item in enumerate(items) if item.phase == OPTIMIZER), len(items))
    micro_batch = items[-1].micro_batch if items else 0
    return [*items[:first], Collective("all_reduce", SCALAR_BYTES, 1, "all", OPTIMIZER, micro_batch), *items[first:]]


def _plan_deepspeed(
    items: list[Item], model: StepModel, settings: CommunicationSettings, micro_batches: int
) -> list[Item]:
    """Return the items with the collectives of a ZeRO stage."""
    items, units = [_without_transfer(item) for item in items], model.units
    if settings.zero_stage == 3:
        return _add_norm(_plan_units(items, units, settings, micro_batches))
    buckets = deepspeed_buckets(units, settings)
    awaited = OPTIMIZER if settings.overlap else NEXT
    for micro_batch in range(micro_batches):
        last = micro_batch == micro_batches - 1
        if settings.zero_stage == 2 or (settings.zero_stage == 1 and settings.overlap and last):
            _insert_buckets(items, buckets, micro_batch, awaited=awaited)
        elif last:
            for size in buckets:
                insert(items, Collective("all_reduce", size, 1, "all", BACKWARD, micro_batch, awaited=awaited), 1.0)
    return _add_update_gather(_add_norm(items), units, settings) if settings.zero_stage else items


def _add_update_gather(items: list[Item], units: Sequence[Parameters], settings: CommunicationSettings) -> list[Item]:
    """Add the all-gather of the updated weights after the optimizer of ZeRO-1 and ZeRO-2."""
    size = sum(sum(unit.elements) for unit in units) * settings.weight_bytes
    return [*items, Collective("all_gather", size, 1, "all", OPTIMIZER, items[-1].micro_batch if items else 0)]


def _without_transfer(item: Item) -> Item:
    """Return the work of the CPU for a collective of one worker, which the plan replaces."""
    if isinstance(item, Segment):
        return item
    return Segment(item.phase, item.micro_batch, item.host_s, tail_s=item.host_s, tail_half_s=item.host_s / 2)


def is_gradient_reduction(item: Item) -> bool:
    """Return whether an item reduces gradients."""
    return isinstance(item, Collective) and item.phase == BACKWARD and item.kind in REDUCTIONS


def add_replication(items: Sequence[Item], settings: CommunicationSettings, target: Target) -> tuple[Item, ...]:
    """Return the items with the all-reduces of ``hybrid_shard`` between replicas, if the profiled run had none."""
    replicas, shard = settings.mesh(target)
    is_hybrid = settings.strategy == "fsdp" and settings.sharding == Sharding.HYBRID_SHARD
    if not is_hybrid or replicas == 1 or any(isinstance(i, Collective) and i.axis == "replicate" for i in items):
        return tuple(items)
    return tuple(each for item in items for each in _replicated(item, shard))


def _replicated(item: Item, shard: int) -> Iterator[Item]:
    yield item
    if isinstance(item, Collective) and item.kind == "reduce_scatter" and item.axis == "shard" and item.bytes:
        size = item.bytes // shard
        yield replace(item, kind="all_reduce", bytes=size, axis="replicate", ranks=1, host_s=0.0, transfer_s=None)
