"""Decoded images in one file of the cache directory, so that each image is decoded only once.

The file has the size of the image files if they all have one size and it is at most ``dataset.image_size``. Otherwise
the images are resized to ``dataset.image_size`` before they are written.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distexp.config import ConfigError
from distexp.data.cache import build_once, cache_dir
from distexp.data.images import ImageFiles, decode_image
from distexp.system.hardware import cpu_count

FORMAT = "images-v1"
CHANNELS = 3

IMAGES_PER_JOB = 1024
"""Images that a process decodes and writes together. Fewer images than that are decoded without processes."""

MAX_PROCESSES = 32
PROGRESS_S = 5.0
"""Time between two lines of progress."""

READ_BYTES = 1 << 24


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


def decode_once(images: ImageFiles) -> Tensor:
    """Return all images of a dataset without augmentation, decoded at the first use.

    Returns:
        uint8 pixels, shape (images, 3, size, size). They are a memory-mapped file, so the processes of a node share
        one copy in memory.

    Raises:
        ConfigError: the cache directory has not enough space.
        DataError: an image is missing, damaged or not an image.
    """
    path = build_once(cache_dir() / f"{FORMAT}-{_fingerprint(images)}.npy", partial(_build, images))
    # Copy-on-write, because torch warns about arrays that cannot be written to.
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def decoded_bytes(images: ImageFiles) -> int:
    """Return the size of what ``decode_once`` returns, if all images are as large as the first one."""
    height, width, _ = decode_image(images.root / images.files[0], None).shape
    size = images.size if height != width or height > images.size else height
    return len(images) * CHANNELS * size**2


def read_ahead(pixels: Tensor) -> None:
    """Read all pixels of a memory-mapped file, so that later accesses find them in memory."""
    flat = pixels.view(-1)
    for start in range(0, len(flat), READ_BYTES):
        flat[start : start + READ_BYTES].max()


def _fingerprint(images: ImageFiles) -> str:
    """Return a hash of the names, sizes and times of the files."""
    digest = hashlib.sha256(f"{images.root.absolute()} {images.size}\n".encode())
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
        raise ConfigError(
            f"cannot write {len(images)} decoded images to {file.parent} ({error.strerror or error}): free some space, "
            "set the environment variable DISTEXP_CACHE to another directory, or use dataset.cache=none"
        ) from error


def _write(images: ImageFiles, size: int, file: Path, *, resize: bool) -> None:
    """Decode all images in parallel, and print the progress."""
    shape = (len(images), CHANNELS, size, size)
    with file.open("wb") as opened:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(opened, header)
    jobs = list(_split(images, size, file, file.stat().st_size, resize=resize))
    print(f"note: decoding {len(images):,} images to {math.prod(shape) / 1e6:,.0f} MB in {file.parent}", flush=True)
    started = last = time.monotonic()
    done = 0
    for count in _run(jobs):
        done += count
        if time.monotonic() - last > PROGRESS_S:
            last = time.monotonic()
            print(f"note: {done:,} of {len(images):,} images are decoded", flush=True)
    print(f"note: decoded {done:,} images in {time.monotonic() - started:.1f} s", flush=True)


def _split(images: ImageFiles, size: int, file: Path, start: int, *, resize: bool) -> Iterator[DecodeJob]:
    for first in range(0, len(images), IMAGES_PER_JOB):
        names = images.files[first : first + IMAGES_PER_JOB]
        yield DecodeJob(images.root, names, size, resize, file, start + first * CHANNELS * size**2)


def _run(jobs: list[DecodeJob]) -> Iterator[int]:
    """Yield the number of images of each finished job."""
    processes = min(len(jobs), cpu_count(), MAX_PROCESSES)
    if processes == 1:
        yield from map(_decode, jobs)
        return
    # Forked processes need no second import of torch. They use neither its threads nor the GPU.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_decode, jobs)


def _decode(job: DecodeJob) -> int:
    """Decode the images of a job, write them and return their number.

    Raises:
        OtherSizeError: an image has another size, and the job does not resize.
    """
    pixels: NDArray[np.uint8] = np.empty((len(job.names), CHANNELS, job.size, job.size), dtype=np.uint8)
    for position, name in enumerate(job.names):
        image = decode_image(job.root / name, job.size if job.resize else None)
        if image.shape != (job.size, job.size, CHANNELS):
            raise OtherSizeError
        pixels[position] = image.transpose(2, 0, 1)
    with job.file.open("r+b") as file:
        file.seek(job.offset)
        file.write(pixels.data)
    return len(job.names)
