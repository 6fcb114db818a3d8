"""Graceful-stop requests: which ones the poller of rank 0 obeys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distexp.runs import run_state
from distexp.runs.attempts import register_attempt, register_manual_attempt
from distexp.runs.run_dir import STOP_REQUEST
from distexp.runs.run_state import StopRequest, request_stop
from tests.helpers.runs import make_spec


def test_a_request_is_received_once_and_for_all(tmp_path: Path) -> None:
    poller = StopRequest(tmp_path, enabled=True)
    request_stop(tmp_path, "time_limit")
    assert poller()
    assert poller.reason() == "time_limit"
    (tmp_path / STOP_REQUEST).unlink()
    assert poller()
    assert poller.reason() == "unknown"


def test_a_disabled_poller_receives_nothing(tmp_path: Path) -> None:
    poller = StopRequest(tmp_path, enabled=False)
    request_stop(tmp_path, "time_limit")
    assert not poller()


def test_a_request_from_before_the_workers_start_counts(tmp_path: Path) -> None:
    """Before they start, operators may be built for minutes."""
    (tmp_path / STOP_REQUEST).write_text(json.dumps({"unix_time_s": 1.0, "reason": "preemption"}))
    assert StopRequest(tmp_path, enabled=True)()


def test_a_request_for_an_earlier_attempt_is_ignored(tmp_path: Path) -> None:
    spec = make_spec("strategy=single")
    for register in (
        lambda: register_attempt(spec.run, tmp_path, None, ["a"]),
        lambda: register_manual_attempt(spec.run, tmp_path),
    ):
        request_stop(tmp_path, "preemption")
        register()
        assert not StopRequest(tmp_path, enabled=True)()


def test_the_file_is_polled_at_most_once_in_an_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "POLL_S", 3600.0)
    poller = StopRequest(tmp_path, enabled=True)
    assert not poller()
    request_stop(tmp_path, "time_limit")
    assert not poller()
