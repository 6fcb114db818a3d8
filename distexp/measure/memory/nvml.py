"""Memory, utilisation, power and energy of GPUs, read through NVML."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from distexp.system.units import MIB

Warn = Callable[[str], None]


@dataclass(frozen=True)
class GpuReading:
    """A GPU at one time; None is what NVML does not tell."""

    index: int
    used_mib: float | None = None  # by everyone
    total_mib: float | None = None
    utilization_pct: float | None = None
    power_w: float | None = None
    job_mib: float | None = None  # by the processes that were asked for
    energy_j: float | None = None
    source: str = ""


class GpuReader:
    """Reads some GPUs by their NVML indices; ``warn`` gets a sentence for each thing NVML refuses, once."""

    def __init__(self, indices: Sequence[int], warn: Warn) -> None:
        """Raises ImportError or pynvml's NVMLError where there is no NVML."""
        import pynvml

        self._nvml: Any = pynvml
        self._warn = warn
        self._refused: set[str] = set()
        self._knows_our_pids = False
        self._excludes_reserved = hasattr(pynvml, "nvmlMemory_v2")
        pynvml.nvmlInit()
        self._handles = {
            index: self._ask(f"handle of GPU {index}", partial(pynvml.nvmlDeviceGetHandleByIndex, index))
            for index in indices
        }

    def close(self) -> None:
        """Lets NVML go."""
        self._nvml.nvmlShutdown()

    def read(self, pids: Collection[int]) -> list[GpuReading]:
        """One reading a GPU; ``pids`` are the job's processes."""
        return [self._read(index, handle, pids) for index, handle in self._handles.items()]

    def _read(self, index: int, handle: Any, pids: Collection[int]) -> GpuReading:
        if handle is None:
            return GpuReading(index)
        nvml = self._nvml
        memory, source = self._memory(index, handle)
        busy = self._ask(f"utilisation of GPU {index}", partial(nvml.nvmlDeviceGetUtilizationRates, handle))
        milliwatts = self._ask(f"power of GPU {index}", partial(nvml.nvmlDeviceGetPowerUsage, handle))
        millijoules = self._ask(f"energy of GPU {index}", partial(nvml.nvmlDeviceGetTotalEnergyConsumption, handle))
        return GpuReading(
            index=index,
            used_mib=None if memory is None else memory.used / MIB,
            total_mib=None if memory is None else memory.total / MIB,
            utilization_pct=None if busy is None else float(busy.gpu),
            power_w=None if milliwatts is None else milliwatts / 1000,
            job_mib=self._job_mib(index, handle, pids),
            energy_j=None if millijoules is None else millijoules / 1000,
            source=source,
        )

    def _memory(self, index: int, handle: Any) -> tuple[Any, str]:
        """The memory as nvidia-smi counts it; an older NVML counts the driver's own reserve as used."""
        nvml = self._nvml
        if self._excludes_reserved:
            info = self._ask(
                f"memory without the driver's reserve of GPU {index}",
                partial(nvml.nvmlDeviceGetMemoryInfo, handle, version=nvml.nvmlMemory_v2),
            )
            if info is not None:
                return info, "nvml"
        info = self._ask(f"memory of GPU {index}", partial(nvml.nvmlDeviceGetMemoryInfo, handle))
        return info, "" if info is None else "nvml_with_reserve"

    def _job_mib(self, index: int, handle: Any, pids: Collection[int]) -> float | None:
        """MiB of our processes; None unless NVML is known to see our pids.

        In a container it may list no processes, or those of the host by numbers that mean nothing here;
        having named one of ours on any GPU, it is trusted where it names none.
        """
        listed = self._ask(
            f"processes of GPU {index}", partial(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        )
        if listed is None:
            return None
        ours = [process.usedGpuMemory for process in listed if process.pid in pids]
        self._knows_our_pids |= bool(ours)
        if not self._knows_our_pids or None in ours:
            return None
        return float(sum(ours)) / MIB

    def _ask(self, what: str, question: Callable[[], Any]) -> Any:
        """An answer, or None with one warning: what a GPU refuses must not cost the other figures."""
        try:
            return question()
        except Exception as error:
            if what not in self._refused:
                self._refused.add(what)
                self._warn(f"NVML does not tell the {what} ({error}); it is left empty")
            return None
