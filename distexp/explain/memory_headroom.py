"""Whether a change would fit into the memory of the GPU, or of the machine, from the measured memory of the run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from distexp.explain.step_profile import StepProfile
from distexp.runs.device_entries import cpu_peak_mib
from distexp.runs.entry_values import number_of
from distexp.runs.spec import parse_config
from distexp.system.units import MIB

USABLE = 0.9
"""Fraction of the memory of a GPU that is used at most."""

SMALL_GROWTH = 0.1
"""Fraction of the measured CPU memory by which a change may increase it. The free memory of the machine is unknown."""


def usable_mib(profile: StepProfile) -> float | None:
    """Return the memory of a GPU that torch may use; None if it is unknown."""
    environment = profile.record.environment
    total, outside = environment.gpu_total_mib if environment else None, outside_torch_mib(profile)
    if total is None or outside is None:
        return None
    limit = profile.setting("cluster.gpu_memory_limit_gb")
    return USABLE * ((min(total, 1024 * limit) if isinstance(limit, int | float) else total) - outside)


def outside_torch_mib(profile: StepProfile) -> float | None:
    """Return the memory of CUDA, NCCL and other programs; None if it is unknown.

    It is the measured one, or the usual one if this is more: ``cluster.gpu_memory_limit_gb`` subtracts at least that.
    """
    found = _values(profile.record.memory.get("parts"), "context_mib")
    with suppress(OmegaConfBaseException, TypeError, ValueError):  # of a damaged record
        found.append(profile.strategy.total_overhead_mib(parse_config(profile.record.config)))
    return max(found, default=None)


def peak_mib(profile: StepProfile) -> float | None:
    """Return the largest reserved memory of all ranks; None if it is unknown."""
    return _largest(profile.record.memory.get("torch"), "peak_reserved_mib")


def fits(profile: StepProfile, *, bytes_more: float = 0.0, batch_factor: int = 1) -> bool:
    """Return whether a run would certainly fit. Return false if its memory is unknown.

    Weights and optimizer states do not depend on the micro-batch. All other memory is counted as if it grew with it.
    On a CPU, only a change fits that hardly needs more memory.
    """
    if not profile.on_gpu:
        return _grows_little(profile, bytes_more, batch_factor)
    usable, peak = usable_mib(profile), peak_mib(profile)
    if usable is None or peak is None:
        return False
    parts = profile.record.memory.get("parts")
    constant = sum(_smallest(parts, name) for name in ("parameters_mib", "optimizer_states_mib"))
    constant = min(constant, peak)
    return constant + batch_factor * (peak - constant) + bytes_more / MIB <= usable


def _grows_little(profile: StepProfile, bytes_more: float, batch_factor: int) -> bool:
    """Return whether the memory of the processes grows by a small fraction. Their activations grow with the batch."""
    peak = cpu_peak_mib(profile.record.memory)
    activations = _largest(profile.record.memory.get("parts"), "activations_mib")
    if peak is None or activations is None:
        return False
    more_mib = (batch_factor - 1) * activations + bytes_more / MIB
    return profile.world_size * more_mib <= SMALL_GROWTH * peak


def _values(entries: Any, name: str) -> list[float]:
    listed = entries if isinstance(entries, list) else []
    found = (number_of(entry, name) for entry in listed if isinstance(entry, Mapping))
    return [value for value in found if value is not None]


def _largest(entries: Any, name: str) -> float | None:
    return max(_values(entries, name), default=None)


def _smallest(entries: Any, name: str) -> float:
    """Return the smallest value, so that the memory that grows is not underestimated."""
    return min(_values(entries, name), default=0.0)
