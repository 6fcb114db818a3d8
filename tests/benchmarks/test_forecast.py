"""Tests of ``benchmarks/forecast.py``: its configurations, and the errors of a table."""

from __future__ import annotations

from benchmarks.forecast import Row, runs, table


def test_the_configurations_on_one_gpu_and_on_two_are_the_same() -> None:
    one, two = list(runs(1)), list(runs(2))
    assert len({run.name for run in one}) == 24
    assert [run.name for run in one] == [run.name for run in two]


def test_the_table_has_the_errors_and_the_share_inside_of_the_interval() -> None:
    rows = [Row("a", 100.0, 104.0, 95.0, 110.0), Row("b", 100.0, 80.0, 70.0, 90.0)]
    text = table(rows, 3)
    assert "| a | 100.0 | 104.0 | +4.0% | 95.0 to 110.0 | yes |" in text
    assert "2 of 3 configurations. Median error 12.0% (bound 5%), worst 20.0% (15%), inside 50% (90%)." in text
