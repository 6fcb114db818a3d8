"""DDP and FSDP whose collectives do nothing, to measure what the collectives cost a step.

All else is the same: buckets, copies, hooks, kernels. The workers train different models, and FSDP computes with
weights that were never gathered. So only the times of such a run are useful.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import parallel

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.strategies import ddp, fsdp, fsdp_units
from distexp.strategies.base import DistributedModel
from distexp.strategies.ddp_reduction import GradBucket

if TYPE_CHECKING:
    from distexp.models.blueprint import Blueprint


class SilentDDP(ddp.DDP):
    """DDP over a process group of the backend ``fake``."""

    def setup(self, blueprint: "Blueprint", config: Config, context: Context) -> DistributedModel:
        """Wrap the model; the first comparison of the parameters is left out, because it needs real collectives."""
        wrap = partial(parallel.DistributedDataParallel, process_group=_fake_group(context), init_sync=False)

        def wrap_silently(*args: Any, **options: Any) -> parallel.DistributedDataParallel:
            wrapped = wrap(*args, **options)
            wrapped.register_comm_hook(None, _return_bucket)
            return wrapped

        with patch.object(parallel, "DistributedDataParallel", wrap_silently):
            return super().setup(blueprint, config, context)


class SilentFSDP(fsdp.FSDP):
    """FSDP over a process group of the backend ``fake``."""

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """Leave out the mesh, which has one axis for every sharding."""
        return {name: value for name, value in super().expected_build(config).items() if name != "mesh"}

    def setup(self, blueprint: "Blueprint", config: Config, context: Context) -> DistributedModel:
        """Shard the model over the fake group."""
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh.from_group(_fake_group(context), context.device.type, mesh_dim_names=("shard",))
        with patch.object(fsdp_units, "build_mesh", lambda *_: mesh):
            return super().setup(blueprint, config, context)


# torch compares these annotations with its classes, so they must not be texts.
def _return_bucket(_: object, bucket: GradBucket) -> Future[Tensor]:
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer())
    return done


def _fake_group(context: Context) -> Any:
    """Return a group of all ranks whose collectives return at once. Each worker calls this."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # It registers the backend.

    return dist.new_group(list(range(context.world_size)), backend="fake")
