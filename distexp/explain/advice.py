"""Overrides that would reduce a loss. Each one follows from the profile, the settings, and the measured memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from distexp.config import DatasetConfig
from distexp.explain.memory_headroom import fits
from distexp.explain.slow_rank import slower_by
from distexp.explain.step_profile import StepProfile
from distexp.resolve.image_bytes import MAX_CPU_BYTES, estimate_image_bytes

MOST_FACTOR = 8
"""Largest factor of a proposed micro-batch."""
OLD_GPUS = ("V100", "T4", "P100", "RTX 20", "TITAN", "Quadro RTX")
"""GPUs without fast bf16."""
MANY_OTHER_KERNELS = 0.3
"""Share of kernels other than matrix products from which fusing them is worth the compilation."""

Overrides = Iterator[str]


def advise(loss: str, profile: StepProfile) -> list[str]:
    """Return alternatives that would reduce a loss. Two overrides of one alternative are separated by a space."""
    return list(dict.fromkeys(ADVICE[loss](profile))) if loss in ADVICE else []


def _against_launch_idle(profile: StepProfile) -> Overrides:
    yield from _faster_launches(profile, profile.shares()["launch_idle"])


def _faster_launches(profile: StepProfile, idle_share: float) -> Overrides:
    """Yield what hides or shortens the launches, if the GPU is idle for a fraction of the step."""
    needed = 1 / max(0.05, 1 - idle_share)
    yield from _larger_micro_batch(profile, needed)
    yield from _fused_kernels(profile)
    if _may_use_graphs(profile):
        yield "train.compile=graphs"


def _against_communication(profile: StepProfile) -> Overrides:
    strategy = profile.setting("strategy.name")
    if strategy == "ddp":
        if profile.on_gpu and profile.setting("ddp.communication") == "fp32":
            yield "ddp.communication=bf16"
        yield from _more_accumulation(profile)
    if strategy == "fsdp" and profile.setting("fsdp.sharding") == "full_shard" and _fits_unsharded(profile, 4):
        yield "sharding=shard_grad_op"
    stage, offload = profile.setting("deepspeed.zero_stage"), profile.setting("offload.enabled")
    if strategy == "deepspeed" and stage == 3 and not offload and _fits_unsharded(profile, 8):
        yield "zero_stage=2"
    if strategy in ("fsdp", "deepspeed"):
        yield from _larger_micro_batch(profile, 2)


def _against_waiting(profile: StepProfile) -> Overrides:
    cause, slowest = slower_by(profile)[0], profile.slowest
    if cause == "data_wait":
        yield from _against_data_wait(profile)
    elif cause == "launch_idle":
        yield from _faster_launches(profile, slowest.time("launch_idle") / slowest.step_ms)


def _against_data_wait(profile: StepProfile) -> Overrides:
    loaders = profile.number("dataset.num_workers", 0)
    wanted = min(max(2, 2 * loaders), _free_cores(profile))
    if wanted > loaders:
        yield f"dataset.num_workers={wanted}"
    decodes = "cache" in profile.setting("dataset.keys", ()) and profile.setting("dataset.cache") in (None, "none")
    if decodes and _images_fit(profile):
        yield "dataset.cache=cpu"


def _against_optimizer(profile: StepProfile) -> Overrides:
    offload = profile.setting("offload.enabled")
    if offload and _fits_unsharded(profile, 20):
        yield "offload=false"
    elif offload and profile.setting("deepspeed.cpu_optimizer") == "torch" and profile.on_gpu:
        yield "deepspeed.cpu_optimizer=deepspeed"
    yield from _more_accumulation(profile)


def _against_host(profile: StepProfile) -> Overrides:
    if profile.number("train.log_every", 10) == 1:
        yield "train.log_every=10"


def _against_compute(profile: StepProfile) -> Overrides:
    environment = profile.record.environment
    name = (environment.gpu_name or "") if environment else ""
    if profile.on_gpu and profile.setting("precision.name") == "fp32" and not any(old in name for old in OLD_GPUS):
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


def _larger_micro_batch(profile: StepProfile, needed: float) -> Overrides:
    """Yield the micro-batch that is larger by the needed factor, or by the largest one that fits.

    If the accumulation cannot shrink by this factor, the micro-batch is the largest one of this training. Then the
    global batch grows too, which changes the training.
    """
    micro, steps = (profile.number(f"train.{name}", 1) for name in ("micro_batch_size", "gradient_accumulation_steps"))
    wanted = min(MOST_FACTOR, 2 ** max(1, math.ceil(math.log2(needed))))
    factors = [factor for factor in (8, 4, 2) if factor <= wanted and fits(profile, batch_factor=factor)]
    if not factors:
        return
    kept = next((factor for factor in factors if steps % factor == 0), None)
    is_derived = profile.setting("train.global_batch_size") is not None  # then the accumulation follows from it
    if kept is not None:  # the same global batch, and so the same training
        accumulation = "" if is_derived else f" train.gradient_accumulation_steps={steps // kept}"
        yield f"train.micro_batch_size={micro * kept}{accumulation}"
    elif _has_steps(profile, factors[0]):
        total = profile.number("train.global_batch_size", 1) * factors[0]
        more = f" train.global_batch_size={total}" if is_derived else ""
        yield f"train.micro_batch_size={micro * factors[0]}{more}"


def _more_accumulation(profile: StepProfile) -> Overrides:
    """Yield twice the global batch, with the same micro-batch, if an epoch has enough steps."""
    if not _has_steps(profile, 2):
        return
    total = profile.setting("train.global_batch_size")
    if isinstance(total, int):
        yield f"train.global_batch_size={2 * total}"
    else:
        yield f"train.gradient_accumulation_steps={2 * profile.number('train.gradient_accumulation_steps', 1)}"


def _has_steps(profile: StepProfile, factor: int) -> bool:
    """Return whether an epoch has enough steps for a global batch that is larger by a factor."""
    return (profile.record.metrics.steps_per_epoch or factor) >= factor


def larger_global_batches(profile: StepProfile, alternatives: Sequence[str]) -> list[str]:
    """Return the alternatives that make the global batch larger, and so change the training."""
    return [alternative for alternative in alternatives if _is_larger(profile, alternative)]


def _is_larger(profile: StepProfile, alternative: str) -> bool:
    values = dict(override.split("=", 1) for override in alternative.split())
    if "train.global_batch_size" in values:
        return True
    if profile.setting("train.global_batch_size") is not None:  # then the accumulation follows from it
        return False
    keys = "train.micro_batch_size", "train.gradient_accumulation_steps"
    before = [profile.number(key, 1) for key in keys]
    after = [int(values.get(key, value)) for key, value in zip(keys, before, strict=True)]
    return math.prod(after) > math.prod(before)


def _fused_kernels(profile: StepProfile) -> Overrides:
    """Yield kernels=fast, if it would compile the model of this run."""
    strategy, stage = profile.setting("strategy.name"), profile.setting("deepspeed.zero_stage")
    compiles = strategy in ("single", "ddp", "fsdp") or (strategy == "deepspeed" and stage != 3)
    if profile.on_gpu and compiles and not profile.setting("train.compile") and not _is_fast(profile):
        yield "kernels=fast"


def _may_use_graphs(profile: StepProfile) -> bool:
    """Return whether CUDA graphs are possible: the whole model is compiled already, so its batches have one shape."""
    return profile.on_gpu and profile.setting("train.compile") == "model"


def _is_fast(profile: StepProfile) -> bool:
    return bool(profile.setting("kernels.name") == "fast")


def _fits_unsharded(profile: StepProfile, bytes_per_parameter: int) -> bool:
    """Return whether tensors of the whole model, in place of a shard, would fit into the memory of the GPU.

    Args:
        profile: The profile.
        bytes_per_parameter: 4 for fp32 weights, 8 with their gradients, 20 with the states of AdamW and 16-bit weights.
    """
    built = profile.record.built
    return built is not None and fits(profile, bytes_more=bytes_per_parameter * built.parameters)


def _images_fit(profile: StepProfile) -> bool:
    """Return whether the decoded images are few enough for CPU memory, as for kernels=fast."""
    names = ("root", "train_size", "eval_size", "image_size")
    needed = estimate_image_bytes(DatasetConfig(**{name: profile.setting(f"dataset.{name}") for name in names}))
    return needed is not None and needed <= MAX_CPU_BYTES


def _free_cores(profile: StepProfile) -> int:
    """Return the CPU cores of a worker that do not train."""
    environment = profile.record.environment
    cores = (environment.cpu_count or 0) if environment else 0
    if environment and environment.cpu_limit is not None:
        cores = min(cores, int(environment.cpu_limit))
    training = 1 if profile.on_gpu else profile.number("cluster.cpus_per_worker", 1)
    return max(0, cores // math.ceil(profile.world_size / _machines(profile)) - training)


def _machines(profile: StepProfile) -> int:
    """Return the number of machines. Simulated nodes share one. During a run only its attempt has the hosts."""
    run = profile.record.run
    hosts = run.hosts or (run.attempts[-1].get("hosts") if run.attempts else None)
    return len(set(hosts)) if hosts else max(1, profile.number("cluster.nodes", 1))
