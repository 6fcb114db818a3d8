"""What this machine has, found without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use; ``index`` is NVML's, not CUDA_VISIBLE_DEVICES' position."""

    index: int
    uuid: str
    name: str
    total_mib: float


@lru_cache(maxsize=1)
def visible_gpus() -> tuple[Gpu, ...]:
    """The machine's NVIDIA GPUs in CUDA's order, those hidden by CUDA_VISIBLE_DEVICES left out."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        found = [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(found)
    chosen = [_by_name(found, name.strip()) for name in visible.split(",") if name.strip()]
    return tuple(gpu for gpu in chosen if gpu is not None)


def _gpu(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    total = pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**20
    return Gpu(index, _text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetName(handle)), total)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _by_name(gpus: list[Gpu], name: str) -> Gpu | None:
    """A GPU by what CUDA_VISIBLE_DEVICES may hold: its index or the start of its UUID."""
    for gpu in gpus:
        if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name)):
            return gpu
    return None


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
