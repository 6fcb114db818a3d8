"""A rough forecast of the communication of a step: the collectives of ``distexp forecast``, as bytes on links."""

from __future__ import annotations

from dataclasses import asdict

from distexp.choose.machine_speeds import MachineSpeeds
from distexp.config import Config
from distexp.forecast.collectives import GroupLayout
from distexp.forecast.settings import CommunicationSettings
from distexp.forecast.target import Target

GB = 1e9


def communication_s(config: Config, parameters: float, speeds: MachineSpeeds) -> float:
    """Return the seconds in collectives of a step, without latencies. None of them is hidden.

    Args:
        config: Configuration of the run.
        parameters: Number of parameters of the whole model.
        speeds: Speeds of the machine.
    """
    settings, cluster = CommunicationSettings.of(asdict(config)), config.cluster
    steps = config.train.gradient_accumulation_steps
    target = Target(cluster.nodes, cluster.workers_per_node or 1, steps, samples_per_step=0.0)
    shard, replicas = settings.layout("shard", target), settings.layout("replicate", target)
    in_shards = parameters * _bytes_in_shards(settings, steps)
    between_replicas = parameters / shard.ranks * 2 * settings.gradient_bytes
    return _ring_s(in_shards, shard, speeds) + _ring_s(between_replicas, replicas, speeds)


def _bytes_in_shards(settings: CommunicationSettings, micro_batches: int) -> int:
    """Return the bytes per parameter that the workers of a replica exchange. An all-reduce sends each value twice."""
    weight, gradient = settings.weight_bytes, settings.gradient_bytes
    reductions = micro_batches if settings.reduces_each_micro_batch else 1
    if settings.strategy == "fsdp":
        gathers = 1 if settings.gathers_once else 2 * micro_batches
        return gathers * weight + gradient
    if settings.zero_stage == 3:
        return 2 * micro_batches * weight + reductions * gradient
    return 2 * reductions * gradient + (weight if settings.zero_stage else 0)


def _ring_s(size: float, group: GroupLayout, speeds: MachineSpeeds) -> float:
    """Return the seconds in which a ring sends a size. Between nodes it uses the cards of all its workers on a node."""
    link = speeds.link_gb_per_s
    if group.nodes > 1:
        link = min(link, speeds.network_gb_per_s * group.ranks_per_node)
    return size * (group.ranks - 1) / group.ranks / (link * GB)
