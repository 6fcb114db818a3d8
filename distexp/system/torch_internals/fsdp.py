"""Private APIs of FSDP: its units, their sizes, and what it does with their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from distexp.system.torch_internals.errors import explained


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


def read_fsdp_unit_sizes(model: torch.nn.Module) -> list[FSDPUnitSize]:
    """Return the size of each FSDP unit that has parameters, in the order of ``model.modules()``; empty: no FSDP."""
    found = []
    for members in group_by_fsdp_unit(model):
        with explained("FSDPModule._get_fsdp_state()._fsdp_param_group.fsdp_params"):
            group = cast("Any", members[0])._get_fsdp_state()._fsdp_param_group
            if group is None:
                continue
            policy, parameters = group.mp_policy, [each.sharded_param for each in group.fsdp_params]
            sizes = tuple(parameter.numel() for parameter in parameters)
            gathered = (policy.param_dtype or parameters[0].dtype).itemsize
            reduced = (policy.reduce_dtype or policy.param_dtype or parameters[0].dtype).itemsize
            resharded = group.post_forward_mesh_info is not None
            total = sum(sizes)
            found.append(FSDPUnitSize(group._module_fqn or "", sizes, total * gathered, total * reduced, resharded))
    return found


def group_by_fsdp_unit(model: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """Return the modules of each FSDP unit, in the order of ``model.modules()``."""
    from torch.distributed.fsdp import FSDPModule  # importing it takes a second

    units: dict[int, list[torch.nn.Module]] = {}
    with explained("FSDPModule._get_fsdp_state()"):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                units.setdefault(id(module._get_fsdp_state()), []).append(module)
    return list(units.values())


@contextmanager
def fsdp_device(device: torch.device) -> Iterator[None]:
    """Let ``fully_shard`` use this device for meshes of CPUs, during the block."""
    with explained("torch.distributed.fsdp._fully_shard._fully_shard._get_device_from_mesh"):
        from torch.distributed.fsdp._fully_shard import _fully_shard

        module: Any = _fully_shard
        original = module._get_device_from_mesh
    module._get_device_from_mesh = lambda mesh: device
    try:
        yield
    finally:
        module._get_device_from_mesh = original
