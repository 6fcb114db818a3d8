"""A smaller GPU: a limit of the memory that torch may take on a GPU, for ``cluster.gpu_memory_limit_gb``."""

from __future__ import annotations

import torch

from distexp.config import ConfigError

GB = 1 << 30


def limit_memory(device: torch.device, limit_gb: float | None) -> None:
    """Limit torch's memory on a GPU, so that a training that needs more runs out of memory.

    What is in use now, such as the CUDA context, counts too. Memory that NCCL allocates later does not count.

    Args:
        device: the GPU of this process.
        limit_gb: limit in GB of 2**30 bytes; None: no limit.

    Raises:
        ConfigError: the GPU has less memory than the limit, or the context alone needs more.
    """
    if limit_gb is None:
        return
    free, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(allowed_bytes(limit_gb, free, total) / total, device)


def allowed_bytes(limit_gb: float, free: int, total: int) -> int:
    """Return the bytes that torch may take of a GPU with ``free`` and ``total`` bytes."""
    limit, used = int(limit_gb * GB), total - free
    if limit > total:
        raise ConfigError(
            f"cluster.gpu_memory_limit_gb={limit_gb:g} is more than this GPU has ({total / GB:.1f} GB): leave it out"
        )
    if limit <= used:
        raise ConfigError(
            f"cluster.gpu_memory_limit_gb={limit_gb:g}, but {used / GB:.1f} GB of this GPU are in use before the "
            f"training starts: set it to more than {used / GB:.1f}"
        )
    return limit - used


def usable_bytes(device: torch.device) -> float:
    """Return the memory of a GPU that this process has or can get, without that of CUDA itself."""
    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.get_per_process_memory_fraction(device) * total
    return min(free + torch.cuda.memory_reserved(device), limit)
