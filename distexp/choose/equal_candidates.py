"""Candidates that are as good as the winner within the noise, and the simplest one of all."""

from __future__ import annotations

from collections.abc import Sequence

from distexp.choose.candidate import Candidate, Objective
from distexp.choose.ranking import margin_between, ranked
from distexp.config import Config
from distexp.strategies.base import load_strategy
from distexp.strategies.step_traits import CUSTOM_COMPLEXITY


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


def _complexity(config: Config | None) -> tuple[int | bool, ...]:
    """Return a key that is smaller for a simpler configuration."""
    if config is None:
        return (CUSTOM_COMPLEXITY,)
    strategy = load_strategy(config)
    is_fast, is_checkpointed = config.kernels.name != "reference", config.train.activation_checkpointing
    option = strategy.option_complexity(config)
    return strategy.own_complexity(), config.offload.enabled, is_checkpointed, is_fast, option
