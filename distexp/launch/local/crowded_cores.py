"""Warning before local runs with more workers than CPU cores start: it may be a typing error, and takes much memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil

from distexp.config import Config
from distexp.system.cgroups import cpu_limit
from distexp.system.hardware import cpu_count


def crowded_core_warnings(configs: Iterable[Config]) -> Iterator[str]:
    """Yield a warning if runs on the CPUs of this machine have more workers than it has cores.

    Args:
        configs: The configurations of the runs. Simulated nodes share the cores.
    """
    cores = max(1, min(cpu_count(), ceil(cpu_limit() or cpu_count())))
    workers = [config.cluster.world_size for config in configs if config.cluster.device == "cpu"]
    if (most := max(workers, default=0)) > cores:
        yield (
            f"{most} workers will share {cores} CPU core{'s' if cores > 1 else ''}, so speeds cannot be compared "
            f"between numbers of workers, and each worker needs its own memory. To measure speed, use at most "
            f"{cores} workers (cluster.nodes x cluster.workers_per_node)"
        )
