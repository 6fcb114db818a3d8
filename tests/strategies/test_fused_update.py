"""Training with one kernel for clipping, AdamW and the cast of the weights.

Without a GPU, Triton interprets the kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distexp.data.base import IGNORE, Batch
from distexp.distributed.context import Context
from distexp.strategies.ddp_reduction import StepWeights, set_reduction
from distexp.strategies.optimizer import FusedAdamW, read_model_tensors
from distexp.strategies.torch_model import Distribution, TorchModel, read_ddp_distribution
from tests.helpers.runs import resolve_cell
from tests.helpers.small_gpt import VOCABULARY, make_gpt

CLIPPING = 0.1
KERNEL = "distexp.strategies.optimizer"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_rank_group")]


@pytest.fixture(autouse=True)
def _interpreted_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Triton interpret the kernel on a machine without a GPU; it decides when the module is imported."""
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        sys.modules.pop(KERNEL, None)
    yield
    sys.modules.pop(KERNEL, None)


def make_model(
    folder: Path, *, fused: bool, copies: bool = False, ddp: bool = False, accumulation: int = 1,
    clipping: float | None = CLIPPING, weight_decay: float = 0.01, graphs: bool = False,
) -> TorchModel:  # fmt: skip
    """Wrap a GPT as a strategy does; a configuration with ``train.fused_update`` is refused without a GPU."""
    config = resolve_cell("strategy=single", "cluster.device=cpu", f"train.gradient_accumulation_steps={accumulation}")
    config.train.fused_update, config.train.gradient_clipping = fused, clipping
    config.train.weight_decay = weight_decay
    if graphs:
        config.train.compile = "graphs"
    module: nn.Module = make_gpt().to(DEVICE)
    context = Context(
        rank=0, world_size=1, local_rank=0, workers_per_node=1, nodes=1, device=DEVICE, run_dir=folder
    )  # fmt: skip
    weights = StepWeights(module, torch.bfloat16) if copies else None
    if ddp:
        module = DistributedDataParallel(module, bucket_cap_mb=0.005, gradient_as_bucket_view=True)
        set_reduction(module, "fp32", weights)
    return TorchModel(
        module,
        config,
        context,
        sync_context=lambda last: module.no_sync() if isinstance(module, DistributedDataParallel) and not last
        else nullcontext(),
        autocast=True,
        distribution=lambda: read_ddp_distribution(module) if isinstance(module, DistributedDataParallel)
        else Distribution(wrapper="none", mesh=[1, 1]),
        weights=weights,
    )  # fmt: skip


def micro_batches(step: int, count: int) -> list[Batch]:
    """Return micro-batches of different targets."""
    generator = torch.Generator().manual_seed(step)
    batches = []
    for number in range(count):
        ids = torch.randint(1, VOCABULARY, (3, 11), generator=generator)
        labels = ids.clone()
        labels[number % 3, :4] = IGNORE
        targets = int((labels[:, 1:] != IGNORE).sum())
        batches.append(Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels, 3, targets, 33))
    return [batch.to(DEVICE) for batch in batches]


def train(model: TorchModel, first: int = 0, steps: int = 2, accumulation: int = 1) -> list[tuple[float, float]]:
    """Train; return loss and gradient norm of each step."""
    history = []
    for step in range(first, first + steps):
        batches = micro_batches(step, accumulation)
        normalizer = torch.tensor(sum(batch.num_targets for batch in batches), device=DEVICE)
        losses = [
            model.forward_backward(batch, normalizer=normalizer, last_micro=batch is batches[-1])[0]
            for batch in batches
        ]
        history.append((torch.stack(losses).sum().item(), model.step(0.01 / (1 + step)).item()))
    return history


@pytest.fixture
def exact_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round the copies of an interpreted kernel again: Triton's interpreter cuts digits off instead of rounding."""
    original = FusedAdamW.clip_and_step

    def clip_and_step(self: FusedAdamW, limit: float | None) -> torch.Tensor:
        norm = original(self, limit)
        if DEVICE.type == "cpu" and self.copies is not None:
            self.copies.refresh()
        return norm

    monkeypatch.setattr(FusedAdamW, "clip_and_step", clip_and_step)


def assert_same_weights(ours: TorchModel, theirs: TorchModel, *, rounded: bool) -> None:
    """Compare weights after updates of up to 0.01 each.

    Args:
        ours, theirs: the models.
        rounded: whether there are copies. Some weights, as the bias of the keys, have no gradient but rounding errors.
    """
    expected = dict(theirs.weights())
    for name, weight in ours.weights():
        if rounded:
            assert (weight - expected[name]).abs().median() < 1e-4, name
        else:
            torch.testing.assert_close(weight, expected[name], atol=2e-5, rtol=1e-5)


@pytest.mark.usefixtures("exact_rounding")
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("ddp", [False, True])
def test_one_kernel_trains_as_separate_ones(ddp: bool, copies: bool, accumulation: int, tmp_path: Path) -> None:
    separate = make_model(tmp_path, fused=False, copies=copies, ddp=ddp, accumulation=accumulation)
    fused = make_model(tmp_path, fused=True, copies=copies, ddp=ddp, accumulation=accumulation)
    expected = train(separate, accumulation=accumulation)
    assert expected[0][1] > CLIPPING, "clipping has an effect"
    for ours, theirs in zip(train(fused, accumulation=accumulation), expected, strict=True):
        # A weight that differs in its last digit may be rounded to another copy.
        assert ours == pytest.approx(theirs, rel=1e-3 if copies else 1e-5)
    assert_same_weights(fused, separate, rounded=copies)
    assert all(parameter.grad is None for parameter in fused.module.parameters())


def test_the_norm_is_returned_without_clipping(tmp_path: Path) -> None:
    separate, fused = (make_model(tmp_path, fused=fused, clipping=None) for fused in (False, True))
    for ours, theirs in zip(train(fused), train(separate), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert_same_weights(fused, separate, rounded=False)


def test_graphs_keep_their_gradients(tmp_path: Path) -> None:
    separate, fused = (make_model(tmp_path, fused=fused, graphs=True) for fused in (False, True))
    before = {id(parameter): parameter.grad for parameter in fused.module.parameters()}
    for ours, theirs in zip(train(fused), train(separate), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert all(parameter.grad is before[id(parameter)] for parameter in fused.module.parameters())


@pytest.mark.usefixtures("exact_rounding")
@pytest.mark.parametrize("fused", [True, False])
def test_a_checkpoint_of_one_update_continues_with_the_other(fused: bool, tmp_path: Path) -> None:
    first = make_model(tmp_path, fused=fused, copies=True)
    train(first)
    first.save(tmp_path / "checkpoint")
    expected = train(first, first=2)
    other = make_model(tmp_path, fused=not fused, copies=True)
    other.load(tmp_path / "checkpoint")
    for ours, theirs in zip(train(other, first=2), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    assert_same_weights(other, first, rounded=True)


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_a_resumed_run_keeps_its_weight_decay(fused: bool, saved: bool, tmp_path: Path) -> None:
    first = make_model(tmp_path, fused=saved)
    train(first)
    first.save(tmp_path / "checkpoint")
    resumed = make_model(tmp_path, fused=fused, weight_decay=0.5)
    before = [{**group, "params": None} for group in resumed.optimizer.param_groups]
    resumed.load(tmp_path / "checkpoint")
    assert [{**group, "params": None, "lr": 0.0} for group in resumed.optimizer.param_groups] == [
        {**group, "lr": 0.0} for group in before
    ]
    assert before[0]["weight_decay"] == 0.5
    train(resumed)  # its kernel finds the step counts on the device on which it reads them


def test_an_update_without_gradients_changes_nothing(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(3, device=DEVICE))
    FusedAdamW([{"params": [weight]}], None, lr=0.1).step()
    assert weight.tolist() == [1, 1, 1]


def test_weights_of_any_size_alignment_and_layout(tmp_path: Path) -> None:
    """The kernel takes chunks of 8,192 weights, and a bucket of DDP starts anywhere."""
    shapes = [(3,), (8192,), (8193,), (5000, 4), (2, 3, 2, 2)]
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in shapes]
    weights[-1].data = weights[-1].data.to(memory_format=torch.channels_last)
    expected = [nn.Parameter(weight.detach().clone()) for weight in weights]
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    fused, torchs = FusedAdamW([{"params": weights}], None, **options), torch.optim.AdamW(expected, **options)
    for step in range(3):
        flat = torch.randn(sum(weight.numel() for weight in weights) + 1, device=DEVICE)
        start = 1
        for number, (ours, theirs) in enumerate(zip(weights, expected, strict=True)):
            gradient = flat[start : start + ours.numel()].view(ours.shape)
            start += ours.numel()
            ours.grad, theirs.grad = gradient, gradient.clone()
            if number == step:  # a weight that has no gradient in a step
                ours.grad = theirs.grad = None
        fused.step()
        torchs.step()
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_copies_are_the_rounded_weights(tmp_path: Path) -> None:
    model = make_model(tmp_path, fused=True, copies=True)
    train(model)
    copies = {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}
    ulp = 2.0**-8 if DEVICE.type == "cuda" else 2.0**-7  # Triton's interpreter cuts digits off instead of rounding.
    for name, weight in model.weights():
        if name in copies:
            assert copies[name].dtype == torch.bfloat16
            torch.testing.assert_close(copies[name].float(), weight, atol=0, rtol=ulp)


def test_one_micro_batch_needs_no_fp32_gradients(tmp_path: Path) -> None:
    model = make_model(tmp_path, fused=True, copies=True)
    (batch,) = micro_batches(0, 1)
    model.forward_backward(batch, normalizer=torch.tensor(batch.num_targets, device=DEVICE), last_micro=True)
    gradients = read_model_tensors(model.module, model.optimizer).gradients
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
