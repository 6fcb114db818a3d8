"""Tests of the time that a thread waits for a core."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distexp.measure.slow_rank_watch import SCHEDSTAT, SchedulerDelay


def test_the_file_of_the_scheduler_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "schedstat"
    path.write_text("5000000000 2000000000 7")
    delay = SchedulerDelay(str(path))
    assert delay.read_s() == 2.0
    path.write_text("6000000000 3500000000 9")
    monkeypatch.setattr(os, "open", None)
    assert delay.read_s() == 3.5


@pytest.mark.parametrize("content", [None, "0 0 0", "", "1 x 2"])
def test_a_kernel_that_does_not_count_is_noted_once(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schedstat"
    if content is not None:
        path.write_text(content)
    delay = SchedulerDelay(str(path))
    assert [delay.read_s(), delay.read_s()] == [0.0, 0.0]
    assert capsys.readouterr().out.count(f"note: {path} has no times (") == 1


def test_the_kernel_counts_the_time_without_a_core() -> None:
    """The value lies between two others that are read in another way."""
    file = Path(SCHEDSTAT)
    if not file.is_file() or file.read_text().split() == ["0"] * 3:
        pytest.skip("this kernel does not count it")
    before = int(file.read_text().split()[1]) / 1e9
    found = SchedulerDelay().read_s()
    assert before <= found <= int(file.read_text().split()[1]) / 1e9
