"""What the Trainer made of a model, read off the live objects and never off its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from distexp.runs.record import Built
from distexp.strategies import ds_model
from distexp.strategies.fsdp import distribution_of
from distexp.strategies.torch_model import DTYPES, Distribution
from distexp.strategies.torch_model import describe as describe_torch

ENGINE = "hf_trainer"


def describe(trainer: Any, strategy: str, bare: nn.Module, units: Sequence[nn.Module]) -> Built:
    """Which wrapper there is, and what it did.

    Args:
        trainer: a transformers.Trainer that has begun to train.
        strategy: the name that the record carries; what was built is seen by the rest.
        bare: the model that the Trainer was given.
        units: its blocks, that FSDP was to shard apart.

    Raises:
        RuntimeError: FSDP sharded the model without its blocks.
    """
    wrapped = trainer.model_wrapped
    if type(wrapped).__name__ == "DeepSpeedEngine":
        return ds_model.describe(wrapped, engine=ENGINE)
    optimizer = innermost(trainer.optimizer)
    distribution = _distribution(wrapped, bare, units)
    # accelerate casts around ``forward``, and leaves the one that it replaced beside it.
    casts = "_original_forward" in vars(bare)
    autocast = DTYPES[trainer.accelerator.mixed_precision] if casts else None
    return describe_torch(wrapped, optimizer, distribution, autocast, strategy=strategy, engine=ENGINE)


def innermost(optimizer: Any) -> Any:
    """The optimizer that does the arithmetic, inside those of accelerate and DeepSpeed."""
    while (inner := getattr(optimizer, "optimizer", None)) not in (None, optimizer):
        optimizer = inner
    return optimizer


def _distribution(wrapped: nn.Module, bare: nn.Module, units: Sequence[nn.Module]) -> Distribution:
    if isinstance(wrapped, DistributedDataParallel):
        return Distribution(type(wrapped).__name__, mesh=[wrapped.process_group.size(), 1])
    if isinstance(wrapped, FSDPModule):
        whole = [unit for unit in units if not isinstance(unit, FSDPModule)]
        if whole:
            raise RuntimeError(f"FSDP left {len(whole)} of {len(units)} blocks without a unit of their own")
        # accelerate keeps the root and the end of the model gathered whatever is asked, as torch does by itself.
        return distribution_of(wrapped, units)
    return Distribution("none" if wrapped is bare else type(wrapped).__name__, mesh=[1, 1])
