"""Tests of predicted memory in tables and figures of the report."""

from __future__ import annotations

import json
from pathlib import Path

from distexp.report.data.overview import Overview
from distexp.report.data.rows import load_rows
from distexp.report.figures.base import Figure
from distexp.report.figures.memory_figures import PEAK_COLORS, build_predicted_memory
from distexp.report.traces import load_traces
from distexp.runs.predictions import read_curve, read_prediction, write_prediction
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Predicted
from tests.helpers.records import record, write

CURVE = {"phase": ["forward", "forward", "backward"], "parameters": [4.0, 4.0, 4.0], "logits": [0.0, 9.0, 0.0]}


def predicted_run(number: int, *, predicted: float | None, measured: float) -> RunRecord:
    run = record(number, peak=measured + 900, overrides=(f"train.micro_batch_size={number}",))
    run.config["train"]["micro_batch_size"] = number
    run.memory["torch"] = [{"rank": 0, "peak_allocated_mib": measured, "peak_reserved_mib": measured + 100}]
    if predicted is not None:
        run.predicted = Predicted(peak_allocated_mib=predicted, peak_reserved_mib=predicted + 50, verdict="fits")
    return run


def figure_of(path: Path) -> Figure | None:
    overview = Overview.from_rows(load_rows([path])[0])
    return build_predicted_memory(overview, load_traces(overview))


def test_report_shows_predicted_next_to_measured(tmp_path: Path) -> None:
    write(tmp_path, predicted_run(1, predicted=9_900, measured=10_000), predicted_run(2, predicted=None, measured=1.0))
    write_prediction(tmp_path / "1", Predicted(peak_allocated_mib=9_900), CURVE)
    figure = figure_of(tmp_path)
    assert figure is not None
    (table,) = figure.tables
    (row,) = (dict(zip(table.header, cells, strict=True)) for cells in table.rows)
    assert (row["run"], row["predicted"], row["measured"], row["error %"]) == ("1", "9,900", "10,000", "-1.0")
    assert (row["reserved, predicted"], row["reserved, measured"]) == ("9,950", "10,100.0")
    assert figure.finding == "The predicted peaks are within 1.0% of the measured ones"
    (panel,) = figure.panels
    values = panel.chart.to_dict(validate=False)["layer"][0]["data"]["values"]
    assert [value["mib"] for value in values if value["part"] == "logits"] == [0.0, 9.0, 0.0]
    assert [entry.label for entry in figure.legend] == ["parameters", "logits"]
    assert [entry.color for entry in figure.legend] == [PEAK_COLORS["parameters"], PEAK_COLORS["logits"]], (
        "as at the peak"
    )


def test_runs_without_a_prediction_have_no_figure(tmp_path: Path) -> None:
    write(tmp_path, predicted_run(1, predicted=None, measured=10.0))
    assert figure_of(tmp_path) is None


def test_prediction_is_read_from_the_record_and_from_its_file(tmp_path: Path) -> None:
    run = predicted_run(1, predicted=5.0, measured=4.0)
    run.write(tmp_path)
    assert RunRecord.read(tmp_path / "record.json").predicted == run.predicted
    content = json.loads((tmp_path / "record.json").read_text())
    del content["predicted"]
    (tmp_path / "record.json").write_text(json.dumps(content))
    assert RunRecord.read(tmp_path / "record.json").predicted is None, "nothing was predicted"
    assert (read_prediction(tmp_path), read_curve(tmp_path)) == (None, {})
    write_prediction(tmp_path, Predicted(peak_allocated_mib=7.0), CURVE)
    assert (read_prediction(tmp_path), read_curve(tmp_path)) == (Predicted(peak_allocated_mib=7.0), CURVE)


def test_damaged_prediction_is_no_prediction(tmp_path: Path) -> None:
    for text in ("[", "[]", '{"predicted": {"verdict": 3}, "curve": {"phase": [1]}}', '{"curve": {"phase": []}}'):
        (tmp_path / "predicted.json").write_text(text)
        assert (read_prediction(tmp_path), dict(read_curve(tmp_path)).get("parameters")) == (None, None)
