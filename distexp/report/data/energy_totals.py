"""Energy and cost of all runs together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distexp.report.data.checked_values import number_of
from distexp.report.data.rows import Row

TOTALS = {"kwh": "{} kWh", "gpu_hours": "{} GPU-hours", "co2e_g": "{} g CO2e", "price": "price {}"}
"""Keys of ``metrics.energy`` that are sums over runs, with their formats."""


@dataclass(frozen=True)
class EnergyTotals:
    """Sums over the runs that measured them. A key is missing if no run measured it.

    Attributes:
        measured: Number of runs with any of the values.
    """

    sums: dict[str, float]
    measured: int
    runs: int

    def texts(self) -> Iterator[str]:
        """Yield each sum with its unit, for example ``1.25 kWh``."""
        for key, value in self.sums.items():
            yield TOTALS[key].format(f"{value:,.2f}" if key == "price" else format_amount(value))


def format_amount(value: float) -> str:
    """Return a number with three significant digits, never in scientific notation."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if abs(value) >= 0.001 or not value else f"{value:.6f}"


def sum_energy(rows: Sequence[Row]) -> EnergyTotals | None:
    """Return the sums over runs of any status; None if none measured its energy or GPU-hours."""
    measured = [energy for row in rows if (energy := row.record.metrics.energy)]
    sums = {
        key: sum(values) for key in TOTALS
        if (values := [value for energy in measured if (value := number_of(energy, key)) is not None])
    }  # fmt: skip
    return EnergyTotals(sums, len(measured), len(rows)) if sums else None
