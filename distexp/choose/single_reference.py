"""Configurations of ``single`` for the check of the losses, if it is not among the candidates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distexp.choose.axis_keys import CHECKPOINTING, MICRO_BATCH
from distexp.choose.candidate import Candidate, Objective, Status
from distexp.choose.command_overrides import with_overrides, without_other_strategy
from distexp.choose.pruning import prune_by_plan
from distexp.config.batch_sizes import depends_on_micro_batch
from distexp.launch.cell import MakeCell
from distexp.plan.planner import Planner, parallel_processes
from distexp.strategies.base import load_strategy
from distexp.strategies.single import REFERENCE


def fitting_singles(
    candidates: Sequence[Candidate], command: Sequence[str], make: MakeCell, planner: Planner
) -> list[Candidate]:
    """Return configurations of ``single`` that may fit, the fastest first; none if a candidate of ``single`` does.

    Args:
        candidates: All candidates, after those that do not fit were pruned.
        command: Overrides of the command.
        make: Composes a cell.
        planner: Source of estimates.
    """
    waiting = [candidate for candidate in candidates if candidate.status is Status.WAITING]
    if not waiting or any(each.config and load_strategy(each.config).is_reference for each in waiting):
        return []
    singles = list(_valid_singles(waiting, command, make))
    prune_by_plan(singles, planner.estimate, Objective.THROUGHPUT, at_a_time=parallel_processes())
    # Sorting keeps the order of equal ones.
    return sorted((single for single in singles if single.status is Status.WAITING), key=lambda each: each.too_close)


def _valid_singles(candidates: Sequence[Candidate], command: Sequence[str], make: MakeCell) -> Iterator[Candidate]:
    """Yield the valid configurations of ``single`` with the micro-batches of the candidates, the fastest first."""
    kept = without_other_strategy(command, REFERENCE)
    for size, is_checkpointed in _sizes(candidates):
        family = (*REFERENCE, f"{CHECKPOINTING}={is_checkpointed}")
        overrides = (*family, f"{MICRO_BATCH}={size}")
        config = make(with_overrides(kept, overrides)).config
        if config is not None:
            yield Candidate(overrides, family, config.train.micro_batch, 1, config)


def _sizes(candidates: Sequence[Candidate]) -> list[tuple[int, str]]:
    """Return micro-batches, the largest first, and whether to checkpoint.

    A batch norm depends on the micro-batch, so its model gets those of the candidates only.
    """
    sizes = sorted({candidate.micro_batch for candidate in candidates}, reverse=True)
    config = candidates[0].config
    if config is not None and depends_on_micro_batch(config):
        return [(size, "false") for size in sizes]
    return [(size, value) for value in ("false", "true") for size in dict.fromkeys((*sizes, 1))]
