"""Tests of the prediction of a step's memory, on models whose bytes can be computed by hand."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distexp.distributed.context import Context
from distexp.hardware.facts import cublas_workspace
from distexp.plan.estimate import make_estimate
from distexp.plan.replay import PARTS, PHASES, StepTrace, host_peak, repeated_blocks
from distexp.plan.trace import compiled
from distexp.plan.trace.compiled import WorkCounter
from distexp.plan.trace.cuda_semantics import CudaFunctions, cuda_autocast
from distexp.plan.trace.traced_run import largest_batch
from distexp.plan.trace.tracing import trace_step
from distexp.system.units import MIB
from distexp.training.build import load_data
from tests.helpers.runs import resolve_cell

TINY = (
    *("model=gpt_tiny", "model.vocab_size=96", "model.num_layers=1", "dataset=synthetic", "dataset.max_length=16"),
    *("train.micro_batch_size=2", "train.gradient_accumulation_steps=1"),
)
HIDDEN, VOCABULARY, TENSORS = 64, 96, 17
PARAMETERS = 2 * VOCABULARY * HIDDEN + 128 * HIDDEN + 2 * HIDDEN + (4 * 64 * 65 + 65 * 256 + 257 * 64 + 4 * 64)


@cache
def traced(*overrides: str) -> StepTrace:
    return trace_step(resolve_cell(*TINY, *overrides))


def sizes(trace: StepTrace, phase: str, device: str = "gpu") -> Counter[str]:
    """Return the bytes of each part that are in memory after a phase, without the workspaces of cuBLAS."""
    total: Counter[str] = Counter()
    for event in trace.events:
        if PHASES.index(event.phase) <= PHASES.index(phase) and event.device == device and event.block >= 0:
            total[event.part] += event.bytes
    return total


def test_states_of_one_worker_are_those_of_the_arithmetic() -> None:
    trace = traced("strategy=single")
    before, after = sizes(trace, "setup"), sizes(trace, "backward")
    assert before["parameters"] == 4 * PARAMETERS
    assert before["optimizer_states"] == 8 * PARAMETERS + 4 * TENSORS  # each tensor has a step counter
    assert before["gradients"] == 0
    assert after["gradients"] == 4 * PARAMETERS
    assert before["batch"] == 3 * 2 * 16 * 8  # ids, mask and labels
    assert all(event.part in PARTS and event.phase in PHASES for event in trace.events)
    assert [event.bytes for event in trace.events if event.block < 0] == [cublas_workspace(None)] * 2


def test_workspaces_of_older_gpus_are_smaller() -> None:
    events = trace_step(resolve_cell(*TINY, "strategy=single", "plan.gpu=a100-80gb")).history
    workspace = cublas_workspace("a100-80gb")
    assert [(event.bytes, event.phase) for event in events if event.block < 0] == [
        (workspace, "forward"), (workspace, "backward"),
    ]  # fmt: skip


def test_history_is_all_before_the_step() -> None:
    trace = traced("sharding=full_shard", "cluster.workers_per_node=2")
    alive: dict[int, tuple[int, str]] = {}
    for event in trace.history:
        if event.bytes > 0:
            alive[event.block] = event.bytes, event.part
        else:
            assert alive.pop(event.block)[0] == -event.bytes
    setup = {event.block: (event.bytes, event.part) for event in trace.events if event.phase == "setup"}
    assert alive == setup
    assert {event.phase for event in trace.history} == set(PHASES) - {"evaluation"}
    assert repeated_blocks([event for event in trace.events if event.phase != "setup"])


def test_every_free_has_the_size_of_its_allocation() -> None:
    alive: dict[int, int] = {}
    for event in traced("strategy=single").events:
        if event.bytes > 0:
            assert event.block not in alive
            alive[event.block] = event.bytes
        else:
            assert alive.pop(event.block) == -event.bytes


def test_logits_have_the_vocabulary_as_last_axis() -> None:
    logits = 4 * 2 * 16 * VOCABULARY
    born = [event.bytes for event in traced("strategy=single").events if event.part == "logits" and event.bytes > 0]
    assert set(born) == {logits}


def test_checkpointed_blocks_keep_their_inputs_only() -> None:
    plain, checkpointed = (
        sizes(traced("strategy=single", *extra), "forward")["activations"]
        for extra in ((), ("train.activation_checkpointing=true",))
    )
    block_input = 4 * 2 * 16 * HIDDEN
    assert plain - checkpointed > 10 * block_input


def test_two_workers_of_fsdp_hold_half_of_the_states_each() -> None:
    trace = traced("sharding=full_shard", "cluster.workers_per_node=2")
    before = sizes(trace, "setup")
    assert before["parameters"] == pytest.approx(4 * PARAMETERS / 2, rel=0.01)
    assert before["optimizer_states"] == pytest.approx(8 * PARAMETERS / 2, rel=0.01)
    assert sizes(trace, "backward")["gradients"] == pytest.approx(4 * PARAMETERS / 2, rel=0.01)
    assert all(event.stream == "" for event in trace.events if event.part in ("activations", "logits"))
    gathered = [event for event in trace.events if event.part == "communication"]
    assert len({event.stream for event in gathered}) > 1  # some buffers are those of FSDP's own streams
    assert sum(event.bytes for event in gathered if event.bytes > 0) > 4 * PARAMETERS
    assert host_peak(trace.events) < 0.01 * 4 * PARAMETERS  # the batch, and not what DTensor computes shapes with


def test_offloaded_states_are_on_the_host() -> None:
    trace = traced("sharding=full_shard", "cluster.workers_per_node=2", "offload=true")
    on_gpu, on_host = sizes(trace, "backward"), sizes(trace, "backward", "host")
    assert on_gpu["parameters"] == on_gpu["optimizer_states"] == on_gpu["gradients"] == 0
    assert on_host["parameters"] == pytest.approx(4 * PARAMETERS / 2, rel=0.01)
    assert on_host["gradients"] == pytest.approx(4 * PARAMETERS / 2, rel=0.01)
    assert on_host["optimizer_states"] == pytest.approx(8 * PARAMETERS / 2, rel=0.01)


def test_gradients_of_ddp_are_views_of_its_buckets_unless_refused() -> None:
    two = ("strategy=ddp", "cluster.workers_per_node=2")
    views, copies = traced(*two), traced(*two, "ddp.gradient_as_bucket_view=false")
    assert sizes(views, "setup")["gradients"] + sizes(views, "setup")["communication"] == 4 * PARAMETERS
    assert sum(sizes(copies, "backward").values()) - sum(sizes(views, "backward").values()) == 4 * PARAMETERS


def test_ddp_sends_its_weights_and_starts_with_one_bucket_that_the_second_step_frees() -> None:
    trace = traced("strategy=ddp", "cluster.workers_per_node=2", "ddp.bucket_cap_mb=0.1")
    flat = [(event.bytes > 0, event.phase) for event in trace.history if abs(event.bytes) == 4 * PARAMETERS]
    sent, bucket = [(True, "setup"), (False, "setup")], [(True, "setup"), (False, "forward")]
    assert flat == [*sent, *bucket]
    step = [event for event in trace.events if event.phase != "setup"]
    assert repeated_blocks(step) is not None, "the recorded step frees no bucket"


def test_the_work_of_a_step_is_that_of_the_formulas_and_of_all_micro_batches() -> None:
    one = traced("strategy=single").work
    assert one is not None
    tokens = 2 * 16
    products = 6 * tokens * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * 4 * HIDDEN + VOCABULARY * HIDDEN)
    assert products < one.flops < 1.1 * products  # the rest is attention
    six = trace_step(resolve_cell(*TINY, "strategy=single", "train.gradient_accumulation_steps=6")).work
    assert six is not None
    assert six.flops == 6 * one.flops
    assert six.optimizer_operations == one.optimizer_operations
    repeated = (six.operations - six.optimizer_operations) - 6 * (one.operations - one.optimizer_operations)
    assert 0 < repeated <= 6 * TENSORS  # gradients are added up
    assert 5 * one.written < six.written < 7 * one.written


def test_ddp_launches_the_kernels_of_single_and_a_copy_of_each_gradient() -> None:
    alone, shared = traced("strategy=single").work, traced("strategy=ddp", "cluster.workers_per_node=2").work
    assert alone is not None
    assert shared is not None
    assert TENSORS <= shared.operations - alone.operations <= 1.5 * TENSORS


def test_the_largest_micro_batch_has_the_most_targets() -> None:
    config = resolve_cell(
        *(
            "model=gpt_tiny",
            "dataset=squad_sample",
            "train.logits=targets",
            "train.micro_batch_size=4",
            "strategy=single",
        )
    )
    data = load_data(config, Context(0, 1, 0, 1, 1, torch.device("cpu"), Path()))
    largest = largest_batch(config, data)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(config.train.seed)).tolist()
    first = data.collate([data.train[index] for index in order[:4]])
    assert largest.num_targets >= first.num_targets
    assert largest.num_samples == 4


def test_images_in_gpu_memory_are_part_of_the_peak() -> None:
    small = ("model=resnet_tiny", "model.depths=[1,1,1,1]", "strategy=single", "train.micro_batch_size=2")
    size = ("dataset.train_size=24", "dataset.eval_size=8", "command=plan")
    cpu, gpu = (trace_step(resolve_cell(*small, *size, f"dataset.cache={place}")) for place in ("cpu", "gpu"))
    assert sizes(gpu, "setup")["batch"] - sizes(cpu, "setup")["batch"] == (24 + 8) * 3 * 32 * 32
    assert gpu.notes == ("dataset.cache=gpu: the images count as temporaries",)


def test_gradients_of_graphs_live_as_long_as_the_model() -> None:
    trace = traced("strategy=single", "train.compile=graphs", "command=plan")
    assert sizes(trace, "setup")["gradients"] == sizes(trace, "optimizer")["gradients"] == 4 * PARAMETERS
    assert trace.notes[0].startswith("train.compile=graphs: predicted without graphs")


def test_evaluation_with_larger_batches_is_traced() -> None:
    found = {
        size: trace_step(resolve_cell(*TINY, "strategy=single", f"train.eval_batch_size={size}")) for size in (2, 8)
    }
    small, large = (max(event.bytes for event in found[size].evaluation if event.part == "logits") for size in (2, 8))
    assert (small, large) == (4 * 2 * 16 * VOCABULARY, 4 * 8 * 16 * VOCABULARY)
    assert found[2].events == found[8].events
    assert {event.phase for event in found[8].evaluation} == {"evaluation"}


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        ("build", r"decisions from values \(.*masked_select"),
        ("build_deciding", r"at helpers/value_dependent_model\.py:\d+: .* for example by \.item\(\)"),
        ("build_with_operator", r"its operator distexp_tests\.positive_mean\.default .*torch\.library\.register_fake"),
    ],
)
def test_a_model_that_needs_values_is_estimated_by_arithmetic(build: str, reason: str) -> None:
    config = resolve_cell("model=resnet_tiny", "dataset=synthetic", "strategy=single")
    config.model._target_ = f"tests.helpers.value_dependent_model.{build}"
    found = make_estimate(config)
    assert not found.traced
    assert re.search(reason, found.notes[0])
    assert found.notes[1].startswith("estimate by arithmetic")
    assert found.parts["optimizer_states"] == pytest.approx(2 * 4 * 2 * 200 / MIB, abs=0.1), "200 classes, one input"


def test_autocast_uses_the_lists_of_cuda() -> None:
    values = torch.ones(2, 4, dtype=torch.bfloat16)

    def dtypes() -> list[torch.dtype]:
        with torch.autocast("cpu", torch.bfloat16):
            return [
                torch.nn.functional.layer_norm(values, (4,)).dtype,
                torch.softmax(values, dim=-1).dtype,
                values.sum().dtype,
                torch.mm(values.float(), values.float().t()).dtype,
            ]

    with cuda_autocast():
        assert dtypes() == [torch.float32] * 3 + [torch.bfloat16]
    assert dtypes()[0] == torch.bfloat16


@pytest.mark.parametrize("shape", [(6, 8), (3, 6, 8), (2, 1, 3, 6, 8)])
def test_attention_without_an_axis_of_heads_needs_no_fused_kernel(shape: tuple[int, ...]) -> None:
    tokens = torch.randn(shape)
    expected = torch.nn.functional.scaled_dot_product_attention(tokens, tokens, tokens, is_causal=True)
    with CudaFunctions(lambda: None):
        found = torch.nn.functional.scaled_dot_product_attention(tokens, tokens, tokens, is_causal=True)
    assert torch.equal(found, expected)


BATCH_MASK, LEARNED_MASK = (16, 1, 512, 512), (1, 12, 512, 512)


@pytest.mark.parametrize(
    ("kept", "dtype", "options"),
    [
        (48.4, "bf16", {"is_causal": True}),
        (56.4, "bf16", {"mask": BATCH_MASK, "dropout_p": 0.1}),
        (54.4, "bf16", {"mask": LEARNED_MASK}),
        (32.4, "bf16", {"keys": 4, "is_causal": True}),
        (40.4, "bf16", {"keys": 4, "mask": BATCH_MASK}),
        (276.0, "bf16", {"keys": 4, "mask": LEARNED_MASK}),
        (120.4, "bf16", {"size": 192, "value_size": 128, "is_causal": True}),
        (80.4, "bf16", {"keys": 4, "size": 192, "value_size": 128, "is_causal": True}),
        (96.1, "bf16", {"batch": 4, "size": 512, "value_size": 512, "is_causal": True}),
        (216.0, "bf16", {"keys": 4, "batch": 4, "size": 512, "value_size": 512, "is_causal": True}),
        (24.4, "fp32", {"mask": LEARNED_MASK, "dropout_p": 0.1}),
        (288.0, "fp32", {"keys": 4, "is_causal": True}),
        (528.0, "fp32", {"keys": 4, "is_causal": True, "dropout_p": 0.1}),
        (288.0, "fp32", {"keys": 4, "mask": BATCH_MASK}),
    ],
)
def test_attention_keeps_what_it_kept_on_an_h200(kept: float, dtype: str, options: dict[str, Any]) -> None:
    """MiB of an H200 with torch 2.11, by ``torch.cuda.memory_allocated`` before and after the call.

    Without the casts that autocast caches, and the workspace of cuBLAS, which were 40 MiB or less.
    """
    options = dict(options)
    size, value_size = options.pop("size", 64), options.pop("value_size", 64)
    keys, batch, mask = options.pop("keys", 12), options.pop("batch", 16), options.pop("mask", None)
    leaves = [
        torch.empty(batch, heads, 512, width, device="meta", requires_grad=True)
        for heads, width in ((12, size), (keys, size), (keys, value_size))
    ]
    if mask is not None:
        is_learned = mask == LEARNED_MASK
        leaves.append(
            torch.empty(mask, device="meta", requires_grad=is_learned, dtype=None if is_learned else torch.bool)
        )
    saved: dict[Any, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    query, key, value, *masks = leaves
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, keep)
    with CudaFunctions(lambda: None), hooks, torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        keep(
            torch.nn.functional.scaled_dot_product_attention(
                query, key, value, *masks, enable_gqa=keys != 12, **options
            )
        )
    for leaf in leaves:
        saved.pop(leaf.untyped_storage()._cdata, None)
    assert sum(saved.values()) / MIB == pytest.approx(kept, abs=1)


@pytest.mark.parametrize("has_one_key", [False, True])
def test_attention_with_a_transposed_mask_or_one_head_of_keys_has_no_fused_kernel(has_one_key: bool) -> None:
    """As T5 of transformers 5.17, whose position biases are transposed, and Falcon without autocast."""
    tokens = torch.randn(2, 4, 6, 8)
    bias = torch.randn(1, 6, 6, 4).permute(0, 3, 1, 2)
    keys, masks = (tokens[:, :1], None) if has_one_key else (tokens, bias)
    called = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    with Names(), CudaFunctions(lambda: None):
        found = torch.nn.functional.scaled_dot_product_attention(tokens, keys, keys, masks)
    keys = keys.expand(tokens.shape)
    expected = torch.nn.functional.scaled_dot_product_attention(tokens, keys, keys, masks)
    assert torch.allclose(found, expected, atol=1e-5)
    assert "aten._safe_softmax.default" in called


@pytest.mark.parametrize("suffix", ["", "_backward"])
def test_keys_that_several_heads_share_are_counted_by_each_release(
    suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packet = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{suffix}")
    formula = compiled.flop_registry[packet]

    def before_torch_2_13(*arguments: Any, **options: Any) -> int:
        shapes = [tuple(getattr(each, "shape", each)) for each in arguments]
        assert len({shape[1] for shape in shapes}) == 1, "all need equally many heads"
        return int(formula(*arguments, **options))

    monkeypatch.setitem(compiled.flop_registry, packet, before_torch_2_13)
    counts = []
    for heads in (8, 2):
        queries, keys = torch.empty(2, 8, 16, 4), torch.empty(2, heads, 16, 4)
        counter = WorkCounter()
        gradient = [queries] if suffix else []
        counter.add("forward", packet.default, (*gradient, queries, keys, keys), {}, [queries])
        counts.append(counter.flops["forward"])
    assert counts[0] == counts[1] > 0
