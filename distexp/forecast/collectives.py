"""Duration of a collective: from measured curves, and beyond them from NCCL's cost model of rings and trees.

The model is alpha-beta: a latency per hop, plus bytes divided by a bandwidth. See docs/decisions/forecast-model.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from distexp.preflight.machine import CurvePoint, MachineCurves

FAST_BANDWIDTH = 0.25  # fraction of the bandwidth that the protocol LL reaches (NCCL, tuning.cc)
TREE_BANDWIDTH = 0.9  # fraction of the bandwidth that a tree reaches (NCCL, tuning.cc)
# Latency of a collective without its hops (NCCL, tuning.cc, table baseLat).
BASE_RING_FAST, BASE_RING_SIMPLE, BASE_TREE_FAST, BASE_TREE_SIMPLE = 3.6e-6, 8.4e-6, 4.4e-6, 0.0
MEASURED, SCALED, MODEL = "measured", "scaled", "model"

SIMILAR_KINDS = {  # measured kind whose curve is used for a kind that the preflight does not measure
    "reduce": "reduce_scatter",
    "broadcast": "all_gather",
    "all_to_all": "all_gather",
    "other": "all_gather",
}


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
