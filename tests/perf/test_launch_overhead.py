"""What a further run of a sweep costs beyond torchrun, which starts its worker."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest

from tests.helpers.paired_timing import assert_ratio, paired_ratios
from tests.helpers.runs import run_distexp

WORKERS = 2
WORDS = (
    "model=gpt_tiny",
    "dataset=synthetic",
    "dataset.train_size=64",
    "dataset.eval_size=8",
    "strategy=ddp",
    "train.max_steps=2",
    "cluster.device=cpu",
    f"cluster.workers_per_node={WORKERS}",
    "cluster.cpus_per_worker=1",
)


@pytest.mark.slow
def test_a_further_run_costs_little_more_than_torchrun(tmp_path: Path) -> None:
    numbers = count()

    def further_run() -> float:
        """From the record of a sweep's first run to that of its second."""
        folder = tmp_path / f"sweep{next(numbers)}"
        done = run_distexp("--multirun", "train.seed=1,2", *WORDS, f"hydra.sweep.dir={folder}", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        first, second = ((folder / number / "record.json").stat().st_mtime for number in "01")
        return second - first

    def torchrun() -> float:
        """The worker of the same spec, from a shell."""
        folder = tmp_path / f"bare{next(numbers)}"
        folder.mkdir()
        shutil.copy(tmp_path / "sweep0" / "1" / "spec.json", folder)
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORKERS}"]
        command += [f"--master-port={free_port()}", "-m", "distexp.worker", str(folder)]
        started = time.perf_counter()
        subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            check=True,
            capture_output=True,
            timeout=300,
        )
        seconds = time.perf_counter() - started
        assert (folder / "record.json").exists()
        return seconds

    further_run(), torchrun()
    assert_ratio(lambda: paired_ratios(further_run, torchrun, repeats=3), at_most=1.3)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port
