"""Profiled runs that never ran, and a forecast that follows a formula."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distexp.forecast.communication import Forecast, Target
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import COMMAND
from distexp.runs.step_files import Collective, Segment, StepModel, write_step_model
from distexp.system.files import write_json
from tests.helpers.records import record, write

STEP_S = 0.1
"""Median step of a profiled run."""


def profiled_record(number: int = 0, *overrides: str, step_s: float = STEP_S, **settings: Any) -> RunRecord:
    """Return the record of a profiled run of DDP with 2 workers on CPUs and micro-batches of 8 samples."""
    found = record(
        number,
        overrides=("profile=true", *overrides),
        **{"train__micro_batch_size": 8, "model__num_layers": 2, **settings},
    )
    found.metrics.step_time_s = {"p50": step_s, "p90": step_s, "max": step_s}
    return found


def write_profiled(sweep: Path, *records: RunRecord) -> Path:
    """Write runs with their step models, as a sweep of this user does. Return its directory."""
    from distexp.guard.config_files import remember_file

    write(sweep, *records)
    write_json(sweep / COMMAND, {"words": [], "directory": str(sweep), "cells": len(records)})
    remember_file(sweep / COMMAND)
    for written in records:
        world = written.built.world_size if written.built else 1
        on_gpu = written.config["cluster"]["device"] != "cpu"
        write_step_model(sweep / str(written.run.number), step_model(world, on_gpu=on_gpu))
    return sweep


def step_model(workers: int, *, on_gpu: bool = False) -> StepModel:
    """Return a step of 80 ms of computation and an all-reduce of 20 ms."""
    items = (
        Segment("forward", 0, 0.03, 0.03),
        Segment("backward", 0, 0.04, 0.04),
        Collective("all_reduce", 10**8, workers, "all", "backward", 0, 0.0, 0.02, "optimizer"),
        Segment("optimizer", 0, 0.01, 0.01),
    )
    return StepModel(on_gpu, workers, 1, 1, STEP_S, ((STEP_S,) * 3,) * workers, items)


def formula(run_dir: Path, targets: Sequence[Target], machine: object, trusted: Sequence[str] = ()) -> list[Forecast]:
    """Return a forecast of 80 ms per micro-batch, and 10 ms of communication for each worker; 10 % either way."""
    return [_formula(target) for target in targets]


def _formula(target: Target) -> Forecast:
    parts = {"compute": 0.08 * target.micro_batches, "exposed_communication": 0.01 * target.workers}
    step_s = sum(parts.values())
    beyond = f"{target.workers / 2:g} x the workers of the profiled run (2)" if target.workers > 2 else ""
    return Forecast(target, step_s, 0.9 * step_s, 1.1 * step_s, parts, beyond=beyond, limit="the all-reduce")
