"""Image files as tensors, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Generator, Tensor

from distexp.data.base import IGNORE, Batch, Sample

MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
"""Of ImageNet's channels, as pixels from 0 to 1."""

PADDING = 8
"""An augmented image is cropped from one with 1/8 of its size added on every side."""


def _shared_zero() -> Tensor:
    shared: Tensor = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
    return shared


class DataError(RuntimeError):
    """Data that cannot be read while training; the sentence names the file."""


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Samples ``images`` of shape (3, size, size), float32 and normalised, with their class.

    The augmentation (a random crop and a flip) is decided by seed, epoch and index: neither the number of
    workers nor the order of reading changes a sample.
    """

    root: Path
    files: tuple[str, ...]  # relative to root
    classes: tuple[int, ...]  # of each file
    size: int  # pixels of a side; other sizes are scaled
    augment: bool
    seed: int
    # In shared memory: a loader worker that outlives an epoch holds a copy of everything else.
    epoch: Tensor = field(default_factory=_shared_zero)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        pixels = torch.from_numpy(decode(self.root / self.files[index], self.size)).permute(2, 0, 1)
        if self.augment:
            pixels = self._crop_and_flip(pixels, index)
        images = (pixels.float() / 255 - MEAN) / STD
        return {"images": images, "labels": torch.tensor(self.classes[index])}

    def set_epoch(self, epoch: int) -> None:
        """Chooses the augmentations of an epoch, in running loader workers too."""
        self.epoch.fill_(epoch)

    def _crop_and_flip(self, pixels: Tensor, index: int) -> Tensor:
        number = (self.seed * 100_003 + int(self.epoch)) * 1_000_003 + index
        chance = Generator().manual_seed(number % 2**63)
        margin = self.size // PADDING
        top, left = torch.randint(2 * margin + 1, (2,), generator=chance).tolist()
        padded = torch.nn.functional.pad(pixels, (margin,) * 4)
        cropped = padded[:, top : top + self.size, left : left + self.size]
        flip = bool(torch.randint(2, (), generator=chance))
        return cropped.flip(2) if flip else cropped


def decode(path: Path, size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """An image file of any mode as RGB pixels of shape (size, size, 3).

    Raises:
        DataError: a file that is absent, or is not a complete image.
    """
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path} cannot be decoded as an image ({error}): restore the file") from error
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.array(image)


def collate_images(samples: Sequence[Sample]) -> Batch:
    """Stacks images and classes."""
    labels = torch.stack([sample["labels"] for sample in samples])
    counted = int((labels != IGNORE).sum())
    images = torch.stack([sample["images"] for sample in samples])
    return Batch(inputs={"images": images}, labels=labels, samples=counted, targets=counted, tokens=0)
