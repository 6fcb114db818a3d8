"""Where a run stands on this machine: its device, workers and threads. On Slurm it is ``request`` that decides."""

from __future__ import annotations

from distexp.config import Config
from distexp.resolve.slurm_resources import decide_request
from distexp.system.hardware import cpu_count, visible_gpus

MIN_BUSBW_GBPS = 5.0
"""The gate of the workshop that this tool grew out of: an all-reduce of 4 GiB slower than this is broken."""


def decide_placement(config: Config) -> list[str]:
    """Fills in device, workers and threads; the errors of what the machine cannot give."""
    cluster = config.cluster
    if cluster.launcher == "slurm":
        return decide_request(config)
    gpus = visible_gpus()
    if cluster.device == "auto":
        cluster.device = "cuda" if gpus else "cpu"
    on_gpu = cluster.device == "cuda"
    if config.preflight.min_busbw_gbps is None and on_gpu:
        config.preflight.min_busbw_gbps = MIN_BUSBW_GBPS
    if cluster.workers_per_node is None:
        available = max(1, (len(gpus) if on_gpu else 2) // cluster.nodes)
        cluster.workers_per_node = 1 if config.strategy.name == "single" else available
    world_size = cluster.world_size
    if cluster.cpus_per_worker is None:
        # The share of one machine: simulated nodes stand on it side by side.
        cluster.cpus_per_worker = max(1, cpu_count() // world_size)
    if on_gpu and not gpus:
        return ["cluster.device=cuda needs a GPU, and none is visible here: choose cluster.device=cpu"]
    if on_gpu and world_size > len(gpus):
        return [
            f"cluster.nodes={cluster.nodes} x cluster.workers_per_node={cluster.workers_per_node} needs "
            f"{world_size} GPUs, and {len(gpus)} are visible here: lower one of them, or choose cluster.device=cpu"
        ]
    return []
