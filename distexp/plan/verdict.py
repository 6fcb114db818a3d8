"""Verdict on an estimate: whether the training fits into the memory of a GPU."""

from __future__ import annotations

from distexp.config import Config
from distexp.plan.estimate import Estimate
from distexp.runs.record import Predicted
from distexp.system.gpu_models import GPU_MODELS, USABLE_SHARE, gpus_with
from distexp.system.hardware import visible_gpus

ERROR_BOUND = 0.05
"""Largest error of a predicted peak. A training this close to the memory of the GPU is too close to call."""

FITS, TOO_CLOSE, DOES_NOT_FIT = "fits", "too_close", "does_not_fit"
MIB_PER_GB = 1024.0


def gpu_memory_mib(config: Config) -> float | None:
    """Return the memory of the GPU to plan for; None if it is unknown.

    A job on Slurm runs on another machine, so the GPUs of this one do not count.
    """
    if config.cluster.device == "cpu":
        return None
    if config.plan.gpu_memory_gb is not None:
        return config.plan.gpu_memory_gb * MIB_PER_GB
    if config.plan.gpu is not None:
        return GPU_MODELS[config.plan.gpu]
    if config.cluster.gpu_memory_limit_gb is not None:
        return config.cluster.gpu_memory_limit_gb * MIB_PER_GB
    if config.cluster.launcher == "slurm" or not visible_gpus():
        return None
    return min(gpu.total_mib for gpu in visible_gpus()) * USABLE_SHARE


def planned_gpu(config: Config) -> str | None:
    """Return the name of the GPU to plan for; None if it is unknown."""
    if config.plan.gpu is not None or config.cluster.launcher == "slurm" or config.plan.gpu_memory_gb is not None:
        return config.plan.gpu
    return visible_gpus()[0].name if visible_gpus() else None


def predict(estimate: Estimate, memory_mib: float | None) -> Predicted:
    """Return the prediction for a GPU."""
    reserved = estimate.peak_reserved_mib
    smi = None if reserved is None else reserved + estimate.overhead_mib
    if smi is not None and memory_mib is not None:
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
        required_mib=estimate.needed_mib,
        gpu_memory_mib=memory_mib,
        notes=estimate.notes,
    )


def verdict_of(estimate: Estimate, memory_mib: float | None) -> str | None:
    """Return ``fits``, ``too_close`` or ``does_not_fit``; None if the memory or the peak is unknown."""
    if memory_mib is None:
        return None
    needed = estimate.needed_mib
    if needed is None:
        return DOES_NOT_FIT if sum(estimate.parts.values()) > memory_mib else None
    if needed * (1 + ERROR_BOUND) <= memory_mib:
        return FITS
    return DOES_NOT_FIT if needed * (1 - ERROR_BOUND) > memory_mib else TOO_CLOSE


def describe_verdict(predicted: Predicted) -> str:
    """Return the text of the verdict, or the known GPUs on which the training fits."""
    needed, memory = predicted.required_mib, predicted.gpu_memory_mib
    if needed is None:
        states = sum(predicted.parts.values())
        if predicted.verdict == DOES_NOT_FIT and memory is not None:
            return f"does not fit: the model states alone exceed it by {_gb(states - memory)}"
        return "unknown: not traced"
    if memory is None:
        return describe_gpus(needed)
    if predicted.verdict == FITS:
        return f"fits, {100 * (1 - needed / memory):.0f} % to spare"
    if predicted.verdict == TOO_CLOSE:
        return f"too close to call ({100 * needed / memory:.0f} % of the memory, the error is up to {ERROR_BOUND:.0%})"
    return f"does not fit by {_gb(needed - memory)}"


def describe_gpus(needed_mib: float) -> str:
    """Return the known GPUs on which a training fits."""
    fitting = gpus_with(needed_mib * (1 + ERROR_BOUND))
    return f"fits on {fitting[0]} and larger" if fitting else "fits on no known GPU"


def _gb(mib: float) -> str:
    return f"{mib / MIB_PER_GB:,.1f} GB"
