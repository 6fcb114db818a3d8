"""GPU memory of this process, as NVML reports it."""

from __future__ import annotations

import os
from typing import Any

from distexp.system.nvml import NvmlUnavailableError, nvml_session

PROCESS, WHOLE_GPU = "process", "gpu"
"""What NVML counted: this process, or all of the GPU because NVML does not list this process.

In a container NVML lists no processes, or those of the host's numbers.
"""


def process_memory(uuid: object) -> tuple[int, str] | None:
    """Return the bytes that this process uses on a GPU, and what was counted; None if NVML does not report it.

    Args:
        uuid: UUID of the GPU, as torch writes it.
    """
    try:
        with nvml_session() as nvml:
            return _read(nvml, f"GPU-{str(uuid).removeprefix('GPU-')}")
    except (NvmlUnavailableError, ImportError):
        return None


def _read(nvml: Any, uuid: str) -> tuple[int, str] | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        listed = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        own = [process.usedGpuMemory for process in listed if process.pid == os.getpid()]
        if own and own[0] is not None:
            return int(own[0]), PROCESS
        version = {"version": nvml.nvmlMemory_v2} if hasattr(nvml, "nvmlMemory_v2") else {}
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, **version).used), WHOLE_GPU
    except nvml.NVMLError:
        return None
