"""What NVML says against a GPU: other processes on it, memory errors, throttled clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

BUSY_MIB = 2048
"""A driver and our own contexts keep several hundred MiB; a training takes gigabytes."""

THROTTLES = {
    "nvmlClocksThrottleReasonHwSlowdown": "its clocks are slowed by the hardware (power or heat)",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "it is too hot and slowed down",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "its power supply slows it down",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "the driver slows it down for heat",
}


def complaints(index: int) -> list[str]:
    """A sentence for each thing that is wrong with the GPU of an NVML index; call it before allocating."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [f"GPU {index} cannot be asked for its health: NVML says {error}"]
    try:
        return list(_complaints(pynvml, index))
    finally:
        pynvml.nvmlShutdown()


def _complaints(nvml: Any, index: int) -> Iterator[str]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    used = nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**20
    if used > BUSY_MIB:
        yield f"GPU {index} has {used:,.0f} MiB in use before anything was started: somebody else is on it"
    errors = _told(
        nvml,
        lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
    )
    if errors:
        yield f"GPU {index} has counted {errors} uncorrected memory errors since its start: have it replaced"
    reasons = _told(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    for name, sentence in THROTTLES.items():
        if reasons & getattr(nvml, name):
            yield f"GPU {index}: {sentence}"


def _told(nvml: Any, question: Callable[[], int]) -> int | None:
    """An answer; None where this GPU does not keep the count."""
    try:
        return question()
    except nvml.NVMLError:
        return None
