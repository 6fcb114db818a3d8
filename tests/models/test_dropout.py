"""Tests of the dropout rates of a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from distexp.models.transforms import largest_dropout


class Wrapper(nn.Module):
    """A wrapper with a configuration of its own, like the engine of DeepSpeed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.config: Any = SimpleNamespace(dropout=0.9)


class Functional(nn.Module):
    """A model whose dropout is a function, with the rate in its configuration, like OPT."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace(dropout=rate)


def test_the_rate_is_that_of_the_wrapped_model() -> None:
    for model, rate in [(Functional(0.1), 0.1), (Functional(0.0), 0.0), (nn.Sequential(nn.Dropout(0.2)), 0.2)]:
        assert largest_dropout(model) == rate
        assert largest_dropout(Wrapper(model)) == rate


def test_a_part_that_is_called_module_hides_no_other_part() -> None:
    model = Wrapper(nn.Linear(2, 2))
    model.before = nn.Dropout(0.3)
    assert largest_dropout(model) == 0.3
