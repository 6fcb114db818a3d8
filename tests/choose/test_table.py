"""Tests of the table of a search."""

from __future__ import annotations

from rich.console import Console

from distexp.choose.candidate import Candidate, Objective, Trial
from distexp.choose.ranking import margin_between
from distexp.choose.table import result_table
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
            pruned(size, "not tried: the budget of 240 GPU-seconds (of which 10 for the check) is used up")
            for size in (6, 7)
        ),
    ]
    lines = printed([*others, *ratios]).splitlines()
    assert [line.split() for line in lines[-4:]] == [
        ["Not", "tried:", "7", "configurations"],
        ["4", *["its", "forecast", "is", "N", "times", "the", "time", "of", "the", "best"]],
        ["2", *["the", "budget", "of", "240", "GPU-seconds", "is", "used", "up"]],
        ["1", "invalid"],
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
