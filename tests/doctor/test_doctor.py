"""Tests of the doctor on this machine, and on machines with one problem each."""

from __future__ import annotations

import json
import os
import py_compile
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from distexp.config.keys import options_of
from distexp.doctor import machine, software
from distexp.doctor.__main__ import REQUIRED_CHECKS, Verdict, make_verdict, shown_progress, strategy_requirements
from distexp.doctor.machine import CheckResult
from distexp.doctor.software import TorchInfo
from distexp.system.units import GIB
from tests.helpers.runs import REPOSITORY, TIMEOUT_S


def write_script(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def run_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "distexp.doctor", *arguments],
        capture_output=True, text=True, env={**os.environ, **environment}, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


@pytest.fixture
def path_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder on PATH; the scripts in it call other programs by their full paths."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CXX", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.mark.slow
def test_this_machine_can_train() -> None:
    done = run_doctor("--json")
    content = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert content["fit"] is True
    assert {"single", "ddp", "fsdp"} <= set(content["strategies"])
    assert {"fp32", "bf16"} <= set(content["precisions"])
    states = {check["name"]: check["state"] for check in content["checks"]}
    assert states["torch"] in ("ok", "warning")
    assert states["gloo all-reduce"] == "ok"
    assert states["loopback port"] == "ok"
    for check in content["checks"]:
        assert (check["hint"] is None) == (check["state"] == "ok"), check


def test_the_doctor_shows_what_it_checks(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress() as report:
        report("torch")
    assert capsys.readouterr() == ("", "checking torch\n"), "the table can be redirected"


def test_broken_torch_is_reported_with_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    done = run_doctor(PYTHONPATH=str(tmp_path), COLUMNS="200")
    assert done.returncode == 1
    assert "libcudart.so.13: cannot open" in done.stdout
    assert "This machine cannot train." in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("body", "message"),
    [("import os; os.abort()", "exit code -6"), ("import time; time.sleep(60)", "longer than 1 s")],
)
def test_torch_that_crashes_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str) -> None:
    (tmp_path / "torch.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    torch = software.probe_torch(timeout_s=1 if "sleep" in body else TIMEOUT_S)
    assert torch.import_error is not None
    assert message in torch.import_error
    assert software.check_torch(torch, 0).state == "missing"


def test_broken_libraries_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchvision", "transformers", "datasets"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "transformers.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "deepspeed.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = {result.name: result for result in software.check_libraries(TIMEOUT_S)}
    assert found["torchvision"].state == found["datasets"].state == "ok"
    assert "operator torchvision::nms" in found["transformers"].found
    assert found["deepspeed"].state == "warning"


@pytest.mark.parametrize(
    ("torch", "gpus", "state", "message"),
    [
        (TorchInfo("2.13.0", "13.0", False, "2.29"), 0, "ok", "CUDA cannot be used"),
        (TorchInfo("2.13.0", "13.0", False, "2.29"), 2, "warning", "driver"),
        (TorchInfo("2.13.0", None), 2, "warning", "build with CUDA"),
        (TorchInfo("2.13.0", "13.0", True, "2.29", ("sm_75", "sm_90"), ((7, 0),)), 1, "warning", "sm_70"),
        (TorchInfo("2.13.0", "13.0", True, "2.29", ("sm_80", "sm_90"), ((8, 6), (9, 0))), 2, "ok", "CUDA works"),
        (TorchInfo("2.13.0", "13.0", True, "2.29", ("sm_80", "compute_90"), ((12, 0),)), 1, "ok", "CUDA works"),
    ],
)
def test_torch_must_support_the_gpus(torch: TorchInfo, gpus: int, state: str, message: str) -> None:
    result = software.check_torch(torch, gpus)
    assert result.state == state
    assert message in f"{result.found} {result.hint}"


def test_slurm_missing_hanging_failing_or_working(path_folder: Path) -> None:
    assert software.check_slurm().state == "missing"
    for name in ("sbatch", "squeue"):
        write_script(path_folder, name, "exit 0")
    ended, pid = path_folder / "ended", path_folder / "pid"
    write_script(path_folder, "sinfo", f"/bin/sleep 600 & echo $! > {pid}; /bin/sleep 600; : > {ended}")
    hanging = software.check_slurm(timeout_s=1)
    assert not ended.exists(), "it did not wait for sinfo"
    with suppress(FileNotFoundError, ProcessLookupError, ValueError):  # A busy machine may not have started it yet.
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert (hanging.state, hanging.found) == ("warning", "sinfo did not respond within 1 s")
    write_script(path_folder, "sinfo", "echo 'sinfo: error: Unable to contact slurm controller' >&2; exit 1")
    assert "Unable to contact slurm controller" in software.check_slurm().found
    write_script(path_folder, "sinfo", '[ "$1" = --version ] && echo slurm 24.05.2 && exit; echo "batch* 4 idle gpu:8"')
    working = software.check_slurm()
    assert (working.state, working.found) == ("ok", "slurm 24.05.2, partitions batch*")


def test_compiler_ninja_and_toolkit(path_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = TorchInfo("2.13.0", "13.0", True, "2.29")
    assert software.check_compiler().state == "missing"
    assert software.check_ninja().state in ("missing", "warning")  # a warning if it is installed next to this Python
    assert "CUDA_HOME" in (software.check_toolkit(torch, 1).hint or "")
    write_script(path_folder, "g++", "echo 'g++: fatal error: cc1plus' >&2; exit 1")
    assert software.check_compiler().state == "warning"
    write_script(path_folder, "g++", "echo g++ 12.2.0")
    assert software.check_compiler().found == "g++ 12.2.0"
    write_script(path_folder, "ninja", "echo 1.11.1")
    assert software.check_ninja().state == "ok"
    write_script(path_folder, "nvcc", "echo 'Cuda compilation tools, release 12.8, V12.8.93'")
    other = software.check_toolkit(torch, 1)
    assert (other.state, "CUDA 13.0" in (other.hint or "")) == ("warning", True)
    write_script(path_folder, "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    assert software.check_toolkit(torch, 1).state == "ok"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a")
    suffix = software.check_toolkit(torch, 1)
    assert suffix.state == "warning"
    assert 'TORCH_CUDA_ARCH_LIST="8.0;9.0"' in (suffix.hint or "")


def test_caches_that_are_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("DISTEXP_CACHE", str(blocked / "cache"))
    monkeypatch.setenv("HF_HOME", str(blocked / "hub"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    cache, hub = machine.check_distexp_cache(), machine.check_hub_cache()
    assert cache.state == "missing"
    assert "DISTEXP_CACHE" in (cache.hint or "")
    assert hub.state == "warning"
    assert "HF_HOME" in (hub.hint or "")


def test_hub_cache_reports_size_and_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for flag in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(flag, raising=False)
    (tmp_path / "hub").mkdir()
    with (tmp_path / "hub" / "blob").open("wb") as file:
        file.truncate(3 * GIB)
    assert machine.check_hub_cache().found.endswith("3.0 GiB")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "unset HF_HUB_OFFLINE" in (machine.check_hub_cache().hint or "")
    assert not (tmp_path / "absent").exists()
    assert machine.write_error(tmp_path / "absent" / "deeper") is None
    assert not (tmp_path / "absent").exists()  # the check creates no folders


def test_folder_that_is_not_writable() -> None:
    assert machine.check_disk(Path("/proc")).state == "missing"


def test_missing_shared_memory() -> None:
    assert machine.check_shm("/no/such/device").state == "missing"


COLLECTIVES = ("gloo all-reduce", "nccl all-reduce", "loopback port")
NAMES = (*REQUIRED_CHECKS, *COLLECTIVES, "deepspeed", "GPUs", "Slurm", "C++ compiler", "ninja")
TWO_GPUS = TorchInfo("2", "13.0", True, "2.29", ("sm_90",), ((9, 0), (9, 0)))
STRATEGIES = ["single", "ddp", "fsdp", "deepspeed"]


def verdict(torch: TorchInfo, **states: str) -> Verdict:
    """Return the verdict if all checks are ok, but for those whose first word is given with a state."""
    return make_verdict([CheckResult(name, states.get(name.split()[0], "ok"), "") for name in NAMES], torch)


def test_verdict_of_a_machine_where_everything_works() -> None:
    found = verdict(TWO_GPUS)
    assert (found.fit, found.device, found.not_possible) == (True, "cuda", [])
    assert found.strategies == STRATEGIES
    assert set(found.precisions) == {"fp32", "bf16", "fp16", "float8"}
    assert set(found.offload) == {"false", "true", "pinned"}
    assert found.clusters == ["local", "slurm"]


def test_verdict_without_communication_or_a_library() -> None:
    alone = verdict(TWO_GPUS, nccl="missing")
    assert alone.strategies == ["single"]
    assert alone.not_possible == [
        "strategy=ddp, fsdp, deepspeed: workers cannot communicate (see loopback port, nccl all-reduce above)"
    ]
    broken = verdict(TWO_GPUS, deepspeed="warning")
    assert broken.strategies == STRATEGIES[:-1]
    assert broken.not_possible == ["strategy=deepspeed: deepspeed does not work (see deepspeed above)"]
    assert verdict(TWO_GPUS, distexp="missing").fit is False
    assert any("cpu_optimizer=torch" in reason for reason in verdict(TWO_GPUS, ninja="missing").not_possible)


def test_verdict_without_a_usable_gpu() -> None:
    cpu = verdict(TorchInfo("2", "13.0"), GPUs="missing")
    assert cpu.device == "cpu"
    assert set(cpu.precisions) == {"fp32", "bf16"}
    assert set(cpu.offload) == {"false", "true"}
    hidden = verdict(TorchInfo("2", "12.0"), GPUs="ok")
    assert any("cluster.device=cpu" in reason for reason in hidden.not_possible)
    unsupported = TorchInfo("2", "13.0", False, "2.29", ("sm_90",), ((7, 0), (7, 0)), gpu_error="no kernel image")
    assert verdict(unsupported, nccl="missing").strategies == STRATEGIES  # on the CPU, with gloo
    old = verdict(TorchInfo("2", "12.0", True, "2.20", ("sm_70",), ((7, 0),)))
    assert any("bf16" in reason for reason in old.not_possible)


def test_verdict_covers_every_strategy_of_the_config_group() -> None:
    assert sorted(strategy_requirements()) == options_of("strategy")


def test_this_python_is_supported() -> None:
    assert software.check_python().state == "ok"


def test_a_start_that_compiles_all_files_again_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in software.SLOW_IMPORTS:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    command = "from distexp.doctor.software import check_bytecode as c; r = c(); print(r.state, r.hint)"

    def check(**environment: str) -> str:
        paths = os.pathsep.join((str(tmp_path), str(REPOSITORY)))
        variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": paths, **environment}
        done = subprocess.run(
            [sys.executable, "-c", command], check=True, env=variables, capture_output=True, text=True
        )
        return done.stdout

    hint = "unset PYTHONDONTWRITEBYTECODE: else each start compiles thousands of files again"
    assert check(PYTHONDONTWRITEBYTECODE="1") == f"warning {hint}\n"
    assert check() == "ok None\n"
    for package in software.SLOW_IMPORTS:
        py_compile.compile(str(tmp_path / package / "__init__.py"))
    assert check(PYTHONDONTWRITEBYTECODE="1") == "ok None\n"
