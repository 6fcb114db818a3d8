"""Train every ``DIR/<cell>/spec.json`` in one process group: ``torchrun many_runs.py DIR``.

Starting a worker takes seconds, training a cell a fraction of a second. The calls of each library are counted, so that
tests can compare ``built`` with what was really called.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from distexp.distributed.process_group import join
from distexp.models import transforms
from distexp.runs.events import Events
from distexp.runs.record import RunSpec
from distexp.system.processes import end_at_once
from distexp.worker.rank import train
from distexp.worker.size_search import find_micro_batch
from tests.helpers.fp16_on_cpus import allow_fp16


def main() -> None:
    """Train all cells; rank 0 writes the record and the counted calls of each."""
    torch.set_num_threads(1)
    cells = sorted(path.parent for path in Path(sys.argv[1]).glob("*/spec.json"))
    # The processes of a search must be forked before this one uses gloo. Rank 0 keeps the connections, and so the
    # server of the store, until the others have read their result.
    found = {cell: find_micro_batch(RunSpec.read(cell), cell, Events(cell, enabled=False)) for cell in cells}
    specs = {cell: spec for cell, (spec, _) in found.items()}
    context = join(specs[cells[0]], cells[0])
    allow_fp16(specs.values())
    for cell in cells:
        calls: Counter[str] = Counter()
        is_rank_0 = context.rank == 0
        torch.compiler.reset()  # or a cell would use the graphs of another one
        # Inductor takes half a minute for a model. The graphs are those of the model with any backend.
        backend = "aot_eager" if cell.name.endswith("model_compiled") else "inductor"
        with count_calls(calls), patch.object(transforms, "BACKEND", backend):
            parallel = specs[cell].config.parallel
            degrees = {"tensor": parallel.tensor, "slices": parallel.context, "stages": parallel.pipeline}
            place = replace(context, run_dir=cell, **degrees)
            record = train(specs[cell], place, Events(cell, enabled=is_rank_0))
        if is_rank_0:
            record.write(cell)
            (cell / "calls.json").write_text(json.dumps(calls))
        gc.collect()
    dist.destroy_process_group()
    end_at_once(0)  # as a worker does: threads of gloo may abort an orderly exit


def count_calls(calls: Counter[str]) -> Any:
    """Return a context that counts the calls with which each library distributes a model."""
    from torch.distributed import fsdp
    from torch.nn import parallel

    patches = {"fully_shard": (fsdp, "fully_shard"), "DDP": (parallel.DistributedDataParallel, "__init__")}
    if "deepspeed" in sys.argv[1]:
        import deepspeed

        patches["deepspeed.initialize"] = (deepspeed, "initialize")
    return patch_all({name: (*where, make_counter(calls, name, *where)) for name, where in patches.items()})


def make_counter(calls: Counter[str], name: str, owner: Any, attribute: str) -> Callable[..., Any]:
    """Return a replacement for an attribute that counts its calls."""
    original = getattr(owner, attribute)

    def counted_call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return original(*args, **kwargs)

    return counted_call


def patch_all(patches: dict[str, tuple[Any, str, Callable[..., Any]]]) -> Any:
    """Return a context in which all attributes are replaced."""
    from contextlib import ExitStack

    stack = ExitStack()
    for module, attribute, replacement in patches.values():
        stack.enter_context(patch.object(module, attribute, replacement))
    return stack


if __name__ == "__main__":
    main()
