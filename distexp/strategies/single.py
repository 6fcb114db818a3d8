"""Training on one worker, without distribution."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from distexp.config import WHOLE_MODEL, Config
from distexp.distributed.context import Context
from distexp.strategies.base import DistributedModel, Strategy, whole_model_values
from distexp.strategies.communication import StepCommunication
from distexp.strategies.traits import CpuMemory, Settings, common_values

if TYPE_CHECKING:
    from distexp.models.blueprint import Blueprint


REFERENCE = ("strategy=single", "cluster.nodes=1", "cluster.workers_per_node=1", "kernels=reference", "offload=false")
"""Overrides of the configuration whose losses all others must have."""


class SingleCommunication(StepCommunication):
    """No collectives: one worker has all optimizer states."""

    is_planned: ClassVar[bool] = True
    shards_optimizer: ClassVar[bool] = False


class Single(Strategy):
    """Plain PyTorch on one device: the reference for all other strategies."""

    requires: ClassVar[tuple[str, ...]] = ()
    compile_scopes: ClassVar[tuple[str, ...]] = ("blocks", *WHOLE_MODEL)
    casts_once_per_step: ClassVar[bool] = True
    fuses_update: ClassVar[bool] = True
    keeps_channels_last: ClassVar[bool] = True
    gives_whole_matrices: ClassVar[bool] = True
    supports_low_bits: ClassVar[bool] = True
    hf_adapter: ClassVar[str | None] = "distexp.engines.hf_adapters.SingleAdapter"
    is_reference: ClassVar[bool] = True
    complexity: ClassVar[int] = 0
    max_workers: ClassVar[int | None] = 1
    is_compilable: ClassVar[bool] = True

    def fast_values(self, config: Config) -> Mapping[str, Any]:
        """Compile the whole model, and cast the weights once per step."""
        return whole_model_values(config)

    def validate(self, config: Config) -> list[str]:
        """Require one worker and no offload."""
        cluster, errors = config.cluster, offload_errors(config)
        if cluster.world_size != 1:
            errors.append(
                f"strategy=single trains on one worker, but cluster.nodes={cluster.nodes} x "
                f"cluster.workers_per_node={cluster.workers_per_node} makes {cluster.world_size}: "
                "set both to 1, or choose strategy=ddp"
            )
        return errors

    def communication(self, config: Settings) -> SingleCommunication:
        """Return that one worker has no collectives."""
        return SingleCommunication(**common_values(config))

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """Require the model without a wrapper."""
        return {"wrapper": "none", "world_size": 1, "mesh": [1, 1], "sharded_units": 0, "offload": "none"}

    def setup(self, blueprint: Blueprint, config: Config, context: Context) -> DistributedModel:
        """Initialize the model on its device."""
        from distexp.models.transforms import set_memory_format
        from distexp.strategies.ddp_reduction import copy_weights
        from distexp.strategies.torch_model import Distribution, TorchModel

        module = blueprint.model
        blueprint.materialize(module)
        set_memory_format(module, config)
        return TorchModel(
            module,
            config,
            context,
            sync_context=lambda last_micro: nullcontext(),
            autocast=True,
            distribution=lambda: Distribution(wrapper="none", mesh=[1, 1]),
            weights=copy_weights(module, config),
        )

    host_mib: ClassVar[float] = 1150.0
    cpu_memory: ClassVar[CpuMemory | None] = CpuMemory(65.0, reserve=1.2)


def offload_errors(config: Config) -> list[str]:
    """Return an error if offload is enabled. Workers that share rows have one already: no strategy offloads there."""
    if not config.offload.enabled or config.parallel.copies > 1:
        return []
    return [
        f"offload={'pinned' if config.offload.pin_memory else 'true'} is not supported by "
        f"strategy={config.strategy.name}: choose strategy=fsdp, zero_stage=1,2,3, or offload=false"
    ]
