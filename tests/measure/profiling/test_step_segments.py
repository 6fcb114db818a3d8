"""Tests of the step model: hand-written traces of GPUs with hand-computed segments. Times are in milliseconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distexp.forecast.simulate import simulate
from distexp.measure.profiling.breakdown import durations_of, split_collectives, split_step, step_windows
from distexp.measure.profiling.chrome_trace import BACKWARD as BACKWARD_MARK
from distexp.measure.profiling.chrome_trace import read_trace
from distexp.measure.profiling.phases import collectives_of_hooks, cpu_busy_ms, find_phases
from distexp.measure.profiling.step_segments import MedianStep, ProfiledStep, items_of
from distexp.runs.step_files import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    Collective,
    Item,
    Parameters,
    Segment,
    StepModel,
    read_step_model,
    write_step_model,
)
from distexp.system.torch_internals.collectives import OPTIMIZER as OPTIMIZER_MARK
from distexp.system.torch_internals.collectives import FSDPUnitSize
from tests.helpers.gpu_traces import ADAM, ALL_REDUCE, GEMM, GPUTrace, event

NCCL = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "BFloat16"}


def two_micro_batches() -> GPUTrace:
    """Return a step of 40 ms: the GPU is idle until 1.1, and each kernel runs next to the launch of the next one."""
    trace = GPUTrace().step(1, 0, 40)
    for begin in (0, 15):
        trace.kernel(GEMM, begin + 1.1, begin + 5, launch=begin + 1)
        trace.events.append(event("cpu_op", f"{BACKWARD_MARK}: MmBackward0", begin + 6, begin + 10, thread=2))
        trace.kernel(GEMM, begin + 7.1, begin + 12, launch=begin + 7)
    trace.kernel(ALL_REDUCE, 27, 30, launch=23, **NCCL, **{"Group size": 2, "Process Group Ranks": "[0, 1]"})
    trace.annotation(OPTIMIZER_MARK, 26, 35)
    trace.kernel(ADAM, 30, 34, launch=28)
    trace.events.append(event("cuda_runtime", "cudaStreamSynchronize", 28.5, 34, correlation=99))
    return trace


def blocked_launch() -> GPUTrace:
    """Return a step of 20 ms, whose last launch takes from 3 to 13."""
    trace = GPUTrace().step(1, 0, 20)
    for number in range(4):
        trace.kernel(GEMM, 5 * number, 5 * number + 5, launch=number)
    trace.events[-2]["dur"] = 10_000.0
    return trace


def items(trace: GPUTrace, folder: Path, *, workers: int = 2, micro_batches: int = 2) -> tuple[Item, ...]:
    read = read_trace(trace.write(folder / "trace.json"), on_gpu=True)
    transfers = split_collectives(read.collectives, [durations_of(read.collectives)])
    parts = split_step(read, step_windows(read)[0], transfers)
    return items_of(ProfiledStep(read, MedianStep(0, transfers, parts), workers, micro_batches, {}))


def total(found: tuple[Item, ...], phase: str, micro_batch: int) -> tuple[float, float, int]:
    """Return the milliseconds of CPU and GPU and the kernels of a phase."""
    inside = [i for i in found if isinstance(i, Segment) and (i.phase, i.micro_batch) == (phase, micro_batch)]
    host, device = (1000 * sum(getattr(item, name) for item in inside) for name in ("host_s", "device_s"))
    return round(host, 3), round(device, 3), sum(item.launches for item in inside)


def test_a_step_has_the_times_of_both_clocks_by_phase(tmp_path: Path) -> None:
    found = items(two_micro_batches(), tmp_path)
    assert total(found, FORWARD, 0) == (6, 3.9, 1)
    assert total(found, BACKWARD, 0) == (4, 4.9, 1)
    assert total(found, FORWARD, 1) == (11, 3.9, 1)
    assert total(found, BACKWARD, 1) == (4, 4.9, 1)
    assert total(found, OPTIMIZER, 1) == (15 - 5.5, 4, 1)  # without the wait for the GPU
    assert [item.waits for item in found if isinstance(item, Segment)].count(True) == 1


def test_a_launch_that_waits_for_the_queue_of_the_gpu_is_not_work_of_the_cpu(tmp_path: Path) -> None:
    found = items(blocked_launch(), tmp_path, workers=1, micro_batches=1)
    host = 1000 * sum(item.host_s for item in found if isinstance(item, Segment))
    assert host == pytest.approx(20 - 10 + 0.2)


@pytest.mark.parametrize(
    ("trace", "busy_ms"), [(two_micro_batches(), 40 - 5.5), (blocked_launch(), 20 - 10 + 0.2)], ids=["wait", "queue"]
)
def test_the_cpu_is_busy_if_it_does_not_wait_for_the_gpu(trace: GPUTrace, busy_ms: float, tmp_path: Path) -> None:
    trace.step(2, 40, 50)
    read = read_trace(trace.write(tmp_path / "trace.json"), on_gpu=True)
    assert cpu_busy_ms(read, 0) == pytest.approx(busy_ms)
    assert cpu_busy_ms(read, 1) == pytest.approx(10), "another step"
    assert cpu_busy_ms(replace(read, on_gpu=False), 0) is None


def test_a_collective_has_its_size_group_and_place(tmp_path: Path) -> None:
    found = items(two_micro_batches(), tmp_path)
    (position,) = (i for i, item in enumerate(found) if isinstance(item, Collective))
    one = found[position]
    assert isinstance(one, Collective)
    assert (one.kind, one.bytes, one.ranks, one.phase, one.micro_batch) == ("all_reduce", 2000, 2, BACKWARD, 1)
    assert one.transfer_s == pytest.approx(0.003)
    before = sum(item.launches for item in found[:position] if isinstance(item, Segment))
    assert before == 4  # it is launched after both kernels of both micro-batches


def test_the_simulation_of_a_profiled_step_takes_as_long_as_the_step(tmp_path: Path) -> None:
    """The last kernel is launched at 28 and ends at 34; the CPU waits for it, and ends the step at 40."""
    found = items(two_micro_batches(), tmp_path)
    durations = [(item.transfer_s or 0.0) if isinstance(item, Collective) else 0.0 for item in found]
    assert simulate(found, durations, on_gpu=True).step_s == pytest.approx(0.040, rel=0.01)


def test_a_step_of_many_micro_batches_keeps_three(tmp_path: Path) -> None:
    trace = GPUTrace().step(1, 0, 60)
    for number in range(5):
        begin, kernel = 10 * number, (3, 1, 4, 2, 3)[number]
        trace.kernel(GEMM, begin + 1.1, begin + 1.1 + kernel, launch=begin + 1)
        trace.events.append(event("cpu_op", f"{BACKWARD_MARK}: MmBackward0", begin + 6, begin + 8, thread=2))
    found = items(trace, tmp_path, workers=1, micro_batches=5)
    assert {item.micro_batch for item in found} == {0, 3, 4}  # the third has the median duration of those between


def unit(gathered_bytes: int, reduced_bytes: int, *, reshards: bool) -> FSDPUnitSize:
    return FSDPUnitSize("", (), gathered_bytes, reduced_bytes, reshards)


def test_the_hooks_of_fsdp_show_where_it_gathers_and_reduces() -> None:
    phases = find_phases((0, 100), [(50, 90)], [(95, 99)], micro_batches=1)
    units = {
        "": unit(8, 16, reshards=False),
        "a": unit(2, 4, reshards=True),
        "b": unit(3, 6, reshards=True),
    }
    hooks = [
        (1, "FSDP::pre_forward"),
        (2, "FSDP::pre_forward (a)"),
        (5, "FSDP::post_forward (a)"),
        (6, "FSDP::pre_forward (b)"),
        (9, "FSDP::post_forward (b)"),
        (51, "FSDP::pre_backward"),
        (52, "FSDP::pre_backward (b)"),
        (53, "FSDP::backward_prefetch for a"),
        (60, "FSDP::post_backward_reshard (b)"),
        (61, "FSDP::post_backward_reduce (b)"),
        (62, "FSDP::pre_backward (a)"),
        (71, "FSDP::post_backward_reduce (a)"),
        (91, "FSDP::post_backward_reduce"),
    ]
    found = collectives_of_hooks([(name, (when, when + 0.1)) for when, name in hooks], units, phases)
    gathers = [(when, collective.bytes) for when, collective in found if collective.kind == "all_gather"]
    assert gathers == [(1, 8), (2, 2), (6, 3), (52, 3), (53, 2)]  # the root keeps its weights
    assert [(when, e.bytes) for when, e in found if e.kind == "reduce_scatter"] == [(61, 6), (71, 4), (91, 16)]
    several = [*hooks, (3, "FSDP::all_gather (b)")]
    observed = collectives_of_hooks([(name, (when, when + 0.1)) for when, name in several], units, phases)
    assert [(when, e.bytes) for when, e in observed if e.kind == "all_gather"] == [(3, 3)]


def test_shard_grad_op_keeps_its_weights_until_the_last_backward_pass() -> None:
    phases = find_phases((0, 100), [(20, 30), (60, 70)], [(95, 99)], micro_batches=2)
    units = {"": unit(8, 16, reshards=False), "a": unit(2, 4, reshards=False)}
    hooks = [
        *((begin + 1, "FSDP::pre_forward") for begin in (0, 40)),
        *((begin + 2, "FSDP::pre_forward (a)") for begin in (0, 40)),
        *((begin + 22, "FSDP::pre_backward (a)") for begin in (0, 40)),
        *((begin + 31, "FSDP::post_backward_reshard") for begin in (0, 40)),  # after the last event of the pass
    ]
    found = collectives_of_hooks([(name, (when, when + 0.1)) for when, name in hooks], units, phases)
    assert [(when, collective.bytes) for when, collective in found] == [(1, 8), (2, 2)]


def test_forward_passes_are_the_longest_gaps_between_events_of_the_backward_pass() -> None:
    events = [(10.0, 12.0), (13.0, 15.0), (30.0, 33.0), (33.5, 36.0)]
    phases = find_phases((0, 50), events, [(40, 45)], micro_batches=2, hooks=[37.0])
    assert [phases.place(when) for when in (5, 11, 14, 20, 34, 38, 41)] == [
        (FORWARD, 0),
        (BACKWARD, 0),
        (BACKWARD, 0),
        (FORWARD, 1),
        (BACKWARD, 1),
        (OPTIMIZER, 1),
        (OPTIMIZER, 1),
    ]
    assert phases.place(37.0) == (BACKWARD, 1)  # a collective after the last event belongs to the backward pass


def test_a_step_model_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = StepModel(
        on_gpu=True,
        workers=2,
        nodes=1,
        micro_batches=1,
        step_s=0.5,
        step_s_by_rank=((0.5, 0.5), (0.5, 0.75)),
        items=(
            Segment(FORWARD, 0, 0.5, 0.25, 0.75, 0.5, 3, waits=True),
            Collective("all_gather", None, 2, "shard", BACKWARD, 0, 0.5, 0.25, OPTIMIZER, 1, after_compute=False),
        ),
        units=(Parameters("a", (1, 2)),),
        bucket_elements=(3,),
    )
    write_step_model(tmp_path, written)
    assert read_step_model(tmp_path) == written


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 2}', '{"schema": 1, "items": [{"type": "segment"}]}'])
def test_a_step_model_that_cannot_be_read_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "step_model.json").write_text(content)
    with pytest.raises(ValueError, match=r"step_model\.json cannot be read"):
        read_step_model(tmp_path)
