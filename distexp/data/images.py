"""Image files as tensors, their augmentation, and batches of images."""

import hashlib
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Generator, Tensor

from distexp.config import ConfigError
from distexp.data.base import IGNORE, Batch, Sample
from distexp.exceptions import file_size_hint
from distexp.system.cache_dir import build_once, cache_dir
from distexp.system.cgroups import cpu_count

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's channels, for pixels from 0 to 1."""

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
"""Formats that are read. Pillow passes others, such as EPS, to an interpreter, also in a file with another ending."""

CROP_PADDING_DIVISOR = 8
"""Augmentation pads an image by 1/8 of its size on every side before the random crop."""


class DataError(RuntimeError):
    """Data that cannot be read during training."""


class Window(NamedTuple):
    """A crop of a padded image: its top and left edge in pixels, and whether to flip it left to right."""

    top: int
    left: int
    flip: bool


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Image files with their classes.

    A sample is ``images`` of shape (3, size, size), uint8 pixels from 0 to 255, and its class as
    ``labels``, a scalar. The augmentation is a random crop and flip. It depends on seed, epoch and index
    only, not on the number of workers or the reading order.
    The epoch is in shared memory, because persistent loader workers have a copy of everything else.
    """

    root: Path  # folder that ``files`` are relative to
    files: tuple[str, ...]
    classes: tuple[int, ...]  # class of each file
    size: int  # width and height of the samples in pixels; other images are resized
    augment: bool
    seed: int
    epoch: Tensor = field(
        default_factory=lambda: torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
    )
    crops: bool = False  # whether resizing keeps the proportions, and cuts off what is left of the longer edge

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        decoded = decode_image(self.root / self.files[index], self.size, crops=self.crops)
        pixels = torch.from_numpy(decoded).permute(2, 0, 1)
        if self.augment:
            top, left, flip = self.draw_window(index)
            padded = torch.nn.functional.pad(pixels, (self.margin,) * 4)
            cropped = padded[:, top : top + self.size, left : left + self.size]
            pixels = cropped.flip(2) if flip else cropped
        return {"images": pixels, "labels": torch.tensor(self.classes[index])}

    def set_epoch(self, epoch: int) -> None:
        """Select the augmentations of an epoch, in running loader workers too."""
        self.epoch.fill_(epoch)

    @property
    def margin(self) -> int:
        """Pixels of padding on every side before the random crop."""
        return self.size // CROP_PADDING_DIVISOR

    def draw_window(self, index: int) -> Window:
        """Return the augmentation of an image in this epoch. Without augmentation it is the image itself."""
        if not self.augment:
            return Window(self.margin, self.margin, flip=False)
        seed = (self.seed * 100_003 + int(self.epoch)) * 1_000_003 + index
        generator = Generator().manual_seed(seed % 2**63)
        top, left = torch.randint(2 * self.margin + 1, (2,), generator=generator).tolist()
        return Window(top, left, flip=bool(torch.randint(2, (), generator=generator)))


def decode_image(path: Path, size: int | None, *, crops: bool = False) -> NDArray[np.uint8]:
    """Decode an image file to RGB pixels, shape (size, size, 3), or of its own size for None. Raise DataError.

    ``crops``: resize the shorter edge, and keep the center. Otherwise both edges are resized.
    """
    try:
        with Image.open(path, formats=FORMATS) as file:
            image: Image.Image = file
            if file.mode.startswith(("I", "F")):  # Pillow would make bright pixels white.
                pixels = np.asarray(file)
                if pixels.dtype.kind == "f" or pixels.min() < 0 or pixels.max() >= 2**16:
                    raise ValueError(f"its pixels are {pixels.dtype} and not 8 or 16 bits")
                # A TIFF of 32 bits does not state its range, and often has pixels from 0 to 255.
                shift = 0 if file.format == "TIFF" and file.mode == "I" and pixels.max() < 2**8 else 8
                image = Image.fromarray((pixels >> shift).astype(np.uint8))
            image = image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot decode {path} as an image ({error}): restore the file") from error
    if crops and size is not None:
        from torchvision.transforms import functional

        image = functional.center_crop(functional.resize(image, [size]), [size])
    elif size is not None and image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.array(image)


@dataclass(frozen=True)
class ImageBatch(Batch):
    """A batch whose ``images`` are uint8 pixels until they are on the device.

    Pixels take a quarter of the memory of normalized images, in loader workers and in the copy to the device.
    """

    def to(self, device: torch.device) -> Batch:
        """Return a copy on ``device`` with normalized images: float32, channels last."""
        batch = super().to(device)
        inputs = {"images": normalize_pixels(batch.inputs["images"])}
        return Batch(inputs, batch.labels, self.num_samples, self.num_targets, self.num_tokens)


def normalize_pixels(pixels: Tensor) -> Tensor:
    """Convert pixels from 0 to 255, of any data type, to normalized float32 images, as a ResNet expects them.

    The shape (batch, 3, height, width) stays. The memory format is channels-last, which makes convolutions on GPUs
    fastest. The activations of the model then have this format too.
    """
    mean, std = channel_statistics(pixels.device)
    images = pixels.to(torch.float32, memory_format=torch.channels_last)
    return images.div_(255).sub_(mean).div_(std)


@cache
def channel_statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return MEAN and STD on a device, shape (3, 1, 1). They are cached because each copy would block the host."""
    mean, std = (torch.tensor(numbers, device=device)[:, None, None] for numbers in (MEAN, STD))
    return mean, std


def collate_images(samples: Sequence[Sample]) -> ImageBatch:
    """Stack images of uint8 pixels and classes to a batch. Raise DataError for images that are normalized already."""
    labels = torch.stack([sample["labels"] for sample in samples])
    counted = int((labels != IGNORE).sum())
    images = torch.stack([sample["images"] for sample in samples])
    if images.dtype != torch.uint8:
        raise DataError(
            f"collate_images expects torch.uint8 pixels from 0 to 255, not {images.dtype}, because the device "
            "normalizes them: return uint8 pixels, or set TaskData.collate to a function that returns a Batch"
        )
    return ImageBatch({"images": images}, labels, num_samples=counted, num_targets=counted, num_tokens=0)


FORMAT = "images-v2"
"""Prefix of cache entries; another decoding needs a new version."""

CHANNELS = 3
IMAGES_PER_JOB = 1024
"""Images that a process decodes and writes together. Fewer images than that are decoded without processes."""

MAX_PROCESSES = 32


class OtherSizeError(Exception):
    """An image file has another size than the first one."""


@dataclass(frozen=True)
class DecodeJob:
    """Some images to decode, and where to write them."""

    root: Path
    names: tuple[str, ...]
    size: int
    resize: bool
    file: Path
    offset: int  # bytes
    crops: bool


def decode_once(images: ImageFiles) -> Tensor:
    """Return all images of a dataset without augmentation, decoded at the first use: uint8, (images, 3, size, size).

    They are a memory-mapped file, so the processes of a node share one copy in memory. It has the size of the image
    files if they all have one size and it is at most ``dataset.image_size``. Otherwise the images are resized to
    ``dataset.image_size``. Raise ConfigError if the cache directory has not enough space, and DataError if an image is
    missing, damaged or not an image.
    """
    path = build_once(cache_dir() / f"{FORMAT}-{fingerprint(images)}.npy", partial(_build, images))
    # Copy-on-write, because torch warns about arrays that cannot be written to.
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def decoded_bytes(images: ImageFiles) -> int:
    """Return the size of what ``decode_once`` returns, if all images are as large as the first one."""
    height, width, _ = decode_image(images.root / images.files[0], None).shape
    size = images.size if height != width or height > images.size else height
    return len(images) * CHANNELS * size**2


def read_ahead(pixels: Tensor) -> None:
    """Read all pixels of a memory-mapped file, so that later accesses find them in memory."""
    flat, size = pixels.view(-1), 1 << 24
    for start in range(0, len(flat), size):
        flat[start : start + size].max()


def fingerprint(images: ImageFiles) -> str:
    """Return a hash of the names, sizes and times of the files."""
    crops = " crops" if images.crops else ""
    digest = hashlib.sha256(f"{images.root.absolute()} {images.size}{crops}\n".encode())
    for name in images.files:
        try:
            found = (images.root / name).stat()
        except OSError:
            continue  # decode_image raises the error with the path
        digest.update(f"{name}:{found.st_size}:{found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]


def _build(images: ImageFiles, file: Path) -> None:
    """Decode all images to a file; at their own size, if all have the same and it is not larger than requested."""
    height, width, _ = decode_image(images.root / images.files[0], None).shape
    try:
        try:
            if height != width or height > images.size:
                raise OtherSizeError
            _write(images, height, file, resize=False)
        except OtherSizeError:
            _write(images, images.size, file, resize=True)
    except OSError as error:
        room = "free some space, set the environment variable DISTEXP_CACHE to another directory"
        raise ConfigError(
            f"cannot write {len(images)} decoded images to {file.parent} ({error.strerror or error}): "
            f"{file_size_hint(error.errno) or room}, or use dataset.cache=none"
        ) from error


def _write(images: ImageFiles, size: int, file: Path, *, resize: bool) -> None:
    shape = (len(images), CHANNELS, size, size)
    with file.open("wb") as opened:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(opened, header)
    start, parts = file.stat().st_size, range(0, len(images), IMAGES_PER_JOB)
    jobs = [
        DecodeJob(
            images.root,
            images.files[i : i + IMAGES_PER_JOB],
            size,
            resize,
            file,
            start + i * math.prod(shape[1:]),
            images.crops,
        )
        for i in parts
    ]
    print(f"note: decoding {len(images):,} images to {math.prod(shape) / 1e6:,.0f} MB in {file.parent}", flush=True)
    started = last = time.monotonic()
    done = 0
    for count in _run(jobs):
        done += count
        if time.monotonic() - last > 5:
            last = time.monotonic()
            print(f"note: {done:,} of {len(images):,} images are decoded", flush=True)
    print(f"note: decoded {done:,} images in {time.monotonic() - started:.1f} s", flush=True)


def _run(jobs: list[DecodeJob]) -> Iterator[int]:
    processes = min(len(jobs), cpu_count(), MAX_PROCESSES)
    if processes == 1:
        yield from map(_decode, jobs)
        return
    # Forked processes need no second import of torch. They use neither its threads nor the GPU.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_decode, jobs)


def _decode(job: DecodeJob) -> int:
    """Decode the images of a job, write them and return their number. Raise OtherSizeError."""
    pixels: NDArray[np.uint8] = np.empty((len(job.names), CHANNELS, job.size, job.size), dtype=np.uint8)
    for position, name in enumerate(job.names):
        image = decode_image(job.root / name, job.size if job.resize else None, crops=job.crops)
        if image.shape != (job.size, job.size, CHANNELS):
            raise OtherSizeError
        pixels[position] = image.transpose(2, 0, 1)
    with job.file.open("r+b") as file:
        file.seek(job.offset)
        file.write(pixels.data)
    return len(job.names)
