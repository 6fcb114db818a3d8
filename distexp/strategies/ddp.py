"""PyTorch DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from distexp.config import Config
from distexp.config.batch_sizes import searches_micro_batch
from distexp.distributed.context import Context
from distexp.strategies.base import DistributedModel, Strategy
from distexp.strategies.fast import FAST_BUCKET_MB, update_values, whole_model_values
from distexp.strategies.memory_traits import Advice, CpuMemory, ProfiledStep
from distexp.strategies.single import offload_errors

if TYPE_CHECKING:
    from distexp.models.blueprint import Blueprint


class DDP(Strategy):
    """The full model on every worker; gradients are averaged during the backward pass."""

    compile_scopes: ClassVar[tuple[str, ...]] = ("blocks", "model", "graphs")
    casts_once_per_step: ClassVar[bool] = True
    fuses_update: ClassVar[bool] = True
    keeps_channels_last: ClassVar[bool] = True
    hf_adapter: ClassVar[str | None] = "distexp.engines.hf_adapters.DDPAdapter"

    def fast_values(self, config: Config) -> Mapping[str, Any]:
        """Compile the whole model with few buckets, and cast the weights once per step."""
        values = {**whole_model_values(config), **update_values(config)}
        if config.ddp.find_unused_parameters:
            values.pop("train.compute_weights", None)
        return {**values, "ddp.bucket_cap_mb": FAST_BUCKET_MB} if values.get("train.compile") == "model" else values

    def validate(self, config: Config) -> list[str]:
        """Refuse offload, buckets that dynamo cannot use, and copies of weights that may be unused."""
        errors = offload_errors(config)
        splits_graph = config.train.compiled in ("model", "graphs")
        if splits_graph and config.ddp.bucket_cap_mb is not None and config.ddp.bucket_cap_mb < 1:
            errors.append(
                f"ddp.bucket_cap_mb={config.ddp.bucket_cap_mb:g} is too small for train.compile="
                f"{config.train.compiled}, whose first bucket has 1 MB: use at least 1, or train.compile=blocks"
            )
        if config.train.compute_weights == "step" and config.ddp.find_unused_parameters:
            errors.append(
                "train.compute_weights=step gives every weight a gradient, so ddp.find_unused_parameters=true would "
                "change unused ones too: use train.compute_weights=autocast, or leave find_unused_parameters out"
            )
        return [*errors, *_static_graph_errors(config)]

    def hf_errors(self, config: Config) -> list[str]:
        """Refuse one worker on a GPU, because the Trainer uses DDP there only for several."""
        if config.cluster.world_size == 1 and config.cluster.device == "cuda":
            return ["engine=hf_trainer does not use DDP on one GPU: choose strategy=single, or more workers"]
        return []

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """Require a DistributedDataParallel module over all workers."""
        workers = config.cluster.world_size
        return {
            "wrapper": "DistributedDataParallel",
            "world_size": workers,
            "mesh": [workers, 1],
            "sharded_units": 0,
            "offload": "none",
            "communication_dtype": {"fp32": "float32", "bf16": "bfloat16"}[config.ddp.communication],
        }

    def setup(self, blueprint: Blueprint, config: Config, context: Context) -> DistributedModel:
        """Initialize the model on its device and wrap it."""
        from torch.nn.parallel import DistributedDataParallel

        from distexp.models.memory_format import set_memory_format
        from distexp.strategies.compute_weights import copy_weights
        from distexp.strategies.ddp_reduction import set_reduction
        from distexp.strategies.torch_model import TorchModel, read_ddp_distribution

        blueprint.materialize(blueprint.model)
        set_memory_format(blueprint.model, config)
        weights = copy_weights(blueprint.model, config)
        wrapped = DistributedDataParallel(
            blueprint.model,
            device_ids=[context.device] if context.device.type == "cuda" else None,
            bucket_cap_mb=config.ddp.bucket_cap_mb,
            static_graph=config.ddp.static_graph,
            find_unused_parameters=config.ddp.find_unused_parameters,
            gradient_as_bucket_view=config.ddp.gradient_as_bucket_view,
        )
        reduction = set_reduction(wrapped, config.ddp.communication, weights)

        def sync_context(last_micro: bool) -> AbstractContextManager[Any]:
            if not last_micro:
                return wrapped.no_sync()
            return nullcontext() if reduction is None else reduction.finished()

        return TorchModel(
            wrapped,
            config,
            context,
            sync_context=sync_context,
            autocast=True,
            distribution=lambda: read_ddp_distribution(wrapped),
            weights=weights,
        )

    cpu_memory: ClassVar[CpuMemory | None] = CpuMemory(50.0, reserve=1.2)

    def host_worker_mib(self, config: Config) -> float:
        """Return the measured memory."""
        return 1160.0

    def keeps_states_whole(self, config: Config) -> bool | None:
        """Return true."""
        return True

    def compiles(self, step: ProfiledStep) -> bool:
        """Return true."""
        return True

    def advice(self, bottleneck: str, step: ProfiledStep) -> Iterator[Advice]:
        """Yield smaller gradients and fewer reductions against communication."""
        if bottleneck != "exposed_communication":
            return
        if step.on_gpu and step.setting("ddp.communication") == "fp32":
            yield Advice("ddp.communication=bf16", "gradients in bf16 are half as large")
        yield from step.more_accumulation()


def _static_graph_errors(config: Config) -> list[str]:
    """Return an error if ``ddp.static_graph=true`` is combined with several micro-batches per step."""
    steps = config.train.gradient_accumulation_steps
    if not config.ddp.static_graph or (steps == 1 and not searches_micro_batch(config)):
        return []
    setting = "micro_batch_size=auto" if searches_micro_batch(config) else f"gradient_accumulation_steps={steps}"
    return [
        "ddp.static_graph=true fails in torch if the first backward pass reduces no gradients, as with "
        f"train.{setting}: leave ddp.static_graph out"
    ]
