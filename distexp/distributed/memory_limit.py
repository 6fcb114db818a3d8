"""A smaller GPU: a limit of the memory that torch may take on a GPU, for ``cluster.gpu_memory_limit_gb``."""

from __future__ import annotations

import torch

from distexp.config import ConfigError
from distexp.system.units import MIB

GB = 1 << 30


def limit_memory(device: torch.device, limit_gb: float, overhead_mib: float) -> None:
    """Limit torch's memory on a GPU, so that a training that needs more runs out of memory.

    CUDA and NCCL need memory too, and allocate most of it later. So their usual need is subtracted from the limit.

    Args:
        device: the GPU of this process.
        limit_gb: ``cluster.gpu_memory_limit_gb``.
        overhead_mib: usual need of CUDA and NCCL.

    Raises:
        ConfigError: the GPU has less memory than the limit, or CUDA and NCCL alone need more.
    """
    free, total = torch.cuda.mem_get_info(device)
    used = max(total - free - torch.cuda.memory_reserved(device), int(overhead_mib * MIB))
    torch.cuda.set_per_process_memory_fraction(allowed_bytes(limit_gb, used, total) / total, device)


def allowed_bytes(limit_gb: float, used: int, total: int) -> int:
    """Return the bytes that torch may take of a GPU, of which ``used`` bytes are for others."""
    limit = int(limit_gb * GB)
    if limit > total:
        raise ConfigError(
            f"cluster.gpu_memory_limit_gb={limit_gb:g} is more than this GPU has ({total / GB:.1f} GB): leave it out"
        )
    if limit <= used:
        raise ConfigError(
            f"cluster.gpu_memory_limit_gb={limit_gb:g}, but CUDA, NCCL and other programs need {used / GB:.1f} GB of "
            f"this GPU: set it to more than {used / GB:.1f}"
        )
    return limit - used


def usable_bytes(device: torch.device) -> float:
    """Return the memory of a GPU that this process has or can get, without that of CUDA itself."""
    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.get_per_process_memory_fraction(device) * total
    return min(free + torch.cuda.memory_reserved(device), limit)
