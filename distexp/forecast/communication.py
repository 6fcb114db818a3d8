"""The collectives that a strategy runs in a step, for a profiled run with one worker.

See docs/decisions/forecast-model.md for the sources. A run with several workers shows its collectives in its trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from distexp.config.sharding import Sharding
from distexp.forecast.insertion import LAUNCH_S, add_norm, insert, insert_buckets
from distexp.forecast.micro_batches import REDUCTIONS
from distexp.forecast.settings import CommunicationSettings
from distexp.forecast.target import Target
from distexp.forecast.zero_communication import plan_zero
from distexp.runs.step_model import BACKWARD, FORWARD, OPTIMIZER, Collective, Item, Parameters, StepModel


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
    if settings.strategy == "single":
        return tuple(items)
    planner = {"ddp": _plan_ddp, "fsdp": _plan_fsdp, "deepspeed": plan_zero}[settings.strategy]
    return tuple(planner(list(items), model, settings, micro_batches))


def _with_launch(item: Item) -> Item:
    """Return an item with the time of the CPU for a collective that one worker skips."""
    skipped = isinstance(item, Collective) and item.axis == "shard" and item.transfer_s is None
    return replace(item, host_s=item.host_s + LAUNCH_S) if skipped else item


def ddp_buckets(model: StepModel, settings: CommunicationSettings) -> list[int]:
    """Return the bytes of the buckets of DDP, in the order in which they are reduced.

    They are those of the profiled run, if it used DDP. Otherwise gradients are ready in the reverse order of the
    parameters. A bucket may be larger than its limit, because parameters are not divided.
    """
    if model.bucket_elements:
        return [elements * settings.gradient_bytes for elements in model.bucket_elements]
    sizes = [elements * settings.gradient_bytes for unit in model.units for elements in unit.elements]
    buckets, open_bucket, limit = [], 0, settings.first_bucket_bytes
    for size in reversed(sizes):
        open_bucket += size
        if open_bucket >= limit:
            buckets.append(open_bucket)
            open_bucket, limit = 0, settings.bucket_bytes
    return [*buckets, open_bucket] if open_bucket else buckets


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
    return insert_buckets(items, buckets, last, awaited=OPTIMIZER)


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


def _plan_fsdp(items: list[Item], model: StepModel, settings: CommunicationSettings, micro_batches: int) -> list[Item]:
    """Return the items with the collectives of FSDP, at the places of its hooks if the trace has them."""
    if settings.sharding == Sharding.NO_SHARD:
        reduced = insert_buckets(items, _unit_sizes(model.units, settings), micro_batches - 1, awaited=OPTIMIZER)
        return add_norm(reduced)
    if any(isinstance(item, Collective) and item.axis == "shard" and item.bytes for item in items):
        return add_norm(items)
    return add_norm(_plan_units(items, model.units, settings, micro_batches))


def _unit_sizes(units: Sequence[Parameters], settings: CommunicationSettings) -> list[int]:
    return [sum(unit.elements) * settings.gradient_bytes for unit in reversed(units)]


def _plan_units(
    items: list[Item], units: Sequence[Parameters], settings: CommunicationSettings, micro_batches: int
) -> list[Item]:
    """Insert the all-gathers and reduce-scatters of sharded units; the work of a unit is as its parameters."""
    sizes = [sum(unit.elements) for unit in units]
    total = sum(sizes) or 1
    for micro_batch in range(micro_batches):
        gathers = micro_batch == 0 or not settings.gathers_once
        gathers_again = gathers and Sharding(settings.sharding).reshards_after_forward
        if gathers:
            for position, size in enumerate(sizes):
                insert(items, _gather(size, FORWARD, micro_batch, settings), sum(sizes[:position]) / total)
        done = 0
        for size in reversed(sizes):
            if gathers_again:
                insert(items, _gather(size, BACKWARD, micro_batch, settings), done / total)
            done += size
            if micro_batch == micro_batches - 1:
                insert(items, _scatter(size, micro_batch, settings), done / total)
    return items


def _gather(size: int, phase: str, micro_batch: int, settings: CommunicationSettings) -> Collective:
    ahead = settings.backward_prefetch if phase == BACKWARD else 0
    size *= settings.weight_bytes
    return Collective("all_gather", size, 1, "shard", phase, micro_batch, LAUNCH_S, ahead=ahead, after_compute=False)


def _scatter(size: int, micro_batch: int, settings: CommunicationSettings) -> Collective:
    size *= settings.gradient_bytes
    return Collective("reduce_scatter", size, 1, "shard", BACKWARD, micro_batch, LAUNCH_S, awaited=OPTIMIZER)


def is_gradient_reduction(item: Item) -> bool:
    """Return whether an item reduces gradients."""
    return isinstance(item, Collective) and item.phase == BACKWARD and item.kind in REDUCTIONS


def add_replication(items: Sequence[Item], settings: CommunicationSettings, target: Target) -> tuple[Item, ...]:
    """Return the items with the all-reduces of ``hybrid_shard`` between replicas, if the profiled run had none."""
    replicas, shard = settings.mesh(target)
    is_hybrid = settings.strategy == "fsdp" and settings.sharding == Sharding.HYBRID_SHARD
    if not is_hybrid or replicas == 1 or any(isinstance(i, Collective) and i.axis == "replicate" for i in items):
        return tuple(items)
    return tuple(part for item in items for part in _replicated(item, shard))


def _replicated(item: Item, shard: int) -> Iterator[Item]:
    yield item
    if isinstance(item, Collective) and item.kind == "reduce_scatter" and item.axis == "shard" and item.bytes:
        size = item.bytes // shard
        yield replace(item, kind="all_reduce", bytes=size, axis="replicate", ranks=1, host_s=0.0, transfer_s=None)
