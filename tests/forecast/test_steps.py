"""Tests of ``forecast_steps`` on hand-written profiled runs, of which each answer is known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distexp.config import ConfigError
from distexp.config.sections import ForecastConfig
from distexp.forecast.communication import PARTS, Target
from distexp.forecast.profiled_run import expected_maximum
from distexp.forecast.steps import forecast_steps
from distexp.hardware.facts import Link, facts
from distexp.preflight.machine import CurvePoint, MachineCurves, Network, load_machine, store_points
from distexp.runs.record import RunRecord
from distexp.runs.step_files import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    Collective,
    Item,
    Parameters,
    Segment,
    StepModel,
    write_step_model,
)
from tests.helpers.records import record

SIZE = 100_000_000
MACHINE = MachineCurves(
    tuple(CurvePoint("all_reduce", 2, 1, size, seconds) for size, seconds in ((1000, 1e-5), (SIZE, 0.004))),
    Link("test", 50e9, facts().links["NVLink"].latency),
    Network("infiniband-ndr-400g"),
)
"""Two workers reduce 100 MB in 4 ms."""


def ddp_items(transfer_s: float | None = None) -> list[Item]:
    """Return a step of 30 ms of kernels: the gradients are ready after 10 and 20 ms, and the update takes 10."""
    ranks = 1 if transfer_s is None else 2
    one = Collective("all_reduce", SIZE, ranks, "all", BACKWARD, 0, transfer_s=transfer_s)
    kernels = Segment(BACKWARD, 0, 0.001, 0.010, 0.0101, 0.0101, 5)
    return [kernels, one, kernels, one, replace(kernels, phase=OPTIMIZER)]


def write_run(
    folder: Path,
    items: list[Item],
    median_s: float,
    *,
    workers: int = 1,
    p90_s: float | None = None,
    on_gpu: bool = True,
    **settings: Any,
) -> Path:
    """Write the record and the step model of a run."""
    written = record(0, cluster__workers_per_node=workers, **settings)
    written.metrics.step_time_s = {"p50": median_s, "p90": p90_s or median_s, "max": p90_s or median_s}
    folder.mkdir(exist_ok=True)
    written.write(folder)
    units = (Parameters("a", (SIZE // 4,)), Parameters("b", (SIZE // 4,)))
    count = len({item.micro_batch for item in items})
    model = StepModel(on_gpu, workers, 1, count, median_s, ((median_s,),), tuple(items), units)
    write_step_model(folder, model)
    return folder


def target(workers: int, *, nodes: int = 1, micro_batches: int = 1) -> Target:
    return Target(nodes, workers // nodes, micro_batches, 8.0 * workers)


@pytest.mark.parametrize("median_s", [0.020, 0.0295, 0.030, 0.031, 0.045])
@pytest.mark.parametrize("transfer_s", [None, 0.004])
def test_the_profiled_size_gives_its_own_median(median_s: float, transfer_s: float | None, tmp_path: Path) -> None:
    workers = 1 if transfer_s is None else 2
    run = write_run(tmp_path, ddp_items(transfer_s), median_s, workers=workers)
    (found,) = forecast_steps(run, [target(workers)], MACHINE)
    assert found.step_time_s == pytest.approx(median_s, rel=1e-6)
    assert sum(found.parts.values()) == pytest.approx(median_s, rel=1e-6)
    assert set(found.parts) == set(PARTS)
    assert (found.beyond, found.notes) == ("", ())
    assert found.low_s < median_s < found.high_s < 1.1 * median_s


def test_a_large_error_of_the_profiled_speed_leaves_a_positive_interval(tmp_path: Path) -> None:
    """One of few steps took ten times as long, so twice the error is more than the step."""
    run = write_run(tmp_path, ddp_items(None), 0.03)
    record = RunRecord.read(run / "record.json")
    record.metrics.speed_error = {"relative": 0.643}
    record.write(run)
    (found,) = forecast_steps(run, [target(1)], MACHINE)
    assert 0 < found.low_s < found.step_time_s < found.high_s


@pytest.mark.parametrize("median_s", [0.08, 0.1])
def test_a_launch_bound_run_gives_its_own_median(median_s: float, tmp_path: Path) -> None:
    """The profiled CPU takes 120 ms for kernels of 30 ms; without the profiler it is faster."""
    launches = Segment(FORWARD, 0, 0.120, 0.030, 0.121, 0.061, 100)
    run = write_run(tmp_path, [launches], median_s)
    (found,) = forecast_steps(run, [target(1)], MACHINE)
    assert found.step_time_s == pytest.approx(median_s, rel=1e-6)
    assert found.parts["launch"] == pytest.approx(median_s - 0.030, rel=0.01)
    assert found.limit == "the launches of the CPU"
    # In another run, the CPU may be slower or faster by a factor of 4/3. The other errors are 3 %.
    assert found.high_s == pytest.approx(median_s * (1 + math.hypot(1 / 3, 0.03)), rel=0.001)
    assert found.low_s == pytest.approx(median_s * (1 - math.hypot(1 / 4, 0.03)), rel=0.001)


def test_the_last_bucket_is_exposed_on_two_workers(tmp_path: Path) -> None:
    run = write_run(tmp_path, ddp_items(), 0.030)
    (found,) = forecast_steps(run, [target(2)], MACHINE)
    assert found.step_time_s == pytest.approx(0.034, rel=0.001)
    assert found.parts["exposed_communication"] == pytest.approx(0.004, rel=0.001)
    assert found.hidden_communication_s == pytest.approx(0.004, rel=0.001)
    assert found.beyond == "2 x the workers of the profiled run (1)"
    assert found.limit == "communication, mainly the all_reduce of 100.0 MB"
    assert found.samples_per_second == pytest.approx(16 / 0.034, rel=0.001)
    assert found.low_s < found.step_time_s < found.high_s


def test_a_small_collective_is_in_kb(tmp_path: Path) -> None:
    reduce = Collective("all_reduce", 20_500, 1, "all", BACKWARD, 0)
    run = write_run(tmp_path, [reduce if isinstance(item, Collective) else item for item in ddp_items()], 0.030)
    slow = replace(MACHINE, points=(CurvePoint("all_reduce", 2, 1, 20_500, 0.02),))
    (found,) = forecast_steps(run, [target(2)], slow)
    assert found.limit == "communication, mainly the all_reduce of 20.5 kB"


def test_observed_collectives_are_scaled_to_another_number_of_workers(tmp_path: Path) -> None:
    run = write_run(tmp_path, ddp_items(transfer_s=0.005), 0.035, workers=2)
    (found,) = forecast_steps(run, [target(4)], MACHINE)
    # a ring of 4 sends 1.5 times as much as one of 2; its latency is small
    assert found.parts["exposed_communication"] == pytest.approx(0.0075, rel=0.02)
    assert "scaled from another number of workers" in found.beyond


def test_a_launch_bound_run_hides_its_communication(tmp_path: Path) -> None:
    slow = Segment(BACKWARD, 0, 0.050, 0.010, 0.051, 0.026, 100)
    reduce = Collective("all_reduce", SIZE, 1, "all", BACKWARD, 0)
    run = write_run(tmp_path, [slow, reduce, slow, replace(slow, phase=OPTIMIZER)], 0.12)
    (found,) = forecast_steps(run, [target(2)], MACHINE)
    assert found.step_time_s == pytest.approx(0.12, rel=0.01)
    assert found.hidden_communication_s == pytest.approx(0.004, rel=0.01)


def test_the_slowest_of_many_workers_is_waited_for(tmp_path: Path) -> None:
    run = write_run(tmp_path, ddp_items(), 0.030, p90_s=0.030 + 1.2816 * 0.001)
    one, two, many = forecast_steps(run, [target(1), target(2), target(1024)], MACHINE)
    assert one.parts["waiting"] == 0
    assert two.parts["waiting"] == pytest.approx(0.00056, rel=0.06)  # of two normal values: deviation / sqrt(pi)
    assert many.parts["waiting"] == pytest.approx(0.0032, rel=0.05)
    assert expected_maximum(1) == 0


def test_the_wait_of_the_profiled_run_is_kept_and_grows_with_the_workers(tmp_path: Path) -> None:
    run = write_run(tmp_path, ddp_items(0.004), 0.036, workers=2, p90_s=0.036 + 1.2816 * 0.001)
    written = RunRecord.read(run / "record.json")
    written.metrics.step_breakdown = [{"rank": rank, "step_ms": 36.0, "waiting_ms": 2.0 - rank} for rank in (0, 1)]
    written.write(run)
    one, own, more = forecast_steps(run, [target(1), target(2), target(4)], MACHINE)
    assert (own.step_time_s, own.parts["waiting"]) == pytest.approx((0.036, 0.002))  # rank 0 is simulated
    assert more.parts["waiting"] == pytest.approx(0.002 + 0.00046, rel=0.05)
    assert one.parts["waiting"] == 0


@pytest.mark.parametrize(("busy_ms", "waiting_s"), [(None, 0.002), (36.0, 0.002), (71.0, 0.0005), (73.0, 0.0)])
def test_a_gpu_whose_cpu_is_busy_does_not_wait_for_a_slow_worker(
    busy_ms: float | None, waiting_s: float, tmp_path: Path
) -> None:
    """The GPU waits for 2 ms in a step of 36 ms, which takes 72 ms with the profiler."""
    run = write_run(tmp_path, ddp_items(0.004), 0.036, workers=2)
    written = RunRecord.read(run / "record.json")
    entry = {"rank": 0, "step_ms": 36.0, "waiting_ms": 2.0, "profiled_step_ms": 72.0, "cpu_busy_ms": busy_ms}
    written.metrics.step_breakdown = [entry]
    written.write(run)
    (own,) = forecast_steps(run, [target(2)], MACHINE)
    assert (own.step_time_s, own.parts["waiting"]) == pytest.approx((0.036, waiting_s))


def test_more_micro_batches_reduce_once_and_take_longer(tmp_path: Path) -> None:
    """Strong scaling to fewer workers: a worker has more micro-batches. Only the last one reduces."""
    run = write_run(tmp_path, ddp_items(), 0.030)
    found = forecast_steps(run, [target(2, micro_batches=count) for count in (1, 2, 20)], MACHINE)
    assert [forecast.step_time_s for forecast in found] == pytest.approx([0.034, 0.054, 0.414], rel=0.001)


def test_a_step_of_many_micro_batches_is_forecast_for_4096_gpus(tmp_path: Path) -> None:
    items: list[Item] = []
    for number in range(3):
        for phase in (FORWARD, BACKWARD):
            for _ in range(48):
                items.append(Collective("all_gather", 20_000_000, 1, "shard", phase, number))
                items.append(Segment(phase, number, 0.0005, 0.001, 0.0012, 0.0011, 20))
    items.append(Segment(OPTIMIZER, 2, 0.001, 0.002, 0.0021, 0.0021, 5))
    run = write_run(tmp_path, items, 0.29, strategy="fsdp")
    sizes = [target(8 * nodes, nodes=nodes, micro_batches=64) for nodes in (1, 8, 64, 512)]
    found = forecast_steps(run, sizes, replace(MACHINE, points=()))
    steps = [forecast.step_time_s for forecast in found]
    assert steps == sorted(steps)
    assert found[-1].beyond == (
        "4096 x the workers of the profiled run (1), 512 nodes instead of 1, collectives from link speeds, not measured"
    )
    assert [forecast.notes[0].partition(".")[0] for forecast in found] == [
        "collectives in a node are not measured",
        *["collectives between nodes are not measured"] * 3,
    ]
    assert (
        "Assumed: forecast.network=infiniband-ndr-400g, one card per worker. To measure them: "
        "distexp preflight cluster=slurm cluster.nodes=2" in (found[-1].notes[0])
    )
    widths = [(forecast.high_s - forecast.low_s) / forecast.step_time_s for forecast in found]
    assert widths[0] < widths[-1]


def test_an_oversubscription_without_effect_is_noted(tmp_path: Path) -> None:
    run, sizes = write_run(tmp_path, ddp_items(), 0.030), [target(8 * nodes, nodes=nodes) for nodes in (1, 32, 64)]

    def noted(**options: bool) -> list[bool]:
        machine = replace(MACHINE, network=Network(oversubscription=2.0, **options))
        return ["oversubscription" in "".join(found.notes) for found in forecast_steps(run, sizes, machine)]

    assert noted() == [False, True, False]
    assert noted(rail_optimized=False) == [False, False, False]
    (found,) = forecast_steps(run, [target(16, nodes=2)], replace(MACHINE, network=Network(oversubscription=2.0)))
    assert found.notes[-1] == (
        "up to 32 nodes, forecast.oversubscription=2 has no effect, because GPUs of the same index are taken to share "
        "a switch. If they do not, set forecast.rail_optimized=false"
    )


def test_a_run_on_cpus_waits_for_its_collectives(tmp_path: Path) -> None:
    items: list[Item] = [replace(i, host_s=0.010) if isinstance(i, Segment) else i for i in ddp_items(0.004)]
    run = write_run(tmp_path, items, 0.034, workers=2, on_gpu=False)
    own, single = forecast_steps(run, [target(2), target(1)], MACHINE)
    assert own.parts["exposed_communication"] == pytest.approx(0.004, rel=0.001)
    assert single.step_time_s == pytest.approx(0.030, rel=0.001)
    for found in (own, single):
        assert (found.low_s, found.high_s) == pytest.approx(
            (0.6 * found.step_time_s, 1.4 * found.step_time_s), rel=0.05
        )


def test_a_run_without_a_profile_is_refused_with_a_hint(tmp_path: Path) -> None:
    written = record(0)
    written.metrics.step_time_s = {"p50": 1.0, "p90": 1.0, "max": 1.0}
    written.write(tmp_path)
    with pytest.raises(ConfigError, match="has no profiled step to forecast from: run it again with profile=true"):
        forecast_steps(tmp_path, [target(1)], MACHINE)
    custom = write_run(tmp_path / "custom", ddp_items(), 0.1, strategy="mine")
    with pytest.raises(ConfigError, match="the collectives of strategy=mine are not known: profile it on two workers"):
        forecast_steps(custom, [target(1)], MACHINE)
    with pytest.raises(ConfigError, match="name the directory of a finished run"):
        forecast_steps(tmp_path / "none", [target(1)], MACHINE)


def test_the_machine_has_the_curves_of_the_option_else_of_the_run_else_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path / "cache"))
    run = write_run(tmp_path / "run", ddp_items(), 0.030, peak=1000.0)
    environment = record(0, peak=1000.0).environment
    assert environment is not None
    store_points([CurvePoint("all_reduce", 2, 1, 8, 0.25)], environment.gpu_name, environment.hostname)
    assert [point.seconds for point in load_machine(run, ForecastConfig()).points] == [0.25]
    options = ForecastConfig(network="ethernet-10g", oversubscription=2.0, rail_optimized=False)
    machine = load_machine(run, options)
    assert machine.network == Network("ethernet-10g", rail_optimized=False, oversubscription=2.0)
    with pytest.raises(ConfigError, match=r"has no readable preflight\.json .*: name the run"):
        load_machine(run, ForecastConfig(preflight=str(tmp_path)))
    measured = {"group": "all", "operation": "all_reduce", "ranks": 2, "bytes": 8, "seconds": 0.5, "correct": True}
    content = {"backend": "gloo", "nodes": 1, "hosts": 1, "measurements": [measured]}
    (tmp_path / "preflight.json").write_text(json.dumps(content))
    assert load_machine(run, ForecastConfig(preflight=str(tmp_path))).points[0].seconds == 0.5
