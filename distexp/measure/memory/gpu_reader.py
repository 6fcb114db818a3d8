"""Memory, utilization, power and energy of GPUs, read with NVML."""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

from distexp.runs.memory_trace import MemorySample
from distexp.system import cgroups, units


class GpuReader:
    """Reads GPUs with NVML. ``warn`` receives one message for each value that NVML does not report.

    Raises NvmlUnavailableError if NVML cannot be initialized, and ImportError if pynvml is not installed.
    """

    def __init__(self, indices: Sequence[int], warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._refused: set[str] = set()
        self._lists_our_pids = False
        session = ExitStack()
        self._nvml: Any = session.enter_context(cgroups.nvml_session())
        self.close = session.close
        self._handles = {
            index: self._query(f"handle of GPU {index}", "nvmlDeviceGetHandleByIndex", index) for index in indices
        }
        self._conditions = {index: ConditionsReader(self._nvml, handle) for index, handle in self._handles.items()}
        self._partitioned = {index for index, handle in self._handles.items() if self._uses_mig(handle)}

    def read(self, empty: MemorySample, pids: Collection[int]) -> MemorySample:
        """Return the sample of a GPU, given one without values, and the processes of this job."""
        index, handle = empty.index, self._handles[empty.index]
        if handle is None:
            return empty
        memory, source = self._memory(index, handle)
        busy = self._query(f"utilization of GPU {index}", "nvmlDeviceGetUtilizationRates", handle)
        job_mib, other_mib = self._job_and_other_mib(index, handle, pids)
        milliwatts = millijoules = None
        if index not in self._partitioned:  # With MIG, other users share the GPU, and both are of the whole GPU.
            milliwatts = self._query(f"power of GPU {index}", "nvmlDeviceGetPowerUsage", handle)
            millijoules = self._query(f"energy of GPU {index}", "nvmlDeviceGetTotalEnergyConsumption", handle)
        return replace(
            empty,
            used_mib=None if memory is None else memory.used / units.MIB,
            total_mib=None if memory is None else memory.total / units.MIB,
            utilization_pct=None if busy is None else float(busy.gpu),
            power_w=None if milliwatts is None else milliwatts / 1000,
            job_mib=job_mib,
            energy_j=None if millijoules is None else millijoules / 1000,
            source=source,
            other_mib=other_mib,
            **self._conditions[index].read()._asdict(),
        )

    def _uses_mig(self, handle: Any) -> bool:
        try:
            return bool(self._nvml.nvmlDeviceGetMigMode(handle)[0])
        except Exception:  # any: most GPUs have no MIG, and old drivers do not know it
            return False

    def _memory(self, index: int, handle: Any) -> tuple[Any, str]:
        """Return the memory as nvidia-smi counts it; old versions of NVML count the driver's reserve as used."""
        function = "nvmlDeviceGetMemoryInfo"
        if version := getattr(self._nvml, "nvmlMemory_v2", None):
            what = f"memory without the driver's reserve of GPU {index}"
            if (info := self._query(what, function, handle, version=version)) is not None:
                return info, "nvml"
        info = self._query(f"memory of GPU {index}", function, handle)
        return info, "" if info is None else "nvml_with_reserve"

    def _job_and_other_mib(self, index: int, handle: Any, pids: Collection[int]) -> tuple[float | None, float | None]:
        """Return the MiB of this job's processes and of all others; None if NVML does not list their pids.

        In a container, NVML may list no processes, or list them with the pids of the host. Its list is used once it
        has contained one of our pids, on any GPU.
        """
        listed = self._query(f"processes of GPU {index}", "nvmlDeviceGetComputeRunningProcesses", handle)
        ours = [process.usedGpuMemory for process in listed or () if process.pid in pids]
        others = [process.usedGpuMemory for process in listed or () if process.pid not in pids]
        self._lists_our_pids |= bool(ours)
        known = listed is not None and self._lists_our_pids
        return (_total_mib(ours), _total_mib(others)) if known else (None, None)

    def _query(self, what: str, function: str, *arguments: Any, **keywords: Any) -> Any:
        """Return the result of a query, or None after one warning. The other values of the GPU remain available."""
        try:
            return getattr(self._nvml, function)(*arguments, **keywords)
        except Exception as error:
            if what not in self._refused:
                self._refused.add(what)
                self._warn(f"NVML does not report the {what} ({error}); it is left empty")
            return None


def _total_mib(sizes: Sequence[int | None]) -> float | None:
    return None if None in sizes else float(sum(filter(None, sizes))) / units.MIB


RARE_STRIDE = 20  # memory errors and the PCIe link are read in one of so many samples, because they change rarely

# names of one function of NVML, the newer one first
CLOCK_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")


class Conditions(NamedTuple):
    """Conditions of a GPU at one time; a value is None if NVML does not report it, or if it was not read."""

    sm_clock_mhz: float | None = None
    clock_reasons: float | None = None  # bits, as in nvml.h
    pcie_pct: float | None = None  # rate of the link, in percent of its maximum
    ecc_errors: float | None = None  # uncorrected, since the driver was loaded


class ConditionsReader:
    """Reads the conditions of one GPU. A value that NVML refuses once is not requested again."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._count = 0
        self._refused: set[str] = set()

    def read(self) -> Conditions:
        """Return the conditions now."""
        is_due = self._count % RARE_STRIDE == 0
        self._count += 1
        uncorrected = ("NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC")
        return Conditions(
            sm_clock_mhz=self._get("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
            clock_reasons=next((found for name in CLOCK_REASONS if (found := self._get(name)) is not None), None),
            pcie_pct=self._pcie_pct() if is_due else None,
            ecc_errors=self._get("nvmlDeviceGetTotalEccErrors", *uncorrected) if is_due else None,
        )

    def _pcie_pct(self) -> float | None:
        """Return the rate of the PCIe link in percent. A generation has twice the rate of the one before."""
        generation, best, width, widest = (
            self._get(f"nvmlDeviceGet{which}PcieLink{what}")
            for what in ("Generation", "Width")
            for which in ("Curr", "Max")
        )
        if generation and width and best and widest:
            return 100 * float(2 ** (generation - best)) * width / widest
        return None

    def _get(self, function: str, *constants: str) -> float | None:
        if function in self._refused:
            return None
        try:
            arguments = [getattr(self._nvml, name) for name in constants]
            return float(getattr(self._nvml, function)(self._handle, *arguments))
        except Exception:  # any: most GPUs lack some of these, and no run needs them
            self._refused.add(function)
            return None
