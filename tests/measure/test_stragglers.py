"""Tests of the comparison of ranks, with hand-written times and with a real straggler."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from distexp.measure.stragglers import RankTimes, find_stragglers, step_times
from distexp.runs.record import RunRecord
from tests.helpers.runs import run_distexp
from tests.helpers.slow_rank import SLOW_RANK

QUANTILES = {"p50": 0.1, "p90": 0.12, "max": 0.2}


def rank_times(rank: int, own_s: Sequence[float], data_wait_s: float = 0.0) -> RankTimes:
    return RankTimes(rank, QUANTILES, own_s, [data_wait_s] * len(own_s), host=f"host{rank}")


def noisy(mean_s: float, seed: int, *, noise_s: float = 0.01, steps: int = 40) -> list[float]:
    """Return own times with the noise of a busy machine."""
    generator = random.Random(seed)
    return [mean_s + generator.gauss(0, noise_s) for _ in range(steps)]


@pytest.mark.parametrize("seed", range(20))
def test_a_straggler_of_20_ms_is_named_and_no_other_rank(seed: int) -> None:
    """A step of 50 ms has a noise of 20 ms, which is that of a machine with much else to do."""
    own = [noisy(0.07 if rank == 1 else 0.05, 10 * seed + rank, noise_s=0.02) for rank in range(4)]
    found = find_stragglers([rank_times(rank, each) for rank, each in enumerate(own)])
    assert found is not None
    assert [(entry["rank"], entry["host"]) for entry in found] == [(1, "host1")]
    assert found[0]["slower_by_pct"] == pytest.approx(40, abs=20)


@pytest.mark.parametrize("seed", range(20))
def test_equal_ranks_have_no_straggler(seed: int) -> None:
    ranks = [rank_times(rank, noisy(0.05, 10 * seed + rank, noise_s=0.005)) for rank in range(4)]
    assert find_stragglers(ranks) == []


def test_a_small_or_rare_difference_is_no_straggler() -> None:
    usual = rank_times(0, [0.1] * 20)
    assert find_stragglers([usual, rank_times(1, [0.104] * 20)]) == [], "4 percent"
    assert find_stragglers([usual, rank_times(1, [0.1] * 14 + [0.5] * 6)]) == [], "six slow steps"
    assert find_stragglers([rank_times(0, [0.004] * 20), rank_times(1, [0.0045] * 20)]) == [], "half a millisecond"


def test_waiting_for_data_is_named_as_the_cause() -> None:
    found = find_stragglers([rank_times(0, [0.05] * 9), rank_times(1, [0.09] * 9, data_wait_s=0.04)])
    assert found is not None
    assert found[0]["evidence"] == (
        "its own time is 90.0 ms a step, that of the others 50.0 ms; it waits 40.0 ms for its data, the others 0.0 ms"
    )


def test_too_few_steps_or_one_rank_cannot_be_compared() -> None:
    assert find_stragglers([rank_times(0, [0.05] * 7), rank_times(1, [0.5] * 7)]) is None
    assert find_stragglers([rank_times(0, [0.05] * 20)]) is None


def test_step_times_of_each_rank() -> None:
    assert step_times([rank_times(0, [0.02, 0.03, 0.05]), rank_times(1, [])]) == [
        {"rank": 0, "p50_s": 0.1, "p90_s": 0.12, "max_s": 0.2, "own_ms": pytest.approx(30)},
        {"rank": 1, "p50_s": 0.1, "p90_s": 0.12, "max_s": 0.2, "own_ms": None},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("options", [["strategy=ddp"], ["strategy=fsdp"], ["zero_stage=2"], ["engine=hf_trainer"]])
def test_an_injected_straggler_is_named(options: list[str], tmp_path: Path) -> None:
    """One of three real processes sleeps 20 ms in each step."""
    done = run_distexp(
        *options,
        "model._target_=tests.helpers.slow_rank.build",
        "trusted_packages=[tests]",
        "cluster.workers_per_node=3",
        "train.max_steps=120",
        "train.gradient_accumulation_steps=1",
        "train.eval_batch_size=64",
        f"hydra.run.dir={tmp_path / 'run'}",
    )
    assert done.returncode == 0, done.stderr
    metrics = RunRecord.read(tmp_path / "run" / "record.json").metrics
    assert metrics.stragglers is not None
    assert [entry["rank"] for entry in metrics.stragglers][:1] == [SLOW_RANK], metrics.step_times_by_rank
    assert metrics.step_times_by_rank is not None
    own_ms = [entry["own_ms"] for entry in metrics.step_times_by_rank]
    assert own_ms[SLOW_RANK] > 1000 * 0.02
    assert "slow ranks" in done.stdout


def test_ranks_without_own_time_can_be_compared() -> None:
    """Rank 0 only waits, so no percentage is known."""
    found = find_stragglers([rank_times(0, [0.0] * 9), rank_times(1, [0.0] * 9), rank_times(2, [0.01] * 9)])
    assert found is not None
    assert [(entry["rank"], entry["slower_by_pct"]) for entry in found] == [(2, None)]
