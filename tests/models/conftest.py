"""Fixtures of the tests of models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from torch.nn.attention import flex_attention as flex


@pytest.fixture
def flex_backward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let flex attention run its uncompiled backward pass on a CPU, which torch refuses."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield
