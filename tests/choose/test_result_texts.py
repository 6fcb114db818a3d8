"""Tests of the sentences about the result of a search."""

from __future__ import annotations

import re

import pytest

from distexp.choose.candidate import Candidate, Metrics, Objective, Status, Trial
from distexp.choose.result_texts import describe_values, winner_sentence


def tried(name: str, *trials: Trial) -> Candidate:
    return Candidate((name,), (name,), 1, status=Status.TRIED, trials=trials)


def trial(steps: int = 5, better: float = 1.0) -> Trial:
    """Return a trial that is better than another one by a factor, for each objective."""
    return Trial(
        steps,
        "completed",
        samples_per_second=100 * better,
        peak_allocated_mib=1024 / better,
        j_per_sample=1 / better,
        price_per_sample=1e-6 / better,
    )


@pytest.mark.parametrize(
    ("objective", "percent"),
    [(each, "25 %" if each is Objective.THROUGHPUT else "20 %") for each in Objective],
)
def test_a_shorter_trial_is_better_by_a_share_of_the_winner(objective: Objective, percent: str) -> None:
    """With 125 instead of 100 samples/s it is 25 % faster. With 0.8 instead of 1 J it needs 20 % less."""
    winner, shorter = tried("a=1", trial(5), trial(10)), tried("a=2", trial(5, better=1.25))
    found = winner_sentence([winner, shorter], winner, objective)
    assert found.endswith(f"but a shorter trial of a=2 was {percent} better")


@pytest.mark.parametrize(
    ("objective", "margin"),
    [(Objective.THROUGHPUT, "25 % faster than a=2 (noise unknown: no trial was repeated)"),
     (Objective.MEMORY, "20 % less memory than a=2")],
)  # fmt: skip
def test_the_memory_of_a_gpu_has_no_noise_to_be_unknown(objective: Objective, margin: str) -> None:
    winner, other = tried("a=1", trial(better=1.25)), tried("a=2", trial())
    assert winner_sentence([winner, other], winner, objective).endswith(f", {margin}")


@pytest.mark.parametrize("objective", [each for each in Objective if each is not Objective.MEMORY])
def test_the_interval_of_a_decided_margin_is_above_zero_however_large_the_noise(objective: Objective) -> None:
    """A half width would print 88 % (±114 %) for speeds that differ by more than their noise."""
    winner, other = tried("a=1", *(trial(better=factor) for factor in (2.0, 2.8, 4.2))), tried("a=2", trial())
    found = re.search(r"(\S+) % \((\S+) to (\S+) %\)", winner_sentence([winner, other], winner, objective))
    assert found is not None
    share, low, high = map(float, found.groups())
    assert 0 < low < share < high


def test_large_values_have_no_exponent() -> None:
    values = Metrics(
        samples_per_second=5.0, step_s=1.0, peak_allocated_mib=1024.0, j_per_sample=1120.4, price_per_sample=0.00111
    )
    assert describe_values(values) == "5.0 samples/s at 1.0 GiB, 1,120 J/sample, 1,110 per million samples"
