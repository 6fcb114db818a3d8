"""Energy and cost of all runs together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distexp.report.data.rows import Row
from distexp.runs.attempts import earlier_records
from distexp.runs.entry_values import number_of
from distexp.system.units import format_amount, format_kwh

TOTALS: dict[str, Callable[[float], str]] = {
    "kwh": format_kwh,
    "gpu_hours": lambda value: f"{format_amount(value)} GPU-hours",
    "co2e_g": lambda value: f"{format_amount(value)} g CO2e",
    "price": lambda value: f"price {value:,.2f}",
}
"""Keys of ``metrics.energy`` that are sums over runs, with their formats."""


def energy_totals(rows: Sequence[Row]) -> Iterator[str]:
    """Yield each sum over the runs that started, for example ``1.25 kWh``, or ``1.25 kWh (2 of 3 runs)``.

    Earlier attempts of a run count too. If there are any, the sums are ``1.25 kWh (4 attempts)`` or ``(3 of 4
    attempts)``.
    """
    attempts = [_energies_of_attempts(row) for row in rows if row.record.status != "invalid"]
    energies = [energy for energies_of_run in attempts for energy in energies_of_run]
    repeated = len(energies) > len(attempts)
    noun = "attempts" if repeated else "runs"
    for key, text in TOTALS.items():
        values = [value for energy in energies if (value := number_of(energy, key)) is not None]
        if values:
            complete = len(values) == len(energies)
            count = f"{len(values)} {noun}" if complete else f"{len(values)} of {len(energies)} {noun}"
            yield text(sum(values)) + (f" ({count})" if repeated or not complete else "")


def _energies_of_attempts(row: Row) -> list[Mapping[str, Any]]:
    """Return the energy of each attempt of a run; an empty one if it is not known."""
    earlier = earlier_records(row.path.parent) if row.path else []
    known = [record.metrics.energy or {} for record in [row.record, *earlier]]
    return [*known, *[{}] * (len(row.record.run.attempts) - len(known))]
