"""Tests of the table of a sweep's runs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from distexp.console.sweep_table import Row, count_states, hidden_lines, states_table, truncated_reasons
from distexp.runs.record_sections import RunError
from distexp.runs.run_state import RunState
from tests.helpers.records import record

LONG = "the value of the option is far too large for this machine and this model"


def failed(number: int, message: str) -> RunState:
    """Return the state of a run that failed with a message."""
    run = record(number)
    run.status, run.error = "failed", RunError("ValueError", message)
    return RunState.from_record(number, Path(str(number)), None, run)


def draw(rows: list[Row], width: int) -> list[str]:
    """Return the lines of the table."""
    shown = io.StringIO()
    Console(file=shown, width=width, color_system=None).print(states_table(rows, width))
    return shown.getvalue().splitlines()


def test_the_table_truncates_overrides_on_the_left() -> None:
    runs = [RunState(0, Path("0"), "7_0", "pending", "Priority"), failed(1, "bad value")]
    rows = [Row(run, f"strategy=fsdp train.seed={run.number + 1}") for run in runs]
    header, first, second = draw(rows, 75)
    assert header.split() == ["run", "job", "state", "overrides", "detail"]
    assert first.split() == ["0", "7_0", "pending", "…rategy=fsdp", "train.seed=1", "Priority"]
    assert second.split()[:4] == ["1", "failed", "…rategy=fsdp", "train.seed=2"]


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_table_has_whole_columns_and_lists_below_what_it_hides(width: int) -> None:
    done = record(1, status="completed", speed=1234.5)
    runs = [RunState(0, Path("0"), "7_0", "pending", "Priority"), RunState.from_record(1, Path("1"), "7_1", done)]
    rows = [Row(run, f"strategy=fsdp train.seed={run.number + 1}") for run in runs]
    header, first, second = draw(rows, width)
    assert max(map(len, (header, first, second))) <= width
    assert first.split()[:1] == ["0"]
    assert second.split()[:1] == ["1"]
    shown = [line.split(": ", 1) for line in hidden_lines(rows, width)]
    assert [number for number, _ in shown] == ["run 0", "run 1"]
    for row, (_, text) in zip(rows, shown, strict=True):
        assert row.overrides in text
        assert (f"job {row.run.job}" in text) == ("job" not in header)
    assert "1,234.5 samples/s" in f"{second} {shown[1][1]}"
    assert list(hidden_lines(rows, 160)) == []


def test_a_truncated_reason_is_printed_once_with_all_its_runs() -> None:
    rows = [*(Row(failed(number, LONG)) for number in (0, 1, 2, 5)), Row(failed(6, "bad value"))]
    assert truncated_reasons(rows, 60) == [f"runs 0-2, 5 failed: ValueError: {LONG}"]
    assert truncated_reasons(rows, 160) == []


def test_states_are_counted() -> None:
    runs = [failed(0, "a"), failed(1, "b"), RunState(2, Path("2"), None, "running")]
    assert count_states(runs) == "2 failed, 1 running"
