"""Expected improvements: by hand, from known trials, and which candidates near the memory limit are tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distexp.choose.candidate import DEFAULT_RULES, Candidate, Objective, Status, Trial, rules_for
from distexp.choose.policy import Policy, probably_fits
from distexp.runs.record_sections import Predicted
from distexp.statistics.noise import expected_gain

NO_PRIOR = replace(DEFAULT_RULES, usual_error=0.0, usual_error_trials=0, usual_scale_trials=0)


def test_of_two_equal_scores_the_gain_is_the_error_times_the_density_at_zero() -> None:
    # Scales 0.5 and 2: mean of the logarithms 0, deviation sqrt(2) log(2), times sqrt(1 + 1/2) for the next one.
    gain = expected_gain(1.0, 1.0, [0.5, 2.0], 1.0, NO_PRIOR)
    assert gain == pytest.approx(2**0.5 * 0.693147 * 1.5**0.5 * 0.398942, rel=1e-4)


def test_the_usual_error_decides_before_the_measured_one() -> None:
    one, many = [1.1], [1.1] * 8
    assert expected_gain(1.0, 1.0, one, 1.0, DEFAULT_RULES) > 2 * expected_gain(1.0, 1.0, many, 1.0, DEFAULT_RULES)
    assert expected_gain(2.0, 1.0, many, 1.0, DEFAULT_RULES) < 1e-6


def test_the_first_scale_of_a_gpu_counts_half() -> None:
    """The first candidate has the best forecast, which is often too good. So the others are not scaled by all of it.

    A scale of 2 counts as the square root of 2. So a forecast of that inverse is expected to equal the best score.
    """
    rules = replace(rules_for(), usual_error=1.0, usual_error_trials=10_000)
    equal = expected_gain(0.5**0.5, 1.0, [2.0], 1.0, rules)
    assert equal == pytest.approx(1.5**0.5 * 0.398942, rel=1e-3)


def test_the_first_trial_on_cpus_does_not_lower_the_usual_error() -> None:
    """The scale is unknown there. So one trial shows nothing of the error."""
    rules = rules_for(on_cpus=True)
    gain = expected_gain(1.0, 1.0, [1.0], 1.0, rules)
    assert gain == pytest.approx(rules.usual_error * 2**0.5 * 0.398942, rel=1e-4)


def test_the_exact_scale_is_the_score_of_a_second() -> None:
    trial = Trial(5, "completed", step_s=0.5, samples_per_second=128.0, peak_allocated_mib=10.0, j_per_sample=4.0)
    tried = Candidate(("a=1",), ("a=1",), 1, workers=2, status=Status.TRIED, trials=(trial,))
    assert Policy([tried], Objective.THROUGHPUT, DEFAULT_RULES).exact_scale() == pytest.approx(1 / 128 / 0.5)
    assert Policy([tried], Objective.ENERGY, DEFAULT_RULES).exact_scale() == pytest.approx(4.0 / (0.5 * 2))
    assert Policy([tried], Objective.MEMORY, DEFAULT_RULES).exact_scale() == 1.0
    assert Policy([], Objective.THROUGHPUT, DEFAULT_RULES).exact_scale() is None


def test_without_step_times_the_forecasts_are_scaled_by_the_trials() -> None:
    known = expected_gain(1.0, 0.02, [0.02, 0.021], exact=0.02, usual=DEFAULT_RULES)
    assert expected_gain(1.0, 0.02, [0.02, 0.021], exact=None, usual=DEFAULT_RULES) == pytest.approx(known, rel=0.2)


def test_a_trial_of_a_large_space_is_worth_a_smaller_gain() -> None:
    def space(size: int) -> list[Candidate]:
        return [Candidate((f"a={number}",), ("a",), number) for number in range(size)]

    assert Policy(space(10), Objective.THROUGHPUT, DEFAULT_RULES).least_gain() == DEFAULT_RULES.least_gain
    assert Policy(space(100), Objective.THROUGHPUT, DEFAULT_RULES).least_gain() == pytest.approx(
        DEFAULT_RULES.gain_of_sweep / 100
    )
    pruned = space(100)
    for candidate in pruned[10:]:
        candidate.prune("does not fit")
    assert Policy(pruned, Objective.THROUGHPUT, DEFAULT_RULES).least_gain() == DEFAULT_RULES.least_gain


def test_an_energy_of_zero_is_not_measured() -> None:
    """The counter of a short run may not advance. Its logarithm would end the search."""
    trial = Trial(5, "completed", step_s=0.5, samples_per_second=128.0, j_per_sample=0.0, price_per_sample=0.0)
    assert trial.score(Objective.ENERGY) is None
    assert trial.score(Objective.COST) is None


def test_memory_of_the_host_does_not_show_that_of_a_gpu() -> None:
    assert probably_fits(near_the_limit(990.0), [near_the_limit(400.0, "oom_host")])
    assert not probably_fits(near_the_limit(990.0), [near_the_limit(400.0, "oom_gpu")])


def near_the_limit(required_mib: float, *statuses: str) -> Candidate:
    """Return a candidate of a GPU with 1,000 MiB, and its trials."""
    found = Candidate((f"a={required_mib}",), ("a",), 1, too_close=True)
    found.predicted = Predicted(required_mib=required_mib, gpu_memory_mib=1_000.0)
    found.trials = tuple(Trial(5, status) for status in statuses)
    return found


def test_a_candidate_near_the_limit_probably_fits_by_prediction_or_by_a_trial_that_needs_as_much() -> None:
    assert probably_fits(near_the_limit(990.0), [])
    assert not probably_fits(near_the_limit(1_010.0), [])
    assert probably_fits(near_the_limit(1_010.0), [near_the_limit(1_020.0, "completed")])
    assert not probably_fits(near_the_limit(1_010.0), [near_the_limit(1_005.0, "completed")])
    assert not probably_fits(near_the_limit(990.0), [near_the_limit(980.0, "oom_gpu")])
    assert not probably_fits(replace(near_the_limit(990.0), predicted=None), [])
