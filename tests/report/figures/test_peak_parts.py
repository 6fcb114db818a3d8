"""Tests of the figure of GPU memory by part at the peak of a step, measured and predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distexp.report.data.overview import Overview
from distexp.report.data.rows import load_rows
from distexp.report.figures.base import Figure
from distexp.report.figures.memory_figures import build_peak_parts
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Predicted
from tests.helpers.records import add_parts, record, write

PARTS = {"parameters_mib": 100.0, "gradients_mib": 50.0, "activations_mib": 300.0, "temporaries_mib": 30.0}


def peak(rank: int, phase: str, **parts: float) -> dict[str, Any]:
    merged = PARTS | parts
    return {"rank": rank, "phase": phase, **merged, "allocated_mib": sum(merged.values()), "reserve_mib": 20.0,
            "context_mib": None}  # fmt: skip


def recorded(number: int, *peaks: dict[str, Any]) -> RunRecord:
    run = add_parts(record(number, strategy=("ddp", "fsdp")[number], peak=900.0), parameters=100.0)
    run.memory["parts"] += peaks
    return run


def figure_of(path: Path, *runs: RunRecord) -> Figure | None:
    write(path, *runs)
    return build_peak_parts(Overview.from_rows(load_rows([path])[0]), [])


def bars(figure: Figure) -> dict[tuple[str, str], dict[str, float]]:
    """Return the parts of each bar, by run and kind."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in figure.panels[0].chart.to_dict(validate=False)["data"]["values"]:
        found.setdefault((row["run"], row["kind"]), {})[row["part"]] = row["mib"]
    return found


def test_the_measured_peak_is_next_to_the_predicted_one(tmp_path: Path) -> None:
    run = recorded(0, peak(0, "forward"), peak(1, "backward", gradients_mib=80.0), peak(0, "optimizer"))
    run.predicted = Predicted(
        peak_allocated_mib=500.0, peak_reserved_mib=540.0, nvidia_smi_mib=1040.0, phase="backward",
        parts={"parameters": 100.0, "activations": 330.0, "logits": 70.0},
    )  # fmt: skip
    figure = figure_of(tmp_path, run, recorded(1, peak(0, "forward")))
    assert figure is not None
    assert bars(figure) == {
        ("0", "measured"): {"parameters": 100, "gradients": 80, "activations": 300, "temporaries": 30,
                            "allocator reserve": 20},
        ("0", "predicted"): {"parameters": 100, "activations": 330, "logits": 70, "allocator reserve": 40,
                             "CUDA context": 500},
        ("1", "measured"): {"parameters": 100, "gradients": 50, "activations": 300, "temporaries": 30,
                            "allocator reserve": 20},
    }  # fmt: skip
    (table,) = figure.tables
    cells = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    assert [(row["run"], row["peak"], row["phase"], row["sum"]) for row in cells] == [
        ("0", "measured", "backward", "530"),
        ("0", "predicted", "backward", "1,040"),
        ("1", "measured", "forward", "500"),
    ]
    assert cells[1]["temporaries"] == "-"
    assert {entry.label for entry in figure.legend} == {part for parts in bars(figure).values() for part in parts}


def test_without_a_prediction_no_bar_is_pale(tmp_path: Path) -> None:
    figure = figure_of(tmp_path, recorded(0, peak(0, "forward")))
    assert figure is not None
    assert "Pale" not in figure.caption
    assert {kind for _, kind in bars(figure)} == {"measured"}


@pytest.mark.parametrize("entries", [[], [{"rank": 0, "phase": "train", "parameters_mib": 1.0}]])
def test_runs_without_a_recorded_step_have_no_figure(tmp_path: Path, entries: list[Any]) -> None:
    assert figure_of(tmp_path, recorded(0, *entries)) is None
