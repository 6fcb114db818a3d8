"""Generated images in the official layout of TinyImageNet: a class is the angle, period and color of stripes."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.config.model_checks import TINYIMAGENET_SAMPLE_EVAL, TINYIMAGENET_SAMPLE_TRAIN
from distexp.data import tinyimagenet
from distexp.data.base import TaskData
from distexp.system.cache_dir import build_once, cache_dir

FORMAT = "tinyimagenet-sample-v1"
CLASSES = 10
SIZE = 32
"""Width and height of an image in pixels."""

BOX = f"0\t0\t{SIZE - 1}\t{SIZE - 1}"
"""Bounding box of the whole image."""

GRAYSCALE_PERIOD = 20
"""One in 20 images is grayscale, because ImageNet has grayscale images too."""

COLORS = {"red": (220, 60, 50), "blue": (50, 90, 220)}


def load(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Load images that are generated on first use: as many as in ``model_checks``, or as ``dataset`` requests.

    Raise ConfigError if ``dataset.root`` is set.
    """
    if dataset.root is not None:
        raise ConfigError(
            f"dataset.root={dataset.root} has no effect with dataset={dataset.name}, because its images are "
            "generated: remove dataset.root, or use dataset=tinyimagenet"
        )
    train = max(TINYIMAGENET_SAMPLE_TRAIN, dataset.train_size or 0)
    val = max(TINYIMAGENET_SAMPLE_EVAL, dataset.eval_size or 0)
    path = cache_dir() / f"{FORMAT}-{train}-{val}"
    root = build_once(path, partial(write_images, train=train, val=val))
    return tinyimagenet.load(replace(dataset, root=str(root)), model, seed)


def write_images(root: Path, *, train: int, val: int) -> None:
    """Write at least ``train`` and ``val`` images, with the same number of each class."""
    wnids = [f"n{90_000_000 + label:08d}" for label in range(CLASSES)]
    stripes = map(_stripes, range(CLASSES))
    names = [f"{color} stripes at {angle} degrees" for angle, color, _ in stripes]
    root.mkdir()
    (root / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in wnids))
    (root / "words.txt").write_text("".join(f"{wnid}\t{name}\n" for wnid, name in zip(wnids, names, strict=True)))
    for label, wnid in enumerate(wnids):
        folder = root / "train" / wnid
        (folder / "images").mkdir(parents=True)
        files = [f"{wnid}_{number}.JPEG" for number in range(math.ceil(train / CLASSES))]
        for number, file in enumerate(files):
            _draw(label, 0, number).save(folder / "images" / file, quality=90)
        (folder / f"{wnid}_boxes.txt").write_text("".join(f"{file}\t{BOX}\n" for file in files))
    _write_val(root / "val", wnids, math.ceil(val / CLASSES))


def _write_val(folder: Path, wnids: list[str], images_per_class: int) -> None:
    (folder / "images").mkdir(parents=True)
    lines = []
    for number in range(images_per_class):
        for label, wnid in enumerate(wnids):
            name = f"val_{number * CLASSES + label}.JPEG"
            _draw(label, 1, number).save(folder / "images" / name, quality=90)
            lines.append(f"{name}\t{wnid}\t{BOX}\n")
    (folder / "val_annotations.txt").write_text("".join(lines))


def _stripes(label: int) -> tuple[int, str, float]:
    """Return the stripes of a class: angle in degrees, color, and period in pixels."""
    kind, color = divmod(label, len(COLORS))
    return 36 * kind, list(COLORS)[color], 6.0 + 2.0 * (kind % 3)


def _draw(label: int, split: int, number: int) -> Image.Image:
    rng = np.random.Generator(np.random.PCG64([label, split, number]))
    angle, color, period = _stripes(label)
    turned = math.radians(angle + rng.uniform(-8, 8))
    rows, columns = np.mgrid[0:SIZE, 0:SIZE]
    along = (columns * math.cos(turned) + rows * math.sin(turned)) * 2 * math.pi / period
    bright = 0.5 + 0.5 * np.sin(along + rng.uniform(0, 2 * math.pi))
    noise = rng.normal(0, 50, (SIZE, SIZE, 3))  # of pixels from 0 to 255
    pixels = bright[:, :, None] * np.array(COLORS[color]) + noise
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    return image.convert("L") if number % GRAYSCALE_PERIOD == GRAYSCALE_PERIOD // 2 else image
