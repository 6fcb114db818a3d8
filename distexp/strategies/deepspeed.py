"""DeepSpeed ZeRO, stages 0 to 3, with and without offload."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.hardware.facts import facts
from distexp.runs.record_sections import Built
from distexp.strategies import traits
from distexp.strategies.base import COMMUNICATION, DistributedModel, Strategy, block_values
from distexp.strategies.traits import Advice, Settings, setting
from distexp.strategies.zero import ds_config
from distexp.strategies.zero.ds_communication import ZeroCommunication, read_zero_options
from distexp.strategies.zero.ds_config import get_nested, read_or_empty
from distexp.strategies.zero.ds_operators import needed_operators

if TYPE_CHECKING:
    from distexp.models.blueprint import Blueprint

PRELOAD = ("distexp.strategies.zero.ds_import",)
"""Imported once for all workers of a node. It imports DeepSpeed."""

PRELOAD_ON_CPU = ("torch.utils.cpp_extension",)
"""Imported once too, if there is no GPU that an import could initialize. DeepSpeed's operators are built with it."""

GRADIENT_TYPE = "data_types", "grad_accum_dtype"
"""Key of a ds_config. With fp32, DeepSpeed uses its BF16_Optimizer at stage 1."""


class DeepSpeed(Strategy):
    """Optimizer states, gradients and parameters partitioned over the workers by ZeRO."""

    requires: ClassVar[tuple[str, ...]] = (COMMUNICATION, "deepspeed")
    fixes_accumulation: ClassVar[bool] = True
    hf_adapter: ClassVar[str | None] = "distexp.engines.hf_adapters.DeepSpeedAdapter"
    equals_reference: ClassVar[bool] = True
    complexity: ClassVar[int] = 3
    section: ClassVar[str] = "deepspeed"
    option_group: ClassVar[str] = "zero_stage"
    option_key: ClassVar[str] = "deepspeed.zero_stage"
    offload_with: ClassVar[str] = "zero_stage=2"
    options: ClassVar[tuple[traits.Option, ...]] = (
        traits.Option("1", lighter="zero_stage=2"),
        traits.Option("2", lighter="zero_stage=3", offloads=True),
        traits.Option("3", offloads=True),
    )

    def casts_weights(self, config: Config) -> bool:
        """Return whether DeepSpeed stores the weights in 16 bits."""
        from distexp.strategies.zero.ds_initialization import in_16_bits  # It imports torch.

        return in_16_bits(config)

    def set_defaults(self, config: Config) -> None:
        """Set what the user's file has for open options, the stage (else 2) and the CPU optimizer."""
        options, in_file = config.deepspeed, read_or_empty(config.deepspeed.config_file)
        if options.zero_stage is None:
            stage = get_nested(in_file, ("zero_optimization", "stage"))
            options.zero_stage = 2 if stage in (None, "auto") else stage
        for name, keys in {"overlap_comm": ds_config.OVERLAP, "check_overflow": ds_config.CHECKED_GRADIENTS}.items():
            value = get_nested(in_file, keys)
            is_read = name == "overlap_comm" or ds_config.may_skip_check(config)
            if getattr(options, name) is None and isinstance(value, bool) and is_read:
                setattr(options, name, value)
        if options.cpu_optimizer == "auto":
            options.cpu_optimizer = "deepspeed" if config.cluster.device == "cuda" else "torch"

    def fast_values(self, config: Config) -> Mapping[str, Any]:
        """Compile the blocks, except at stage 3. With bf16, leave out what makes the CPU wait for the GPU."""
        compiled = {} if config.deepspeed.zero_stage == 3 else block_values(config)
        if config.deepspeed.check_overflow is True or _unchecked_error(config):
            return compiled
        async_update = {} if _async_update_error(config) else {"deepspeed.async_update": True}
        return {**compiled, "deepspeed.check_overflow": False, **async_update}

    def validate(self, config: Config) -> list[str]:
        """Check the stage, offload and the ds_config.json of the user."""
        stage = config.deepspeed.zero_stage
        if stage not in (0, 1, 2, 3):
            return [f"deepspeed.zero_stage={stage} is not one of 0, 1, 2, 3"]
        errors = list(_offload_errors(config))
        if config.deepspeed.check_overflow is False and (error := _unchecked_error(config)):
            errors.append(f"deepspeed.check_overflow=false {error}")
        errors += _async_errors(config)
        if config.train.compiled == "blocks" and stage == 3:
            typed = str(config.train.compile).lower()
            errors.append(
                f"train.compile={typed} does not work with zero_stage=3, which gathers parameters in module hooks: "
                "choose zero_stage=2 or train.compile=false"
            )
        if config.train.activation_checkpointing == "selective" and stage == 3:
            errors.append(
                "train.activation_checkpointing=selective does not work with zero_stage=3, which gathers parameters "
                "in module hooks: choose zero_stage=2 or train.activation_checkpointing=true"
            )
        if config.adapter.base_dtype == "fp32" and config.precision.name == "bf16" and stage:
            errors.append(
                f"adapter.base_dtype=fp32 is not supported by zero_stage={stage} with precision=bf16, because "
                "DeepSpeed keeps all weights in bf16: use adapter.base_dtype=bf16, or zero_stage=0"
            )
        return [*errors, *conflicts(config)]

    def main_option(self, config: Config) -> str:
        """Return the stage, for example ``ZeRO-2``."""
        return f"ZeRO-{config.deepspeed.zero_stage}"

    def shards_all_parameters(self, config: Config) -> bool:
        """Return whether the stage is 3."""
        return config.deepspeed.zero_stage == 3

    def operators(self, config: Config) -> tuple[str, ...]:
        """Return the operators that DeepSpeed would compile in a worker."""
        return needed_operators(config)

    def option_complexity(self, config: Config) -> int:
        """Return the stage."""
        return config.deepspeed.zero_stage or 0

    def launch_factor(self, config: Config) -> float:
        """Return the measured factor: the hooks run in Python. See docs/results/choose.md and forecast.md."""
        return {0: 1.8, 1: 1.8, 2: 2.6, 3: 9.0}[config.deepspeed.zero_stage or 0]

    def overlaps_communication(self, config: Config) -> bool:
        """Return ``deepspeed.overlap_comm``. Stage 3 overlaps by default too, but is slower than stage 2."""
        return bool(config.deepspeed.overlap_comm)

    def communication(self, config: Settings) -> ZeroCommunication:
        """Return the collectives of a step, with DeepSpeed's defaults for what only its own file has."""
        return _communication(config, int(setting(config, "deepspeed.zero_stage") or 0))

    def run_communication(self, config: Settings, built: Built | None, run_dir: Path) -> ZeroCommunication:
        """Return the collectives with the stage that was built, and the options of the ds_config.json of the run."""
        stage = built.zero_stage if built else None
        known = self.communication(config) if stage is None else _communication(config, stage)
        return replace(known, zero=read_zero_options(run_dir))

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """Require the requested stage and offload."""
        stage, workers = config.deepspeed.zero_stage, config.cluster.world_size
        offload = "optimizer+parameters" if stage == 3 else "optimizer"
        return {
            "wrapper": "DeepSpeedEngine",
            "world_size": workers,
            "mesh": [workers, 1] if stage == 0 else [1, workers],
            "zero_stage": stage,
            "offload": offload if config.offload.enabled else "none",
        }

    def setup(self, blueprint: Blueprint, config: Config, context: Context) -> DistributedModel:
        """Write the effective ds_config.json and give model and optimizer to DeepSpeed."""
        from distexp.strategies.zero.ds_initialization import build_settings
        from distexp.strategies.zero.ds_model import DeepSpeedModel

        return DeepSpeedModel(blueprint, config, context, build_settings(blueprint, config, context))

    tracer: ClassVar[str | None] = "distexp.plan.trace.traced_deepspeed.TracedDeepSpeed"
    host_mib: ClassVar[float] = 1460.0
    cpu_memory: ClassVar[traits.CpuMemory | None] = traits.CpuMemory(65.0, reserve=1.2)
    operator_problem: ClassVar[str] = "DeepSpeed's CPU Adam: it cannot be compiled, set deepspeed.cpu_optimizer=torch"
    setup_note: ClassVar[str] = "DeepSpeed compiles its extensions during setup if they are missing."

    def communicators_mib(self, config: Config) -> float:
        """Return the memory of DeepSpeed's communicators: those even for one GPU, and what it adds on several.

        The numbers are from ``deepspeed/zero_offload_single_gpu``, ``deepspeed/two_gpu_stages`` and
        ``two_h200/map_zero``: stage 3 needs 288 MiB less without fp16. Why was not measured; fp16 has one more
        collective, which checks the gradients.
        """
        stage, precision = config.deepspeed.zero_stage, config.precision.name
        several = 96.0 if stage == 3 and precision != "fp16" else 384.0
        return 388.0 + (several if config.cluster.world_size > 1 else 0.0)

    def host_worker_mib(self, config: Config) -> float:
        """Add the memory of the CPU optimizer."""
        return super().host_worker_mib(config) + (facts().processes.cpu_adam_mib if config.offload.enabled else 0.0)

    def gpu_memory_error(self, config: Config) -> float:
        """Return a larger error for stage 3 on several GPUs, where the time decides when memory is reused.

        One of three runs needed 2 % less than predicted.
        """
        is_larger = config.cluster.world_size > 1 and config.deepspeed.zero_stage == 3
        return 0.08 if is_larger else super().gpu_memory_error(config)

    def unmeasured_on_cpus(self, config: Config) -> str:
        """Refuse stage 3."""
        if config.deepspeed.zero_stage == 3:
            return "zero_stage=3 needed 53 % more than predicted on CPUs"
        return super().unmeasured_on_cpus(config)

    def weights_type(self, config: Config) -> str:
        """Return 16 bits, except with fp32."""
        return "float32" if config.precision.name == "fp32" else "bfloat16"

    def smaller_states(self, config: Config, *, workers: int) -> tuple[str, ...]:
        """Return stage 3, which has smaller buffers on one worker too."""
        return ("zero_stage=3",) if (config.deepspeed.zero_stage or 0) < 3 else ()

    def supports_offload(self, config: Config) -> bool:
        """Return whether the stage partitions anything."""
        return config.deepspeed.zero_stage != 0

    def compiles(self, step: traits.ProfiledStep) -> bool:
        """Return whether the blocks can be compiled, which gathered parameters prevent."""
        return bool(step.setting("deepspeed.zero_stage") != 3)

    def advice(self, bottleneck: str, step: traits.ProfiledStep) -> Iterator[Advice]:
        """Yield a stage that gathers less, an optimizer for CPUs, and an update that lets the CPU work ahead."""
        if bottleneck == "exposed_communication":
            # A file of the user may set the stage.
            gathers = step.setting("deepspeed.zero_stage") == 3 and not step.setting("deepspeed.config_file")
            fits = not step.setting("offload.enabled") and step.fits_unsharded(bytes_per_parameter=8)
            if gathers and fits:  # with whole weights and gradients in fp32
                yield Advice("zero_stage=2", "stage 2 does not gather the parameters of each block")
            yield from step.larger_micro_batch(2)
        elif bottleneck == "optimizer":
            is_offloaded = (
                step.on_gpu and step.setting("offload.enabled") and not step.fits_unsharded(traits.ADAMW_STATES)
            )
            uses_torch = step.setting("deepspeed.cpu_optimizer") == "torch"
            if is_offloaded and uses_torch and step.setting("train.optimizer", "adamw") == "adamw":
                yield Advice("deepspeed.cpu_optimizer=deepspeed", "DeepSpeed has a faster optimizer for CPUs")
        if bottleneck in ("launch_idle", "data_wait", "optimizer"):
            # Without it, the CPU waits for the GPU at the end of the step. Then the GPU waits for the
            # update, the next batch and the first launches.
            supported = (
                step.on_gpu
                and step.setting("engine.name") == "native"
                and step.setting("deepspeed.zero_stage") in ds_config.CHECK_STAGES
                and step.setting("precision.name") == "bf16"
                and not step.setting("offload.enabled")
                and not step.setting("deepspeed.config_file")  # It may need the check, or another optimizer.
            )
            if supported and not step.setting("deepspeed.async_update"):
                checked = step.setting("deepspeed.check_overflow", default=True)
                override = "deepspeed.async_update=true"
                reason = "the CPU does not wait for the GPU at the end of each step"
                yield Advice(f"deepspeed.check_overflow=false {override}" if checked else override, reason)

    def memory_note(self, config: Config) -> str:
        """Explain the gradients and states of a stage that partitions them."""
        if not config.deepspeed.zero_stage:
            return ""
        return (
            "ZeRO frees the other gradients before the update, also with stage 1. Its optimizer states have a copy of "
            "the parameters."
        )


def _communication(config: Settings, stage: int) -> ZeroCommunication:
    """Return the collectives of a stage. Gradients have the type of the weights, except at stage 0 in 16 bits."""
    values = traits.common_values(config)
    return ZeroCommunication(**values | {"gradient_bytes": values["weight_bytes"] if stage else 4}, stage=stage)


def _offload_errors(config: Config) -> Iterator[str]:
    if not config.offload.enabled:
        return
    if config.deepspeed.zero_stage == 0:
        yield (
            "offload=true needs partitioned states, and zero_stage=0 partitions none: "
            "choose zero_stage=1,2,3 or offload=false"
        )
    if config.train.optimizer != "adamw" and config.deepspeed.cpu_optimizer == "deepspeed":
        yield (
            f"train.optimizer={config.train.optimizer} has no DeepSpeed CPU kernel for offload=true: "
            "set deepspeed.cpu_optimizer=torch or train.optimizer=adamw"
        )


def _async_errors(config: Config) -> Iterator[str]:
    if not config.deepspeed.async_update:
        return
    if error := _unchecked_error(config) or _async_update_error(config):
        yield f"deepspeed.async_update=true {error}"
    elif config.deepspeed.check_overflow is not False:
        yield (
            "deepspeed.async_update=true needs deepspeed.check_overflow=false, because the check waits for the GPU: "
            "set it, or leave deepspeed.async_update out"
        )


def _unchecked_error(config: Config) -> str | None:
    """Return why the check for infinite gradients is needed; None if bf16 does not need it."""
    if ds_config.may_skip_check(config):
        return None
    return (
        f"is for precision=bf16 with zero_stage=1,2, but this run has precision={config.precision.name} and "
        f"zero_stage={config.deepspeed.zero_stage}: leave it out"
    )


def _async_update_error(config: Config) -> str | None:
    """Return why the trainer or the offload does not support an asynchronous update; None if they do."""
    if config.engine.name != "native":
        return f"is not supported by engine={config.engine.name}: use engine=native, or leave it out"
    if config.offload.enabled:
        return "is not supported with offload=true, whose update is on the CPU: leave one of them out"
    in_file = get_nested(read_or_empty(config.deepspeed.config_file), GRADIENT_TYPE)
    if config.deepspeed.zero_stage == 1 and in_file in ("fp32", "float32"):
        return (
            f"is not supported with {'.'.join(GRADIENT_TYPE)}={in_file} of deepspeed.config_file at zero_stage=1, for "
            "which DeepSpeed has another optimizer: leave one of them out"
        )
    return None


def conflicts(config: Config) -> Iterator[str]:
    """Yield an error for each value in the user's file that is set differently here."""
    path = config.deepspeed.config_file
    if path is None or not Path(path).is_file():
        return
    try:
        settings = ds_config.read_file(path)
    except ValueError as error:
        yield f"deepspeed.config_file={path} is not a valid JSON object ({error}): correct the file"
        return
    yield from ds_config.key_errors(settings)
    yield from ds_config.unsafe_errors(settings)
    train = config.train
    own = {"momentum": train.momentum} if train.optimizer == "sgd" else {"betas": list(train.betas), "eps": train.eps}
    optimizer = {"lr": train.learning_rate, "weight_decay": train.weight_decay, **own}
    expected: dict[tuple[str, ...], Any] = {
        **dict(ds_config.values_set_by_distexp(config, config.cluster.world_size)),
        ("optimizer", "type"): {"adamw": "AdamW", "sgd": "SGD"}[train.optimizer],
        **{("optimizer", "params", name): value for name, value in optimizer.items()},
    }
    for keys, value in expected.items():
        in_file = get_nested(settings, keys)
        if in_file not in (None, "auto") and in_file != value:
            yield (
                f"deepspeed.config_file sets {'.'.join(keys)}={json.dumps(in_file)}, but this run has "
                f'{json.dumps(value)}: make them equal, or write "auto" in the file'
            )
    params = get_nested(settings, ("optimizer", "params"))
    for name in sorted(set(params) - {"type", *optimizer}) if isinstance(params, Mapping) else ():
        value = json.dumps(params[name])
        yield f"deepspeed.config_file sets optimizer.params.{name}={value}, which this run does not use: remove it"
    if "scheduler" in settings:
        yield "deepspeed.config_file has a scheduler: remove it, and set train.schedule instead"
    for name in ("offload_optimizer", "offload_param"):
        device = get_nested(settings, ("zero_optimization", name, "device"))
        if not config.offload.enabled and device not in (None, "auto", "none"):
            yield f"deepspeed.config_file sets zero_optimization.{name}.device={device}: also choose offload=true"
