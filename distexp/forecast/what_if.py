"""Assumptions of a forecast that a later run may not share. Then the difference is no error of the forecast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from distexp.config import ForecastConfig
from distexp.runs.forecast_errors import machine_name
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import RECORD

NETWORK_KEYS = ("network", "rail_optimized", "oversubscription")


def what_if(options: ForecastConfig, profiled: RunRecord, nodes: int) -> str:
    """Return the options that make a forecast one for another machine, as typed; empty without them.

    Args:
        options: Options of the forecast.
        profiled: Record of the profiled run.
        nodes: Number of nodes of the forecast. One node has no network.
    """
    return " ".join([*_preflight(options, profiled), *(_network(options) if nodes > 1 else ())])


def _network(options: ForecastConfig) -> Iterator[str]:
    """Yield the options of the network. A record does not have its network, so each one is an assumption."""
    default = ForecastConfig()
    for name in NETWORK_KEYS:
        value = getattr(options, name)
        if value != getattr(default, name):
            yield f"forecast.{name}={str(value).lower()}"


def _preflight(options: ForecastConfig, profiled: RunRecord) -> Iterator[str]:
    """Yield the option of the bandwidths, unless the same type of device has measured them."""
    if options.preflight is None:
        return
    try:
        measured = RunRecord.read(Path(options.preflight) / RECORD)
    except ValueError:
        measured = None
    if measured is None or machine_name(measured) != machine_name(profiled):
        yield f"forecast.preflight={options.preflight}"
