"""Checks of the settings for a prediction of memory, by ``distexp plan`` or before a run."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from distexp.config import Config
from distexp.config.batch_sizes import searches_micro_batch
from distexp.hardware.facts import planned_gpus


def check_plan(config: Config) -> Iterator[str]:
    """Yield an error for an unknown GPU model, for two memories, and for a micro-batch that is not known yet."""
    plan = config.plan
    if searches_micro_batch(config) and (config.is_prediction or plan.name == "check"):
        hint = (
            "type train.micro_batch_size=1, and the output has the largest size that fits"
            if config.is_prediction
            else "type a number, or leave plan=check out, because the search finds a size that fits"
        )
        yield f"a prediction of memory needs a number of samples, but train.micro_batch_size=auto: {hint}"
    if config.is_prediction or plan.name == "check":
        yield from _check_kind_of_memory(config)
    if plan.gpu is not None and plan.gpu not in planned_gpus():
        near = get_close_matches(plan.gpu.lower(), planned_gpus(), n=3, cutoff=0.4) or list(planned_gpus())
        yield f"plan.gpu={plan.gpu} is not a known GPU: use {', '.join(near)}, or set plan.gpu_memory_gb"
    if plan.gpu is not None and plan.gpu_memory_gb is not None:
        yield f"plan.gpu={plan.gpu} and plan.gpu_memory_gb={plan.gpu_memory_gb:g} both set the memory: leave one out"


def _check_kind_of_memory(config: Config) -> Iterator[str]:
    """Yield an error for each memory that is not that of the run's device."""
    plan = config.plan
    if config.cluster.device == "cpu":
        yield from (
            f"{key}={value} is for GPUs, but this run is on cpu: set plan.host_memory_gb, or leave it out"
            for key, value in (("plan.gpu", plan.gpu), ("plan.gpu_memory_gb", plan.gpu_memory_gb))
            if value is not None
        )
    elif plan.host_memory_gb is not None:
        yield (
            f"plan.host_memory_gb={plan.host_memory_gb:g} is for runs on CPUs, but this run is on GPUs: set "
            "plan.gpu_memory_gb, or cluster.device=cpu"
        )
