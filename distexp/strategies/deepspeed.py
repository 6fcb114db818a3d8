"""DeepSpeed's ZeRO, stages 0 to 3, with and without offloading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distexp.config import Config
from distexp.results import Built, write_json
from distexp.strategies.base import Context, Engine
from distexp.strategies.ds_config import BUCKETS, at, autocasts, conflicts, effective_config, fit_buckets, read_or_empty

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from distexp.data.base import Batch
    from distexp.models.blueprint import Blueprint

TAG = "state"
"""DeepSpeed's name for what it puts into a checkpoint's folder."""

STAGES = (0, 1, 2, 3)
DEFAULT_STAGE = 2


class DeepSpeed:
    """States partitioned over the workers by ZeRO."""

    def complete(self, config: Config) -> None:
        """The stage of the user's file, else 2; offloaded states go to DeepSpeed's CPU Adam on GPUs."""
        options = config.deepspeed
        if options.zero_stage is None:
            stage = at(read_or_empty(options.config_file), ("zero_optimization", "stage"))
            options.zero_stage = DEFAULT_STAGE if stage in (None, "auto") else stage
        if options.cpu_optimizer == "auto":
            options.cpu_optimizer = "deepspeed" if config.cluster.device == "cuda" else "torch"

    def validate(self, config: Config) -> list[str]:
        """A stage that exists and has something to offload, bucket sizes, the user's own file."""
        options, stage = config.deepspeed, config.deepspeed.zero_stage
        faults = []
        if stage not in STAGES:
            return [f"deepspeed.zero_stage={stage} is not one of 0, 1, 2, 3"]
        if config.offload.enabled and stage == 0:
            faults.append(
                "offload=true needs partitioned states, and zero_stage=0 partitions none: "
                "choose zero_stage=1,2,3 or offload=false"
            )
        if options.cpu_optimizer not in ("torch", "deepspeed"):
            faults.append(f"deepspeed.cpu_optimizer={options.cpu_optimizer} is not one of auto, torch, deepspeed")
        if config.offload.enabled and config.train.optimizer != "adamw" and options.cpu_optimizer == "deepspeed":
            faults.append(
                f"train.optimizer={config.train.optimizer} has no DeepSpeed CPU kernel for offload=true: "
                "set deepspeed.cpu_optimizer=torch or train.optimizer=adamw"
            )
        if config.train.compile and stage == 3:
            faults.append(
                "train.compile=true traces through the hooks that gather zero_stage=3's parameters: "
                "choose zero_stage=0,1,2 or train.compile=false"
            )
        faults += [
            f"deepspeed.{key}={value} must be at least 1 element"
            for key in BUCKETS
            if (value := getattr(options, key)) is not None and value < 1
        ]
        return [*faults, *conflicts(config)]

    def expects(self, config: Config) -> Mapping[str, Any]:
        """The stage and the offload that were asked for."""
        stage, workers = (
            config.deepspeed.zero_stage,
            config.cluster.nodes * (config.cluster.workers_per_node or 1),
        )
        offload = "none"
        if config.offload.enabled:
            offload = "optimizer+parameters" if stage == 3 else "optimizer"
        return {
            "wrapper": "DeepSpeedEngine",
            "world_size": workers,
            "mesh": [workers, 1] if stage == 0 else [1, workers],
            "zero_stage": stage,
            "offload": offload,
        }

    def setup(self, blueprint: Blueprint, config: Config, context: Context) -> Engine:
        """Hands the model and our optimizer to DeepSpeed; writes the effective ds_config.json."""
        return DeepSpeedEngine(blueprint, config, context, settings_for(blueprint, config, context))


class DeepSpeedEngine:
    """A deepspeed.DeepSpeedEngine behind the protocol of the loop."""

    def __init__(self, blueprint: Blueprint, config: Config, context: Context, settings: dict[str, Any]) -> None:
        import deepspeed

        self.config, self.context = config, context
        self.task, self.world_size = config.model.task, context.world_size
        materialise(blueprint, config, settings)
        self.model, *_ = deepspeed.initialize(
            model=blueprint.model,
            optimizer=optimizer_for(blueprint.model, config, context),
            config=settings,
            dist_init_required=False,
        )
        if in_16_bits(config):
            restore_masters(self.model, blueprint)

    def forward_backward(self, batch: Batch, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        """Adds a micro-batch's gradients; DeepSpeed counts the micro-steps by its own step()."""
        from distexp.models.objective import loss_sum, shares

        outputs = self.model(**batch.inputs)
        loss = loss_sum(self.task, outputs, batch) / normalizer
        # The normalizer already holds the accumulation, and the ranks are averaged by DeepSpeed.
        self.model.backward(loss * self.world_size, scale_wrt_gas=False)
        if not last_micro:
            self.model.step()
        return shares(self.task, outputs, batch, loss, normalizer)

    def step(self, learning_rate: float) -> Tensor:
        """Clips, updates and clears; the gradient norm before clipping."""
        import torch

        for group in self.model.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = unpartitioned_norm(self.model) if keeps_plain_gradients(self.config) else None
        self.model.step()
        if norm is None:
            norm = self.model.get_global_grad_norm()
        return torch.as_tensor(norm, device=self.context.device)

    def forward(self, batch: Batch) -> Any:
        """The model's outputs in the precision of the training."""
        import torch

        with torch.no_grad():
            return self.model(**batch.inputs)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer, whole, in fp32 where it is trained in it; a collective."""
        return whole_weights(self.model)

    @property
    def form(self) -> str:
        """DeepSpeed's own, which only the same engine on as many workers reads."""
        stage, precision = self.model.zero_optimization_stage(), self.config.precision.name
        return f"deepspeed, zero_stage={stage}, {precision}, {self.world_size} workers"

    def save(self, folder: Path) -> None:
        """Writes what DeepSpeed's save_checkpoint does."""
        self.model.save_checkpoint(str(folder), tag=TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """Reads it again; the fp32 masters are the saved ones too."""
        from distexp.optim import own_hyperparameters

        with own_hyperparameters(self.model.optimizer.param_groups):
            found, _ = self.model.load_checkpoint(str(folder), tag=TAG, load_lr_scheduler_states=False)
        if found is None:
            raise RuntimeError(f"DeepSpeed read nothing from {folder}")

    def describe(self) -> Built:
        """Asked of the engine, its optimizer and where its tensors are."""
        return describe(self.model)


def settings_for(blueprint: Blueprint, config: Config, context: Context) -> dict[str, Any]:
    """The effective ds_config of a model, which is also written to the run's folder."""
    settings = effective_config(config, context.world_size)
    sizes = [parameter.numel() for parameter in blueprint.model.parameters()]
    fitted = fit_buckets(settings, sum(sizes), max(sizes))
    if context.rank == 0:
        write_json(context.run_dir / "ds_config.json", settings)
        if fitted:
            told = ", ".join(f"{key}={value}" for key, value in fitted.items())
            print(f"note: DeepSpeed's buckets fitted to {sum(sizes):,} parameters: {told}", flush=True)
    return settings


def restore_masters(wrapped: Any, blueprint: Blueprint) -> None:
    """Gives the fp32 masters the weights as they were before they were rounded to 16 bits.

    DeepSpeed takes them from the rounded ones: each then stands in the middle of a 16-bit step, and a first
    update of less than half a step moves none of them. The loss stayed up to 6 % behind for that.
    """
    import torch
    from deepspeed.utils import safe_set_full_fp32_param

    for name, parameter in wrapped.module.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        value = blueprint.value(name, torch.empty(shape, dtype=torch.float32, device="meta"))
        safe_set_full_fp32_param(parameter, value)


def keeps_plain_gradients(config: Config) -> bool:
    """Stage 0 over fp32 weights leaves gradients in place and its clipping keeps no norm."""
    return config.deepspeed.zero_stage == 0 and not in_16_bits(config)


def unpartitioned_norm(wrapped: Any) -> Tensor:
    """The norm of gradients that are in place."""
    from distexp.optim import clip_gradients

    return clip_gradients(wrapped.module.parameters(), limit=None)


def whole_weights(wrapped: Any) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer of a DeepSpeedEngine, as ``Wrapped.weights`` gives them."""
    from deepspeed.utils import safe_get_full_fp32_param

    partitioned = wrapped.zero_optimization_stage() > 0
    for name, parameter in wrapped.module.named_parameters():
        yield name, (safe_get_full_fp32_param(parameter) if partitioned else parameter).detach()
    yield from wrapped.module.named_buffers()


def describe(wrapped: Any, *, engine: str = "native") -> Built:
    """What a deepspeed.DeepSpeedEngine says of itself; ``engine`` is who made it."""
    import torch.distributed as dist

    from distexp.strategies.engine import dtype_name

    stage = wrapped.zero_optimization_stage()
    parameters = list(wrapped.module.parameters())
    world = dist.get_world_size(wrapped.seq_data_parallel_group)
    return Built(
        strategy="deepspeed",
        engine=engine,
        wrapper=type(wrapped).__name__,
        world_size=world,
        mesh=[world, 1] if stage == 0 else [1, world],
        sharded_units=sum(1 for p in parameters if hasattr(p, "ds_tensor")),
        zero_stage=stage,
        offload=_offloaded(wrapped, stage),
        param_dtype=dtype_name(parameters[0].dtype),
        compute_dtype=dtype_name(
            wrapped.torch_autocast_dtype() if wrapped.torch_autocast_enabled() else parameters[0].dtype
        ),
        optimizer=_names(wrapped.optimizer),
        parameters=sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
    )


def in_16_bits(config: Config) -> bool:
    """Whether DeepSpeed holds the weights in bf16 or fp16, with fp32 masters beside them."""
    return config.precision.name != "fp32" and not autocasts(config)


def materialise(blueprint: Blueprint, config: Config, settings: dict[str, Any]) -> None:
    """Brings the model to life in the precision that DeepSpeed trains; at stage 3 each part is split at once."""
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import Init

    from distexp.strategies.engine import DTYPES

    deepspeed.init_distributed(dist_init_required=False)  # over the process group that stands
    for module in reversed(list(blueprint.model.modules())):
        blueprint.materialise(module, recurse=False)
        if in_16_bits(config):
            module.to(DTYPES[config.precision.name])
        if config.deepspeed.zero_stage == 3 and any(True for _ in module.parameters(recurse=False)):
            Init(module=module, config_dict_or_path=settings)


def optimizer_for(model: nn.Module, config: Config, context: Context) -> torch.optim.Optimizer:
    """The same AdamW or SGD as everywhere, or DeepSpeed's kernel of it where the states are on the CPU."""
    from distexp.optim import build_optimizer, parameter_groups

    train = config.train
    if config.offload.enabled and config.deepspeed.cpu_optimizer == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        if context.rank == 0 and not _compiled("cpu_adam"):
            print("note: DeepSpeed's CPU Adam is being compiled: about a minute, once; then it is cached", flush=True)
        optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
            parameter_groups(model, train.weight_decay),
            lr=train.learning_rate,
            betas=tuple(train.betas),
            eps=train.eps,
            adamw_mode=True,
        )
        return optimizer
    fused = context.device.type == "cuda" and not config.offload.enabled
    return build_optimizer(model, train, fused=fused)


def _compiled(operator: str) -> bool:
    """Whether torch's cache of extensions holds a part of DeepSpeed already."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(operator, verbose=False), f"{operator}.so").exists()


def _names(optimizer: Any) -> str:
    """``DeepSpeedZeroOptimizer(AdamW)``: each optimizer around the one that does the arithmetic."""
    inner = getattr(optimizer, "optimizer", None)
    name = type(optimizer).__name__
    return name if inner is None or inner is optimizer else f"{name}({type(inner).__name__})"


def _offloaded(engine: Any, stage: int) -> str:
    """What lives on the CPU though the engine does not, or by DeepSpeed's own account of it."""
    if stage == 0:
        return "none"
    on = []
    zero = engine.optimizer
    if stage == 3:
        on += ["optimizer"] if zero.offload_optimizer else []
        on += ["parameters"] if zero.offload_param else []
    else:
        # BF16_Optimizer, which a data_types section brings in at stage 1, cannot offload and has no such field.
        on += ["optimizer"] if getattr(zero, "cpu_offload", False) else []
    return "+".join(on) or "none"
