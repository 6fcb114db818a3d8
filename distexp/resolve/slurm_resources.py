"""What a run asks of Slurm: judged without a look at this machine, which is not the one that will train."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

from distexp.config import ClusterConfig, Config

SLURM_ONLY = (
    "gpus_per_node",
    "memory_gb",
    "partition",
    "constraint",
    "account",
    "qos",
    "reservation",
    "exclusive",
    "sbatch",
    "srun",
    "modules",
    "setup",
    "python",
    "array_parallelism",
    "dry_run",
)
"""Keys that a run on this machine would silently pass over."""

OURS = {
    "array": "cluster.array_parallelism",
    "nodes": "cluster.nodes",
    "ntasks": "cluster.nodes",
    "ntasks-per-node": "cluster.workers_per_node",
    "gpus-per-node": "cluster.gpus_per_node",
    "cpus-per-task": "cluster.cpus_per_worker",
    "mem": "cluster.memory_gb",
    "time": "cluster.timeout_min",
    "partition": "cluster.partition",
    "constraint": "cluster.constraint",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "reservation": "cluster.reservation",
    "exclusive": "cluster.exclusive",
    "signal": "cluster.signal_delay_s",
    "requeue": "cluster.requeue",
    "chdir": "the snapshot",
    "output": "the sweep's directory",
    "error": "the sweep's directory",
    "open-mode": "the sweep's directory",
}
"""Options of sbatch that have a key of ours."""

CPUS_PER_WORKER = 4
"""What the workshop's scripts ask for; a node of a cluster has at least as many cores to a GPU."""


def misplaced_cluster_keys(cluster: ClusterConfig) -> Iterator[str]:
    """Keys that do not belong where they are."""
    if cluster.launcher not in ("local", "slurm"):
        yield f"cluster.launcher={cluster.launcher} is not one of local, slurm"
    if cluster.launcher == "local":
        defaults = ClusterConfig()
        for spec in fields(ClusterConfig):
            value = getattr(cluster, spec.name)
            if spec.name in SLURM_ONLY and value != getattr(defaults, spec.name):
                yield f"cluster.{spec.name}={value} is for Slurm only: leave it out, or choose cluster=slurm"
    for option in cluster.sbatch:
        mend = OURS.get(str(option).lstrip("-").replace("_", "-"))
        if mend is not None:
            yield f"cluster.sbatch sets {option}, which {mend} decides: set it there"
    for name in cluster.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"cluster.environment sets {name!r}, which is no name of a variable: use letters, digits and _"


def decide_request(config: Config) -> list[str]:
    """Fills in device, workers, GPUs and cores of a run on Slurm; the errors of what does not fit together."""
    cluster = config.cluster
    if cluster.device == "auto":
        cluster.device = "cuda"
    on_gpu = cluster.device == "cuda"
    if cluster.workers_per_node is None:
        cluster.workers_per_node = 1 if config.strategy.name == "single" else (cluster.gpus_per_node or 1)
    if cluster.gpus_per_node is None and on_gpu and "gres" not in cluster.sbatch:
        cluster.gpus_per_node = cluster.workers_per_node
    if cluster.cpus_per_worker is None:
        cluster.cpus_per_worker = CPUS_PER_WORKER
    if on_gpu and cluster.gpus_per_node is not None and cluster.gpus_per_node < cluster.workers_per_node:
        return [
            f"cluster.gpus_per_node={cluster.gpus_per_node} is less than "
            f"cluster.workers_per_node={cluster.workers_per_node}, and every worker needs a GPU: "
            "raise the one, lower the other, or choose cluster.device=cpu"
        ]
    return []
