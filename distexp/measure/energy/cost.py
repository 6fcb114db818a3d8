"""Energy and cost of a run, for the record."""

from __future__ import annotations

from distexp.config.cluster_section import ClusterConfig
from distexp.measure.energy.trace_energy import TraceEnergy

JOULES_PER_KWH = 3.6e6


def energy_entry(
    energy: TraceEnergy, cluster: ClusterConfig, *, duration_s: float | None, samples: int | None, tokens: int | None
) -> dict[str, float | None] | None:
    """Return ``metrics.energy`` of the record; None if nothing is known.

    Args:
        energy: The measured energy.
        cluster: Number of workers, carbon intensity and price.
        duration_s: Duration of the run.
        samples: Samples of the training steps that ``energy`` is about.
        tokens: Their tokens without padding.
    """
    on_gpus = cluster.device == "cuda"
    training_j = energy.gpu_training if on_gpus else energy.cpu_training
    kwh = _kwh(energy, on_gpus=on_gpus)
    gpu_hours = cluster.world_size * duration_s / 3600 if on_gpus and duration_s is not None else None
    entry = {
        "gpu_j": energy.gpu,
        "gpu_j_by_power": energy.gpu_by_power,
        "power_difference_pct": _difference_pct(energy.gpu_by_power, energy.gpu),
        "cpu_j": energy.cpu,
        "gpu_j_training": energy.gpu_training,
        "cpu_j_training": energy.cpu_training,
        "idle_w": energy.idle_w,
        "j_per_sample": _ratio(training_j, samples),
        "j_per_token": _ratio(training_j, tokens),
        "kwh": kwh,
        "gpu_hours": gpu_hours,
        "co2e_g": _product(kwh, cluster.gco2_per_kwh),
        "price": _product(gpu_hours, cluster.price_per_gpu_hour),
    }
    return entry if any(value is not None for value in entry.values()) else None


def _kwh(energy: TraceEnergy, *, on_gpus: bool) -> float | None:
    """Return the energy of GPUs and CPUs in kWh; None if that of the devices that train is unknown.

    Many machines do not report the energy of their CPUs. That of the GPUs is then the result.
    """
    gpu = energy.gpu if energy.gpu is not None else energy.gpu_by_power
    if on_gpus and gpu is None:
        return None
    known = [joules for joules in (gpu, energy.cpu) if joules is not None]
    return sum(known) / JOULES_PER_KWH if known else None


def _difference_pct(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else 100 * (value / reference - 1)


def _ratio(joules: float | None, count: int | None) -> float | None:
    return joules / count if joules is not None and count else None


def _product(amount: float | None, factor: float | None) -> float | None:
    return None if amount is None or factor is None else amount * factor
