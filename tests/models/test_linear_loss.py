"""The chunked cross entropy has the loss and gradients of the plain one, and less memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from distexp.data.base import IGNORE
from distexp.models.objective import linear_cross_entropy

TOKENS, HIDDEN, VOCABULARY = 23, 12, 301
BF16 = torch.bfloat16


def inputs(*, bias: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Linear, Tensor]:
    """Return hidden states, a head, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(4)
    hidden = 3 * torch.randn(TOKENS, HIDDEN, generator=generator)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    labels[torch.rand(TOKENS, generator=generator) < 0.4] = IGNORE
    return hidden.to(dtype).requires_grad_(), nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype), labels


def plain(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return functional.cross_entropy(head(hidden).float(), labels, ignore_index=IGNORE, reduction="sum")


def loss_and_gradients(loss: Tensor, hidden: Tensor, head: nn.Linear) -> Iterator[Tensor]:
    """Yield the loss, and the gradients of its mean."""
    yield loss.detach()
    yield from torch.autograd.grad(loss / 7, [hidden, *head.parameters()])


@pytest.mark.parametrize("chunk", [1, 5, TOKENS, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_exact(chunk: int, bias: bool) -> None:
    hidden, head, labels = inputs(bias=bias)
    expected = loss_and_gradients(plain(hidden, head, labels), hidden, head)
    chunked = linear_cross_entropy(hidden, head.weight, head.bias, labels, chunk)
    for found, wanted in zip(loss_and_gradients(chunked, hidden, head), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [5, TOKENS])
def test_compiled_gradients_are_exact(chunk: int) -> None:
    """An addition in place gave a compiled loss without gradients in torch 2.11. This is the work of Dynamo alone."""
    hidden, head, labels = inputs(bias=True)
    expected = loss_and_gradients(plain(hidden, head, labels), hidden, head)
    compiled = torch.compile(linear_cross_entropy, backend="eager", fullgraph=True, dynamic=False)
    loss = compiled(hidden, head.weight, head.bias, labels, chunk)
    for found, wanted in zip(loss_and_gradients(loss, hidden, head), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [6, 1000])
@pytest.mark.parametrize(("autocast", "dtype"), [(BF16, torch.float32), (None, BF16), (torch.float16, torch.float32)])
def test_16_bits_are_as_precise_as_without_chunks(autocast: Any, dtype: torch.dtype, chunk: int) -> None:
    hidden, head, labels = inputs(bias=True, dtype=dtype)
    exact = list(loss_and_gradients(plain(hidden.float(), head.float(), labels), hidden, head))
    hidden, head, labels = inputs(bias=True, dtype=dtype)
    errors = []
    for chunked in (False, True):
        with torch.autocast("cpu", autocast) if autocast else nullcontext():
            loss = (
                linear_cross_entropy(hidden, head.weight, head.bias, labels, chunk)
                if chunked
                else plain(hidden, head, labels)
            )
        assert loss.dtype == torch.float32
        found = list(loss_and_gradients(loss, hidden, head))
        assert [tensor.dtype for tensor in found[1:]] == [dtype] * 3
        errors.append(
            [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, exact, strict=True)]
        )
    reference, ours = errors
    for before, after in zip(reference, ours, strict=True):
        assert after < 1.3 * before + 1e-4


@pytest.mark.parametrize("chunk", [64, 1024])
def test_one_target_for_all_tokens_is_finite_in_fp16(chunk: int) -> None:
    """The gradient of its row is a sum over all tokens, which have similar hidden states."""
    generator = torch.Generator().manual_seed(3)
    hidden = (2 + torch.randn(600, HIDDEN, generator=generator)).requires_grad_()
    head, labels = nn.Linear(HIDDEN, VOCABULARY), torch.zeros(600, dtype=torch.long)
    exact = list(loss_and_gradients(plain(hidden, head, labels), hidden, head))
    with torch.autocast("cpu", torch.float16):
        loss = linear_cross_entropy(hidden, head.weight, head.bias, labels, chunk)
    for found, wanted in zip(loss_and_gradients(loss, hidden, head), exact, strict=True):
        assert float((found - wanted).norm() / wanted.norm()) < 2e-3


@pytest.mark.parametrize("chunk", [5, 1000])
def test_the_evaluation_has_the_same_loss(chunk: int) -> None:
    hidden, head, labels = inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, head.weight, None, labels, chunk)
    torch.testing.assert_close(loss, plain(hidden, head, labels).detach())


def test_without_targets_the_loss_and_its_gradients_are_zero() -> None:
    hidden, head, labels = inputs(bias=True)
    loss = linear_cross_entropy(hidden, head.weight, head.bias, torch.full_like(labels, IGNORE), 5)
    assert not any(tensor.any() for tensor in loss_and_gradients(loss, hidden, head))


def test_an_ignored_token_may_be_nan() -> None:
    """Padding on the left can attend to nothing."""
    hidden, head, labels = inputs()
    values = hidden.detach().clone()
    values[labels == IGNORE] = torch.nan
    values.requires_grad_()
    loss = linear_cross_entropy(values, head.weight, None, labels, 5)
    assert all(tensor.isfinite().all() for tensor in loss_and_gradients(loss, values, head))


def test_frozen_weights_get_no_gradient() -> None:
    hidden, head, labels = inputs()
    head.weight.requires_grad_(False)
    linear_cross_entropy(hidden, head.weight, None, labels, 5).backward()  # type: ignore[no-untyped-call]
    assert head.weight.grad is None
    assert hidden.grad is not None


def test_a_label_outside_of_the_vocabulary_is_an_error() -> None:
    hidden, head, labels = inputs()
    labels[0] = VOCABULARY
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(hidden, head.weight, None, labels, 5)


def test_a_second_backward_pass_is_an_error() -> None:
    hidden, head, labels = inputs()
    loss = linear_cross_entropy(hidden, head.weight, None, labels, 5)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


class LargestTensor(TorchDispatchMode):
    """A mode that records the most elements of any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        parts = result if isinstance(result, tuple | list) else [result]
        self.elements = max([self.elements, *(part.numel() for part in parts if isinstance(part, Tensor))])
        return result


def test_all_logits_are_never_in_memory() -> None:
    hidden, head, labels = inputs()
    with LargestTensor() as largest:
        plain(hidden, head, labels).backward()  # type: ignore[no-untyped-call]
    assert largest.elements == TOKENS * VOCABULARY
    with LargestTensor() as largest:
        linear_cross_entropy(hidden, head.weight, None, labels, 4).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            linear_cross_entropy(hidden, head.weight, None, labels, 4)
    assert largest.elements == HIDDEN * VOCABULARY  # the gradient of the weight


def test_it_equals_the_function_of_torch() -> None:
    function = getattr(functional, "linear_cross_entropy", None)
    if function is None:
        pytest.skip("torch has no linear_cross_entropy before version 2.13")
    hidden, head, labels = inputs(bias=True)
    theirs = function(
        hidden, head.weight, labels, linear_bias=head.bias, reduction="sum", ignore_index=IGNORE, options=None
    )
    expected = list(loss_and_gradients(theirs, hidden, head))
    ours = linear_cross_entropy(hidden, head.weight, head.bias, labels, 5)
    torch.testing.assert_close(list(loss_and_gradients(ours, hidden, head)), expected, rtol=1e-5, atol=1e-6)
