"""Configurations of ``single`` for the check of the losses, if it is not among the candidates."""

from __future__ import annotations

from collections.abc import Sequence

from distexp.choose.axis_keys import CHECKPOINTING, MICRO_BATCH, SHARDING, STAGE
from distexp.choose.candidate import Candidate, Status
from distexp.cli.overrides import quote_choice
from distexp.config.paths import config_groups
from distexp.launch.composition import MakeCell
from distexp.plan.cells import replace_overrides
from distexp.plan.estimate import Estimate
from distexp.plan.planner import Planner
from distexp.plan.verdict import DOES_NOT_FIT, memory_to_fit_mib, predict

SINGLE = (*("strategy=single", "cluster.nodes=1", "cluster.workers_per_node=1", "kernels=reference", "offload=false"),)
NOT_SINGLE = (f"{SHARDING}=", f"{STAGE}=", "fsdp.sharding=", "deepspeed.zero_stage=", "offload.")
"""Overrides of a command that choose another strategy."""


def without_other_strategy(command: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a command, without those that contradict ``strategy=single`` if others choose it."""
    if SINGLE[0] not in overrides:
        return list(command)
    return [text for text in command if not text.startswith(NOT_SINGLE)]


def fitting_singles(
    candidates: Sequence[Candidate], command: Sequence[str], make: MakeCell, planner: Planner
) -> list[Candidate]:
    """Return configurations of ``single`` that may fit; none if a candidate of ``single`` does.

    Args:
        candidates: All candidates, after those that do not fit were pruned.
        command: Overrides of the command.
        make: Composes a cell.
        planner: Source of estimates.
    """
    waiting = [each for each in candidates if each.status is Status.WAITING]
    if not waiting or any(each.config and each.config.strategy.name == "single" for each in waiting):
        return []
    kept = without_other_strategy(command, SINGLE)
    largest = max(each.micro_batch for each in waiting)
    variants = dict.fromkeys(
        (*SINGLE, f"{MICRO_BATCH}={size}", f"{CHECKPOINTING}={light}")
        for size, light in ((largest, "false"), (1, "false"), (1, "true"))
    )
    cells = [
        (each, make(replace_overrides(kept, [quote_choice(text, config_groups()) for text in each])))
        for each in variants
    ]
    valid = [(overrides, cell.config) for overrides, cell in cells if cell.config is not None]
    found = []
    for (overrides, config), estimate in zip(valid, planner.estimate([config for _, config in valid]), strict=True):
        predicted = predict(estimate, memory_to_fit_mib(config)) if isinstance(estimate, Estimate) else None
        if predicted is None or predicted.verdict != DOES_NOT_FIT:
            size = config.train.micro_batch
            found.append(Candidate(overrides, overrides[:-2], size, 1, config, predicted=predicted))
    return found
