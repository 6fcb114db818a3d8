"""A rough forecast of the communication of a step: the collectives of ``distexp forecast``, as bytes on links."""

from __future__ import annotations

from distexp.choose.machine_speeds import MachineSpeeds
from distexp.config import Config
from distexp.forecast.collectives import GroupLayout
from distexp.forecast.communication import group_layout
from distexp.forecast.target import Target
from distexp.strategies.base import load_strategy

GB = 1e9


def communication_s(config: Config, parameters: float, speeds: MachineSpeeds) -> float:
    """Return the seconds in collectives of a step, without latencies. None of them is hidden.

    Args:
        config: Configuration of the run.
        parameters: Number of parameters of the whole model.
        speeds: Speeds of the machine.
    """
    cluster, steps = config.cluster, config.train.gradient_accumulation_steps
    target = Target(cluster.nodes, cluster.workers_per_node or 1, steps, samples_per_step=0.0)
    communication = load_strategy(config).communication(config)
    shard, replicas = (group_layout(communication, axis, target) for axis in ("shard", "replicate"))
    in_shards = parameters * communication.bytes_per_parameter(steps)
    between_replicas = parameters / shard.ranks * 2 * communication.gradient_bytes
    return _ring_s(in_shards, shard, speeds) + _ring_s(between_replicas, replicas, speeds)


def _ring_s(size: float, group: GroupLayout, speeds: MachineSpeeds) -> float:
    """Return the seconds in which a ring sends a size. Between nodes it uses the cards of all its workers on a node."""
    link = speeds.link_gb_per_s
    if group.nodes > 1:
        link = min(link, speeds.network_gb_per_s * group.ranks_per_node)
    return size * (group.ranks - 1) / group.ranks / (link * GB)
