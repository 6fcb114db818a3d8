"""DeepSpeed models of both trainers: initialization, optimizer and weights.

DeepSpeed is imported only inside functions, because a prediction of memory works without it.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.models.blueprint import Blueprint, check_dimensions, persistent_buffers
from distexp.runs.record_sections import Built
from distexp.runs.run_dir import DS_CONFIG
from distexp.strategies.optimizer import build_optimizer, clip_gradients, parameter_groups
from distexp.strategies.torch_model import DTYPES, dtype_name
from distexp.strategies.zero.ds_config import describe_buckets, effective_config, fit_buckets, uses_autocast
from distexp.system.files import write_json


def build_settings(blueprint: Blueprint, config: Config, context: Context) -> dict[str, Any]:
    """Return the ds_config of a model; rank 0 writes it to the run directory."""
    check_dimensions(blueprint.model, "DeepSpeed")
    settings = effective_config(config, context.world_size)
    sizes, trained = parameter_sizes(blueprint.model)
    fitted = fit_buckets(settings, sum(sizes), max(sizes), sum(trained))
    if context.rank == 0:
        write_json(context.run_dir / DS_CONFIG, settings)
        if fitted:
            print(f"note: {describe_buckets(fitted, sum(trained))}", flush=True)
    return settings


def parameter_sizes(module: nn.Module) -> tuple[list[int], list[int]]:
    """Return the elements of each parameter, and of each trained one."""
    parameters = list(module.parameters())
    return [p.numel() for p in parameters], [p.numel() for p in parameters if p.requires_grad]


def link_partitions(optimizer: Any) -> None:
    """Link each parameter to its part of the partitions, before it is read or set.

    With ``round_robin_gradients``, DeepSpeed 0.19 links the parts of other parameters, unless a partition has padding.
    """
    if getattr(optimizer, "round_robin_gradients", False):
        padding = optimizer.round_robin_bit16_padding
        optimizer.round_robin_bit16_padding = [[True] for _ in padding]
        optimizer._link_all_hp_params()
        optimizer.round_robin_bit16_padding = padding
        optimizer._hp_optimizer_states_linked = False


def restore_masters(engine: Any, blueprint: Blueprint) -> None:
    """Set the fp32 masters to the initial weights before rounding.

    DeepSpeed initializes the masters from weights that are already rounded to 16 bits. Then a first update of less than
    half a 16-bit step changes no weight. The loss was up to 6 % higher because of that.
    """
    from deepspeed.utils import safe_set_full_fp32_param

    link_partitions(engine.optimizer)
    unpartitioned = unpartitioned_masters(engine)
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue  # It has no master.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        value = blueprint.get_tensor(name, torch.empty(shape, dtype=torch.float32, device="meta"))
        if (master := unpartitioned.get(id(parameter))) is not None:
            master.data.copy_(value)
        else:
            safe_set_full_fp32_param(parameter, value)


def checkpoint_classes() -> list[Any]:
    """Return the classes of DeepSpeed whose objects are in its checkpoints."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def keeps_plain_gradients(config: Config) -> bool:
    """Return whether gradients stay in ``.grad``, whose norm DeepSpeed does not store: at stage 0 with fp32 weights."""
    return config.deepspeed.zero_stage == 0 and not in_16_bits(config)


def unpartitioned_norm(engine: Any) -> Tensor:
    """Return the norm of the gradients in ``.grad``."""
    return clip_gradients(engine.module.parameters(), limit=None)


def unpartitioned_weights(engine: Any, *, only_trained: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield name and full value of each parameter, or each trained one, and persistent buffer; a collective."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    link_partitions(engine.optimizer)
    partitioned, unpartitioned = engine.zero_optimization_stage() > 0, unpartitioned_masters(engine)
    for name, parameter in engine.module.named_parameters():
        if partitioned and parameter.requires_grad:
            yield name, safe_get_full_fp32_param(parameter).detach()
        elif parameter.requires_grad or not only_trained:
            master = unpartitioned.get(id(parameter), parameter)
            with GatheredParameters([master], enabled=hasattr(master, "ds_id")):  # at stage 3, if it is not trained
                full = master.detach().to(torch.float32, copy=True)
            yield name, full
    yield from persistent_buffers(engine.module)


def in_16_bits(config: Config) -> bool:
    """Return whether DeepSpeed stores the weights in bf16 or fp16, with fp32 masters."""
    return config.precision.name != "fp32" and not uses_autocast(config)


def initialize_weights(blueprint: Blueprint, config: Config, settings: dict[str, Any]) -> None:
    """Initialize the weights in DeepSpeed's precision. Stage 3 partitions each module at once, to save memory."""
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import Init

    deepspeed.init_distributed(dist_init_required=False)  # uses the existing process group
    for module in reversed(list(blueprint.model.modules())):
        blueprint.materialize(module, recurse=False)
        if in_16_bits(config):
            cast_weights(module, DTYPES[config.precision.name])
        if config.deepspeed.zero_stage == 3 and any(True for _ in module.parameters(recurse=False)):
            Init(module=module, config_dict_or_path=settings)


def cast_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights of one module. Buffers, such as the frequencies of RoPE, stay in fp32 as in DeepSpeed."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def build_optimizer_for(model: nn.Module, config: Config, context: Context) -> torch.optim.Optimizer:
    """Build AdamW or SGD, or DeepSpeed's CPU Adam for offloaded states."""
    train = config.train
    if config.offload.enabled and config.deepspeed.cpu_optimizer == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        groups, betas = parameter_groups(model, train.weight_decay), tuple(train.betas)
        optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
            groups, lr=train.learning_rate, betas=betas, eps=train.eps, adamw_mode=True
        )
        return optimizer
    fused = context.device.type == "cuda" and not config.offload.enabled
    return build_optimizer(model, train, fused=fused)


def describe(engine: Any, *, trainer: str = "native") -> Built:
    """Return what was built, read from a deepspeed.DeepSpeedEngine."""
    stage = engine.zero_optimization_stage()
    parameters = list(engine.module.parameters())
    world = dist.get_world_size(engine.seq_data_parallel_group)
    optimizer, compute_dtype = engine.optimizer, parameters[0].dtype
    inner, name = getattr(optimizer, "optimizer", None), type(optimizer).__name__
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
        compute_dtype=dtype_name(engine.torch_autocast_dtype() if engine.torch_autocast_enabled() else compute_dtype),
        optimizer=name if inner is None or inner is optimizer else f"{name}({type(inner).__name__})",
        parameters=sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        trained_parameters=sum(getattr(p, "ds_numel", p.numel()) for p in parameters if p.requires_grad),
    )


def _offload(engine: Any, stage: int) -> str:
    zero = engine.optimizer
    if stage == 3:
        offloaded = {"optimizer": zero.offload_optimizer, "parameters": zero.offload_param}
    else:
        # BF16_Optimizer (stage 1 with data_types in the ds_config) has no such attribute and cannot offload.
        offloaded = {"optimizer": stage > 0 and getattr(zero, "cpu_offload", False)}
    return "+".join(name for name, is_offloaded in offloaded.items() if is_offloaded) or "none"


def unpartitioned_masters(engine: Any) -> dict[int, Tensor]:
    """Return the fp32 masters of stage 0 by the id of the 16-bit parameter; empty at other stages and in fp32."""
    if engine.zero_optimization_stage() > 0:
        return {}
    optimizer = engine.optimizer
    groups = zip(getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=True)
    return {id(rounded): master for group in groups for rounded, master in zip(*group, strict=True)}


def repair_16_bits(engine: Any) -> None:
    """Reset the states of stage 0. With fp16, also scale its losses, and remove the scale from its gradient norms.

    DeepSpeed 0.19 runs one step of AdamW or SGD with gradients of 0 to allocate the states. Without a reset, AdamW's
    first updates would be smaller than those of the other strategies. The step also changes the masters, so they must
    be restored afterwards. With fp16, the optimizer divides the gradients by the loss scale, but ``engine.backward``
    does not multiply the loss by it, as it does at the other stages. So a model hardly learns. Nothing is done at the
    other stages and in fp32.
    """
    if unpartitioned_masters(engine):
        for state in engine.optimizer.optimizer.state.values():
            for value in filter(torch.is_tensor, state.values()):
                value.zero_()
        if engine.fp16_enabled():
            backward, step, optimizer = engine.backward, engine.step, engine.optimizer

            def scaled_backward(loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
                # Setting the gradient of the loss is also right for a version of DeepSpeed that scales the loss.
                factor = optimizer.loss_scale / (engine.gradient_accumulation_steps() if scale_wrt_gas else 1)
                loss.register_hook(lambda gradient: torch.full_like(gradient, factor))  # type: ignore[no-untyped-call]
                result: Tensor = backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
                return result

            def step_with_norm(*arguments: Any) -> None:
                updates, scale = engine.is_gradient_accumulation_boundary(), optimizer.loss_scale
                step(*arguments)
                if updates:
                    engine._global_grad_norm /= scale

            engine.backward, engine.step = scaled_backward, step_with_norm
