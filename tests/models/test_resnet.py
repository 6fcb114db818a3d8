"""ResNets: equal to torchvision at the standard width."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torchvision.models import resnet50

from distexp.config import ConfigError
from distexp.models.blueprint import find_embeddings, has_tied_embeddings
from distexp.models.resnet import build
from distexp.models.transforms import find_units
from tests.helpers.runs import resolve_cell


def test_resnet50_equals_torchvision_with_200_classes() -> None:
    config = resolve_cell("model=resnet50", "dataset.train_size=1024").model
    torch.manual_seed(3)
    ours = build(config, 200)
    torch.manual_seed(3)
    theirs = resnet50(num_classes=200)
    assert sum(weight.numel() for weight in ours.parameters()) == 23_917_832
    for (name, mine), (their_name, other) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == their_name
        assert mine.equal(other)


def test_blocks_of_all_stages_are_found() -> None:
    with torch.device("meta"):
        model = build(resolve_cell("model=resnet50", "dataset.train_size=1024").model, 200)
    names = [f"layer{stage}.{block}" for stage, depth in enumerate([3, 4, 6, 3], 1) for block in range(depth)]
    assert [name for name, _ in find_units(model)] == names
    assert find_embeddings(model) == []
    assert not has_tied_embeddings(model)


@pytest.mark.parametrize(("bottleneck", "last"), [(False, 8 * 16), (True, 4 * 8 * 16)])
def test_the_width_sets_the_channels_of_the_first_stage(bottleneck: bool, last: int) -> None:
    config = replace(resolve_cell("model=resnet_tiny").model, bottleneck=bottleneck, depths=[1, 2, 1, 1])
    model = build(config, 10)
    assert model.get_submodule("conv1").weight.shape == (16, 3, 7, 7)
    assert model.get_submodule("layer1.0.conv1").out_channels == 16
    assert model.get_submodule("layer4.0.conv1").out_channels == 8 * 16
    assert model.get_submodule("fc").weight.shape == (10, last)
    assert [name for name, _ in find_units(model)] == ["layer1.0", "layer2.0", "layer2.1", "layer3.0", "layer4.0"]
    assert model(images=torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_resnet_tiny_has_the_expected_size() -> None:
    model = build(resolve_cell("model=resnet_tiny").model, 10)
    assert sum(weight.numel() for weight in model.parameters()) == 310_746


def test_a_key_of_another_architecture_is_refused() -> None:
    config = replace(resolve_cell("model=resnet_tiny").model, num_heads=4)
    with pytest.raises(ConfigError, match=r"model.num_heads=4 is not a key of model=resnet_tiny"):
        build(config, 10)
