"""Environment variables of a record: those that the user set, and no default of torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distexp.system.environment_variables import TORCHRUN_DEFAULTS, select_arithmetic, select_variables
from tests.helpers.runs import REPOSITORY

WORKER = """
import json, sys
from distexp.system.environment_variables import captured_environment
before = captured_environment()
import torch.distributed, deepspeed
assert captured_environment() == before
json.dump(before, open(sys.argv[1], "w"))
"""


@pytest.mark.parametrize(
    "chosen",
    [
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_ALGO": "Ring"},
        pytest.param({}, marks=pytest.mark.release),
        pytest.param({"NCCL_SOCKET_IFNAME": "lo"}, marks=pytest.mark.release),
    ],
)
def test_a_worker_of_torchrun_records_the_users_variables_only(chosen: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    inherited = {name: value for name, value in os.environ.items() if not select_variables({name: value})}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "worker.py", "found.json"],
        cwd=tmp_path,
        env={**inherited, **chosen, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "found.json").read_text()) == chosen


def test_only_the_default_value_of_torchrun_is_left_out() -> None:
    assert select_variables(TORCHRUN_DEFAULTS) == {}
    changed = dict.fromkeys(TORCHRUN_DEFAULTS, "other")
    assert select_variables({**changed, "HOME": "/root"}) == changed


def test_arithmetic_is_changed_by_some_variables_of_the_libraries() -> None:
    changing = {"ATEN_CPU_CAPABILITY": "avx2", "NVIDIA_TF32_OVERRIDE": "0", "ONEDNN_DEFAULT_FPMATH_MODE": "bf16"}
    others = {"KMP_AFFINITY": "disabled", "MKL_NUM_THREADS": "2", "CUDNN_LOGLEVEL_DBG": "1", "NCCL_ALGO": "Ring"}
    assert select_arithmetic({**others, **changing}) == [f"{name}={value}" for name, value in changing.items()]


def test_of_openmp_the_wait_policy_is_recorded() -> None:
    """The number of threads is a default of torchrun."""
    variables = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    assert select_variables(variables) == {"OMP_WAIT_POLICY": "PASSIVE"}
