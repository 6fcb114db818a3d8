"""Memory of decoded images, estimated without decoding them."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from distexp.config import DatasetConfig

MAX_CPU_BYTES = 64 * 10**9
"""Decoded images that are kept in CPU memory without an explicit ``dataset.cache``."""

CHANNELS = 3


GENERATED = (500, 32)
"""Number of the images of ``dataset=tinyimagenet_sample``, and their height and width in pixels."""


def estimate_image_bytes(dataset: DatasetConfig) -> int | None:
    """Return the bytes that ``dataset.cache`` needs, if all images are as large as the first one.

    Returns:
        The bytes, or None if the folder cannot be read, which another check reports.
    """
    images = GENERATED if dataset.root is None else _measure_folder(dataset.root)
    if images is None:
        return None
    count, edge = images
    if dataset.train_size is not None and dataset.eval_size is not None:
        count = dataset.train_size + dataset.eval_size
    return count * CHANNELS * min(edge, dataset.image_size or edge) ** 2


@lru_cache(maxsize=8)
def _measure_folder(root: str) -> tuple[int, int] | None:
    """Count the images in a folder of TinyImageNet's layout, and measure the larger edge of one of them."""
    from PIL import Image

    try:
        folders = [Path(root, "val", "images"), *(Path(entry, "images") for entry in os.scandir(Path(root, "train")))]
        count = sum(len(os.listdir(folder)) for folder in folders)
        with Image.open(next(folders[0].iterdir())) as image:
            return count, max(image.size)
    except (OSError, StopIteration):
        return None
