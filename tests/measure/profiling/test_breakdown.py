"""Tests of the parts of a step: hand-written traces with hand-computed answers, and real trainings with gloo."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distexp.measure.profiling.breakdown import durations_of, split_collectives, split_step, step_windows
from distexp.measure.profiling.chrome_trace import (
    Trace,
    TraceCollective,
    kernel_category,
    nccl_kind,
    operator_category,
    read_trace,
)
from distexp.measure.profiling.intervals import Interval
from distexp.measure.profiling.step_segments import MAX_SPANS, lanes_of
from distexp.runs.metrics import PARTS
from distexp.runs.step_files import read_profile_summary, write_profile_summary
from distexp.system.torch_internals.collectives import DATA, OPTIMIZER, activate_annotations, annotate, annotate_items
from tests.helpers.gpu_traces import ADAM, ALL_REDUCE, GEMM, POINTWISE, GPUTrace, event


def gpu_step() -> GPUTrace:
    """Return one step of 20 ms, of which each part is known."""
    return (
        GPUTrace()
        .step(1, 0, 20)
        .annotation(DATA, 0, 2)
        .kernel(GEMM, 2.5, 6, launch=2)  # the GPU is idle from 2.0 to 2.5, because the launch was late
        .kernel(POINTWISE, 6.1, 7, launch=3)  # it was in the queue: the GPU needs 0.1 ms to start it
        .kernel(ALL_REDUCE, 7, 12, launch=3.3)  # the other rank starts 3 ms later
        .kernel("Memcpy HtoD (Pinned -> Device)", 7, 7.5, launch=3.2, category="gpu_memcpy")
        .kernel(GEMM, 9, 11, launch=3.4)  # hides 1 ms of the wait and 1 ms of the transfer
        .annotation(OPTIMIZER, 12, 17)
        .annotation("Optimizer.step#AdamW.step", 12.1, 16)
        .kernel(ADAM, 12.8, 15, launch=12.5)
    )


ANSWER = {
    "data_wait": 2.0,
    "launch_idle": 0.5 + 0.8,
    "matmul": 3.5 + 2.0,
    "other_kernels": 0.1 + 0.9,
    "waiting": 2.0,
    "exposed_communication": 1.0,
    "optimizer": 2.2 + 2.0,  # the CPU works on it until 17
    "host": 3.0,
}


def breakdown(trace: Trace, *others: Trace, step: int = 0) -> dict[str, Any]:
    """Return the parts of a step of a trace; the other traces are those of the other ranks."""
    ranks = [durations_of(trace_of_rank.collectives) for trace_of_rank in (trace, *others)]
    collectives = split_collectives(trace.collectives, ranks)
    return split_step(trace, step_windows(trace)[step], collectives).to_json(0, on_gpu=trace.on_gpu)


def assert_parts(found: dict[str, Any], **expected: float) -> None:
    parts = {name: found[f"{name}_ms"] or 0.0 for name in PARTS}
    assert parts == pytest.approx({name: expected.get(name, 0.0) for name in PARTS}, abs=1e-5)
    assert sum(parts.values()) == pytest.approx(found["step_ms"], rel=1e-9)


def test_parts_of_a_step_on_a_gpu(tmp_path: Path) -> None:
    slow = GPUTrace().step(1, 0, 20).kernel(ALL_REDUCE, 10, 12, launch=9)
    one, other = (
        read_trace(trace.write(tmp_path / f"{rank}.json"), on_gpu=True) for rank, trace in enumerate((gpu_step(), slow))
    )
    found = breakdown(one, other)
    assert_parts(found, **ANSWER)
    assert (found["step_ms"], found["hidden_communication_ms"]) == pytest.approx((20, 2))
    assert found["launches"] == 4, "without copies and collectives"
    assert_parts(breakdown(one), **ANSWER | {"waiting": 0, "exposed_communication": 3.0})
    late = breakdown(other, one)
    assert late["waiting_ms"] == 0, "the last rank waits for no other"
    assert late["exposed_communication_ms"] == pytest.approx(2)


def test_steps_on_a_gpu_end_with_their_last_kernel(tmp_path: Path) -> None:
    """The CPU is ahead: it finishes the first step at 10, and the GPU at 16."""
    trace = (
        GPUTrace().step(1, 0, 10).step(2, 10, 30)
        .kernel(GEMM, 1, 16, launch=0)
        .kernel(POINTWISE, 16, 20, launch=9.9, stream=8)
        .kernel(ALL_REDUCE, 21, 25, launch=11)
        .kernel(GEMM, 25, 30, launch=12)
    )  # fmt: skip
    read = read_trace(trace.write(tmp_path / "trace.json"), on_gpu=True)
    start, end = read.window
    (first, second) = step_windows(read)
    assert (first[0], second[1]) == (start, end)
    assert first[1] == second[0] == pytest.approx(start + 0.020)
    assert_parts(breakdown(read), host=1, matmul=15, other_kernels=4)
    assert_parts(breakdown(read, step=1), other_kernels=1, exposed_communication=4, matmul=5)


def test_kernels_of_a_cuda_graph_have_one_launch(tmp_path: Path) -> None:
    """Gaps between kernels of one launch are no idle time of the CPU."""
    trace = GPUTrace().step(1, 0, 5)
    trace.events += [
        event("cuda_runtime", "cudaGraphLaunch", 0, 0.2, correlation=9),
        *(event("kernel", GEMM, begin, begin + 1, 7, correlation=9) for begin in (0.5, 1.6, 2.7)),
    ]
    found = breakdown(read_trace(trace.write(tmp_path / "trace.json"), on_gpu=True))
    assert_parts(found, launch_idle=0.5, matmul=3.0, other_kernels=0.2, host=1.3)
    assert found["launches"] == 1


def test_collectives_of_gloo_have_the_kind_that_was_called(tmp_path: Path) -> None:
    """Gloo names its own way to execute them, and another thread starts them."""
    trace = GPUTrace().step(1, 0, 20)
    called = ["_allgather_base_", "_reduce_scatter_base_", "allreduce_", "_reduce_scatter_base_"]
    executed = ["all_gather", "all_reduce", "all_reduce", "all_reduce"]
    trace.events += [event("cpu_op", f"c10d::{name}", begin, begin + 0.5) for begin, name in enumerate(called, 1)]
    trace.events += [
        event("user_annotation", f"gloo:{name}", begin, begin + 1, thread=2) for begin, name in enumerate(executed, 4)
    ]
    found = read_trace(trace.write(tmp_path / "trace.json"), on_gpu=False).collectives
    assert [one.kind for one in found] == ["all_gather", "reduce_scatter", "all_reduce", "reduce_scatter"]


def test_parts_of_a_step_on_a_cpu(tmp_path: Path) -> None:
    """Only operators of the training thread compute. The thread waits in autograd's hooks for collectives."""
    trace = GPUTrace().step(1, 0, 20).annotation(DATA, 0, 2).annotation(OPTIMIZER, 15, 18)
    trace.events += [
        event("cpu_op", "aten::to", 0.5, 1.5),
        event("cpu_op", "aten::linear", 2, 6),
        event("cpu_op", "aten::addmm", 3, 6),
        event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 6, 14),
        event("cpu_op", "c10d::allreduce_", 7, 7.5),
        event("user_annotation", "gloo:all_reduce", 7, 13, thread=2),
        event("cpu_op", "aten::copy_", 7, 13, thread=2),
        event("cpu_op", "aten::mm", 8, 9),
        event("cpu_op", "aten::_foreach_add_", 16, 17),
    ]
    read = read_trace(trace.write(tmp_path / "trace.json"), on_gpu=False)
    other = replace(read, collectives=[TraceCollective((1.0, 1.002), None, "all_reduce", "")])
    found = breakdown(read, other)
    rest = {"data_wait": 2, "matmul": 3 + 1, "other_kernels": 1, "optimizer": 3, "host": 1 + 1 + 1 + 2}
    assert_parts(found, **rest, waiting=3, exposed_communication=2)
    assert found["hidden_communication_ms"] == pytest.approx(1)
    assert found["launch_idle_ms"] is None
    assert found["launches"] is None


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16>(Params)", "matmul"),
        ("ampere_sgemm_128x64_nn", "matmul"),
        (GEMM, "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>(cublasLt::cublasSplitKParams<float>)", "matmul"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)", "matmul"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention)", "matmul"),
        ("triton_tem_fused_flex_attention_1", "matmul"),
        ("void implicit_convolve_sgemm<float, 128, 5, 5>(int)", "matmul"),
        ("triton_poi_fused_addmm_gelu_convolution_0", "other kernel"),
        ("triton_red_fused__log_softmax_2", "other kernel"),
        ("void (anonymous namespace)::softmax_warp_forward<float, c10::BFloat16, 9>()", "other kernel"),
        (POINTWISE, "other kernel"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>()", "other kernel"),
        (ADAM, "other kernel"),
    ],
)
def test_categories_of_kernels(name: str, category: str) -> None:
    assert kernel_category(name) == category
    assert nccl_kind(name, {}) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (ALL_REDUCE, "all_reduce"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclSymkDevKernel_ReduceScatter_LD_sum_bf16(ncclSymkDevWorkArgs4K)", "reduce_scatter"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "other"),
    ],
)
def test_kinds_of_collectives(name: str, kind: str) -> None:
    assert nccl_kind(name, {}) == kind


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("aten::addmm", "matmul"),
        ("aten::convolution_backward", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "matmul"),
        ("aten::add_", "other kernel"),
        ("## Call CompiledFxGraph fswq2hezksylkrs32o2jeodue5ji ##", "other kernel"),
        ("torch::distributed::reducer::mul_out", "other kernel"),
        ("c10d::allreduce_", None),
        ("_c10d_functional::wait_tensor", None),
        ("autograd::engine::evaluate_function: AddmmBackward0", None),
        ("torch::autograd::AccumulateGrad", None),
        ("AddmmBackward0", None),
    ],
)
def test_categories_of_operators(name: str, category: str | None) -> None:
    assert operator_category(name) == category


def collectives(*times: Interval, kind: str = "all_reduce", group: str = "") -> list[TraceCollective]:
    return [TraceCollective(when, None, kind, group) for when in times]


def waits(own: list[TraceCollective], *others: list[TraceCollective]) -> list[float]:
    found = split_collectives(own, [durations_of(rank) for rank in (own, *others)])
    return [transfer.wait[1] - transfer.wait[0] for transfer in found]


def test_waiting_is_aligned_by_kind_and_group() -> None:
    """The clocks of the ranks differ. The second all-reduce of rank 0 waits 3, the one of rank 1 none."""
    own = [*collectives((0, 2), (10, 15)), *collectives((4, 6), kind="all_gather")]
    other = [*collectives((102, 106), (115, 117)), *collectives((107, 108), kind="all_gather")]
    assert waits(own, other) == [0, 1, 3]
    assert waits(other, own) == [2, 0, 0]
    pair = collectives((0, 9), group="[2, 3]")
    assert waits(own, other, pair) == [0, 1, 3], "a collective of other ranks"
    assert waits(collectives((0, 4), kind="send_recv"), collectives((0, 1), kind="send_recv")) == [0]


def test_waiting_is_unknown_if_the_ranks_have_different_collectives() -> None:
    assert waits(collectives((0, 5)), collectives((4, 5), (6, 7))) == [0]


def test_waiting_is_unknown_if_ranks_are_in_several_groups_of_gloo() -> None:
    """With NCCL the group of a collective is known."""
    own = [*collectives((0, 5)), *collectives((10, 12), group="[0, 1]")]
    other = [*collectives((4, 5)), *collectives((11, 12), group="[0, 1]")]
    known = [durations_of(rank, several_groups=True) for rank in (own, other)]
    assert [transfer.wait[1] - transfer.wait[0] for transfer in split_collectives(own, known)] == [0, 1]


def test_a_transfer_next_to_a_waiting_collective_is_no_waiting(tmp_path: Path) -> None:
    trace = GPUTrace().step(1, 0, 10).kernel(ALL_REDUCE, 0, 6, launch=0)
    trace.kernel(ALL_REDUCE.replace("AllReduce", "AllGather"), 2, 10, launch=0)
    read = read_trace(trace.write(tmp_path / "trace.json"), on_gpu=True)
    other = replace(read, collectives=[*collectives((0, 0.004)), *collectives((0, 0.001), kind="all_gather")])
    assert_parts(breakdown(read, other), waiting=2 + 3, exposed_communication=4 + 1)


def lanes(found: dict[str, Any]) -> dict[str, list[list[Any]]]:
    return {lane["name"]: lane["spans"] for lane in found["lanes"]}


def test_lanes_of_a_step(tmp_path: Path) -> None:
    slow = GPUTrace().step(1, 0, 20).kernel(ALL_REDUCE, 10, 12, launch=9)
    traces = [read_trace(rank.write(tmp_path / "trace.json"), on_gpu=True) for rank in (gpu_step(), slow)]
    transfers = split_collectives(traces[0].collectives, [durations_of(trace.collectives) for trace in traces])
    step = split_step(traces[0], step_windows(traces[0])[0], transfers)
    entry = lanes_of(traces[0], step, transfers, 3)
    assert (entry["rank"], entry["step_ms"]) == (3, pytest.approx(20))
    found = lanes(entry)
    assert found["communication"] == [[7, 10, "waiting"], [10, 12, "all_reduce"]]
    assert found["cpu"] == [[0, 2, "data"], [12, 17, "optimizer"]]
    kernels = [[2.5, 6, "matmul"], [6, 7, "other kernel"], [9, 11, "matmul"]]
    assert found["compute"] == [*kernels, [12.8, 17, "optimizer"]]
    write_profile_summary(tmp_path, [entry, entry], steps=3)
    content = read_profile_summary(tmp_path)
    assert content is not None
    assert (content["schema"], content["steps"], len(content["ranks"])) == (1, 3, 2)
    numbered = lanes(content["ranks"][1])["communication"]
    assert [content["labels"][label] for _, _, label in numbered] == ["waiting", "all_reduce"]
    (tmp_path / "profile" / "summary.json").write_text(json.dumps({"schema": 2}))
    assert read_profile_summary(tmp_path) is None


def test_lanes_have_few_spans(tmp_path: Path) -> None:
    """Of 4,000 kernels of two kinds, each fills half of the time of its pair."""
    trace = GPUTrace().step(1, 0, 4000)
    for begin in range(0, 4000, 2):
        trace.kernel(GEMM, begin, begin + 1.2, launch=0).kernel(POINTWISE, begin + 1.2, begin + 2, launch=0)
    read = read_trace(trace.write(tmp_path / "trace.json"), on_gpu=True)
    step = split_step(read, step_windows(read)[0], [])
    found = lanes(lanes_of(read, step, [], 0))["compute"]
    assert 1 <= len(found) <= MAX_SPANS
    assert {label for _, _, label in found} == {"matmul"}, "the longest of each cell"
    assert sum(end - begin for begin, end, _ in found) == pytest.approx(4000, rel=0.01)


def test_annotations_exist_only_while_the_profiler_runs() -> None:
    off = annotate(DATA)
    activate_annotations(active=True)
    try:
        on = annotate(DATA)
    finally:
        activate_annotations(active=False)
    assert "record_function" not in type(off).__name__
    assert "record_function" in type(on).__name__
    assert list(annotate_items(DATA, [1, 2])) == [1, 2]
