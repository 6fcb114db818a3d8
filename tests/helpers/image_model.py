"""An image model without batch normalization, whose statistics would depend on the number of ranks."""

from __future__ import annotations

from torch import Tensor, nn

from distexp.config import ModelConfig

WIDTH = 32


class Block(nn.Module):
    """A residual block with one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the input plus the output of the layer."""
        output: Tensor = hidden + self.inner(hidden)
        return output


class ImageMLP(nn.Module):
    """A model from images (samples, 3, 32, 32) to logits (samples, classes)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Linear(3 * 8 * 8, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch."""
        hidden = self.stem(nn.functional.avg_pool2d(images, 4).flatten(1))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the model."""
    return ImageMLP(num_classes)
