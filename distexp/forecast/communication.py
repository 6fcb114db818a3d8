"""The collectives of a step on several workers: those that a strategy adds to the step of one worker, and their groups.

See docs/decisions/forecast-model.md for the sources. A run with several workers shows its collectives in its trace.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from distexp.forecast.simulate import Scales, scaled_tail
from distexp.preflight.machine import CurvePoint, MachineCurves
from distexp.runs import step_files
from distexp.runs.step_files import BACKWARD, COPIES, FORWARD, GROUP, OPTIMIZER, Collective, Item, Segment, StepModel
from distexp.strategies.communication import LAUNCH_S, StepCommunication, insert, work

# NCCL's cost model of rings and trees is alpha-beta: a latency per hop, plus bytes divided by a bandwidth.
FAST_BANDWIDTH = 0.25  # fraction of the bandwidth that the protocol LL reaches (NCCL, tuning.cc)
TREE_BANDWIDTH = 0.9  # fraction of the bandwidth that a tree reaches (NCCL, tuning.cc)
# Latency of a collective without its hops (NCCL, tuning.cc, table baseLat).
BASE_RING_FAST, BASE_RING_SIMPLE, BASE_TREE_FAST, BASE_TREE_SIMPLE = 3.6e-6, 8.4e-6, 4.4e-6, 0.0
MEASURED, SCALED, MODEL = "measured", "scaled", "model"

SIMILAR_KINDS = {"reduce": "reduce_scatter", **dict.fromkeys(("broadcast", "all_to_all", "other"), "all_gather")}
"""Measured kind whose curve is used for a kind that the preflight does not measure."""


@dataclass(frozen=True)
class GroupLayout:
    """Workers of a process group."""

    ranks: int
    nodes: int
    workers_per_node: int  # of the run; they share the network cards

    @property
    def ranks_per_node(self) -> int:
        """Return the workers of the group on a node."""
        return max(1, self.ranks // self.nodes)

    @property
    def inside_a_node(self) -> GroupLayout:
        """Return the part of the group that is on one node."""
        return GroupLayout(self.ranks_per_node, 1, self.workers_per_node)


@dataclass(frozen=True)
class CollectiveTime:
    """Duration of a collective, and where it is from: ``measured``, ``scaled`` (to another size) or ``model``."""

    seconds: float
    source: str


def collective_time(machine: MachineCurves, kind: str, size: int, layout: GroupLayout) -> CollectiveTime:
    """Return the duration of a collective without waiting for other ranks. Its size is in bytes, as in nccl-tests."""
    if layout.ranks <= 1:
        return CollectiveTime(0.0, MEASURED)
    measured = kind if machine.layouts(kind) else SIMILAR_KINDS.get(kind, kind)
    curve = machine.curve(measured, layout.ranks, layout.nodes)
    if curve:
        return CollectiveTime(interpolate(curve, size), MEASURED)
    # A group with several nodes takes at least as long as its part on one node.
    inside_s = 0.0 if layout.nodes == 1 else collective_time(machine, kind, size, layout.inside_a_node).seconds
    similar = [
        (ranks, nodes) for ranks, nodes in machine.layouts(measured)
        if ranks > 1 and (nodes > 1) == (layout.nodes > 1)
    ]  # fmt: skip
    if not similar:
        if layout.nodes > 1 and layout.ranks_per_node > 1:
            # The links in a node are as slow as measured, if they are slower than those of the model.
            slowdown = max(1.0, inside_s / model_time(machine, kind, size, layout.inside_a_node))
            machine = replace(machine, intra=replace(machine.intra, bandwidth=machine.intra.bandwidth / slowdown))
        return CollectiveTime(max(model_time(machine, kind, size, layout), inside_s), MODEL)
    near = min(similar, key=lambda known: abs(math.log(known[0] / layout.ranks)))
    there = GroupLayout(*near, workers_per_node=max(1, near[0] // near[1]))
    ratio = interpolate(machine.curve(measured, *near), size) / model_time(machine, measured, size, there)
    return CollectiveTime(max(model_time(machine, kind, size, layout) * ratio, inside_s), SCALED)


def interpolate(curve: Sequence[CurvePoint], size: int) -> float:
    """Return the duration for a size: a line between two points in the logarithms of size and time.

    A smaller size takes as long as the smallest measured one. A larger one has the bandwidth of the largest.
    """
    sizes = [point.bytes for point in curve]
    if size <= sizes[0]:
        return curve[0].seconds
    if size >= sizes[-1]:
        return curve[-1].seconds * size / sizes[-1]
    right = bisect_left(sizes, size)
    low, high = curve[right - 1], curve[right]
    share = math.log(size / low.bytes) / math.log(high.bytes / low.bytes)
    return float(low.seconds * (high.seconds / low.seconds) ** share)


def model_time(machine: MachineCurves, kind: str, size: int, layout: GroupLayout) -> float:
    """Return the duration by the cost model: that of the fastest algorithm and protocol."""
    return min(_candidates(machine, kind, size, layout))


@dataclass(frozen=True)
class NcclProtocol:
    """Bytes per second and direction; and seconds of a hop in a node, of a hop between nodes, and without hops."""

    bandwidth: float
    near: float
    far: float
    base: float


def _candidates(machine: MachineCurves, kind: str, size: int, layout: GroupLayout) -> Iterator[float]:
    intra = machine.intra
    inter = machine.network.link(layout.nodes, layout.workers_per_node)
    bandwidth, near, far = intra.bandwidth, intra.latency, inter.latency
    if layout.nodes > 1:
        bandwidth = min(bandwidth, inter.bandwidth * layout.ranks_per_node)
    yield ring_time(kind, size, layout, NcclProtocol(bandwidth, near.simple, far.simple, BASE_RING_SIMPLE))
    yield ring_time(kind, size, layout, NcclProtocol(FAST_BANDWIDTH * bandwidth, near.fast, far.fast, BASE_RING_FAST))
    if kind == "all_reduce":
        bandwidth *= TREE_BANDWIDTH
        yield tree_time(size, layout, NcclProtocol(bandwidth, near.simple_tree, far.simple_tree, BASE_TREE_SIMPLE))
        yield tree_time(size, layout, NcclProtocol(FAST_BANDWIDTH * bandwidth, near.fast, far.fast, BASE_TREE_FAST))


def ring_time(kind: str, size: int, layout: GroupLayout, protocol: NcclProtocol) -> float:
    """Return the duration in a ring. The size is in bytes, as in nccl-tests.

    A ring of n workers sends the n-th part of the data in n - 1 steps; an all-reduce in 2 (n - 1) steps. As many of
    each n steps are between nodes as there are nodes.
    """
    rounds = 2 if kind == "all_reduce" else 1
    steps, far = rounds * (layout.ranks - 1), rounds * (layout.nodes - 1)
    sent = size * steps / layout.ranks
    if kind == "send_recv":
        steps, far, sent = 1, min(1, far), float(size)
    elif kind in ("broadcast", "reduce"):  # a chain, through which all data goes
        sent = float(size)
    return protocol.base + (steps - far) * protocol.near + far * protocol.far + sent / protocol.bandwidth


def tree_time(size: int, layout: GroupLayout, protocol: NcclProtocol) -> float:
    """Return the duration of an all-reduce in a tree over the nodes, with a chain in each node.

    The data goes up and down once: 2 (g - 1) hops in a node of g workers, and 2 log2 (nodes) between them.
    """
    depth = math.log2(layout.nodes) if layout.nodes > 1 else 0.0
    hops = (layout.ranks_per_node - 1) * protocol.near + depth * protocol.far
    return protocol.base + 2 * hops + 2 * size / protocol.bandwidth


def plan_communication(
    items: Sequence[Item], model: StepModel, communication: StepCommunication, *, micro_batches: int
) -> tuple[Item, ...]:
    """Return the items of a step of one worker with the collectives of several workers."""

    def is_skipped(item: Item) -> bool:  # by one worker, so the profile lacks the time of the CPU for it
        is_of_unit = isinstance(item, Collective) and item.axis in ("shard", COPIES) and item.transfer_s is None
        return is_of_unit and model.on_gpu

    planned = [replace(item, host_s=item.host_s + LAUNCH_S) if is_skipped(item) else item for item in items]
    return tuple(communication.plan(planned, model, micro_batches))


def add_replication(items: Sequence[Item], communication: StepCommunication, target: Target) -> tuple[Item, ...]:
    """Return the items with the collectives between the replicas of a target, if the profiled run had none."""
    return communication.with_replicas(items, *communication.mesh(target.workers, target.nodes))


def group_layout(communication: StepCommunication, axis: str, target: Target) -> GroupLayout:
    """Return the process group of an axis of a collective."""
    replicas, shard = communication.mesh(target.workers, target.nodes)
    per_node, group = target.workers_per_node, communication.group
    if axis == GROUP:  # Its workers have consecutive ranks.
        return GroupLayout(group, -(-group // per_node), per_node)
    if axis == COPIES:
        copies = target.workers // group
        return GroupLayout(copies, -(-copies // max(1, per_node // group)), per_node)
    if axis == "shard":
        return GroupLayout(shard, -(-shard // per_node), per_node)
    if axis == "replicate":
        replicas_per_node = max(1, per_node // shard)
        return GroupLayout(replicas, -(-replicas // replicas_per_node), per_node)
    return GroupLayout(target.workers, target.nodes, per_node)


TO_MEASURE = "To measure them:"  # text in a note before the command that replaces its assumption
PARTS = ("compute", "exposed_communication", "launch", "waiting", "other")
"""Parts of a forecast step. ``launch``: the device is idle because the CPU launches its work too slowly."""


@dataclass(frozen=True)
class Target:
    """A number of workers to forecast."""

    nodes: int
    workers_per_node: int
    micro_batches: int  # of a step on each worker; their size is that of the profiled run
    samples_per_step: float  # over all workers

    @property
    def workers(self) -> int:
        """Return the number of workers."""
        return self.nodes * self.workers_per_node


@dataclass(frozen=True)
class Forecast:
    """The forecast of one target."""

    target: Target
    step_time_s: float
    low_s: float  # of the interval
    high_s: float
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds by name in PARTS; they add up to the step
    hidden_communication_s: float = 0.0  # at the same time as computation
    beyond: str = ""  # how far the target is outside of the measured range; empty: inside
    limit: str = ""  # what limits the step most, as ``the all_reduce of 540 MB``; empty: unknown
    notes: tuple[str, ...] = ()  # assumptions

    @property
    def samples_per_second(self) -> float:
        """Return the throughput over all workers."""
        return self.target.samples_per_step / self.step_time_s


def with_micro_batches(
    items: Sequence[Item], profiled: int, wanted: int, communication: StepCommunication
) -> tuple[Item, ...]:
    """Return the items of a step with another number of micro-batches of the same size.

    The first and the last micro-batch are as in the profiled step, which has at most three. Those between them are all
    alike. Gradients are reduced in the last one, unless the strategy reduces them in each.
    """
    forward_backward = [item for item in items if item.phase != OPTIMIZER]
    numbers = sorted({item.micro_batch for item in forward_backward})
    blocks = [[item for item in forward_backward if item.micro_batch == number] for number in numbers]
    if not blocks or (wanted == profiled and len(blocks) == profiled):
        return tuple(items)
    found: list[Item] = []
    for position in range(wanted):
        last = position == wanted - 1
        block = blocks[-1] if last else blocks[1] if position and len(blocks) > 2 else blocks[0]
        if last and wanted == 1 and communication.gathers_once:
            block = _with_gathers_of(block, blocks[0])
        kept = [item for item in block if _is_used(item, position, last=last, communication=communication)]
        found += [replace(item, micro_batch=position) for item in kept]
    return (*found, *(replace(item, micro_batch=wanted - 1) for item in items if item.phase == OPTIMIZER))


def stretched(item: Item, ratio: float) -> Item:
    """Return an item of a pass that takes longer by a factor; those of the optimizer do not."""
    if not isinstance(item, Segment) or item.phase == OPTIMIZER:
        return item
    times = {name: ratio * getattr(item, name) for name in ("host_s", "device_s", "tail_s", "tail_half_s")}
    return replace(item, **times)


def _is_used(item: Item, position: int, *, last: bool, communication: StepCommunication) -> bool:
    """Return whether an item happens in a micro-batch; a collective of another one may not."""
    if isinstance(item, Segment) or item.axis == GROUP:
        return True
    if item.kind in step_files.REDUCTIONS:
        if item.phase == FORWARD:  # as the number of targets, which is summed once per step
            return position == 0
        return last or communication.reduces_each_micro_batch
    return position == 0 or not (communication.gathers_once and item.kind in step_files.GATHERS)


def _with_gathers_of(block: Sequence[Item], first: Sequence[Item]) -> list[Item]:
    """Return a micro-batch with the collectives of another that gather weights, at the same shares of its work."""
    if any(isinstance(item, Collective) and item.kind in step_files.GATHERS for item in block):
        return list(block)
    found = list(block)
    for phase in (FORWARD, BACKWARD):
        done = 0.0
        total = sum(work(item) for item in first if item.phase == phase) or 1.0
        for item in first:
            if item.phase == phase and isinstance(item, Collective) and item.kind in step_files.GATHERS:
                insert(found, item, done / total)
            done += work(item) if item.phase == phase else 0.0
    return found


# If the workers shard the optimizer states, a worker updates its share of the elements, so the kernels of the update
# and of the norm take less time. How many kernels there are depends on the strategy:
# - FSDP and ZeRO-3 divide each parameter. Each worker has a part of all of them, and launches as many kernels.
# - ZeRO-1 and ZeRO-2 divide each group of the optimizer, whose parameters are in one flat tensor. Check and norm launch
#   kernels for each parameter in the part of a worker, and the workers have different numbers of them.

SHORTEST_KERNEL_S = 2e-6  # time of a kernel with hardly any work: an assumption
FEWEST_LAUNCHES = 32
"""Launches of a segment from which they are those of a loop over parameters. Flat tensors need fewer: an assumption."""
SMALL_PARAMETER_S = 40e-6
"""Time of a CPU to update a parameter of 1,000 elements with AdamW: 33 us on a 2-core machine, and its norm."""


@dataclass(frozen=True)
class UpdateShare:
    """The elements of the worker with the most, and the most parameters of which a worker has a part."""

    elements: int
    parameters: int


def update_share(groups: Sequence[Sequence[int]], communication: StepCommunication, shards: int) -> UpdateShare:
    """Return what a worker updates of groups with the elements of each parameter, by the shards of the states."""
    if communication.flattens_groups:
        parts = [-(-sum(group) // shards) for group in groups]
        counts = [_parameters_by_worker(group, part, shards) for group, part in zip(groups, parts, strict=True)]
        return UpdateShare(sum(parts), max(map(sum, zip(*counts, strict=True)), default=0))
    elements = sum(-(-size // shards) for group in groups for size in group)
    return UpdateShare(elements, sum(len(group) for group in groups))


def _parameters_by_worker(group: Sequence[int], part: int, shards: int) -> list[int]:
    """Return how many parameters of a flat group each worker has a part of."""
    starts = [0] * (shards + 1)  # differences between a worker and the one before
    end = 0
    for elements in group:
        first, end = end // part, end + elements
        starts[first] += 1
        starts[(end - 1) // part + 1] -= 1
    return list(accumulate(starts))[:shards]


def shard_update(
    items: Sequence[Item], before: UpdateShare, after: UpdateShare, communication: StepCommunication, *, on_gpu: bool
) -> tuple[Item, ...]:
    """Return the items of a step with the update of another share."""
    update = [item for item in items if isinstance(item, Segment) and item.phase == OPTIMIZER]
    elements, host = after.elements / before.elements, 1.0
    updates_on_cpu = communication.offloads or not on_gpu
    host_s = sum(item.host_s for item in update)
    if updates_on_cpu and host_s:  # Each parameter takes some time, also a tiny one.
        host = max(elements, min(host_s, after.parameters * SMALL_PARAMETER_S) / host_s)
    parameters = after.parameters / before.parameters if communication.flattens_groups else 1.0

    def shrink(item: Item) -> Item:
        if not isinstance(item, Segment) or item.phase != OPTIMIZER:
            return item
        launches = parameters if item.launches >= FEWEST_LAUNCHES else 1.0
        return _scale(item, host if updates_on_cpu else launches, elements, launches)

    return tuple(map(shrink, items))


def _scale(item: Segment, host: float, elements: float, launches: float) -> Segment:
    """Return a segment with other factors of the CPU's time, of the elements of a long kernel, and of the kernels."""
    count = round(launches * item.launches)
    device_s = max(elements * item.device_s, min(item.device_s, count * SHORTEST_KERNEL_S))
    device = device_s / item.device_s if item.device_s else 1.0
    tail_s, half_s = (scaled_tail(item, Scales(factor, device)) for factor in (host, host / 2))
    host_s = host * item.host_s
    return replace(item, host_s=host_s, device_s=device_s, tail_s=tail_s, tail_half_s=half_s, launches=count)
