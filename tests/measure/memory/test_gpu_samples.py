"""Tests of GPU samples, with a fake NVML that reports some values and refuses others, and with a real GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from distexp.measure.memory import sampler as sampler_module
from distexp.measure.memory.sampler import Sampler, summarize
from distexp.runs.memory_trace import MemorySample
from distexp.system.cgroups import visible_gpus
from distexp.system.units import MIB
from tests.measure.memory.sampled_process import INTERVAL_S, descendants, read_samples, started, wait_until


class NVMLError(Exception):
    pass


def refuse(*_: Any, **__: Any) -> Any:
    raise NVMLError("Not Supported")


@pytest.fixture
def job() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with one child, the worker of a job."""
    with started("import time; print(flush=True); time.sleep(600)") as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        yield shell


@pytest.fixture
def worker(job: subprocess.Popen[bytes]) -> int:
    """Return the pid of the worker."""
    (process,) = descendants(job)
    return process.pid


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sampler_module, "SAMPLING_SHARE", float("inf"))  # no warning about the cost on a slow machine
    module: Any = ModuleType("pynvml")
    module.NVMLError, module.nvmlMemory_v2 = NVMLError, 0x02000028
    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetMemoryInfo = lambda handle, version=None: SimpleNamespace(
        used=(1000 * (handle + 1) + (0 if version else 600)) * MIB, total=143771 * MIB
    )
    module.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=87, memory=40)
    module.nvmlDeviceGetPowerUsage = lambda handle: 412_345
    module.nvmlDeviceGetTotalEnergyConsumption = refuse
    module.nvmlDeviceGetComputeRunningProcesses = refuse
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_a_gpu_that_is_shared_with_mig_has_no_energy(
    tmp_path: Path, nvml: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Power and energy would be those of all users of the GPU."""
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: 5_000
    nvml.nvmlDeviceGetMigMode = lambda handle: [handle == 1, handle == 1]
    whole, part = gpu_rows(tmp_path, [0, 1])[:2]
    assert (whole.power_w, whole.energy_j) == (412.345, 5.0)
    assert (part.power_w, part.energy_j) == (None, None)
    assert part.used_mib is not None
    assert "energy" not in capsys.readouterr().err


def process(pid: int, mib: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=None if mib is None else mib * MIB)


def gpu_rows(directory: Path, indices: list[int], job: subprocess.Popen[bytes] | None = None) -> list[MemorySample]:
    """Sample GPUs at least twice, next to the processes of a job or of this test; return the samples."""
    path = directory / "memory/node0.csv"

    def rows() -> list[MemorySample]:
        return [sample for sample in read_samples(path) if sample.kind == "gpu"]

    with Sampler(path=path, gpu_indices=indices, interval_s=INTERVAL_S, root_pid=job.pid if job else None):
        wait_until(lambda: len(rows()) >= 2 * len(indices), "two samples of each GPU")
    return rows()


@pytest.mark.usefixtures("nvml")
def test_rows_of_two_gpus(tmp_path: Path, job: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    rows = gpu_rows(tmp_path, [2, 3], job)
    assert [row.index for row in rows[:4]] == [2, 3, 2, 3]
    first = rows[0]
    assert (first.used_mib, first.total_mib, first.source) == (3000.0, 143771.0, "nvml")
    assert (first.utilization_pct, first.power_w) == (87.0, 412.345)
    assert first.job_mib is None
    assert first.energy_j is None
    refused = capsys.readouterr().err.splitlines()
    assert len(refused) == 4  # energy and processes, of each GPU, once
    summary = summarize([tmp_path / "memory/node0.csv"])
    assert summary.memory["gpu"][1] == {
        "node": 0,
        "index": 3,
        "peak_mib": 4000.0,
        "average_mib": 4000.0,
        "mode_mib": 4000,
        "training_average_mib": None,
        "training_mode_mib": None,
        "job_peak_mib": None,
        "phases": {},
        "source": "nvml",
    }
    assert summary.utilization["gpu"][0] == {"node": 0, "index": 2, "average_pct": 87.0, "phases": {}}


def test_memory_of_this_job(tmp_path: Path, nvml: Any, job: subprocess.Popen[bytes], worker: int) -> None:
    other = os.getpid()
    listed = {0: [process(worker, 700), process(other, 200)], 1: [process(other, 900)]}
    nvml.nvmlDeviceGetComputeRunningProcesses = listed.__getitem__
    rows = gpu_rows(tmp_path, [0, 1], job)
    assert [row.job_mib for row in rows[:2]] == [700.0, 0.0]


@pytest.mark.parametrize(
    "listed",
    [[], [(1_999_999_999, 700)], [("worker", None)]],
    ids=["nothing listed", "pids of another namespace", "memory not reported"],
)
def test_unknown_memory_of_this_job_is_empty(
    tmp_path: Path, nvml: Any, job: subprocess.Popen[bytes], worker: int, listed: list[Any]
) -> None:
    found = [process(worker if pid == "worker" else pid, mib) for pid, mib in listed]
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: found
    assert {row.job_mib for row in gpu_rows(tmp_path, [0], job)} == {None}


def test_old_nvml_counts_the_reserve_and_warns(
    tmp_path: Path, nvml: Any, job: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    def memory(handle: int, version: int | None = None) -> SimpleNamespace:
        if version is not None:
            raise NVMLError("Function Not Found")
        return SimpleNamespace(used=1600 * MIB, total=143771 * MIB)

    nvml.nvmlDeviceGetMemoryInfo = memory
    rows = gpu_rows(tmp_path, [0], job)
    assert (rows[0].used_mib, rows[0].source) == (1600.0, "nvml_with_reserve")
    assert "memory without the driver's reserve of GPU 0" in capsys.readouterr().err


def test_missing_nvml_leaves_empty_rows(tmp_path: Path, nvml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    nvml.nvmlInit = refuse
    rows = gpu_rows(tmp_path, [0])
    assert {row.used_mib for row in rows} == {None}
    assert capsys.readouterr().err.count("NVML is not available") == 1
    (entry,) = summarize([tmp_path / "memory/node0.csv"]).memory["gpu"]
    assert entry["peak_mib"] is None
    assert entry["mode_mib"] is None


@pytest.mark.gpu
def test_real_gpu(tmp_path: Path) -> None:
    gpu = visible_gpus()[0]
    allocate = "import sys, torch; x = torch.ones(2**28, device='cuda'); print(flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", allocate], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        row = gpu_rows(tmp_path, [gpu.index])[-1]
    finally:
        process.kill()
        process.communicate()
    assert row.used_mib is not None
    assert row.used_mib > 1024, "the tensor has 1 GiB"
    assert row.total_mib == pytest.approx(gpu.total_mib, rel=0.05)
    assert row.source.startswith("nvml")
