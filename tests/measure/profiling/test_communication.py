"""Tests of the communication share: interval arithmetic, hand-written GPU traces, and real trainings with gloo."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distexp.config import TrainConfig
from distexp.console.run_summary import summary_lines
from distexp.measure.profiling.chrome_trace import (
    MATMUL,
    Kernel,
    Trace,
    TraceCollective,
    communication_shares,
    read_trace,
)
from distexp.measure.profiling.intervals import (
    Interval,
    ProfileWindow,
    intersect,
    merge,
    subtract,
)
from distexp.resolve.run_id import run_id
from distexp.runs.events import read_phase_events
from distexp.runs.metrics import PARTS
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import PROFILE_TRACE
from distexp.runs.step_files import read_profile_summary
from tests.helpers.runs import HELPERS, make_spec, run_ranks
from tests.helpers.slow_rank import LONG_SLEEP_S

MANY_RUNS = HELPERS / "many_runs.py"


@pytest.mark.parametrize(
    ("intervals", "union"),
    [
        ([], []),
        ([(1, 1), (3, 2)], []),
        ([(4, 6), (1, 2)], [(1, 2), (4, 6)]),
        ([(1, 3), (2, 5), (5, 6)], [(1, 6)]),
        ([(1, 9), (2, 3), (4, 8), (8.5, 9.5)], [(1, 9.5)]),
    ],
)
def test_merge_of_overlapping_nested_and_touching_intervals(intervals: list[Interval], union: list[Interval]) -> None:
    assert merge(intervals) == union


def test_intersect() -> None:
    one, other = [(0.0, 4.0), (6.0, 7.0), (9.0, 12.0)], [(1.0, 2.0), (3.0, 6.5), (10.0, 20.0)]
    assert intersect(one, other) == intersect(other, one) == [(1, 2), (3, 4), (6, 6.5), (10, 12)]
    assert intersect(one, []) == []


def test_subtract() -> None:
    one, other = [(0.0, 4.0), (6.0, 7.0), (9.0, 12.0)], [(1.0, 2.0), (3.0, 6.5), (8.0, 9.0), (10.0, 20.0)]
    assert subtract(one, other) == [(0.0, 1.0), (2.0, 3.0), (6.5, 7.0), (9.0, 10.0)]
    assert subtract(other, one) == [(4.0, 6.0), (8.0, 9.0), (12.0, 20.0)]
    assert subtract(one, []) == one
    assert subtract(one, [(0.0, 30.0)]) == subtract([], one) == []


def test_shares_of_a_rank() -> None:
    """Two steps of 5 s: all-reduces in two streams, an all-gather that starts before the window, and kernels."""
    times = {
        "all_reduce": [(12.0, 14.0), (13.0, 15.0)],
        "all_gather": [(8.0, 11.0), (14.5, 15.5)],
        "none": [(1.0, 2.0)],
    }
    collectives = [TraceCollective(when, None, kind, "") for kind, intervals in times.items() for when in intervals]
    kernels = [Kernel(when, None, MATMUL) for when in ((10.0, 13.0), (12.5, 12.7), (15.0, 30.0))]
    steps = [(10.0, 15.0), (15.0, 20.0)]
    timeline = Trace(True, steps, collectives, kernels, operators={}, data=[], optimizer=[], backward=[])
    found = communication_shares(timeline)
    assert found.step_s == 5
    assert found.share == pytest.approx((1 + 3.5) / 10)
    assert found.exposed_share == pytest.approx(2 / 10)
    assert found.by_collective == pytest.approx({"all_gather": 1.0, "all_reduce": 1.5})
    assert communication_shares(replace(timeline, on_gpu=False)).exposed_share is None
    assert communication_shares(replace(timeline, kernels=[])).exposed_share == pytest.approx(found.share)
    silent = communication_shares(replace(timeline, collectives=[]))
    assert (silent.share, silent.exposed_share, silent.by_collective) == (0.0, 0.0, {})
    with pytest.raises(ValueError, match="no duration"):
        communication_shares(replace(timeline, steps=[(1.0, 1.0)]))


def event(category: str, name: str, begin: float, end: float, **arguments: Any) -> dict[str, Any]:
    """Return a complete event; times are in milliseconds."""
    when = {"ts": 4.39e12 + 1000 * begin, "dur": 1000 * (end - begin)}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, **when, "args": {"stream": 7, **arguments}}


STEPS = [event("user_annotation", f"ProfilerStep#{n}", 10 * n, 10 * n + 10) for n in (1, 2)]
HOST = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    event("cpu_op", "c10d::allreduce_", 11, 18),
    event("user_annotation", "nccl:all_reduce", 11, 18),
    event("cuda_runtime", "cudaLaunchKernel", 11, 18),
]
DEVICE = [
    event("gpu_user_annotation", "ProfilerStep#1", 10, 20),  # annotations cover everything and are no work
    event("gpu_user_annotation", "nccl:all_reduce", 12, 19),
    event("kernel", "void cutlass::Kernel2<cutlass_80_tensorop_bf16>(Params)", 10, 15),
    event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 14, 17),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 15, 17),
    event("kernel", "ncclSymkDevKernel_ReduceScatter_LD_sum_bf16(ncclSymkDevWorkArgs4K)", 20, 21),
    event("kernel", "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*)", 22, 22.5),
    event("kernel", "ncclDevKernel_Generic_1(ncclDevKernelArgs)", 23, 24, **{"Collective name": "_allgather_base"}),
    event("kernel", "ncclDevKernel_Generic(ncclDevKernelArgs)", 25, 25.5),
]


def trace(folder: Path, *events: dict[str, Any]) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"distributedInfo": {"backend": "nccl"}, "traceEvents": list(events), "traceName": "x"}))
    return path


def test_gpu_trace_separates_nccl_and_compute_kernels(tmp_path: Path) -> None:
    found = communication_shares(read_trace(trace(tmp_path, *STEPS, *HOST, *DEVICE), on_gpu=True))
    assert found.step_s == pytest.approx(0.010)
    assert found.share == pytest.approx((3 + 1 + 0.5 + 1 + 0.5) / 20)
    assert found.exposed_share == pytest.approx((2 + 1 + 0.5 + 1 + 0.5) / 20), "a copy is no computation"
    kinds = {"all_gather": 0.5, "all_reduce": 1.5, "broadcast": 0.25, "other": 0.25, "reduce_scatter": 0.5}
    assert found.by_collective == pytest.approx({kind: nanoseconds / 1000 for kind, nanoseconds in kinds.items()})


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([*STEPS, *HOST], "recorded no GPU kernel"),
        ([*HOST, *DEVICE], "has no step"),
        ([], "has no step"),
    ],
)
def test_incomplete_trace_is_an_error(tmp_path: Path, events: list[dict[str, Any]], error: str) -> None:
    path = trace(tmp_path, *events)
    with pytest.raises(ValueError, match=error):
        read_trace(path, on_gpu=True)
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match="not valid JSON"):
        read_trace(path, on_gpu=True)


@pytest.mark.parametrize(
    ("requested", "total", "per_epoch", "done", "window"),
    [
        (3, 64, 32, 0, ProfileWindow(60, 3)),
        (0, 64, 32, 0, None),
        (30, 64, 32, 0, ProfileWindow(35, 28)),  # the same number of steps remains unprofiled
        (3, 40, 5, 0, ProfileWindow(36, 3)),
        (4, 40, 5, 0, ProfileWindow(36, 3)),  # without the evaluation before the last epoch
        (3, 41, 5, 0, None),
        (3, 64, 32, 55, ProfileWindow(62, 1)),
        (3, 64, 32, 56, None),
        (3, 5, 32, 0, None),
    ],
)
def test_profile_window_contains_the_last_steps(
    requested: int, total: int, per_epoch: int, done: int, window: ProfileWindow | None
) -> None:
    train = TrainConfig(profile_steps=requested, measure_after_step=5)
    assert ProfileWindow.of(train, total=total, per_epoch=per_epoch, done=done) == window


def test_profiling_does_not_change_the_run_id() -> None:
    options = ("train.profile_steps=0", "train.profile_steps=3", "profile=true", "profile=false")
    configs = [make_spec("cluster.device=cpu", option).config for option in options]
    assert len({run_id(config) for config in configs}) == 1
    assert [config.train.profile_steps for config in configs] == [0, 3, 3, 0]
    chosen = make_spec("cluster.device=cpu", "profile=true", "train.profile_steps=5").config
    assert chosen.train.profile_steps == 5


COMMON = (
    "dataset.train_size=64", "dataset.eval_size=8", "train.num_epochs=2", "train.micro_batch_size=4",
    "train.log_every=1", "train.measure_after_step=1", "cluster.device=cpu",
)  # fmt: skip
PROFILED = "train.profile_steps=3"
HALVES = ("train.micro_batch_size=2", "train.gradient_accumulation_steps=2")  # of the same global batch
SLEEPING = ("model._target_=tests.helpers.slow_rank.build_slower", "trusted_packages=[tests]")
CELLS: dict[str, tuple[str, ...]] = {
    "plain": ("strategy=ddp",),
    "ddp": ("strategy=ddp", PROFILED),
    "full_shard": ("sharding=full_shard", PROFILED),
    "hf_full_shard": ("engine=hf_trainer", "sharding=full_shard", PROFILED),
    "shard_grad_op": ("sharding=shard_grad_op", PROFILED, *HALVES),
    "interrupted": ("strategy=ddp", PROFILED, "train.checkpoint_every=7"),
    "short": ("strategy=ddp", PROFILED, "train.max_steps=3"),
    "straggler": ("strategy=ddp", PROFILED, "train.max_steps=6", *SLEEPING),
    "zero2": ("zero_stage=2", PROFILED),
    "zero3": ("zero_stage=3", PROFILED),
}
MORE_DEEPSPEED = {
    "zero0": ("zero_stage=0", PROFILED),
    "zero1": ("zero_stage=1", PROFILED),
    "hf_zero3": ("engine=hf_trainer", "zero_stage=3", PROFILED),
}


def train_cells(folder: Path, cells: dict[str, tuple[str, ...]]) -> Path:
    for name, overrides in cells.items():
        (folder / name).mkdir()
        make_spec(*COMMON, "cluster.workers_per_node=2", *overrides).write(folder / name)
    run_ranks(2, MANY_RUNS, str(folder))
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_cells(tmp_path_factory.mktemp("two"), CELLS)


def communication(run_dir: Path) -> dict[str, Any]:
    found = RunRecord.read(run_dir / "record.json").metrics.communication
    assert found is not None
    return found


def assert_measured(run_dir: Path, *kinds: str) -> None:
    found = communication(run_dir)
    assert 0 < found["share"] < 1
    assert set(found["by_collective"]) == set(kinds)
    assert all(0 < seconds < found["step_s"] for seconds in found["by_collective"].values())
    largest = max(rank["share"] for rank in found["ranks"])  # the other values are means over both ranks
    assert max(found["by_collective"].values()) <= largest * found["step_s"] * 1.000001
    assert found["exposed_share"] is None, "only known on a GPU"
    assert (found["profiled_steps"], found["first_step"], found["note"]) == (3, 13, None)
    assert found["share"] == pytest.approx(sum(rank["share"] for rank in found["ranks"]) / 2)
    trace = json.loads(gzip.decompress((run_dir / PROFILE_TRACE).read_bytes()))
    assert sum(str(one.get("name")).startswith("ProfilerStep#") for one in trace["traceEvents"]) == 3
    assert_broken_down(run_dir)


def assert_broken_down(run_dir: Path) -> list[dict[str, Any]]:
    """Check that the parts of each rank add up to its step, and that the picture has the profiled steps."""
    found = RunRecord.read(run_dir / "record.json").metrics.step_breakdown
    assert found is not None
    for rank, entry in enumerate(found):
        assert entry["rank"] == rank
        assert sum(entry[f"{name}_ms"] or 0.0 for name in PARTS) == pytest.approx(entry["step_ms"], rel=1e-6)
        assert entry["launch_idle_ms"] is None, "only known on a GPU"
        assert all(entry[f"{name}_ms"] > 0 for name in ("matmul", "other_kernels", "optimizer", "data_wait", "host"))
        assert entry["exposed_communication_ms"] + entry["hidden_communication_ms"] > 0
    lanes = read_profile_summary(run_dir)
    assert lanes is not None
    assert [rank["step_ms"] for rank in lanes["ranks"]] == [entry["profiled_step_ms"] for entry in found]
    assert {"matmul", "all_reduce", "data", "forward", "backward", "optimizer"} <= set(lanes["labels"])
    return found


def of_profiled_step(entry: dict[str, Any], name: str) -> float:
    """Return a part of the profiled step. The parts of an entry add up to the median step, which may be shorter."""
    return float(entry[name] * entry["profiled_step_ms"] / entry["step_ms"])


@pytest.mark.parametrize("name", ["ddp", "full_shard", "hf_full_shard"])
@pytest.mark.slow
def test_collectives_of_gloo_are_measured_by_kind(runs: Path, name: str) -> None:
    assert_measured(runs / name, "all_reduce", *(["all_gather", "reduce_scatter"] if "shard" in name else []))


@pytest.mark.parametrize("name", ["ddp", "full_shard", "shard_grad_op", "hf_full_shard"])
@pytest.mark.slow
def test_profiling_does_not_change_the_training(runs: Path, name: str) -> None:
    plain, profiled = (lines(runs / folder / "metrics.jsonl") for folder in ("plain", name))
    assert [line["step"] for line in profiled] == list(range(1, 17))
    assert [line["loss"] for line in profiled] == pytest.approx([line["loss"] for line in plain], rel=1e-5)
    before, after = (RunRecord.read(runs / folder / "record.json").metrics for folder in ("plain", name))
    assert after.eval_losses == pytest.approx(before.eval_losses, rel=1e-5)
    assert before.communication is None
    assert not (runs / "plain" / PROFILE_TRACE).exists()


@pytest.mark.parametrize(("name", "gathers"), [("full_shard", 2 + 2 + 1), ("shard_grad_op", 3)])
@pytest.mark.slow
def test_number_of_all_gathers(runs: Path, name: str, gathers: int) -> None:
    """Two blocks and the root: each block in both passes, or all three once for both micro-batches."""
    trace = json.loads(gzip.decompress((runs / name / PROFILE_TRACE).read_bytes()))
    assert sum(one.get("name") == "gloo:all_gather" for one in trace["traceEvents"]) == 3 * gathers


@pytest.mark.slow
def test_profiled_steps_count_in_no_other_metric(runs: Path) -> None:
    """Of 16 steps with 8 samples each, the first is the warm-up and the last four are profiled."""
    phases = [event.phase for event in read_phase_events(runs / "ddp" / "events.jsonl")]
    assert phases == ["setup", "warmup", "train", "eval", "train", "profile", "eval", "profile"]
    measured = {}
    for name in ("plain", "ddp"):
        events = lines(runs / name / "events.jsonl")
        (measured[name],) = (line["measured_samples"] for line in events if "measured_samples" in line)
    assert measured == {"plain": 15 * 8, "ddp": 11 * 8}
    metrics = RunRecord.read(runs / "ddp" / "record.json").metrics
    times = [line["step_time_s"] for line in lines(runs / "ddp" / "metrics.jsonl")[1:12]]
    assert metrics.step_time_s is not None
    assert metrics.step_time_s["max"] == pytest.approx(max(times))
    assert metrics.train_steps_per_second == pytest.approx(11 / sum(times))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("interrupted", "a checkpoint was written between the profiled steps"),
        ("short", "too few steps to measure speed and to profile (train.profile_steps=3): train more steps"),
    ],
)
@pytest.mark.slow
def test_missing_measurement_has_a_reason(runs: Path, name: str, reason: str) -> None:
    found = communication(runs / name)
    assert found["share"] is None
    assert found["ranks"] == []
    assert reason in found["note"]
    record = RunRecord.read(runs / name / "record.json")
    assert record.metrics.train_samples_per_second is not None
    record.run.duration_s = 1.0  # many_runs.py runs all cells in the same processes, without a duration for each
    assert f"not measured: {reason}" in dict(summary_lines(record))["communication"]


@pytest.mark.slow
def test_waiting_for_a_slow_rank(runs: Path) -> None:
    fast, slow = assert_broken_down(runs / "straggler")
    assert of_profiled_step(slow, "host_ms") > 950 * LONG_SLEEP_S
    waiting_ms = of_profiled_step(fast, "waiting_ms")
    assert waiting_ms > 500 * LONG_SLEEP_S, "half of the sleep, because the rank itself may be slow too"
    assert waiting_ms > of_profiled_step(slow, "waiting_ms")
    for entry in (fast, slow):
        assert entry["waiting_ms"] + entry["exposed_communication_ms"] < entry["step_ms"]


@pytest.mark.slow
def test_collectives_of_deepspeed_are_measured(runs: Path) -> None:
    assert_measured(runs / "zero2", "all_reduce", "all_gather")
    assert_measured(runs / "zero3", "all_reduce", "all_gather", "reduce_scatter")


@pytest.mark.release
def test_collectives_of_other_stages_and_the_trainer_are_measured(tmp_path: Path) -> None:
    folder = train_cells(tmp_path, MORE_DEEPSPEED)
    assert_measured(folder / "zero0", "all_reduce")
    assert_measured(folder / "zero1", "all_reduce", "all_gather")
    assert_measured(folder / "hf_zero3", "all_reduce", "all_gather", "reduce_scatter")
