"""``train.activation_budget``: compiled graphs store less, and compute the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from distexp.config import ConfigError
from distexp.models import transforms
from distexp.models.adapter import add_adapter
from distexp.system.torch_internals.compilation import limit_stored_activations, read_activation_budget
from tests.helpers.attention import build, compute, make_batch
from tests.helpers.runs import resolve_cell


@pytest.fixture(autouse=True)
def reset_budget() -> Iterator[None]:
    """Store everything again in the other tests of this process."""
    yield
    limit_stored_activations(None)


def stored_and_gradients(
    monkeypatch: pytest.MonkeyPatch, *overrides: str
) -> tuple[int, Tensor, dict[str, Tensor], float]:
    """Return the bytes stored for the backward pass, loss and gradients of a compiled model, and the budget."""
    monkeypatch.setattr(transforms, "BACKEND", "aot_eager_decomp_partition")  # partitions graphs as inductor does
    torch.compiler.reset()
    model = build("gpt_tiny", "sdpa")
    transforms.transform_blocks(model, resolve_cell("model=gpt_tiny", "train.compile=blocks", *overrides))
    stored: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        stored[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _, loss, gradients = compute(model, make_batch(32, 32))
    return sum(stored.values()), loss, gradients, read_activation_budget()


def test_a_smaller_budget_stores_less_and_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    everything, loss, gradients, default = stored_and_gradients(monkeypatch)
    less, same_loss, same_gradients, budget = stored_and_gradients(monkeypatch, "train.activation_budget=0.2")
    assert (default, budget) == (1.0, 0.2)
    assert less < 0.8 * everything
    torch.testing.assert_close(same_loss, loss, rtol=1e-6, atol=0)
    for name, expected in gradients.items():
        torch.testing.assert_close(same_gradients[name], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("rate", "budget"), [(0.0, 0.2), (0.1, None), (0.1, 1.0), (0.1, 0.2)])
def test_a_budget_is_refused_with_dropout(rate: float, budget: float | None) -> None:
    """The backward pass would use other random numbers than the forward pass."""
    model = build("gpt_tiny", "sdpa")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = rate
    config = resolve_cell("model=gpt_tiny", "train.compile=blocks")
    config.train.activation_budget = budget
    if rate == 0 or budget in (None, 1.0):
        transforms.transform_blocks(model, config)
        return
    with pytest.raises(
        ConfigError, match=r"activation_budget=0.2 gives wrong gradients .* has dropout.p=0.1: .*checkp"
    ):
        transforms.transform_blocks(model, config)


def test_a_budget_is_refused_with_the_dropout_of_the_command() -> None:
    budget = ("train.compile=blocks", "train.activation_budget=0.5")
    with pytest.raises(ConfigError, match=r"activation_budget=0.5 gives wrong gradients with model.dropout=0.1: use"):
        resolve_cell("model=gpt_tiny", "model.dropout=0.1", *budget)


@pytest.mark.parametrize(("keys", "hint"), [(["dropout"], "set model.dropout=0, or use"), ([], "set it to 0, or use")])
def test_the_hint_names_the_key_of_the_dropout_only_if_the_model_has_it(keys: list[str], hint: str) -> None:
    model, config = torch.nn.Sequential(torch.nn.Dropout(0.1)), resolve_cell("model=gpt_tiny", "train.compile=blocks")
    config.train.activation_budget, config.model.keys = 0.2, keys
    with pytest.raises(ConfigError, match=f"0.p=0.1: {hint}"):
        transforms.check_dropout(model, config)


def test_the_hint_names_the_key_of_the_dropout_of_adapters() -> None:
    config = resolve_cell("model=gpt_tiny", "adapter=lora", "adapter.dropout=0.1", "train.compile=blocks")
    model = add_adapter(build("gpt_tiny", "sdpa"), config)
    config.train.activation_budget = 0.2
    with pytest.raises(ConfigError, match=r"lora_dropout.default.p=0.1: set adapter.dropout=0, or use"):
        transforms.check_dropout(model, config)
