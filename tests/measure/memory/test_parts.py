"""Parts of a rank's memory, measured on the tensors of a small model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distexp.measure.memory.rank_memory import PartsWatch
from distexp.measure.memory.step_recording import SavedTensorCounter, storage_sizes
from distexp.measure.watcher import PROFILE, TRAIN, Step
from distexp.strategies.optimizer import ModelTensors, read_model_tensors
from distexp.system.units import MIB

WIDTH, ROWS = 64, 32
WEIGHTS = 4 * 2 * (WIDTH * WIDTH + WIDTH)  # bytes of two linear layers
UNMEASURED = Step(1, measured=False, next_measured=False)
ACTIVATION = 4 * ROWS * WIDTH  # bytes of the input or output of a layer


class Checkpointed(nn.Module):
    """Two layers that are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output of the layers."""
        output: torch.Tensor = checkpoint(self.layers, inputs, use_reentrant=False)
        return output


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH))


def run_step(model: nn.Module, watch: PartsWatch, optimizer: torch.optim.Optimizer, micro_batches: int = 1) -> None:
    for _ in range(micro_batches):
        watch.start_forward()
        model(torch.ones(ROWS, WIDTH, requires_grad=True)).sum().backward()
    watch.before_update()
    optimizer.step()
    optimizer.zero_grad()


def watched(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, compiled: bool = False, recording: Any = None
) -> PartsWatch:
    make = None if recording is None else lambda: recording
    watch = PartsWatch(1, counts_activations=not compiled, make_recording=make)
    watch.follow(model, lambda: read_model_tensors(model, optimizer))
    return watch


def test_parts_are_the_bytes_of_the_tensors() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    watch = watched(model, optimizer)
    run_step(model, watch, optimizer, micro_batches=3)
    watch.after_step(UNMEASURED)
    (summary,) = watch.entries()
    assert (summary["rank"], summary["phase"]) == (1, "train")
    assert summary["parameters_mib"] == summary["gradients_mib"] == WEIGHTS / MIB
    assert summary["optimizer_states_mib"] == pytest.approx(2 * WEIGHTS / MIB, rel=1e-3)  # and step counters
    # The input of each layer and the output of the sigmoid, which is the input of the second layer.
    assert summary["activations_mib"] == 2 * ACTIVATION / MIB


def read_again() -> ModelTensors:
    raise AssertionError("the tensors are read once more")


def test_later_steps_are_not_measured() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    watch = watched(model, optimizer)
    for _ in range(2):
        run_step(model, watch, optimizer)
        watch.after_step(UNMEASURED)
    first = watch.entries()
    watch.read = read_again
    watch.start_forward()
    model(torch.ones(1000, WIDTH)).sum().backward()
    watch.before_update()
    watch.after_step(UNMEASURED)
    assert watch.entries() == first


def test_recomputed_activations_do_not_count() -> None:
    counter, model = SavedTensorCounter(), Checkpointed()
    with counter.count(model):
        model(torch.ones(ROWS, WIDTH, requires_grad=True)).sum().backward()
    assert counter.peak_bytes == ACTIVATION


def test_counting_leaves_the_gradients_and_no_hooks() -> None:
    torch.manual_seed(0)
    model = make_model()
    inputs = torch.rand(ROWS, WIDTH)
    model(inputs).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with SavedTensorCounter().count(model):
        model(inputs).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_states_are_measured_again_if_the_first_update_was_skipped() -> None:
    """With fp16 the loss scaling skips updates whose gradients overflow."""
    weight, state = torch.zeros(256), torch.zeros(512)
    watch = PartsWatch(0, counts_activations=True)
    watch.read = lambda: ModelTensors([weight], [weight.clone()], [])
    watch.before_update()
    watch.after_step(UNMEASURED)
    watch.read = lambda: ModelTensors([weight], [], [state])
    watch.after_step(UNMEASURED)
    (summary,) = watch.entries()
    assert summary["optimizer_states_mib"] == 2048 / MIB
    assert summary["activations_mib"] is None, "no forward pass was counted"


def test_a_compiled_model_is_not_hooked() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    watch = watched(model, optimizer, compiled=True)
    run_step(model, watch, optimizer)
    watch.after_step(UNMEASURED)
    (summary,) = watch.entries()
    assert summary["activations_mib"] is None
    assert summary["optimizer_states_mib"] == 0.0, "SGD without momentum has none"


def test_views_of_a_storage_count_once() -> None:
    flat = torch.zeros(100)
    assert sum(storage_sizes(iter([flat[:50], flat[50:], flat.view(10, 10)])).values()) == 400


class FakeRecording:
    """A recording that lists its calls."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, read: object) -> None:
        self.calls.append("start")

    def start_forward(self) -> None:
        self.calls.append("forward")

    def start_update(self) -> None:
        self.calls.append("update")

    def finish(self) -> list[dict[str, object]]:
        self.calls.append("finish")
        return [{"phase": "forward", "parameters_mib": 1.0}, {"phase": "backward", "parameters_mib": 2.0}]

    def cancel(self) -> None:
        self.calls.append("cancel")


def test_one_later_step_is_recorded() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    recording = FakeRecording()
    watch = watched(model, optimizer, recording=recording)
    for step in range(3):
        watch.start_steps(PROFILE if step else TRAIN)
        run_step(model, watch, optimizer, micro_batches=2)
        watch.after_step(Step(step + 1, measured=True, next_measured=True))
    assert recording.calls == ["start", "forward", "forward", "update", "finish"]
    tensors, *peaks = watch.entries()
    assert tensors["phase"] == "train"
    assert [(peak["rank"], peak["phase"], peak["parameters_mib"]) for peak in peaks] == [
        (1, "forward", 1.0), (1, "backward", 2.0),
    ]  # fmt: skip
    unfinished = FakeRecording()
    watch = watched(model, optimizer, recording=unfinished)
    watch.start_steps(PROFILE)
    watch.stop()
    watch.stop()
    assert unfinished.calls == ["start", "cancel"], "the training stopped in this step"


@pytest.mark.usefixtures("one_rank_group")
def test_the_model_of_a_run_has_names_buffers_and_a_vocabulary() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    tensors = read_model_tensors(model, None)
    assert set(tensors.names.values()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert len(tensors.buffers) == 3
    assert tensors.bucket_sizes == [4 * (8 * 4 + 4 + 4 + 4)]
    assert tensors.vocabulary is None


def test_the_weights_in_fp32_of_deepspeed_with_fp16_at_stage_0_are_optimizer_states() -> None:
    """Without a fused optimizer, DeepSpeed has them in ``FP16_UnfusedOptimizer.fp32_groups``. It needs a GPU."""
    model = nn.Linear(WIDTH, WIDTH, bias=False).half()
    masters = [weight.detach().float().requires_grad_() for weight in model.parameters()]
    inner = torch.optim.AdamW(masters)
    masters[0].grad = torch.zeros(WIDTH, WIDTH)
    inner.step()
    tensors = read_model_tensors(model, SimpleNamespace(optimizer=inner, fp32_groups=[masters]))
    assert sum(storage_sizes(iter(tensors.parameters)).values()) == 2 * WIDTH**2
    assert sum(storage_sizes(iter(tensors.optimizer_states)).values()) == 12 * WIDTH**2 + 4  # and the number of steps
