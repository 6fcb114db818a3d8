"""The network between the nodes of a forecast."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from distexp.config import ConfigError
from distexp.hardware.facts import Latency, Link, facts
from distexp.runs.listing import format_count


@dataclass(frozen=True)
class Network:
    """The network between nodes.

    Attributes:
        name: A key of ``networks`` in ``hardware/facts.yaml``.
        rail_optimized: Whether GPUs of the same index share a switch. Then a slower upper level matters only with more
            than ``nodes_per_leaf`` nodes.
        oversubscription: By how much the upper level of the network is slower than the lower one.
        latency: Latency of a hop.
    """

    name: str = field(default_factory=lambda: facts().usual_networks["gpu"])
    rail_optimized: bool = True
    oversubscription: float = 1.0
    latency: Latency = field(default_factory=lambda: facts().links["network"].latency)

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: A value is unknown or impossible.
        """
        if self.name not in facts().networks:
            raise ConfigError(f"forecast.network={self.name} is unknown: use one of {', '.join(facts().networks)}")
        if self.oversubscription < 1:
            raise ConfigError(f"forecast.oversubscription={self.oversubscription:g} is impossible: use at least 1")

    def link(self, nodes: int, workers_per_node: int) -> Link:
        """Return the link of each worker to other nodes, if all workers use it at the same time."""
        card = facts().link("network", facts().networks[self.name].gb_per_s)
        bandwidth = card.bandwidth * self._cards_of(workers_per_node) / workers_per_node
        factor = self.oversubscription if self.uses_upper_level(nodes) else 1.0
        return Link(self.name, bandwidth / factor, self.latency)

    def _cards_of(self, workers: int) -> int:
        """Return the network cards of a node that so many workers use."""
        cards = facts().networks[self.name].cards or workers
        if self.name.startswith("efa"):
            return min(cards, math.ceil(workers * cards / facts().gpus_of_efa_node))
        return cards

    def describe(self, workers_per_node: int) -> str:
        """Return the network as an option, with the cards that so many workers use."""
        if facts().networks[self.name].cards is None:
            return f"forecast.network={self.name}, one card per worker"
        return f"forecast.network={self.name}, {format_count(self._cards_of(workers_per_node), 'card')} per node"

    def uses_upper_level(self, nodes: int) -> bool:
        """Return whether collectives over so many nodes go through the upper level of the network."""
        return not self.rail_optimized or nodes > facts().nodes_per_leaf


def usual_network(gpu_name: str | None) -> Network:
    """Return the network that is assumed between nodes with this GPU; None: CPUs, whose gloo uses TCP."""
    if gpu_name is None:
        return Network(facts().usual_networks["cpu"], latency=facts().links["loopback"].latency)
    return Network()
