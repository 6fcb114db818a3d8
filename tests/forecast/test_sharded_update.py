"""Tests of the update of sharded optimizer states on other numbers of workers. Each answer is computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distexp.forecast.communication import SMALL_PARAMETER_S, Forecast, Target, UpdateShare, shard_update, update_share
from distexp.forecast.steps import forecast_steps
from distexp.hardware.facts import Link, facts
from distexp.preflight.machine import CurvePoint, MachineCurves, Network
from distexp.runs.run_dir import DS_CONFIG
from distexp.runs.step_files import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    Item,
    Parameters,
    Segment,
    StepModel,
    write_step_model,
)
from distexp.strategies.communication import FSDPCommunication
from distexp.strategies.zero.ds_communication import ZeroCommunication, ZeroOptions
from distexp.system.files import write_json
from tests.helpers.records import record

SECONDS = {"all_reduce": 0.001, "all_gather": 0.002, "reduce_scatter": 0.002}
"""Time of a collective of any size."""
LAYOUTS = ((2, 1), (4, 1), (2, 2), (4, 2))
"""Workers and nodes."""
MACHINE = MachineCurves(
    tuple(
        CurvePoint(kind, *layout, size, seconds)
        for kind, seconds in SECONDS.items()
        for layout in LAYOUTS
        for size in (1, 10**12)
    ),
    Link("test", 50e9, facts().links["NVLink"].latency),
    Network("infiniband-ndr-400g"),
)
GROUPS = ((60_000_000, 40_000_000), (1000, 1000))
"""Two parameters with weight decay, and two without."""
PASSES: list[Item] = [
    Segment(FORWARD, 0, 0.0001, 0.010, 0.0101, 0.01005, 5),
    Segment(BACKWARD, 0, 0.0001, 0.010, 0.0101, 0.01005, 5),
]
UPDATE = Segment(OPTIMIZER, 0, 0.0001, 0.020, 0.0201, 0.02005, 5)
"""A few kernels of 20 ms, on the 100 million elements of one worker."""
STEP_S = 0.040


def write_run(
    folder: Path, *, groups: tuple[tuple[int, ...], ...] = GROUPS, items: tuple[Item, ...] = (*PASSES, UPDATE),
    workers: int = 1, median_s: float = STEP_S, on_gpu: bool = True, **settings: Any,
) -> Path:  # fmt: skip
    """Write a profiled run of a model that is one unit."""
    written = record(0, cluster__workers_per_node=workers, **settings)
    written.metrics.step_time_s = {"p50": median_s, "p90": median_s, "max": median_s}
    written.write(folder)
    write_json(folder / DS_CONFIG, {"zero_optimization": {"stage": written.config["deepspeed"]["zero_stage"]}})
    units = (Parameters("model", tuple(elements for group in groups or GROUPS for elements in group)),)
    model = StepModel(on_gpu, workers, 1, 1, median_s, ((median_s,),), items, units, group_elements=groups)
    write_step_model(folder, model)
    return folder


def forecast(run: Path, *sizes: tuple[int, int]) -> list[Forecast]:
    """Return the forecasts of some numbers of nodes and workers per node."""
    return forecast_steps(run, [Target(*size, 1, 8.0) for size in sizes], MACHINE)


def test_zero_2_updates_a_share(tmp_path: Path) -> None:
    run = write_run(tmp_path, strategy="deepspeed", deepspeed__zero_stage=2)
    one, two, four = forecast(run, (1, 1), (1, 2), (1, 4))
    assert one.step_time_s == pytest.approx(STEP_S, rel=1e-6)
    # 20 ms passes, 1 ms for the bucket, 1 ms for the norm, the update, 2 x 2 ms to gather the weights of two groups
    assert two.step_time_s == pytest.approx(0.020 + 0.002 + 0.010 + 0.004, rel=0.002)
    assert four.step_time_s == pytest.approx(0.020 + 0.002 + 0.005 + 0.004, rel=0.002)
    assert one.notes == ()
    (eight,) = forecast(run, (1, 8))
    assert "scaled" in eight.beyond
    assert eight.notes == ()
    assert two.notes == ("collectives of 1 x 2 workers take the times that a preflight measured",)
    assert four.notes == ("collectives of 1 x 4 workers take the times that a preflight measured",)


def test_full_shard_updates_a_share(tmp_path: Path) -> None:
    run = write_run(tmp_path, strategy="fsdp", fsdp__sharding="full_shard")
    two, four = forecast(run, (1, 2), (1, 4))
    # The gathers need no result, so they run while the step before is updated. 2 ms reduce-scatter, 1 ms norm.
    assert two.step_time_s == pytest.approx(0.020 + 0.003 + 0.010, rel=0.002)
    assert four.step_time_s == pytest.approx(0.020 + 0.003 + 0.005, rel=0.002)


@pytest.mark.parametrize(
    ("settings", "update_s"),
    [
        ({"strategy": "fsdp", "fsdp__sharding": "full_shard"}, 0.005),
        ({"strategy": "fsdp", "fsdp__sharding": "shard_grad_op"}, 0.005),
        ({"strategy": "fsdp", "fsdp__sharding": "hybrid_shard"}, 0.010),  # only over the two workers of a node
        ({"strategy": "fsdp", "fsdp__sharding": "no_shard"}, 0.020),
        ({"strategy": "ddp"}, 0.020),
        ({"strategy": "deepspeed", "deepspeed__zero_stage": 0}, 0.020),
        ({"strategy": "deepspeed", "deepspeed__zero_stage": 1}, 0.005),
        ({"strategy": "deepspeed", "deepspeed__zero_stage": 3}, 0.005),
    ],
)
def test_two_nodes_with_two_workers(settings: dict[str, Any], update_s: float, tmp_path: Path) -> None:
    (found,) = forecast(write_run(tmp_path, **settings), (2, 2))
    assert found.parts["compute"] == pytest.approx(0.020 + update_s, rel=0.002)


def test_a_profile_of_two_workers_is_the_start_for_one_and_for_four(tmp_path: Path) -> None:
    run = write_run(tmp_path, workers=2, strategy="fsdp", fsdp__sharding="full_shard")
    one, two, four = forecast(run, (1, 1), (1, 2), (1, 4))
    # 20 ms are the update of half of the weights
    computed = [size.parts["compute"] for size in (one, two, four)]
    assert computed == pytest.approx([0.060, 0.040, 0.030], rel=0.002)


def test_zero_2_divides_flat_groups_and_zero_3_each_parameter() -> None:
    two, three = (ZeroCommunication(stage=stage) for stage in (2, 3))
    uneven = [[60, 10, 10, 10, 10], [1, 1, 1]]
    # a part is 50 + 2 elements: the second worker has the rest of the first parameter, the four others, and one of 3
    assert update_share(uneven, two, 2) == UpdateShare(elements=52, parameters=6)
    assert update_share(uneven, two, 1) == UpdateShare(elements=103, parameters=8)
    assert update_share(uneven, three, 2) == UpdateShare(elements=30 + 4 * 5 + 3, parameters=8)
    assert update_share([[40, 40]], two, 4) == UpdateShare(elements=20, parameters=1)
    assert update_share([[1]], two, 4) == UpdateShare(elements=1, parameters=1), "some workers have nothing"


def loop(launches: int) -> Segment:
    """Return 20 ms of launches for kernels of 10 ms."""
    return Segment(OPTIMIZER, 0, 0.020, 0.010, 0.0201, 0.0150, launches)


@pytest.mark.parametrize(
    ("stage", "launches", "host_s"),
    [
        (2, 1000, 0.010),  # a loop over the parameters of the worker, of which it has half
        (2, 10, 0.020),  # a few kernels of flat tensors
        (3, 1000, 0.020),  # each worker has a part of all parameters
    ],
)
def test_the_cpu_launches_as_many_kernels_as_a_worker_has_parameters(stage: int, launches: int, host_s: float) -> None:
    settings = ZeroCommunication(stage=stage)
    before, after = (update_share([[1000] * 10], settings, shards) for shards in (1, 2))
    (found,) = shard_update((loop(launches),), before, after, settings, on_gpu=True)
    assert isinstance(found, Segment)
    assert (found.host_s, found.device_s) == pytest.approx((host_s, 0.005))
    assert found.launches == launches * host_s / 0.020
    # half of both: half of the tail; half of the kernels alone: half of the tail, and the other half of the launches
    assert found.tail_s == pytest.approx(0.01005 if host_s == 0.010 else 0.01005 + 0.010)


def test_a_kernel_does_not_get_shorter_than_the_shortest_one() -> None:
    settings = FSDPCommunication()
    before, after = (update_share([[1024] * 10], settings, shards) for shards in (1, 1024))
    (found,) = shard_update((loop(1000),), before, after, settings, on_gpu=True)
    assert isinstance(found, Segment)
    assert found.device_s == pytest.approx(1000 * 2e-6)


@pytest.mark.parametrize(("on_gpu", "offloads"), [(False, False), (True, True)])
def test_a_cpu_that_updates_needs_some_time_for_each_parameter(on_gpu: bool, offloads: bool) -> None:
    settings = ZeroCommunication(stage=3, zero=ZeroOptions(), offloads=offloads)
    (large, small) = ([[1_000_000] * 10], [[1000] * 200])
    for groups, host_s in ((large, 0.020 / 4), (small, 200 * SMALL_PARAMETER_S)):
        before, after = (update_share(groups, settings, shards) for shards in (1, 4))
        (found,) = shard_update((loop(1000),), before, after, settings, on_gpu=on_gpu)
        assert found.host_s == pytest.approx(host_s)


def test_other_phases_stay(tmp_path: Path) -> None:
    settings = FSDPCommunication()
    items = (*PASSES, replace(UPDATE, waits=True))
    found = shard_update(items, UpdateShare(100, 1), UpdateShare(50, 1), settings, on_gpu=True)
    assert found[:2] == tuple(PASSES)
    assert isinstance(found[2], Segment)
    assert (found[2].device_s, found[2].waits) == (pytest.approx(0.010), True)
