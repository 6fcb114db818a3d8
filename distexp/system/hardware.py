"""GPUs and CPU cores that this process may use, found without importing torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from distexp.system.nvml import NvmlUnavailableError, as_text, nvml_session
from distexp.system.units import MIB


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use; ``index`` is the index in NVML, not in CUDA_VISIBLE_DEVICES."""

    index: int
    uuid: str
    name: str
    total_mib: float


@lru_cache(maxsize=1)
def visible_gpus() -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs that CUDA_VISIBLE_DEVICES allows, in CUDA's order."""
    try:
        with nvml_session() as nvml:
            gpus = [_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except NvmlUnavailableError:
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(gpus)
    selected = [_find_gpu(gpus, name.strip()) for name in visible.split(",") if name.strip()]
    return tuple(gpu for gpu in selected if gpu is not None)


def _read_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    total_mib = nvml.nvmlDeviceGetMemoryInfo(handle).total / MIB
    return Gpu(index, as_text(nvml.nvmlDeviceGetUUID(handle)), as_text(nvml.nvmlDeviceGetName(handle)), total_mib)


def _find_gpu(gpus: list[Gpu], name: str) -> Gpu | None:
    """Return the GPU with an index or a prefix of a UUID, as CUDA_VISIBLE_DEVICES lists them."""
    for gpu in gpus:
        if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name)):
            return gpu
    return None


def cpu_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
