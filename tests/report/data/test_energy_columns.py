"""Tests of the columns about energy and cost."""

from __future__ import annotations

from typing import Any

from distexp.report.data.overview import Overview
from distexp.report.overview_table import overview_columns
from distexp.runs.record import RunRecord
from tests.helpers.records import record


def with_metrics(run: RunRecord, **metrics: Any) -> RunRecord:
    for name, value in metrics.items():
        setattr(run.metrics, name, value)
    return run


def test_columns_of_energy_and_cost_only_if_they_were_measured() -> None:
    measured = with_metrics(record(0), energy={"kwh": 0.25, "gpu_hours": 1.5, "co2e_g": 95.04, "price": 3.0})
    other = record(1, strategy="fsdp")
    cells = {
        column.one_line_title: column.cells for column in overview_columns(Overview.from_records([measured, other]))
    }
    assert cells["kWh"] == ("0.2500", "-")
    assert (cells["GPU hours"][0], cells["CO2e g"][0], cells["price"][0]) == ("1.500", "95.0", "3.00")
    plain = {column.one_line_title for column in overview_columns(Overview.from_records([record(0), other]))}
    assert plain.isdisjoint({"kWh", "GPU hours", "CO2e g", "price"})
