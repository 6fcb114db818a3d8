"""Train every ``DIR/<cell>/spec.json`` twice in one process group: ``torchrun interrupted_runs.py DIR``.

The first training is not interrupted; its logs are kept as ``uninterrupted.jsonl`` and ``uninterrupted.json``. Then its
newest checkpoint is deleted, as if the run had died before it, and the run is resumed in the same folder.
"""

from __future__ import annotations

import gc
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from distexp.checkpoints import folder as disk
from distexp.config import ConfigError
from distexp.distributed.context import Context
from distexp.distributed.process_group import join
from distexp.runs.events import Events
from distexp.runs.record import RunSpec
from distexp.system.processes import end_at_once
from distexp.worker.rank import train
from tests.helpers.fp16_on_cpus import allow_fp16


def main() -> None:
    """Train all cells twice, except those without checkpoints."""
    torch.set_num_threads(1)
    cells = sorted(path.parent for path in Path(sys.argv[1]).glob("*/spec.json"))
    context = join(RunSpec.read(cells[0]), cells[0])
    allow_fp16(map(RunSpec.read, cells))
    for cell in cells:
        train_cell(cell, context)
        if RunSpec.read(cell).config.train.checkpoint_every is None:
            continue
        dist.barrier()
        if context.rank == 0:
            newest, *_ = disk.list_checkpoints(cell)
            shutil.rmtree(newest)
            (cell / "metrics.jsonl").rename(cell / "uninterrupted.jsonl")
            (cell / "record.json").rename(cell / "uninterrupted.json")
        dist.barrier()
        train_cell(cell, context)
    dist.destroy_process_group()
    end_at_once(0)  # as a worker does: threads of gloo may abort an orderly exit


def train_cell(cell: Path, context: Context) -> None:
    """Train a cell, or write the message if its configuration is refused."""
    is_rank_0 = context.rank == 0
    try:
        record = train(RunSpec.read(cell), replace(context, run_dir=cell), Events(cell, enabled=is_rank_0))
    except ConfigError as error:
        (cell / "refused.txt").write_text(str(error))
        return
    if is_rank_0:
        record.write(cell)
    gc.collect()


if __name__ == "__main__":
    main()
