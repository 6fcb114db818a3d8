"""``benchmarks/plan.py``: the cells, and the tables of errors and verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan import PREDICTED, compare, read_cells, result_path

TEXT = "text model=gpt strategy=single train.micro_batch_size=2"


def write(folder: Path, limit: int | None, **found: Any) -> None:
    content = {"peak_reserved_mib": None, "nvidia_smi_mib": None, "host_peak_mib": None, **found}
    result_path(folder, TEXT, limit).write_text(json.dumps(content))


def test_each_cell_has_its_own_arguments(tmp_path: Path) -> None:
    cells = read_cells(tmp_path)
    assert len({cell.text for cell in cells}) == len(cells)
    assert {cell.gpus for cell in cells} == {1, 2}
    for cell in cells:
        keys = [argument.partition("=")[0] for argument in cell.arguments]
        assert len(set(keys)) == len(keys)


def test_predictions_are_those_of_the_cells(tmp_path: Path) -> None:
    assert set(json.loads(PREDICTED.read_text())["cells"]) <= {cell.text for cell in read_cells(tmp_path)}


def test_the_tables_have_errors_and_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predicted = {
        TEXT: {
            "peak_allocated_mib": 1020.0, "peak_reserved_mib": 1100.0, "nvidia_smi_mib": 1500.0,
            "host_peak_mib": 4000.0, "required_mib": 1400.0, "limits_mib": [1500, 1300],
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
