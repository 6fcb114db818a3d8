"""The parts of the cluster that a search tries: ``choose.gpus``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distexp.config import Config, ConfigError
from distexp.resolve.resources import launcher_traits


@dataclass(frozen=True)
class ClusterSize:
    """A part of the cluster."""

    nodes: int
    workers_per_node: int

    @property
    def workers(self) -> int:
        """Return the number of workers on all nodes."""
        return self.nodes * self.workers_per_node


def cluster_sizes(base: Config, gpus: Sequence[int]) -> list[ClusterSize]:
    """Return the parts of the cluster to try.

    Args:
        base: Configuration of the command with all of its workers.
        gpus: Numbers of workers, over all nodes; empty for that of the command.

    Raises:
        ConfigError: a number of GPUs needs a part of a node.
    """
    nodes, per_node = base.cluster.nodes, base.cluster.workers_per_node or 1
    if not gpus:
        return [ClusterSize(nodes, per_node)]
    is_one_machine = launcher_traits(base).runs_here and nodes == 1
    errors = [
        f"choose.gpus={number} is no multiple of the {per_node} workers of a node: use {number // per_node * per_node}"
        for number in gpus
        if number > per_node and number % per_node and not is_one_machine
    ]
    if errors:
        raise ConfigError(errors)
    sizes = (
        ClusterSize(1, number) if number <= per_node or is_one_machine else ClusterSize(number // per_node, per_node)
        for number in gpus
    )
    return list(dict.fromkeys(sizes))
