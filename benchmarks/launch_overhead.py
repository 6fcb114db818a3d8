"""Time of the second run of a sweep relative to torchrun alone.

Usage: ``python benchmarks/launch_overhead.py``.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.timing import paired_ratios, print_ratios

WORKERS = 2
OVERRIDES = (
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


def second_run_seconds(folder: Path) -> float:
    """Run a sweep of two runs, and return the seconds between their records."""
    command = [sys.executable, "-m", "distexp", "--multirun", "train.seed=1,2", *OVERRIDES]
    subprocess.run([*command, f"hydra.sweep.dir={folder}"], check=True, capture_output=True)
    first, second = ((folder / number / "record.json").stat().st_mtime for number in "01")
    return second - first


def torchrun_seconds(folder: Path, spec: Path) -> float:
    """Run the workers of a spec with torchrun, and return the time in seconds."""
    folder.mkdir()
    shutil.copy(spec, folder)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORKERS}"]
    command += [f"--master-port={free_port()}", "-m", "distexp.worker", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    started = time.perf_counter()
    subprocess.run(command, env=env, check=True, capture_output=True)
    return time.perf_counter() - started


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def main() -> None:
    """Print the ratio."""
    numbers = count()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)

        def second_run() -> float:
            return second_run_seconds(root / f"sweep{next(numbers)}")

        def torchrun() -> float:
            return torchrun_seconds(root / f"torchrun{next(numbers)}", root / "sweep0" / "1" / "spec.json")

        second_run(), torchrun()
        print_ratios("second run relative to torchrun", paired_ratios(second_run, torchrun, repeats=3))


if __name__ == "__main__":
    main()
