"""One worker, nothing distributed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.strategies.base import DistributedModel

if TYPE_CHECKING:
    from distexp.models.blueprint import Blueprint


class Single:
    """The reference: plain torch on one device."""

    requires: tuple[str, ...] = ()

    def set_defaults(self, config: Config) -> None:
        """Leaves nothing open."""

    def validate(self, config: Config) -> list[str]:
        """One worker only, and nothing to offload."""
        errors = offload_errors(config)
        workers = config.cluster.world_size
        if workers != 1:
            errors.append(
                f"strategy=single trains on one worker, and cluster.nodes={config.cluster.nodes} x "
                f"cluster.workers_per_node={config.cluster.workers_per_node} makes {workers}: "
                "set both to 1, or choose strategy=ddp"
            )
        return errors

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """The bare model."""
        return {"wrapper": "none", "world_size": 1, "mesh": [1, 1], "sharded_units": 0, "offload": "none"}

    def setup(self, blueprint: Blueprint, config: Config, context: Context) -> DistributedModel:
        """Puts the model on its device."""
        from distexp.strategies.torch_model import Distribution, TorchModel

        model = blueprint.model
        blueprint.materialize(model)
        return TorchModel(
            model,
            config,
            context,
            synchronising=lambda last_micro: nullcontext(),
            autocast=True,
            distribution=lambda: Distribution(wrapper="none", mesh=[1, 1]),
        )


def offload_errors(config: Config) -> list[str]:
    """The error of offloading where every worker holds the whole model."""
    if not config.offload.enabled:
        return []
    return [
        f"offload={'pinned' if config.offload.pin_memory else 'true'} has nothing to move with "
        f"strategy={config.strategy.name}, which keeps all states on its device: "
        "choose strategy=fsdp, zero_stage=1,2,3, or offload=false"
    ]
