"""Tests of CPU energy, with a fake sysfs and a fake ``/proc/stat``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distexp.measure import run_energy
from distexp.measure.memory.process_tree import ProcessTree, TreeReading
from distexp.measure.memory.sampler import Sampler
from distexp.measure.run_energy import CpuEnergyReader
from distexp.runs.memory_trace import CPU, read_memory_trace

RANGE_UJ = 262_143_328_850
TICKS = os.sysconf("SC_CLK_TCK")


class Machine:
    """A fake machine whose counters and CPU times a test sets."""

    def __init__(self, folder: Path) -> None:
        self.powercap, self.stat = folder / "powercap", folder / "stat"
        for name, title in (
            ("intel-rapl", ""), ("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core"), ("intel-rapl:0:1", "dram"),
            ("intel-rapl:1", "package-1"), ("intel-rapl:2", "psys"), ("intel-rapl-mmio:0", "package-0"),
        ):  # fmt: skip
            domain = self.powercap / name
            domain.mkdir(parents=True)
            (domain / "name").write_text(f"{title}\n")
            (domain / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
            (domain / "energy_uj").write_text("7000000\n")
        self.set_busy(0)

    def set_joules(self, package: int, joules: float) -> None:
        """Set the counter of a package."""
        (self.powercap / f"intel-rapl:{package}" / "energy_uj").write_text(f"{int(joules * 1e6)}\n")

    def set_busy(self, seconds: float) -> None:
        """Set the CPU time in use; idle and iowait grow too."""
        ticks = int(seconds * TICKS)
        self.stat.write_text(f"cpu  {ticks} 0 0 {9 * ticks} {9 * ticks} 0 0 0 0 0\ncpu0 1 1 1\n")

    def reader(self) -> CpuEnergyReader:
        """Return a reader of this machine."""
        return CpuEnergyReader(self.powercap, self.stat)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_packages_count_once_and_other_programs_get_their_part(machine: Machine) -> None:
    """Cores, DRAM, the platform and a second interface of the same package do not count."""
    reader = machine.reader()
    machine.set_joules(0, 7 + 30)
    machine.set_joules(1, 7 + 10)
    machine.set_busy(4)
    assert reader.read(cpu_s=1.0) == pytest.approx(10)
    machine.set_joules(0, 7 + 50)
    machine.set_busy(5)
    assert reader.read(cpu_s=1.0) == pytest.approx(30)


def test_the_parts_of_all_programs_are_the_whole(machine: Machine) -> None:
    """Two simulated nodes and another program share a machine."""
    readers = [machine.reader() for _ in range(3)]
    machine.set_joules(0, 7 + 100)
    machine.set_busy(10)
    found = [reader.read(cpu_s) for reader, cpu_s in zip(readers, (5.0, 3.0, 2.0), strict=True)]
    assert found == [pytest.approx(joules) for joules in (50, 30, 20)]


def test_the_counter_restarts_at_its_maximum(machine: Machine) -> None:
    machine.set_joules(0, RANGE_UJ / 1e6 - 5)
    reader = machine.reader()
    machine.set_joules(0, 3)
    machine.set_busy(1)
    assert reader.read(cpu_s=1.0) == pytest.approx(8, abs=0.001)


def test_an_idle_interval_has_the_fraction_of_the_one_before(machine: Machine) -> None:
    """CPU times have a resolution of 10 ms, so a short interval may have none."""
    reader = machine.reader()
    machine.set_joules(0, 7 + 10)
    machine.set_busy(2)
    reader.read(cpu_s=1.0)
    machine.set_joules(0, 7 + 20)
    assert reader.read(cpu_s=0.0) == pytest.approx(10)


def test_unreadable_counters_give_no_energy(machine: Machine, tmp_path: Path) -> None:
    assert CpuEnergyReader(tmp_path / "missing", machine.stat).read(1.0) is None
    (machine.powercap / "intel-rapl:1" / "energy_uj").unlink()
    assert machine.reader().read(1.0) is None, "a sum without a package would be too small"


def test_a_counter_that_fails_later_ends_the_energy(machine: Machine) -> None:
    reader = machine.reader()
    machine.set_busy(1)
    assert reader.read(1.0) is not None
    (machine.powercap / "intel-rapl:0" / "energy_uj").unlink()
    assert reader.read(1.0) is None


def test_the_sampler_writes_the_energy(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_energy, "POWERCAP", machine.powercap)
    monkeypatch.setattr(run_energy, "STAT", machine.stat)
    path = tmp_path / "memory" / "node0.csv"
    monkeypatch.setattr(ProcessTree, "read", lambda _: TreeReading(frozenset(), None, cpu_s=1.0))
    sampler = Sampler(path=path, interval_s=60)
    machine.set_joules(0, 7 + 30)
    machine.set_busy(2)
    with sampler:
        pass
    rows = [sample for sample in read_memory_trace(path).samples if sample.kind == CPU]
    assert {row.energy_j for row in rows} == {15.0}
