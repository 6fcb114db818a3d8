"""The process group, the collectives that distexp needs, and the memory limit of a GPU."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distexp.config import ConfigError
from distexp.distributed.context import Context
from distexp.runs.record import RunSpec
from distexp.system.torch_internals import pooling
from distexp.system.torch_internals.collectives import set_default_timeout
from distexp.system.units import GIB, MIB

T = TypeVar("T")
Store: TypeAlias = Any  # a store of torch, which its stubs do not export
_stores: Any = dist
HANG_MARGIN = timedelta(minutes=5)  # time of the agents to find a hang and save the stacks before collectives fail
CONNECT_POLL_S = 0.2


def open_store(spec: RunSpec, *, is_forked: bool = False) -> Store:
    """Return a connection to the store at torchrun's address. The first call on rank 0 starts the server.

    ``join`` starts none if this process has one, and a process that was forked after that needs none. torchrun may have
    a server of its own.
    """
    wait_for_rank_0(spec)
    has_server = is_forked or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _stores.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=os.environ["RANK"] == "0" and not has_server,
        timeout=collective_timeout(spec.config.cluster.hang_timeout_min),
        wait_for_workers=False,
        multi_tenant=True,
    )


def wait_for_rank_0(spec: RunSpec) -> None:
    """Wait until this rank can connect to rank 0, for half of the hang timeout; rank 0 needs only a way to itself.

    Without this check, torch would wait longer than the agents, which would report a hang without a cause. Raises
    ConnectionError.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    wait_s = spec.config.cluster.hang_timeout_min * 30
    deadline = time.monotonic() + wait_s
    while True:
        try:
            # Nothing has to listen there yet if this is rank 0.
            with suppress(ConnectionRefusedError) if os.environ["RANK"] == "0" else nullcontext():
                socket.create_connection((host, port), timeout=max(1.0, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                here = f"rank {os.environ['RANK']} on {socket.gethostname()}"
                raise ConnectionError(
                    f"{here} cannot reach rank 0 at {host}:{port} within {wait_s:g} s ({error.strerror or error}): "
                    "check the name of that node, and whether a firewall blocks its ports"
                ) from error
        time.sleep(CONNECT_POLL_S)


def sub_store(prefix: str, store: Store) -> Store:
    """Return a view of a store whose keys have a prefix."""
    return _stores.PrefixStore(prefix, store)


def join(spec: RunSpec, run_dir: Path, store: Store | None = None, *, overhead_mib: float = 0.0) -> Context:
    """Initialize the process group from torchrun's environment variables, in a store or a new one.

    CUDA and NCCL usually need ``overhead_mib`` of a GPU, which counts for ``cluster.gpu_memory_limit_gb``. Raises
    RuntimeError if the number of workers or GPUs differs from the spec.
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
        if spec.config.cluster.gpu_memory_limit_gb is not None:
            limit_memory(device, spec.config.cluster.gpu_memory_limit_gb, overhead_mib)
        if spec.config.model.traits.is_image:
            pooling.repair_kernel(device)
    timeout = collective_timeout(spec.config.cluster.hang_timeout_min)
    set_default_timeout(timeout)
    if store is None:
        wait_for_rank_0(spec)
    # gloo is needed on GPUs too, for tensors that are offloaded to the CPU.
    with _transport_named():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
            store=store,
            rank=-1 if store is None else rank,
            world_size=-1 if store is None else world_size,
        )
    nodes, parallel = world_size // per_node, spec.config.parallel
    degrees = (parallel.tensor, parallel.context, parallel.pipeline)
    return Context(rank, world_size, local_rank, per_node, nodes, device, run_dir, *degrees)


@contextmanager
def _transport_named() -> Iterator[None]:
    """Raise ConfigError if the process group fails because of GLOO_DEVICE_TRANSPORT, which torch does not name."""
    try:
        yield
    except RuntimeError as error:
        value = os.environ.get("GLOO_DEVICE_TRANSPORT")
        if value is None or "unsupported gloo device" not in str(error):
            raise
        message = f"GLOO_DEVICE_TRANSPORT={value} is not supported by torch here: unset it, or use TCP"
        raise ConfigError(message) from error


def collective_timeout(hang_timeout_min: float) -> timedelta:
    """Return the timeout of collectives, longer than the hang limit of the agents, which then report the hang."""
    return timedelta(minutes=hang_timeout_min) + HANG_MARGIN


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks in place, and return it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def broadcast_from_rank_0(tensor: Tensor) -> None:
    """Overwrite a contiguous tensor with that of rank 0."""
    dist.broadcast(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor, src=0)  # gloo has no bool


def broadcast_buffers(module: nn.Module) -> None:
    """Overwrite the buffers with those of rank 0: only DDP keeps the running statistics of batch norms equal."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for buffer in module.buffers():
            broadcast_from_rank_0(buffer)


def gather_to_all(value: T) -> list[T]:
    """Return the values of all ranks, in rank order; a collective. Without a process group there is one rank."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def limit_memory(device: torch.device, limit_gb: float, overhead_mib: float) -> None:
    """Limit torch's memory on a GPU, so that a training that needs more runs out of memory.

    CUDA and NCCL need memory too, and allocate most of it later. So their usual need is subtracted from the limit.
    Raises ConfigError if the GPU has less memory than the limit, or if CUDA and NCCL alone need more.
    """
    free, total = torch.cuda.mem_get_info(device)
    used = max(total - free - torch.cuda.memory_reserved(device), int(overhead_mib * MIB))
    torch.cuda.set_per_process_memory_fraction(allowed_bytes(limit_gb, used, total) / total, device)


def allowed_bytes(limit_gb: float, used: int, total: int) -> int:
    """Return the bytes that torch may take of a GPU, of which ``used`` bytes are for others."""
    limit = int(limit_gb * GIB)
    if limit > total:
        raise ConfigError(
            f"cluster.gpu_memory_limit_gb={limit_gb:g} is more than this GPU has ({total / GIB:.1f} GiB): leave it out"
        )
    if limit <= used:
        raise ConfigError(
            f"cluster.gpu_memory_limit_gb={limit_gb:g}, but CUDA, NCCL and other programs need {used / GIB:.1f} GiB of "
            f"this GPU: set it to more than {used / GIB:.1f}"
        )
    return limit - used


def usable_bytes(device: torch.device) -> float:
    """Return the memory of a GPU that this process has or can get, without that of CUDA itself."""
    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.get_per_process_memory_fraction(device) * total
    return min(free + torch.cuda.memory_reserved(device), limit)
