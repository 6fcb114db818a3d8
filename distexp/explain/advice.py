"""Overrides that would reduce a bottleneck, from the profile, the settings, and the measured memory.

The options of a strategy are its own advice. What is here holds for all of them.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from distexp.config.custom_code import check_returned
from distexp.config.model_checks import BATCH_LIMITS, GENERATED_TRAIN_SIZES, check_samples_per_rank
from distexp.explain.step_profile import StepProfile, fits, free_cores, had_no_core, images_fit, slow_part
from distexp.hardware.facts import gpu_facts
from distexp.strategies.traits import ADAMW_STATES, Advice

# Fraction of the host work from which the wait for a CPU core is its cause, and not the work itself.
CORES_ARE_THE_CAUSE = 0.5
MANY_OTHER_KERNELS = 0.3  # share of kernels other than matrix products from which fusing them is worth the compilation

Alternatives = Iterator[Advice]


class AdvisedStep(StepProfile):
    """A profiled step, with what the advice of a strategy asks."""

    def fits_unsharded(self, bytes_per_parameter: int) -> bool:
        """Return whether tensors of the whole model, in place of a shard, would fit into the memory of the GPU."""
        built = self.record.built
        return built is not None and fits(self, bytes_more=bytes_per_parameter * built.parameters)

    def larger_micro_batch(self, needed: float) -> Alternatives:
        """Yield a micro-batch that is larger by the needed factor, or by the largest one that fits; none if none fits.

        If the accumulation can shrink by that factor, the global batch stays the same, and so does the training. If it
        cannot, the global batch grows too, which changes the training.
        """
        reason = "a step has more samples for the same communication and launches"
        accumulation, other = self.number("train.gradient_accumulation_steps", 1), ""
        wanted = min(MAX_FACTOR, 2 ** max(1, math.ceil(math.log2(needed))))
        possible = [factor for factor in (8, 4, 2) if factor <= wanted and _has_samples(self, factor)]
        fitting = [factor for factor in possible if fits(self, batch_factor=factor)]
        factor = next((factor for factor in fitting if accumulation % factor == 0), None)
        if factor is not None:
            if not _sets_global_batch(self):
                other = f" train.gradient_accumulation_steps={accumulation // factor}"
        elif fitting and _has_steps(self, fitting[0]):
            factor = fitting[0]
            if _sets_global_batch(self):
                other = f" train.global_batch_size={self.number('train.global_batch_size', 1) * factor}"
        if factor is not None:
            size = self.number("train.micro_batch_size", 1) * factor
            yield Advice(_lift_limits(self, f"train.micro_batch_size={size}{other}"), reason)

    def more_accumulation(self) -> Alternatives:
        """Yield twice the global batch, with the same micro-batch, if an epoch has enough steps."""
        if not _has_steps(self, 2) or self.setting("ddp.static_graph"):  # It needs one micro-batch per step.
            return
        total = self.setting("train.global_batch_size")
        key = "train.global_batch_size" if isinstance(total, int) else "train.gradient_accumulation_steps"
        twice = 2 * (total if isinstance(total, int) else self.number(key, 1))
        reason = "gradients are reduced, and weights updated, once for more samples"
        yield Advice(_lift_limits(self, f"{key}={twice}"), reason)

    def advice(self, bottleneck: str) -> Alternatives:
        """Yield the advice of the strategy."""
        for found in self.strategy.advice(bottleneck, self):
            check_returned(found, Advice, "advice() of the strategy")
            yield found


def advise(bottleneck: str, profile: StepProfile) -> list[Advice]:
    """Return alternatives that would reduce a bottleneck."""
    return list(ADVICE[bottleneck](AdvisedStep(profile.record, profile.ranks, profile.strategy)))


def _faster_launches(step: AdvisedStep, idle_share: float) -> Alternatives:
    """Yield what hides or shortens the launches, if the GPU is idle for a fraction of the step."""
    yield from step.larger_micro_batch(1 / max(0.05, 1 - idle_share))
    yield from list(_fused_kernels(step)) or step.advice("launch_idle")
    # The whole model is compiled already, so its batches have one shape, which CUDA graphs need.
    if step.on_gpu and step.setting("train.compile") == "model":
        yield Advice("train.compile=graphs", "a CUDA graph launches all kernels of a micro-batch at once")


def _against_waiting(step: AdvisedStep) -> Alternatives:
    if had_no_core(step):
        return
    cause, slowest = slow_part(step).part, step.slowest
    if cause == "data_wait":
        yield from _against_data_wait(step)
    elif cause == "launch_idle":
        yield from _faster_launches(step, slowest.time_ms("launch_idle") / slowest.step_ms)


def _against_data_wait(step: AdvisedStep) -> Alternatives:
    yield from step.advice("data_wait")
    loaders = step.number("dataset.num_workers", 0)
    wanted = min(max(2, 2 * loaders), free_cores(step))
    if wanted > loaders:
        yield Advice(f"dataset.num_workers={wanted}", "more processes prepare batches, and cores are free")
    decodes = "cache" in step.setting("dataset.keys", ()) and step.setting("dataset.cache") in (None, "none")
    if decodes and images_fit(step):
        yield Advice("dataset.cache=cpu", "each image is decoded once, and all of them fit into memory")


def _against_optimizer(step: AdvisedStep) -> Alternatives:
    if step.setting("offload.enabled") and step.fits_unsharded(ADAMW_STATES):
        yield Advice("offload=false", "the GPU updates the weights, and all states fit into its memory")
    yield from step.advice("optimizer")
    yield from step.more_accumulation()


def _against_host(step: AdvisedStep) -> Alternatives:
    yield from step.advice("host")
    # A line of the log makes the CPU wait for the GPU. Without a GPU it takes no part of the host work that counts.
    if step.on_gpu:
        if step.number("train.log_every", 10) == 1:
            yield Advice("train.log_every=10", "each line of the log makes the CPU wait for the GPU")
        return
    if (step.without_core_share or 0.0) >= CORES_ARE_THE_CAUSE * step.shares()["host"]:
        return
    # Python takes as long for a small micro-batch as for a large one.
    yield from step.larger_micro_batch(1 / max(0.05, 1 - step.shares()["host"]))


def _against_compute(step: AdvisedStep) -> Alternatives:
    environment = step.record.environment
    has_bf16 = gpu_facts(environment.gpu_name if environment else None).has_bf16
    if step.on_gpu and step.setting("precision.name") == "fp32" and has_bf16:
        yield Advice("precision=bf16", "the matrix units of the GPU are faster in 16 bits")
    if step.shares()["other_kernels"] >= MANY_OTHER_KERNELS:
        yield from _fused_kernels(step)
    yield from step.advice("compute")


ADVICE: dict[str, Callable[[AdvisedStep], Alternatives]] = {
    "launch_idle": lambda step: _faster_launches(step, step.shares()["launch_idle"]),
    "exposed_communication": lambda step: step.advice("exposed_communication"),
    "bubble": lambda step: step.advice("bubble"),
    "waiting": _against_waiting,
    "data_wait": _against_data_wait,
    "optimizer": _against_optimizer,
    "host": _against_host,
    "compute": _against_compute,
}


def _fused_kernels(step: AdvisedStep) -> Alternatives:
    """Yield kernels=fast, if it would compile the model of this run, which it does not if workers share layers."""
    is_fast = step.setting("kernels.name") == "fast"
    is_shared = any(step.number(f"parallel.{degree}", 1) > 1 for degree in ("tensor", "context", "expert", "pipeline"))
    if step.on_gpu and step.strategy.compiles(step) and not (step.setting("train.compile") or is_fast or is_shared):
        yield Advice("kernels=fast", "compiled code has fewer and larger kernels")


MAX_FACTOR = 8  # largest factor of a proposed micro-batch


def _lift_limits(profile: StepProfile, alternative: str) -> str:
    """Add what makes an alternative effective in a run of ``scale=tiny``, which limits the size of batches.

    Without the limits, a size that the alternative does not set would be larger than in the run. So it is set.
    """
    limits = [key for key in BATCH_LIMITS if profile.setting(key) is not None]
    if not limits:
        return alternative
    total = "train.global_batch_size" if _sets_global_batch(profile) else "train.gradient_accumulation_steps"
    sizes = {key: profile.number(key, 1) for key in ("train.micro_batch_size", total)}
    kept = [f"{key}={value}" for key, value in sizes.items() if f"{key}=" not in alternative]
    return " ".join([alternative, *kept, *(f"{key}=null" for key in limits)])


def _sets_global_batch(profile: StepProfile) -> bool:
    """Return whether the run sets the global batch. Then the accumulation follows from it and the micro-batch."""
    return profile.setting("train.global_batch_size") is not None


def _has_steps(profile: StepProfile, factor: int) -> bool:
    """Return whether an epoch has enough steps for a global batch that is larger by a factor."""
    return (profile.record.metrics.steps_per_epoch or factor) >= factor


def _has_samples(profile: StepProfile, factor: int) -> bool:
    """Return whether each worker has the samples of a micro-batch that is larger by a factor.

    If their number is unknown, only those of the full steps of an epoch are certain.
    """
    known = profile.setting("dataset.train_size") or GENERATED_TRAIN_SIZES.get(profile.setting("dataset._target_"))
    samples = None if profile.setting("dataset.packing") else known  # a row has several samples
    if samples is not None:
        micro_batch = factor * profile.number("train.micro_batch_size", 1)
        return check_samples_per_rank(samples, profile.data_parallel, micro_batch) is None
    steps = profile.record.metrics.steps_per_epoch
    return steps is None or factor <= max(1, steps - 1) * profile.number("train.gradient_accumulation_steps", 1)


def larger_global_batches(profile: StepProfile, alternatives: Sequence[str]) -> list[str]:
    """Return the alternatives that make the global batch larger, and so change the training."""
    before = {key: profile.number(key, 1) for key in ("train.micro_batch_size", "train.gradient_accumulation_steps")}
    if _sets_global_batch(profile):
        before = {"train.global_batch_size": profile.setting("train.global_batch_size")}

    def batch(alternative: str) -> int:
        values = dict(override.split("=", 1) for override in alternative.split())
        return math.prod(int(values.get(key, value)) for key, value in before.items())

    return [alternative for alternative in alternatives if batch(alternative) > math.prod(before.values())]
