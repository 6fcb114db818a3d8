"""Energy of CPU packages, read with RAPL, and the part of it that one process tree used."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
"""Folder of the RAPL domains. The kernel uses the name ``intel-rapl`` for AMD too."""

STAT = Path("/proc/stat")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

TOP_LEVEL = re.compile(r"intel-rapl:\d+")
"""Folders of the domains that contain others. Cores and graphics, ``intel-rapl:0:1``, are part of a package."""

BUSY_FIELDS = slice(0, 3), slice(5, 8)
"""Fields of ``/proc/stat`` with CPU time in use: user, nice, system; irq, softirq, steal (proc(5))."""


class PackageCounter:
    """Energy counter of one CPU package, which restarts at 0 after its maximum.

    Raises:
        OSError: if the counter cannot be read. Most kernels allow it only to root.
        ValueError: if it has no number.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text())
        self._last_uj = int(self._file.read_text())

    def advance(self) -> float:
        """Return the joules since the last call. Call it before the counter restarts twice, after minutes."""
        now_uj = int(self._file.read_text())
        used_uj, self._last_uj = (now_uj - self._last_uj) % (self._range_uj + 1), now_uj
        return used_uj / 1e6


class CpuEnergyReader:
    """Reader of the energy of all CPU packages of this machine.

    Programs outside the process tree use energy too. So the tree gets its fraction of the CPU time in use. The
    fractions of all programs add up to 1, so nothing is counted twice.
    """

    def __init__(self, powercap: Path | None = None, stat: Path | None = None) -> None:
        self._stat = stat or STAT
        self._counters = open_counters(powercap or POWERCAP)
        self._busy_ticks = self._read_busy_ticks() if self._counters else 0
        self._fraction = 0.0
        self._tree_j = 0.0

    def read(self, cpu_s: float) -> float | None:
        """Return the joules of the process tree since the first reading; None if they cannot be read.

        The tree gets its fraction of the CPU time that was in use, over each interval.

        Args:
            cpu_s: CPU time of the process tree since the last call, in seconds.
        """
        if not self._counters:
            return None
        try:
            used_j = sum(counter.advance() for counter in self._counters)
            busy_ticks = self._read_busy_ticks()
        except (OSError, ValueError):
            self._counters = []
            return None
        busy_s, self._busy_ticks = (busy_ticks - self._busy_ticks) / TICKS_PER_S, busy_ticks
        if busy_s > 0:  # Both times have a resolution of 10 ms.
            self._fraction = min(1.0, cpu_s / busy_s)
        self._tree_j += used_j * self._fraction
        return self._tree_j

    def _read_busy_ticks(self) -> int:
        fields = [int(field) for field in self._stat.read_text().split("\n", 1)[0].split()[1:]]
        return sum(sum(fields[part]) for part in BUSY_FIELDS)


def can_read_energy() -> bool:
    """Return whether this machine shows the energy of its CPUs to this user."""
    return bool(open_counters(POWERCAP))


def open_counters(powercap: Path) -> Sequence[PackageCounter]:
    """Return the counters of all CPU packages; none if there is no RAPL, or if one of them cannot be read."""
    try:
        folders = [path for path in powercap.iterdir() if TOP_LEVEL.fullmatch(path.name)]
        # The domain ``psys`` is the whole platform, which contains the packages.
        packages = [path for path in folders if (path / "name").read_text().startswith("package")]
        return [PackageCounter(path) for path in sorted(packages)]
    except (OSError, ValueError):
        return []
