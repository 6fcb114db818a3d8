"""``benchmarks/plan.py``: the cells, and the tables of errors and verdicts."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan import CELLS, FIGURES, PREDICTED, compare, main, predict_cells, read_cells, result_path, run

TEXT = "text model=gpt strategy=single train.micro_batch_size=2"


def write(folder: Path, limit: int | None, **found: Any) -> None:
    content = {"peak_reserved_mib": None, "nvidia_smi_mib": None, "host_peak_mib": None, **found}
    result_path(folder, TEXT, limit).write_text(json.dumps(content))


def test_each_cell_has_its_own_arguments(tmp_path: Path) -> None:
    cells = read_cells(CELLS, tmp_path)
    assert len({cell.text for cell in cells}) == len(cells)
    assert {cell.gpus for cell in cells} == {1, 2}
    for cell in cells:
        keys = [argument.partition("=")[0] for argument in cell.arguments]
        assert len(set(keys)) == len(keys)


def test_predictions_are_those_of_the_cells(tmp_path: Path) -> None:
    assert set(json.loads(PREDICTED.read_text())["cells"]) <= {cell.text for cell in read_cells(CELLS, tmp_path)}


def test_the_tables_have_errors_and_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predicted = {
        TEXT: {
            "peak_allocated_mib": 1020.0, "peak_reserved_mib": 1100.0, "nvidia_smi_mib": 1500.0,
            "host_peak_mib": 4000.0, "required_mib": 1400.0, "limits_mib": [1500, 1430, 1300],
        }
    }  # fmt: skip
    write(tmp_path, None, status="completed", peak_allocated_mib=1000.0)
    write(tmp_path, 1500, status="completed")
    write(tmp_path, 1300, status="oom_gpu")
    compare(predicted, tmp_path)
    shown = capsys.readouterr().out
    assert f"| {TEXT} | 1,000 | 1,020 | +2.0% |" in shown
    assert "peak_allocated_mib: median error 2.0%, worst 2.0%, 1 runs" in shown
    assert f"| {TEXT} | 1,500 | 1,400 | fits | completed |" in shown
    assert f"| {TEXT} | 1,300 | 1,400 | does not fit | oom_gpu |" in shown
    assert f"| {TEXT} | 1,430 | 1,400 | not certain | not run |" in shown


def test_without_results_the_tables_state_that_nothing_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", "--results", str(tmp_path / "none" / "yet"), "--only", "resnet50"])
    assert "| not run |" in capsys.readouterr().out
    assert (tmp_path / "none" / "yet" / "table.md").exists()


def completed(output: str = "") -> Any:
    return subprocess.CompletedProcess([], 0, stdout=output)


def test_the_limits_are_shares_of_the_predicted_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = next(cell for cell in read_cells(CELLS, tmp_path) if cell.limits)
    figures = dict.fromkeys(FIGURES, 1000.0)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: completed(json.dumps([{**figures, "seconds": 1.0}])))
    predict_cells([cell], tmp_path / "predicted.json")
    written = json.loads((tmp_path / "predicted.json").read_text())["cells"][cell.text]
    assert written["limits_mib"] == [1070, 930], "fits and does not fit"


def test_a_run_that_was_stopped_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder would make distexp refuse the second run."""
    (cell, *_) = read_cells(CELLS, tmp_path)
    target = result_path(tmp_path / "results", cell.text, None)
    record = target.with_suffix("") / "record.json"
    found = []

    def train(*arguments: Any, **options: Any) -> Any:
        found.append(record.exists())
        record.parent.mkdir(parents=True)
        record.write_text(json.dumps({"status": "running" if len(found) == 1 else "completed"}))
        if len(found) == 1:
            raise subprocess.TimeoutExpired([], 1.0)
        return completed()

    monkeypatch.setattr(subprocess, "run", train)
    options = argparse.Namespace(results=tmp_path / "results", timeout_s=1.0)
    for _ in range(2):
        run(cell, None, "0", float("inf"), options)
    assert (found, json.loads(target.read_text())["status"]) == ([False, False], "completed")
