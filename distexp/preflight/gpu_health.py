"""Health of a GPU as NVML reports it: memory in use, memory errors, reduced clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from distexp.system.nvml import BUSY_MIB, NvmlUnavailableError, nvml_session
from distexp.system.units import MIB

THROTTLE_REASONS = {
    "nvmlClocksThrottleReasonHwSlowdown": "the hardware reduces its clocks (power or temperature)",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "the hardware reduces its clocks because it is too hot",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "the power supply reduces its clocks",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "the driver reduces its clocks because it is too hot",
}


def gpu_problems(index: int) -> list[str]:
    """Return one message for each problem of a GPU. Call it before this process allocates GPU memory.

    Args:
        index: Index of the GPU in NVML.
    """
    try:
        with nvml_session() as nvml:
            return list(_find_problems(nvml, index))
    except NvmlUnavailableError as error:
        return [f"the health of GPU {index} cannot be checked: NVML reports {error}"]


def _find_problems(nvml: Any, index: int) -> Iterator[str]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    used = nvml.nvmlDeviceGetMemoryInfo(handle).used / MIB
    if used > BUSY_MIB:
        yield f"GPU {index} has {used:,.0f} MiB in use before the run: another process uses it"
    errors = _read_counter(
        nvml,
        lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
    )
    if errors:
        yield f"GPU {index} has {errors} uncorrected memory errors since the last driver load: have it replaced"
    reasons = _read_counter(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    for name, description in THROTTLE_REASONS.items():
        if reasons & getattr(nvml, name):
            yield f"GPU {index}: {description}"


def _read_counter(nvml: Any, read: Callable[[], int]) -> int | None:
    """Return a counter, or None if this GPU does not support it."""
    try:
        return read()
    except nvml.NVMLError:
        return None
