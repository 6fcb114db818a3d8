"""A first-class strategy that only the tests have, with its option in ``toy_conf``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from distexp.config import Config
from distexp.runs.step_files import NEXT, Item, StepModel
from distexp.strategies.base import Strategy
from distexp.strategies.communication import StepCommunication, add_norm, element_count, insert_buckets
from distexp.strategies.traits import CpuMemory, Settings, common_values

CONF = Path(__file__).with_name("toy_conf")
"""Folder of configurations with the option ``strategy=toy``."""

TOY = ("--config-dir", str(CONF), "trusted_packages=[tests]")
"""Arguments that make the option ``strategy=toy`` available."""


@dataclass(frozen=True, kw_only=True)
class OneReduction(StepCommunication):
    """One all-reduce of all gradients at the end of the backward pass, which the optimizer awaits."""

    is_planned: ClassVar[bool] = True

    @property
    def shards_optimizer(self) -> bool:
        """Return False: each worker updates all weights."""
        return False

    def plan(self, items: list[Item], model: StepModel, micro_batches: int) -> list[Item]:
        """Return the items with the all-reduce in the last micro-batch."""
        size = element_count(model) * self.gradient_bytes
        return add_norm(insert_buckets(items, [size], micro_batches - 1, awaited=NEXT))


class AllReduce(Strategy):
    """Data parallelism with one all-reduce of all gradients, in one flat tensor."""

    cpu_memory: ClassVar[CpuMemory | None] = CpuMemory(50.0, reserve=1.2)
    equals_reference: ClassVar[bool] = True  # One worker has nothing to reduce.
    complexity: ClassVar[int] = 1
    lighter: ClassVar[str] = "sharding=full_shard"

    def main_option(self, config: Config) -> str:
        """Return what tables show after the name."""
        return "one reduction"

    def launch_factor(self, config: Config) -> float:
        """Return the factor of DDP."""
        return 1.4

    def overlaps_communication(self, config: Config) -> bool:
        """Return False: the reduction follows the backward pass."""
        return False

    def communication(self, config: Settings) -> OneReduction:
        """Return the collectives of a step."""
        return OneReduction(**common_values(config))

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """Require all workers."""
        workers = config.cluster.world_size
        return {"wrapper": "all-reduce", "world_size": workers, "mesh": [workers, 1], "offload": "none"}

    def setup(self, blueprint: Any, config: Config, context: Any) -> Any:
        """Initialize the model, and reduce its gradients after the last micro-batch."""
        import torch
        import torch.distributed as dist

        from distexp.strategies.torch_model import Distribution, TorchModel

        model, workers = blueprint.model, config.cluster.world_size
        blueprint.materialize(model)

        @contextmanager
        def sync_context(last_micro: bool) -> Iterator[None]:
            yield  # The forward and backward pass run here.
            if last_micro:
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                dist.all_reduce(flat)
                parts = (flat / workers).split([gradient.numel() for gradient in gradients])
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient.copy_(part.view_as(gradient))

        def distribution() -> Distribution:
            return Distribution(wrapper="all-reduce", mesh=[workers, 1])

        return TorchModel(model, config, context, sync_context=sync_context, autocast=True, distribution=distribution)
