"""Why a run has no price or no CO2e, although the user set what they are computed from."""

from __future__ import annotations

from collections.abc import Iterator

from distexp.runs.record import RunRecord


def missing_costs(record: RunRecord) -> Iterator[str]:
    """Yield what a run that trained lacks, and the reason, each without a period."""
    if record.built is None:
        return
    cluster, energy = record.config.get("cluster") or {}, record.metrics.energy or {}
    on_cpu = cluster.get("device") == "cpu"
    if on_cpu and cluster.get("price_per_gpu_hour") is not None:
        yield "no price: cluster.price_per_gpu_hour is for GPUs, and the run used CPUs"
    if cluster.get("gco2_per_kwh") is not None and energy.get("co2e_g") is None:
        yield f"no CO2e: {_missing_energy(record, on_cpu=on_cpu)}"


def _missing_energy(record: RunRecord, *, on_cpu: bool) -> str:
    """Return why the energy is unknown."""
    if (record.config.get("measure") or {}).get("enabled") is False:
        return "measure.enabled=false"
    device = "CPUs (RAPL; on most systems only root can read it)" if on_cpu else "GPUs (NVML)"
    return f"the energy of the {device} is unknown"
