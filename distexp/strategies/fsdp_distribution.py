"""What FSDP built, read from the live parameters and units."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from distexp.strategies.torch_model import Distribution
from distexp.system.torch_internals.fsdp import group_by_fsdp_unit, read_fsdp_policies


def read_distribution(model: nn.Module, inner: Sequence[nn.Module]) -> Distribution:
    """Return how FSDP distributed a model, read from its parameters and units.

    Args:
        model: the root unit.
        inner: the blocks, or the model if it has none. They show whether parameters are resharded after the forward
            pass.

    Raises:
        RuntimeError: parameters were left unsharded.
    """
    units = [members[0] for members in group_by_fsdp_unit(model)]
    parameters = list(model.parameters())
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    if len(sharded) != len(parameters):
        raise RuntimeError(f"FSDP left {len(parameters) - len(sharded)} of {len(parameters)} parameters unsharded")
    (shape,) = {tuple(p.device_mesh.shape) for p in sharded}
    policies = read_fsdp_policies(units)
    reshards = {policy.reshards_after_forward for policy in read_fsdp_policies(inner)}
    shared = max(len(set(inner).intersection(members)) for members in group_by_fsdp_unit(model))
    offloaded = all(policy.offloads_to_cpu for policy in policies)
    on_cpu = all(p.to_local().device.type == "cpu" for p in sharded)
    return Distribution(
        wrapper=f"fully_shard(reshard_after_forward={'/'.join(map(str, sorted(reshards)))})",
        mesh=[1, *shape] if len(shape) == 1 else list(shape),
        sharded_units=len(units),
        offload="parameters+gradients+optimizer" if offloaded and on_cpu else "none",
        compute_dtype=policies[0].param_dtype,
        blocks_per_unit=shared,
    )
