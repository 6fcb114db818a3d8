"""Tests of the rows of a report: records, labels, errors."""

from __future__ import annotations

from pathlib import Path

from distexp.report.data.metrics import SPEED
from distexp.report.data.overview import failure_notes, failure_reason, failure_reasons
from distexp.report.data.rows import load_rows, row_from_record, run_labels
from distexp.runs.record import RunRecord
from tests.helpers.records import invalid, record, write
from tests.helpers.report_sweeps import many_runs


def test_many_records_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    rows, skipped = load_rows([many_runs(tmp_path, 500)])
    assert skipped == []
    assert [row.label for row in rows] == [str(number) for number in range(500)]
    assert [row.settings["learning_rate"] for row in rows] == [(1 + number) / 1e7 for number in range(500)]
    assert [row.metrics[SPEED] for row in rows] == [100 + number * 7919 % 1000 for number in range(500)]


def test_a_record_below_two_directories_counts_once(tmp_path: Path) -> None:
    write(tmp_path / "sweep", record(0), record(1))
    rows, _ = load_rows([tmp_path, tmp_path / "sweep"])
    assert [row.label for row in rows] == ["0", "1"]


def test_labels_are_the_shortest_unique_ends_without_a_common_date() -> None:
    paths = [Path(f"/runs/{sweep}/3/record.json") for sweep in ("2026-01-01_10-00-00", "2026-01-01_11-00-00")]
    assert run_labels(paths) == ["10-00-00/3", "11-00-00/3"]
    assert run_labels(paths[:1]) == ["3"]
    same_ends = [Path("/a/x/0/record.json"), Path("/b/x/0/record.json")]
    assert run_labels(same_ends) == ["a/x/0", "b/x/0"]


def test_an_invalid_run_has_a_reason_per_error(tmp_path: Path) -> None:
    errors = ["offload=pinned needs a GPU: choose offload=true", "a | b: choose c"]
    run = invalid(0, " | ".join(errors))
    assert run.error is not None
    run.error.errors = errors
    run.write(tmp_path)
    row = row_from_record(RunRecord.read(tmp_path / "record.json"), "0")
    assert failure_reasons(row) == errors
    assert failure_reason(row) == "; ".join(errors)
    assert list(failure_notes([row])) == [f"run 0 invalid: {error}" for error in errors]
