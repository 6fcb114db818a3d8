"""``forecast.json``: forecasts of a profiled run on other numbers of workers, which ``distexp forecast`` writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distexp.runs.json_files import read_or_none, write_json
from distexp.runs.run_dir import FORECAST
from distexp.runs.typed_values import matches, parse_dataclass

SCHEMA = 1


@dataclass(frozen=True)
class StoredForecast:
    """The forecast of one size.

    Attributes:
        nodes: Number of nodes.
        workers_per_node: Workers of each node.
        run_id: Id of the same training at this size.
        micro_batch_size: Samples of a worker in a forward pass.
        micro_batches: Micro-batches of an optimizer step.
        samples_per_step: Samples of all workers in an optimizer step.
        step_time_s: Most likely duration of the step.
        low_s: Lower end of the interval.
        high_s: Upper end of the interval.
        created_at: ISO 8601, UTC.
        beyond: How far the size is beyond the measured range; empty inside of it.
        what_if: Options for another machine, which later runs do not share; empty without them.
    """

    nodes: int
    workers_per_node: int
    run_id: str
    micro_batch_size: int
    micro_batches: int
    samples_per_step: float
    step_time_s: float
    low_s: float
    high_s: float
    created_at: str = ""
    beyond: str = ""
    what_if: str = ""

    @property
    def workers(self) -> int:
        """Return the number of workers on all nodes."""
        return self.nodes * self.workers_per_node

    @property
    def samples_per_second(self) -> float:
        """Return the throughput over all workers."""
        return self.samples_per_step / self.step_time_s

    def same_size(self, other: StoredForecast) -> bool:
        """Return whether another forecast is about the same size, the same steps and the same machine."""
        names = ("nodes", "workers_per_node", "run_id", "micro_batches", "samples_per_step", "what_if")
        return all(getattr(self, name) == getattr(other, name) for name in names)


def cap_efficiency(high: float, efficiency: float) -> float:
    """Return the upper end of an interval of the efficiency, for workers whose work does not shrink with their number.

    It is at most 100 %, or the forecast efficiency if that is more, as with a slower network at the baseline.
    """
    return min(high, max(efficiency, 1.0))


def write_forecasts(run_dir: Path, forecasts: Sequence[StoredForecast]) -> None:
    """Add forecasts to those of a run. A new one replaces that of the same size.

    Raises:
        OSError: the run directory is not writable.
    """
    kept = [old for old in read_forecasts(run_dir) if not any(old.same_size(new) for new in forecasts)]
    ordered = sorted([*kept, *forecasts], key=lambda forecast: (forecast.workers, forecast.nodes))
    write_json(run_dir / FORECAST, {"schema": SCHEMA, "forecasts": [asdict(forecast) for forecast in ordered]})


def read_forecasts(run_dir: Path) -> list[StoredForecast]:
    """Return the forecasts of a run, by the number of workers; none if the file is missing or damaged."""
    schema, forecasts = (read_or_none(run_dir / FORECAST, key) for key in ("schema", "forecasts"))
    try:
        return [parse_dataclass(StoredForecast, raw) for raw in forecasts if _is_valid(raw)] if schema == SCHEMA else []
    except (ValueError, TypeError):
        return []


def _is_valid(raw: Any) -> bool:
    """Return whether an entry has positive sizes and times."""
    names = ("nodes", "workers_per_node", "samples_per_step", "step_time_s", "low_s", "high_s")
    return isinstance(raw, dict) and all(matches(raw.get(name), float) and raw[name] > 0 for name in names)
