"""Train each ``DIR/**/<group>/<cell>/spec.json`` on forked gloo workers: ``python -m tests.helpers.zoo_ranks DIR``.

All cells of a kind share one process group, until a cell fails: the next ones get a new group, because the workers of a
failed one may wait for each other. A cell leaves ``record.json`` or ``error.txt``.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from distexp.config import DatasetConfig, ModelConfig
from distexp.data.base import TaskData
from distexp.data.text import TextCollate
from distexp.distributed.process_group import join
from distexp.runs.events import Events
from distexp.runs.record import RunSpec
from distexp.system.processes import die_with_parent, end_at_once
from distexp.worker.__main__ import redirect_output
from distexp.worker.group import set_torchrun_defaults
from distexp.worker.rank import silence_libraries, train
from tests.helpers.forked_ranks import free_port, preload_all
from tests.helpers.zoo import VOCABULARY

SECONDS_PER_CELL = 240
"""A time that only a hung cell takes, also with eight workers on a busy machine."""
TOKENS = range(3, VOCABULARY)


class Uneven:
    """Random tokens of different lengths, with labels on a random end of each sample."""

    def __init__(self, samples: int, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for size in torch.randint(4, length + 1, (samples,), generator=generator).tolist():
            tokens = torch.randint(TOKENS.start, TOKENS.stop, (size,), generator=generator)
            labels = tokens.clone()
            labels[: int(torch.randint(1, size - 1, (1,), generator=generator))] = -100
            self.rows.append({"input_ids": tokens, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def load(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Load the data set: ``dataset._target_=zoo_ranks.load``."""
    assert dataset.max_length is not None
    assert dataset.train_size is not None
    assert dataset.eval_size is not None
    return TaskData(
        task="causal_lm",
        train=Uneven(dataset.train_size, dataset.max_length, seed),
        evaluation=Uneven(dataset.eval_size, dataset.max_length, seed + 1),
        collate=TextCollate(pad_id=2, length=dataset.max_length),
        num_classes=VOCABULARY,
    )


def main() -> None:
    """Train the cells of each kind one after the other."""
    root = Path(sys.argv[1])
    sys.path.insert(0, str(Path(__file__).parent))  # so that configurations can name its modules
    set_torchrun_defaults()
    cells = sorted(path.parent for path in root.rglob("spec.json"))
    preload_all(sorted({str(cell.parent) for cell in cells}))
    importlib.import_module("transformers.modeling_utils")
    kinds = {cell: kind_of(RunSpec.read(cell)) for cell in cells}
    for kind in sorted({*kinds.values()}):
        _, workers, _ = kind
        waiting = [cell for cell in cells if kinds[cell] == kind]
        while waiting:
            run_workers(waiting, workers)
            if not is_done(waiting[0]):
                last = (waiting[0].parent / "rank_0.log").read_text()[-2000:]
                (waiting[0] / "error.txt").write_text(f"the workers ended without an error, or hung:\n{last}")
            waiting = [cell for cell in waiting if not is_done(cell)]


def kind_of(spec: RunSpec) -> tuple[bool, int, int]:
    """Return what the cells of a process group have in common, so that kinds are trained in their order.

    A cell may resume the checkpoint of one with another number of workers. DeepSpeed replaces functions of torch.
    """
    config = spec.config
    stage = config.deepspeed.zero_stage if config.strategy.name == "deepspeed" else -1
    return config.train.resume is not None, spec.world_size, stage


def is_done(cell: Path) -> bool:
    return (cell / "record.json").exists() or (cell / "error.txt").exists()


def run_workers(cells: list[Path], workers: int) -> None:
    """Fork the workers of some cells, and wait until they have trained all or one has failed."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), WORLD_SIZE=str(workers), GROUP_RANK="0")
    os.environ["LOCAL_WORLD_SIZE"] = str(workers)
    sys.stdout.flush()
    pids = {fork_worker(rank, cells) for rank in range(workers)}
    done, deadline, failed_at = 0, time.monotonic() + SECONDS_PER_CELL, None
    while pids:
        while done < len(cells) and is_done(cells[done]):
            done, deadline = done + 1, time.monotonic() + SECONDS_PER_CELL
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            pids.discard(pid)
            if status:
                failed_at = failed_at or time.monotonic()
        elif time.monotonic() > deadline or (failed_at and time.monotonic() > failed_at + 5):
            for other in pids:
                os.kill(other, signal.SIGKILL)
            deadline, failed_at = float("inf"), None
        else:
            time.sleep(0.02)


def fork_worker(rank: int, cells: list[Path]) -> int:
    """Fork a worker, which trains the cells and never returns here; return its process id."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        die_with_parent(parent=parent)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        train_all(cells, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def train_all(cells: list[Path], rank: int) -> None:
    """Train the cells in one process group; write the error of the first one that fails, and end."""
    torch.set_num_threads(1)
    silence_libraries()
    redirect_output(cells[0].parent / f"rank_{rank}.log", "a")
    context = join(RunSpec.read(cells[0]), cells[0])
    for cell in cells:
        redirect_output(cell.parent / f"rank_{rank}.log", "a")
        print(f"=== {cell.name}", flush=True)
        try:
            spec = RunSpec.read(cell)
            parallel = spec.config.parallel
            degrees = {"tensor": parallel.tensor, "slices": parallel.context, "stages": parallel.pipeline}
            own = replace(context, run_dir=cell, **degrees)
            record = train(spec, own, Events(cell, enabled=rank == 0))
        except Exception as error:
            (cell / "error.txt").write_text(f"{type(error).__name__}: {error}")
            raise
        if rank == 0:
            record.write(cell)
    dist.destroy_process_group()
    end_at_once(0)


if __name__ == "__main__":
    main()
