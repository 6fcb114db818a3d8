"""What may slow a GPU down: reduced clocks, memory errors, and its PCIe link."""

from __future__ import annotations

from typing import Any, NamedTuple

RARE_STRIDE = 20
"""Memory errors and the PCIe link are read in one of so many samples, because they change rarely."""

CLOCK_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
"""Names of one function of NVML, the newer one first."""

ECC_ERRORS = ("nvmlDeviceGetTotalEccErrors", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC")


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
        return Conditions(
            sm_clock_mhz=self._get("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
            clock_reasons=next((found for name in CLOCK_REASONS if (found := self._get(name)) is not None), None),
            pcie_pct=self._pcie_pct() if is_due else None,
            ecc_errors=self._get(*ECC_ERRORS) if is_due else None,
        )

    def _pcie_pct(self) -> float | None:
        """Return the rate of the PCIe link in percent. A generation has twice the rate of the one before."""
        generation, best, width, widest = (
            self._get(f"nvmlDeviceGet{which}PcieLink{what}")
            for what in ("Generation", "Width")
            for which in ("Curr", "Max")
        )
        if not (generation and width and best and widest):
            return None
        return 100 * float(2 ** (generation - best)) * width / widest

    def _get(self, function: str, *constants: str) -> float | None:
        if function in self._refused:
            return None
        try:
            arguments = [getattr(self._nvml, name) for name in constants]
            return float(getattr(self._nvml, function)(self._handle, *arguments))
        except Exception:  # any: most GPUs lack some of these, and no run needs them
            self._refused.add(function)
            return None
