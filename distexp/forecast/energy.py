"""Energy and price of a forecast step, from what the profiled run has measured.

A GPU has its idle power for the whole step. The energy above it belongs to the computation. It is the same for each
micro-batch on any number of GPUs. So waiting and communication cost the idle power only, which is a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from distexp.forecast.profiled_run import ProfiledRun
from distexp.forecast.target import Forecast
from distexp.runs.entry_values import number_of

SECONDS_PER_HOUR = 3600.0
MILLION = 1e6


@dataclass(frozen=True)
class PowerModel:
    """The energy of one GPU.

    Attributes:
        idle_w: Power of an idle GPU.
        busy_j: Energy of a micro-batch above the idle power.
    """

    idle_w: float
    busy_j: float

    def j_per_step(self, forecast: Forecast) -> float:
        """Return the energy of all GPUs in a step."""
        target = forecast.target
        return target.workers * (self.idle_w * forecast.step_time_s + self.busy_j * target.micro_batches)

    def j_per_sample(self, forecast: Forecast) -> float:
        """Return the energy of all GPUs per sample."""
        return self.j_per_step(forecast) / forecast.target.samples_per_step


def read_power(run: ProfiledRun, samples_per_step: float, micro_batches: int) -> PowerModel | None:
    """Return the power of the GPUs of a run; None if it was not measured.

    Args:
        run: The profiled run.
        samples_per_step: Its samples of a step over all workers.
        micro_batches: Its micro-batches of a step.
    """
    energy = run.record.metrics.energy or {}
    per_sample, idle_w, step_s = number_of(energy, "j_per_sample"), number_of(energy, "idle_w"), run.step_s
    if not run.on_gpu or per_sample is None or idle_w is None or step_s is None:
        return None
    idle_of_gpu = idle_w / run.workers
    busy_of_step = per_sample * samples_per_step / run.workers - idle_of_gpu * step_s
    return PowerModel(idle_of_gpu, max(0.0, busy_of_step) / micro_batches)


def price_per_million_samples(forecast: Forecast, price_per_gpu_hour: float | None) -> float | None:
    """Return the price of a million samples; None if no price of a GPU is set."""
    if price_per_gpu_hour is None:
        return None
    target = forecast.target
    gpu_hours_per_sample = target.workers * forecast.step_time_s / SECONDS_PER_HOUR / target.samples_per_step
    return MILLION * gpu_hours_per_sample * price_per_gpu_hour
