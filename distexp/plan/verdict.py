"""Verdict on an estimate: whether the training fits into the memory of a GPU."""

from distexp.config import Config
from distexp.hardware.facts import facts, gpus_with, planned_gpus
from distexp.plan.estimate import Estimate
from distexp.resolve.resources import launcher_traits
from distexp.runs.record_sections import Predicted
from distexp.system.cgroups import usable_memory, visible_gpus
from distexp.system.units import MIB, MIB_PER_GIB, format_memory

FITS, TOO_CLOSE, DOES_NOT_FIT = "fits", "too_close", "does_not_fit"

LARGER_MACHINE = {
    "cuda": "use more GPUs, or GPUs with more memory",
    "cpu": "use fewer workers, or a machine with more memory",
}
"""What to do if no other configuration fits, by device."""


def memory_to_fit_mib(config: Config) -> float | None:
    """Return the memory of the GPU, or on CPUs of the node, on which the run will start; None if it is unknown."""
    return host_memory_mib(config) if config.cluster.device == "cpu" else gpu_memory_mib(config)


def host_memory_mib(config: Config) -> float | None:
    """Return the memory of a node for a run on CPUs; None if it is unknown."""
    if config.plan.host_memory_gb is not None:
        return config.plan.host_memory_gb * MIB_PER_GIB
    if not launcher_traits(config).runs_here:
        return None if config.cluster.memory_gb is None else config.cluster.memory_gb * MIB_PER_GIB
    return usable_memory() / MIB


def gpu_memory_mib(config: Config) -> float | None:
    """Return the memory of the GPU to plan for; None if it is unknown."""
    known: list[float] = []
    if config.cluster.gpu_memory_limit_gb is not None:
        known.append(config.cluster.gpu_memory_limit_gb * MIB_PER_GIB)
    if config.plan.gpu_memory_gb is not None:
        known.append(config.plan.gpu_memory_gb * MIB_PER_GIB)
    elif config.plan.gpu is not None:
        known.append(planned_gpus()[config.plan.gpu])
    elif launcher_traits(config).runs_here and visible_gpus():
        known.append(min(gpu.total_mib for gpu in visible_gpus()) * facts().usable_share)
    return min(known, default=None)


def planned_gpu(config: Config) -> str | None:
    """Return the name of the GPU to plan for; None if it is unknown."""
    is_named = config.plan.gpu is not None or config.plan.gpu_memory_gb is not None
    if is_named or not launcher_traits(config).runs_here:
        return config.plan.gpu
    return visible_gpus()[0].name if visible_gpus() else None


def predict(estimate: Estimate, memory_mib: float | None) -> Predicted:
    """Return the prediction for a GPU."""
    reserved = estimate.peak_reserved_mib
    smi = None if reserved is None else reserved + estimate.overhead_mib
    if smi is not None and memory_mib is not None and (estimate.required_mib or 0.0) <= memory_mib:
        smi = min(smi, memory_mib)  # The allocator releases free segments before it runs out.
    return Predicted(
        peak_allocated_mib=estimate.peak_allocated_mib,
        peak_reserved_mib=reserved,
        nvidia_smi_mib=smi,
        host_peak_mib=estimate.host_mib,
        phase=estimate.phase,
        parts=estimate.parts,
        verdict=verdict_of(estimate, memory_mib),
        seconds=estimate.seconds,
        required_mib=estimate.required_mib,
        gpu_memory_mib=None if estimate.on_cpu else memory_mib,
        host_memory_mib=memory_mib if estimate.on_cpu else None,
        error_bound=estimate.error_bound,
        most_mib=estimate.most_mib,
        notes=estimate.notes,
    )


def verdict_of(estimate: Estimate, memory_mib: float | None) -> str | None:
    """Return ``fits``, ``too_close`` or ``does_not_fit``; None if the memory or the peak is unknown."""
    if memory_mib is None:
        return None
    if estimate.required_mib is None:
        return DOES_NOT_FIT if sum(estimate.parts.values()) > memory_mib else None
    least, most = estimate.least_mib, estimate.most_mib
    if least is None or most is None:
        return None
    if most <= memory_mib:
        return FITS
    return DOES_NOT_FIT if least > memory_mib else TOO_CLOSE


def describe_verdict(predicted: Predicted) -> str:
    """Return the text of the verdict, or the known GPUs on which the training fits."""
    needed, memory = predicted.required_mib, available_mib(predicted)
    if needed is None:
        states = sum(predicted.parts.values())
        if predicted.verdict == DOES_NOT_FIT and memory is not None:
            return f"does not fit: the model states alone exceed it by {format_memory(states - memory)}"
        return "unknown: only the model states are known" if states else "unknown: not traced"
    if memory is None:
        if predicted.nvidia_smi_mib is None:
            return f"needs {format_memory(needed)} on a node"
        if predicted.most_mib is None:
            return f"needs {format_memory(needed)}, with an unknown error"
        fitting = gpus_with(predicted.most_mib)
        return f"fits on {fitting[0]} and larger" if fitting else "fits on no known GPU"
    return _describe_share(needed, memory, predicted)


def _describe_share(needed: float, memory: float, predicted: Predicted) -> str:
    if predicted.error_bound is None:
        return f"needs {describe_need(needed, memory)}, with an unknown error"
    if predicted.verdict == FITS:
        return f"fits, {100 * (1 - needed / memory):.0f} % free"
    if predicted.verdict == TOO_CLOSE:
        return f"not certain: may need {describe_need(predicted.most_mib or needed, memory)}"
    return f"does not fit by {format_memory(needed - memory)}"


def describe_need(needed_mib: float, memory_mib: float) -> str:
    """Return both sizes as ``76.4 GiB of 75.0 GiB``, with more digits if they look equal."""
    texts = [tuple(format_memory(mib, digits) for mib in (needed_mib, memory_mib)) for digits in (1, 2, 3)]
    needed, memory = next((pair for pair in texts if pair[0] != pair[1]), texts[0])
    return f"{needed} of {memory}"


def available_mib(predicted: Predicted) -> float | None:
    """Return the memory that the verdict is about: that of the GPU, or of the node for a run on CPUs."""
    return predicted.gpu_memory_mib if predicted.host_memory_mib is None else predicted.host_memory_mib
