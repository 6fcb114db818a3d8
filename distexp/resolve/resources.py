"""Resources of a run: device, workers, GPUs and CPU threads."""

from __future__ import annotations

from distexp.config import Config
from distexp.config.cluster_section import sbatch_name
from distexp.resolve.strategy_steps import needs_one_worker
from distexp.system.hardware import cpu_count, visible_gpus

MIN_BUSBW_GBPS = 5.0
"""Default limit of the preflight on GPUs; an interconnect that is slower than this is broken."""

CPU_WORKERS = 2
SLURM_CPUS_PER_WORKER = 4
"""As in the scripts of the workshop. The nodes of a cluster have at least as many cores per GPU."""


def decide_resources(config: Config) -> list[str]:
    """Decide device, workers and threads, and return the errors.

    On Slurm this machine is not inspected, because the job runs on another one.
    """
    if config.cluster.launcher == "slurm":
        _decide_slurm(config)
        errors = _slurm_errors(config)
    else:
        _decide_local(config)
        errors = _local_errors(config)
    if config.cluster.device == "cuda" and config.preflight.min_busbw_gbps is None:
        config.preflight.min_busbw_gbps = MIN_BUSBW_GBPS
    return errors


def _decide_local(config: Config) -> None:
    cluster, gpus = config.cluster, visible_gpus()
    if cluster.device == "auto":
        cluster.device = "cuda" if gpus or _is_for_other_gpus(config) else "cpu"
    on_gpu = cluster.device == "cuda"
    if cluster.workers_per_node is None:
        available = (len(gpus) if on_gpu else CPU_WORKERS) // cluster.nodes
        cluster.workers_per_node = 1 if needs_one_worker(config) else max(1, available)
    if cluster.cpus_per_worker is None:
        # Simulated nodes share the cores of one machine. Tiny models need one thread only. Then runs with different
        # numbers of workers have the same number of threads per worker, and their speeds can be compared.
        tiny = config.scale.name == "tiny" and not on_gpu
        cluster.cpus_per_worker = 1 if tiny else max(1, cpu_count() // cluster.world_size)


def _is_for_other_gpus(config: Config) -> bool:
    """Return whether nothing is run, so that this machine need not have the GPUs."""
    names_gpu = config.plan.gpu is not None or config.plan.gpu_memory_gb is not None
    return config.plan.only or (config.choose.only and config.choose.dry_run and names_gpu)


def _local_errors(config: Config) -> list[str]:
    """Return an error if this machine has too few GPUs. A prediction is for GPUs that it need not have."""
    cluster, gpus = config.cluster, visible_gpus()
    if _is_for_other_gpus(config) or cluster.device != "cuda":
        return []
    if not gpus:
        return ["cluster.device=cuda needs a GPU, but this machine has none: choose cluster.device=cpu"]
    if cluster.world_size > len(gpus):
        return [
            f"cluster.nodes={cluster.nodes} x cluster.workers_per_node={cluster.workers_per_node} needs "
            f"{cluster.world_size} GPUs, but this machine has {len(gpus)}: lower one of them, or choose "
            "cluster.device=cpu"
        ]
    return []


def _decide_slurm(config: Config) -> None:
    cluster = config.cluster
    if cluster.device == "auto":
        cluster.device = "cuda"
    if cluster.workers_per_node is None:
        cluster.workers_per_node = 1 if needs_one_worker(config) else (cluster.gpus_per_node or 1)
    if cluster.gpus_per_node is None and cluster.device == "cuda" and "gres" not in map(sbatch_name, cluster.sbatch):
        cluster.gpus_per_node = cluster.workers_per_node
    if cluster.cpus_per_worker is None:
        cluster.cpus_per_worker = SLURM_CPUS_PER_WORKER


def _slurm_errors(config: Config) -> list[str]:
    """Return an error if a node has fewer GPUs than workers."""
    cluster = config.cluster
    gpus, workers = cluster.gpus_per_node, cluster.workers_per_node
    if cluster.device != "cuda" or gpus is None or workers is None or gpus >= workers:
        return []
    return [
        f"cluster.gpus_per_node={gpus} is less than cluster.workers_per_node={workers}, but every worker needs a GPU: "
        "raise the first, lower the second, or choose cluster.device=cpu"
    ]
