"""The sizes of a forecast for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from distexp.forecast.size_row import SizeRow
from distexp.forecast.table import EXPOSED


def row_to_json(row: SizeRow) -> dict[str, Any]:
    """Return a size for programs. Times are in seconds, and shares are fractions."""
    forecast, measured = row.forecast, row.measured
    nodes, workers_per_node = row.size
    low, high = row.efficiency_interval or (None, None)
    found: dict[str, Any] = {
        "nodes": nodes,
        "workers_per_node": workers_per_node,
        "step_time_s": forecast and forecast.step_time_s,
        "low_s": forecast and forecast.low_s,
        "high_s": forecast and forecast.high_s,
        "samples_per_second": row.samples_per_second,
        "efficiency": row.efficiency,
        "efficiency_low": low,
        "efficiency_high": high,
        "workers": row.workers,
        "micro_batches": forecast and forecast.target.micro_batches,
        "samples_per_step": forecast and forecast.target.samples_per_step,
        "parts_s": dict(forecast.parts) if forecast else {},
        "exposed_communication_share": row.share(EXPOSED),
        "bottleneck": row.bottleneck[0] if row.bottleneck else None,
        "bottleneck_share": row.bottleneck[1] if row.bottleneck else None,
        "times_the_measured": row.workers / row.profiled_workers if row.profiled_workers else None,
        "limit": forecast.limit if forecast else "",
        "beyond": forecast.beyond if forecast else "",
        "notes": list(forecast.notes) if forecast else [],
        "memory": asdict(row.memory) if row.memory else None,
        "j_per_step": row.power.j_per_step(forecast) if row.power and forecast else None,
        "j_per_sample": row.j_per_sample,
        "price_per_million_samples": row.price,
        "measured_step_time_s": measured and measured.measured_s,
        "error": measured and measured.relative,
    }
    return {**found, "reason": row.error} if row.error else found
