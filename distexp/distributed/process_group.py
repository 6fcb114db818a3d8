"""The process group, and the collectives that distexp needs."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from distexp.distributed.context import Context
from distexp.runs.spec import RunSpec
from distexp.system.torch_internals import set_default_timeout

T = TypeVar("T")

HANG_MARGIN = timedelta(minutes=5)
"""Time that the agents have to detect a hang and to save the stacks, before collectives fail."""


def join(spec: RunSpec, run_dir: Path) -> Context:
    """Initialize the process group from torchrun's environment variables.

    Raises:
        RuntimeError: the number of workers or GPUs differs from the spec.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if world_size != spec.world_size:
        raise RuntimeError(
            f"torchrun started {world_size} workers, but spec.json has {spec.nodes} nodes x {spec.workers_per_node} "
            f"workers: start torchrun with --nnodes={spec.nodes} --nproc-per-node={spec.workers_per_node}"
        )
    device = torch.device("cpu")
    if spec.config.cluster.device == "cuda":
        if torch.cuda.device_count() < per_node:
            raise RuntimeError(
                f"this node has {per_node} workers but only {torch.cuda.device_count()} visible GPUs: "
                "start at most one worker per GPU"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    timeout = collective_timeout(spec.config.cluster.hang_timeout_min)
    set_default_timeout(timeout)
    # gloo is needed on GPUs too, for tensors that are offloaded to the CPU.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return Context(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        workers_per_node=per_node,
        nodes=world_size // per_node,
        device=device,
        run_dir=run_dir,
    )


def collective_timeout(hang_timeout_min: float) -> timedelta:
    """Return the timeout of collectives, longer than the agents' hang limit.

    So a hang is reported as a hang.

    Args:
        hang_timeout_min: ``cluster.hang_timeout_min``, in minutes.
    """
    return timedelta(minutes=hang_timeout_min) + HANG_MARGIN


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks in place, and return it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_to_all(value: T) -> list[T]:
    """Return the values of all ranks, in rank order; a collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def rendezvous_address() -> str:
    """Return the address and port of the rendezvous."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
