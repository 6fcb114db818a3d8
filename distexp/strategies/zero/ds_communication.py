"""The collectives of a step with DeepSpeed: places and sizes follow DeepSpeed 0.19.8, ``deepspeed/runtime/zero``.

At stage 3, DeepSpeed gathers the parameters of a module before its forward and its backward pass, and more of them
ahead, in the order of the first micro-batch. ``gathers_of_micro_batch`` follows ``partitioned_param_coordinator.py``,
as ``distexp.plan.trace.zero3_fetcher`` does with real modules.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

from distexp.config import ConfigError
from distexp.runs import step_files
from distexp.runs.run_dir import DS_CONFIG
from distexp.runs.step_files import BACKWARD, FORWARD, NEXT, OPTIMIZER, Collective, Item, Parameters, Segment, StepModel
from distexp.strategies import communication
from distexp.strategies.communication import LAUNCH_S, StepCommunication, insert, insert_buckets, is_gradient_reduction
from distexp.system.files import read_json


@dataclass(frozen=True)
class ZeroOptions:
    """The section ``zero_optimization`` of a ds_config, as far as it matters here. The defaults are DeepSpeed's."""

    overlap_comm: bool | None = None  # Whether reductions overlap with the backward pass. None: at stage 3 only.
    reduce_bucket_size: int = 500_000_000  # most elements of a reduction with several parameters
    stage3_prefetch_bucket_size: int = 50_000_000  # elements that are gathered ahead at once
    stage3_param_persistence_threshold: int = 100_000  # elements up to which a parameter is kept between two updates
    stage3_max_live_parameters: int = 1_000_000_000  # elements that are gathered, from which no more are gathered ahead
    stage3_max_reuse_distance: int = 1_000_000_000  # elements up to its next use, below which one is not released

    def overlaps(self, stage: int) -> bool:
        """Return whether reductions of a stage overlap with the backward pass."""
        return stage == 3 if self.overlap_comm is None else self.overlap_comm


def read_zero_options(run_dir: Path) -> ZeroOptions:
    """Return the options that DeepSpeed had in a run. Raise ConfigError without a readable ds_config.json."""
    try:
        content = read_json(run_dir / DS_CONFIG)["zero_optimization"]
        known = {spec.name for spec in fields(ZeroOptions)}
        return ZeroOptions(**{key: value for key, value in content.items() if key in known})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{run_dir} has no readable {DS_CONFIG} ({error}), which a run with DeepSpeed writes: give the directory "
            "that the run has written"
        ) from error


@dataclass(frozen=True, kw_only=True)
class ZeroCommunication(StepCommunication):
    """The collectives of a step at a stage of ZeRO."""

    stage: int = 0
    zero: ZeroOptions = ZeroOptions()  # further options of DeepSpeed

    is_planned: ClassVar[bool] = True

    @property
    def overlaps(self) -> bool:
        """Return whether reductions overlap with the backward pass."""
        return self.zero.overlaps(self.stage)

    @property
    def shards_optimizer(self) -> bool:
        """Return whether the stage is 1 or more."""
        return self.stage > 0

    @property
    def flattens_groups(self) -> bool:
        """Return whether the stage partitions flat groups, as 1 and 2 do."""
        return self.stage in (1, 2)

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Return whether the stage partitions gradients, so that it cannot accumulate whole ones."""
        return self.stage >= 2

    def bytes_per_parameter(self, micro_batches: int) -> float:
        """Return what the workers exchange: reductions, and the weights for each pass or after the update."""
        if self.stage < 3:
            updated = self.trained_share * self.weight_bytes if self.stage else 0
            return super().bytes_per_parameter(micro_batches) + updated
        return micro_batches * (2 * self.weight_bytes + self.trained_share * self.gradient_bytes)

    def plan(self, items: list[Item], model: StepModel, micro_batches: int) -> list[Item]:
        """Return the items with the collectives of the stage."""
        items, last = [_without_transfer(item) for item in items], micro_batches - 1
        awaited = OPTIMIZER if self.overlaps else NEXT
        reductions = [elements * self.gradient_bytes for elements in self.buckets(model.units)]
        if self.stage == 0:
            return self._insert_all_reduces(items, reductions, micro_batches, awaited)
        items = communication.add_norm(items)
        if self.stage == 3:
            for micro_batch in range(micro_batches):
                items = self._insert_gathers(items, model, micro_batch)
                items = insert_buckets(items, reductions, micro_batch, awaited=awaited, scatters=True)
            # After the update, one gather for each parameter that no pass gathers.
            elements = [count for unit in model.units for count in unit.elements]
            sizes = [elements[param] * self.weight_bytes for param in persistent_parameters(elements, self.zero)]
            return [*items, *(Collective("all_gather", size, 1, "all", OPTIMIZER, last, LAUNCH_S) for size in sizes)]
        items = self._insert_all_reduces(items, reductions, micro_batches, awaited)
        # The updated weights are gathered for each group of the optimizer.
        sizes = [sum(group) * self.weight_bytes for group in model.group_elements]
        return [*items, *(Collective("all_gather", size, 1, "all", OPTIMIZER, last) for size in sizes)]

    def with_waits(self, item: Collective, *, on_gpu: bool) -> Collective:
        """Return a collective with what waits for it: the next kernel, unless reductions overlap.

        With ``overlap_comm``, which stage 3 has by default, the optimizer waits for the reductions, and the gathers of
        stage 3 need no result.
        """
        overlaps = self.overlaps and on_gpu
        is_gather = item.kind in step_files.GATHERS and item.phase != OPTIMIZER  # not that of the updated weights
        awaited = OPTIMIZER if overlaps and is_gradient_reduction(item) else NEXT
        return replace(item, awaited=awaited, after_compute=not (overlaps and self.stage == 3 and is_gather))

    def buckets(self, units: Sequence[Parameters]) -> list[int]:
        """Return the elements of the buckets of DeepSpeed: a bucket is reduced before it would exceed its size."""
        found, open_bucket = [], 0
        for size in (elements for unit in reversed(units) for elements in reversed(unit.reduced)):
            if open_bucket and open_bucket + size > self.zero.reduce_bucket_size:
                found.append(open_bucket)
                open_bucket = 0
            open_bucket += size
        return [*found, open_bucket] if open_bucket else found

    def _insert_all_reduces(
        self, items: list[Item], sizes: Sequence[int], micro_batches: int, awaited: str
    ) -> list[Item]:
        """Insert the reductions of the stages 0 to 2."""
        for micro_batch in range(micro_batches):
            last = micro_batch == micro_batches - 1
            if self.stage == 2 or (self.stage == 1 and self.overlaps and last):
                items = insert_buckets(items, sizes, micro_batch, awaited=awaited)
            elif last:
                for size in sizes:
                    insert(items, Collective("all_reduce", size, 1, "all", BACKWARD, micro_batch, awaited=awaited), 1.0)
        return items

    def _insert_gathers(self, items: list[Item], model: StepModel, micro_batch: int) -> list[Item]:
        """Insert the all-gathers of stage 3 into a micro-batch; the work of a module is as its parameters."""
        elements = [count for unit in model.units for count in unit.elements]
        found = gathers_of_micro_batch(model.modules, elements, self.zero)
        places = _places_of_modules(model.modules, elements)
        segments = _segments_before_modules(items, places, micro_batch)
        for gather in found:
            phase, share = places[gather.position]
            size, ahead = gather.elements * self.weight_bytes, segments[gather.used_at] - segments[gather.position]
            new = Collective("all_gather", size, 1, "shard", phase, micro_batch, LAUNCH_S)
            insert(items, replace(new, segments_ahead=ahead, after_compute=not self.overlaps), share)
        return items


def _without_transfer(item: Item) -> Item:
    """Return what replaces a collective of one worker, which sends nothing.

    In the optimizer it is the sum of a scalar, else a segment with the CPU time of the call.
    """
    if isinstance(item, Segment):
        return item
    # The update sums the norm of each group, and checks for infinite gradients.
    if item.phase == OPTIMIZER and item.kind == "all_reduce":
        return Collective(item.kind, communication.SCALAR_BYTES, 1, "all", OPTIMIZER, item.micro_batch, item.host_s)
    return Segment(item.phase, item.micro_batch, item.host_s, tail_s=item.host_s, tail_half_s=item.host_s / 2)


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
    forward, backward = (communication.segments_before(items, phase, micro_batch, 1.0) for phase in (FORWARD, BACKWARD))
    found = [communication.segments_before(items, phase, micro_batch, share) for phase, share in places]
    earlier = [forward if phase == BACKWARD else 0 for phase, _ in places]
    return [*(a + b for a, b in zip(earlier, found, strict=True)), forward + backward]


@dataclass(frozen=True)
class Gather:
    """An all-gather of some parameters."""

    position: int  # of the module before which it is launched: first in the forward pass, then in the backward pass
    elements: int  # elements of its parameters
    used_at: int  # number of the module that waits for it


def persistent_parameters(elements: Sequence[int], options: ZeroOptions) -> list[int]:
    """Return the positions of the parameters that each worker keeps whole between two updates."""
    return [position for position, size in enumerate(elements) if size <= options.stage3_param_persistence_threshold]


def gathers_of_micro_batch(
    modules: Sequence[Sequence[int]], elements: Sequence[int], options: ZeroOptions
) -> list[Gather]:
    """Return the all-gathers of a micro-batch in order. The backward pass is taken to use modules in reverse order."""
    order = [*modules, *reversed(modules)]
    fetcher = _Fetcher(order, elements, options)
    for position in range(len(order)):
        fetcher.fetch(position)
        fetcher.release(position)
    return fetcher.gathers


class _Fetcher:
    """The parameters that a worker has, during a micro-batch whose order is known."""

    def __init__(self, order: Sequence[Sequence[int]], elements: Sequence[int], options: ZeroOptions) -> None:
        self.order, self.elements, self.options = order, elements, options
        self.persistent = set(persistent_parameters(elements, options))
        self.available = set(self.persistent)
        self.in_flight: dict[int, int] = {}  # parameter: position in gathers
        self.gathers: list[Gather] = []
        self.queue = deque((param, use) for use, params in enumerate(order) for param in params)
        self.next_use: dict[int, int] = {}  # of the parameters that left the queue
        self.live = 0

    def fetch(self, position: int) -> None:
        """Gather what a module needs, wait for it, and gather ahead."""
        params = self.order[position]
        self._gather(params, position)
        for param in params:
            if param in self.in_flight:
                self._wait(self.in_flight[param], position)
        self._forget_queued(params, position)
        self._prefetch(position)

    def _gather(self, params: Iterable[int], position: int) -> None:
        missing = [param for param in params if param not in self.available and param not in self.in_flight]
        if not missing:
            return
        size = sum(self.elements[param] for param in missing)
        self.in_flight.update(dict.fromkeys(missing, len(self.gathers)))
        self.gathers.append(Gather(position, size, used_at=len(self.order)))
        self.live += size

    def _wait(self, number: int, position: int) -> None:
        arrived = [param for param, gather in self.in_flight.items() if gather == number]
        self.available.update(arrived)
        for param in arrived:
            del self.in_flight[param]
        self.gathers[number] = replace(self.gathers[number], used_at=position)

    def _forget_queued(self, params: Iterable[int], position: int) -> None:
        missing = {param for param in params if self.next_use.get(param, -1) < position}
        seen: set[int] = set()
        while self.queue and len(seen) < len(missing):
            param, use = self.queue.popleft()
            self.next_use[param] = use
            seen.add(param)

    def _prefetch(self, position: int) -> None:
        limit = min(self.options.stage3_max_live_parameters - self.live, self.options.stage3_prefetch_bucket_size)
        chosen: dict[int, int] = {}  # parameter: elements
        while self.queue and sum(chosen.values()) < limit:
            param, use = self.queue.popleft()
            self.next_use[param] = max(self.next_use.get(param, -1), use)
            if param not in self.available and param not in self.in_flight:
                chosen[param] = self.elements[param]
        self._gather(chosen, position)

    def release(self, position: int) -> None:
        """Free the parameters of a module that are not used soon."""
        kept = self._needed_soon(position + 1)
        for param in self.order[position]:
            is_queued_again = self.next_use.get(param, -1) > position + 1
            if param in self.available and param not in self.persistent and param not in kept and not is_queued_again:
                self.available.remove(param)
                self.live -= self.elements[param]

    def _needed_soon(self, start: int) -> set[int]:
        """Return the parameters of the next modules, up to the reuse distance."""
        found: set[int] = set()
        passed = 0
        for params in self.order[start:]:
            if passed >= self.options.stage3_max_reuse_distance:
                break
            found.update(params)
            passed += sum(self.elements[param] for param in params)
        return found
