"""PyTorch DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from distexp.config import WHOLE_MODEL, Config
from distexp.config.model_checks import searches_micro_batch
from distexp.distributed.context import Context
from distexp.runs.step_files import BACKWARD, COPIES, NEXT, OPTIMIZER, Collective, Item, StepModel
from distexp.strategies.base import FAST_BUCKET_MB, DistributedModel, Strategy, whole_model_values
from distexp.strategies.communication import (
    StepCommunication,
    insert_buckets,
    is_gradient_reduction,
    sharding_workers,
)
from distexp.strategies.parallel.checks import degrees, expected_stages, shares_weights
from distexp.strategies.single import offload_errors
from distexp.strategies.traits import Advice, CpuMemory, ProfiledStep, Settings, common_values, setting
from distexp.system.units import MIB

if TYPE_CHECKING:
    from distexp.models.blueprint import Blueprint


BUCKET_MB, FIRST_BUCKET_MB = 25, 1
"""Defaults of torch: a bucket is closed when it has at least so much."""


@dataclass(frozen=True, kw_only=True)
class DDPCommunication(StepCommunication):
    """All-reduces of buckets in the last backward pass, which the optimizer awaits."""

    bucket_bytes: float = BUCKET_MB * MIB  # size from which DDP closes a bucket
    first_bucket_bytes: float = FIRST_BUCKET_MB * MIB  # smaller, unless ``ddp.bucket_cap_mb`` is set

    is_planned: ClassVar[bool] = True
    shards_optimizer: ClassVar[bool] = False

    def buckets(self, model: StepModel) -> list[int]:
        """Return the bytes of the buckets, in the order in which they are reduced.

        They are those of the profiled run, if it used DDP. Otherwise gradients are ready in the reverse order of the
        parameters. A bucket may be larger than its limit, because parameters are not divided.
        """
        if model.bucket_elements:
            return [elements * self.gradient_bytes for elements in model.bucket_elements]
        sizes = [elements * self.gradient_bytes for unit in model.units for elements in unit.reduced]
        buckets, open_bucket, limit = [], 0, self.first_bucket_bytes
        for size in reversed(sizes):
            open_bucket += size
            if open_bucket >= limit:
                buckets.append(open_bucket)
                open_bucket, limit = 0, self.bucket_bytes
        return [*buckets, open_bucket] if open_bucket else buckets

    def plan(self, items: list[Item], model: StepModel, micro_batches: int) -> list[Item]:
        """Return the items with an all-reduce for each bucket, at the places that the trace has for them."""
        buckets, last = self.buckets(model), micro_batches - 1
        if self.pipeline > 1:  # After the schedule, the gradients of each parameter are reduced.
            first = next((i for i, item in enumerate(items) if item.phase == OPTIMIZER), len(items))
            elements = (count for unit in model.units for count in unit.reduced)
            reduce = partial(Collective, "all_reduce", ranks=1, axis=COPIES, phase=BACKWARD, micro_batch=last)
            return [*items[:first], *(reduce(bytes=count * self.gradient_bytes) for count in elements), *items[first:]]
        known = {
            position: item
            for position, item in enumerate(items)
            if isinstance(item, Collective) and is_gradient_reduction(item) and item.micro_batch == last
        }
        if not known:
            return insert_buckets(items, buckets, last, awaited=OPTIMIZER)
        sizes = [item.bytes for item in known.values()]
        if None in sizes:  # planned sizes, else equal ones
            sizes = [*(buckets if len(buckets) == len(known) else [sum(buckets) // len(known)] * len(known))]
        for (position, item), size in zip(known.items(), sizes, strict=True):
            items[position] = replace(item, bytes=size, awaited=OPTIMIZER, transfer_s=None)
        return items

    def with_waits(self, item: Collective, *, on_gpu: bool) -> Collective:
        """Return a collective with what waits for it: the optimizer waits for the reductions."""
        return replace(item, awaited=OPTIMIZER if is_gradient_reduction(item) else NEXT)

    def reduction_sizes(self, model: StepModel, count: int) -> Sequence[int]:
        """Return the buckets if the trace has as many reductions; else equal sizes."""
        buckets = self.buckets(model)
        return buckets if len(buckets) == count else super().reduction_sizes(model, count)


class DDP(Strategy):
    """The full model on every worker; gradients are averaged during the backward pass."""

    compile_scopes: ClassVar[tuple[str, ...]] = ("blocks", *WHOLE_MODEL)
    casts_once_per_step: ClassVar[bool] = True
    fuses_update: ClassVar[bool] = True
    keeps_channels_last: ClassVar[bool] = True
    gives_whole_matrices: ClassVar[bool] = True
    supports_low_bits: ClassVar[bool] = True
    hf_adapter: ClassVar[str | None] = "distexp.engines.hf_adapters.DDPAdapter"
    equals_reference: ClassVar[bool] = True
    complexity: ClassVar[int] = 1
    section: ClassVar[str] = "ddp"
    lighter: ClassVar[str] = "sharding=shard_grad_op"
    shares_layers: ClassVar[bool] = True
    is_compilable: ClassVar[bool] = True

    def casts_weights(self, config: Config) -> bool:
        """Return whether the units of FSDP cast weights, as they do if workers share layers."""
        return shares_weights(config) and config.precision.name != "fp32"

    def fast_values(self, config: Config) -> Mapping[str, Any]:
        """Compile the whole model with few buckets, and cast the weights once per step."""
        values = whole_model_values(config)
        if config.ddp.find_unused_parameters:
            values.pop("train.compute_weights", None)
        return {**values, "ddp.bucket_cap_mb": FAST_BUCKET_MB} if values.get("train.compile") == "model" else values

    def validate(self, config: Config) -> list[str]:
        """Refuse offload, buckets that dynamo cannot use, and copies of weights that may be unused."""
        errors = offload_errors(config)
        cap = config.ddp.bucket_cap_mb
        if config.train.compiled in WHOLE_MODEL and cap is not None and cap < 1:
            errors.append(
                f"ddp.bucket_cap_mb={cap:g} is too small for train.compile="
                f"{config.train.compiled}, whose first bucket has 1 MB: use at least 1, or train.compile=blocks"
            )
        if config.train.compute_weights == "step" and config.ddp.find_unused_parameters:
            errors.append(
                "train.compute_weights=step gives every weight a gradient, so ddp.find_unused_parameters=true would "
                "change unused ones too: use train.compute_weights=autocast, or leave find_unused_parameters out"
            )
        steps, is_searched = config.train.gradient_accumulation_steps, searches_micro_batch(config)
        if config.ddp.static_graph and (is_searched or steps != 1):
            several = "micro_batch_size=auto" if is_searched else f"gradient_accumulation_steps={steps}"
            errors.append(
                "ddp.static_graph=true fails in torch if the first backward pass reduces no gradients, as with "
                f"train.{several}: leave ddp.static_graph out"
            )
        defaults = vars(type(config.ddp)(bucket_cap_mb=BUCKET_MB))
        changed = [name for name, value in vars(config.ddp).items() if value != defaults[name]]
        if shares_weights(config) and changed:
            typed = next(text for text, _ in degrees(config))
            errors.append(
                f"ddp.{changed[0]}={getattr(config.ddp, changed[0])} has no effect with {typed}, whose replicas use "
                "the units of FSDP: leave it out"
            )
        elif config.parallel.pipeline > 1 and changed:
            errors.append(
                f"ddp.{changed[0]}={getattr(config.ddp, changed[0])} has no effect with parallel.pipeline="
                f"{config.parallel.pipeline}, whose gradients are reduced after the schedule: leave it out"
            )
        return errors

    def hf_errors(self, config: Config) -> list[str]:
        """Refuse one worker on a GPU, because the Trainer uses DDP there only for several."""
        if config.cluster.world_size == 1 and config.cluster.device == "cuda":
            return ["engine=hf_trainer does not use DDP on one GPU: choose strategy=single, or more workers"]
        return []

    def launch_factor(self, config: Config) -> float:
        """Return the measured factor of several workers. See docs/results/choose.md and forecast.md."""
        return 1.4

    def communication(self, config: Settings) -> DDPCommunication:
        """Return the collectives of a step, with torch's sizes of buckets if ``ddp.bucket_cap_mb`` is open."""
        cap, communication = (setting(config, f"ddp.{name}") for name in ("bucket_cap_mb", "communication"))
        return DDPCommunication(
            **common_values(config) | {"gradient_bytes": 2 if communication == "bf16" else 4},
            bucket_bytes=(cap or BUCKET_MB) * MIB,
            first_bucket_bytes=(cap or FIRST_BUCKET_MB) * MIB,
        )

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """Require a DistributedDataParallel module over all workers, or copies of shared layers."""
        workers, stages = config.cluster.world_size, expected_stages(config)
        if shares_weights(config):
            parallel, copies = config.parallel, sharding_workers(config)
            mesh = {"mesh": [copies, 1], "tensor": parallel.tensor, "context": parallel.context}
            return {"wrapper": "replicate", "world_size": workers, **mesh, "expert": parallel.expert, **stages}
        if stages:
            return {"wrapper": "pipeline", "world_size": workers, "mesh": [config.data_parallel, 1], **stages}
        return {
            "wrapper": "DistributedDataParallel",
            "world_size": workers,
            "mesh": [workers, 1],
            "context": config.parallel.context,
            "sharded_units": 0,
            "offload": "none",
            "communication_dtype": {"fp32": "float32", "bf16": "bfloat16"}[config.ddp.communication],
        }

    def setup(self, blueprint: Blueprint, config: Config, context: Context) -> DistributedModel:
        """Initialize the model on its device and wrap it."""
        if context.stages > 1:
            from distexp.strategies.fsdp_units import replicate
            from distexp.strategies.parallel.pipeline import pipeline_model

            return pipeline_model(blueprint, config, context, replicate if shares_weights(config) else None)
        if shares_weights(config):
            from distexp.strategies.fsdp_units import replicate_units

            return replicate_units(blueprint, config, context)
        from torch.nn.parallel import DistributedDataParallel

        from distexp.models.transforms import set_memory_format
        from distexp.strategies.ddp_reduction import copy_weights, set_reduction
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

    host_mib: ClassVar[float] = 1160.0
    cpu_memory: ClassVar[CpuMemory | None] = CpuMemory(50.0, reserve=1.2)

    def advice(self, bottleneck: str, step: ProfiledStep) -> Iterator[Advice]:
        """Yield smaller gradients and fewer reductions against communication."""
        if bottleneck not in ("exposed_communication", "bubble"):
            return
        yield from self.fewer_shared_layers(step)
        yield from self.smaller_bubble(step)
        whole = step.setting("parallel.pipeline", 1) == 1 and not self.shares_weights(step)
        if step.on_gpu and step.setting("ddp.communication") == "fp32" and whole:
            yield Advice("ddp.communication=bf16", "gradients in bf16 are half as large")
        yield from step.more_accumulation()
