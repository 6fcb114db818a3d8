"""Trains every spec of a folder twice in one process group: ``torchrun interrupted_runs.py DIR``.

The first time to its end; what it told is kept as ``whole.jsonl`` and ``whole.json``. Then its newest
checkpoint is taken away, as if the run had died after the one before, and it goes on in the same folder.
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
from distexp.runs.spec import RunSpec
from distexp.worker.rank import train


def main() -> None:
    torch.set_num_threads(1)
    cells = sorted(path.parent for path in Path(sys.argv[1]).glob("*/spec.json"))
    context = join(RunSpec.read(cells[0]), cells[0])
    for cell in cells:
        once(cell, context)
        if RunSpec.read(cell).config.train.checkpoint_every is None:
            continue
        dist.barrier()
        if context.rank == 0:
            newest, *_ = disk.list_checkpoints(cell)
            shutil.rmtree(newest)
            (cell / "metrics.jsonl").rename(cell / "whole.jsonl")
            (cell / "record.json").rename(cell / "whole.json")
        dist.barrier()
        once(cell, context)
    dist.destroy_process_group()


def once(cell: Path, context: Context) -> None:
    writes = context.rank == 0
    try:
        record = train(RunSpec.read(cell), replace(context, run_dir=cell), Events(cell, enabled=writes))
    except ConfigError as error:
        (cell / "refused.txt").write_text(str(error))
        return
    if writes:
        record.write(cell)
    gc.collect()


if __name__ == "__main__":
    main()
