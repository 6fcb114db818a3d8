"""Tests of what is as good as the winner, and which of these candidates is the simplest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distexp.choose.candidate import Candidate, Objective, Status, Trial
from distexp.choose.ranking import equal_candidates, simplest
from tests.helpers.runs import resolve_cell


def tried(name: str, *steps_s: float) -> Candidate:
    trials = tuple(
        Trial(steps, "completed", samples_per_second=64 / step_s)
        for steps, step_s in zip((5, 10, 10), steps_s, strict=False)
    )
    return Candidate((name,), (name,), 1, status=Status.TRIED, trials=trials)


def test_one_repeat_on_a_quiet_machine_does_not_make_slow_candidates_equal() -> None:
    """The trials of the winner differ by 1 %. The others are 8 and 11 % slower, and one is 2 % slower."""
    winner = tried("a=1", 1.0, 1.01)
    others = [tried("a=2", 1.02), tried("a=3", 1.08), tried("a=4", 1.11)]
    assert equal_candidates([winner, *others], winner, Objective.THROUGHPUT) == others[:1]


def test_a_busy_machine_makes_them_equal() -> None:
    winner, other = tried("a=1", 0.8, 1.2, 1.0), tried("a=2", 1.08)
    assert equal_candidates([winner, other], winner, Objective.THROUGHPUT) == [other]


TARGETS = {
    "single": "distexp.strategies.single.Single",
    "ddp": "distexp.strategies.ddp.DDP",
    "deepspeed": "distexp.strategies.deepspeed.DeepSpeed",
    "mine": "tests.helpers.incomplete.RaisingOption",
}
"""Classes of strategies. That of ``mine`` is derived from DDP."""


@pytest.mark.parametrize(("first", "second"), [("ddp", "mine"), ("single", "deepspeed")])
def test_a_custom_strategy_is_less_simple_than_those_of_distexp(first: str, second: str) -> None:
    found = []
    for name in (second, first):
        config = resolve_cell("strategy=ddp", "cluster.device=cpu")
        config.strategy = replace(config.strategy, name=name, _target_=TARGETS[name])
        found.append(Candidate((name,), (name,), 1, config=config))
    assert simplest(found).overrides == (first,)
