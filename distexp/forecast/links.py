"""Links of known machines: bandwidth per GPU and direction, and latency per hop.

The bandwidths are those of the datasheets. A collective reaches a fraction of them. EFFICIENCY_NVLINK is what
nccl-tests measured on eight H200 (367 of 450 GB/s). EFFICIENCY_NETWORK and EFFICIENCY_PCIE are assumptions. The
latencies are those of NCCL's own cost model (src/graph/tuning.cc, table hwLat).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from distexp.config import ConfigError
from distexp.runs.listing import format_count

EFFICIENCY_NVLINK = 0.81
EFFICIENCY_NETWORK = 0.9
EFFICIENCY_PCIE = 0.8

NODES_PER_LEAF = 32
"""Nodes whose GPUs of the same index share a switch in a rail-optimized network (scalable unit of a DGX SuperPOD)."""


@dataclass(frozen=True)
class Latency:
    """Seconds per hop of NCCL's two kinds of protocols.

    Attributes:
        fast: LL, which sends flags with the data at a quarter of the bandwidth.
        simple: Simple, which has the full bandwidth; in a ring.
        simple_tree: Simple in a tree, whose chunks are larger.
    """

    fast: float
    simple: float
    simple_tree: float


NVLINK = Latency(0.5e-6, 3.4e-6, 28e-6)
PCIE = Latency(1.0e-6, 5.7e-6, 28e-6)
NETWORK = Latency(2.7e-6, 9.6e-6, 50e-6)
LOOPBACK = Latency(50e-6, 50e-6, 50e-6)
"""Processes of one machine that communicate with gloo. An assumption: a TCP round trip with thread switches."""


@dataclass(frozen=True)
class Link:
    """A link between workers.

    Attributes:
        name: Name for notes.
        bandwidth: What a collective reaches, in bytes per second, worker and direction.
        latency: Latency of a hop.
    """

    name: str
    bandwidth: float
    latency: Latency


def _nvlink(generation: int, gigabytes: float) -> Link:
    return Link(f"NVLink {generation}", EFFICIENCY_NVLINK * gigabytes * 1e9, NVLINK)


def _pcie(generation: int, gigabytes: float) -> Link:
    return Link(f"PCIe {generation}", EFFICIENCY_PCIE * gigabytes * 1e9, PCIE)


INTRA_NODE = (
    (r"[HG]?B[23]00", _nvlink(5, 900)),
    (r"H100.*(PCIe|NVL)|H200.*NVL", _pcie(5, 64)),
    (r"H800", _nvlink(4, 200)),
    (r"H100|H200|GH200|H20", _nvlink(4, 450)),
    (r"A100.*PCI|A30|A40|A10(?!0)", _pcie(4, 32)),
    (r"A800", _nvlink(3, 200)),
    (r"A100", _nvlink(3, 300)),
    (r"V100.*PCI", _pcie(3, 16)),
    (r"V100", _nvlink(2, 150)),
    (r"P100.*SXM", _nvlink(1, 80)),
    (r"RTX PRO|GeForce RTX 50", _pcie(5, 64)),
    (r"L4|RTX A\d|RTX \d+ .*Ada|GeForce RTX [34]0", _pcie(4, 32)),
    (r"T4|P100|RTX", _pcie(3, 16)),
)
"""Links by the name of the GPU; the first that matches counts. The bandwidth is per direction, over all links."""

NETWORKS = {
    "ethernet-10g": 1.25,
    "ethernet-25g": 3.125,
    "ethernet-100g": 12.5,
    "roce-100g": 12.5,
    "roce-200g": 25.0,
    "roce-400g": 50.0,
    "infiniband-edr-100g": 12.5,
    "infiniband-hdr-200g": 25.0,
    "infiniband-ndr-400g": 50.0,
    "infiniband-xdr-800g": 100.0,
    "efa-p4d": 12.5,
    "efa-p5": 12.5,
}
"""Bandwidth of one network card in GB/s. An EFA card has 100 Gbit/s."""

CARDS_PER_NODE = {"efa-p4d": 4, "efa-p5": 32, **{name: 1 for name in NETWORKS if name.startswith("ethernet")}}
"""Cards of machines that have another number than one per GPU."""

GPUS_OF_EFA_NODE = 8
"""GPUs of a p4d or p5. A GPU uses the cards near it, and not those of the other GPUs."""


@dataclass(frozen=True)
class Network:
    """The network between nodes.

    Attributes:
        name: A key of NETWORKS.
        rail_optimized: Whether GPUs of the same index share a switch. Then a slower upper level matters only with more
            than NODES_PER_LEAF nodes.
        oversubscription: By how much the upper level of the network is slower than the lower one.
        latency: Latency of a hop.
    """

    name: str = "infiniband-hdr-200g"
    rail_optimized: bool = True
    oversubscription: float = 1.0
    latency: Latency = NETWORK

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: A value is unknown or impossible.
        """
        if self.name not in NETWORKS:
            raise ConfigError(f"forecast.network={self.name} is unknown: use one of {', '.join(NETWORKS)}")
        if self.oversubscription < 1:
            raise ConfigError(f"forecast.oversubscription={self.oversubscription:g} is impossible: use at least 1")

    def link(self, nodes: int, workers_per_node: int) -> Link:
        """Return the link of each worker to other nodes, if all workers use it at the same time."""
        cards = self._cards_of(workers_per_node)
        bandwidth = EFFICIENCY_NETWORK * NETWORKS[self.name] * 1e9 * cards / workers_per_node
        factor = self.oversubscription if self.uses_upper_level(nodes) else 1.0
        return Link(self.name, bandwidth / factor, self.latency)

    def _cards_of(self, workers: int) -> int:
        """Return the network cards of a node that so many workers use."""
        cards = CARDS_PER_NODE.get(self.name, workers)
        if self.name.startswith("efa"):
            return min(cards, math.ceil(workers * cards / GPUS_OF_EFA_NODE))
        return cards

    def describe(self, workers_per_node: int) -> str:
        """Return the network as an option, with the cards that so many workers use."""
        cards = self._cards_of(workers_per_node) if self.name in CARDS_PER_NODE else None
        count = "one card per worker" if cards is None else f"{format_count(cards, 'card')} per node"
        return f"forecast.network={self.name}, {count}"

    def uses_upper_level(self, nodes: int) -> bool:
        """Return whether collectives over so many nodes go through the upper level of the network."""
        return not self.rail_optimized or nodes > NODES_PER_LEAF


def usual_network(gpu_name: str | None) -> Network:
    """Return the network that is assumed between nodes with this GPU; None: CPUs, whose gloo uses TCP."""
    return Network("ethernet-10g", latency=LOOPBACK) if gpu_name is None else Network()


def intra_node_link(gpu_name: str | None) -> Link:
    """Return the link between the workers of a node, by the name of the GPU; None: CPUs."""
    if gpu_name is None:
        return Link("gloo on one machine", 1e9, LOOPBACK)
    known = (link for pattern, link in INTRA_NODE if re.search(pattern, gpu_name))
    return next(known, _pcie(4, 32))
