"""Groups of runs with the same global batch of 24 samples; many runs share one process group."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import make_spec, run_ranks

COMMON = (
    "train.log_every=1",
    "train.num_epochs=10",
    "train.learning_rate=0.002",  # large enough to train, too small to amplify rounding errors
    "train.warmup_steps=3",
    "cluster.device=cpu",
)
BATCH = {  # by number of workers: micro-batch size and accumulation steps that give 24 samples
    1: ("train.micro_batch_size=4", "train.gradient_accumulation_steps=6"),
    2: ("train.micro_batch_size=4", "train.gradient_accumulation_steps=3"),
    3: ("train.micro_batch_size=4", "train.gradient_accumulation_steps=2"),
    4: ("train.micro_batch_size=3", "train.gradient_accumulation_steps=2"),
    6: ("train.micro_batch_size=4", "train.gradient_accumulation_steps=1"),
}

FP16 = "precision=fp16"
"""Refused on a CPU by distexp, because it is slow there. Torch computes it."""

Cells = Mapping[str, tuple[str, ...]]
"""The overrides of each cell, by name."""

Runs = Callable[[str, int], Path]
"""Returns the folder of the cells of a library and a number of workers; runs the cells at the first call."""


def run_grid(script: Path, folder: Path, workers: int, cells: Cells) -> Path:
    """Write ``folder/<cell>/spec.json`` of each cell, and run a script with torchrun that trains all of them."""
    for name, overrides in cells.items():
        given = [override for override in overrides if override != FP16]
        spec = make_spec(f"cluster.workers_per_node={workers}", *BATCH[workers], *COMMON, *given)
        if FP16 in overrides:
            spec.config.precision.name = "fp16"
        (folder / name).mkdir(parents=True)
        spec.write(folder / name)
    run_ranks(workers, script, str(folder))
    return folder


def run_once(factory: pytest.TempPathFactory, run: Callable[[Path, str, int], object]) -> Runs:
    """Return a function that calls ``run(folder, library, workers)`` once for all tests, even if it fails."""
    done: dict[tuple[str, int], Path] = {}

    def folder_of(library: str, workers: int) -> Path:
        key = library, workers
        if key not in done:
            done[key] = factory.mktemp("cells") / library
            run(done[key], library, workers)
        return done[key]

    return folder_of


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file with one JSON object per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]
