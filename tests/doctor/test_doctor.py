"""The doctor on this machine as it is, and on machines that are broken in one way each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distexp.doctor import machine, software, tools
from distexp.doctor.finding import GIB, Finding
from distexp.doctor.software import Torch
from distexp.doctor.verdict import NEEDED, Verdict
from distexp.doctor.verdict import judge as judge_findings


def script(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def examine(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "distexp.doctor", *arguments],
        capture_output=True, text=True, env={**os.environ, **environment}, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture
def path_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH; /bin is there for the scripts' own sake, by full names."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CXX", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_this_machine() -> None:
    done = examine("--json")
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
        assert (check["mend"] is None) == (check["state"] == "ok"), check


def test_a_broken_torch_is_a_finding_and_code_1(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    done = examine(PYTHONPATH=str(tmp_path), COLUMNS="200")
    assert done.returncode == 1
    assert "libcudart.so.13: cannot open" in done.stdout
    assert "This machine is not fit for training." in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("body", "said"),
    [("import os; os.abort()", "code -6"), ("import time; time.sleep(60)", "longer than 1 s")],
)
def test_a_torch_that_crashes_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str) -> None:
    (tmp_path / "torch.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    torch = software.probe_torch(timeout_s=1 if "sleep" in body else 60)
    assert torch.error is not None
    assert said in torch.error
    assert software.check_torch(torch, 0).state == "missing"


def test_libraries_that_are_broken_are_told_from_those_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torchvision", "transformers", "datasets"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "transformers.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "deepspeed.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = {finding.name: finding for finding in software.check_libraries(60)}
    assert found["torchvision"].state == found["datasets"].state == "ok"
    assert "operator torchvision::nms" in found["transformers"].found
    assert found["deepspeed"].state == "warning"


@pytest.mark.parametrize(
    ("torch", "gpus", "state", "said"),
    [
        (Torch("2.13.0", "13.0", False, "2.29"), 0, "ok", "CUDA cannot be used"),
        (Torch("2.13.0", "13.0", False, "2.29"), 2, "warning", "driver"),
        (Torch("2.13.0", None), 2, "warning", "build with CUDA"),
        (Torch("2.13.0", "13.0", True, "2.29", ("sm_75", "sm_90"), ((7, 0),)), 1, "warning", "sm_70"),
        (Torch("2.13.0", "13.0", True, "2.29", ("sm_80", "sm_90"), ((8, 6), (9, 0))), 2, "ok", "CUDA works"),
        (Torch("2.13.0", "13.0", True, "2.29", ("sm_80", "compute_90"), ((12, 0),)), 1, "ok", "CUDA works"),
    ],
)
def test_torch_and_the_gpus_must_fit(torch: Torch, gpus: int, state: str, said: str) -> None:
    finding = software.check_torch(torch, gpus)
    assert finding.state == state
    assert said in f"{finding.found} {finding.mend}"


def test_slurm_is_absent_hangs_fails_or_answers(path_folder: Path) -> None:
    assert tools.check_slurm().state == "missing"
    for name in ("sbatch", "squeue"):
        script(path_folder, name, "exit 0")
    script(path_folder, "sinfo", "/bin/sleep 60 & /bin/sleep 60")
    start = time.monotonic()
    hanging = tools.check_slurm(timeout_s=1)
    assert time.monotonic() - start < 5
    assert (hanging.state, hanging.found) == ("warning", "sinfo did not answer within 1 s")
    script(path_folder, "sinfo", "echo 'sinfo: error: Unable to contact slurm controller' >&2; exit 1")
    assert "Unable to contact slurm controller" in tools.check_slurm().found
    script(path_folder, "sinfo", '[ "$1" = --version ] && echo slurm 24.05.2 && exit; echo "batch* 4 idle gpu:8"')
    answers = tools.check_slurm()
    assert (answers.state, answers.found) == ("ok", "slurm 24.05.2, partitions batch*")


def test_compiler_ninja_and_toolkit(path_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch("2.13.0", "13.0", True, "2.29")
    assert tools.check_compiler().state == "missing"
    assert tools.check_ninja().state in ("missing", "warning")  # a warning where it lies beside this Python
    assert "CUDA_HOME" in (tools.check_toolkit(torch, 1).mend or "")
    script(path_folder, "g++", "echo 'g++: fatal error: cc1plus' >&2; exit 1")
    assert tools.check_compiler().state == "warning"
    script(path_folder, "g++", "echo g++ 12.2.0")
    assert tools.check_compiler().found == "g++ 12.2.0"
    script(path_folder, "ninja", "echo 1.11.1")
    assert tools.check_ninja().state == "ok"
    script(path_folder, "nvcc", "echo 'Cuda compilation tools, release 12.8, V12.8.93'")
    other = tools.check_toolkit(torch, 1)
    assert (other.state, "CUDA 13.0" in (other.mend or "")) == ("warning", True)
    script(path_folder, "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    assert tools.check_toolkit(torch, 1).state == "ok"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a")
    letter = tools.check_toolkit(torch, 1)
    assert letter.state == "warning"
    assert 'TORCH_CUDA_ARCH_LIST="8.0;9.0"' in (letter.mend or "")


def test_caches_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("DISTEXP_CACHE", str(blocked / "cache"))
    monkeypatch.setenv("HF_HOME", str(blocked / "hub"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    own, hub = machine.check_own_cache(), machine.check_hub_cache()
    assert own.state == "missing"
    assert "DISTEXP_CACHE" in (own.mend or "")
    assert hub.state == "warning"
    assert "HF_HOME" in (hub.mend or "")


def test_the_hub_cache_is_measured_and_offline_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for flag in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(flag, raising=False)
    (tmp_path / "hub").mkdir()
    with (tmp_path / "hub" / "blob").open("wb") as file:
        file.truncate(3 * GIB)
    assert machine.check_hub_cache().found.endswith("3.0 GiB")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "unset HF_HUB_OFFLINE" in (machine.check_hub_cache().mend or "")
    assert not (tmp_path / "absent").exists()
    assert machine.write_error(tmp_path / "absent" / "deeper") is None
    assert not (tmp_path / "absent").exists()  # looking leaves nothing behind


def test_a_read_only_folder_is_no_place_for_runs() -> None:
    assert machine.check_disk(Path("/proc")).state == "missing"


def test_no_shared_memory() -> None:
    assert machine.check_shm("/no/such/device").state == "missing"


def test_the_verdict_follows_the_findings() -> None:
    collectives = ("gloo all-reduce", "nccl all-reduce", "loopback port")
    names = (*NEEDED, *collectives, "deepspeed", "GPUs", "Slurm", "C++ compiler", "ninja")

    def judge(torch: Torch, **changed: str) -> Verdict:
        states = {name: changed.get(name.split()[0], "ok") for name in names}
        return judge_findings([Finding(name, state, "") for name, state in states.items()], torch)

    two = Torch("2", "13.0", True, "2.29", ("sm_90",), ((9, 0), (9, 0)))
    full = judge(two)
    assert full.strategies == ["single", "ddp", "fsdp", "deepspeed"]
    assert (full.device, full.precisions, full.clusters) == (
        "cuda",
        ["fp32", "bf16", "fp16"],
        ["local", "slurm"],
    )
    assert full.not_possible == []
    assert judge(two, nccl="missing").strategies == ["single"]
    assert "deepspeed" not in judge(two, deepspeed="warning").strategies
    assert judge(two, distexp="missing").fit is False
    assert any("cpu_optimizer=torch" in reason for reason in judge(two, ninja="missing").not_possible)
    cpu = judge(Torch("2", "13.0"), GPUs="missing")
    assert (cpu.device, cpu.precisions, cpu.offload) == ("cpu", ["fp32", "bf16"], ["false", "true"])
    hidden = judge(Torch("2", "12.0"), GPUs="ok")
    assert any("cluster.device=cpu" in reason for reason in hidden.not_possible)
    foreign = Torch("2", "13.0", False, "2.29", ("sm_90",), ((7, 0), (7, 0)), gpu_error="no kernel image")
    assert judge(foreign, nccl="missing").strategies == full.strategies  # on the CPU, through gloo
    old = judge(Torch("2", "12.0", True, "2.20", ("sm_70",), ((7, 0),)))
    assert any("bf16" in reason for reason in old.not_possible)


def test_python_here_is_fit() -> None:
    assert software.check_python().state == "ok"
