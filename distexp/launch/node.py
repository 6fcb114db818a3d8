"""GPUs and environment of the workers of one node."""

from __future__ import annotations

import os

from distexp.resolve.resources import launcher_traits
from distexp.runs.spec import RunSpec
from distexp.system.hardware import Gpu, visible_gpus

DEBUG_VARIABLES = {
    "NCCL_DEBUG": "INFO",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}
"""Variables of the workers with ``cluster.debug=true``."""


def is_simulated(spec: RunSpec) -> bool:
    """Return whether all nodes of a run are on this machine."""
    return launcher_traits(spec.config).runs_here


def node_gpus(spec: RunSpec, node: int) -> tuple[Gpu, ...]:
    """Return the GPUs of a node's workers. Simulated nodes share the GPUs of this machine."""
    if spec.config.cluster.device != "cuda":
        return ()
    first = node * spec.workers_per_node if is_simulated(spec) else 0
    return visible_gpus()[first:][: spec.workers_per_node]


def worker_environment(spec: RunSpec, node: int) -> dict[str, str]:
    """Return the environment of a node's workers: that of this process, with the settings of the run."""
    cluster = spec.config.cluster
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **(DEBUG_VARIABLES if cluster.debug else {}),
        **cluster.environment,
        "OMP_NUM_THREADS": str(cluster.cpus_per_worker),
        "DS_ACCELERATOR": cluster.device,
    }
    if cluster.device == "cuda" and spec.nodes > 1 and is_simulated(spec):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in node_gpus(spec, node))
    return environment
