"""Tests of the report on the trials of a search."""

from __future__ import annotations

from distexp.report.data.overview import Overview
from distexp.report.overview_table import summarize
from distexp.runs.record import RunRecord
from tests.helpers.records import record


def summary(*records: RunRecord) -> str:
    """Return the sentences below the table of some runs."""
    return " ".join(summarize(Overview.from_records(list(records))))


def test_short_trials_have_no_ranking() -> None:
    runs = [record(0, peak=2000.0), record(1, strategy="fsdp", speed=50.0, peak=1000.0)]
    assert "Fastest" in summary(*runs)
    for number, run in enumerate(runs):
        run.config["command"] = "choose"
        run.metrics.total_steps = 8 + 5 * number
    found = summary(*runs)
    assert "These are trials of distexp choose with 8 to 13 steps each. Their speeds are rough." in found
    assert "Fastest" not in found
    assert "Lowest" not in found
    assert "choose.json" in found
