"""What DeepSpeed built, read from its live objects."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from distexp.runs.record_sections import Built
from distexp.strategies.torch_model import dtype_name


def describe(engine: Any, *, trainer: str = "native") -> Built:
    """Return what was built, read from a deepspeed.DeepSpeedEngine.

    Args:
        engine: the DeepSpeedEngine.
        trainer: the value of ``engine``, for the record.
    """
    stage = engine.zero_optimization_stage()
    parameters = list(engine.module.parameters())
    world = dist.get_world_size(engine.seq_data_parallel_group)
    return Built(
        strategy="deepspeed",
        engine=trainer,
        wrapper=type(engine).__name__,
        world_size=world,
        mesh=[world, 1] if stage == 0 else [1, world],
        sharded_units=sum(1 for p in parameters if hasattr(p, "ds_tensor")),
        zero_stage=stage,
        offload=_offload(engine, stage),
        param_dtype=dtype_name(parameters[0].dtype),
        compute_dtype=dtype_name(
            engine.torch_autocast_dtype() if engine.torch_autocast_enabled() else parameters[0].dtype
        ),
        optimizer=_optimizer_name(engine.optimizer),
        parameters=sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
    )


def _optimizer_name(optimizer: Any) -> str:
    """Return the optimizer's name, for example ``DeepSpeedZeroOptimizer(AdamW)``."""
    inner = getattr(optimizer, "optimizer", None)
    name = type(optimizer).__name__
    return name if inner is None or inner is optimizer else f"{name}({type(inner).__name__})"


def _offload(engine: Any, stage: int) -> str:
    """Return what is offloaded to the CPU, read from DeepSpeed's optimizer."""
    if stage == 0:
        return "none"
    offloaded = []
    zero = engine.optimizer
    if stage == 3:
        offloaded += ["optimizer"] if zero.offload_optimizer else []
        offloaded += ["parameters"] if zero.offload_param else []
    else:
        # BF16_Optimizer (stage 1 with data_types in the ds_config) has no such attribute and cannot offload.
        offloaded += ["optimizer"] if getattr(zero, "cpu_offload", False) else []
    return "+".join(offloaded) or "none"
