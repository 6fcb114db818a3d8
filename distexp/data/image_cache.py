"""Images in the memory of the CPU or the GPU for ``dataset.cache``, augmented in batches on the device.

A loader process draws only the crop and the flip of each image. They are those of ``ImageFiles``, so the batches are
the same as without a cache. If the images are enlarged, pixels may differ by one of 255 levels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from distexp.config import ConfigError
from distexp.config.custom_code import describe_type
from distexp.config.tasks import task_of
from distexp.data.base import IGNORE, Batch, Sample, Samples, TaskData
from distexp.data.images import ImageFiles, decode_once, normalize_pixels, read_ahead
from distexp.system.cgroups import usable_memory
from distexp.system.units import MIB, format_memory

MAX_SHARE = 0.8
"""Largest part of the free GPU memory, or of the CPU memory, that images may take."""

PIXELS, INDEX, WINDOWS = "images", "index", "windows"
"""Names of the tensors of a batch before it is on the device."""


@dataclass(frozen=True, eq=False)
class CachedImages:
    """Decoded images with their classes.

    A sample has ``labels`` and its ``windows``: the ``Window`` of its augmentation as a tensor. With a cache in CPU
    memory it also has its pixels, otherwise its index.
    """

    files: ImageFiles  # the dataset without a cache
    pixels: Tensor  # uint8, shape (images, 3, stored size, stored size)
    on_device: bool  # whether the pixels are on the device of the training

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        image = {INDEX: torch.tensor(index)} if self.on_device else {PIXELS: self.pixels[index]}
        windows, labels = torch.tensor(self.files.draw_window(index)), torch.tensor(self.files.classes[index])
        return {**image, WINDOWS: windows, "labels": labels}

    def set_epoch(self, epoch: int) -> None:
        """Select the augmentations of an epoch."""
        self.files.set_epoch(epoch)

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        """Return a batch on a device with its normalized images; nothing waits for the device."""
        if device.type == "meta":  # FLOPs are counted without data.
            images = torch.empty(len(batch.labels), 3, self.files.size, self.files.size, device=device)
            return replace(batch, inputs={PIXELS: images}, labels=batch.labels.to(device))
        placed = batch.to(device)
        inputs = placed.inputs
        pixels = self.pixels.index_select(0, inputs[INDEX]) if self.on_device else inputs[PIXELS]
        images = normalize_pixels(cut_windows(pixels, inputs[WINDOWS], self.files.size, self.files.margin))
        return replace(placed, inputs={PIXELS: images})


def collate_cached(samples: Sequence[Sample]) -> Batch:
    """Stack the samples of a cache to a batch."""
    stacked = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    labels = stacked.pop("labels")
    counted = int((labels != IGNORE).sum())
    return Batch(stacked, labels, num_samples=counted, num_targets=counted, num_tokens=0)


def cut_windows(pixels: Tensor, windows: Tensor, size: int, margin: int) -> Tensor:
    """Resize, pad, crop and flip each image of a batch, on the device of the batch; return whole float32 numbers.

    Resizing multiplies an image by a matrix on each side. Rows of zeros in the matrix are the padding, and a choice of
    its rows is the crop. So one product on each side does all of it. The pixels are uint8, shape (batch, 3, stored
    size, stored size). The windows have the shape (batch, 3): top and left edge in the padded image, and whether to
    flip.
    """
    batch, channels, stored, _ = pixels.shape
    matrix, steps = _padded_matrix(stored, size, margin, pixels.device)
    top, left, flip = windows[:, :, None].unbind(1)
    rows = matrix[top + steps]  # (batch, size, stored size)
    columns = matrix[left + torch.where(flip.bool(), size - 1 - steps, steps)]
    # Like Pillow, resize rows first and round to whole numbers between the two products.
    wide = torch.bmm(pixels.to(torch.float32).flatten(1, 2), columns.transpose(1, 2))
    wide = _to_levels(wide, exact=stored == size).view(batch, channels, stored, size)
    cut = torch.bmm(rows, wide.transpose(1, 2).flatten(2))
    cut = _to_levels(cut, exact=stored == size).view(batch, size, channels, size)
    return cut.transpose(1, 2)


def _to_levels(pixels: Tensor, *, exact: bool) -> Tensor:
    """Round to whole numbers in place; ``exact``: they are whole already."""
    return pixels if exact else pixels.add_(0.5).floor_()


@cache
def _padded_matrix(stored: int, size: int, margin: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the matrix, shape (size + 2 margin, stored size), that enlarges a column of pixels bilinearly and pads it.

    Also return the positions of the result. They are cached because each copy to the device would block the host.
    """
    centers = (torch.arange(size, dtype=torch.float64) + 0.5) * stored / size
    distances = centers[:, None] - (torch.arange(stored, dtype=torch.float64) + 0.5)
    weights = (1 - distances.abs()).clamp(min=0)
    weights /= weights.sum(dim=1, keepdim=True)  # at the edges a neighbor is missing
    padded = torch.nn.functional.pad(weights, (0, 0, margin, margin))
    return padded.to(device, torch.float32), torch.arange(size, device=device)


def cache_images(data: TaskData, place: str, device: torch.device) -> TaskData:
    """Return a copy of ``data`` whose images are decoded and in memory. Raise ConfigError if they do not fit.

    All ranks need all images, because each epoch shuffles them over the ranks. In CPU memory the ranks of a node share
    them. On GPUs each rank has its own copy.
    """
    sets = [_image_files(samples, place) for samples in (data.train, data.evaluation)]
    empty = torch.empty((0, 3, 0, 0), dtype=torch.uint8)  # of an evaluation set without images
    decoded = [decode_once(files) if len(files) else empty for files in sets]
    _check_memory(sum(pixels.nbytes for pixels in decoded), place, device)
    on_device = place == "gpu"
    if on_device:
        decoded = [pixels.to(device) for pixels in decoded]
    else:
        for pixels in decoded:
            read_ahead(pixels)
    train, evaluation = (CachedImages(files, images, on_device) for files, images in zip(sets, decoded, strict=True))
    return replace(data, train=train, evaluation=evaluation, collate=collate_cached)


def describe_cache(data: TaskData) -> str | None:
    """Return where the images are: ``cpu``, ``gpu``, or ``none`` without a cache; None for text."""
    if not isinstance(data.train, CachedImages):
        return "none" if task_of(data.task).is_image else None
    return "gpu" if data.train.pixels.device.type == "cuda" else "cpu"


def _image_files(samples: Samples, place: str) -> ImageFiles:
    if not isinstance(samples, ImageFiles):
        raise ConfigError(
            f"dataset.cache={place} needs data of distexp.data.images.ImageFiles, but it is {describe_type(samples)}: "
            "use ImageFiles, or dataset.cache=none"
        )
    return samples


def _check_memory(needed: int, place: str, device: torch.device) -> None:
    if place == "gpu" and device.type == "cuda":
        available, _ = torch.cuda.mem_get_info(device)
        memory, hint = f"free memory of {device}", "use dataset.cache=cpu"
    else:
        available = usable_memory()
        memory, hint = "memory of this node", "use dataset.cache=none"
    if needed > MAX_SHARE * available:
        raise ConfigError(
            f"dataset.cache={place} needs {format_memory(needed / MIB)} for the decoded images, which is more than "
            f"{MAX_SHARE:.0%} of the {format_memory(available / MIB)} {memory}: {hint}, or lower dataset.train_size"
        )
