"""What a trace does not show of the collectives of a run: who waits for them and, with gloo, their sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from distexp.forecast.communication import ddp_buckets, is_gradient_reduction
from distexp.forecast.insertion import SCALAR_BYTES
from distexp.forecast.micro_batches import GATHERS, REDUCTIONS
from distexp.forecast.settings import CommunicationSettings
from distexp.runs.step_model import BACKWARD, NEXT, OPTIMIZER, Collective, Item, StepModel


def assign_waits(items: Sequence[Item], settings: CommunicationSettings, *, on_gpu: bool) -> tuple[Item, ...]:
    """Return the items with the process group of each collective and what waits for it, as the strategy does it.

    - DDP: the optimizer waits for the reductions.
    - FSDP: the optimizer waits for the reductions. A gather needs no result. In the backward pass it is launched
      ``fsdp.backward_prefetch`` units ahead. With gloo the CPU waits for each collective.
    - DeepSpeed: the next kernel waits for each collective. With ``overlap_comm``, which stage 3 has by default, the
      optimizer waits for the reductions, and the gathers of stage 3 need no result.
    """
    return tuple(_assign(item, settings, on_gpu=on_gpu) if isinstance(item, Collective) else item for item in items)


def _assign(item: Collective, settings: CommunicationSettings, *, on_gpu: bool) -> Collective:
    if settings.strategy == "ddp":
        return replace(item, awaited=OPTIMIZER if is_gradient_reduction(item) else NEXT)
    if settings.strategy == "deepspeed":
        overlaps = settings.overlap and on_gpu
        is_gather = item.kind in GATHERS and item.phase != OPTIMIZER  # not that of the updated weights
        gathers_ahead = overlaps and settings.zero_stage == 3 and is_gather
        awaited = OPTIMIZER if overlaps and is_gradient_reduction(item) else NEXT
        return replace(item, awaited=awaited, after_compute=not gathers_ahead)
    if settings.strategy != "fsdp":
        return item
    if is_gradient_reduction(item):
        axis = "replicate" if item.kind == "all_reduce" else "shard"
        return replace(item, axis=axis, awaited=OPTIMIZER if on_gpu else NEXT)
    if item.kind in GATHERS:
        ahead = settings.backward_prefetch if on_gpu and item.phase == BACKWARD else 0
        return replace(item, axis="shard", ahead=ahead, after_compute=False)
    return item


def fill_sizes(items: Sequence[Item], model: StepModel, settings: CommunicationSettings) -> tuple[Item, ...]:
    """Return the items of several workers with sizes that the trace does not have, as with gloo.

    The reductions of a backward pass send all gradients, and gathers send all weights. If the buckets of DDP are
    known, they are the sizes. Otherwise all parts are equal. Other all-reduces sum a number.
    """
    counts = Counter(_pass(item) for item in items if isinstance(item, Collective) and item.bytes is None)
    elements = sum(sum(unit.elements) for unit in model.units)
    buckets = ddp_buckets(model, settings)
    seen: Counter[tuple[str, str, int]] = Counter()
    found: list[Item] = []
    for item in items:
        if not isinstance(item, Collective) or item.bytes is not None:
            found.append(item)
            continue
        key = _pass(item)
        size = SCALAR_BYTES
        if is_gradient_reduction(item):
            size = elements * settings.gradient_bytes // counts[key]
            if settings.strategy == "ddp" and len(buckets) == counts[key]:
                size = buckets[seen[key]]
        elif item.kind in GATHERS:
            size = elements * settings.weight_bytes // counts[key]
        seen[key] += 1
        found.append(replace(item, bytes=size))
    return tuple(found)


def _pass(item: Collective) -> tuple[str, str, int]:
    """Return what the collectives that share a size have in common."""
    kind = "reduction" if item.kind in REDUCTIONS else "gather" if item.kind in GATHERS else item.kind
    return kind, item.phase, item.micro_batch
