"""Generated images in TinyImageNet's official layout: the stripes' angle, width and colour tell the class."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.data import tinyimagenet
from distexp.data.base import TaskData
from distexp.data.cache import build_once, cache_dir

FORMAT = "tinyimagenet-sample-v1"
CLASSES = 10
TRAIN_SIZE, EVAL_SIZE = 400, 100
SIZE = 32
"""Pixels of a side."""

GREY_EVERY = 20
"""One image in so many is grey-scale, as some of ImageNet's are."""

NOISE = 50.0
"""Standard deviation of the noise on each pixel, of 255."""

COLOURS = {"red": (220, 60, 50), "blue": (50, 90, 220)}


def load(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """As ``tinyimagenet.load``, from 400 and 100 images generated on first use, or more when asked for."""
    if dataset.root is not None:
        raise ConfigError(
            f"dataset.root={dataset.root} means nothing to dataset={dataset.name}, which generates its "
            "images: leave it out, or choose dataset=tinyimagenet"
        )
    root = sample_folder(max(TRAIN_SIZE, dataset.train_size or 0), max(EVAL_SIZE, dataset.eval_size or 0))
    return tinyimagenet.load(replace(dataset, root=str(root)), model, seed)


def sample_folder(train: int, val: int) -> Path:
    """The generated folder, from the cache, with at least ``train`` and ``val`` images."""
    path = cache_dir() / f"{FORMAT}-{train}-{val}"
    return build_once(path, partial(write, train=train, val=val))


def write(root: Path, *, train: int, val: int) -> None:
    """Writes at least ``train`` and ``val`` images, as many of each class."""
    wnids = [f"n{90_000_000 + label:08d}" for label in range(CLASSES)]
    root.mkdir()
    (root / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in wnids))
    (root / "words.txt").write_text("".join(f"{wnid}\t{_name(label)}\n" for label, wnid in enumerate(wnids)))
    for label, wnid in enumerate(wnids):
        folder = root / "train" / wnid
        (folder / "images").mkdir(parents=True)
        names = [f"{wnid}_{number}.JPEG" for number in range(math.ceil(train / CLASSES))]
        for number, name in enumerate(names):
            _draw(label, 0, number).save(folder / "images" / name, quality=90)
        (folder / f"{wnid}_boxes.txt").write_text("".join(f"{name}\t{_box()}\n" for name in names))
    _write_val(root / "val", wnids, math.ceil(val / CLASSES))


def _write_val(folder: Path, wnids: list[str], of_each: int) -> None:
    (folder / "images").mkdir(parents=True)
    lines = []
    for number in range(of_each):
        for label, wnid in enumerate(wnids):
            name = f"val_{number * CLASSES + label}.JPEG"
            _draw(label, 1, number).save(folder / "images" / name, quality=90)
            lines.append(f"{name}\t{wnid}\t{_box()}\n")
    (folder / "val_annotations.txt").write_text("".join(lines))


def _name(label: int) -> str:
    angle, colour, _ = _look(label)
    return f"{colour} stripes at {angle} degrees"


def _look(label: int) -> tuple[int, str, float]:
    """Angle in degrees, colour, and pixels from stripe to stripe."""
    kind, colour = divmod(label, len(COLOURS))
    return 36 * kind, list(COLOURS)[colour], 6.0 + 2.0 * (kind % 3)


def _draw(label: int, split: int, number: int) -> Image.Image:
    chance = np.random.Generator(np.random.PCG64([label, split, number]))
    angle, colour, period = _look(label)
    turned = math.radians(angle + chance.uniform(-8, 8))
    rows, columns = np.mgrid[0:SIZE, 0:SIZE]
    along = (columns * math.cos(turned) + rows * math.sin(turned)) * 2 * math.pi / period
    bright = 0.5 + 0.5 * np.sin(along + chance.uniform(0, 2 * math.pi))
    pixels = bright[:, :, None] * np.array(COLOURS[colour]) + chance.normal(0, NOISE, (SIZE, SIZE, 3))
    image = Image.fromarray(_bytes(pixels))
    return image.convert("L") if number % GREY_EVERY == GREY_EVERY // 2 else image


def _bytes(pixels: NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.clip(pixels, 0, 255).astype(np.uint8)


def _box() -> str:
    return f"0\t0\t{SIZE - 1}\t{SIZE - 1}"
