"""Attempts of a run that torchrun repeats by hand."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from distexp.launch.outcome import start_attempt
from distexp.runs.attempts import NO_RECORD, earlier_records, record_attempt_end, register_manual_attempt
from distexp.runs.record import RunRecord, RunSpec
from distexp.runs.run_dir import ARCHIVED_RECORD, ATTEMPTS, HEARTBEAT, RECORD, STOP_REQUEST
from tests.helpers.runs import make_spec


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run directory in which a launcher started an attempt."""
    start_attempt(make_spec("strategy=single", "cluster.device=cpu"), tmp_path)
    return tmp_path


def reasons(run_dir: Path) -> list[str | None]:
    """Register a manual attempt; return the reasons of all attempts."""
    run = RunSpec.read(run_dir).run
    register_manual_attempt(run, run_dir)
    return [attempt["reason"] for attempt in run.attempts]


def test_a_copy_of_a_spec_has_no_earlier_attempt(run_dir: Path) -> None:
    assert reasons(run_dir) == [None]


def test_an_attempt_that_trained_here_ended_without_a_record(run_dir: Path) -> None:
    (run_dir / HEARTBEAT).touch()
    assert reasons(run_dir) == [NO_RECORD, None]


def test_the_attempts_of_the_record_are_kept_and_a_stop_request_is_dropped(run_dir: Path) -> None:
    spec = RunSpec.read(run_dir)
    record = RunRecord("preempted", replace(spec.run), asdict(spec.config))
    record_attempt_end(record)
    record.write(run_dir)
    (run_dir / STOP_REQUEST).write_text("{}")
    assert reasons(run_dir) == ["preempted", None]
    assert not (run_dir / STOP_REQUEST).exists()


def test_earlier_records_are_in_the_order_of_their_numbers(run_dir: Path) -> None:
    spec = RunSpec.read(run_dir)
    for number in (0, 2, 10):
        folder = run_dir / ATTEMPTS / str(number)
        folder.mkdir(parents=True)
        RunRecord("failed", replace(spec.run, number=number), asdict(spec.config)).write(folder)
        (folder / RECORD).rename(folder / ARCHIVED_RECORD)
    assert [record.run.number for record in earlier_records(run_dir)] == [0, 2, 10]
