"""A size of a forecast, with everything that is printed for it."""

from __future__ import annotations

from dataclasses import dataclass

from distexp.config import Config
from distexp.forecast.energy import PowerModel, price_per_million_samples
from distexp.forecast.sizes import Size
from distexp.forecast.target import Forecast
from distexp.launch.cell import Cell
from distexp.runs.forecast import cap_efficiency
from distexp.runs.forecast_errors import ForecastError
from distexp.runs.record_sections import Predicted
from distexp.strategies.base import load_strategy

COMPUTE = "compute"
MIN_BOTTLENECK_SHARE = 0.005
"""A smaller part of the step is not named."""


@dataclass(frozen=True)
class Baseline:
    """The fewest workers: their speed per worker is the ideal one."""

    size: Size
    samples_per_second: float

    @property
    def workers(self) -> int:
        """Return the number of workers."""
        return self.size[0] * self.size[1]

    def efficiency(self, workers: int, samples_per_second: float) -> float:
        """Return ideal time / real time."""
        return samples_per_second / workers / (self.samples_per_second / self.workers)


@dataclass(frozen=True)
class SizeRow:
    """A size.

    Attributes:
        size: Number of nodes, and workers of each node.
        cell: The composed configuration.
        forecast: None if there is an error.
        error: Why there is no forecast.
        baseline: What the efficiency is relative to.
        memory: Predicted memory.
        memory_error: Why the memory is unknown.
        power: Power of the GPUs.
        measured: A measured run of this size.
        profiled_workers: Workers of the profiled run.
    """

    size: Size
    cell: Cell
    forecast: Forecast | None = None
    error: str = ""
    baseline: Baseline | None = None
    memory: Predicted | None = None
    memory_error: str = ""
    power: PowerModel | None = None
    measured: ForecastError | None = None
    profiled_workers: int | None = None

    @property
    def workers(self) -> int:
        """Return the number of workers on all nodes."""
        return self.size[0] * self.size[1]

    @property
    def samples_per_second(self) -> float | None:
        """Return the throughput over all workers."""
        forecast = self.forecast
        return None if forecast is None else forecast.samples_per_second

    @property
    def efficiency(self) -> float | None:
        """Return ideal time / real time."""
        if self.baseline is None or self.samples_per_second is None:
            return None
        return self.baseline.efficiency(self.workers, self.samples_per_second)

    @property
    def efficiency_interval(self) -> tuple[float, float] | None:
        """Return both ends of the interval of the efficiency.

        The upper end is capped, unless workers share the optimizer states: then they have less work at larger sizes.
        """
        if self.forecast is None or self.baseline is None:
            return None
        samples, ends = self.forecast.target.samples_per_step, (self.forecast.high_s, self.forecast.low_s)
        low, high = (self.baseline.efficiency(self.workers, samples / step_s) for step_s in ends)
        is_limited = self.size == self.baseline.size or _has_constant_work(self.cell.config)
        return low, cap_efficiency(high, self.efficiency or 0.0) if is_limited else high

    def share(self, part: str) -> float | None:
        """Return a part of the step as a fraction; None if it is unknown."""
        if self.forecast is None or part not in self.forecast.parts:
            return None
        return self.forecast.parts[part] / self.forecast.step_time_s

    @property
    def bottleneck(self) -> tuple[str, float] | None:
        """Return the largest part of the step besides the computation, with its fraction; None if it is tiny."""
        others = {name: s for name, s in (self.forecast.parts if self.forecast else {}).items() if name != COMPUTE}
        name = max(others, key=others.__getitem__, default="")
        share = self.share(name) or 0.0
        return (name, share) if share >= MIN_BOTTLENECK_SHARE else None

    @property
    def j_per_sample(self) -> float | None:
        """Return the energy of all GPUs per sample."""
        return self.power.j_per_sample(self.forecast) if self.power and self.forecast else None

    @property
    def price(self) -> float | None:
        """Return the price of a million samples; None on CPUs, whose runs have no GPU-hours."""
        config = self.cell.config
        if self.forecast is None or config is None or config.cluster.device == "cpu":
            return None
        return price_per_million_samples(self.forecast, config.cluster.price_per_gpu_hour)


def _has_constant_work(config: Config | None) -> bool:
    """Return whether a worker computes the same in a micro-batch and in the optimizer, at every size."""
    return config is not None and load_strategy(config).keeps_states_whole(config) is True
