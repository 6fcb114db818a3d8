"""Random weights that several runs have in common."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distexp.config import ConfigError
from distexp.distributed.context import Context
from distexp.models import shared_weights
from distexp.models.blueprint import Blueprint
from distexp.system.cgroups import available_memory

CALLS: list[str] = []


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Offer a file in memory, as the process does from which workers are forked."""
    CALLS.clear()
    offered = shared_weights.make_file()
    monkeypatch.setattr(shared_weights, "_offered", offered)
    yield offered
    os.close(offered)


def make(name: str = "weight") -> Callable[[], dict[str, Tensor]]:
    def build() -> dict[str, Tensor]:
        CALLS.append(name)
        return {name: torch.randn(300, 7), "flag": torch.tensor([True, False])}

    return build


def seeded(key: str | None, seed: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """Return the weights of a run, and the next random number after them."""
    torch.manual_seed(seed)
    return shared_weights.make_or_read(key, make()), torch.rand(1)


def test_a_later_run_reads_the_weights_and_continues_with_the_same_random_numbers() -> None:
    (first, after_first), (second, after_second) = seeded("model"), seeded("model")
    assert CALLS == ["weight"], "the second run made none"
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(after_first, after_second)


def test_changing_weights_that_were_read_changes_no_other_run() -> None:
    seeded("model")
    seeded("model")[0]["weight"].zero_()
    assert seeded("model")[0]["weight"].abs().sum() > 0


@pytest.mark.parametrize(("key", "seed"), [("other model", 1), ("model", 2), (None, 1)])
def test_other_models_other_seeds_and_custom_models_make_their_own(key: str | None, seed: int) -> None:
    seeded("model")
    found, _ = seeded(key, seed)
    torch.manual_seed(seed)
    assert len(CALLS) == 2
    assert torch.equal(found["weight"], torch.randn(300, 7))


def test_weights_that_need_much_of_the_memory_are_not_kept(monkeypatch: pytest.MonkeyPatch, file: int) -> None:
    monkeypatch.setattr(shared_weights, "MEMORY_SHARE", 1000 / available_memory())
    seeded("model")
    assert os.fstat(file).st_size == 0
    seeded("model")
    assert len(CALLS) == 2


def test_a_file_that_a_killed_worker_left_incomplete_is_written_again(file: int) -> None:
    os.write(file, b"the beginning of a file")
    seeded("model")
    seeded("model")
    assert len(CALLS) == 1


def test_a_model_with_other_layers_does_not_get_the_weights(tmp_path: Path) -> None:
    context = Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path)
    for size in (3, 4):
        torch.manual_seed(1)
        build = lambda size=size: torch.nn.Linear(size, 2)  # noqa: E731
        blueprint = Blueprint(build, context, weights_key="the same")
        blueprint.materialize(blueprint.model)
        torch.manual_seed(1)
        assert torch.equal(blueprint.model.weight, build().weight)


class Unmanaged(torch.nn.Module):
    """A module whose constructor makes tensors that ``torch.device("meta")`` does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.FloatTensor(3, 2))
        torch.nn.init.normal_(self.weight)
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.head.weight = self.weight
        self.used = [self.weight]
        self.register_buffer("scale", torch.from_numpy(np.arange(3.0)))
        self.first = self.scale


def test_tensors_that_are_made_without_the_device_of_the_model_get_its_weights(tmp_path: Path) -> None:
    torch.manual_seed(1)
    blueprint = Blueprint(Unmanaged, Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path))
    assert {tensor.device.type for tensor in blueprint.model.state_dict().values()} == {"meta"}
    blueprint.materialize(blueprint.model)
    assert blueprint.model.head.weight is blueprint.model.weight
    expected = blueprint.get_tensor("weight", blueprint.model.weight)
    assert torch.equal(blueprint.model.weight, expected)
    assert blueprint.model.scale.tolist() == blueprint.model.first.tolist() == [0, 1, 2]
    assert blueprint.model.used[0].is_meta, "its use fails, because no optimizer would update it"


def test_a_weight_without_a_value_is_refused(tmp_path: Path) -> None:
    def build() -> torch.nn.Module:
        pair = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        if not pair[0].weight.is_meta:
            pair[1].weight = pair[0].weight
        return pair

    with pytest.raises(ConfigError, match=r"Sequential has 1.weight only if it is built without values"):
        Blueprint(build, Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path))


def test_a_training_continues_if_its_weights_cannot_be_kept_or_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        seeded("model")
    assert os.fstat(file).st_size == 0
    assert "not kept for other runs: no space" in capsys.readouterr().out
    seeded("model")
    monkeypatch.setattr(torch, "load", fail)
    assert seeded("model")[0].keys() == {"weight", "flag"}
    assert "made again, because those of an earlier run cannot be read: no space" in capsys.readouterr().out


def hooked(module: nn.Module) -> nn.Module:
    """Add a hook to the weight of a module."""
    mask = torch.ones(())
    module.weight.register_hook(lambda gradient: gradient * mask)  # type: ignore[operator, union-attr]
    return module


REFUSED_WEIGHTS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "Linear has a gradient hook on weight: change the gradient in forward": (lambda: hooked(nn.Linear(2, 2)), 1),
    "LazyLinear has no shape for bias: give the sizes": (lambda: nn.LazyLinear(2), 1),
    "Linear has the complex weight bias: keep a real one": (lambda: nn.Linear(2, 2, dtype=torch.complex64), 1),
    "Sequential has sparse gradients in 0: leave sparse=True out": (
        lambda: nn.Sequential(nn.Embedding(2, 2, sparse=True)),
        1,
    ),
    "Sequential has max_norm=1 in 0, which changes other rows on each worker: use one worker": (
        lambda: nn.Sequential(nn.Embedding(2, 2, max_norm=1.0)),
        2,
    ),
}


@pytest.mark.parametrize("message", REFUSED_WEIGHTS)
def test_weights_that_training_would_change_otherwise_are_refused(message: str, tmp_path: Path) -> None:
    build, workers = REFUSED_WEIGHTS[message]
    with pytest.raises(ConfigError, match=re.escape(message)):
        Blueprint(build, Context(0, workers, 0, workers, 1, torch.device("cpu"), tmp_path))


def test_values_of_a_constructor_are_those_of_the_weights(tmp_path: Path) -> None:
    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.copied, self.norm = self.weight.detach().clone(), float(self.weight.detach().norm())

    torch.manual_seed(3)
    model: Any = Blueprint(Measured, Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path))
    model.materialize(model.model)
    assert torch.equal(model.model.copied, model.model.weight)
    assert model.model.norm == pytest.approx(float(model.model.weight.norm()))


def test_all_wrong_weights_are_named(tmp_path: Path) -> None:
    def build() -> nn.Module:
        pair = nn.Sequential(nn.Embedding(2, 2, sparse=True), nn.LazyLinear(4))
        pair.table = torch.ones(4)  # type: ignore[assignment]  # so it is built on the CPU
        return pair

    with pytest.raises(ConfigError) as refused:
        Blueprint(build, Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path))
    assert [text.partition(": ")[0] for text in refused.value.errors] == [
        *(f"Sequential has no shape for 1.{name}" for name in ("weight", "bias")),
        "Sequential has sparse gradients in 0",
    ]


def test_a_parameter_keeps_its_attributes(tmp_path: Path) -> None:
    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        module.weight.factor = 2.0  # type: ignore[attr-defined]
        return module

    blueprint = Blueprint(build, Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path))
    blueprint.materialize(blueprint.model)
    assert blueprint.model.weight.factor == 2.0  # type: ignore[attr-defined, union-attr]
