"""Overrides that would reduce a bottleneck, from the profile, the settings, and the measured memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from distexp.explain.batch_advice import larger_micro_batch, more_accumulation
from distexp.explain.host_headroom import free_cores, images_fit
from distexp.explain.memory_headroom import fits
from distexp.explain.slow_rank import had_no_core, slow_part
from distexp.explain.step_profile import StepProfile
from distexp.hardware.facts import gpu_facts

CORES_ARE_THE_CAUSE = 0.5
"""Fraction of the host work from which the wait for a CPU core is its cause, and not the work itself."""

MUCH_OF_COMMUNICATION = 0.2
"""Share of the communication from which fewer all-gathers are worth more memory."""

MANY_OTHER_KERNELS = 0.3
"""Share of kernels other than matrix products from which fusing them is worth the compilation."""

ASYNC_STAGES = (1, 2)
"""ZeRO stages with ``deepspeed.async_update``."""

FP32_WEIGHTS = 4
"""Bytes of a parameter."""
FP32_WEIGHTS_AND_GRADIENTS = 8
ADAMW_STATES = 20
"""Bytes per parameter of weights, gradients and AdamW's states, with 16-bit weights."""

Overrides = Iterator[str]


def advise(bottleneck: str, profile: StepProfile) -> list[str]:
    """Return alternatives that would reduce a bottleneck. Two overrides of one alternative are separated by a space."""
    return list(dict.fromkeys(ADVICE[bottleneck](profile)))


def _against_launch_idle(profile: StepProfile) -> Overrides:
    yield from _faster_launches(profile, profile.shares()["launch_idle"])


def _faster_launches(profile: StepProfile, idle_share: float) -> Overrides:
    """Yield what hides or shortens the launches, if the GPU is idle for a fraction of the step."""
    needed = 1 / max(0.05, 1 - idle_share)
    yield from larger_micro_batch(profile, needed)
    yield from list(_fused_kernels(profile)) or _async_update(profile)
    if _may_use_graphs(profile):
        yield "train.compile=graphs"


def _against_communication(profile: StepProfile) -> Overrides:
    strategy = profile.setting("strategy.name")
    if strategy == "ddp":
        if profile.on_gpu and profile.setting("ddp.communication") == "fp32":
            yield "ddp.communication=bf16"
        yield from more_accumulation(profile)
    if (
        strategy == "fsdp"
        and profile.setting("fsdp.sharding") == "full_shard"
        and _gathers_take_time(profile)
        and _fits_unsharded(profile, FP32_WEIGHTS)
    ):
        yield "sharding=shard_grad_op"
    stage, offload = profile.setting("deepspeed.zero_stage"), profile.setting("offload.enabled")
    own_config = profile.setting("deepspeed.config_file")  # It may set the stage.
    if (
        strategy == "deepspeed"
        and stage == 3
        and not offload
        and not own_config
        and _fits_unsharded(profile, FP32_WEIGHTS_AND_GRADIENTS)
    ):
        yield "zero_stage=2"
    if strategy in ("fsdp", "deepspeed"):
        yield from larger_micro_batch(profile, 2)


def _gathers_take_time(profile: StepProfile) -> bool:
    """Return whether all-gathers take much of the communication, or nothing is known about its kinds."""
    shares = profile.collective_shares()
    return not shares or shares.get("all_gather", 0.0) >= MUCH_OF_COMMUNICATION * sum(shares.values())


def _against_waiting(profile: StepProfile) -> Overrides:
    if had_no_core(profile):
        return
    cause, slowest = slow_part(profile).part, profile.slowest
    if cause == "data_wait":
        yield from _against_data_wait(profile)
    elif cause == "launch_idle":
        yield from _faster_launches(profile, slowest.time_ms("launch_idle") / slowest.step_ms)


def _against_data_wait(profile: StepProfile) -> Overrides:
    yield from _async_update(profile)
    loaders = profile.number("dataset.num_workers", 0)
    wanted = min(max(2, 2 * loaders), free_cores(profile))
    if wanted > loaders:
        yield f"dataset.num_workers={wanted}"
    decodes = "cache" in profile.setting("dataset.keys", ()) and profile.setting("dataset.cache") in (None, "none")
    if decodes and images_fit(profile):
        yield "dataset.cache=cpu"


def _against_optimizer(profile: StepProfile) -> Overrides:
    offload = profile.setting("offload.enabled")
    if offload and _fits_unsharded(profile, ADAMW_STATES):
        yield "offload=false"
    elif offload and profile.setting("deepspeed.cpu_optimizer") == "torch" and profile.on_gpu and _uses_adamw(profile):
        yield "deepspeed.cpu_optimizer=deepspeed"
    yield from _async_update(profile)
    yield from more_accumulation(profile)


def _against_host(profile: StepProfile) -> Overrides:
    # A line of the log makes the CPU wait for the GPU. Without a GPU it takes no part of the host work that counts.
    if profile.on_gpu:
        if profile.number("train.log_every", 10) == 1:
            yield "train.log_every=10"
        return
    if (profile.without_core_share or 0.0) >= CORES_ARE_THE_CAUSE * profile.shares()["host"]:
        return
    # Python takes as long for a small micro-batch as for a large one.
    yield from larger_micro_batch(profile, 1 / max(0.05, 1 - profile.shares()["host"]))


def _against_compute(profile: StepProfile) -> Overrides:
    environment = profile.record.environment
    has_bf16 = gpu_facts(environment.gpu_name if environment else None).has_bf16
    if profile.on_gpu and profile.setting("precision.name") == "fp32" and has_bf16:
        yield "precision=bf16"
    if profile.shares()["other_kernels"] >= MANY_OTHER_KERNELS:
        yield from _fused_kernels(profile)


ADVICE: dict[str, Callable[[StepProfile], Overrides]] = {
    "launch_idle": _against_launch_idle,
    "exposed_communication": _against_communication,
    "waiting": _against_waiting,
    "data_wait": _against_data_wait,
    "optimizer": _against_optimizer,
    "host": _against_host,
    "compute": _against_compute,
}


def _fused_kernels(profile: StepProfile) -> Overrides:
    """Yield kernels=fast, if it would compile the model of this run."""
    strategy, stage = profile.setting("strategy.name"), profile.setting("deepspeed.zero_stage")
    compiles = strategy in ("single", "ddp", "fsdp") or (strategy == "deepspeed" and stage != 3)
    if profile.on_gpu and compiles and not profile.setting("train.compile") and not _is_fast(profile):
        yield "kernels=fast"


def _async_update(profile: StepProfile) -> Overrides:
    """Yield an update that lets the CPU work ahead, if the run supports it.

    Without it, the CPU waits for the GPU at the end of the step. Then the GPU waits for the update, the next batch and
    the first launches.
    """
    supported = (
        profile.on_gpu
        and profile.setting("engine.name") == "native"
        and profile.setting("strategy.name") == "deepspeed"
        and profile.setting("deepspeed.zero_stage") in ASYNC_STAGES
        and profile.setting("precision.name") == "bf16"
        and not profile.setting("offload.enabled")
        and not profile.setting("deepspeed.config_file")  # It may need the check, or another optimizer.
    )
    if supported and not profile.setting("deepspeed.async_update"):
        checked = profile.setting("deepspeed.check_overflow", default=True)
        yield "deepspeed.check_overflow=false deepspeed.async_update=true" if checked else "deepspeed.async_update=true"


def _uses_adamw(profile: StepProfile) -> bool:
    """Return whether DeepSpeed has the run's optimizer for CPUs."""
    return bool(profile.setting("train.optimizer", "adamw") == "adamw")


def _may_use_graphs(profile: StepProfile) -> bool:
    """Return whether CUDA graphs are possible: the whole model is compiled already, so its batches have one shape."""
    return profile.on_gpu and profile.setting("train.compile") == "model"


def _is_fast(profile: StepProfile) -> bool:
    return bool(profile.setting("kernels.name") == "fast")


def _fits_unsharded(profile: StepProfile, bytes_per_parameter: int) -> bool:
    """Return whether tensors of the whole model, in place of a shard, would fit into the memory of the GPU."""
    built = profile.record.built
    return built is not None and fits(profile, bytes_more=bytes_per_parameter * built.parameters)
