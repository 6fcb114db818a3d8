"""Speeds of a machine for the order of the candidates: measured ones if a preflight stored them, else rough ones."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from distexp.config import Config, ConfigError
from distexp.data.cache import cache_dir
from distexp.plan.verdict import planned_gpu
from distexp.runs.json_files import read_json
from distexp.system.gpu_models import peak_tflops

REACHED_SHARE = 0.6
"""Share of the datasheet's peak that a large matrix product reaches."""

UNKNOWN_GPU_TFLOPS = 100.0
CPU_TFLOPS_PER_CORE = 0.03

MEMORY_GB_PER_S: Mapping[str, float] = {
    **{"B200": 8000.0, "H200": 4800.0, "GH200": 4000.0, "H100": 3350.0, "A100": 2039.0, "V100": 900.0},
    **{"L40S": 864.0, "A40": 696.0, "A10": 600.0, "T4": 320.0, "L4": 300.0},
}
"""Bandwidth of the memory of GPUs, from the datasheets."""

UNKNOWN_GPU_GB_PER_S, CPU_GB_PER_S = 1000.0, 20.0

NVLINK_GPUS = ("B200", "GH200", "H200", "H100", "A100", "V100")
"""GPUs that are mostly connected by NVLink."""

LAUNCH_S = 30e-6
"""Time until the CPU has launched a kernel of the traced step, with ``single``. On machines with an H200 and compiled
blocks, micro-batches of 4 samples took 20 to 36 us for each (docs/results/choose_h200.json)."""

NVLINK_GB_PER_S, PCIE_GB_PER_S, NETWORK_GB_PER_S, SHARED_MEMORY_GB_PER_S = 200.0, 12.0, 20.0, 4.0


@dataclass(frozen=True)
class MachineSpeeds:
    """Speeds of one worker.

    Attributes:
        tflops: TFLOP/s of a large matrix product.
        memory_gb_per_s: Bandwidth of its memory.
        link_gb_per_s: Bandwidth between the workers of a node.
        network_gb_per_s: Bandwidth between nodes of each worker, if all of them use it.
        host_link_gb_per_s: Bandwidth between GPU and CPU.
        launch_s: Time until the CPU has launched an operation.
    """

    tflops: float
    memory_gb_per_s: float
    link_gb_per_s: float
    network_gb_per_s: float = NETWORK_GB_PER_S
    host_link_gb_per_s: float = PCIE_GB_PER_S
    launch_s: float = LAUNCH_S


def read_machine_speeds(config: Config) -> MachineSpeeds:
    """Return the speeds of the machine of a run."""
    precision = config.precision.name
    if config.cluster.device == "cpu":
        cores = config.cluster.cpus_per_worker or 1
        stored = stored_tflops(f"cpu of {platform.node()} {cores} threads", precision)
        return MachineSpeeds(stored or CPU_TFLOPS_PER_CORE * cores, CPU_GB_PER_S, SHARED_MEMORY_GB_PER_S)
    name = planned_gpu(config) or ""
    peak = peak_tflops(name, precision)
    parts = set(re.split(r"[^A-Z0-9]+", name.upper()))
    bandwidth = next((gb_per_s for part, gb_per_s in MEMORY_GB_PER_S.items() if part in parts), UNKNOWN_GPU_GB_PER_S)
    tflops = stored_tflops(name, precision) or (REACHED_SHARE * peak if peak else UNKNOWN_GPU_TFLOPS)
    return MachineSpeeds(tflops, bandwidth, NVLINK_GB_PER_S if parts & set(NVLINK_GPUS) else PCIE_GB_PER_S)


def stored_tflops(device: str, precision: str) -> float | None:
    """Return the highest matrix ceiling that a preflight stored for a device, with any version of torch."""
    if not device:
        return None
    name = re.sub(r"[^A-Za-z0-9.+]+", "-", f"{device} {precision}")
    found = []
    with suppress(ConfigError):  # Without a home directory there is no cache.
        for path in (cache_dir() / "matrix-ceiling").glob(f"{name}-*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                found.append(float(read_json(path)["tflops"]))
    return max(found, default=None)
