"""ResNets of torchvision, optionally with another number of channels."""

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from distexp.config import ModelConfig
from distexp.config.model_checks import validate_model

STANDARD_WIDTH = 64


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build a ResNet, from ``images`` (batch, 3, height, width) to logits (batch, classes).

    ``width`` has the channels of the first stage, doubled in each next stage; ``depths`` the blocks of the four stages.
    A ``bottleneck`` block has three convolutions instead of two. Raise ConfigError if a value is invalid.
    """
    validate_model(model)
    assert model.width is not None, "validate_model checks this"
    assert model.depths is not None, "validate_model checks this"
    block = Bottleneck if model.bottleneck else BasicBlock
    if model.width == STANDARD_WIDTH:
        return ImageResNet(block, model.depths, num_classes=num_classes)
    return ScaledResNet(block, model.depths, num_classes, model.width)


class ImageResNet(ResNet):  # type: ignore[misc]  # torchvision has no types
    """torchvision's ResNet with the input name of image batches."""

    def forward(self, images: Any) -> Any:
        """Return logits of shape (batch, classes)."""
        return self._forward_impl(images)

    def to_hugging_face(self, state: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """Return a ResNet of transformers on the meta device, and the weights for it."""
        from transformers import ResNetConfig, ResNetForImageClassification

        stages = [self.layer1, self.layer2, self.layer3, self.layer4]
        is_bottleneck = isinstance(stages[0][0], Bottleneck)
        config = ResNetConfig(
            embedding_size=self.conv1.out_channels,
            hidden_sizes=[(stage[-1].conv3 if is_bottleneck else stage[-1].conv2).out_channels for stage in stages],
            depths=[len(stage) for stage in stages],
            layer_type="bottleneck" if is_bottleneck else "basic",
            num_labels=self.fc.out_features,
        )
        with torch.device("meta"):
            converted = ResNetForImageClassification(config)
        return converted, {_rename_for_hugging_face(name): tensor for name, tensor in state.items()}


class ScaledResNet(ImageResNet):
    """torchvision's ResNet with ``width`` instead of 64 channels in its first stage."""

    def __init__(self, block: type[nn.Module], depths: list[int], num_classes: int, width: int) -> None:
        self.width = width
        super().__init__(block, depths, num_classes=num_classes)
        # Layers that torchvision builds outside of _make_layer always have 64 channels.
        self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.bn1 = nn.BatchNorm2d(width)
        self.fc = nn.Linear(self.inplanes, num_classes)

    def _make_layer(self, block: Any, planes: int, blocks: int, stride: int = 1, dilate: bool = False) -> Any:
        if planes == STANDARD_WIDTH:
            self.inplanes = self.width
        return super()._make_layer(block, planes * self.width // STANDARD_WIDTH, blocks, stride, dilate)


def _rename_for_hugging_face(name: str) -> str:
    """Rename a weight of torchvision for transformers.

    ``layer2.0.conv1.weight`` is ``resnet.encoder.stages.1.layers.0.layer.0.convolution.weight``.
    """
    module, _, kind = name.rpartition(".")
    if module == "fc":
        return f"classifier.1.{kind}"
    kinds = {"conv": "convolution", "bn": "normalization"}
    if not module.startswith("layer"):
        return f"resnet.embedder.embedder.{kinds[module.rstrip('1')]}.{kind}"
    stage, block, part, *rest = module.removeprefix("layer").split(".")
    prefix = f"resnet.encoder.stages.{int(stage) - 1}.layers.{block}"
    if part == "downsample":
        return f"{prefix}.shortcut.{('convolution', 'normalization')[int(rest[0])]}.{kind}"
    return f"{prefix}.layer.{int(part[-1]) - 1}.{kinds[part[:-1]]}.{kind}"
