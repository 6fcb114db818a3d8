"""Tests of the recorder: what autograd allocates for real tensors, and not for fake ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distexp.plan.trace.cuda_semantics import count_references_to_gradient
from distexp.plan.trace.recorder import GPU, StorageRecorder
from distexp.system.torch_internals.tensors import make_fake_mode

SIZE = 64 * 64 * 4
"""Bytes of the matrices in these tests."""

GRADIENTS = 6
"""Matrices that the backward pass of sine, exponential and cosine allocates, without the sum of two gradients."""


def allocated_in_backward(branches: Callable[[Tensor], Tensor]) -> int:
    """Return how many matrices the backward pass of ``branches(weight.sin())`` allocates."""
    fake_mode = make_fake_mode()
    recorder = StorageRecorder(fake_mode)
    with fake_mode, recorder.recording():
        weight = torch.empty(64, 64, device=GPU, requires_grad=True)
        loss = branches(weight.sin()).sum()
        recorder.changes.clear()
        recorder.phase = "backward"
        torch.autograd.backward([loss])
    return sum(change.block.size == SIZE for change in recorder.changes if not change.is_free)


def test_autograd_adds_a_gradient_to_another_one_in_place() -> None:
    assert allocated_in_backward(lambda hidden: hidden.exp() + hidden.cos()) == GRADIENTS


def test_autograd_does_not_add_to_a_view() -> None:
    assert allocated_in_backward(lambda hidden: hidden.exp() + hidden.t().cos()) == GRADIENTS + 1


def test_a_sum_in_a_custom_backward_pass_is_allocated() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(context: object, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(context: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient + gradient

    with_sum = allocated_in_backward(lambda hidden: Twice.apply(hidden.exp() + hidden.cos()))  # type: ignore[no-untyped-call, no-any-return]
    assert with_sum == GRADIENTS + 1


def test_references_to_a_gradient_are_counted_once() -> None:
    assert count_references_to_gradient() == count_references_to_gradient()
    assert min(count_references_to_gradient()) >= 1
