"""Grids of runs: every cell trains the same global batch of 24 samples, many of them in one process group."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import make_spec, torchrun

COMMON = (
    "train.log_every=1",
    "train.num_epochs=10",
    "train.learning_rate=0.002",  # large enough to train, too small to amplify rounding
    "train.warmup_steps=3",
    "cluster.device=cpu",
)
BATCH = {  # workers: micro-batch and accumulation, 24 samples together
    1: ("train.micro_batch_size=4", "train.gradient_accumulation_steps=6"),
    2: ("train.micro_batch_size=4", "train.gradient_accumulation_steps=3"),
    3: ("train.micro_batch_size=4", "train.gradient_accumulation_steps=2"),
    4: ("train.micro_batch_size=3", "train.gradient_accumulation_steps=2"),
    6: ("train.micro_batch_size=4", "train.gradient_accumulation_steps=1"),
}

Cells = Mapping[str, tuple[str, ...]]
"""The command line of each cell, by its name."""

Runs = Callable[[str, int], Path]
"""The folder of the cells of a library on a number of workers, which are run when it is first asked for."""


def run_grid(script: Path, folder: Path, workers: int, cells: Cells) -> Path:
    """Runs cells by a script that trains every ``folder/<cell>/spec.json``."""
    for name, overrides in cells.items():
        spec = make_spec(f"cluster.workers_per_node={workers}", *BATCH[workers], *COMMON, *overrides)
        (folder / name).mkdir(parents=True)
        spec.write(folder / name)
    torchrun(workers, script, str(folder))
    return folder


def once_each(factory: pytest.TempPathFactory, run: Callable[[Path, str, int], object]) -> Runs:
    """``run(folder, library, workers)``, once for all tests; one that fails is not tried again for each of them."""
    done: dict[tuple[str, int], Path] = {}

    def folder_of(library: str, workers: int) -> Path:
        key = library, workers
        if key not in done:
            done[key] = factory.mktemp("cells") / library
            run(done[key], library, workers)
        return done[key]

    return folder_of


def lines(path: Path) -> list[dict[str, Any]]:
    """What stands in a file of one JSON object a line."""
    return [json.loads(line) for line in path.read_text().splitlines()]
