"""Tests of the table of a search."""

from __future__ import annotations

import pytest
from rich.console import Console

from distexp.choose.candidate import Candidate, Objective, Status, Trial
from distexp.choose.loss_check import LossCheck
from distexp.choose.ranking import margin_between
from distexp.choose.result_texts import faster_reference
from distexp.choose.search_output import result_table
from tests.helpers.planning import composed


def printed(candidates: list[Candidate]) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        for part in result_table(candidates, Objective.THROUGHPUT, None):
            console.print(part)
    return capture.get()


def pruned(micro_batch: int, reason: str) -> Candidate:
    found = Candidate(("strategy=ddp", f"train.micro_batch_size={micro_batch}"), ("strategy=ddp",), micro_batch, 2)
    found.prune(reason)
    return found


def test_reasons_of_candidates_without_a_trial_are_not_repeated() -> None:
    waiting = pruned(2, "not tried: micro-batch 4 of this family is measured or forecast to be better")
    text = printed([waiting])
    assert "Not tried: 1 configuration\n" in text
    assert text.count("not tried") == 1, "the title of the column"
    assert "micro-batch 4 of this family is measured or forecast to be better" in text


def test_reasons_with_different_names_are_counted_apart() -> None:
    memory = [f"micro-batch 8 needs more than {size}, which ran out of memory" for size in (2, 4)]
    names = ["needs more memory than ZeRO-2", "needs more memory than ZeRO-3", "the same as zero_stage=2"]
    lines = printed([pruned(8, reason) for reason in (*memory, *names, names[0], "other")]).splitlines()
    assert [line.strip() for line in lines[-5:]] == [
        "2  micro-batch N needs more than N, which ran out of memory",
        "2  needs more memory than ZeRO-2",
        "1  needs more memory than ZeRO-3",
        "1  the same as zero_stage=2",
        "1  other",
    ]


def test_many_candidates_without_a_trial_are_counted_by_reason() -> None:
    ratios = [pruned(size, f"not tried: its forecast is 1.{size} times the time of the best") for size in range(1, 5)]
    others = [
        pruned(5, "invalid: no multiple"),
        *(
            pruned(size, "not tried: the budget of 240 GPU-seconds (of which 10 for the check) allows no further trial")
            for size in (6, 7)
        ),
    ]
    lines = printed([*others, *ratios]).splitlines()
    assert [line.split() for line in lines[-4:]] == [
        ["Not", "tried:", "7", "configurations"],
        ["4", *["its", "forecast", "is", "N", "times", "the", "time", "of", "the", "best"]],
        ["2", *["the", "budget", "of", "240", "GPU-seconds", "allows", "no", "further", "trial"]],
        ["1", "no", "multiple"],
    ]


def test_memory_on_cpus_has_the_noise_of_the_report() -> None:
    with composed(["cluster.device=cpu"]) as (cells, _):
        config = cells[0].config
    first, near, far = (
        Candidate((), (), 8, 2, config, trials=(Trial(5, "completed", peak_allocated_mib=peak),))
        for peak in (500.0, 650.0, 900.0)
    )
    margins = [margin_between(first, other, Objective.MEMORY) for other in (near, far)]
    assert [margin is not None and margin.is_noise for margin in margins] == [True, False]


def candidate_on_cpus(*speeds: float) -> Candidate:
    """Return a candidate with a trial of each speed."""
    with composed(["cluster.device=cpu"]) as (cells, _):
        config = cells[0].config
    trials = tuple(Trial(5, "completed", samples_per_second=speed) for speed in speeds)
    return Candidate((), (), 8, 2, config, status=Status.TRIED, trials=trials)


@pytest.mark.parametrize(
    ("speeds", "others", "is_noise"),
    [
        ((100.0,), (60.0,), True),
        ((100.0,), (50.0,), False),
        ((100.0, 101.0), (60.0,), True),
        ((100.0, 101.0), (60.0, 61.0), False),
    ],
)
def test_a_speed_on_cpus_that_was_measured_once_has_the_noise_of_the_report(
    speeds: tuple[float, ...], others: tuple[float, ...], is_noise: bool
) -> None:
    margin = margin_between(candidate_on_cpus(*speeds), candidate_on_cpus(*others), Objective.THROUGHPUT)
    assert margin is not None
    assert margin.is_noise == is_noise


@pytest.mark.parametrize(("speed", "is_named"), [(None, False), (120.0, False), (200.0, True)])
def test_a_reference_outside_of_the_search_that_was_faster_is_named(speed: float | None, is_named: bool) -> None:
    winner = candidate_on_cpus(100.0)
    hint = faster_reference(LossCheck("single, micro-batch 8 x 2", outside_speed=speed), winner, [winner])
    expected = "one worker was faster: single, micro-batch 8 x 2 had 200.0 samples/s in one trial, for the losses."
    assert hint == (f"{expected} To let it take part, set choose.gpus=1,2" if is_named else "")
