"""The worker whose step is traced."""

from __future__ import annotations

from pathlib import Path

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.plan.recorder import GPU


def traced_context(config: Config) -> Context:
    """Return rank 0 of the run, on the device of traced tensors."""
    cluster = config.cluster
    return Context(
        rank=0,
        world_size=cluster.world_size,
        local_rank=0,
        workers_per_node=cluster.workers_per_node or 1,
        nodes=cluster.nodes,
        device=GPU,
        run_dir=Path(),
    )
