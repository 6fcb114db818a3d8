"""Tests of candidates and trials."""

from __future__ import annotations

import pytest

from distexp.choose.candidate import Candidate, Objective, Trial


def test_the_score_of_a_candidate_is_the_mean_of_its_completed_trials_by_steps() -> None:
    candidate = Candidate((), (), 1)
    assert candidate.score(Objective.THROUGHPUT) is None
    candidate.trials = (
        Trial(10, "completed", samples_per_second=1.0),
        Trial(30, "completed", samples_per_second=2.0),
        Trial(30, "oom_gpu", samples_per_second=9.0),
    )
    assert candidate.score(Objective.THROUGHPUT) == pytest.approx((10 * 1 + 30 * 0.5) / 40)
    assert candidate.score(Objective.ENERGY) is None


def test_the_forecast_of_energy_and_cost_counts_the_workers() -> None:
    candidate = Candidate((), (), 1, workers=4, forecast_s=2.0, expected_mib=100.0)
    assert [candidate.forecast(objective) for objective in Objective] == [2.0, 8.0, 8.0, 100.0]
