"""Trainings with gloo on one, two and four workers: the plan for several workers is what several workers do.

They prove the mechanism, and not the accuracy of the times: the workers share the cores of the machine.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from distexp.config import ConfigError
from distexp.forecast.communication import Target, group_layout
from distexp.forecast.profiled_run import read_measured_step
from distexp.forecast.steps import Forecaster, forecast_steps
from distexp.hardware.facts import intra_node_link
from distexp.preflight.machine import MachineCurves, Network
from distexp.runs.step_files import (
    BACKWARD,
    COPIES,
    FORWARD,
    GROUP,
    OPTIMIZER,
    Collective,
    Item,
    Segment,
    read_step_model,
)
from distexp.strategies.communication import is_gradient_reduction
from tests.helpers.runs import make_spec, run_ranks
from tests.helpers.zoo import hugging_face

MANY_RUNS = Path(__file__).parent.parent / "helpers" / "many_runs.py"
COMMON = (
    # The median of three profiled steps: a process that waits for a core in one would divide its passes wrongly.
    *("model=gpt_tiny", "dataset=synthetic", "dataset.train_size=128", "dataset.eval_size=8", "cluster.device=cpu"),
    *("train.micro_batch_size=2", "train.gradient_accumulation_steps=2", "train.num_epochs=1", "train.max_steps=8"),
    *("train.measure_after_step=1", "train.profile_steps=3"),
)
CELLS = {
    "ddp": ("strategy=ddp", "ddp.bucket_cap_mb=0.05"),
    "full_shard": ("sharding=full_shard",),
    "shard_grad_op": ("sharding=shard_grad_op",),
    "zero_2": ("zero_stage=2",),
    "zero_3": ("zero_stage=3",),
}
SHARED = {
    "ddp_tensor": ("strategy=ddp", "parallel.tensor=2"),
    "full_shard_tensor": ("sharding=full_shard", "parallel.tensor=2"),
    "ddp_context": ("strategy=ddp", "parallel.context=2"),
    "full_shard_context": ("sharding=full_shard", "parallel.context=2"),
    "ddp_expert": ("strategy=ddp", "parallel.expert=2", "model=MIXTURE"),
    "full_shard_expert": ("sharding=full_shard", "parallel.expert=2", "model=MIXTURE"),
    "ddp_pipeline": ("strategy=ddp", "parallel.pipeline=2"),
}
"""Cells whose workers share a model in groups of two: one group, or two."""
SIZED = ("ddp", "full_shard", "shard_grad_op")
"""Cells for which the sizes of all collectives are known with gloo."""
WORKERS = (1, 2, 4)
TRAINED = [(name, workers) for name in CELLS for workers in WORKERS if name in SIZED or workers <= 2]
SEVERAL = [(name, workers) for name, workers in TRAINED if workers > 1]
FOUR = Target(1, 4, 2, 1.0)
MACHINE = MachineCurves((), intra_node_link(None), Network())

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train each cell with each number of workers."""
    folder = tmp_path_factory.mktemp("gloo")
    mixture = (*hugging_face(folder, "olmoe"), "dataset.max_length=32", "dataset.padding=max_length")
    for workers in WORKERS:
        chosen = {name: CELLS[name] for name, count in TRAINED if count == workers}
        for name, options in (chosen | (SHARED if workers > 1 else {})).items():
            directory = folder / str(workers) / name
            directory.mkdir(parents=True)
            typed = [each for text in options for each in (mixture if text == "model=MIXTURE" else (text,))]
            make_spec(*COMMON, f"cluster.workers_per_node={workers}", *typed).write(directory)
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


def numbers(items: Sequence[Item]) -> Counter[str]:
    """Return the number of collectives by kind. gloo executes a reduce-scatter as an all-reduce."""
    kinds = (item.kind for item in items if isinstance(item, Collective))
    return Counter("all_reduce" if kind == "reduce_scatter" else kind for kind in kinds)


@pytest.mark.parametrize("name", SHARED)
def test_one_group_plans_the_collectives_of_two(runs: Path, name: str) -> None:
    one, two = read_measured_step(runs / "2" / name), read_step_model(runs / "4" / name)
    assert two is not None
    forecaster = Forecaster(one, MACHINE)
    planned, own = (forecaster.items(Target(1, workers, 2, 1.0)) for workers in (4, 2))
    # The time of messages between stages is part of the passes.
    real = [item for item in two.items if not isinstance(item, Collective) or item.kind not in ("send", "recv")]
    assert numbers(planned) == numbers(real)
    between = [item for item in planned if isinstance(item, Collective) and item.axis == COPIES]
    assert bool(between) == (not name.endswith("context"))
    assert all(group_layout(one.communication, COPIES, FOUR).ranks == 2 for _ in between)
    in_group = [item for item in planned if isinstance(item, Collective) and item.axis == GROUP]
    assert bool(in_group) == (not name.endswith("pipeline"))
    # Groups exchange the same data, so their collectives take the measured time.
    assert [item.transfer_s for item in in_group] == [
        item.transfer_s for item in own if isinstance(item, Collective) and item.axis == GROUP
    ]
    median, later = forecast_steps(runs / "2" / name, [one.target, FOUR], MACHINE)
    assert median.step_time_s == pytest.approx(one.median_s, rel=1e-6)
    assert later.parts["exposed_communication"] + later.hidden_communication_s > (
        median.parts["exposed_communication"] + median.hidden_communication_s
    )


def test_groups_of_half_the_weights_send_half_of_the_gradients(runs: Path) -> None:
    cells = ("ddp_tensor", "ddp_context")
    planned = {name: Forecaster(read_measured_step(runs / "2" / name), MACHINE).items(FOUR) for name in cells}
    reduced = {
        name: sum(item.bytes or 0 for item in items if is_gradient_reduction(item) and isinstance(item, Collective))
        for name, items in planned.items()
    }
    # Norms are whole on each worker.
    assert reduced["ddp_tensor"] == pytest.approx(reduced["ddp_context"] / 2, rel=0.1)


def test_the_passes_of_a_pipeline_follow_the_formula_of_its_schedule(runs: Path) -> None:
    """A pipeline of two workers with 1F1B has the time of a micro-batch as its bubble."""
    forecaster = Forecaster(read_measured_step(runs / "2" / "ddp_pipeline"), MACHINE)

    def passes_s(micro_batches: int) -> float:
        items = forecaster.items(Target(1, 2, micro_batches, 1.0))
        return sum(item.host_s for item in items if isinstance(item, Segment) and item.phase != OPTIMIZER)

    assert passes_s(8) / passes_s(2) == pytest.approx((8 + 1) / (2 + 1))
    found = forecast_steps(runs / "2" / "ddp_pipeline", [Target(1, 2, 8, 1.0)], MACHINE)[0]
    assert any("the bubble of parallel.schedule=1f1b is 11% of the passes" in note for note in found.notes)


def test_a_profile_of_several_groups_is_refused(runs: Path) -> None:
    with pytest.raises(ConfigError, match=r"profile one group, with cluster\.nodes=1 cluster\.workers_per_node=2"):
        read_measured_step(runs / "4" / "ddp_tensor")
    assert read_measured_step(runs / "4" / "ddp_context").model.workers == 4


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("parallel", {"context": 2}, "shares matrices too, .* profile it with parallel.context=1"),
        ("parallel", {"expert": 2}, "shares matrices too, .* profile it with parallel.expert=1"),
        ("fsdp", {"sharding": "hybrid_shard"}, "has replicas of a model in parts, .* profile it with strategy=ddp"),
    ],
)
def test_a_profile_of_combined_degrees_is_refused(
    section: str, values: dict[str, Any], message: str, runs: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(runs / "2" / "ddp_tensor", tmp_path / "run")
    record = json.loads((run / "record.json").read_text())
    record["config"][section].update(values)
    if section == "fsdp":
        record["config"]["strategy"] = {"name": "fsdp", "_target_": "distexp.strategies.fsdp.FSDP"}
    (run / "record.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=message):
        read_measured_step(run)
