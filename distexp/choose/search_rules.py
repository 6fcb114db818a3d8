"""The numbers that decide how thorough a search is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distexp.statistics.expected_gain import UsualErrors


@dataclass(frozen=True)
class SearchRules(UsualErrors):
    """Numbers that decide how thorough a search is, and the usual errors of its forecasts.

    Attributes:
        steps: Measured steps of a first trial.
        growth: Factor of the steps of a repeat, compared with those of a first trial.
        wave: Families that are tried together, before the forecasts are scaled again. The first one is tried alone.
        families: Families whose neighbors are tried.
        near: Most that a family's score may exceed the best one if its neighbors are tried, relative to it.
        neighbor_forecast: Most that the expected score of a larger neighbor may exceed the best one, by the forecasts.
        neighbor_certain: The same if other families have measured its micro-batch. A smaller neighbor must be
            expected to be as good as the best one.
        worthwhile: Least gain for which a candidate is tried that probably does not fit.
        neighbor_rounds: Most rounds of neighbors.
        repeats: Most rounds of repeats. A round repeats one or two candidates.
        negligible: Gain that the repeats may give up: they end if no candidate can be better by more than this, at the
            end of the 95 % confidence interval.
        usual_noise: Standard deviation of the score of a first trial on a quiet GPU, relative to it.
        usual_trials: Weight of the usual noise: degrees of freedom that it has next to the repeated trials.
        same_kernels: Most that the scaled forecast of a family may exceed the best score, if a family that differs only
            in checkpointing was tried.
        least_gain: Least expected improvement for which a family is tried, relative to the best score. Jones et al.,
            Efficient Global Optimization of Expensive Black-Box Functions, 1998, end at 1 % too.
        gain_of_sweep: The same, for a trial of all candidates together: in a large space, each of them costs a smaller
            part of an exhaustive sweep, so a smaller improvement is worth it.
        contradiction: Factor by which a first trial must be worse than its scaled forecast to be repeated.
        disturbed: Factor by which it must then be worse than its repeat to be left out of the mean.
    """

    steps: int = 5
    growth: int = 2
    wave: int = 1
    families: int = 4
    near: float = 0.25
    neighbor_forecast: float = 0.15
    neighbor_certain: float = 0.05
    worthwhile: float = 0.05
    neighbor_rounds: int = 4
    repeats: int = 12
    negligible: float = 0.04
    usual_noise: float = 0.02
    usual_trials: int = 3
    same_kernels: float = 0.2
    least_gain: float = 0.01
    gain_of_sweep: float = 0.25
    contradiction: float = 4.0
    disturbed: float = 2.0


DEFAULT_RULES = SearchRules()

SLURM_WAVE = 4
"""Families that are tried together on Slurm: trials run at the same time, and may wait in a queue."""

CPU_ERROR, CPU_ERROR_TRIALS = 0.4, 2
"""Usual error of the forecasts on CPUs, and its weight. Their scale is unknown: they are for a GPU."""


def rules_for(*, on_cpus: bool = False, on_slurm: bool = False) -> SearchRules:
    """Return the rules of a search on CPUs or GPUs, on Slurm or on this machine."""
    rules = replace(DEFAULT_RULES, wave=SLURM_WAVE) if on_slurm else DEFAULT_RULES
    if not on_cpus:
        return rules
    return replace(rules, usual_error=CPU_ERROR, usual_error_trials=CPU_ERROR_TRIALS, usual_scale_trials=0)
