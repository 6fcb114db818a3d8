"""Tests of the table of a search."""

from __future__ import annotations

from rich.console import Console

from distexp.choose.candidate import Candidate, Objective
from distexp.choose.table import result_table


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
    waiting = pruned(2, "not tried: micro-batch 4 is measured or forecast to be better")
    text = printed([waiting])
    assert "Not tried: 1 configuration\n" in text
    assert text.count("not tried") == 1, "the title of the column"
    assert "micro-batch 4 is measured or forecast to be better" in text
    assert "2 configurations: 1 not tried, 1 invalid" in printed([waiting, pruned(3, "invalid: no multiple")])
