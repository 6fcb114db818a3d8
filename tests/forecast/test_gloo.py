"""Trainings with gloo on one, two and four workers: the plan for several workers is what several workers do.

They prove the mechanism, and not the accuracy of the times: the workers share the cores of the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from distexp.forecast.communication import Target
from distexp.forecast.profiled_run import read_measured_step
from distexp.forecast.steps import Forecaster, forecast_steps
from distexp.hardware.facts import intra_node_link
from distexp.preflight.machine import MachineCurves, Network
from distexp.runs.step_files import BACKWARD, FORWARD, Collective, Item, Segment
from tests.helpers.runs import make_spec, run_ranks

MANY_RUNS = Path(__file__).parent.parent / "helpers" / "many_runs.py"
COMMON = (
    *("model=gpt_tiny", "dataset=synthetic", "dataset.train_size=96", "dataset.eval_size=8", "cluster.device=cpu"),
    *("train.micro_batch_size=2", "train.gradient_accumulation_steps=2", "train.num_epochs=1", "train.max_steps=6"),
    *("train.measure_after_step=1", "train.profile_steps=1"),
)
CELLS = {
    "ddp": ("strategy=ddp", "ddp.bucket_cap_mb=0.05"),
    "full_shard": ("sharding=full_shard",),
    "shard_grad_op": ("sharding=shard_grad_op",),
    "zero_2": ("zero_stage=2",),
    "zero_3": ("zero_stage=3",),
}
SIZED = ("ddp", "full_shard", "shard_grad_op")
"""Cells for which the sizes of all collectives are known with gloo."""
WORKERS = (1, 2, 4)
TRAINED = [(name, workers) for name in CELLS for workers in WORKERS if name in SIZED or workers <= 2]
SEVERAL = [(name, workers) for name, workers in TRAINED if workers > 1]
MACHINE = MachineCurves((), intra_node_link(None), Network())

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train each cell with each number of workers."""
    folder = tmp_path_factory.mktemp("gloo")
    for workers in WORKERS:
        for name in (name for name, count in TRAINED if count == workers):
            directory = folder / str(workers) / name
            directory.mkdir(parents=True)
            make_spec(*COMMON, f"cluster.workers_per_node={workers}", *CELLS[name]).write(directory)
        run_ranks(workers, MANY_RUNS, str(folder / str(workers)))
    return folder


def sent(items: Sequence[Item]) -> list[tuple[str, str, int, int | None]]:
    """Return kind, phase, micro-batch and bytes of the collectives with weights or gradients, in order."""
    large = (item for item in items if isinstance(item, Collective) and (item.bytes or 0) > 8)
    return sorted((item.kind, item.phase, item.micro_batch, item.bytes) for item in large)


def counts(items: Sequence[Item]) -> Counter[tuple[str, str, int]]:
    """Return the number of collectives by kind, phase and micro-batch. gloo executes a reduce-scatter as an all-reduce.

    The first collective of a step counts the targets. A run with one worker does not call it.
    """
    found = (item for item in items if isinstance(item, Collective) and item.phase != FORWARD)
    gathers = (item for item in items if isinstance(item, Collective) and item.kind == "all_gather")
    kinds = {"reduce_scatter": "all_reduce"}
    others = (item for item in found if item.kind != "all_gather")
    return Counter((kinds.get(item.kind, item.kind), item.phase, item.micro_batch) for item in (*gathers, *others))


def planned(runs: Path, name: str, workers: int) -> tuple[Item, ...]:
    """Return the items of several workers, planned from the run with one."""
    return Forecaster(read_measured_step(runs / "1" / name), MACHINE).items(Target(1, workers, 2, 1.0))


@pytest.mark.parametrize(("name", "workers"), SEVERAL)
def test_one_worker_plans_the_collectives_that_several_run(runs: Path, name: str, workers: int) -> None:
    several = read_measured_step(runs / str(workers) / name).model.items
    items = planned(runs, name, workers)
    assert counts(items) == counts(several)
    if name in SIZED:
        assert sent(items) == sent(several)
    assert len([item for item in items if isinstance(item, Collective) and item.phase == BACKWARD]) >= 2


@pytest.mark.parametrize(("name", "workers"), TRAINED)
def test_a_real_run_is_forecast_as_measured(runs: Path, name: str, workers: int) -> None:
    run = runs / str(workers) / name
    measured = read_measured_step(run)
    own, twice = forecast_steps(run, [Target(1, workers, 2, 1.0), Target(1, 2 * workers, 2, 1.0)], MACHINE)
    assert own.step_time_s == pytest.approx(measured.median_s, rel=1e-6)
    assert twice.parts["exposed_communication"] + twice.hidden_communication_s > 0
    assert twice.notes, "no preflight"
    host_s = sum(item.host_s for item in measured.model.items if isinstance(item, Segment))
    assert 0 < host_s <= 1.01 * measured.model.step_s  # the rest is waiting, which may be long on a busy machine


@pytest.mark.parametrize("name", CELLS)
def test_the_profile_has_the_parameters_of_the_optimizer(runs: Path, name: str) -> None:
    model = read_measured_step(runs / "2" / name).model
    elements = [size for unit in model.units for size in unit.elements]
    assert sorted(size for group in model.group_elements for size in group) == sorted(elements)
    assert {position for module in model.modules for position in module} == set(range(len(elements)))
