"""Tests of the runs of a sweep that a command resumes."""

from __future__ import annotations

from pathlib import Path

from distexp.runs.existing import ExistingRuns
from distexp.runs.record_sections import RunInfo
from tests.helpers.records import invalid, write


def test_runs_of_earlier_versions_match_overrides_as_they_are_typed(tmp_path: Path) -> None:
    write(tmp_path, invalid(3, "no", overrides=("offload=True", "train.betas=[0.9,True]")))
    cell = RunInfo("invalid", "name", 0, ["offload=true", "train.betas=[0.9,true]"])
    (found,) = ExistingRuns.read(tmp_path).match([cell])
    assert found is not None
    assert found.number == 3
