"""Configurations of ``single`` for the check of the losses, if it is not among the candidates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distexp.choose.axis_keys import CHECKPOINTING, MICRO_BATCH
from distexp.choose.candidate import Candidate, Status
from distexp.choose.command_overrides import USE_SINGLE, with_overrides, without_other_strategy
from distexp.config import Config
from distexp.config.batch_sizes import depends_on_micro_batch
from distexp.launch.cell import MakeCell
from distexp.plan.estimate import Estimate
from distexp.plan.planner import Planner
from distexp.plan.verdict import DOES_NOT_FIT, memory_to_fit_mib, predict

SINGLE = (USE_SINGLE, "cluster.nodes=1", "cluster.workers_per_node=1", "kernels=reference", "offload=false")


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
    waiting = [candidate for candidate in candidates if candidate.status is Status.WAITING]
    if not waiting or any(candidate.config and candidate.config.strategy.name == "single" for candidate in waiting):
        return []
    singles = list(_valid_singles(command, make, _sizes(waiting)))
    configs = [single.config for single in singles if single.config is not None]
    return [
        single
        for single, estimate in zip(singles, planner.estimate(configs), strict=True)
        if _may_fit(single, estimate)
    ]


def _sizes(candidates: Sequence[Candidate]) -> list[tuple[int, str]]:
    """Return micro-batches, and whether to checkpoint: the fastest first, or all of a model with batch norms."""
    sizes = sorted({candidate.micro_batch for candidate in candidates}, reverse=True)
    config = candidates[0].config
    if config is not None and depends_on_micro_batch(config):
        return [(size, "false") for size in sizes]
    return list(dict.fromkeys(((sizes[0], "false"), (1, "false"), (1, "true"))))


def _valid_singles(command: Sequence[str], make: MakeCell, sizes: Sequence[tuple[int, str]]) -> Iterator[Candidate]:
    """Yield the valid configurations of ``single``.

    Args:
        command: Overrides of the command.
        make: Composes a cell.
        sizes: Micro-batches, and the value of activation checkpointing.
    """
    kept = without_other_strategy(command, SINGLE)
    for size, is_checkpointed in sizes:
        overrides = (*SINGLE, f"{MICRO_BATCH}={size}", f"{CHECKPOINTING}={is_checkpointed}")
        config = make(with_overrides(kept, overrides)).config
        if config is not None:
            yield Candidate(overrides, overrides[:-2], config.train.micro_batch, 1, config)


def _may_fit(single: Candidate, estimate: Estimate | str) -> bool:
    """Set the prediction of a configuration. Return whether it is not predicted to need too much memory."""
    config: Config | None = single.config
    if config is None or isinstance(estimate, str):
        return True
    single.estimate, single.predicted = estimate, predict(estimate, memory_to_fit_mib(config))
    return single.predicted.verdict != DOES_NOT_FIT
