"""The predicted memory of compiled regions: what leaves a kernel, and what is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, fx

from distexp.models import transforms
from distexp.plan.replay import replay
from distexp.plan.trace.compiled import GraphMemory, traced_compilation
from distexp.plan.trace.recorder import GPU, StorageRecorder
from distexp.plan.trace.tracing import trace_step
from distexp.system.torch_internals.tensors import FakeMode, make_fake_mode
from distexp.system.units import MIB
from tests.helpers.runs import resolve_cell

SIZE = 64 * 64 * 4
"""Bytes of the matrices in these tests."""


@contextmanager
def compiling() -> Iterator[tuple[FakeMode, StorageRecorder]]:
    fake_mode = make_fake_mode()
    recorder = StorageRecorder(fake_mode)
    with traced_compilation(fake_mode, lambda: recorder), fake_mode, recorder.recording():
        yield fake_mode, recorder


def alive(recorder: StorageRecorder) -> int:
    return sum(change.block.size * (-1 if change.is_free else 1) for change in recorder.changes)


def allocated(recorder: StorageRecorder) -> int:
    return sum(change.block.size for change in recorder.changes if not change.is_free)


def test_fused_operations_allocate_their_result_only() -> None:
    with compiling() as (_, recorder):
        run = transforms.compile_forward(lambda x: ((x + 1).cos() * 2).sin())
        x = torch.empty(64, 64, device=GPU)
        recorder.start()
        recorder.changes.clear()
        y = run(x)
        assert y.shape == (64, 64)
        assert y.device == GPU
        assert allocated(recorder) == SIZE


def test_the_inputs_and_results_of_matrix_products_are_in_memory() -> None:
    with compiling() as (_, recorder):
        run = transforms.compile_forward(lambda x, w: ((x + 1) @ w).relu())
        x, w = torch.empty(64, 64, device=GPU), torch.empty(64, 64, device=GPU)
        recorder.changes.clear()
        y = run(x, w)
        assert allocated(recorder) == 3 * SIZE  # x + 1, the product, and its relu
        assert alive(recorder) == SIZE
        del y
        assert alive(recorder) == 0


def test_pointwise_results_are_recomputed_in_the_backward_pass() -> None:
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).sin().cos().sin() @ w).sum()

    with compiling() as (_, recorder):
        run = transforms.compile_forward(forward)
        x, w = torch.empty(64, 64, device=GPU), torch.empty(64, 64, device=GPU, requires_grad=True)
        recorder.changes.clear()
        loss = run(x, w)
        kept = alive(recorder)
        assert SIZE < kept <= 2 * SIZE + 64  # the first product, and the input of the second
        loss.backward()
        del loss
        assert alive(recorder) == SIZE  # the gradient of w
        assert w.grad is not None


def test_a_compiled_loss_has_no_logits_in_fp32() -> None:
    config = resolve_cell("model=bloom_tiny", "train.compile=blocks", "cluster.device=cpu")
    with compiling() as (_, recorder):
        entropy = transforms.training_entropy(config)
        logits = torch.empty(64, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.empty(64, device=GPU, dtype=torch.int64)
        recorder.changes.clear()
        entropy(logits, labels).backward()
        assert logits.grad is not None
        # The gradient in bf16, and few numbers for each row, in place of three matrices in fp32.
        assert allocated(recorder) <= SIZE // 2 + 8 * 64 * 4


def test_a_model_that_skips_paths_at_random_is_traced() -> None:
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w) * torch.empty(64, 1, device=GPU).bernoulli_(0.5) + torch.rand(64, 64, device=GPU)).sum()

    with compiling():
        w = torch.empty(64, 64, device=GPU, requires_grad=True)
        transforms.compile_forward(forward)(torch.empty(64, 64, device=GPU), w).backward()
        assert w.grad is not None


def test_compilation_of_runs_is_restored() -> None:
    original = transforms.compile_forward
    with compiling():
        assert transforms.compile_forward is not original
    assert transforms.compile_forward is original


def test_a_kernel_writes_into_a_buffer_that_it_reads_for_the_last_time() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    result = graph.call_function(torch.ops.aten.relu.default, (product,))
    graph.output((result,))
    fake_mode = make_fake_mode()
    recorder = StorageRecorder(fake_mode)
    with fake_mode:
        value = torch.empty(64, 64, device=GPU)
        for node in (x, product, result):
            node.meta["val"] = value
        outputs = GraphMemory(fx.GraphModule({}, graph), lambda: recorder)([value])
    sizes = [change.is_free for change in recorder.changes]
    assert sizes == [False, True, False]  # the result takes the place of the product
    assert [output.shape for output in outputs] == [value.shape]


@pytest.mark.parametrize("model", ["gpt_tiny", pytest.param("bloom_tiny", marks=pytest.mark.release)])
def test_a_trace_with_flex_attention_leaves_no_masks_for_the_next_one(model: str) -> None:
    config = resolve_cell(f"model={model}", "dataset=synthetic", "strategy=single")
    config.model.attention = "flex"  # refused on CPUs
    first, second = (replay(trace_step(config).events).peak_allocated for _ in range(2))
    assert first == second


BLOOM = (
    *("model=bloom_560m", "model.init=random", "model.vocab_size=250880", "dataset=squad_sample", "precision=bf16"),
    *("dataset.max_length=512", "dataset.padding=max_length", "train.gradient_accumulation_steps=1"),
)
FUSED = ("strategy=single", "train.compile=model", "train.compute_weights=step", "fused update")
TARGETS_64 = ("train.logits=targets", "train.micro_batch_size=64")


COMPILED = [
    (("strategy=single", "train.compile=blocks", "train.micro_batch_size=16"), "eager", 28_166),
    ((*FUSED, "train.logits=targets", "train.micro_batch_size=16"), "flex", 14_076),
    (("zero_stage=2", "cluster.workers_per_node=2", "train.compile=blocks", *TARGETS_64), "flex", 29_917),
    (("strategy=single", "train.compile=model", "train.compute_weights=step", *TARGETS_64), "flex", 32_971),
    (("zero_stage=3", "offload=true", "cluster.workers_per_node=1", *TARGETS_64), "flex", 26_142),
]


@pytest.mark.parametrize(
    ("overrides", "attention", "measured"),
    [
        pytest.param(*case, marks=getattr(pytest.mark, "slow" if n == 0 else "release"))
        for n, case in enumerate(COMPILED)
    ],
)
def test_the_peak_of_compiled_models_is_that_of_gpus(overrides: tuple[str, ...], attention: str, measured: int) -> None:
    """Compare with torch's peak in MiB on H200s, the first on an H100 (torch 2.11, real SQuAD)."""
    config = resolve_cell(*BLOOM, *(each for each in overrides if each != "fused update"))
    if attention == "flex":
        config.model.attention = "flex"  # refused on CPUs
    config.train.fused_update = "fused update" in overrides  # also refused on CPUs
    predicted = replay(trace_step(config).events).peak_allocated / MIB
    assert abs(predicted / measured - 1) < 0.015, predicted
