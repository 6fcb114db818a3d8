"""The parent process of a node's workers: what it imports, and how it ends its workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.runs import REPOSITORY

PRELOADS = """
import os, sys
from tests.helpers.runs import resolve_cell
from distexp.worker.preload import own_modules, preload
variables = dict(os.environ)
preload(own_modules(resolve_cell("zero_stage=2", "cluster.device=cpu")), "cpu")
import torch
expected = (
    *("transformers.models.bloom.modeling_bloom", "deepspeed", "distexp.worker.rank"),
    *("torch._dynamo", "distexp.checkpoints.manager", "deepspeed.runtime.zero.muon.muon_optimizer"),
)
needless = ("mlflow", "torch._inductor.compile_fx")  # for DeepSpeed's autotuner and its Muon optimizer
print(
    [name for name in expected if name not in sys.modules],
    [name for name in needless if name in sys.modules],
    torch.cuda.is_initialized(),
    [name for name in ("TORCHDYNAMO_DISABLE", "PYTORCH_NVML_BASED_CUDA_CHECK")
     if os.environ.get(name) != variables.get(name)],
)
"""

PRELOADS_COMPILER = """
import os, sys, threading
from pathlib import Path
from tests.helpers.runs import resolve_cell
from distexp.worker.preload import own_modules, preload
preload(own_modules(resolve_cell("strategy=single", "train.compile=blocks", "cluster.device=cpu")), "cpu")
import torch
from torch._inductor.runtime.triton_compat import triton_key
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
print("torch._inductor.compile_fx" in sys.modules, triton_key.cache_info().currsize, threading.active_count(), children)
"""

GROUP = r"""
import os, signal, sys, time
from pathlib import Path
from distexp.worker import group

reader, writer = os.pipe()

def fail_and_crash(run_dir, *, launched):
    if os.environ["RANK"] == "0":
        os.read(reader, 1)
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.write(writer, b"1")
    signal.sigwait({signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGSEGV)

def sleep(run_dir, *, launched):
    os.write(1, b"started\n")  # One call: print writes the line and its end apart, and both workers write.
    time.sleep(60)

group.run_worker = {"crash": fail_and_crash, "sleep": sleep}[sys.argv[1]]
signal.pthread_sigmask(signal.SIG_BLOCK, group.WAITED)
workers = group.WorkerGroup(Path(sys.argv[2]), first_rank=0)
for rank in range(2):
    workers.start(rank, Path("."))
sys.exit(workers.wait())
"""


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program that can import the tests and distexp."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def test_the_libraries_are_imported_before_the_fork_and_cuda_is_not_initialized() -> None:
    output, _ = start(PRELOADS).communicate(timeout=600)
    assert output.splitlines()[-1] == "[] [] False []", "missing, needless, CUDA is initialized, variables left"


def test_a_library_that_initializes_cuda_when_it_is_imported_is_left_to_the_workers(tmp_path: Path) -> None:
    """A forked worker cannot use the CUDA state of its parent. torchao asks for the capability when it is imported."""
    (tmp_path / "starts_cuda.py").write_text("import torch\ntorch.cuda.init()\n")
    (tmp_path / "asks_capability.py").write_text(
        "import torch\nCAPABILITY = torch.cuda.get_device_capability(device=0)\n"
    )
    (tmp_path / "pynvml.py").write_text(
        "NVMLError = OSError\ndef nvmlInit(): pass\ndef nvmlShutdown(): pass\ndef nvmlDeviceGetHandleByIndex(_): pass\n"
        "def nvmlDeviceGetCudaComputeCapability(_): return [9, 0]\n"
    )
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from distexp.worker.preload import preload\npreload(['starts_cuda', 'asks_capability'], 'cuda')\n"
        "import torch\nprint('starts_cuda' in sys.modules, sys.modules['asks_capability'].CAPABILITY,\n"
        "      torch.cuda.is_initialized(), torch.cuda._lazy_init.__module__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "False (9, 0) False torch.cuda"
    assert "cannot import starts_cuda ahead of the workers" in done.stderr
    assert "CUDA must not be initialized in a process that forks workers" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("TORCH_LOGS", "+nosuchlog", "Invalid log settings: +nosuchlog"),
        ("TORCH_DISTRIBUTED_DEBUG", "LOUD", "The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL."),
    ],
)
def test_the_workers_report_why_torch_cannot_be_imported(name: str, value: str, error: str) -> None:
    """A second import of torch would raise another error, or abort."""
    program = (
        "from distexp.worker.preload import check_torch, preload\npreload([], 'cpu')\npreload([], 'cpu')\n"
        "try: check_torch()\nexcept ValueError as error: print(error)\n"
    )
    environment = {**os.environ, name: value}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
    )
    assert error in done.stdout


def test_the_compiler_is_imported_before_the_fork_if_a_run_compiles() -> None:
    """It starts no thread and no process, which a forked worker would not have."""
    output, _ = start(PRELOADS_COMPILER).communicate(timeout=600)
    assert output.split() == ["True", "1", "1"], "imported, hashes, threads, children"


def test_a_worker_that_crashes_after_the_first_failure_was_not_stopped(tmp_path: Path) -> None:
    """The first failure may be a consequence of a crash whose process ends later."""
    path = tmp_path / "workers.json"
    group = start(GROUP, "crash", str(path))
    assert group.wait(600) == 1
    ends = {end["rank"]: (end["code"], end["stopped"]) for end in json.loads(path.read_text())}
    assert ends == {0: (1, False), 1: (-11, False)}


def test_sigterm_stops_the_workers_and_ends_the_group_by_the_same_signal(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    group = start(GROUP, "sleep", str(path))
    assert group.stdout is not None
    assert [group.stdout.readline() for _ in range(2)] == ["started\n"] * 2
    group.terminate()
    assert group.wait(60) == -15
    assert [(end["code"], end["stopped"]) for end in json.loads(path.read_text())] == [(-15, True)] * 2
