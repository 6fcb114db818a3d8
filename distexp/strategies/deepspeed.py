"""DeepSpeed's ZeRO, stages 0 to 3, with and without offloading."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distexp.config import Config
from distexp.results import Built, write_json
from distexp.strategies.base import Context, Engine

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from distexp.data.base import Batch

STAGES = (0, 1, 2, 3)
DEFAULT_STAGE = 2
BUCKETS = {
    "reduce_bucket_size": "reduce_bucket_size",
    "allgather_bucket_size": "allgather_bucket_size",
    "stage3_prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold": "stage3_param_persistence_threshold",
    "stage3_max_live_parameters": "stage3_max_live_parameters",
}


class DeepSpeed:
    """States partitioned over the workers by ZeRO."""

    def complete(self, config: Config) -> None:
        """The stage of the user's file, else 2; offloaded states go to DeepSpeed's CPU Adam on GPUs."""
        options = config.deepspeed
        if options.zero_stage is None:
            stage = _at(_read_or_empty(options.config_file), ("zero_optimization", "stage"))
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
        return [*faults, *_conflicts(config)]

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

    def setup(self, model: nn.Module, config: Config, context: Context) -> Engine:
        """Hands the model and our optimizer to DeepSpeed; writes the effective ds_config.json."""
        settings = effective_config(config, context.world_size)
        if context.rank == 0:
            write_json(context.run_dir / "ds_config.json", settings)
        return DeepSpeedEngine(model, config, context, settings)


class DeepSpeedEngine:
    """A deepspeed.DeepSpeedEngine behind the protocol of the loop."""

    def __init__(self, model: nn.Module, config: Config, context: Context, settings: dict[str, Any]) -> None:
        import deepspeed

        from distexp.strategies.engine import DTYPES

        self.config, self.context = config, context
        self.task, self.world_size = config.model.task, context.world_size
        model.to(context.device)
        wrapped, *_ = deepspeed.initialize(
            model=model,
            optimizer=_optimizer(model, config, context),
            config=settings,
            dist_init_required=False,
        )
        self.model = wrapped
        self.compute_dtype = DTYPES[config.precision.name]

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
        norm = self._unpartitioned_norm() if self._keeps_plain_gradients() else None
        self.model.step()
        if norm is None:
            norm = self.model.get_global_grad_norm()
        return torch.as_tensor(norm, device=self.context.device)

    def _keeps_plain_gradients(self) -> bool:
        """Stage 0 in fp32 leaves gradients in place and its clipping keeps no norm."""
        return self.model.zero_optimization_stage() == 0 and self.config.precision.name == "fp32"

    def _unpartitioned_norm(self) -> Tensor:
        from distexp.optim import clip_gradients

        return clip_gradients(self.model.module.parameters(), limit=None)

    def forward(self, batch: Batch) -> Any:
        """The model's outputs in the precision of the training."""
        import torch

        with torch.no_grad():
            return self.model(**batch.inputs)

    def train(self) -> None:
        """Switches to training."""
        self.model.train()

    def eval(self) -> None:
        """Switches to evaluation."""
        self.model.eval()

    def describe(self) -> Built:
        """Asked of the engine, its optimizer and where its tensors are."""
        import torch.distributed as dist

        from distexp.strategies.engine import dtype_name

        engine = self.model
        stage = engine.zero_optimization_stage()
        parameters = list(engine.module.parameters())
        world = dist.get_world_size(engine.seq_data_parallel_group)
        return Built(
            strategy="deepspeed",
            engine="native",
            wrapper=type(engine).__name__,
            world_size=world,
            mesh=[world, 1] if stage == 0 else [1, world],
            sharded_units=sum(1 for p in parameters if hasattr(p, "ds_tensor")),
            zero_stage=stage,
            offload=_offloaded(engine, stage),
            param_dtype=dtype_name(parameters[0].dtype),
            compute_dtype=dtype_name(parameters[0].dtype),
            optimizer=_names(engine.optimizer),
            parameters=sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        )


def _optimizer(model: nn.Module, config: Config, context: Context) -> torch.optim.Optimizer:
    """The same AdamW or SGD as everywhere, or DeepSpeed's kernel of it where the states are on the CPU."""
    from distexp.optim import build_optimizer, parameter_groups

    train = config.train
    if config.offload.enabled and config.deepspeed.cpu_optimizer == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        if context.rank == 0:
            print("DeepSpeed's CPU Adam is compiled on its first use (about a minute), then cached", flush=True)
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


def effective_config(config: Config, world_size: int) -> dict[str, Any]:
    """The ds_config that DeepSpeed gets: the user's file, with everything that distexp decides filled in."""
    settings = _read(config.deepspeed.config_file)
    for section in ("optimizer", "scheduler"):  # ours, the same for every strategy; conflicts were refused
        settings.pop(section, None)
    for path, value in _decided(config, world_size):
        node = settings
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return _without_auto(settings)


def _without_auto(settings: dict[str, Any]) -> dict[str, Any]:
    """Leaves out every "auto" that distexp does not decide: DeepSpeed's own default holds there."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if value != "auto"
    }


def _decided(config: Config, world_size: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What distexp decides, as paths into a ds_config."""
    train, options = config.train, config.deepspeed
    micro, accumulation = train.micro_batch_size, train.gradient_accumulation_steps
    yield ("train_micro_batch_size_per_gpu",), micro
    yield ("gradient_accumulation_steps",), accumulation
    yield ("train_batch_size",), micro * accumulation * world_size
    yield ("gradient_clipping",), train.gradient_clipping or 0.0
    yield ("bf16", "enabled"), config.precision.name == "bf16"
    yield ("fp16", "enabled"), config.precision.name == "fp16"
    yield ("zero_optimization", "stage"), options.zero_stage
    if config.offload.enabled:
        where = {"device": "cpu", "pin_memory": config.offload.pin_memory}
        yield ("zero_optimization", "offload_optimizer"), where
        if options.zero_stage == 3:
            yield ("zero_optimization", "offload_param"), where
    yield ("zero_force_ds_cpu_optimizer",), options.cpu_optimizer == "deepspeed" and config.offload.enabled
    # DeepSpeed calls torch's SGD untested; the parity tests hold it to the others.
    yield ("zero_allow_untested_optimizer",), True
    if options.overlap_comm:
        yield ("zero_optimization", "overlap_comm"), True
    for key, name in BUCKETS.items():
        if (value := getattr(options, key)) is not None:
            yield ("zero_optimization", name), value


def _conflicts(config: Config) -> Iterator[str]:
    """Where the user's ds_config.json says something else than the configuration does."""
    path = config.deepspeed.config_file
    if path is None or not Path(path).is_file():
        return
    try:
        settings = _read(path)
    except ValueError as error:
        yield f"deepspeed.config_file={path} is not a JSON object: {error}"
        return
    world_size = config.cluster.nodes * (config.cluster.workers_per_node or 1)
    decided = dict(_decided(config, world_size))
    for keys, value in {**decided, **_decided_optimizer(config)}.items():
        theirs = _at(settings, keys)
        if theirs not in (None, "auto") and theirs != value:
            yield (
                f"deepspeed.config_file sets {'.'.join(keys)}={json.dumps(theirs)}, and this run has "
                f'{json.dumps(value)}: make them equal, or write "auto" in the file'
            )
    if "scheduler" in settings:
        yield "deepspeed.config_file has a scheduler: leave it out, train.schedule sets the learning rate"
    for name in ("offload_optimizer", "offload_param"):
        device = _at(settings, ("zero_optimization", name, "device"))
        if not config.offload.enabled and device not in (None, "auto", "none"):
            yield f"deepspeed.config_file sets zero_optimization.{name}.device={device}: choose offload=true as well"


def _decided_optimizer(config: Config) -> dict[tuple[str, ...], Any]:
    train = config.train
    return {
        ("optimizer", "type"): {"adamw": "AdamW", "sgd": "SGD"}[train.optimizer],
        ("optimizer", "params", "lr"): train.learning_rate,
        ("optimizer", "params", "weight_decay"): train.weight_decay,
        ("optimizer", "params", "betas"): list(train.betas),
        ("optimizer", "params", "eps"): train.eps,
    }


def _at(settings: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        if not isinstance(settings, dict):
            return None
        settings = settings.get(key)
    return settings


def _read_or_empty(path: str | None) -> dict[str, Any]:
    """As _read, before the file has been judged."""
    try:
        return _read(path)
    except ValueError:
        return {}


def _read(path: str | None) -> dict[str, Any]:
    if path is None or not Path(path).is_file():
        return {}
    settings = json.loads(Path(path).read_text())
    if not isinstance(settings, dict):
        raise ValueError("it holds a " + type(settings).__name__)
    return settings
