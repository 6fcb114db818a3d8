"""Trainings with gloo on one and two workers: the plan for several workers is what several workers do.

They prove the mechanism, and not the accuracy of the times: the workers share the cores of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from distexp.forecast.links import Network, intra_node_link
from distexp.forecast.machine import MachineCurves
from distexp.forecast.measured_step import read_measured_step
from distexp.forecast.steps import Forecaster, forecast_steps
from distexp.forecast.target import Target
from distexp.runs.step_model import BACKWARD, Collective, Item, Segment
from tests.helpers.runs import make_spec, torchrun

MANY_RUNS = Path(__file__).parent.parent / "helpers" / "many_runs.py"
COMMON = (
    *("model=gpt_tiny", "dataset=synthetic", "dataset.train_size=48", "dataset.eval_size=8", "cluster.device=cpu"),
    *("train.micro_batch_size=2", "train.gradient_accumulation_steps=2", "train.num_epochs=1", "train.max_steps=6"),
    *("train.measure_after_step=1", "train.profile_steps=1"),
)
CELLS = {
    "ddp": ("strategy=ddp", "ddp.bucket_cap_mb=0.05"),
    "full_shard": ("sharding=full_shard",),
    "shard_grad_op": ("sharding=shard_grad_op",),
}
WORKERS = (1, 2)
MACHINE = MachineCurves((), intra_node_link(None), Network())

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train each cell with each number of workers."""
    folder = tmp_path_factory.mktemp("gloo")
    for workers in WORKERS:
        for name, overrides in CELLS.items():
            directory = folder / str(workers) / name
            directory.mkdir(parents=True)
            make_spec(*COMMON, f"cluster.workers_per_node={workers}", *overrides).write(directory)
        torchrun(workers, MANY_RUNS, str(folder / str(workers)))
    return folder


def sent(items: Sequence[Item]) -> list[tuple[str, int, int | None]]:
    """Return kind, micro-batch and bytes of the collectives with weights or gradients, in order."""
    large = (item for item in items if isinstance(item, Collective) and (item.bytes or 0) > 8)
    return sorted((item.kind, item.micro_batch, item.bytes) for item in large)


@pytest.mark.parametrize("name", CELLS)
def test_one_worker_plans_the_collectives_that_several_run(runs: Path, name: str) -> None:
    workers = WORKERS[-1]
    one, several = (read_measured_step(runs / str(count) / name) for count in (1, workers))
    planned = Forecaster(one, one.settings, MACHINE).items(Target(1, workers, 2, 1.0))
    assert sent(planned) == sent(several.model.items)
    backward = [item for item in planned if isinstance(item, Collective) and item.phase == BACKWARD]
    assert len(backward) > 2


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("workers", WORKERS)
def test_a_real_run_is_forecast_as_measured(runs: Path, name: str, workers: int) -> None:
    run = runs / str(workers) / name
    measured = read_measured_step(run)
    own, twice = forecast_steps(run, [Target(1, workers, 2, 1.0), Target(1, 2 * workers, 2, 1.0)], MACHINE)
    assert own.step_time_s == pytest.approx(measured.median_s, rel=1e-6)
    assert twice.parts["exposed_communication"] + twice.hidden_communication_s > 0
    host_s = sum(item.host_s for item in measured.model.items if isinstance(item, Segment))
    assert 0 < host_s <= 1.01 * measured.model.step_s  # the rest is waiting, which may be long on a busy machine
