"""Energy and cost of all runs together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distexp.report.data.rows import Row
from distexp.runs.checked_values import number_of

TOTALS = {"kwh": "{} kWh", "gpu_hours": "{} GPU-hours", "co2e_g": "{} g CO2e", "price": "price {}"}
"""Keys of ``metrics.energy`` that are sums over runs, with their formats."""


def energy_totals(rows: Sequence[Row]) -> Iterator[str]:
    """Yield each sum over the runs that started, for example ``1.25 kWh``, or ``1.25 kWh (2 of 3 runs)``."""
    energies = [row.record.metrics.energy or {} for row in rows if row.record.status != "invalid"]
    for key, text in TOTALS.items():
        values = [value for energy in energies if (value := number_of(energy, key)) is not None]
        if values:
            amount = f"{sum(values):,.2f}" if key == "price" else format_amount(sum(values))
            coverage = f" ({len(values)} of {len(energies)} runs)" if len(values) < len(energies) else ""
            yield text.format(amount) + coverage


def format_amount(value: float) -> str:
    """Return a number with three significant digits, never in scientific notation."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if abs(value) >= 0.001 or not value else f"{value:.6f}"
