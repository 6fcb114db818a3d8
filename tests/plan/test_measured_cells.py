"""The targets of ``distexp plan``: its predictions in ``docs/results``, compared with the measured runs there."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan import CELLS, PLANNED_GPU, PREDICTED, read_cells
from distexp.plan.replay import Replay, replay
from distexp.plan.trace.tracing import trace_step
from distexp.system.units import MIB
from tests.helpers.gpu_records import RESULTS
from tests.helpers.runs import resolve_cell

REPEATED = ("model=gpt zero_stage=2", "model=resnet50 strategy=ddp")
RELEASE = (
    "model=gpt strategy=single precision=bf16 train.micro_batch_size=16",
    "model=gpt strategy=fsdp",
    "model=bloom_1b1 zero_stage=3",
)
"""Parts of the names of the runs that are predicted again: one for each strategy.

The other strategies are predicted in ``test_accuracy.py`` and ``test_traced_deepspeed.py``.
"""

SAME = 0.001
"""Largest difference of a repeated prediction. Reserved memory is a number of segments of at least 2 MiB."""


def cells(name: str) -> dict[str, dict[str, Any]]:
    """Return the runs of a file of ``docs/results``."""
    found: dict[str, dict[str, Any]] = json.loads((RESULTS / name).read_text())["cells"]
    return found


def errors(name: str, figure: str) -> dict[str, float]:
    """Return the relative errors of a figure of the predictions in a file, by run."""
    measured = cells("plan_measured.json")
    return {text: abs(cell[figure] / measured[text][figure] - 1) for text, cell in cells(name).items()}


def test_all_runs_were_predicted_and_measured() -> None:
    names = [set(cells(name)) for name in ("plan_measured.json", "plan_predicted.json", "plan_predicted_first.json")]
    assert names[0] == names[1] == names[2]
    assert len(names[0]) == 29


@pytest.mark.parametrize("name", ["plan_predicted_first.json", PREDICTED.name])
def test_the_peak_is_within_5_percent_and_mostly_within_2(name: str) -> None:
    found = errors(name, "peak_allocated_mib")
    assert max(found.values()) <= 0.05, found
    assert statistics.median(found.values()) <= 0.02


@pytest.mark.parametrize(
    ("figure", "limit"), [("peak_reserved_mib", 0.05), ("nvidia_smi_mib", 0.07), ("host_peak_mib", 0.10)]
)
def test_other_memory_is_within_its_target(figure: str, limit: float) -> None:
    found = errors(PREDICTED.name, figure)
    assert max(found.values()) <= limit, found


def test_reserved_memory_of_zero_1_and_2_is_exact() -> None:
    found = errors(PREDICTED.name, "peak_reserved_mib")
    exact = {text: error for text, error in found.items() if "zero_stage=1" in text or "zero_stage=2" in text}
    assert len(exact) == 6
    assert max(exact.values()) < 0.001, exact


@pytest.mark.slow
@pytest.mark.parametrize("part", [*REPEATED, *(pytest.param(part, marks=pytest.mark.release) for part in RELEASE)])
def test_a_prediction_is_the_recorded_one(part: str, tmp_path: Path) -> None:
    (cell,) = [cell for cell in read_cells(CELLS, tmp_path) if part in cell.text]
    trace = trace_step(resolve_cell(PLANNED_GPU, *cell.arguments))
    found: Replay = replay(trace.events, trace.history, trace.evaluation)
    recorded = cells(PREDICTED.name)[cell.text]
    assert found.peak_allocated / MIB == pytest.approx(recorded["peak_allocated_mib"], rel=SAME)
    assert found.peak_reserved / MIB == pytest.approx(recorded["peak_reserved_mib"], rel=SAME)
