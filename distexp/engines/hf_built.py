"""Description of what ``transformers.Trainer`` built, read from the live objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from distexp.runs.record_sections import Built
from distexp.strategies.ds_built import describe as describe_deepspeed
from distexp.strategies.fsdp_distribution import read_distribution
from distexp.strategies.model_tensors import innermost_optimizer
from distexp.strategies.torch_model import DTYPES, Distribution, read_ddp_distribution
from distexp.strategies.torch_model import describe as describe_torch

ENGINE = "hf_trainer"


def describe(trainer: Any, strategy: str, model: nn.Module, units: Sequence[nn.Module]) -> Built:
    """Return what was built.

    Args:
        trainer: a transformers.Trainer that has started to train.
        strategy: name of the strategy, for the record; everything else is read from the live objects.
        model: the model that the Trainer was given.
        units: the blocks that FSDP should have sharded as separate units.

    Raises:
        RuntimeError: FSDP did not shard all blocks.
    """
    wrapped = trainer.model_wrapped
    if type(wrapped).__name__ == "DeepSpeedEngine":
        return describe_deepspeed(wrapped, trainer=ENGINE)
    distribution = _distribution(wrapped, model, units)
    # accelerate replaces ``forward`` if it casts, and keeps the original in this attribute.
    casts = "_original_forward" in vars(model)
    autocast_dtype = DTYPES[trainer.accelerator.mixed_precision] if casts else None
    optimizer = innermost_optimizer(trainer.optimizer)
    return describe_torch(wrapped, optimizer, distribution, autocast_dtype, strategy=strategy, engine=ENGINE)


def _distribution(wrapped: nn.Module, model: nn.Module, units: Sequence[nn.Module]) -> Distribution:
    if isinstance(wrapped, DistributedDataParallel):
        return read_ddp_distribution(wrapped)
    if isinstance(wrapped, FSDPModule):
        missing = [unit for unit in units if not isinstance(unit, FSDPModule)]
        if missing:
            raise RuntimeError(f"FSDP did not shard {len(missing)} of {len(units)} blocks as separate units")
        # accelerate never reshards the root and the last unit after the forward pass; torch does the same by default.
        return read_distribution(wrapped, units)
    return Distribution("none" if wrapped is model else type(wrapped).__name__, mesh=[1, 1])
