"""Private APIs of DistributedDataParallel, FSDP and process groups."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch.distributed import distributed_c10d

from distexp.system.torch_internals.tensors import explained, private_module, replaced, without_fake_mode


def ddp_communication_dtype(wrapped: Any) -> torch.dtype:
    """Return the data type in which a DistributedDataParallel sends gradients."""
    with explained("DistributedDataParallel._get_ddp_logging_data"):
        hook = wrapped._get_ddp_logging_data().get("comm_hook", "")
        if "bf16" in hook or "fp32" in hook:  # the names of the hooks of torch and of distexp
            return torch.bfloat16 if "bf16" in hook else torch.float32
        return cast("torch.dtype", next(p.dtype for p in wrapped.parameters() if p.requires_grad))


def ddp_bucket_sizes(wrapped: Any) -> list[int]:
    """Return the bytes of the buckets of a DistributedDataParallel, as rebuilt after its first backward pass."""
    with explained("DistributedDataParallel._get_ddp_logging_data"):
        data = wrapped._get_ddp_logging_data()
        text = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
        return [int(size) for size in text.split(",") if size.strip()]


@dataclass(frozen=True)
class FSDPPolicies:
    """What FSDP does with the parameters of one unit."""

    reshards_after_forward: bool
    offloads_to_cpu: bool
    param_dtype: torch.dtype | None  # None: the dtype of the parameters


def read_fsdp_policies(units: Sequence[Any]) -> list[FSDPPolicies]:
    """Return the policies of each FSDP unit that has parameters."""
    with explained("FSDPModule._get_fsdp_state()._fsdp_param_group"):
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
        return [
            FSDPPolicies(
                reshards_after_forward=group.post_forward_mesh_info is not None,
                offloads_to_cpu=type(group.offload_policy).__name__ == "CPUOffloadPolicy",
                param_dtype=group.mp_policy.param_dtype,
            )
            for group in groups
            if group is not None
        ]


@dataclass(frozen=True)
class FSDPUnitSize:
    """Parameters of a unit of FSDP. The name is that of its annotations in a profile; empty: the root."""

    name: str
    elements: tuple[int, ...]
    gathered_bytes: int  # of all parameters in an all-gather
    reduced_bytes: int  # of all gradients in a reduce-scatter
    reshards_after_forward: bool
    workers: int = 2  # over which the unit is sharded or copied; 1 if a group of ``parallel`` has no other one
    shards: bool = True  # whether it is sharded, and not only copied


def read_fsdp_unit_sizes(model: torch.nn.Module) -> list[FSDPUnitSize]:
    """Return the size of each FSDP unit that has parameters, in the order of ``model.modules()``; empty: no FSDP."""
    with explained("FSDPModule._get_fsdp_state()._fsdp_param_group.fsdp_params"):
        groups = [cast("Any", modules[0])._get_fsdp_state()._fsdp_param_group for modules in group_by_fsdp_unit(model)]
        return [_size_of(group) for group in groups if group is not None]


def _size_of(group: Any) -> FSDPUnitSize:
    parameters = [parameter.sharded_param for parameter in group.fsdp_params]
    # With ``parallel.tensor`` a worker gathers its part of a weight only.
    elements = tuple(parameter._orig_size.numel() for parameter in group.fsdp_params)
    gathered_dtype = group.mp_policy.param_dtype or parameters[0].dtype
    reduced_dtype = group.mp_policy.reduce_dtype or gathered_dtype
    return FSDPUnitSize(
        name=group._module_fqn or "",
        elements=elements,
        gathered_bytes=sum(elements) * gathered_dtype.itemsize,
        reduced_bytes=sum(e for e, p in zip(elements, parameters, strict=True) if p.requires_grad)
        * reduced_dtype.itemsize,
        reshards_after_forward=group.post_forward_mesh_info is not None,
        workers=prod(getattr(group.mesh_info, name, 1) for name in ("shard_mesh_size", "replicate_mesh_size")),
        shards=hasattr(group.mesh_info, "shard_mesh_size"),
    )


def group_by_fsdp_unit(model: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """Return the modules of each FSDP unit, in the order of ``model.modules()``."""
    from torch.distributed.fsdp import FSDPModule  # importing it takes a second

    units: dict[int, list[torch.nn.Module]] = {}
    with explained("FSDPModule._get_fsdp_state()"):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                units.setdefault(id(module._get_fsdp_state()), []).append(module)
    return list(units.values())


def unsharded_fsdp_parameters(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Return each parameter of FSDP as it is in a forward pass (None before the first one), and its shard."""
    with explained("FSDPModule._get_fsdp_state()._fsdp_param_group.fsdp_params"):
        states = [members[0]._get_fsdp_state() for members in group_by_fsdp_unit(model)]  # type: ignore[operator]
        groups = [group for state in states if (group := state._fsdp_param_group) is not None]
        members = [member for group in groups for member in group.fsdp_params]
        return [(getattr(member, "_unsharded_param", None), member.sharded_param) for member in members]


REPLICATION = "torch.distributed._composable.replicate_with_fsdp"
"""Module of torch with DDP on top of FSDP's units. DistributedDataParallel itself cannot keep DTensors."""


@contextmanager
def fsdp_device(device: torch.device) -> Iterator[None]:
    """Let ``fully_shard`` and ``replicate`` use this device for meshes of CPUs, during the block."""
    modules = ["torch.distributed.fsdp._fully_shard._fully_shard"]
    if find_spec(REPLICATION) is not None:
        modules.append(REPLICATION)
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(replaced(module, "_get_device_from_mesh", lambda _: lambda mesh: device))
        yield


@contextmanager
def meshes_with_values() -> Iterator[None]:
    """Let the methods of device meshes use real tensors, also in a fake mode, during the block. They read values."""
    mesh = torch.distributed.device_mesh.DeviceMesh
    with explained(f"DeviceMesh.{', '.join(MESH_METHODS)}"):
        originals = {name: mesh.__dict__[name] for name in MESH_METHODS}
    for name, original in originals.items():
        is_static = isinstance(original, staticmethod)
        wrapped = without_fake_mode()(original.__func__ if is_static else original)
        setattr(mesh, name, staticmethod(wrapped) if is_static else wrapped)
    try:
        with replaced("torch.distributed.device_mesh", "init_device_mesh", without_fake_mode()):
            yield
    finally:
        for name, original in originals.items():
            setattr(mesh, name, original)


def propagation_without_memory() -> AbstractContextManager[None]:
    """Let DTensors find the shapes of results outside of the fake mode of a trace, during the block.

    Inside of it, the whole matrices with which torch 2.11 finds them would count as memory.
    """
    name = "ShardingPropagator._propagate_tensor_meta_non_cached"
    return replaced("torch.distributed.tensor._sharding_prop", name, without_fake_mode())


MESH_METHODS = ("__init__", "__getitem__", "_concatenate", "get_coordinate", "get_local_rank", "get_group")


def set_default_timeout(timeout: timedelta) -> None:
    """Set the timeout of the process groups that are created later.

    A device mesh creates its groups with torch's defaults, which are 10 minutes for NCCL and 30 minutes for gloo. It
    has no argument for another timeout.
    """
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    module = private_module("torch.distributed.distributed_c10d", *names)
    for name in names:
        setattr(module, name, timeout)


@contextmanager
def fake_process_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make this process a rank of a group whose collectives do nothing, during the block."""
    store = private_module("torch.testing._internal.distributed.fake_pg", "FakeStore").FakeStore()
    debug, clear = "torch.distributed.tensor.debug", "_clear_sharding_prop_cache"
    torch.distributed.init_process_group("fake", rank=rank, world_size=world_size, store=store)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        getattr(private_module(debug, clear), clear)()  # Results of DTensor have meshes with the groups of this rank.


def stages_of_known_shapes() -> AbstractContextManager[None]:
    """Let the stages of a pipeline rely on the shapes that they were given, without asking others, during the block.

    Since torch 2.13 the workers vote on that, and read the result.
    """
    schedules, name = "torch.distributed.pipelining.schedules", "_PipelineSchedule._warmup_p2p"
    kind = private_module(schedules, "_PipelineSchedule")._PipelineSchedule
    if not hasattr(kind, "_warmup_p2p"):
        return nullcontext()
    mode = private_module("torch.distributed.pipelining._utils", "InferenceMode").InferenceMode.STATIC

    def set_static(schedule: Any, stages: Any, *_: Any, **__: Any) -> None:
        for stage in stages:
            stage._inference_mode = mode

    return replaced(schedules, name, lambda _: set_static)


def has_several_groups() -> bool:
    """Return whether this process is in several process groups, not counting copies and groups of one rank."""
    with explained("torch.distributed.distributed_c10d._world.pg_group_ranks"):
        groups = {tuple(sorted(ranks)) for ranks in distributed_c10d._world.pg_group_ranks.values()}
    return sum(len(ranks) > 1 for ranks in groups) > 1


T = TypeVar("T")

DATA = "distexp:data"
"""The training loop waits for a batch."""
OPTIMIZER = "distexp:optimizer"
"""Gradient clipping, update of the weights, and clearing of the gradients."""


class _State:
    """Whether the profiler of this process runs."""

    active = False


def activate_annotations(*, active: bool) -> None:
    """Turn annotations on while the profiler runs, or off."""
    _State.active = active


def annotate(name: str) -> AbstractContextManager[Any]:
    """Return a context whose duration the profiler records under a name. Without the profiler it checks a flag only."""
    if not _State.active:
        return nullcontext()
    from torch.profiler import record_function

    return record_function(name)


def annotate_items(name: str, items: Iterable[T]) -> Iterator[T]:
    """Yield the items; the time until each one is there is annotated."""
    iterator = iter(items)
    while True:
        with annotate(name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item
