"""ResNets: torchvision's own, and the same with fewer channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from distexp.config import ModelConfig
from distexp.config.model_checks import validate_model

STANDARD_WIDTH = 64


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """A ResNet: ``images`` (samples, 3, height, width) to logits (samples, classes).

    Args:
        model: width (channels of the first stage; each next stage has twice as many), depths (blocks in
            each of the four stages) and bottleneck (three convolutions a block instead of two).
        num_classes: classes of the data.

    Raises:
        ConfigError: values that a ResNet does not have or cannot have.
    """
    validate_model(model)
    assert model.width is not None, "validate_model"
    assert model.depths is not None, "validate_model"
    block = Bottleneck if model.bottleneck else BasicBlock
    if model.width == STANDARD_WIDTH:
        return ImageResNet(block, model.depths, num_classes=num_classes)
    return ScaledResNet(block, model.depths, num_classes, model.width)


class ImageResNet(ResNet):  # type: ignore[misc]  # torchvision has no types
    """torchvision's ResNet under the name of our batches' input."""

    def forward(self, images: Any) -> Any:
        return self._forward_impl(images)

    def to_hugging_face(self, state: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """A ResNet of transformers, on the meta device, and these weights under its names."""
        from transformers import ResNetConfig, ResNetForImageClassification

        stages = [self.layer1, self.layer2, self.layer3, self.layer4]
        config = ResNetConfig(
            embedding_size=self.conv1.out_channels,
            hidden_sizes=[_width_of(stage[-1]) for stage in stages],
            depths=[len(stage) for stage in stages],
            layer_type="bottleneck" if isinstance(stages[0][0], Bottleneck) else "basic",
            num_labels=self.fc.out_features,
        )
        with torch.device("meta"):
            twin = ResNetForImageClassification(config)
        return twin, {_as_hugging_face(name): tensor for name, tensor in state.items()}


class ScaledResNet(ImageResNet):
    """torchvision's ResNet with ``width`` channels in its first stage instead of 64."""

    def __init__(self, block: type[nn.Module], depths: list[int], num_classes: int, width: int) -> None:
        self.width = width
        super().__init__(block, depths, num_classes=num_classes)
        # What torchvision makes outside of _make_layer has its fixed 64 channels.
        self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.bn1 = nn.BatchNorm2d(width)
        self.fc = nn.Linear(self.inplanes, num_classes)

    def _make_layer(self, block: Any, planes: int, blocks: int, stride: int = 1, dilate: bool = False) -> Any:
        if planes == STANDARD_WIDTH:
            self.inplanes = self.width
        return super()._make_layer(block, planes * self.width // STANDARD_WIDTH, blocks, stride, dilate)


def _width_of(block: Any) -> int:
    """Channels that leave a residual block."""
    last = block.conv3 if isinstance(block, Bottleneck) else block.conv2
    return int(last.out_channels)


def _as_hugging_face(name: str) -> str:
    """``layer2.0.conv1.weight`` as ``resnet.encoder.stages.1.layers.0.layer.0.convolution.weight``."""
    module, _, kind = name.rpartition(".")
    if module == "fc":
        return f"classifier.1.{kind}"
    kinds = {"conv": "convolution", "bn": "normalization"}
    if not module.startswith("layer"):
        return f"resnet.embedder.embedder.{kinds[module.rstrip('1')]}.{kind}"
    stage, block, part, *rest = module.removeprefix("layer").split(".")
    place = f"resnet.encoder.stages.{int(stage) - 1}.layers.{block}"
    if part == "downsample":
        return f"{place}.shortcut.{('convolution', 'normalization')[int(rest[0])]}.{kind}"
    return f"{place}.layer.{int(part[-1]) - 1}.{kinds[part[:-1]]}.{kind}"
