"""The collectives of a step on several workers: those that a strategy adds to the step of one worker, and their groups.

See docs/decisions/forecast-model.md for the sources. A run with several workers shows its collectives in its trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distexp.forecast.collectives import GroupLayout
from distexp.forecast.target import Target
from distexp.runs.step_model import Collective, Item, StepModel
from distexp.strategies.step_collectives import LAUNCH_S, StepCommunication


def plan_communication(
    items: Sequence[Item], model: StepModel, communication: StepCommunication, *, micro_batches: int
) -> tuple[Item, ...]:
    """Return the items of a step of one worker with the collectives of several workers.

    Args:
        items: Items of the step, as measured with one worker.
        model: The profiled step, with the parameters of the model.
        communication: What the strategy states about its collectives.
        micro_batches: Micro-batches of the step.
    """
    if model.on_gpu:
        items = [_with_launch(item) for item in items]
    return tuple(communication.plan(list(items), model, micro_batches))


def _with_launch(item: Item) -> Item:
    """Return an item with the time of the CPU for a collective that one worker skips."""
    skipped = isinstance(item, Collective) and item.axis == "shard" and item.transfer_s is None
    return replace(item, host_s=item.host_s + LAUNCH_S) if skipped else item


def add_replication(items: Sequence[Item], communication: StepCommunication, target: Target) -> tuple[Item, ...]:
    """Return the items with the collectives between the replicas of a target, if the profiled run had none."""
    return communication.with_replicas(items, *communication.mesh(target.workers, target.nodes))


def group_layout(communication: StepCommunication, axis: str, target: Target) -> GroupLayout:
    """Return the process group of an axis: ``all``, ``shard`` or ``replicate``."""
    replicas, shard = communication.mesh(target.workers, target.nodes)
    per_node = target.workers_per_node
    if axis == "shard":
        return GroupLayout(shard, -(-shard // per_node), per_node)
    if axis == "replicate":
        replicas_per_node = max(1, per_node // shard)
        return GroupLayout(replicas, -(-replicas // replicas_per_node), per_node)
    return GroupLayout(target.workers, target.nodes, per_node)
