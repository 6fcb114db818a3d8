"""Image files as tensors, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Generator, Tensor, device

from distexp.data.base import IGNORE, Batch, Sample

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
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
    """Samples ``images`` of shape (3, size, size), pixels from 0 to 255 as uint8, with their class.

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
        return {"images": pixels, "labels": torch.tensor(self.classes[index])}

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


@dataclass(frozen=True)
class ImageBatch(Batch):
    """``images`` of pixels from 0 to 255, on their way to a device.

    They travel as uint8, a quarter of what a model takes, through loader workers and to the device.
    """

    def to(self, where: device) -> Batch:
        """The batch on a device, its images normalised there: float32, channels last."""
        inputs = {"images": normalize(self.inputs["images"].to(where, non_blocking=True))}
        labels = self.labels.to(where, non_blocking=True)
        return Batch(
            inputs, labels, num_samples=self.num_samples, num_targets=self.num_targets, num_tokens=self.num_tokens
        )


def normalize(pixels: Tensor) -> Tensor:
    """Images (samples, 3, height, width) of pixels from 0 to 255 as a ResNet takes them.

    They are laid out with the channels last, which convolutions on GPUs are fastest on; what they make of
    them is then laid out so too.
    """
    mean, std = _statistics(pixels.device)
    images = pixels.to(torch.float32, memory_format=torch.channels_last)
    return images.div_(255).sub_(mean).div_(std)


@cache
def _statistics(where: device) -> tuple[Tensor, Tensor]:
    """MEAN and STD on a device, copied there once: a copy from ordinary memory makes the host wait."""
    mean, std = (torch.tensor(numbers, device=where)[:, None, None] for numbers in (MEAN, STD))
    return mean, std


def collate_images(samples: Sequence[Sample]) -> ImageBatch:
    """Stacks images and classes.

    Raises:
        DataError: images that are not pixels any more; a data set that normalises itself collates itself too.
    """
    labels = torch.stack([sample["labels"] for sample in samples])
    counted = int((labels != IGNORE).sum())
    images = torch.stack([sample["images"] for sample in samples])
    if images.dtype != torch.uint8:
        raise DataError(
            f"images are {images.dtype}, and collate_images takes pixels from 0 to 255 as torch.uint8, which are "
            "normalised on the device: leave them so, or collate them into a Batch of your own"
        )
    return ImageBatch({"images": images}, labels, num_samples=counted, num_targets=counted, num_tokens=0)
