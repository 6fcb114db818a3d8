"""Candidates that are as good as the winner within the noise, and the simplest one of all."""

from __future__ import annotations

from collections.abc import Sequence

from distexp.choose.candidate import Candidate, Objective
from distexp.choose.ranking import margin_between, ranked
from distexp.config import Config

STRATEGIES = ("single", "ddp", "fsdp", "deepspeed")
"""The simplest strategy first."""


def equal_candidates(candidates: Sequence[Candidate], winner: Candidate, objective: Objective) -> list[Candidate]:
    """Return the other candidates whose difference to the winner is within the noise, the best one first."""
    margins = [
        (other, margin_between(winner, other, objective, candidates))
        for other in ranked(candidates, objective)
        if other is not winner
    ]
    return [other for other, margin in margins if margin is not None and margin.is_noise]


def simplest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the simplest of some candidates; of several, the first one."""
    return min(candidates, key=lambda candidate: _complexity(candidate.config))


def strategy_complexity(name: str) -> int:
    """Return a number that is smaller for a simpler strategy. That of a custom strategy is the largest one."""
    return STRATEGIES.index(name) if name in STRATEGIES else len(STRATEGIES)


def _complexity(config: Config | None) -> tuple[int | bool, ...]:
    """Return a key that is smaller for a simpler configuration."""
    if config is None:
        return (len(STRATEGIES),)
    strategy = config.strategy.name
    stage = config.deepspeed.zero_stage if strategy == "deepspeed" else 0
    is_fast, is_checkpointed = config.kernels.name != "reference", config.train.activation_checkpointing
    return strategy_complexity(strategy), config.offload.enabled, is_checkpointed, is_fast, stage or 0
