"""The process group, and the few collectives that the loop needs."""

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

T = TypeVar("T")


def join(spec: RunSpec, run_dir: Path) -> Context:
    """Joins the process group that torchrun's environment names, and checks that it is the asked one."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if world_size != spec.world_size:
        raise RuntimeError(
            f"torchrun started {world_size} workers, spec.json asks for {spec.nodes} x {spec.workers_per_node}: "
            f"start as many as it asks for"
        )
    device = torch.device("cpu")
    if spec.config.cluster.device == "cuda":
        if torch.cuda.device_count() < per_node:
            raise RuntimeError(
                f"this node has {per_node} workers and {torch.cuda.device_count()} visible GPUs: give every worker one"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    # gloo serves what is offloaded to the CPU, also where the training is on GPUs.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(minutes=30),
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


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, in place; nothing to do for one."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_to_all(value: T) -> list[T]:
    """Each rank's value, in the order of the ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def head_address() -> str:
    """Where the ranks met."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
