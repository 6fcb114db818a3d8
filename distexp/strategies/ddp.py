"""torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.strategies.base import COMMUNICATION, DistributedModel
from distexp.strategies.single import offload_errors

if TYPE_CHECKING:
    from distexp.models.blueprint import Blueprint


class DDP:
    """The whole model on every worker; gradients are averaged while the backward pass runs."""

    requires: tuple[str, ...] = (COMMUNICATION,)

    def set_defaults(self, config: Config) -> None:
        """Leaves nothing open."""

    def validate(self, config: Config) -> list[str]:
        """Nothing to offload."""
        return offload_errors(config)

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """A DDP module over all workers."""
        workers = config.cluster.world_size
        return {
            "wrapper": "DistributedDataParallel",
            "world_size": workers,
            "mesh": [workers, 1],
            "sharded_units": 0,
            "offload": "none",
        }

    def setup(self, blueprint: Blueprint, config: Config, context: Context) -> DistributedModel:
        """Wraps the model on its device."""
        from torch.nn.parallel import DistributedDataParallel

        from distexp.strategies.torch_model import Distribution, TorchModel

        model = blueprint.model
        blueprint.materialize(model)
        wrapped = DistributedDataParallel(
            model,
            device_ids=[context.device] if context.device.type == "cuda" else None,
            bucket_cap_mb=config.ddp.bucket_cap_mb,
            static_graph=config.ddp.static_graph,
            find_unused_parameters=config.ddp.find_unused_parameters,
            gradient_as_bucket_view=True,
        )

        def synchronising(last_micro: bool) -> AbstractContextManager[Any]:
            return nullcontext() if last_micro else wrapped.no_sync()

        def distribution() -> Distribution:
            return Distribution(type(wrapped).__name__, mesh=[wrapped.process_group.size(), 1])

        return TorchModel(
            wrapped, config, context, synchronising=synchronising, autocast=True, distribution=distribution
        )
